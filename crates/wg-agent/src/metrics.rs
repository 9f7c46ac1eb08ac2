//! The agent's metrics (prefix `wg_agent_`): by source cluster, never by peer, so that their number stays small. What they
//! mean is decided where they are set.

use std::{collections::BTreeMap, sync::Arc};

use clustermesh_agent_core::health::State;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// One word that tells the series of a family apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reason {
    /// As `OwnPodCIDR`.
    pub reason: String,
}

/// Which part of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Part {
    /// As `firewall`.
    pub part: &'static str,
}

/// Peers of one source cluster in one state.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ClusterState {
    /// Source cluster, by its name in the ClusterMesh; empty = a Peer that nobody's controller wrote.
    pub cluster: String,
    /// `up`, `down`, `unknown`.
    pub state: &'static str,
}

/// One source cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Cluster {
    /// Source cluster, by its name in the ClusterMesh; empty = a Peer that nobody's controller wrote.
    pub cluster: String,
}

/// All of them. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    peers: Family<ClusterState, Gauge>,
    received: Family<Cluster, Counter>,
    sent: Family<Cluster, Counter>,
    refused: Family<Reason, Gauge>,
    dropped: Family<Reason, Counter>,
    applied: Family<Part, Counter>,
    errors: Family<Part, Counter>,
    remembered: Gauge,
    counted: Arc<std::sync::Mutex<Counted>>,
}

/// What the counters were last told, since devices count per peer and peers go.
#[derive(Debug, Default)]
struct Counted {
    peers: BTreeMap<String, (u64, u64)>,
    drops: BTreeMap<&'static str, u64>,
}

/// What the device says of one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Which peer.
    pub key: String,
    /// Its source cluster.
    pub cluster: String,
    /// How it is.
    pub state: State,
    /// Bytes received since it is on the device.
    pub rx: u64,
    /// Bytes sent since it is on the device.
    pub tx: u64,
}

impl Metrics {
    /// Registers all of them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let Self {
            peers,
            received,
            sent,
            refused,
            dropped,
            applied,
            errors,
            remembered,
            counted: _,
        } = metrics.clone();
        registry.register("peers", "Peers on the device, by source cluster and state", peers);
        registry.register(
            "received_bytes",
            "Bytes of WireGuard payload received from a cluster's nodes",
            received,
        );
        registry.register(
            "sent_bytes",
            "Bytes of WireGuard payload sent to a cluster's nodes",
            sent,
        );
        registry.register(
            "peers_refused",
            "Peers and policies' networks left out, by reason",
            refused,
        );
        registry.register("device_drops", "Packets the device dropped, by reason", dropped);
        registry.register("applied_changes", "Changes made to the node, by part", applied);
        registry.register("errors", "What failed and is tried again, by part", errors);
        registry.register(
            "remembered_kinds",
            "Kinds of objects taken from the cache, since the API server has not answered since the start",
            remembered,
        );
        metrics
    }

    /// Something on the node was changed.
    pub fn applied(&self, part: &'static str, changes: usize) {
        self.applied.get_or_create(&Part { part }).inc_by(changes as u64);
    }

    /// Something failed.
    pub fn failed(&self, part: &'static str) {
        self.errors.get_or_create(&Part { part }).inc();
    }

    /// Of how many kinds only what an earlier process kept is known.
    pub fn remembered(&self, kinds: usize) {
        self.remembered.set(i64::try_from(kinds).unwrap_or(i64::MAX));
    }

    /// How many objects are left out now, by reason.
    pub fn refused(&self, reasons: &BTreeMap<String, i64>) {
        self.refused.clear();
        for (reason, count) in reasons {
            self.refused
                .get_or_create(&Reason { reason: reason.clone() })
                .set(*count);
        }
    }

    /// What the device counts now.
    pub fn traffic(&self, peers: &[Traffic], drops: &BTreeMap<&'static str, u64>) {
        let mut counted = self.counted.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut states: BTreeMap<(&str, &'static str), i64> = BTreeMap::new();
        let mut now = BTreeMap::new();
        for peer in peers {
            for state in [State::Up, State::Down, State::Unknown] {
                let count = states.entry((&peer.cluster, state.as_str())).or_default();
                *count += i64::from(state == peer.state);
            }
            let (rx, tx) = counted.peers.get(&peer.key).copied().unwrap_or_default();
            let cluster = Cluster {
                cluster: peer.cluster.clone(),
            };
            self.received.get_or_create(&cluster).inc_by(grown(rx, peer.rx));
            self.sent.get_or_create(&cluster).inc_by(grown(tx, peer.tx));
            now.insert(peer.key.clone(), (peer.rx, peer.tx));
        }
        self.peers.clear();
        for ((cluster, state), count) in states {
            self.peers
                .get_or_create(&ClusterState {
                    cluster: cluster.to_owned(),
                    state,
                })
                .set(count);
        }
        for (reason, count) in drops {
            let before = counted.drops.insert(reason, *count).unwrap_or_default();
            self.dropped
                .get_or_create(&Reason {
                    reason: (*reason).to_owned(),
                })
                .inc_by(grown(before, *count));
        }
        counted.peers = now;
    }
}

/// A smaller number than before is one that began anew.
const fn grown(before: u64, now: u64) -> u64 {
    if now >= before { now - before } else { now }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(key: &str, cluster: &str, state: State, rx: u64, tx: u64) -> Traffic {
        Traffic {
            key: key.into(),
            cluster: cluster.into(),
            state,
            rx,
            tx,
        }
    }

    #[test]
    fn counters_never_fall_when_peers_go_or_begin_anew() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        metrics.traffic(
            &[
                peer("a", "mgmt", State::Up, 100, 10),
                peer("b", "mgmt", State::Down, 5, 5),
            ],
            &[("source", 3)].into(),
        );
        metrics.traffic(&[peer("a", "mgmt", State::Unknown, 30, 11)], &[("source", 4)].into());
        metrics.refused(&[("OwnPodCIDR".to_owned(), 2)].into());
        let text = clustermesh_daemon::metrics::encode(&registry).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let has = |line: &str| assert!(lines.contains(&line), "{line} is not in {lines:#?}");
        has("received_bytes_total{cluster=\"mgmt\"} 135");
        has("sent_bytes_total{cluster=\"mgmt\"} 16");
        has("peers{cluster=\"mgmt\",state=\"up\"} 0");
        has("peers{cluster=\"mgmt\",state=\"unknown\"} 1");
        has("peers_refused{reason=\"OwnPodCIDR\"} 2");
        has("device_drops_total{reason=\"source\"} 4");
    }
}
