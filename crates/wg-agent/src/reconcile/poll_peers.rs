//! Polls the peers after each pass and between passes: updates their state, tries other endpoints, and updates metrics, the Node's
//! annotations and `/debug/state`. Writes to the device only when it tries another endpoint; then it also
//! repairs external changes of the device.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Instant};

use clustermesh_agent_core::{
    device::{PeerStats, diff},
    health::PeerHealth,
};
use clustermesh_api::{
    annotations::{self, AgentStatus, Link},
    names::KILO_DISCOVERED_ENDPOINTS,
};
use clustermesh_core::key::PublicKey;

use super::{AppliedState, Reconciler, dump};
use crate::{
    device::Observed,
    firewall::Backend,
    identity::key,
    metrics::PeerSample,
    publish::{
        discovered,
        identity::{self, AnnotationInputs},
    },
    route::Routing,
    source::datapath::DatapathProblem,
    status::view::DeviceView,
};

/// The result of one poll.
pub(super) struct PeerPoll {
    pub(super) at: Instant,
    pub(super) device: DeviceView,
    pub(super) agent: AgentStatus,
    pub(super) peers: BTreeMap<PublicKey, PolledPeer>,
}

/// The result for one peer.
pub(super) struct PolledPeer {
    pub(super) state: PeerHealth,
    pub(super) stats: PeerStats,
    /// The endpoint that the agent configured.
    pub(super) configured: Option<SocketAddr>,
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Polls the peers once.
    pub(crate) fn poll_peers(&mut self) {
        let now = Instant::now();
        let Some(applied) = self.applied.clone() else { return };
        let observed = match self.device.open.as_ref().map(|open| open.device.observe()) {
            Some(Ok(observed)) => observed,
            Some(Err(error)) => {
                tracing::debug!(%error, "cannot observe the device");
                return;
            }
            None => return,
        };
        let endpoint_changed = self.tracker.update(&observed.peers, now);
        if endpoint_changed {
            if let Err(trouble) = self.apply_peers(&applied.compiled) {
                tracing::debug!(error = trouble.message, "cannot try another endpoint");
            }
        } else if !observed.altered.is_empty()
            || diff(&observed.peers, &self.desired_peers(&applied.compiled)).is_some()
        {
            // The next pass repairs external changes. WireGuard sends no notification of them.
            self.deps.cluster.store.wake();
        }
        self.deps.cache.content.send_if_modified(|content| {
            let changed = content.live != *self.tracker.live_endpoints();
            if changed {
                content.live.clone_from(self.tracker.live_endpoints());
            }
            changed
        });
        if self.rotation.is_some() || key::next_path(&self.deps.config.key_file).exists() {
            // Only a pass can start or continue a key rotation.
            self.deps.cluster.store.wake();
        }
        let poll = self.build_poll(&applied, observed, now);
        self.update_metrics(&applied, &poll);
        let key = self.key_to_publish();
        let node = dump::node(&self.deps.config.node_name, key.to_string(), &applied);
        let poll = Arc::new(poll);
        dump::update(&self.deps.report.dump, node, &applied, &poll);
        if !applied.is_node_listed {
            // While the Node comes from the cache, its annotations are unknown.
            return;
        }
        let desired = identity::desired(AnnotationInputs {
            public_key: key,
            wireguard_ip: self.deps.config.range.with_prefix(applied.wireguard_ip),
            port: self.deps.config.port,
            node: &applied.node,
            underlay: &applied.underlay.addresses,
            discovered: self.discovered_endpoints(&applied),
            agent: poll.agent.clone(),
            // When this node may write its status (`publish::Turn`).
            turn: applied.turn,
        });
        self.deps.publish.send_if_modified(|wanted| {
            let changed = *wanted != desired;
            *wanted = desired;
            changed
        });
    }

