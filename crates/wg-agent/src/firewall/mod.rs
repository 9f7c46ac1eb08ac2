//! Applies the desired table of [`clustermesh_agent_core::firewall`]. [`FirewallManager`] changes only set elements if possible, and
//! replaces the whole table otherwise. The trait [`Backend`] has an implementation with `nft` and one in memory.

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

/// Access to the agent's table.
pub trait Backend: Send {
    /// Lists the agent's table; `None` = it does not exist.
    fn observe(&mut self) -> impl Future<Output = Result<Option<Listing>, Error>> + Send;

    /// Runs one transaction. On an error, nothing of it is applied.
    fn run(&mut self, script: &str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Deletes the agent's table; a missing table is no error.
    fn destroy(&mut self) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A table as `nft -j` lists it, without handles, counters and the remaining time of elements. Two listings are equal if
/// nothing was written and no element expired between them. nft prints masks and flags in its own form, so a listing can only be
/// compared with another listing.
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
    #[error("cannot start {}: {source}; the nft program of nftables 1.0.6 or newer must be in the image or on the node", .program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// nft did not exit in time.
    #[error("nft did not exit within {0} s; does another program hold the kernel's nftables lock?")]
    Timeout(u64),
    /// nft was killed by a signal.
    #[error("nft was killed by signal {}{}", .0, sigkill_hint(*.0))]
    Killed(i32),
    /// nft reported an error.
    #[error("nft refused {what}: {stderr}{}", hint(stderr))]
    Refused {
        /// The refused operation.
        what: &'static str,
        /// The first lines of stderr.
        stderr: String,
    },
    /// The output could not be parsed.
    #[error("cannot read the answer of nft -j: {0}")]
    Answer(String),
}

/// A hint for SIGKILL, which the kernel sends to a process of a container that exceeds its memory limit.
const fn sigkill_hint(signal: i32) -> &'static str {
    if signal == libc::SIGKILL {
        "; out of memory? Raise the memory limit of this container (resources.limits.memory)"
    } else {
        ""
    }
}

fn hint(stderr: &str) -> &'static str {
    if stderr.contains("Operation not permitted") {
        "; the capability NET_ADMIN is needed, and no other program may own a table of this name"
    } else if stderr.contains("Operation not supported") || stderr.contains("No such file or directory") {
        "; the kernel may lack a module: nf_tables, nft_fib_inet, nft_ct, nft_nat, nft_masq, nf_conntrack are needed"
    } else {
        ""
    }
}

/// Applies the desired table. Stores the table that it wrote or recognized last, to find the set elements that change, and the listing
/// of that table, to detect external changes.
#[derive(Debug)]
pub struct FirewallManager<B> {
    backend: B,
    written: Option<(Firewall, Listing)>,
    record: Option<TableRecord>,
}

impl<B: Backend> FirewallManager<B> {
    /// A manager that has written nothing yet. Without a record ([`Self::with_record`]), its first pass replaces the whole table.
    pub const fn new(backend: B) -> Self {
        Self {
            backend,
            written: None,
            record: None,
        }
    }

    /// Uses `record` to recognize a table that an earlier process wrote. If it is the desired table, nothing is written.
    #[must_use]
    pub fn with_record(self, record: TableRecord) -> Self {
        Self {
            record: Some(record),
            ..self
        }
    }

    /// Whether the table in the kernel is the one that this manager wrote or recognized last. Also true if it did neither and
    /// the kernel has no table.
    ///
    /// # Errors
    /// The table cannot be listed.
    pub async fn matches_kernel(&mut self) -> Result<bool, Error> {
        let listing = self.backend.observe().await?;
        Ok(self.is_last_listing(listing.as_ref()))
    }

    /// Whether this manager knows the table: it wrote it, or recognized a table that an earlier process wrote. False again after
    /// [`Self::destroy`], or if [`Self::converge`] cannot repair an external change.
    #[must_use]
    pub const fn knows_table(&self) -> bool {
        self.written.is_some()
    }

    fn is_last_listing(&self, listing: Option<&Listing>) -> bool {
        listing == self.written.as_ref().map(|(_, written)| written)
    }

    /// Updates `written` if the kernel's table is not the one in `written`: to `desired` if the record shows that an earlier
    /// process wrote `desired` and the kernel's table is unchanged since then, else to `None`.
    fn recognize(&mut self, desired: &Firewall, listing: Option<&Listing>) {
        if !self.is_last_listing(listing) {
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

    /// Makes the kernel's table equal to `desired`. Changes only set elements if [`update`] finds that this is enough. Replaces the whole
    /// table otherwise, after an external change, and when changing the elements fails. Returns what was written; `None` = the table was
    /// already equal.
    ///
    /// # Errors
    /// The table cannot be listed or written. The kernel then has the old table, or a part or all of the update. The next
    /// pass tries again.
    pub async fn converge(&mut self, desired: &Firewall) -> Result<Option<Update>, Error> {
        let listing = self.backend.observe().await?;
        self.recognize(desired, listing.as_ref());
        let Some(mut step) = update(self.written.as_ref().map(|(firewall, _)| firewall), desired) else {
            return Ok(None);
        };
        if let Err(error) = self.run_scripts(&step).await {
            // Another program may have changed an element since the listing. Replacing the whole table works even then.
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
        self.backend.destroy().await?;
        self.written = None;
        Ok(())
    }

    /// The backend.
    pub const fn backend(&mut self) -> &mut B {
        &mut self.backend
    }
}

#[cfg(test)]
mod tests;
