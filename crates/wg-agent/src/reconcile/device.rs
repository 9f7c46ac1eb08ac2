//! The device and the peers in it: opened, changed and mended. Which peers it should have is the compiler's to say.

use super::Reconciler;
use crate::{
    device::{Altered, Configuration, Device, DeviceError},
    firewall::Backend,
    route::Routing,
    status::Trouble,
};
use clustermesh_agent_core::{
    compile::Compiled,
    device::{Peers, diff},
    numbers::MARK_UNDERLAY,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Whether the firewall table is as it was written last. What cannot be read may be anything.
    pub(crate) async fn table_stands(&mut self) -> bool {
        self.parts.firewall.intact().await.unwrap_or(false)
    }

    /// Opens the device, or changes what differs. True = it was opened just now; it holds nobody, or whom an earlier process left in it.
    pub(super) fn ensure_device(&mut self, mtu: u16) -> Result<bool, Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let configuration = Configuration {
            private_key: self.parts.key.secret().clone(),
            listen_port: self.parts.config.port,
            fwmark: MARK_UNDERLAY,
            mtu,
        };
        if self.drift.doubts_device()
            && let Some((device, ..)) = &self.device
            && let Err(error) = device.observe()
        {
            tracing::warn!(%error, "the device is made again");
            self.parts.metrics.repaired("device", 1);
            self.device = None;
        }
        let public = self.parts.key.public();
        match &mut self.device {
            Some((_, at, key)) if *at == mtu && *key == public => Ok(false),
            Some((device, at, key)) => {
                device.configure(&configuration).map_err(trouble)?;
                tracing::info!(mtu, was = *at, key = %public, "device reconfigured");
                *at = mtu;
                if *key != public {
                    *key = public;
                    // Every session is gone, and is made anew where each peer was heard from last.
                    self.tracks.restart();
                }
                Ok(false)
            }
            None => {
                let opened = (self.parts.open)(&configuration);
                self.occupied = matches!(&opened, Err(DeviceError::Exists(_) | DeviceError::Listen { .. }));
                let (device, why) = opened.map_err(trouble)?;
                let backend = device.backend();
                tracing::info!(interface = device.interface(), backend, why, mtu, "device opened");
                self.why = why.to_string();
                self.tracks.restart();
                self.drift.emptied();
                let standing = device.observe().map_err(trouble)?;
                self.tracks.adopt(&standing.peers);
                self.device = Some((device, mtu, public));
                Ok(true)
            }
        }
    }

    /// Whom the device should hold, each at the endpoint that is tried now.
    pub(super) fn wanted(&self, compiled: &Compiled) -> Peers {
        let mut desired = compiled.peers.clone();
        for (key, spec) in &mut desired {
            spec.endpoint = self.tracks.current(key);
        }
        desired
    }

    pub(super) fn apply_peers(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let desired = self.wanted(compiled);
        let Some((device, ..)) = &mut self.device else {
            return Ok(());
        };
        let observed = match device.observe() {
            Ok(observed) => observed,
            Err(error) => {
                // Most likely somebody deleted the interface: the next pass makes it again.
                self.device = None;
                return Err(trouble(error));
            }
        };
        if !observed.altered.is_empty() {
            device.mend(&observed.altered).map_err(trouble)?;
            for part in &observed.altered {
                tracing::warn!(part = part.as_str(), "the device was changed by another hand; put back");
                self.parts.metrics.repaired(part.as_str(), 1);
            }
            if observed.altered.contains(&Altered::PrivateKey) {
                self.tracks.restart();
            }
        }
        let changes = diff(&observed.peers, &desired).unwrap_or_default();
        if !changes.is_empty() {
            device.apply(&changes).map_err(trouble)?;
        }
        let put_back = self.drift.peopled(&desired, &changes);
        self.parts.metrics.repaired("peers", put_back);
        self.parts.metrics.applied("device", changes.len());
        for change in &changes {
            let name = compiled.names.get(change.key()).map_or("", String::as_str);
            tracing::info!(name, "{change}");
        }
        Ok(())
    }

    /// Ends our part; what stands in the kernel stays.
    pub(crate) fn into_device(self) -> Option<Box<dyn Device>> {
        self.device.map(|(device, ..)| device)
    }
}
