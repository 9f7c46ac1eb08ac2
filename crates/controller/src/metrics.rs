//! The controller's metrics. Label values are fixed words, or names of meshes, of clusters, and of kubeconfig Secrets and their keys.
//! Names of nodes are never label values, because their number is unbounded.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    kind: &'static str,
    action: &'static str,
    result: &'static str,
}

/// The labels of one entry of a mesh's `spec.clusters`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct EntryLabels {
    /// `namespace/name` of the mesh.
    pub(crate) mesh: String,
    /// Name of the entry in `spec.clusters`.
    pub(crate) cluster: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SkippedLabels {
    mesh: String,
    cluster: String,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    mesh: String,
    cluster: String,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OverBudgetLabels {
    /// The text of the member's `ClusterIdentity`, such as `Secret NAMESPACE/NAME key KEY`.
    member: String,
    limit: &'static str,
}

/// All metrics. Clones share their values.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    leader: Gauge,
    passes: Counter,
    full_plans: Counter,
    pass_seconds: Histogram,
    writes: Family<WriteLabels, Counter>,
    entries: Entries,
    over_budget: Family<OverBudgetLabels, Counter>,
}

/// The gauges of one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EntryGauges {
    pub(crate) entry: EntryLabels,
    /// The number of nodes of the entry that are registered in other members.
    pub(crate) registered: usize,
    /// The state of the member's observation: `Fresh`, `Stale`, `Unreachable` or `Missing`.
    pub(crate) state: &'static str,
    /// The number of skipped nodes of the entry, by reason.
    pub(crate) skipped: BTreeMap<String, usize>,
    /// When the member's credentials expire, in seconds since 1970. `None` = they do not say it.
    pub(crate) credentials_expire: Option<i64>,
}

/// The gauges of all entries. Each pass replaces them together, so a scrape gets the values of one pass.
#[derive(Debug, Clone, Default)]
struct Entries(Arc<Mutex<Arc<Vec<EntryGauges>>>>);

impl Collector for Entries {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let entries = Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let (registered, expiry, skipped, states) = (
            Family::<EntryLabels, Gauge>::default(),
            Family::<EntryLabels, Gauge>::default(),
            Family::<SkippedLabels, Gauge>::default(),
            Family::<StateLabels, Gauge>::default(),
        );
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for gauges in entries.iter() {
            let EntryLabels { mesh, cluster } = &gauges.entry;
            registered.get_or_create(&gauges.entry).set(number(gauges.registered));
            if let Some(seconds) = gauges.credentials_expire {
                expiry.get_or_create(&gauges.entry).set(seconds);
            }
            let state = StateLabels {
                mesh: mesh.clone(),
                cluster: cluster.clone(),
                state: gauges.state,
            };
            states.get_or_create(&state).set(1);
            for (reason, count) in &gauges.skipped {
                let skip = SkippedLabels {
                    mesh: mesh.clone(),
                    cluster: cluster.clone(),
                    reason: reason.clone(),
                };
                skipped.get_or_create(&skip).set(number(*count));
            }
        }
        let mut encode = |name, help, family: &dyn Encode| family.encode(name, help, &mut encoder);
        encode(
            "registered_nodes",
            "Nodes of a member that are registered in other members",
            &registered,
        )?;
        encode(
            "skipped_nodes",
            "Nodes of a member that are left out, by reason",
            &skipped,
        )?;
        encode("member_state", "1 for the state of a member", &states)?;
        encode(
            "member_credentials_expiry_timestamp_seconds",
            "When the credentials of a member expire, in seconds since 1970",
            &expiry,
        )
    }
}

/// A metric family that encodes itself under a name.
trait Encode {
    fn encode(&self, name: &str, help: &str, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error>;
}

impl<F: EncodeMetric> Encode for F {
    fn encode(&self, name: &str, help: &str, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        EncodeMetric::encode(self, encoder.encode_descriptor(name, help, None, self.metric_type())?)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let buckets = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
        Self {
            leader: Gauge::default(),
            passes: Counter::default(),
            full_plans: Counter::default(),
            pass_seconds: Histogram::new(buckets),
            writes: Family::default(),
            entries: Entries::default(),
            over_budget: Family::default(),
        }
    }
}

impl Metrics {
    /// Registers all metrics.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "leader",
            "1 if this replica holds the Lease of the leader",
            self.leader.clone(),
        );
        registry.register("reconciles", "Passes with a plan", self.passes.clone());
        let help = "Passes that planned all meshes anew instead of following changes";
        registry.register("full_plans", help, self.full_plans.clone());
        registry.register(
            "reconcile_seconds",
            "Time of one pass until its writes begin",
            self.pass_seconds.clone(),
        );
        registry.register(
            "writes",
            "Writes into members by kind, action and result",
            self.writes.clone(),
        );
        registry.register_collector(Box::new(self.entries.clone()));
        registry.register(
            "over_budget",
            "Answers and objects of a member that were rejected, by the limit that they exceed",
            self.over_budget.clone(),
        );
    }

    pub(crate) fn set_leader(&self, is_leader: bool) {
        self.leader.set(is_leader.into());
    }

    /// Counts data of a member that exceeded a limit.
    pub(crate) fn count_over_budget(&self, member: &str, limit: &'static str) {
        let member = member.to_owned();
        self.over_budget
            .get_or_create(&OverBudgetLabels { member, limit })
            .inc();
    }

    /// Counts a pass, and records its duration until its writes begin. `is_full` = it planned all meshes anew.
    pub(crate) fn record_pass(&self, took: Duration, is_full: bool) {
        self.passes.inc();
        self.full_plans.inc_by(u64::from(is_full));
        self.pass_seconds.observe(took.as_secs_f64());
    }

    /// Counts a write by its result.
    pub(crate) fn record_write(&self, kind: &'static str, action: &'static str, result: &'static str) {
        self.writes.get_or_create(&WriteLabels { kind, action, result }).inc();
    }

    /// Replaces the gauges of all entries.
    pub(crate) fn replace(&self, entries: Vec<EntryGauges>) {
        *self.entries.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_gauges_leave_no_old_series() {
        let metrics = Metrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let gauges = |cluster: &str, state| EntryGauges {
            entry: EntryLabels {
                mesh: "ns/m".into(),
                cluster: cluster.into(),
            },
            registered: 2,
            state,
            skipped: [("NodeNoPodCIDR".to_owned(), 3)].into(),
            credentials_expire: Some(1_800_000_000),
        };
        let scrape = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
            let lines = text.lines().filter(|line| line.contains("ns/m"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        metrics.replace(vec![gauges("a", "Fresh")]);
        let series_of = |cluster: &str, state: &str| {
            [
                format!("registered_nodes{{mesh=\"ns/m\",cluster=\"{cluster}\"}} 2"),
                format!("skipped_nodes{{mesh=\"ns/m\",cluster=\"{cluster}\",reason=\"NodeNoPodCIDR\"}} 3"),
                format!("member_state{{mesh=\"ns/m\",cluster=\"{cluster}\",state=\"{state}\"}} 1"),
                format!(
                    "member_credentials_expiry_timestamp_seconds{{mesh=\"ns/m\",cluster=\"{cluster}\"}} 1800000000"
                ),
            ]
        };
        assert_eq!(scrape(), series_of("a", "Fresh"));
        metrics.replace(vec![gauges("b", "Stale")]);
        assert_eq!(scrape(), series_of("b", "Stale"));
    }
}
