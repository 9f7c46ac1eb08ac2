//! Implements [`Device`] with the userspace device of the crate `wg-userspace`: translates configuration, peers, observations and errors.

use std::collections::BTreeSet;

use clustermesh_agent_core::{
    device::{ObservedPeer, PeerChange, PeerSpec, PeerStats, PeerUpdate},
    key::PresharedKey,
};
use clustermesh_core::key::PublicKey;
use wg_userspace::{Error, Interface};

use super::{ALIAS, Altered, Configuration, Device, DeviceError, Observed};

pub use wg_userspace::Options;

/// An open userspace device.
pub struct Userspace(wg_userspace::Device);

impl Userspace {
    /// The result of [`Device::backend`].
    pub const BACKEND: &str = "userspace";

    /// Creates the interface, or takes over the interface of an earlier agent process, brings it up and binds the port.
    ///
    /// # Errors
    /// Another program owns the interface, the port is in use, or the kernel refuses. Nothing new is left behind.
    pub fn open(interface: &str, configuration: &Configuration) -> Result<Self, DeviceError> {
        Self::open_with(interface, configuration, Options::default())
    }

    /// Like [`Self::open`], with these options.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(interface: &str, configuration: &Configuration, options: Options) -> Result<Self, DeviceError> {
        let device = wg_userspace::Device::open(agent_interface(interface), to_configuration(configuration), options)?;
        Ok(Self(device))
    }
}

impl Device for Userspace {
    fn backend(&self) -> &'static str {
        Self::BACKEND
    }

    fn interface(&self) -> &str {
        self.0.interface()
    }

    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        Ok(self.0.configure(to_configuration(configuration))?)
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let changes: Vec<_> = changes.iter().map(to_change).collect();
        self.0.apply(&changes);
        Ok(())
    }

    fn observe(&self) -> Result<Observed, DeviceError> {
        let wg_userspace::Observed {
            peers,
            listen_port,
            drops,
            altered,
        } = self.0.observe()?;
        let peers = peers
            .into_iter()
            .map(|(key, peer)| (PublicKey::new(*key.as_bytes()), from_peer(peer)));
        Ok(Observed {
            peers: peers.collect(),
            listen_port,
            drops,
            altered: altered.into_iter().map(from_altered).collect(),
        })
    }

    /// Other programs can change only MTU and link state, so `altered` contains nothing else.
    fn repair(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError> {
        if altered.is_empty() {
            return Ok(());
        }
        Ok(self.0.repair()?)
    }

    fn close(self: Box<Self>) -> Result<(), DeviceError> {
        Ok(self.0.close()?)
    }
}

/// Removes the control socket of a killed process.
///
/// # Errors
/// The file cannot be removed, or a process listens on it.
pub fn remove_control_socket(interface: &str) -> Result<(), DeviceError> {
    Ok(wg_userspace::remove_control_socket(interface)?)
}

/// Removes the interface of that name if it has the agent's alias. `true` = no interface of that name exists any more;
/// `false` = the interface has another alias, or none, and stays.
///
/// # Errors
/// A process still has the interface open, or the kernel refuses.
pub fn remove_interface(interface: &str) -> Result<bool, DeviceError> {
    Ok(wg_userspace::remove_interface(agent_interface(interface))?)
}

/// Name and alias of the agent's interface.
const fn agent_interface(name: &str) -> Interface<'_> {
    Interface { name, alias: ALIAS }
}

fn to_configuration(configuration: &Configuration) -> wg_userspace::Configuration {
    let Configuration {
        private_key,
        listen_port,
        fwmark,
        mtu,
    } = configuration;
    wg_userspace::Configuration {
        private_key: private_key.clone().into(),
        listen_port: *listen_port,
        fwmark: *fwmark,
        mtu: *mtu,
    }
}

fn to_change(change: &PeerChange) -> wg_userspace::PeerChange {
    let key = wg_userspace::PublicKey::new(*change.key().as_bytes());
    match change {
        PeerChange::Add(_, spec) => wg_userspace::PeerChange::Add(key, to_spec(spec)),
        PeerChange::Update(_, update) => wg_userspace::PeerChange::Update(key, to_update(update)),
        PeerChange::Remove(_) => wg_userspace::PeerChange::Remove(key),
    }
}

