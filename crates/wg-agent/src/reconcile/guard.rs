//! Peers that may be in the device only while the firewall table that holds them stands in this node's kernel (DESIGN §4 rule
//! 7, `requires-policy`), and the order that keeps them to it. What they may reach is the compiler's to say.
//!
//! A pass, as far as they are concerned:
//! 1. The table is read. Where it is not as it was written, they leave the device, before anything else is tried.
//! 2. Those that no policy is there for any more, or another one, or that are not wanted, leave; at the first pass of a
//!    process, everybody that an earlier one left in the device and whose table does not stand already. Where a policy
//!    only says something else they stay, and their sessions: the table is changed at once, with what it says of them.
//! 3. The table is written, and what fades in it renewed. Where that fails, they leave.
//! 4. It is read back, and routing made to keep them closed where it is gone, with the kernel's settings that this needs. Only
//!    if all are as wanted they come in, with everybody else's changes.

use std::{collections::BTreeMap, time::Instant};

use clustermesh_agent_core::{compile::Compiled, device::PeerChange};
use clustermesh_core::key::PublicKey;

use crate::{
    device::Device,
    firewall::{Backend, Keeper},
    status::Trouble,
};

/// Who is in the device on that condition.
#[derive(Debug, Default)]
pub(super) struct Guard {
    /// Each with the policy it requires.
    held: BTreeMap<PublicKey, String>,
    /// What an earlier process left was dealt with.
    known: bool,
    /// The table was read back as it should be, and nothing else was heard since.
    admits: bool,
    /// Who left the device, until the caller asks: a pass that fails afterwards has put them out all the same.
    left: Vec<PublicKey>,
}

/// What became of the table.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Enforced {
    /// Something was written.
    pub(super) written: bool,
    /// Why those that require a policy may not come in.
    pub(super) why: Option<String>,
}

impl Guard {
    /// Whether those that require a policy may come in.
    pub(super) fn admits(&self) -> bool {
        self.admits
    }

    /// They may not, whatever the table says.
    pub(super) fn refuse(&mut self) {
        self.admits = false;
    }

    /// A new device holds whom an earlier process left in it, or nobody.
    pub(super) fn opened(&mut self) {
        self.held.clear();
        self.known = false;
    }

    /// Who left the device since this was asked last.
    pub(super) fn left(&mut self) -> Vec<PublicKey> {
        std::mem::take(&mut self.left)
    }

    /// Step 1.
    ///
    /// # Errors
    /// When somebody could not be taken out of the device.
    pub(super) async fn look<F: Backend>(
        &mut self,
        table: &mut Keeper<F>,
        device: Option<&mut Box<dyn Device>>,
    ) -> Result<(), Trouble> {
        if self.held.is_empty() || table.intact().await.unwrap_or(false) {
            return Ok(());
        }
        tracing::warn!("the firewall table is not as it was written: peers of sandboxes leave the device");
        self.admits = false;
        self.leave(device, |_, _| true)
    }

    /// Steps 2 and 3, and the reading back. The caller brings in the peers; [`Self::entered`] takes that down.
    ///
    /// # Errors
    /// When the table cannot be written, or somebody not be taken out of the device: then nothing was written.
    pub(super) async fn enforce<F: Backend>(
        &mut self,
        table: &mut Keeper<F>,
        mut device: Option<&mut Box<dyn Device>>,
        compiled: &Compiled,
        now: Instant,
    ) -> Result<Enforced, Trouble> {
        self.admits = false;
        if !self.known
            && let Some(device) = device.as_deref_mut()
            && table.stands(&compiled.firewall).await.is_err()
        {
            // Which of them required a policy, and which, that process took with it.
            let there = device.observe().map_err(|error| Trouble::new("device", error))?.peers;
            let stays = |key: &PublicKey| compiled.peers.contains_key(key) && !compiled.gated.contains_key(key);
            let strangers = there.keys().filter(|key| !stays(key));
            self.held.extend(strangers.map(|key| (*key, String::new())));
        }
        self.known |= device.is_some();
        self.leave(device.as_deref_mut(), |key, required| {
            compiled.gated.get(key) != Some(required)
        })?;

        let written = match table.converge(&compiled.firewall).await {
            Ok(done) => table.renew(now).await.map(|renewed| done.is_some() || renewed),
            Err(error) => Err(error),
        };
        let written = match written {
            Ok(written) => written,
            Err(error) => {
                self.leave(device, |_, _| true)?;
                return Err(Trouble::new("firewall", error));
            }
        };
        let mut enforced = Enforced {
            written,
            ..Enforced::default()
        };
        if !compiled.gated.is_empty() {
            enforced.why = table.confirmed(&compiled.firewall).err().map(|error| error.to_string());
            self.admits = enforced.why.is_none();
            if !self.admits {
                self.leave(device, |_, _| true)?;
            }
        }
        Ok(enforced)
    }

    /// The device holds these now.
    pub(super) fn entered(&mut self, gated: &BTreeMap<PublicKey, String>) {
        if self.admits {
            self.held.clone_from(gated);
        }
    }

    fn leave(
        &mut self,
        device: Option<&mut Box<dyn Device>>,
        who: impl Fn(&PublicKey, &String) -> bool,
    ) -> Result<(), Trouble> {
        let Some(device) = device else {
            return Ok(());
        };
        let keys: Vec<PublicKey> = (self.held.iter())
            .filter(|(key, why)| who(key, why))
            .map(|(key, _)| *key)
            .collect();
        if keys.is_empty() {
            return Ok(());
        }
        let changes: Vec<PeerChange> = keys.iter().copied().map(PeerChange::Remove).collect();
        device.apply(&changes).map_err(|error| Trouble::new("device", error))?;
        for key in &keys {
            tracing::info!(%key, "a sandbox's peer leaves the device until its policy stands");
            self.held.remove(key);
        }
        self.left.extend(keys);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
