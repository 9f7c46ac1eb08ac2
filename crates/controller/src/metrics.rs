//! The controller's metrics, by name and label. Labels are words of ours and names of clusters, never of nodes.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Write {
    kind: &'static str,
    action: &'static str,
    result: &'static str,
}

/// One entry of one mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Entry {
    /// `namespace/name` of the mesh.
    pub(crate) mesh: String,
    /// The entry.
    pub(crate) cluster: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Skip {
    mesh: String,
    cluster: String,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemberState {
    mesh: String,
    cluster: String,
    state: &'static str,
}

/// All of them; clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    plans: Counter,
    plan_seconds: Histogram,
    writes: Family<Write, Counter>,
    peers: Family<Entry, Gauge>,
    skipped: Family<Skip, Gauge>,
    members: Family<MemberState, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let buckets = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
        Self {
            plans: Counter::default(),
            plan_seconds: Histogram::new(buckets),
            writes: Family::default(),
            peers: Family::default(),
            skipped: Family::default(),
            members: Family::default(),
        }
    }
}

impl Metrics {
    /// Puts them into the registry.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("reconciles", "Passes of observe, plan, diff", self.plans.clone());
        registry.register(
            "reconcile_seconds",
            "Time of one pass, without the writes",
            self.plan_seconds.clone(),
        );
        registry.register(
            "writes",
            "Writes into members by kind, action and result",
            self.writes.clone(),
        );
        registry.register(
            "registered_nodes",
            "Nodes of a member that are registered in the others",
            self.peers.clone(),
        );
        registry.register(
            "skipped_nodes",
            "Nodes of a member that are left out, by reason",
            self.skipped.clone(),
        );
        registry.register(
            "member_state",
            "1 for the state that a member is in",
            self.members.clone(),
        );
    }

    /// One pass took this long.
    pub(crate) fn planned(&self, took: Duration) {
        self.plans.inc();
        self.plan_seconds.observe(took.as_secs_f64());
    }

    /// One write ended so.
    pub(crate) fn wrote(&self, kind: &'static str, action: &'static str, result: &'static str) {
        self.writes.get_or_create(&Write { kind, action, result }).inc();
    }

    /// Forgets the entries of the last pass.
    pub(crate) fn begin(&self) {
        self.peers.clear();
        self.skipped.clear();
        self.members.clear();
    }

    /// How one entry stands.
    pub(crate) fn entry(
        &self,
        entry: &Entry,
        registered: usize,
        state: &'static str,
        skipped: impl IntoIterator<Item = String>,
    ) {
        self.peers
            .get_or_create(entry)
            .set(i64::try_from(registered).unwrap_or(i64::MAX));
        let Entry { mesh, cluster } = entry.clone();
        self.members
            .get_or_create(&MemberState {
                mesh: mesh.clone(),
                cluster: cluster.clone(),
                state,
            })
            .set(1);
        for reason in skipped {
            self.skipped
                .get_or_create(&Skip {
                    mesh: mesh.clone(),
                    cluster: cluster.clone(),
                    reason,
                })
                .inc();
        }
    }
}
