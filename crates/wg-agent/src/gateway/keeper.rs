//! Keeps the table: writes the smallest step from what was written last, all of it where another hand wrote to nftables in
//! between, and ends the connections that belong to no grant any more.

use std::{collections::BTreeSet, time::Instant};

use clustermesh_agent_core::gateway::{GrantId, Table, alive, update};

use super::connections;
use crate::firewall::{Backend, Error, Generation, Nft, generation};

/// What was written last.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    nft: Nft,
    /// With the generation that this transaction made; `None` = another program wrote to nftables, so the table is written whole.
    written: Option<(Table, Option<Generation>)>,
    /// Until when it may be open; `None` = the API server has not answered yet.
    until: Option<Instant>,
    /// Connections may stand that the written table knows nothing of.
    unswept: bool,
}

impl Keeper {
    /// Whether a table stands, this keeper's or that of a process before.
    pub(super) async fn stands(&mut self) -> bool {
        self.written.is_some() || matches!(self.nft.observe().await, Ok(Some(_)))
    }

    /// Whether this keeper has written the table that stands.
    pub(super) const fn has_written(&self) -> bool {
        self.written.is_some()
    }

    /// Whether no other program wrote to nftables since. Before the first table is written there is nothing to lose.
    pub(super) fn is_current(&self) -> bool {
        let now = generation::now().ok();
        self.written.as_ref().is_none_or(|(_, at)| at.is_some() && *at == now)
    }

    /// Makes the table `desired`; how many lines that took.
    ///
    /// # Errors
    /// When it cannot be written; the kernel then has the table as it was.
    pub(super) async fn converge(&mut self, desired: &Table) -> Result<usize, Error> {
        let now = generation::now().ok();
        let ours = |at: &Option<Generation>| at.is_some() && *at == now;
        let old = self.written.take().filter(|(_, at)| ours(at)).map(|(table, _)| table);
        let whole = old.as_ref().is_none_or(|old| old.frame != desired.frame);
        let Some(mut script) = update(old.as_ref(), desired) else {
            self.written = Some((desired.clone(), now));
            self.sweep(desired).await;
            return Ok(0);
        };
        if whole {
            script.push_str(&self.open(desired));
        }
        let mut changes = script.lines().count();
        self.unswept |= old
            .as_ref()
            .is_none_or(|old| !old.standing().is_subset(&desired.standing()));
        let mut before = now;
        if let Err(error) = self.nft.run(&script).await {
            // Somebody may have changed a part since it was looked at: the whole table always fits.
            let Some(mut whole) = old.and_then(|_| update(None, desired)) else {
                return Err(error);
            };
            whole.push_str(&self.open(desired));
            tracing::warn!(%error, "the whole table is written instead");
            self.unswept = true;
            before = generation::now().ok();
            self.nft.run(&whole).await?;
            changes = whole.lines().count();
        }
        self.wrote(desired.clone(), before);
        self.sweep(desired).await;
        Ok(changes)
    }

    /// `before` = the generation before one transaction. What another program wrote between two looks may have deleted the table.
    fn wrote(&mut self, table: Table, before: Option<Generation>) {
        let at = before.map(Generation::next);
        let alone = at.is_some() && at == generation::now().ok();
        self.written = Some((table, at.filter(|_| alone)));
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

    /// Keeps it open until then.
    ///
    /// # Errors
    /// When it cannot be written: the table is written whole by the next [`Self::converge`].
    pub(super) async fn renew(&mut self, until: Instant) -> Result<(), Error> {
        self.until = Some(until);
        let Some((table, at)) = self.written.take() else {
            return Ok(());
        };
        self.nft.run(&self.open(&table)).await?;
        self.wrote(table, at);
        Ok(())
    }

    /// For `/debug/state`.
    pub(super) fn text(&self) -> Vec<String> {
        let script = self.written.as_ref().and_then(|(table, _)| update(None, table));
        script
            .iter()
            .flat_map(|script| script.lines())
            .map(str::to_owned)
            .collect()
    }
}
