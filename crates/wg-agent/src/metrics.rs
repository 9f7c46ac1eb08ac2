//! The agent's metrics (prefix `wg_agent_`). Those of peers are aggregated by source cluster, so that their number stays small;
//! `--metrics-per-peer` adds metrics of each peer (module `peers`).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use clustermesh_agent_core::health::PeerHealth;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use crate::{conntrack, status::view::DeviceView};

mod peers;

/// The label of a metric that has one value for each reason.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reason {
    /// Such as `OwnPodCIDR`.
    pub reason: String,
}

/// The label of a metric that has one value for each part of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Part {
    /// Such as `firewall`. Repairs of one setting of the device have the name of the setting instead, such as `mtu`.
    pub part: &'static str,
}

/// The labels of a metric that has one value for each source cluster and state.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ClusterState {
    /// Source cluster, by its name in the ClusterMesh; empty = there is no Peer, or no controller wrote it.
    pub cluster: String,
    /// `up`, `down`, `unknown`.
    pub state: &'static str,
}

/// The label of a metric that has one value for each source cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Cluster {
    /// Source cluster, by its name in the ClusterMesh; empty = there is no Peer, or no controller wrote it.
    pub cluster: String,
}

/// The labels of the device's metric.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceInfo {
    /// Such as `kilo0`.
    interface: String,
    /// `kernel`, `userspace`.
    backend: String,
}

/// All metrics. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    device: Family<DeviceInfo, Gauge>,
    mtu: Gauge,
    oldest_handshake: Family<Cluster, Gauge>,
    per_peer: Option<peers::Peers>,
    peers: Family<ClusterState, Gauge>,
    received: Family<Cluster, Counter>,
    sent: Family<Cluster, Counter>,
    refused: Family<Reason, Gauge>,
    dropped: Family<Reason, Counter>,
    applied: Family<Part, Counter>,
    errors: Family<Part, Counter>,
    repairs: Family<Part, Counter>,
    cached_kinds: Gauge,
    bypassed: Gauge,
    last_counters: Arc<std::sync::Mutex<LastCounters>>,
}

/// The device's counters at the last update. The metrics are increased by the differences, because the counters of a
/// removed peer disappear.
#[derive(Debug, Default)]
struct LastCounters {
    peers: BTreeMap<String, (u64, u64)>,
    drops: BTreeMap<String, u64>,
}

/// The state and counters of one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSample {
    /// Its public key.
    pub key: String,
    /// Name of its Peer; empty = there is none.
    pub name: String,
    /// Its source cluster.
    pub cluster: String,
    /// Its state.
    pub state: PeerHealth,
    /// Time since its last handshake; `None` = never.
    pub handshake_age: Option<Duration>,
    /// Bytes received since the peer was added to the device.
    pub rx: u64,
    /// Bytes sent since the peer was added to the device.
    pub tx: u64,
}

