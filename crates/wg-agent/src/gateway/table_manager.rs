//! Applies the gateway's firewall table. Writes only what differs from the last written table, or the whole table at
//! the start, after an external change or a failed write, or if its parameters change. Then deletes conntrack entries
//! whose grant or endpoint was removed, if there can be any. [`Table::step`] limits the size of a transaction, because
//! `nft` runs within the memory limit of this container.

use std::{collections::BTreeSet, time::Instant};

use clustermesh_agent_core::gateway::{GrantId, Table, render_renewal, update};

use super::connections;
use crate::firewall::{Backend, Error, Generation, Nft, generation};

/// Writes the table and stores the last written one.
#[derive(Debug, Default)]
pub(super) struct TableManager {
    nft: Nft,
    /// `None` = this process has not written the table yet, or its last write failed.
    written: Option<Written>,
    /// Until when the table may be open: an open table forwards packets of the tunnel. `None` = the API server has not
    /// answered yet.
    open_until: Option<Instant>,
    /// There may be conntrack entries whose grant or endpoint was removed.
    has_stale_connections: bool,
}

/// The table in the kernel after the last transaction.
#[derive(Debug)]
struct Written {
    table: Table,
    /// The generation after the transaction; `None` = another program changed nftables, or the generation cannot be read, so
    /// the next write replaces the table.
    generation: Option<Generation>,
    /// The table is being replaced in several steps and does not have all grants yet, so it is closed.
    is_partial: bool,
}

/// The result of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// The number of changes: every line of the script that was run counts as one.
    pub(super) changes: usize,
    /// Whether the table is the desired one. If not, the next step is due at once.
    pub(super) finished: bool,
}

impl TableManager {
    /// Whether the table exists, written by this process or an earlier one. The check does not list the table, because
    /// `nft` would need 208 MB for 10,000 grants.
    pub(super) fn table_exists(&self) -> bool {
        self.written.is_some() || generation::has_table().unwrap_or(false)
    }

    /// Whether this process has written the table, and no later write failed.
    pub(super) const fn has_written(&self) -> bool {
        self.written.is_some()
    }

    /// Whether the API server has answered this process. Before that, a new table stays closed.
    pub(super) const fn api_has_answered(&self) -> bool {
        self.open_until.is_some()
    }

    /// Whether no other program has changed nftables since the last write; false if the generation cannot be read. True if there is
    /// no such write: before the first one and after a failed one.
    pub(super) fn is_current(&self) -> bool {
        let now = generation::current().ok();
        self.written
            .as_ref()
            .is_none_or(|last| last.generation.is_some() && last.generation == now)
    }

    /// Writes the next step toward the table `desired`.
    ///
    /// # Errors
    /// The step cannot be written. The kernel then has the old table, and the next call replaces the whole table.
    pub(super) async fn converge(&mut self, desired: &Table) -> Result<Progress, Error> {
        let mut before = generation::current().ok();
        let can_update = |last: &Written| {
            last.generation.is_some() && last.generation == before && last.table.parameters == desired.parameters
        };
        let old = self.written.take().filter(can_update);
        let mut replaces_table = old.as_ref().is_none_or(|old| old.is_partial);
        let old = old.map(|old| old.table);
        let mut next = Table::step(old.as_ref(), desired);
        let mut script = update(old.as_ref(), &next).unwrap_or_default();
        if replaces_table && next == *desired {
            script.push_str(&self.opening_script(desired));
        }
        self.has_stale_connections |= old
            .as_ref()
            .is_none_or(|old| !old.allowed_endpoints().is_subset(&next.allowed_endpoints()));
        if script.is_empty() {
            let finished = next == *desired;
            self.written = Some(Written {
                table: next,
                generation: before,
                is_partial: replaces_table && !finished,
            });
        } else {
            if let Err(error) = self.nft.run(&script).await {
                // Another program may have changed the table. Replacing the whole table works even then. If the failed
                // step was part of a replacement, the error makes the caller pause before the next attempt.
                if replaces_table {
                    return Err(error);
                }
                tracing::warn!(%error, "the whole table is written instead");
                (replaces_table, self.has_stale_connections) = (true, true);
                next = Table::step(None, desired);
                script = update(None, &next).unwrap_or_default();
                if next == *desired {
                    script.push_str(&self.opening_script(desired));
                }
                before = generation::current().ok();
                self.nft.run(&script).await?;
            }
            let is_partial = replaces_table && next != *desired;
            self.record_write(next, before, is_partial);
        }
        let finished = self.written.as_ref().is_some_and(|last| last.table == *desired);
        if finished {
            self.delete_stale_connections(desired).await;
        }
        Ok(Progress {
            changes: script.lines().count(),
            finished,
        })
    }

    /// Records a written table. `before` = the generation before the transaction. If another program changed nftables
    /// meanwhile, it may have deleted the table, so no generation is recorded.
    fn record_write(&mut self, table: Table, before: Option<Generation>, is_partial: bool) {
        let after = before.map(Generation::next);
        let is_only_write = after.is_some() && after == generation::current().ok();
        let after = after.filter(|_| is_only_write);
        self.written = Some(Written {
            table,
            generation: after,
            is_partial,
        });
    }

    async fn delete_stale_connections(&mut self, table: &Table) {
        if !self.has_stale_connections {
            return;
        }
        let allowed: BTreeSet<(GrantId, _)> = table.allowed_endpoints();
        match tokio::task::spawn_blocking(move || connections::delete_stale(&allowed)).await {
            Ok(Ok(count)) => {
                self.has_stale_connections = false;
                if count > 0 {
                    tracing::info!(count, "deleted conntrack entries whose grant or endpoint was removed");
                }
            }
            // The table drops their packets anyway; the next pass tries again.
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot delete conntrack entries whose grant or endpoint was removed")
            }
            Err(error) => tracing::error!(%error, "the thread that deletes conntrack entries panicked"),
        }
    }

    /// The script that opens a table until [`Self::open_until`]. It is empty if the API server has not answered or that
    /// time has passed.
    fn opening_script(&self, table: &Table) -> String {
        let left = self
            .open_until
            .and_then(|until| until.checked_duration_since(Instant::now()));
        left.map_or_else(String::new, |left| render_renewal(&table.parameters, left))
    }

    /// Keeps the table open until `until`: renews the timeout of the element in the set `alive`. A table that is not written
    /// yet or is being replaced is opened by its last step instead.
    ///
    /// # Errors
    /// The renewal cannot be written; the next [`Self::converge`] replaces the table.
    pub(super) async fn renew(&mut self, until: Instant) -> Result<(), Error> {
        self.open_until = Some(until);
        let Some(last) = self.written.take_if(|last| !last.is_partial) else {
            return Ok(());
        };
        self.nft.run(&self.opening_script(&last.table)).await?;
        self.record_write(last.table, last.generation, false);
        Ok(())
    }

    /// The lines of the table's script, for `/debug/state`.
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
