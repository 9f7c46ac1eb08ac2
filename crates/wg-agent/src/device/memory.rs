//! Implements [`Device`] in memory, for unit tests.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use clustermesh_agent_core::device::{self, ObservedPeer, PeerChange, PeerStats, Peers};

use super::{Altered, Configuration, Device, DeviceError, Observed};

/// Stores its configuration and peers. Clones share one state, so that a test can inspect it.
#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<MemoryState>>);

#[derive(Default)]
struct MemoryState {
    configuration: Option<Configuration>,
    peers: Peers,
    applied: Vec<PeerChange>,
    altered: BTreeSet<Altered>,
    closed: bool,
    deleted: bool,
}

impl Memory {
    /// A device called `kilo0` with nothing in it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The peers as configured.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.state().peers.clone()
    }

    /// Takes the changes applied since the last call, in order.
    #[must_use]
    pub fn take_applied(&self) -> Vec<PeerChange> {
        std::mem::take(&mut self.state().applied)
    }

    /// The current configuration.
    #[must_use]
    pub fn configuration(&self) -> Option<Configuration> {
        self.state().configuration.clone()
    }

    /// Marks a part as changed by another program, until it is repaired.
    pub fn alter(&self, part: Altered) {
        self.state().altered.insert(part);
    }

    /// Deletes the interface, as another program could.
    pub fn delete(&self) {
        self.state().deleted = true;
    }

    /// True after [`Device::close`].
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Memory {
    fn backend(&self) -> &'static str {
        "memory"
    }

    fn interface(&self) -> &str {
        "kilo0"
    }

    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        self.state().configuration = Some(configuration.clone());
        Ok(())
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let mut state = self.state();
        device::apply(&mut state.peers, changes);
        state.applied.extend_from_slice(changes);
        Ok(())
    }

    fn observe(&self) -> Result<Observed, DeviceError> {
        let state = self.state();
        if state.deleted {
            return Err(DeviceError::Gone(self.interface().to_owned()));
        }
        let peers = state.peers.iter().map(|(key, spec)| {
            let stats = PeerStats {
                endpoint: spec.endpoint,
                ..PeerStats::default()
            };
            (
                *key,
                ObservedPeer {
                    configured: spec.clone(),
                    stats,
                },
            )
        });
        Ok(Observed {
            peers: peers.collect(),
            listen_port: state
                .configuration
                .as_ref()
                .map_or(0, |configuration| configuration.listen_port),
            altered: state.altered.clone(),
            ..Observed::default()
        })
    }

    fn repair(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError> {
        self.state().altered.retain(|part| !altered.contains(part));
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), DeviceError> {
        self.state().closed = true;
        Ok(())
    }
}
