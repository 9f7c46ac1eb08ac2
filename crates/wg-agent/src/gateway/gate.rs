//! Keeps a new gateway unready until sandboxes have connected to it, so that a rollout or a drain of nodes ends the other gateways only
//! when this one serves. A sandbox connects as soon as its own API server has the Peer with this gateway's key.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::{ObservedPeer, ObservedPeers};
use clustermesh_core::key::PublicKey;
use clustermesh_daemon::{Pending, Readiness};

use crate::status::Trouble;

/// A sandbox that has not connected by then stops counting: its API server or its nodes may be down.
const PATIENCE: Duration = Duration::from_secs(15);

/// The keys of each sandbox's nodes, by the name of its SandboxAccess.
pub(super) type Nodes = BTreeMap<String, BTreeSet<PublicKey>>;

/// Closed until one node of each sandbox has completed a handshake.
#[derive(Debug)]
pub(super) struct Gate {
    readiness: Readiness,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Which sandboxes count is not known yet.
    New,
    /// These have not connected.
    Waiting {
        until: Instant,
        sandboxes: Nodes,
        /// In `/readyz`.
        _line: Pending,
    },
    /// Of these sandboxes no node has connected.
    Open { missing: Nodes },
}

impl Gate {
    /// `is_new` = no process before had this gateway's key. Otherwise sandboxes have it already, and the gate is open.
    pub(super) const fn new(readiness: Readiness, is_new: bool) -> Self {
        let state = if is_new {
            State::New
        } else {
            State::Open { missing: Nodes::new() }
        };
        Self { readiness, state }
    }

    /// Begins to wait for the sandboxes that the device has peers of. Later ones do not count.
    pub(super) fn begin(&mut self, mut sandboxes: Nodes, now: Instant) {
        if !matches!(self.state, State::New) {
            return;
        }
        sandboxes.retain(|_, keys| !keys.is_empty());
        self.wait(now + PATIENCE, sandboxes);
    }

    /// Takes note of the handshakes until `now`.
    pub(super) fn observe(&mut self, peers: &ObservedPeers, now: Instant) {
        let connected = |peer: &&ObservedPeer| peer.stats.handshake_age.is_some();
        // Those that still have peers, none of which has connected.
        let left = |sandboxes: &Nodes| {
            let mut left = sandboxes.clone();
            left.retain(|_, keys| {
                let mut of_it = keys.iter().filter_map(|key| peers.get(key)).peekable();
                of_it.peek().is_some() && !of_it.any(|peer| connected(&peer))
            });
            left
        };
        match &self.state {
            State::New => {}
            State::Waiting { until, sandboxes, .. } if now < *until => self.wait(*until, left(sandboxes)),
            State::Waiting { sandboxes, .. } | State::Open { missing: sandboxes } => {
                let missing = left(sandboxes);
                self.state = State::Open { missing };
            }
        }
    }

    fn wait(&mut self, until: Instant, sandboxes: Nodes) {
        self.state = if sandboxes.is_empty() {
            State::Open { missing: sandboxes }
        } else {
            let line = self.readiness.pending(format!(
                "sandboxes: no node of {} has connected to this new gateway yet; it is ready after {PATIENCE:?} at the latest",
                names(&sandboxes)
            ));
            State::Waiting {
                until,
                sandboxes,
                _line: line,
            }
        };
    }

    /// Sandboxes that are no longer waited for and still have not connected. They do not keep the gateway unready: a sandbox could hold
    /// up every rollout.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        let State::Open { missing } = &self.state else {
            return None;
        };
        (!missing.is_empty()).then(|| {
            let message = format!(
                "no node of {} has connected since this gateway started: look whether its endpoints (status.endpoints) can be reached by UDP \
                 from there, and whether wg-agent runs there",
                names(missing)
            );
            Trouble::harmless("sandboxes", message)
        })
    }
}

fn names(sandboxes: &Nodes) -> String {
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

    fn sandboxes() -> Nodes {
        let [one, two, other] = KEYS;
        [
            ("m--a".to_owned(), [one, two].into()),
            ("m--b".to_owned(), [other].into()),
            ("m--c".to_owned(), BTreeSet::new()),
        ]
        .into()
    }

    /// All three peers; these have completed a handshake.
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
        let mut gate = Gate::new(readiness.clone(), true);
        gate.begin(sandboxes(), now);
        gate.observe(&connected(&[]), now);
        assert!(readiness.list()[0].contains("no node of m--a, m--b has connected"));
        gate.observe(&connected(&KEYS[1..2]), now);
        assert!(readiness.list()[0].contains("no node of m--b has connected"));
        gate.observe(&connected(&KEYS[1..]), now);
        assert!(readiness.is_ready());
        gate.begin(sandboxes(), now);
        assert!(readiness.is_ready(), "sandboxes that come later");
    }

    #[test]
    fn sandbox_that_does_not_connect_in_time_stops_counting() {
        let (readiness, now) = (Readiness::new(), Instant::now());
        let mut gate = Gate::new(readiness.clone(), true);
        gate.begin(sandboxes(), now);
        gate.observe(&connected(&[]), now + PATIENCE - Duration::from_millis(1));
        assert!(!readiness.is_ready());
        assert_eq!(gate.trouble(), None);
        gate.observe(&connected(&[]), now + PATIENCE);
        assert!(readiness.is_ready());
        assert!(
            gate.trouble()
                .unwrap()
                .message
                .starts_with("no node of m--a, m--b has connected")
        );
        gate.observe(&connected(&KEYS[1..2]), now + PATIENCE);
        assert!(
            gate.trouble()
                .unwrap()
                .message
                .starts_with("no node of m--b has connected")
        );
        let mut without_b = connected(&[]);
        without_b.remove(&KEYS[2]);
        gate.observe(&without_b, now + PATIENCE);
        assert_eq!(gate.trouble(), None, "a sandbox that is gone");
    }

    #[test]
    fn gateway_whose_key_sandboxes_have_is_ready_at_once() {
        let (readiness, now) = (Readiness::new(), Instant::now());
        let mut gate = Gate::new(readiness.clone(), false);
        gate.begin(sandboxes(), now);
        assert!(readiness.is_ready());
    }
}
