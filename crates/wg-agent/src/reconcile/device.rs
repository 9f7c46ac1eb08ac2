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
use clustermesh_core::key::PublicKey;

/// The node's WireGuard device.
#[derive(Default)]
pub(super) struct TunnelDevice {
    pub(super) open: Option<OpenDevice>,
    /// At the last attempt to open the device, another program owned the interface with the device's name, or used the listen
    /// port.
    pub(super) is_occupied: bool,
    /// An event about the agent's routing or the device arrived, or events may have been lost, so the device may have been deleted.
    pub(super) needs_check: bool,
}

/// A device that is open, and its configuration.
pub(super) struct OpenDevice {
    pub(super) device: Box<dyn Device>,
    pub(super) mtu: u16,
    pub(super) key: PublicKey,
    /// Why this backend was chosen.
    pub(super) backend_reason: &'static str,
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Whether the kernel's firewall table is as the agent wrote it. An unreadable table counts as changed.
    pub(crate) async fn firewall_matches_kernel(&mut self) -> bool {
        self.deps.kernel.firewall.matches_kernel().await.unwrap_or(false)
    }

    /// Opens the device if it is not open or a due check fails; else changes its MTU and key if they are not `mtu` and the agent's
    /// key. Returns whether the device was just opened: then it may have no peers, or old ones.
    pub(super) fn ensure_device(&mut self, mtu: u16) -> Result<bool, Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let configuration = Configuration {
            private_key: self.deps.key.secret().clone(),
            listen_port: self.deps.config.port,
            fwmark: MARK_UNDERLAY,
            mtu,
        };
        if std::mem::take(&mut self.device.needs_check)
            && let Some(open) = &self.device.open
            && let Err(error) = open.device.observe()
        {
            tracing::warn!(%error, "the device failed and is opened again");
            self.close_failed_device();
        }
        let public = self.deps.key.public();
        let Some(open) = &mut self.device.open else {
            return self.open_device(&configuration).map(|()| true).map_err(trouble);
        };
        if (open.mtu, open.key) != (mtu, public) {
            open.device.configure(&configuration).map_err(trouble)?;
            tracing::info!(mtu, was = open.mtu, key = %public, "device reconfigured");
            open.mtu = mtu;
            if open.key != public {
                open.key = public;
                // The device has no session with the new key.
                self.tracker.reset_except_live_endpoints();
            }
        }
        Ok(false)
    }

    /// Closes a device that failed, most likely because another program deleted its interface. The next pass opens it again: a repair.
    pub(super) fn close_failed_device(&mut self) {
        if self.device.open.take().is_some() {
            self.deps.report.metrics.count_repairs("device", 1);
        }
    }

    fn open_device(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        let opened = (self.deps.kernel.open)(configuration);
        self.device.is_occupied = matches!(&opened, Err(DeviceError::Exists(_) | DeviceError::Listen { .. }));
        let Opened { device, reason } = opened?;
        let (backend, mtu) = (device.backend(), configuration.mtu);
        tracing::info!(
            interface = device.interface(),
            backend,
            why = reason,
            mtu,
            "device opened"
        );
        self.tracker.reset_except_live_endpoints();
        self.repair_counter.forget_device();
        let observed = device.observe()?;
        self.tracker.learn_live_endpoints(&observed.peers);
        self.device.open = Some(OpenDevice {
            device,
            mtu,
            key: self.deps.key.public(),
            backend_reason: reason,
        });
        Ok(())
    }

    /// The peers that the device should have, each with the endpoint to try now.
    pub(super) fn desired_peers(&self, compiled: &Compiled) -> Peers {
        let mut desired = compiled.peers.clone();
        for (key, spec) in &mut desired {
            spec.endpoint = self.tracker.desired_endpoint(key);
        }
        desired
    }

    pub(super) fn apply_peers(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let desired = self.desired_peers(compiled);
        let Some(OpenDevice { device, .. }) = &mut self.device.open else {
            return Ok(());
        };
        let mut observed = match device.observe() {
            Ok(observed) => observed,
            Err(error) => {
                self.close_failed_device();
                return Err(trouble(error));
            }
        };
        if !observed.altered.is_empty() {
            device.repair(&observed.altered).map_err(trouble)?;
            for part in &observed.altered {
                tracing::warn!(part = part.as_str(), "another program changed the device; restored");
                self.deps.report.metrics.count_repairs(part.as_str(), 1);
            }
            if observed.altered.contains(&Altered::PrivateKey) {
                // The device has no session with the restored key.
                self.tracker.reset_except_live_endpoints();
            }
        }
        // `configured` of an observed peer has the endpoint that was written last. Roaming changes only the endpoint in use.
        // `diff` compares `configured` with the desired peer, so it cannot see the endpoint in use. For each peer whose endpoint
        // in use must be replaced, this call copies that endpoint into `configured`. Then `diff` finds a change.
        let must_write = self.tracker.replace_configured_by_used(&mut observed.peers);
        let changes = diff(&observed.peers, &desired).unwrap_or_default(); // `None` = no changes
        if !changes.is_empty() {
            device.apply(&changes).map_err(trouble)?;
        }
        // In the peers of `must_write`, the agent itself changes the endpoint, so this is no repair.
        let maybe_repairs = changes.iter().filter(|change| !must_write.contains(change.key()));
        let repaired = self.repair_counter.count_peer_repairs(&desired, maybe_repairs);
        self.deps.report.metrics.count_repairs("peers", repaired);
        self.deps.report.metrics.count_changes("device", changes.len());
        for change in &changes {
            let name = compiled.names.get(change.key()).map_or("", String::as_str);
            // The endpoint of a peer that does not answer changes again and again, too often for the level info.
            if change.is_endpoint_only() {
                tracing::debug!(name, "{change}");
            } else {
                tracing::info!(name, "{change}");
            }
        }
        Ok(())
    }

    /// Consumes the reconciler and returns the device, whose kernel state stays.
    pub(crate) fn into_device(self) -> Option<Box<dyn Device>> {
        self.device.open.map(|open| open.device)
    }
}
