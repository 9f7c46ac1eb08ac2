//! Implements [`Device`] with the kernel's WireGuard: manages the interface over rtnetlink and the configuration over
//! generic netlink.
//!
//! The kernel device outlives the process: the tunnels keep working, and the next process takes the device over with its
//! sessions, counters and live endpoints. The kernel answers a netlink request before the system call returns, so no
//! thread and no task is needed.

mod link;
mod messages;
mod observed;

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use clustermesh_agent_core::device::{self, ObservedPeer, PeerChange, PeerSpec, Peers};
use clustermesh_netlink::{Errno, Error, Protocol, Socket, link as netlink_link};
use netlink_packet_core::DecodeError;
use netlink_packet_generic::{
    GenlMessage,
    ctrl::{GenlCtrl, GenlCtrlCmd, nlas::GenlCtrlAttrs},
};
use netlink_packet_route::link::LinkAttribute;
use netlink_packet_wireguard::{WireguardAttribute, WireguardCmd, WireguardMessage, WireguardPeer};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroize;

use self::{
    link::{Kind, Link},
    observed::{DeviceDump, parse_dump},
};
use super::{Altered, Configuration, Device, DeviceError, Observed, userspace};

/// An open kernel device.
pub struct Kernel {
    interface: String,
    index: u32,
    configuration: Configuration,
    /// The rtnetlink socket.
    links: Socket,
    /// The generic netlink socket.
    wireguard: Socket,
    /// The id of WireGuard's generic netlink family.
    family: u16,
    /// The peers as last configured or observed, with their configured endpoints, which the kernel forgets when a peer
    /// roams. A peer that an earlier process configured has the endpoint that it had when this process took over.
    configured: Mutex<Peers>,
}

impl Kernel {
    /// Creates the interface, or takes over the one of an earlier process, and brings it up.
    ///
    /// # Errors
    /// [`DeviceError::NoKernelWireguard`]; an interface of another program has this name; the port is in use. After an
    /// error, no new interface is left behind. A kernel device of an earlier process stays, perhaps with part of the new
    /// configuration. The interface of the userspace backend may be removed already.
    pub fn open(interface: &str, configuration: &Configuration) -> Result<Self, DeviceError> {
        let links = open_links()?;
        match find_link(&links, interface)? {
            Some(link) if !link.is_ours => Err(DeviceError::Exists(interface.to_owned())),
            Some(link) if link.kind == Kind::Wireguard => {
                Self::with_link(interface, link.index, configuration, links)?.take_over(&link)
            }
            // No interface has this name, or the userspace backend created it.
            userspace_link => {
                // On a kernel without WireGuard this fails, and the interface of the userspace backend stays.
                let made = link::create(&links).map_err(|source| no_wireguard(interface, source))?;
                if userspace_link.is_some() {
                    if let Err(error) = userspace::remove_interface(interface) {
                        let _ = netlink_link::delete(&links, made);
                        return Err(error);
                    }
                    // The userspace backend uses boringtun, whose TAI64N timestamps include 27 leap seconds. The kernel's do not.
                    // Peers refuse an initiation with an older timestamp as a replay.
                    tracing::warn!(
                        interface,
                        "this node moves from the userspace backend to the kernel's: for the first 27 s peers refuse the handshakes that \
                         it initiates, because the userspace backend's timestamps are 27 s ahead. Handshakes that peers initiate succeed"
                    );
                }
                let device = Self::with_link(interface, made, configuration, links).and_then(Self::finish);
                device.inspect_err(|_| {
                    // An error here would hide the first one, so it is ignored.
                    if let Ok(links) = open_links() {
                        let _ = netlink_link::delete(&links, made);
                    }
                })
            }
        }
    }

    fn with_link(
        interface: &str,
        index: u32,
        configuration: &Configuration,
        links: Socket,
    ) -> Result<Self, DeviceError> {
        let wireguard =
            Socket::open(Protocol::Generic).map_err(|source| kernel_error("open a generic netlink socket", source))?;
        let family = family(&wireguard).map_err(|source| kernel_error("find WireGuard's netlink family", source))?;
        Ok(Self {
            interface: interface.to_owned(),
            index,
            configuration: configuration.clone(),
            links,
            wireguard,
            family,
            configured: Mutex::default(),
        })
    }

