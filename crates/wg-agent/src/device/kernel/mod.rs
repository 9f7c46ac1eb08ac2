//! The kernel's own WireGuard: the interface over rtnetlink, the configuration over generic netlink. What peers there should be
//! is decided elsewhere.
//!
//! The device outlives the process: dropping it leaves the tunnels at work, and the next process adopts them as they stand, with
//! sessions, counters and the endpoints that peers roamed to. A request is a blocking system call that the kernel answers
//! before it returns; there is no thread, no task and nobody to wait for.

mod link;
mod messages;
mod netlink;
mod observed;

use std::{
    collections::BTreeSet,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use clustermesh_agent_core::device::{self, ObservedPeer, PeerChange, PeerSpec, Peers};
use netlink_packet_generic::{
    GenlMessage,
    ctrl::{GenlCtrl, GenlCtrlCmd, nlas::GenlCtrlAttrs},
};
use netlink_packet_route::link::LinkAttribute;
use netlink_packet_wireguard::{WireguardAttribute, WireguardCmd, WireguardMessage, WireguardPeer};
use nix::errno::Errno;
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroize;

use self::{
    link::{Kind, Link, Links},
    netlink::Netlink,
    observed::{Seen, seen},
};
use super::{Altered, Configuration, Device, DeviceError, Observed, userspace};

/// A device of this kind that stands.
pub struct Kernel {
    interface: String,
    index: u32,
    configuration: Configuration,
    links: Links,
    wireguard: Netlink,
    family: u16,
    /// The peers as last configured or observed. Their endpoints are those that we set, which the kernel forgets when a peer
    /// roams; of a peer that an earlier process configured, the one it had when we came.
    held: Mutex<Peers>,
}

impl Kernel {
    /// Makes the interface, or takes over the one that an earlier process of ours left, and brings it up.
    ///
    /// # Errors
    /// [`DeviceError::NoKernelWireguard`]; the name belongs to someone else; the port is taken. Nothing new is left behind then,
    /// and what stood before stands.
    pub fn open(interface: &str, configuration: &Configuration) -> Result<Self, DeviceError> {
        let links = links()?;
        let adopted = match find(&links, interface)? {
            Some(link) if !link.ours => return Err(DeviceError::Exists(interface.to_owned())),
            Some(link) if link.kind == Kind::Wireguard => Some(link),
            other => {
                // First of all, so that a kernel without WireGuard leaves the userspace backend's interface alone.
                let made = links.make().map_err(|source| no_wireguard(interface, source))?;
                if other.is_some() {
                    if let Err(error) = userspace::remove_interface(interface) {
                        let _ = links.remove(made);
                        return Err(error);
                    }
                    // boringtun counts the leap seconds in, the kernel does not; peers take an older timestamp for a replay.
                    tracing::warn!(
                        interface,
                        "this node moves from the userspace backend to the kernel's: for the first 27 s peers refuse the handshakes that \
                         it begins, because the userspace backend's timestamps are 27 s ahead. Handshakes that peers begin are answered"
                    );
                }
                let device = Self::on(interface, made, configuration, links)?;
                return device.finish().inspect_err(|_| {
                    // The error that led here is the one to tell.
                    if let Ok(links) = Links::open() {
                        let _ = links.remove(made);
                    }
                });
            }
        };
        let Some(link) = adopted else {
            return Err(DeviceError::Exists(interface.to_owned()));
        };
        Self::on(interface, link.index, configuration, links)?.adopt(&link)
    }

    fn on(interface: &str, index: u32, configuration: &Configuration, links: Links) -> Result<Self, DeviceError> {
        let wireguard = Netlink::open(netlink_sys::protocols::NETLINK_GENERIC)
            .map_err(|source| kernel("open a generic netlink socket", source))?;
        let family = family(&wireguard).map_err(|source| kernel("find WireGuard's netlink family", source))?;
        Ok(Self {
            interface: interface.to_owned(),
            index,
            configuration: configuration.clone(),
            links,
            wireguard,
            family,
            held: Mutex::default(),
        })
    }

    /// A link that was made just now gets everything, its name last.
    fn finish(self) -> Result<Self, DeviceError> {
        let Configuration {
            private_key,
            listen_port,
            fwmark,
            mtu,
        } = &self.configuration;
        self.set(vec![
            WireguardAttribute::PrivateKey(private_key.to_bytes()),
            WireguardAttribute::ListenPort(*listen_port),
            WireguardAttribute::Fwmark(*fwmark),
        ])
        .map_err(|source| self.error("configure", source))?;
        let name = vec![
            LinkAttribute::Mtu(u32::from(*mtu)),
            LinkAttribute::IfName(self.interface.clone()),
        ];
        self.links
            .set(self.index, name, false)
            .map_err(|source| match errno(&source) {
                Some(Errno::EEXIST) => DeviceError::Exists(self.interface.clone()),
                _ => self.error("name", source),
            })?;
        // Coming up is what binds the port.
        self.links
            .set(self.index, Vec::new(), true)
            .map_err(|source| self.listen(*listen_port, source))?;
        Ok(self)
    }

    /// Changes only what differs from the configuration wanted, so that sessions go on.
    fn adopt(mut self, link: &Link) -> Result<Self, DeviceError> {
        let Seen {
            name: _,
            public_key,
            listen_port,
            fwmark,
            peers,
        } = self.read()?;
        let wanted = self.configuration.clone();
        tracing::info!(
            interface = self.interface,
            peers = peers.len(),
            "the device of an earlier process is taken over as it stands"
        );
        // Before anything is changed: a new private key greets them.
        *self.held() = peers.into_iter().map(|(key, (spec, _))| (key, spec)).collect();
        // A key of another node, which says that the private key in force is to be replaced.
        let mut standing = wanted.clone();
        standing.listen_port = listen_port;
        standing.fwmark = fwmark;
        standing.mtu = u16::try_from(link.mtu).unwrap_or_default();
        let same_key = public_key == Some(PublicKey::from(&wanted.private_key).to_bytes());
        self.configuration = standing;
        self.change(&wanted, !same_key)?;
        if !link.up {
            self.links
                .set(self.index, Vec::new(), true)
                .map_err(|source| self.listen(wanted.listen_port, source))?;
        }
        Ok(self)
    }

    fn change(&mut self, wanted: &Configuration, new_key: bool) -> Result<(), DeviceError> {
        // Each by itself, so that what was in force stays when the port is taken.
        if wanted.listen_port != self.configuration.listen_port {
            self.set_port(wanted.listen_port)?;
            self.configuration.listen_port = wanted.listen_port;
        }
        if wanted.fwmark != self.configuration.fwmark {
            self.set_mark(wanted.fwmark)?;
            self.configuration.fwmark = wanted.fwmark;
        }
        if wanted.mtu != self.configuration.mtu {
            self.set_mtu(wanted.mtu)?;
            self.configuration.mtu = wanted.mtu;
        }
        if new_key {
            self.set_key(&wanted.private_key)?;
            self.configuration.private_key = wanted.private_key.clone();
        }
        Ok(())
    }

    fn set_port(&self, port: u16) -> Result<(), DeviceError> {
        self.set(vec![WireguardAttribute::ListenPort(port)])
            .map_err(|source| self.listen(port, source))
    }

    fn set_mark(&self, mark: u32) -> Result<(), DeviceError> {
        self.set(vec![WireguardAttribute::Fwmark(mark)])
            .map_err(|source| self.error("set the firewall mark of", source))
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), DeviceError> {
        self.links
            .set(self.index, vec![LinkAttribute::Mtu(u32::from(mtu))], false)
            .map_err(|source| self.error("set the MTU of", source))
    }

    /// And greets everybody: every session ends with the key before.
    fn set_key(&self, key: &StaticSecret) -> Result<(), DeviceError> {
        self.set(vec![WireguardAttribute::PrivateKey(key.to_bytes())])
            .map_err(|source| self.error("set the private key of", source))?;
        let greetings = messages::greet(&self.held());
        self.send(greetings)
    }

    fn send(&self, messages: Vec<Vec<WireguardPeer>>) -> Result<(), DeviceError> {
        messages.into_iter().try_for_each(|peers| {
            self.set(vec![WireguardAttribute::Peers(peers)])
                .map_err(|source| self.error("change the peers of", source))
        })
    }

    fn set(&self, attributes: Vec<WireguardAttribute>) -> io::Result<()> {
        let mut all = vec![WireguardAttribute::IfIndex(self.index)];
        all.extend(attributes);
        let message = self.message(WireguardCmd::SetDevice, all);
        self.wireguard.request(message, 0).map(drop)
    }

    fn message(&self, cmd: WireguardCmd, attributes: Vec<WireguardAttribute>) -> GenlMessage<WireguardMessage> {
        let mut message = GenlMessage::from_payload(WireguardMessage { cmd, attributes });
        message.set_resolved_family_id(self.family);
        message
    }

    fn read(&self) -> Result<Seen, DeviceError> {
        let ask = self.message(WireguardCmd::GetDevice, vec![WireguardAttribute::IfIndex(self.index)]);
        let answers = self.wireguard.dump(ask).map_err(|source| self.error("read", source))?;
        let messages = answers.into_iter().map(|answer| answer.into_parts().1).collect();
        let seen = seen(messages, SystemTime::now());
        if seen.name == self.interface {
            Ok(seen)
        } else {
            // Renamed: routes and rules that name it are void.
            Err(DeviceError::Gone(self.interface.clone()))
        }
    }

    fn held(&self) -> MutexGuard<'_, Peers> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, action: &str, source: io::Error) -> DeviceError {
        match errno(&source) {
            Some(Errno::ENODEV) => DeviceError::Gone(self.interface.clone()),
            _ => kernel(&format!("{action} {}", self.interface), source),
        }
    }

    fn listen(&self, port: u16, source: io::Error) -> DeviceError {
        match errno(&source) {
            Some(Errno::EADDRINUSE) => DeviceError::Listen { port, source },
            _ => self.error("bring up", source),
        }
    }
}

