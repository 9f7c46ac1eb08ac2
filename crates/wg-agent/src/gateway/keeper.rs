//! Keeps the table: writes the smallest step from what was written last, all of it where another hand wrote to nftables in
//! between, and ends the connections that belong to no grant any more. No transaction is larger than [`Table::step`] makes it,
//! because `nft` runs in the memory of this container.

use std::{collections::BTreeSet, time::Instant};

use clustermesh_agent_core::gateway::{GrantId, Table, alive, update};

use super::connections;
use crate::firewall::{Backend, Error, Generation, Nft, generation};

/// What was written last.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    nft: Nft,
    written: Option<Written>,
    /// Until when it may be open; `None` = the API server has not answered yet.
    until: Option<Instant>,
    /// Connections may stand that the written table knows nothing of.
    unswept: bool,
}

/// What the last transaction made.
#[derive(Debug)]
struct Written {
    table: Table,
    /// The generation that it made; `None` = another program wrote to nftables, so the table is written whole.
    at: Option<Generation>,
    /// The table is being written whole and has not all its grants yet, so it stays closed.
    partial: bool,
}

/// What one step came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Lines that were written.
    pub(super) changes: usize,
    /// The table is as desired. Otherwise the next step is to be taken at once.
    pub(super) finished: bool,
}

impl Keeper {
    /// Whether a table stands, this keeper's or that of a process before. `nft` would list all of it: 208 MB for 10,000 grants.
    pub(super) fn stands(&self) -> bool {
        self.written.is_some() || generation::has_table().unwrap_or(false)
    }

    /// Whether this keeper has written the table that stands.
    pub(super) const fn has_written(&self) -> bool {
        self.written.is_some()
    }

    /// Whether the API server has answered, so that a table that is written whole is open.
    pub(super) const fn is_renewed(&self) -> bool {
        self.until.is_some()
    }

    /// Whether no other program wrote to nftables since. Before the first table is written there is nothing to lose.
    pub(super) fn is_current(&self) -> bool {
        let now = generation::now().ok();
        self.written
            .as_ref()
            .is_none_or(|last| last.at.is_some() && last.at == now)
    }

    /// Takes one step toward the table `desired`.
    ///
    /// # Errors
    /// When it cannot be written; the kernel then has the table as it was.
    pub(super) async fn converge(&mut self, desired: &Table) -> Result<Progress, Error> {
        let mut before = generation::now().ok();
        let ours = |last: &Written| last.at.is_some() && last.at == before && last.table.frame == desired.frame;
        let old = self.written.take().filter(ours);
        let mut whole = old.as_ref().is_none_or(|old| old.partial);
        let old = old.map(|old| old.table);
        let mut next = Table::step(old.as_ref(), desired);
        let mut script = update(old.as_ref(), &next).unwrap_or_default();
        if whole && next == *desired {
            script.push_str(&self.open(desired));
        }
        self.unswept |= old
            .as_ref()
            .is_none_or(|old| !old.standing().is_subset(&next.standing()));
        if script.is_empty() {
            let finished = next == *desired;
            self.written = Some(Written {
                table: next,
                at: before,
                partial: whole && !finished,
            });
        } else {
            if let Err(error) = self.nft.run(&script).await {
                // Somebody may have changed a part since it was looked at: the whole table always fits. One that is written whole
                // already is begun again only after a pause.
                if whole {
                    return Err(error);
                }
                tracing::warn!(%error, "the whole table is written instead");
                (whole, self.unswept) = (true, true);
                next = Table::step(None, desired);
                script = update(None, &next).unwrap_or_default();
                if next == *desired {
                    script.push_str(&self.open(desired));
                }
                before = generation::now().ok();
                self.nft.run(&script).await?;
            }
            let partial = whole && next != *desired;
            self.wrote(next, before, partial);
        }
        let finished = self.written.as_ref().is_some_and(|last| last.table == *desired);
        if finished {
            self.sweep(desired).await;
        }
        Ok(Progress {
            changes: script.lines().count(),
            finished,
        })
    }

    /// `before` = the generation before one transaction. What another program wrote between two looks may have deleted the table.
    fn wrote(&mut self, table: Table, before: Option<Generation>, partial: bool) {
        let at = before.map(Generation::next);
        let alone = at.is_some() && at == generation::now().ok();
        let at = at.filter(|_| alone);
        self.written = Some(Written { table, at, partial });
    }

    async fn sweep(&mut self, table: &Table) {
        if !self.unswept {
            return;
        }
        let standing: BTreeSet<(GrantId, _)> = table.standing();
        match tokio::task::spawn_blocking(move || connections::sweep(&standing)).await {
            Ok(Ok(ended)) => {
                self.unswept = false;
                if ended > 0 {
                    tracing::info!(ended, "connections whose grant or endpoint is gone");
                }
            }
            // The table lets none of their packets through; the next pass tries again.
            Ok(Err(error)) => tracing::warn!(%error, "cannot end connections whose grant or endpoint is gone"),
            Err(error) => tracing::error!(%error, "the thread that ends connections died"),
        }
    }

    /// What a table that is written whole is open by, for as long as the one before would have been.
    fn open(&self, table: &Table) -> String {
        let left = self
            .until
            .and_then(|until| until.checked_duration_since(Instant::now()));
        left.map_or_else(String::new, |left| alive(&table.frame, left))
    }

    /// Keeps it open until then. A table that is being written whole is opened by its last step.
    ///
    /// # Errors
    /// When it cannot be written: the table is written whole by the next [`Self::converge`].
    pub(super) async fn renew(&mut self, until: Instant) -> Result<(), Error> {
        self.until = Some(until);
        let Some(last) = self.written.take_if(|last| !last.partial) else {
            return Ok(());
        };
        self.nft.run(&self.open(&last.table)).await?;
        self.wrote(last.table, last.at, false);
        Ok(())
    }

    /// For `/debug/state`.
    pub(super) fn text(&self) -> Vec<String> {
        let script = self.written.as_ref().and_then(|last| update(None, &last.table));
        script
            .iter()
            .flat_map(|script| script.lines())
            .map(str::to_owned)
            .collect()
    }
}

#[cfg(test)]
mod tests;
