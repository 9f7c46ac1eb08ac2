//! How full this node's table of connections (conntrack) is and what it could not take, as the kernel says; and how it is made
//! larger. Every pod's connections are in it, and every member's, so that whoever fills it keeps all others out.

use std::{collections::BTreeMap, fmt, fs, io};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// What the kernel counts of connections that it could not take (Linux, net/netfilter/nf_conntrack_standalone.c).
const FAILURES: [&str; 3] = ["insert_failed", "drop", "early_drop"];

/// The table of the caller's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Connections in it.
    pub entries: u64,
    /// So many it holds (`net.netfilter.nf_conntrack_max`; 0 = no limit).
    pub limit: u64,
    /// Since the node started. `insert_failed`: no source port was left toward one destination, or two packets began one
    /// connection. `drop`: no room. `early_drop`: one that was not answered yet made room.
    pub failures: BTreeMap<&'static str, u64>,
}

fn setting(name: &str) -> String {
    format!("/proc/sys/net/netfilter/nf_conntrack_{name}")
}

fn number(name: &str) -> io::Result<u64> {
    let text = fs::read_to_string(setting(name))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Makes the table hold that many where it holds fewer; how many it held then. Its hash table grows with it, or the kernel
/// walks long chains. `None`: it holds as many, or there is none.
///
/// # Errors
/// It cannot be written: the caller is no process of the node's own network namespace, or not privileged.
pub(crate) fn raise(least: u64) -> io::Result<Option<u64>> {
    let limit = match number("max") {
        // Whoever loads it gives it a size.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        limit => limit?,
    };
    if limit == 0 || limit >= least {
        return Ok(None);
    }
    let buckets = least / 4;
    if number("buckets")? < buckets {
        fs::write(setting("buckets"), buckets.to_string())?;
    }
    fs::write(setting("max"), least.to_string())?;
    Ok(Some(limit))
}

/// Reads it.
///
/// # Errors
/// The kernel shows none: conntrack is not loaded.
pub fn read() -> io::Result<Table> {
    // Of the caller's own thread, which in tests is in another namespace than its process.
    let counters = fs::read_to_string("/proc/thread-self/net/stat/nf_conntrack").unwrap_or_default();
    Ok(Table {
        entries: number("count")?,
        limit: number("max")?,
        failures: failures(&counters),
    })
}

/// A line of names, then one of hexadecimal numbers for each processor.
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
    /// What is wrong and what to do where it is nearly full. The words stay as they are while it is.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let Self { entries, limit, .. } = *self;
        (limit > 0 && entries.saturating_mul(10) >= limit.saturating_mul(9)).then(|| {
            format!(
                "the table of connections of this node is nine tenths full or more; when it holds {limit}, new connections of every \
                 pod fail. Raise it: sysctl -w net.netfilter.nf_conntrack_max={} (kube-proxy sets it by --conntrack-max-per-core), \
                 and see who fills it: conntrack -L",
                limit.saturating_mul(2)
            )
        })
    }
}

/// The same of the table as it is now; `None` also where the kernel shows none.
#[must_use]
pub fn trouble() -> Option<String> {
    read().ok()?.trouble()
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failure {
    reason: &'static str,
}

/// The table in the agent's metrics, read when they are asked for.
#[derive(Debug)]
pub(crate) struct Shown;

impl Collector for Shown {
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
            (
                "conntrack_entries",
                "Connections in this node's table (conntrack)",
                entries,
            ),
            (
                "conntrack_limit",
                "So many connections this node's table holds; 0 = no limit",
                limit,
            ),
        ] {
            let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let help = "Connections that this node's table did not take or gave up, by reason: insert_failed = no source port left toward \
                    one destination, drop = the table is full, early_drop = made room";
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
    fn what_failed_is_added_up_over_the_processors_whatever_columns_a_kernel_has() {
        let text = "entries  clashres found insert insert_failed drop early_drop\n\
                    00000010  00000000 00000000 00000000 0000000a 00000001 00000000\n\
                    00000010  00000000 00000000 00000000 00000010 00000000 00000003\n";
        let want = [("insert_failed", 26), ("drop", 1), ("early_drop", 3)].into();
        assert_eq!(failures(text), want);
        assert_eq!(failures(""), BTreeMap::new());
        assert_eq!(failures("found new\n00000001\n"), BTreeMap::new());
    }

    #[test]
    fn a_table_that_is_nearly_full_says_so_in_words_that_stay() {
        let table = |entries, limit| Table {
            entries,
            limit,
            failures: BTreeMap::new(),
        };
        assert_eq!(table(899, 1000).trouble(), None);
        assert_eq!(table(5, 0).trouble(), None, "no limit");
        let said = table(900, 1000).trouble().expect("nine tenths");
        assert!(said.contains("sysctl -w net.netfilter.nf_conntrack_max=2000"), "{said}");
        assert_eq!(table(1000, 1000).trouble(), Some(said));
    }

    #[test]
    fn the_table_is_among_the_metrics() {
        let mut registry = prometheus_client::registry::Registry::with_prefix("wg_agent");
        registry.register_collector(Box::new(Shown));
        let text = clustermesh_daemon::metrics::encode(&registry).unwrap();
        let shown = |name: &str| text.lines().any(|line| line.starts_with(name));
        // A kernel without conntrack shows nothing, and neither do we.
        assert_eq!(shown("wg_agent_conntrack_entries "), read().is_ok(), "{text}");
        assert_eq!(shown("wg_agent_conntrack_limit "), read().is_ok(), "{text}");
    }
}
