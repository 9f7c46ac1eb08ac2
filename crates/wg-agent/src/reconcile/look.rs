//! The look at the peers between passes: who answers, who has to be tried elsewhere, and what metrics, the Node and
//! `/debug/state` are told. Nothing but endpoints is changed here.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Instant};

use clustermesh_agent_core::{
    device::{PeerStats, diff},
    health::State,
};
use clustermesh_api::annotations::{self, Agent, Link};
use clustermesh_core::key::PublicKey;

use super::{Current, Reconciler, dump};
use crate::{
    device::Observed,
    firewall::Backend,
    identity::key,
    metrics::Traffic,
    publish::identity::{Facts, wanted},
    route::Routing,
    source::datapath::Found,
    status::view::DeviceView,
};

/// What one look found.
pub(super) struct Looked {
    pub(super) at: Instant,
    pub(super) device: DeviceView,
    pub(super) agent: Agent,
    pub(super) peers: BTreeMap<PublicKey, PeerLook>,
}

/// What it found of one peer.
pub(super) struct PeerLook {
    pub(super) state: State,
    pub(super) stats: PeerStats,
    /// The endpoint it is tried at.
    pub(super) configured: Option<SocketAddr>,
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Looks at the peers: tries elsewhere who does not answer, and tells metrics and the Node.
    pub(crate) fn look(&mut self) {
        let now = Instant::now();
        let Some(current) = self.current.clone() else { return };
        let observed = match self.device.as_ref().map(|(device, ..)| device.observe()) {
            Some(Ok(observed)) => observed,
            Some(Err(error)) => {
                tracing::debug!(%error, "cannot look at the device");
                return;
            }
            None => return,
        };
        if self.tracks.look(&observed.peers, now) {
            if let Err(trouble) = self.apply_peers(&current.compiled) {
                tracing::debug!(error = trouble.message, "cannot try another endpoint");
            }
        } else if !observed.altered.is_empty() || diff(&observed.peers, &self.wanted(&current.compiled)).is_some() {
            // WireGuard makes no event of what others do to it.
            self.parts.store.ring();
        }
        self.parts.kept.send_if_modified(|kept| {
            let changed = kept.live != *self.tracks.live();
            if changed {
                kept.live.clone_from(self.tracks.live());
            }
            changed
        });
        if self.rotation.is_some() || key::next(&self.parts.config.key_file).exists() {
            // Whether a key is to be changed is for a pass to see.
            self.parts.store.ring();
        }
        let looked = self.looked(&current, observed, now);
        self.measure(&current, &looked);
        let key = self.public_key();
        let node = dump::node(&self.parts.config.node_name, key.to_string(), &current);
        let looked = Arc::new(looked);
        dump::show(&self.parts.dump, node, &current, &looked);
        if !current.seen {
            // What stands on the Node is not known, and there is nobody to tell.
            return;
        }
        let told = wanted(Facts {
            public_key: key,
            wireguard_ip: self.parts.config.range.with_prefix(current.wireguard_ip),
            port: self.parts.config.port,
            node: &current.node,
            underlay: &current.underlay.addresses,
            agent: looked.agent.clone(),
        });
        self.parts.publish.send_if_modified(|wanted| {
            let changed = *wanted != told;
            *wanted = told;
            changed
        });
    }

    fn looked(&self, current: &Current, observed: Observed, at: Instant) -> Looked {
        let Observed {
            peers,
            listen_port,
            drops,
            altered: _,
        } = observed;
        let peers: BTreeMap<PublicKey, PeerLook> = peers
            .into_iter()
            .map(|(key, peer)| {
                let look = PeerLook {
                    state: self.tracks.state(&key, at),
                    stats: peer.stats,
                    configured: self.tracks.current(&key),
                };
                (key, look)
            })
            .collect();
        let (interface, backend) = self
            .device
            .as_ref()
            .map(|(device, ..)| (device.interface().to_owned(), device.backend()))
            .unwrap_or_default();
        let device = DeviceView {
            interface,
            backend: backend.to_owned(),
            why: self.why.clone(),
            mtu: current.sizes.device.into(),
            listen_port,
            drops: drops
                .into_iter()
                .map(|(reason, count)| (reason.to_owned(), count))
                .collect(),
        };
        Looked {
            at,
            agent: agent(current, &device, &peers, self.parts.bypassed.borrow().as_ref()),
            device,
            peers,
        }
    }

    fn measure(&self, current: &Current, looked: &Looked) {
        let Looked {
            at: _,
            device,
            agent: _,
            peers,
        } = looked;
        let traffic: Vec<Traffic> = peers
            .iter()
            .map(|(key, look)| Traffic {
                key: key.to_string(),
                name: current.compiled.names.get(key).cloned().unwrap_or_default(),
                cluster: current.members.get(key).map(|m| m.cluster.clone()).unwrap_or_default(),
                state: look.state,
                handshake_age: look.stats.handshake_age,
                rx: look.stats.rx_bytes,
                tx: look.stats.tx_bytes,
            })
            .collect();
        self.parts.metrics.traffic(traffic, &device.drops);
        self.parts.metrics.device(device);
    }
}

/// What the Node says of this agent.
fn agent(
    current: &Current,
    device: &DeviceView,
    peers: &BTreeMap<PublicKey, PeerLook>,
    bypassed: Option<&Found>,
) -> Agent {
    let mut links: BTreeMap<String, Link> = BTreeMap::new();
    let mut all = Link::default();
    for (key, look) in peers {
        count(&mut all, look.state);
        let member = current.members.get(key);
        if let Some(member) = member.filter(|member| !member.cluster.is_empty() && !member.mesh.1.is_empty()) {
            let (namespace, mesh) = &member.mesh;
            let name = annotations::member(namespace, mesh, &member.cluster);
            count(links.entry(name).or_default(), look.state);
        }
    }
    let mut agent = Agent {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        backend: device.backend.clone(),
        mode: "full".to_owned(),
        mtu: device.mtu,
        policy_revision: current.policy_revision.clone(),
        peers_up: all.up,
        peers_down: all.down,
        datapath_bypassed: Found::annotation(bypassed),
        links: BTreeMap::new(),
    };
    agent.set_links(links);
    agent
}

const fn count(link: &mut Link, state: State) {
    link.total += 1;
    match state {
        State::Up => link.up += 1,
        State::Down => link.down += 1,
        State::Unknown => {}
    }
}
