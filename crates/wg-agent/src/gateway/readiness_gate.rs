//! Keeps a new gateway unready until sandboxes have connected to it, so that a rollout or a node drain stops the next
//! gateway only when this one works. A sandbox connects as soon as the API server of its cluster has the Peer with the
//! key of this gateway.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::{ObservedPeer, ObservedPeers};
use clustermesh_core::key::PublicKey;
use clustermesh_daemon::{Readiness, ReadinessItem};

use crate::status::Trouble;

/// How long the gateway waits for sandboxes to connect. Some may not connect at all, because their API server or nodes are
/// down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Name of a sandbox's SandboxAccess -> public keys of the sandbox's nodes. Contains only nodes that are desired peers.
pub(super) type NodeKeys = BTreeMap<String, BTreeSet<PublicKey>>;

/// Keeps the gateway unready until one node of each sandbox with peers on the device has completed a handshake, but at most
/// for [`CONNECT_TIMEOUT`].
#[derive(Debug)]
pub(super) struct ReadinessGate {
    readiness: Readiness,
    state: GateState,
}

#[derive(Debug)]
enum GateState {
    /// The sandboxes are not known yet. Until they are, other lines of `/readyz` keep the gateway unready.
    New,
    /// Unready: these sandboxes have not connected.
    Waiting {
        until: Instant,
        sandboxes: NodeKeys,
        /// The line in `/readyz`.
        _line: ReadinessItem,
    },
    /// Ready. No node of these sandboxes has connected.
    Open { missing: NodeKeys },
}

impl ReadinessGate {
    /// `is_new` = this process created the gateway's key. An existing key is already known to the sandboxes, so the gate
    /// is open.
    pub(super) const fn new(readiness: Readiness, is_new: bool) -> Self {
        let state = if is_new {
            GateState::New
        } else {
            GateState::Open {
                missing: NodeKeys::new(),
            }
        };
        Self { readiness, state }
    }

    /// Starts to wait for the sandboxes that have peers on the device. Sandboxes that are added later are not waited for.
    pub(super) fn begin(&mut self, mut sandboxes: NodeKeys, now: Instant) {
        if !matches!(self.state, GateState::New) {
            return;
        }
        sandboxes.retain(|_, keys| !keys.is_empty());
        self.wait_or_open(now + CONNECT_TIMEOUT, sandboxes);
    }

    /// Stops waiting for the sandboxes that have connected or have no peers any more. Opens the gate when none is left, or
    /// after the timeout.
    pub(super) fn observe(&mut self, peers: &ObservedPeers, now: Instant) {
        let connected = |peer: &&ObservedPeer| peer.stats.handshake_age.is_some();
        // Keeps the sandboxes that have a peer on the device, but no peer that has connected.
        let unconnected = |sandboxes: &NodeKeys| {
            let mut unconnected = sandboxes.clone();
            unconnected.retain(|_, keys| {
                let mut nodes = keys.iter().filter_map(|key| peers.get(key)).peekable();
                nodes.peek().is_some() && !nodes.any(|peer| connected(&peer))
            });
            unconnected
        };
        match &self.state {
            GateState::New => {}
            GateState::Waiting { until, sandboxes, .. } if now < *until => {
                self.wait_or_open(*until, unconnected(sandboxes))
            }
            GateState::Waiting { sandboxes, .. } | GateState::Open { missing: sandboxes } => {
                let missing = unconnected(sandboxes);
                self.state = GateState::Open { missing };
            }
        }
    }

    /// Waits for these sandboxes; opens the gate if there are none.
    fn wait_or_open(&mut self, until: Instant, sandboxes: NodeKeys) {
        self.state = if sandboxes.is_empty() {
            GateState::Open { missing: sandboxes }
        } else {
            let line = self.readiness.pending(format!(
                "sandboxes: no node of {} has connected to this new gateway yet; it is ready after {CONNECT_TIMEOUT:?} at the latest",
                names(&sandboxes)
            ));
            GateState::Waiting {
                until,
                sandboxes,
                _line: line,
            }
        };
    }