    /// Configures a new link, renames it and brings it up.
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
        let attributes = vec![
            LinkAttribute::Mtu(u32::from(*mtu)),
            LinkAttribute::IfName(self.interface.clone()),
        ];
        netlink_link::set(&self.links, self.index, attributes).map_err(|source| match source.errno() {
            Some(Errno::EXIST) => DeviceError::Exists(self.interface.clone()),
            _ => self.error("rename", source),
        })?;
        self.set_up(*listen_port)?;
        Ok(self)
    }

    /// Takes over an existing device: changes only what differs, so that sessions continue.
    fn take_over(mut self, link: &Link) -> Result<Self, DeviceError> {
        let DeviceDump {
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
            "took over the device of an earlier process"
        );
        // Must precede `change`, which starts handshakes with these peers if the key is new.
        *self.configured() = peers.into_iter().map(|(key, (spec, _))| (key, spec)).collect();
        // The configuration in the kernel, except its private key: `is_key_new` decides whether the key is set.
        let mut existing = wanted.clone();
        existing.listen_port = listen_port;
        existing.fwmark = fwmark;
        existing.mtu = u16::try_from(link.mtu).unwrap_or_default();
        let is_key_new = public_key != Some(PublicKey::from(&wanted.private_key).to_bytes());
        self.configuration = existing;
        self.change(&wanted, is_key_new)?;
        if !link.is_up {
            self.set_up(wanted.listen_port)?;
        }
        Ok(self)
    }

    fn change(&mut self, wanted: &Configuration, is_key_new: bool) -> Result<(), DeviceError> {
        // The port is set first: if it is in use, the old configuration stays. Each value has its own request, so that
        // an error leaves `self.configuration` correct.
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
        if is_key_new {
            self.set_key(&wanted.private_key)?;
            self.configuration.private_key = wanted.private_key.clone();
        }
        Ok(())
    }

    fn set_port(&self, port: u16) -> Result<(), DeviceError> {
        self.set(vec![WireguardAttribute::ListenPort(port)])
            .map_err(|source| self.listen_error(port, source))
    }

    fn set_mark(&self, mark: u32) -> Result<(), DeviceError> {
        self.set(vec![WireguardAttribute::Fwmark(mark)])
            .map_err(|source| self.error("set the firewall mark of", source))
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), DeviceError> {
        netlink_link::set_mtu(&self.links, self.index, u32::from(mtu))
            .map_err(|source| self.error("set the MTU of", source))
    }

    /// Brings the link up, which binds the port.
    fn set_up(&self, port: u16) -> Result<(), DeviceError> {
        netlink_link::set_up(&self.links, self.index).map_err(|source| self.listen_error(port, source))
    }

    /// Sets the private key, which ends all sessions, and starts a handshake with every peer that has a configured endpoint.
    fn set_key(&self, key: &StaticSecret) -> Result<(), DeviceError> {
        self.set(vec![WireguardAttribute::PrivateKey(key.to_bytes())])
            .map_err(|source| self.error("set the private key of", source))?;
        let messages = messages::start_handshakes(&self.configured());
        self.send(messages)
    }

    fn send(&self, messages: Vec<Vec<WireguardPeer>>) -> Result<(), DeviceError> {
        messages.into_iter().try_for_each(|peers| {
            self.set(vec![WireguardAttribute::Peers(peers)])
                .map_err(|source| self.error("change the peers of", source))
        })
    }

    fn set(&self, attributes: Vec<WireguardAttribute>) -> Result<(), Error> {
        let mut all = vec![WireguardAttribute::IfIndex(self.index)];
        all.extend(attributes);
        let message = self.message(WireguardCmd::SetDevice, all);
        self.wireguard.change(&message)
    }

    fn message(&self, cmd: WireguardCmd, attributes: Vec<WireguardAttribute>) -> GenlMessage<WireguardMessage> {
        let mut message = GenlMessage::from_payload(WireguardMessage { cmd, attributes });
        message.set_resolved_family_id(self.family);
        message
    }

    fn read(&self) -> Result<DeviceDump, DeviceError> {
        let request = self.message(WireguardCmd::GetDevice, vec![WireguardAttribute::IfIndex(self.index)]);
        let messages = self
            .wireguard
            .dump(&request, |answer| Some(answer.into_parts().1))
            .map_err(|source| self.error("read", source))?;
        let dump = parse_dump(messages, SystemTime::now());
        if dump.name == self.interface {
            Ok(dump)
        } else {
            // The interface was renamed, so firewall rules with the old name do not match its packets.
            Err(DeviceError::Gone(self.interface.clone()))
        }
    }

    fn configured(&self) -> MutexGuard<'_, Peers> {
        self.configured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, action: &str, source: Error) -> DeviceError {
        match source.errno() {
            Some(Errno::NODEV) => DeviceError::Gone(self.interface.clone()),
            _ => kernel_error(&format!("{action} {}", self.interface), source),
        }
    }

    fn listen_error(&self, port: u16, source: Error) -> DeviceError {
        match source.errno() {
            Some(Errno::ADDRINUSE) => DeviceError::Listen {
                port,
                source: source.into(),
            },
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
        let is_key_new = configuration.private_key.as_bytes() != self.configuration.private_key.as_bytes();
        self.change(configuration, is_key_new)
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let changes_preshared_key =
            |change: &PeerChange| matches!(change, PeerChange::Update(_, update) if update.preshared_key.is_some());
        // `messages::plan` removes a peer whose preshared key changes, and adds it again with its live endpoint.
        let live = if changes.iter().any(changes_preshared_key) {
            let peers = self.read()?.peers.into_iter();
            peers
                .filter_map(|(key, (spec, _))| Some((key, spec.endpoint?)))
                .collect()
        } else {
            messages::LiveEndpoints::default()
        };
        let messages = messages::plan(&self.configured(), &live, changes);
        self.send(messages)?;
        device::apply(&mut self.configured(), changes);
        Ok(())
    }

    fn observe(&self) -> Result<Observed, DeviceError> {
        let DeviceDump {
            name: _,
            public_key,
            listen_port,
            fwmark,
            peers,
        } = self.read()?;
        let link =
            link::by_index(&self.links, self.index).map_err(|source| self.error("read the counters of", source))?;
        let wanted = &self.configuration;
        let altered = [
            (
                link.as_ref().is_some_and(|link| link.mtu != u32::from(wanted.mtu)),
                Altered::Mtu,
            ),
            // With port 0 the kernel chooses the port, so every port is right.
            (![0, listen_port].contains(&wanted.listen_port), Altered::ListenPort),
            (fwmark != wanted.fwmark, Altered::Fwmark),
            (link.as_ref().is_some_and(|link| !link.is_up), Altered::Down),
            (
                public_key != Some(PublicKey::from(&wanted.private_key).to_bytes()),
                Altered::PrivateKey,
            ),
        ];
        let mut last_configured = self.configured();
        let peers = peers.into_iter().map(|(key, (live, stats))| {
            let endpoint = last_configured.get(&key).map_or(live.endpoint, |spec| spec.endpoint);
            let configured = PeerSpec { endpoint, ..live };
            (key, ObservedPeer { configured, stats })
        });
        let peers: device::ObservedPeers = peers.collect();
        *last_configured = peers
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
                .filter_map(|(is_altered, part)| is_altered.then_some(part))
                .collect(),
        })
    }

    fn repair(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError> {
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
                Altered::Down => self.set_up(listen_port)?,
                Altered::PrivateKey => self.set_key(&private_key)?,
            }
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), DeviceError> {
        netlink_link::delete(&self.links, self.index)
            .map_err(|source| kernel_error(&format!("remove {}", self.interface), source))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        for spec in self.configured().values_mut() {
            spec.preshared_key = None;
        }
        self.configuration.private_key.zeroize();
    }
}

