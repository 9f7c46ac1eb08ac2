//! Opens, configures and repairs the device, and applies the compiled peers to it.

use super::Reconciler;
use crate::{
    device::{Altered, Configuration, Device, DeviceError, Opened},
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
    /// Whether the firewall table is as it was written last. An unreadable table counts as changed.
    pub(crate) async fn firewall_matches_kernel(&mut self) -> bool {
        self.deps.firewall.matches_kernel().await.unwrap_or(false)
    }

    /// Opens the device, or changes what differs. True = it was opened just now, and has no peers or those of an
    /// earlier process.
    pub(super) fn ensure_device(&mut self, mtu: u16) -> Result<bool, Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let configuration = Configuration {
            private_key: self.deps.key.secret().clone(),
            listen_port: self.deps.config.port,
            fwmark: MARK_UNDERLAY,
            mtu,
        };
        if self.drift.take_device_in_doubt()
            && let Some((device, ..)) = &self.device
            && let Err(error) = device.observe()
        {
            tracing::warn!(%error, "the device failed and is opened again");
            self.deps.metrics.count_repairs("device", 1);
            self.device = None;
        }
        let public = self.deps.key.public();
        match &mut self.device {
            Some((_, at, key)) if *at == mtu && *key == public => Ok(false),
            Some((device, at, key)) => {
                device.configure(&configuration).map_err(trouble)?;
                tracing::info!(mtu, was = *at, key = %public, "device reconfigured");
                *at = mtu;
                if *key != public {
                    *key = public;
                    // Every session ended with the old key; handshakes start at each peer's last endpoint.
                    self.tracker.reset();
                }
                Ok(false)
            }
            None => {
                let opened = (self.deps.open)(&configuration);
                self.is_occupied = matches!(&opened, Err(DeviceError::Exists(_) | DeviceError::Listen { .. }));
                let Opened { device, reason } = opened.map_err(trouble)?;
                let backend = device.backend();
                tracing::info!(
                    interface = device.interface(),
                    backend,
                    why = reason,
                    mtu,
                    "device opened"
                );
                self.backend_reason = reason.to_owned();
                self.tracker.reset();
                self.drift.reset_device();
                let standing = device.observe().map_err(trouble)?;
                self.tracker.adopt(&standing.peers);
                self.device = Some((device, mtu, public));
                Ok(true)
            }
        }
    }

    /// The peers that the device should have, each with the endpoint to try now.
    pub(super) fn desired_peers(&self, compiled: &Compiled) -> Peers {
        let mut desired = compiled.peers.clone();
        for (key, spec) in &mut desired {
            spec.endpoint = self.tracker.configured_endpoint(key);
        }
        desired
    }

    pub(super) fn apply_peers(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let desired = self.desired_peers(compiled);
        let Some((device, ..)) = &mut self.device else {
            return Ok(());
        };
        let observed = match device.observe() {
            Ok(observed) => observed,
            Err(error) => {
                // Most likely the interface was deleted: the next pass creates it again.
                self.device = None;
                return Err(trouble(error));
            }
        };
        if !observed.altered.is_empty() {
            device.mend(&observed.altered).map_err(trouble)?;
            for part in &observed.altered {
                tracing::warn!(part = part.as_str(), "another program changed the device; restored");
                self.deps.metrics.count_repairs(part.as_str(), 1);
            }
            if observed.altered.contains(&Altered::PrivateKey) {
                self.tracker.reset();
            }
        }
        let changes = diff(&observed.peers, &desired).unwrap_or_default();
        if !changes.is_empty() {
            device.apply(&changes).map_err(trouble)?;
        }
        let repaired = self.drift.count_repaired_peers(&desired, &changes);
        self.deps.metrics.count_repairs("peers", repaired);
        self.deps.metrics.count_changes("device", changes.len());
        for change in &changes {
            let name = compiled.names.get(change.key()).map_or("", String::as_str);
            tracing::info!(name, "{change}");
        }
        Ok(())
    }

    /// Ends the reconciler and returns the device, whose kernel state stays.
    pub(crate) fn into_device(self) -> Option<Box<dyn Device>> {
        self.device.map(|(device, ..)| device)
    }
}
