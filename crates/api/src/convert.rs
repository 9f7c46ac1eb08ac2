//! Converts Kubernetes objects to the values of `clustermesh_core` and back. No input makes the functions panic. An error names the
//! field and the remedy.

use std::fmt;

use ipnet::IpNet;

pub mod mesh;
pub mod node;
pub mod peer;
pub mod policy;
pub mod sandbox;
pub mod service;

mod owner;

pub use owner::{labels, owner, set_labels};

/// An error or a warning about one field of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Kind and name: `ClusterMesh default/prod`.
    pub object: String,
    /// Path of the field: `spec.clusters[1].allowedNetworks[0]`.
    pub field: String,
    /// What is wrong and what to write instead.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.object, self.field, self.message)
    }
}

impl std::error::Error for Finding {}

/// Parses a network. Returns its canonical form, and whether the text had host bits.
pub(crate) fn parse_network(text: &str) -> Result<(IpNet, bool), String> {
    let written: IpNet = text.parse().map_err(|_| {
        format!(
            "{:?} is not a network: write an address and a prefix length, such as 10.244.0.0/16 or fd00:10:244::/48",
            excerpt(text)
        )
    })?;
    if let IpNet::V6(v6) = written
        && v6.addr().to_ipv4_mapped().is_some()
    {
        return Err(format!("{text:?} is an IPv4 network written as IPv6: write it as IPv4"));
    }
    Ok((written.trunc(), written != written.trunc()))
}

/// The beginning of an untrusted text, short enough for a message.
pub(crate) fn excerpt(text: &str) -> String {
    let mut start: String = text.chars().take(60).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}

/// The creation timestamp in Unix seconds. An object without one (a file in a dry run) counts as the youngest.
pub(crate) fn creation_time(metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> i64 {
    metadata
        .creation_timestamp
        .as_ref()
        .map_or(i64::MAX, |time| time.0.as_second())
}