fn to_spec(spec: &PeerSpec) -> wg_userspace::PeerSpec {
    let PeerSpec {
        endpoint,
        keepalive,
        preshared_key,
        allowed_ips,
    } = spec;
    wg_userspace::PeerSpec {
        endpoint: *endpoint,
        keepalive: *keepalive,
        preshared_key: preshared_key.as_ref().and_then(to_preshared_key),
        allowed_ips: allowed_ips.clone(),
    }
}

fn to_update(update: &PeerUpdate) -> wg_userspace::PeerUpdate {
    let PeerUpdate {
        endpoint,
        keepalive,
        preshared_key,
        add_allowed_ips,
        remove_allowed_ips,
    } = update;
    wg_userspace::PeerUpdate {
        endpoint: *endpoint,
        keepalive: *keepalive,
        preshared_key: preshared_key
            .as_ref()
            .map(|key| key.as_ref().and_then(to_preshared_key)),
        add_allowed_ips: add_allowed_ips.clone(),
        remove_allowed_ips: remove_allowed_ips.clone(),
    }
}

fn to_preshared_key(key: &PresharedKey) -> Option<wg_userspace::PresharedKey> {
    wg_userspace::PresharedKey::new(*key.expose())
}

fn from_peer(peer: wg_userspace::ObservedPeer) -> ObservedPeer {
    let wg_userspace::ObservedPeer { configured, stats } = peer;
    let wg_userspace::PeerSpec {
        endpoint,
        keepalive,
        preshared_key,
        allowed_ips,
    } = configured;
    ObservedPeer {
        configured: PeerSpec {
            endpoint,
            keepalive,
            preshared_key: preshared_key.and_then(|key| PresharedKey::new(*key.expose())),
            allowed_ips,
        },
        stats: PeerStats {
            endpoint: stats.endpoint,
            handshake_age: stats.handshake_age,
            rx_bytes: stats.rx_bytes,
            tx_bytes: stats.tx_bytes,
        },
    }
}

const fn from_altered(altered: wg_userspace::Altered) -> Altered {
    match altered {
        wg_userspace::Altered::Mtu => Altered::Mtu,
        wg_userspace::Altered::Down => Altered::Down,
    }
}

impl From<Error> for DeviceError {
    fn from(error: Error) -> Self {
        match error {
            Error::Name(name) => Self::Name(name),
            // Does not happen, because `ALIAS` is valid.
            Error::Alias(_) => Self::Kernel {
                action: format!("mark the interface as {ALIAS:?}"),
                source: std::io::ErrorKind::InvalidInput.into(),
            },
            Error::Exists(name) => Self::Exists(name),
            Error::Gone(name) => Self::Gone(name),
            Error::Died { interface, thread } => Self::Died { interface, thread },
            Error::Tun { interface, source } => Self::Tun { interface, source },
            Error::Listen { port, source } => Self::Listen { port, source },
            Error::ControlSocket { path, source } => Self::ControlSocket { path, source },
            Error::Kernel { action, source } => Self::Kernel { action, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;

    #[test]
    fn peer_is_translated_to_the_device_and_back() {
        let spec = PeerSpec {
            endpoint: Some(([192, 0, 2, 1], 51820).into()),
            keepalive: NonZeroU16::new(25),
            preshared_key: PresharedKey::new([3; 32]),
            allowed_ips: ["10.1.0.0/16".parse().expect("a network")].into(),
        };
        let observed = wg_userspace::ObservedPeer {
            configured: to_spec(&spec),
            stats: wg_userspace::PeerStats::default(),
        };
        assert_eq!(
            from_peer(observed),
            ObservedPeer {
                configured: spec,
                stats: PeerStats::default()
            }
        );
    }

    #[test]
    fn removed_preshared_key_differs_from_unchanged_one() {
        let update = |preshared_key| {
            to_update(&PeerUpdate {
                preshared_key,
                ..PeerUpdate::default()
            })
        };
        assert_eq!(update(Some(None)).preshared_key, Some(None));
        assert_eq!(update(None).preshared_key, None);
    }
}