    /// The endpoints to publish: those from which live peers send although their Peer objects do not contain them.
    fn discovered_endpoints(&self, applied: &AppliedState) -> BTreeMap<PublicKey, SocketAddr> {
        let own = applied.node.own.as_ref();
        let published = own.and_then(|own| own.published.get(KILO_DISCOVERED_ENDPOINTS)?.as_deref());
        let published = annotations::discovered(published.unwrap_or_default());
        discovered::endpoints(&self.deps.config.node_name, self.tracker.live_peers(), &published)
    }

    fn build_poll(&self, applied: &AppliedState, observed: Observed, at: Instant) -> PeerPoll {
        let Observed {
            peers,
            listen_port,
            drops,
            altered: _,
        } = observed;
        let peers: BTreeMap<PublicKey, PolledPeer> = peers
            .into_iter()
            .map(|(key, peer)| {
                let polled = PolledPeer {
                    state: self.tracker.state(&key, at),
                    stats: peer.stats,
                    configured: self.tracker.desired_endpoint(&key),
                };
                (key, polled)
            })
            .collect();
        let open = self.device.open.as_ref();
        let (interface, backend, why) = open.map_or(("", "", ""), |open| {
            (open.device.interface(), open.device.backend(), open.backend_reason)
        });
        let device = DeviceView {
            interface: interface.to_owned(),
            backend: backend.to_owned(),
            why: why.to_owned(),
            mtu: applied.sizes.device.into(),
            listen_port,
            drops: drops
                .into_iter()
                .map(|(reason, count)| (reason.to_owned(), count))
                .collect(),
        };
        PeerPoll {
            at,
            agent: agent_annotation(
                applied,
                &device,
                &peers,
                self.deps.cluster.datapath_problem.borrow().as_ref(),
            ),
            device,
            peers,
        }
    }

    fn update_metrics(&self, applied: &AppliedState, poll: &PeerPoll) {
        let PeerPoll {
            at: _,
            device,
            agent: _,
            peers,
        } = poll;
        let samples: Vec<PeerSample> = peers
            .iter()
            .map(|(key, polled)| PeerSample {
                key: key.to_string(),
                name: applied.compiled.names.get(key).cloned().unwrap_or_default(),
                cluster: applied.members.get(key).map(|m| m.cluster.clone()).unwrap_or_default(),
                state: polled.state,
                handshake_age: polled.stats.handshake_age,
                rx: polled.stats.rx_bytes,
                tx: polled.stats.tx_bytes,
            })
            .collect();
        self.deps.report.metrics.set_peers(samples, &device.drops);
        self.deps.report.metrics.set_device(device);
    }
}

/// Computes the value of the agent's annotation on the Node.
fn agent_annotation(
    applied: &AppliedState,
    device: &DeviceView,
    peers: &BTreeMap<PublicKey, PolledPeer>,
    datapath_problem: Option<&DatapathProblem>,
) -> AgentStatus {
    let mut links: BTreeMap<String, Link> = BTreeMap::new();
    let mut total = Link::default();
    for (key, polled) in peers {
        count_peer(&mut total, polled.state);
        let Some(member) = applied.members.get(key) else {
            continue;
        };
        let (namespace, mesh) = &member.mesh;
        if !mesh.is_empty() && !member.cluster.is_empty() {
            let name = annotations::member_key(namespace, mesh, &member.cluster);
            count_peer(links.entry(name).or_default(), polled.state);
        }
    }
    let mut agent = AgentStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        backend: device.backend.clone(),
        mode: "full".to_owned(),
        mtu: device.mtu,
        policy_revision: applied.policy_revision.clone(),
        peers_up: total.up,
        peers_down: total.down,
        datapath_bypassed: DatapathProblem::annotation(datapath_problem),
        links: BTreeMap::new(),
    };
    agent.set_links(links);
    agent
}

const fn count_peer(link: &mut Link, state: PeerHealth) {
    link.total += 1;
    match state {
        PeerHealth::Up => link.up += 1,
        PeerHealth::Down => link.down += 1,
        PeerHealth::Unknown => {}
    }
}
