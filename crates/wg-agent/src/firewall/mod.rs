//! Applies the table that [`clustermesh_agent_core::firewall`] desires: the trait [`Backend`] with an `nft` and an
//! in-memory implementation, and [`FirewallManager`], which writes only what changed.

use std::{future::Future, io, path::PathBuf};

use clustermesh_agent_core::firewall::{Firewall, Update, update};

pub(crate) mod generation;
mod memory;
mod nft;
mod table_record;
mod watch;

pub(crate) use generation::Generation;
pub use memory::Memory;
pub use nft::Nft;
pub use table_record::TableRecord;
pub use watch::Watch;

/// A place where the agent's table is stored.
pub trait Backend: Send {
    /// Lists our table; `None` = there is none. Other tables are ignored.
    fn observe(&mut self) -> impl Future<Output = Result<Option<Listing>, Error>> + Send;

    /// Runs one transaction: all of it is applied or, on an error, nothing.
    fn run(&mut self, script: &str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Deletes our table; a missing one is no error.
    fn destroy(&mut self) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A table as `nft -j` lists it, without counters and handles: two listings are equal if nothing was written in
/// between. nft prints masks and flags in its own form, so a listing can only be compared with another listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing(serde_json::Value);

impl Listing {
    /// The objects of the listing, as `nft -j` names them.
    #[must_use]
    pub const fn json(&self) -> &serde_json::Value {
        &self.0
    }
}

/// Why the table could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program could not be started.
    #[error("cannot start {}: {source}; the nft program of nftables 1.0 or newer must be in the image or on the node", .program.display())]
    Start {
        /// What was to be started.
        program: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// nft did not exit in time.
    #[error("nft did not end within {0} s; is another program holding the kernel's nftables lock?")]
    Timeout(u64),
    /// nft was killed by a signal.
    #[error("nft was ended by signal {}{}", .0, killed(*.0))]
    Killed(i32),
    /// nft reported an error.
    #[error("nft refused {what}: {stderr}{}", hint(stderr))]
    Refused {
        /// What was to be done.
        what: &'static str,
        /// The first lines of stderr.
        stderr: String,
    },
    /// The output could not be parsed.
    #[error("cannot read the answer of nft -j: {0}")]
    Answer(String),
}

/// The kernel sends SIGKILL to a process of a container that exceeds its memory limit.
const fn killed(signal: i32) -> &'static str {
    if signal == libc::SIGKILL {
        "; out of memory? Raise the memory limit of this container (resources.limits.memory)"
    } else {
        ""
    }
}

fn hint(stderr: &str) -> &'static str {
    if stderr.contains("Operation not permitted") {
        "; this needs the capability NET_ADMIN, and that no other program owns a table of this name"
    } else if stderr.contains("Operation not supported") || stderr.contains("No such file or directory") {
        "; the kernel may lack a module: nf_tables, nft_fib_inet, nft_ct, nft_nat, nft_masq, nf_conntrack are needed"
    } else {
        ""
    }
}

/// Applies the desired table. Remembers what it wrote last and how that was listed, so that it detects external changes
/// and writes only what changed.
#[derive(Debug)]
pub struct FirewallManager<B> {
    backend: B,
    written: Option<(Firewall, Listing)>,
    record: Option<TableRecord>,
}

impl<B: Backend> FirewallManager<B> {
    /// A manager that has written nothing yet: its first pass replaces the whole table in one transaction.
    pub const fn new(backend: B) -> Self {
        Self {
            backend,
            written: None,
            record: None,
        }
    }

    /// Uses `record` to recognize the table that an earlier process wrote: if it is the desired one, nothing is
    /// written.
    #[must_use]
    pub fn with_record(self, record: TableRecord) -> Self {
        Self {
            record: Some(record),
            ..self
        }
    }

    /// Whether the table in the kernel is as this manager wrote it last.
    ///
    /// # Errors
    /// The table cannot be listed.
    pub async fn matches_kernel(&mut self) -> Result<bool, Error> {
        let listing = self.backend.observe().await?;
        Ok(self.was_written_as(listing.as_ref()))
    }

    /// Whether this manager wrote the table, or recognized it as an earlier process's, at its last pass.
    #[must_use]
    pub const fn has_written(&self) -> bool {
        self.written.is_some()
    }

    fn was_written_as(&self, listing: Option<&Listing>) -> bool {
        listing == self.written.as_ref().map(|(_, written)| written)
    }

    /// If the kernel's table is not the one written last, forgets that one. If the record says that an earlier process
    /// wrote the kernel's table as `desired`, remembers it as written.
    fn recognize(&mut self, desired: &Firewall, listing: Option<&Listing>) {
        if !self.was_written_as(listing) {
            let is_known = |listing: &&Listing| {
                self.record
                    .as_ref()
                    .is_some_and(|record| record.matches(desired, listing))
            };
            self.written = listing
                .filter(is_known)
                .map(|listing| (desired.clone(), listing.clone()));
        }
    }

    /// Makes the kernel's table equal to `desired`. Writes nothing if it is equal, only set elements if nothing else
    /// differs, and the whole table otherwise or after an external change. Returns what was written.
    ///
    /// # Errors
    /// The table cannot be listed or written. The kernel then has the old table or a part of the update, and the next
    /// pass continues from there.
    pub async fn converge(&mut self, desired: &Firewall) -> Result<Option<Update>, Error> {
        let listing = self.backend.observe().await?;
        self.recognize(desired, listing.as_ref());
        let Some(mut step) = update(self.written.as_ref().map(|(firewall, _)| firewall), desired) else {
            return Ok(None);
        };
        if let Err(error) = self.run_scripts(&step).await {
            // An external program may have changed an element since the listing. Writing the whole table always works.
            let Some(whole) = update(None, desired).filter(|_| matches!(step, Update::Elements { .. })) else {
                return Err(error);
            };
            step = whole;
            self.run_scripts(&step).await?;
        }
        let listing = self.backend.observe().await?;
        self.written = listing.map(|listing| (desired.clone(), listing));
        if let Some(record) = &self.record {
            record.set(self.written.as_ref());
        }
        Ok(Some(step))
    }

    async fn run_scripts(&mut self, step: &Update) -> Result<(), Error> {
        for script in step.scripts() {
            self.backend.run(script).await?;
        }
        Ok(())
    }

    /// Deletes the table.
    ///
    /// # Errors
    /// The table still exists.
    pub async fn destroy(&mut self) -> Result<(), Error> {
        self.written = None;
        self.backend.destroy().await
    }

    /// The backend.
    pub const fn backend(&mut self) -> &mut B {
        &mut self.backend
    }
}

#[cfg(test)]
mod tests;