    /// A warning about sandboxes that have not connected in time. They do not keep the gateway unready, because otherwise
    /// a sandbox could block every rollout.
    pub(super) fn warning(&self) -> Option<Trouble> {
        let GateState::Open { missing } = &self.state else {
            return None;
        };
        (!missing.is_empty()).then(|| {
            let message = format!(
                "no node of {} has connected since this gateway started: check whether its endpoints (status.endpoints) can be reached by UDP \
                 from there, and whether wg-agent runs there",
                names(missing)
            );
            Trouble::harmless("sandboxes", message)
        })
    }
}

fn names(sandboxes: &NodeKeys) -> String {
    let names: Vec<&str> = sandboxes.keys().map(String::as_str).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::device::PeerStats;

    use super::*;

    const KEYS: [PublicKey; 3] = [
        PublicKey::new([1; 32]),
        PublicKey::new([2; 32]),
        PublicKey::new([3; 32]),
    ];

    fn sandboxes() -> NodeKeys {
        let [one, two, other] = KEYS;
        [
            ("m--a".to_owned(), [one, two].into()),
            ("m--b".to_owned(), [other].into()),
            ("m--c".to_owned(), BTreeSet::new()),
        ]
        .into()
    }

    /// All three peers. Those with `keys` have completed a handshake.
    fn connected(keys: &[PublicKey]) -> ObservedPeers {
        let peer = |key: PublicKey| {
            let handshake_age = keys.contains(&key).then_some(Duration::ZERO);
            let stats = PeerStats {
                handshake_age,
                ..PeerStats::default()
            };
            let peer = ObservedPeer {
                stats,
                ..ObservedPeer::default()
            };
            (key, peer)
        };
        KEYS.map(peer).into()
    }

    #[test]
    fn gateway_is_ready_when_a_node_of_each_sandbox_has_connected() {
        let (readiness, now) = (Readiness::new(), Instant::now());
        let mut gate = ReadinessGate::new(readiness.clone(), true);
        gate.begin(sandboxes(), now);
        gate.observe(&connected(&[]), now);
        assert!(readiness.pending_items()[0].contains("no node of m--a, m--b has connected"));
        gate.observe(&connected(&KEYS[1..2]), now);
        assert!(readiness.pending_items()[0].contains("no node of m--b has connected"));
        gate.observe(&connected(&KEYS[1..]), now);
        assert!(readiness.is_ready());
        gate.begin(sandboxes(), now);
        assert!(readiness.is_ready(), "an open gate does not wait again");
    }

    #[test]
    fn gateway_is_ready_after_the_connect_timeout() {
        let (readiness, now) = (Readiness::new(), Instant::now());
        let mut gate = ReadinessGate::new(readiness.clone(), true);
        gate.begin(sandboxes(), now);
        gate.observe(&connected(&[]), now + CONNECT_TIMEOUT - Duration::from_millis(1));
        assert!(!readiness.is_ready());
        assert_eq!(gate.warning(), None);
        gate.observe(&connected(&[]), now + CONNECT_TIMEOUT);
        assert!(readiness.is_ready());
        assert!(
            gate.warning()
                .unwrap()
                .message
                .starts_with("no node of m--a, m--b has connected")
        );
        gate.observe(&connected(&KEYS[1..2]), now + CONNECT_TIMEOUT);
        assert!(
            gate.warning()
                .unwrap()
                .message
                .starts_with("no node of m--b has connected")
        );
        let mut without_b = connected(&[]);
        without_b.remove(&KEYS[2]);
        gate.observe(&without_b, now + CONNECT_TIMEOUT);
        assert_eq!(gate.warning(), None, "a removed sandbox");
    }

    #[test]
    fn gateway_with_an_existing_key_is_ready_at_once() {
        let (readiness, now) = (Readiness::new(), Instant::now());
        let mut gate = ReadinessGate::new(readiness.clone(), false);
        gate.begin(sandboxes(), now);
        assert!(readiness.is_ready());
    }
}
