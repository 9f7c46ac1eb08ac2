//! Creates the metrics registry of a program and renders it as text.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{gauge::ConstGauge, info::Info},
    registry::Registry,
};

/// Content type of the text format (OpenMetrics 1.0).
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

/// Creates a registry that prepends `prefix` (`clustermesh_controller`, `wg_agent`) to the names of its metrics. The registry already
/// contains `<prefix>_build_info{version}` and `<prefix>_start_time_seconds`.
#[must_use]
pub fn registry(prefix: &str, version: &'static str) -> Registry {
    let mut registry = Registry::with_prefix(prefix);
    registry.register("build", "Version of the program", Info::new(Build { version }));
    let started = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64();
    registry.register(
        "start_time_seconds",
        "When the process started, Unix time",
        ConstGauge::new(started),
    );
    registry
}

/// Renders the registry as OpenMetrics text.
///
/// # Errors
/// A metric cannot be encoded. This is not expected for our metrics.
pub fn encode(registry: &Registry) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    text::encode(&mut text, registry)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registry_has_the_version_and_the_start_time() {
        let text = encode(&registry("wg_agent", "1.2.3")).expect("encodes");
        assert!(text.contains("wg_agent_build_info{version=\"1.2.3\"} 1"), "{text}");
        assert!(text.contains("# TYPE wg_agent_start_time_seconds gauge"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