impl Metrics {
    /// Registers all metrics.
    pub fn register(registry: &mut Registry, with_per_peer: bool) -> Self {
        let metrics = Self {
            per_peer: with_per_peer.then(peers::Peers::default),
            ..Self::default()
        };
        let Self {
            device,
            mtu,
            oldest_handshake,
            per_peer,
            peers,
            received,
            sent,
            refused,
            dropped,
            applied,
            errors,
            repairs,
            cached_kinds,
            bypassed,
            last_counters: _,
        } = metrics.clone();
        registry.register("device", "The WireGuard device, by its labels", device);
        registry.register("device_mtu_bytes", "MTU of the device: bytes of an inner packet", mtu);
        registry.register(
            "oldest_handshake_seconds",
            "Age of the oldest last handshake among a cluster's peers that are up; a session in use is renewed after \
             120 s, and every session expires after 180 s",
            oldest_handshake,
        );
        registry.register_collector(Box::new(conntrack::ConntrackCollector));
        if let Some(per_peer) = per_peer {
            registry.register_collector(Box::new(per_peer));
        }
        registry.register(
            "datapath_bypassed",
            "1 if packets bypass netfilter (Cilium with host routing in BPF), or kube-proxy translates addresses with IPVS",
            bypassed,
        );
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
            "Peers and networks of PeerPolicies that are left out, by reason",
            refused,
        );
        registry.register("device_drops", "Packets the device dropped, by reason", dropped);
        registry.register("applied_changes", "Changes made to the node, by part", applied);
        registry.register("repairs", "Repairs of external changes, by part", repairs);
        registry.register("errors", "Errors, which are retried, by part", errors);
        registry.register(
            "remembered_kinds",
            "Kinds of objects known only from the cache: the API server has not listed them since the agent started",
            cached_kinds,
        );
        metrics
    }

    /// Counts changes made to the node.
    pub fn count_changes(&self, part: &'static str, changes: usize) {
        self.applied.get_or_create(&Part { part }).inc_by(changes as u64);
    }

    /// Counts repairs of external changes.
    pub fn count_repairs(&self, part: &'static str, repairs: usize) {
        self.repairs.get_or_create(&Part { part }).inc_by(repairs as u64);
    }

    /// Counts an error.
    pub fn count_error(&self, part: &'static str) {
        self.errors.get_or_create(&Part { part }).inc();
    }

    /// Sets `datapath_bypassed`.
    pub fn set_bypassed(&self, is_bypassed: bool) {
        self.bypassed.set(i64::from(is_bypassed));
    }

    /// Sets the number of kinds that are only known from the cache.
    pub fn set_cached_kinds(&self, kinds: usize) {
        self.cached_kinds.set(i64::try_from(kinds).unwrap_or(i64::MAX));
    }

    /// Sets `peers_refused`, by reason.
    pub fn set_refused(&self, reasons: &BTreeMap<String, i64>) {
        self.refused.clear();
        for (reason, count) in reasons {
            self.refused
                .get_or_create(&Reason { reason: reason.clone() })
                .set(*count);
        }
    }

    /// Updates the metrics of peers and of the packets that the device dropped.
    pub fn set_peers(&self, peers: Vec<PeerSample>, drops: &BTreeMap<String, u64>) {
        let mut last = self
            .last_counters
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut states: BTreeMap<(&str, &'static str), i64> = BTreeMap::new();
        let mut now = BTreeMap::new();
        let mut oldest: BTreeMap<&str, Duration> = BTreeMap::new();
        for peer in &peers {
            if let Some(age) = peer.handshake_age.filter(|_| peer.state == PeerHealth::Up) {
                let oldest = oldest.entry(&peer.cluster).or_default();
                *oldest = age.max(*oldest);
            }
            for state in [PeerHealth::Up, PeerHealth::Down, PeerHealth::Unknown] {
                let count = states.entry((&peer.cluster, state.as_str())).or_default();
                *count += i64::from(state == peer.state);
            }
            let (rx, tx) = last.peers.get(&peer.key).copied().unwrap_or_default();
            let cluster = Cluster {
                cluster: peer.cluster.clone(),
            };
            self.received.get_or_create(&cluster).inc_by(increase(rx, peer.rx));
            self.sent.get_or_create(&cluster).inc_by(increase(tx, peer.tx));
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
        self.oldest_handshake.clear();
        for (cluster, age) in oldest {
            let cluster = cluster.to_owned();
            self.oldest_handshake
                .get_or_create(&Cluster { cluster })
                .set(i64::try_from(age.as_secs()).unwrap_or(i64::MAX));
        }
        for (reason, count) in drops {
            let before = last.drops.insert(reason.clone(), *count).unwrap_or_default();
            self.dropped
                .get_or_create(&Reason { reason: reason.clone() })
                .inc_by(increase(before, *count));
        }
        last.peers = now;
        if let Some(per_peer) = &self.per_peer {
            per_peer.set(peers);
        }
    }

    /// Sets the device's labels and MTU.
    pub(crate) fn set_device(&self, device: &DeviceView) {
        self.device.clear();
        let info = DeviceInfo {
            interface: device.interface.clone(),
            backend: device.backend.clone(),
        };
        self.device.get_or_create(&info).set(1);
        self.mtu.set(device.mtu.into());
    }
}

/// The increase of a counter. A counter that became smaller was reset.
const fn increase(before: u64, now: u64) -> u64 {
    if now >= before { now - before } else { now }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(key: &str, cluster: &str, state: PeerHealth, rx: u64, tx: u64) -> PeerSample {
        PeerSample {
            key: key.into(),
            name: format!("prod--{cluster}--{key}"),
            cluster: cluster.into(),
            state,
            handshake_age: Some(Duration::from_millis(rx * 1000 + 999)),
            rx,
            tx,
        }
    }

    fn lines(registry: &Registry) -> Vec<String> {
        let text = clustermesh_daemon::metrics::encode(registry).unwrap();
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .map(Into::into)
            .collect()
    }

    #[test]
    fn counters_never_fall_when_peers_are_removed_or_reset() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry, false);
        metrics.set_peers(
            vec![
                peer("a", "mgmt", PeerHealth::Up, 100, 10),
                peer("b", "mgmt", PeerHealth::Down, 5, 5),
            ],
            &[("source".to_owned(), 3)].into(),
        );
        metrics.set_peers(
            vec![
                peer("a", "mgmt", PeerHealth::Unknown, 30, 11),
                peer("c", "mgmt", PeerHealth::Up, 7, 0),
                peer("d", "mgmt", PeerHealth::Up, 6, 0),
            ],
            &[("source".to_owned(), 4)].into(),
        );
        metrics.set_refused(&[("OwnPodCIDR".to_owned(), 2)].into());
        metrics.set_device(&DeviceView {
            interface: "kilo0".into(),
            backend: "userspace".into(),
            mtu: 1420,
            ..DeviceView::default()
        });
        let lines = lines(&registry);
        let has = |line: &str| assert!(lines.iter().any(|l| l == line), "{line} is not in {lines:#?}");
        has("received_bytes_total{cluster=\"mgmt\"} 148");
        has("sent_bytes_total{cluster=\"mgmt\"} 16");
        has("peers{cluster=\"mgmt\",state=\"up\"} 2");
        has("peers{cluster=\"mgmt\",state=\"down\"} 0");
        has("peers{cluster=\"mgmt\",state=\"unknown\"} 1");
        has("oldest_handshake_seconds{cluster=\"mgmt\"} 7");
        has("peers_refused{reason=\"OwnPodCIDR\"} 2");
        has("device_drops_total{reason=\"source\"} 4");
        has("device{interface=\"kilo0\",backend=\"userspace\"} 1");
        has("device_mtu_bytes 1420");
        assert!(!lines.iter().any(|line| line.contains("prod--")), "{lines:#?}");
    }

    #[test]
    fn per_peer_metrics_are_limited_to_a_thousand_peers() {
        let mut registry = Registry::with_prefix("wg_agent");
        let metrics = Metrics::register(&mut registry, true);
        let never = PeerSample {
            handshake_age: None,
            ..peer("b", "mgmt", PeerHealth::Down, 0, 148)
        };
        metrics.set_peers(vec![peer("a", "mgmt", PeerHealth::Up, 3, 4), never], &BTreeMap::new());
        let found = lines(&registry);
        let peer_lines: Vec<&str> = found.iter().filter(|l| l.contains("prod--")).map(|l| &**l).collect();
        assert_eq!(
            peer_lines,
            [
                "wg_agent_peer_state{cluster=\"mgmt\",peer=\"prod--mgmt--a\",state=\"up\"} 1",
                "wg_agent_peer_state{cluster=\"mgmt\",peer=\"prod--mgmt--b\",state=\"down\"} 1",
                "wg_agent_peer_handshake_seconds{cluster=\"mgmt\",peer=\"prod--mgmt--a\"} 3",
                "wg_agent_peer_received_bytes_total{cluster=\"mgmt\",peer=\"prod--mgmt--a\"} 3",
                "wg_agent_peer_received_bytes_total{cluster=\"mgmt\",peer=\"prod--mgmt--b\"} 0",
                "wg_agent_peer_sent_bytes_total{cluster=\"mgmt\",peer=\"prod--mgmt--a\"} 4",
                "wg_agent_peer_sent_bytes_total{cluster=\"mgmt\",peer=\"prod--mgmt--b\"} 148",
            ]
        );
        let many = (0..1007).map(|n| peer(&format!("{n:04}"), "mgmt", PeerHealth::Up, 0, 0));
        metrics.set_peers(many.rev().collect(), &BTreeMap::new());
        let found = lines(&registry);
        let states = found.iter().filter(|l| l.starts_with("wg_agent_peer_state"));
        assert_eq!(states.clone().count(), 1000);
        assert!(states.clone().next_back().unwrap().contains("prod--mgmt--0999"));
        assert!(found.contains(&"wg_agent_peers_not_shown 7".to_owned()), "{found:#?}");
    }
}