fn open_links() -> Result<Socket, DeviceError> {
    Socket::open(Protocol::Route).map_err(|source| kernel_error("open a netlink socket", source))
}

fn find_link(links: &Socket, interface: &str) -> Result<Option<Link>, DeviceError> {
    link::by_name(links, interface).map_err(|source| kernel_error(&format!("look for interface {interface}"), source))
}

/// The id of WireGuard's generic netlink family (`CTRL_CMD_GETFAMILY`).
fn family(netlink: &Socket) -> Result<u16, Error> {
    let request = GenlMessage::from_payload(GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName("wireguard".to_owned())],
    });
    let answer = netlink.get(&request)?;
    answer
        .payload
        .nlas
        .iter()
        .find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(id) => Some(*id),
            _ => None,
        })
        .ok_or_else(|| DecodeError::from("it contains no family id").into())
}

fn no_wireguard(interface: &str, source: Error) -> DeviceError {
    match source.errno() {
        Some(Errno::OPNOTSUPP) => DeviceError::NoKernelWireguard,
        _ => kernel_error(&format!("make the WireGuard interface {interface}"), source),
    }
}

fn kernel_error(action: &str, source: Error) -> DeviceError {
    DeviceError::Kernel {
        action: action.to_owned(),
        source: source.into(),
    }
}