impl Device for Kernel {
    fn backend(&self) -> &'static str {
        "kernel"
    }

    fn interface(&self) -> &str {
        &self.interface
    }

    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        let new_key = configuration.private_key.as_bytes() != self.configuration.private_key.as_bytes();
        self.change(configuration, new_key)
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let ends_session =
            |change: &PeerChange| matches!(change, PeerChange::Update(_, update) if update.preshared_key.is_some());
        // Only then is it of interest where peers are now.
        let live = if changes.iter().any(ends_session) {
            let peers = self.read()?.peers.into_iter();
            peers
                .filter_map(|(key, (spec, _))| Some((key, spec.endpoint?)))
                .collect()
        } else {
            messages::Live::default()
        };
        let messages = messages::plan(&self.held(), &live, changes);
        self.send(messages)?;
        device::apply(&mut self.held(), changes);
        Ok(())
    }

    fn observe(&self) -> Result<Observed, DeviceError> {
        let Seen {
            name: _,
            public_key,
            listen_port,
            fwmark,
            peers,
        } = self.read()?;
        let link = self
            .links
            .by_index(self.index)
            .map_err(|source| self.error("read the counters of", source))?;
        let wanted = &self.configuration;
        let altered = [
            (
                link.as_ref().is_some_and(|link| link.mtu != u32::from(wanted.mtu)),
                Altered::Mtu,
            ),
            (![0, listen_port].contains(&wanted.listen_port), Altered::ListenPort),
            (fwmark != wanted.fwmark, Altered::Fwmark),
            (link.as_ref().is_some_and(|link| !link.up), Altered::Down),
            (
                public_key != Some(PublicKey::from(&wanted.private_key).to_bytes()),
                Altered::PrivateKey,
            ),
        ];
        let mut held = self.held();
        let peers = peers.into_iter().map(|(key, (live, stats))| {
            let endpoint = held.get(&key).map_or(live.endpoint, |spec| spec.endpoint);
            let configured = PeerSpec { endpoint, ..live };
            (key, ObservedPeer { configured, stats })
        });
        let peers: device::ObservedPeers = peers.collect();
        *held = peers
            .iter()
            .map(|(key, peer)| (*key, peer.configured.clone()))
            .collect();
        let link::Drops {
            receive_errors,
            receive_dropped,
            send_errors,
            send_dropped,
        } = link.map(|link| link.drops).unwrap_or_default();
        let drops = [
            ("receive_errors", receive_errors),
            ("receive_dropped", receive_dropped),
            ("send_errors", send_errors),
            ("send_dropped", send_dropped),
        ];
        Ok(Observed {
            peers,
            listen_port,
            drops: drops.into(),
            altered: altered
                .into_iter()
                .filter_map(|(is, part)| is.then_some(part))
                .collect(),
        })
    }

    fn mend(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError> {
        let Configuration {
            private_key,
            listen_port,
            fwmark,
            mtu,
        } = self.configuration.clone();
        for part in altered {
            match part {
                Altered::Mtu => self.set_mtu(mtu)?,
                Altered::ListenPort => self.set_port(listen_port)?,
                Altered::Fwmark => self.set_mark(fwmark)?,
                Altered::Down => self
                    .links
                    .set(self.index, Vec::new(), true)
                    .map_err(|source| self.listen(listen_port, source))?,
                Altered::PrivateKey => self.set_key(&private_key)?,
            }
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), DeviceError> {
        self.links
            .remove(self.index)
            .map_err(|source| kernel(&format!("remove {}", self.interface), source))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        for spec in self.held().values_mut() {
            spec.preshared_key = None;
        }
        self.configuration.private_key.zeroize();
    }
}

fn links() -> Result<Links, DeviceError> {
    Links::open().map_err(|source| kernel("open a netlink socket", source))
}

fn find(links: &Links, interface: &str) -> Result<Option<Link>, DeviceError> {
    links
        .by_name(interface)
        .map_err(|source| kernel(&format!("look for interface {interface}"), source))
}

/// The number that the kernel gave WireGuard's family (genetlink, `CTRL_CMD_GETFAMILY`).
fn family(netlink: &Netlink) -> io::Result<u16> {
    let ask = GenlMessage::from_payload(GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName("wireguard".to_owned())],
    });
    let answers = netlink.request(ask, 0)?;
    answers
        .iter()
        .flat_map(|answer| &answer.payload.nlas)
        .find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(id) => Some(*id),
            _ => None,
        })
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn no_wireguard(interface: &str, source: io::Error) -> DeviceError {
    match errno(&source) {
        Some(Errno::EOPNOTSUPP) => DeviceError::NoKernelWireguard,
        _ => kernel(&format!("make the WireGuard interface {interface}"), source),
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw)
}

fn kernel(action: &str, source: io::Error) -> DeviceError {
    DeviceError::Kernel {
        action: action.to_owned(),
        source,
    }
}
