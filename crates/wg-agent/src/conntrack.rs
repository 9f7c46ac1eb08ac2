//! Reads the limit, the number of entries and the failure counters of the node's conntrack table, and raises its limit.
//! All pods and all members share the table: when it is full, new connections fail.

use std::{collections::BTreeMap, fmt, fs, io};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// The kernel's counters of connections that it could not track or whose entry it evicted (net/netfilter/nf_conntrack_standalone.c).
const FAILURES: [&str; 3] = ["insert_failed", "drop", "early_drop"];

/// The conntrack table of the caller's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Number of entries.
    pub entries: u64,
    /// Maximum number of entries (`net.netfilter.nf_conntrack_max`; 0 = no limit).
    pub limit: u64,
    /// Failures since the network namespace was created. `insert_failed`: no source port was left for a destination, or two packets
    /// of one new connection raced. `drop`: the table was full, or such a race could not be resolved. `early_drop`: an entry that was
    /// not `ASSURED` was evicted.
    pub failures: BTreeMap<&'static str, u64>,
}

fn setting_path(name: &str) -> String {
    format!("/proc/sys/net/netfilter/nf_conntrack_{name}")
}

fn read_setting(name: &str) -> io::Result<u64> {
    let text = fs::read_to_string(setting_path(name))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Raises the limit to `least` if it is lower, and returns the previous limit. A hash table with fewer than `least / 4` buckets
/// grows too, because long hash chains are slow. `None` = nothing was raised: the limit is high enough, there is none, or conntrack is not
/// loaded.
///
/// # Errors
/// The settings cannot be written: the caller is not in the node's own network namespace, or not privileged.
pub(crate) fn raise_limit(least: u64) -> io::Result<Option<u64>> {
    let limit = match read_setting("max") {
        // Conntrack is not loaded, so there is no limit yet. kube-proxy sets its own limit when it starts.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        limit => limit?,
    };
    if limit == 0 || limit >= least {
        return Ok(None);
    }
    // The ratio that kube-proxy sets.
    let buckets = least / 4;
    if read_setting("buckets")? < buckets {
        fs::write(setting_path("buckets"), buckets.to_string())?;
    }
    fs::write(setting_path("max"), least.to_string())?;
    Ok(Some(limit))
}

/// Reads the table's state.
///
/// # Errors
/// Conntrack is not loaded.
pub fn read() -> io::Result<Table> {
    // `thread-self`: in tests, threads of one process are in different network namespaces.
    let counters = fs::read_to_string("/proc/thread-self/net/stat/nf_conntrack").unwrap_or_default();
    Ok(Table {
        entries: read_setting("count")?,
        limit: read_setting("max")?,
        failures: failures(&counters),
    })
}

/// Parses a line of column names and one line of hexadecimal numbers for each CPU.
fn failures(text: &str) -> BTreeMap<&'static str, u64> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    let mut out = BTreeMap::new();
    for line in lines {
        for (name, value) in names.iter().zip(line.split_whitespace()) {
            if let Some(name) = FAILURES.iter().find(|failure| *failure == name) {
                *out.entry(*name).or_default() += u64::from_str_radix(value, 16).unwrap_or(0);
            }
        }
    }
    out
}

impl Table {
    /// A warning with a remedy if the table is at least 90 % full. Its text does not contain the number of entries, so
    /// that it does not change with every reading.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let Self { entries, limit, .. } = *self;
        (limit > 0 && entries.saturating_mul(10) >= limit.saturating_mul(9)).then(|| {
            format!(
                "the conntrack table of this node is at least 90 % full; when it has {limit} entries, new \
                 connections of every pod fail. Raise the limit: sysctl -w net.netfilter.nf_conntrack_max={} (kube-proxy \
                 sets it by --conntrack-max-per-core), and look for the source of the connections: conntrack -L",
                limit.saturating_mul(2)
            )
        })
    }
}

/// Reads the table and returns its warning; `None` also if conntrack is not loaded.
#[must_use]
pub fn warning() -> Option<String> {
    read().ok()?.warning()
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failure {
    reason: &'static str,
}

/// Exports the table's state as metrics, read at each scrape.
#[derive(Debug)]
pub(crate) struct ConntrackCollector;

impl Collector for ConntrackCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Ok(Table {
            entries,
            limit,
            failures,
        }) = read()
        else {
            return Ok(());
        };
        for (name, help, value) in [
            ("conntrack_entries", "Entries in this node's conntrack table", entries),
            (
                "conntrack_limit",
                "Maximum number of entries in this node's conntrack table; 0 = no limit",
                limit,
            ),
        ] {
            let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let help = "Connections that this node could not track or whose entry it evicted, by reason: insert_failed = no source port \
                    left for one destination, drop = the table was full, early_drop = an entry was evicted";
        let mut family = encoder.encode_descriptor("conntrack_failures", help, None, MetricType::Counter)?;
        for (reason, count) in failures {
            ConstCounter::new(count).encode(family.encode_family(&Failure { reason })?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_summed_over_cpus_by_column_name() {
        let text = "entries  clashres found insert insert_failed drop early_drop\n\
                    00000010  00000000 00000000 00000000 0000000a 00000001 00000000\n\
                    00000010  00000000 00000000 00000000 00000010 00000000 00000003\n";
        let want = [("insert_failed", 26), ("drop", 1), ("early_drop", 3)].into();
        assert_eq!(failures(text), want);
        assert_eq!(failures(""), BTreeMap::new());
        assert_eq!(failures("found new\n00000001\n"), BTreeMap::new());
    }

    // threat: conntrack-exhaustion
    #[test]
    fn nearly_full_conntrack_table_gives_a_constant_warning() {
        let table = |entries, limit| Table {
            entries,
            limit,
            failures: BTreeMap::new(),
        };
        assert_eq!(table(899, 1000).warning(), None);
        assert_eq!(table(5, 0).warning(), None, "no limit");
        let message = table(900, 1000).warning().expect("a warning at 90 %");
        assert!(
            message.contains("sysctl -w net.netfilter.nf_conntrack_max=2000"),
            "{message}"
        );
        assert_eq!(table(1000, 1000).warning(), Some(message));
    }

    #[test]
    fn conntrack_metrics_exist_if_conntrack_is_loaded() {
        let mut registry = prometheus_client::registry::Registry::with_prefix("wg_agent");
        registry.register_collector(Box::new(ConntrackCollector));
        let text = clustermesh_daemon::metrics::encode(&registry).unwrap();
        let is_exported = |name: &str| text.lines().any(|line| line.starts_with(name));
        assert_eq!(is_exported("wg_agent_conntrack_entries "), read().is_ok(), "{text}");
        assert_eq!(is_exported("wg_agent_conntrack_limit "), read().is_ok(), "{text}");
    }
}
