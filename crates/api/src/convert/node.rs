//! Converts a Kubernetes Node with the annotations of Kilo and wg-agent to [`observe::Node`].

use std::net::IpAddr;

use clustermesh_core::observe::{self, Claim, Granularity, Server};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;

use super::{creation_time, parse_network};
use crate::{
    annotations::{AgentStatus, discovered, endpoint, host_and_prefix},
    names::{
        KILO_ALLOWED_LOCATION_IPS, KILO_CLUSTERMESH_ENDPOINT, KILO_DISCOVERED_ENDPOINTS, KILO_ENDPOINT,
        KILO_FORCE_ENDPOINT, KILO_GRANULARITY, KILO_INTERNAL_IP, KILO_KEY, KILO_LAST_SEEN, KILO_LEADER, KILO_LOCATION,
        KILO_PERSISTENT_KEEPALIVE, KILO_WIREGUARD_IP, LABEL_REGION, NODE_AGENT,
    },
};

/// Converts a Node. A claim that cannot be parsed becomes [`Claim::Invalid`] with the reason; other malformed values are left out.
/// The caller sets `held_for` and `silent`.
///
/// The result does not contain `kilo.squat.ai/last-seen`, so that it does not change every 30 s when kg writes that annotation.
/// [`last_seen`] reads it.
#[must_use]
pub fn to_core(node: &Node) -> observe::Node {
    let annotation = |key: &str| {
        node.metadata
            .annotations
            .as_ref()
            .and_then(|a| a.get(key))
            .map_or("", String::as_str)
    };
    // Without a valid status of wg-agent with a known mode, the node counts as a node of kg, to which the planner applies more checks.
    let agent = AgentStatus::parse(annotation(NODE_AGENT)).ok();
    observe::Node {
        created: creation_time(&node.metadata),
        ready: is_ready(node),
        deleting: node.metadata.deletion_timestamp.is_some(),
        leaving: is_leaving(node),
        pod_cidrs: pod_cidrs(node),
        wireguard_ip: parse_claim(annotation(KILO_WIREGUARD_IP), host_and_prefix),
        public_key: parse_claim(annotation(KILO_KEY), |text| {
            text.parse()
                .map_err(|error: clustermesh_core::key::KeyError| error.to_string())
        }),
        clustermesh_endpoint: parse_claim(annotation(KILO_CLUSTERMESH_ENDPOINT), endpoint),
        force_endpoint: parse_claim(annotation(KILO_FORCE_ENDPOINT), endpoint),
        kilo_endpoint: parse_claim(annotation(KILO_ENDPOINT), endpoint),
        external_ips: addresses(node, "ExternalIP"),
        internal_ips: addresses(node, "InternalIP"),
        kilo_internal_ip: host_and_prefix(annotation(KILO_INTERNAL_IP)).ok().map(|net| net.addr()),
        persistent_keepalive: annotation(KILO_PERSISTENT_KEEPALIVE)
            .parse::<i64>()
            .map_or(0, |seconds| u16::try_from(seconds.max(0)).unwrap_or(u16::MAX)),
        location: location(node, annotation(KILO_LOCATION)),
        granularity: match annotation(KILO_GRANULARITY) {
            "full" => Some(Granularity::Full),
            "location" => Some(Granularity::Location),
            "cross" => Some(Granularity::Cross),
            _ => None,
        },
        is_preferred_leader: node
            .metadata
            .annotations
            .as_ref()
            .is_some_and(|a| a.contains_key(KILO_LEADER)),
        silent: false,
        allowed_location_ips: annotation(KILO_ALLOWED_LOCATION_IPS)
            .split(',')
            .filter_map(|text| parse_network(text.trim()).ok())
            .map(|(net, _)| net)
            .collect(),
        discovered: discovered(annotation(KILO_DISCOVERED_ENDPOINTS)),
        server: server(agent.as_ref()),
        bypassed: agent.and_then(|agent| agent.bypassed()),
        held_for: None,
    }
}

/// When kg last checked in for this Node, in Unix seconds; `None` = the annotation is missing or malformed.
#[must_use]
pub fn last_seen(node: &Node) -> Option<i64> {
    node.metadata.annotations.as_ref()?.get(KILO_LAST_SEEN)?.parse().ok()
}

/// The status that wg-agent on this Node publishes; `None` = it is missing or malformed.
#[must_use]
pub fn agent(node: &Node) -> Option<AgentStatus> {
    node.metadata
        .annotations
        .as_ref()
        .and_then(|a| a.get(NODE_AGENT))
        .and_then(|text| AgentStatus::parse(text).ok())
}

/// Parses a claim. An empty text counts as absent, because kg writes `wireguard-ip: ""` on every node that is not a leader.
fn parse_claim<T>(text: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Claim<T> {
    if text.is_empty() {
        return Claim::Absent;
    }
    match parse(text) {
        Ok(value) => Claim::Valid(value),
        Err(why) => Claim::Invalid(why),
    }
}

/// The taints that cluster-autoscaler and Karpenter set on a node before they remove it.
const LEAVING_TAINTS: [&str; 2] = ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"];

fn is_leaving(node: &Node) -> bool {
    node.spec.iter().any(|spec| {
        let mut taints = spec.taints.iter().flatten();
        spec.unschedulable == Some(true) || taints.any(|taint| LEAVING_TAINTS.contains(&&*taint.key))
    })
}

fn is_ready(node: &Node) -> bool {
    node.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn pod_cidrs(node: &Node) -> Vec<Claim<IpNet>> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let several = spec.pod_cidrs.as_deref().unwrap_or_default();
    let texts: Vec<&String> = if several.is_empty() {
        spec.pod_cidr.iter().collect()
    } else {
        several.iter().collect()
    };
    texts
        .into_iter()
        .map(|text| parse_claim(text, |text| parse_network(text).map(|(net, _)| net)))
        .collect()
}

fn addresses(node: &Node, kind: &str) -> Vec<IpAddr> {
    node.status
        .iter()
        .flat_map(|status| status.addresses.iter().flatten())
        .filter(|address| address.type_ == kind)
        .filter_map(|address| address.address.parse::<IpAddr>().ok())
        .map(|address| address.to_canonical())
        .collect()
}

fn location(node: &Node, annotation: &str) -> String {
    if annotation.is_empty() {
        node.metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(LABEL_REGION))
            .cloned()
            .unwrap_or_default()
    } else {
        annotation.to_owned()
    }
}

fn server(agent: Option<&AgentStatus>) -> Server {
    match agent.map(|agent| &*agent.mode) {
        Some("full") => Server::Agent,
        Some("policy") => Server::AgentPolicy,
        _ => Server::Kilo,
    }
}

#[cfg(test)]
mod tests;
