//! Metrics of each peer (`--metrics-per-peer`). A scrape shows the peers of the last poll, so a removed peer disappears with the next
//! poll. A peer's counters restart at 0 with the device, which Prometheus treats as a counter reset.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use super::PeerSample;

/// Only this many peers have metrics: the first ones by name. Each has four time series, or three before its first handshake.
const MAX_PEERS: usize = 1000;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PeerLabels {
    cluster: String,
    peer: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    cluster: String,
    peer: String,
    state: &'static str,
}

/// The peers of the last poll that have metrics, and the number of peers beyond [`MAX_PEERS`]. Cheap to clone; all clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Peers(Arc<Mutex<(Vec<PeerSample>, usize)>>);

impl Peers {
    pub(super) fn set(&self, mut peers: Vec<PeerSample>) {
        peers.sort_by(|a, b| (&a.name, &a.key).cmp(&(&b.name, &b.key)));
        let not_shown = peers.len().saturating_sub(MAX_PEERS);
        peers.truncate(MAX_PEERS);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (peers, not_shown);
    }
}

/// Writes one metric family.
fn family<'p, L: EncodeLabelSet, M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, kind): (&str, &str, MetricType),
    series: impl Iterator<Item = (L, M)> + 'p,
) -> fmt::Result {
    let mut descriptor = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in series {
        value.encode(descriptor.encode_family(&labels)?)?;
    }
    Ok(())
}

impl Collector for Peers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (peers, not_shown) = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let labels = |peer: &PeerSample| PeerLabels {
            cluster: peer.cluster.clone(),
            peer: peer.name.clone(),
        };
        let states = peers.iter().map(|sample| {
            let PeerLabels { cluster, peer } = labels(sample);
            let labels = StateLabels {
                cluster,
                peer,
                state: sample.state.as_str(),
            };
            (labels, ConstGauge::new(1i64))
        });
        let about = ("peer_state", "1 = the peer is in this state", MetricType::Gauge);
        family(&mut encoder, about, states)?;
        let ages = peers.iter().filter_map(|peer| {
            let seconds = i64::try_from(peer.handshake_age?.as_secs()).unwrap_or(i64::MAX);
            Some((labels(peer), ConstGauge::new(seconds)))
        });
        let about = ("peer_handshake_seconds", "Age of the last handshake", MetricType::Gauge);
        family(&mut encoder, about, ages)?;
        let received = peers.iter().map(|peer| (labels(peer), ConstCounter::new(peer.rx)));
        let about = (
            "peer_received_bytes",
            "Bytes received from the peer",
            MetricType::Counter,
        );
        family(&mut encoder, about, received)?;
        let sent = peers.iter().map(|peer| (labels(peer), ConstCounter::new(peer.tx)));
        let about = ("peer_sent_bytes", "Bytes sent to the peer", MetricType::Counter);
        family(&mut encoder, about, sent)?;
        let not_shown = ConstGauge::new(i64::try_from(not_shown).unwrap_or(i64::MAX));
        let help = "Peers beyond the first 1000, which have no metrics of their own";
        let descriptor = encoder.encode_descriptor("peers_not_shown", help, None, MetricType::Gauge)?;
        not_shown.encode(descriptor)
    }
}
