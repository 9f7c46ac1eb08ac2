//! How the kernel's nftables table is told what [`clustermesh_agent_core::firewall`] wants: a trait, the `nft` backend, one
//! in memory, and the keeper that writes no more than changed. What the table says is not decided here.

use std::{future::Future, io, path::PathBuf};

use clustermesh_agent_core::firewall::{Firewall, Update, update};

pub(crate) mod generation;
mod memory;
mod nft;
mod stamp;
mod watch;

pub(crate) use generation::Generation;
pub use memory::Memory;
pub use nft::Nft;
pub use stamp::Stamp;
pub use watch::Watch;

/// Where a table is kept.
pub trait Backend: Send {
    /// Our table as it reads now; `None` = there is none. No other table is looked at.
    fn observe(&mut self) -> impl Future<Output = Result<Option<Listing>, Error>> + Send;

    /// Runs one transaction: all of it or, on an error, nothing.
    fn run(&mut self, script: &str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Takes our table away; none there is no error.
    fn destroy(&mut self) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A table as a reader shows it, without counters and handles: two listings are equal where nobody wrote in between.
/// nft prints masks and flags its own way, so a listing is compared with a listing, never with what was written.
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
    /// It did not end in time.
    #[error("nft did not end within {0} s; is another program holding the kernel's nftables lock?")]
    Timeout(u64),
    /// Another program or the kernel ended it.
    #[error("nft was ended by signal {}{}", .0, killed(*.0))]
    Killed(i32),
    /// It said no.
    #[error("nft refused {what}: {stderr}{}", hint(stderr))]
    Refused {
        /// What was asked.
        what: &'static str,
        /// The first lines of its answer.
        stderr: String,
    },
    /// It printed something else than it should.
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

/// Keeps our table as it should be: remembers what it wrote last and how that read, so that it sees the work of other
/// hands and writes no more than changed.
#[derive(Debug)]
pub struct Keeper<B> {
    backend: B,
    written: Option<(Firewall, Listing)>,
    stamp: Option<Stamp>,
}

impl<B: Backend> Keeper<B> {
    /// A keeper that has written nothing yet: its first pass writes the table whole, in one step over what is there.
    pub const fn new(backend: B) -> Self {
        Self {
            backend,
            written: None,
            stamp: None,
        }
    }

    /// The same, which knows by `stamp` the table that an earlier process wrote: where that is the one wanted, nothing is
    /// written.
    #[must_use]
    pub fn remembering(self, stamp: Stamp) -> Self {
        Self {
            stamp: Some(stamp),
            ..self
        }
    }

    /// Whether the table in the kernel is as this keeper wrote it last.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn intact(&mut self) -> Result<bool, Error> {
        let there = self.backend.observe().await?;
        Ok(self.is_written(there.as_ref()))
    }

    /// Whether a table of this keeper's stands, as far as it knows.
    #[must_use]
    pub const fn has_written(&self) -> bool {
        self.written.is_some()
    }

    fn is_written(&self, there: Option<&Listing>) -> bool {
        there == self.written.as_ref().map(|(_, listing)| listing)
    }

    /// Forgets what is not there any more, and takes over what an earlier process wrote.
    fn recognise(&mut self, desired: &Firewall, there: Option<&Listing>) {
        if !self.is_written(there) {
            let known = |there: &&Listing| self.stamp.as_ref().is_some_and(|stamp| stamp.knows(desired, there));
            self.written = there.filter(known).map(|there| (desired.clone(), there.clone()));
        }
    }

    /// Makes the table `desired`: nothing if it is, elements of sets if only they differ, the whole table otherwise or
    /// where another hand was at it. Returns what was run.
    ///
    /// # Errors
    /// When it cannot be read or written; the kernel then has the table as it was, or a part of the step, and the next pass goes
    /// on from there.
    pub async fn converge(&mut self, desired: &Firewall) -> Result<Option<Update>, Error> {
        let there = self.backend.observe().await?;
        self.recognise(desired, there.as_ref());
        let Some(mut step) = update(self.written.as_ref().map(|(firewall, _)| firewall), desired) else {
            return Ok(None);
        };
        if let Err(error) = self.take(&step).await {
            // Someone may have changed an element since we looked: the whole table always fits.
            let Some(whole) = update(None, desired).filter(|_| matches!(step, Update::Elements { .. })) else {
                return Err(error);
            };
            step = whole;
            self.take(&step).await?;
        }
        let listing = self.backend.observe().await?;
        self.written = listing.map(|listing| (desired.clone(), listing));
        if let Some(stamp) = &self.stamp {
            stamp.set(self.written.as_ref());
        }
        Ok(Some(step))
    }

    async fn take(&mut self, step: &Update) -> Result<(), Error> {
        for script in step.scripts() {
            self.backend.run(script).await?;
        }
        Ok(())
    }

    /// Takes the table away.
    ///
    /// # Errors
    /// When it is still there.
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
