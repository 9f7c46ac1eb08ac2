//! Parses Peers, PeerPolicies, Nodes and EndpointSlices into the values that the agent uses. An invalid Peer or PeerPolicy gives a
//! message that says why it cannot be used. Invalid values of a Node or an EndpointSlice are left out.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_api::{
    convert,
    names::{KILO_LAST_SEEN, LABEL_MESH, LABEL_MESH_NAMESPACE, LABEL_SOURCE_CLUSTER},
    peer::Peer,
    policy::PeerPolicy,
    revision::{self, PolicyDigest},
};
use clustermesh_core::observe::{Endpoint, PeerSpec, PolicySpec};
use ipnet::IpNet;
use k8s_openapi::api::{core::v1::Node, discovery::v1::EndpointSlice};
use kube::api::DynamicObject;
use serde::{Deserialize, Serialize};

use crate::publish::Annotations;

/// The parsed values of a Peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ParsedPeer {
    /// The member whose node or gateway the Peer describes; empty if the Peer has no such label.
    pub cluster: String,
    /// Namespace and name of the ClusterMesh; empty if the Peer has no such labels.
    pub mesh: (String, String),
    /// Its resourceVersion (not a policy revision), which orders Peers by their last write; 0 if it is missing or no number.
    pub revision: u64,
    /// Its values, or why they cannot be used.
    pub spec: Result<PeerSpec, String>,
}

impl ParsedPeer {
    /// Parses an object. A Peer that cannot be parsed keeps a message instead of values.
    #[must_use]
    pub fn new(object: DynamicObject) -> Self {
        let label = |key| {
            object
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(key))
                .cloned()
        };
        Self {
            cluster: label(LABEL_SOURCE_CLUSTER).unwrap_or_default(),
            mesh: [LABEL_MESH_NAMESPACE, LABEL_MESH]
                .map(|key| label(key).unwrap_or_default())
                .into(),
            revision: object
                .metadata
                .resource_version
                .as_deref()
                .and_then(|v| v.parse().ok())
                .unwrap_or(0),
            spec: match object.try_parse::<Peer>() {
                Ok(peer) => convert::peer::parse_strictly(&peer),
                Err(error) => Err(format!("is not what the Peer CRD describes: {error}")),
            },
        }
    }
}

/// The parsed values of a PeerPolicy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ParsedPolicy {
    /// The policy to enforce. If the object cannot be parsed, it allows nothing; it keeps the networks that [`Self::new`] could
    /// read, so that packets to them never leave unencrypted.
    pub spec: PolicySpec,
    /// Why the object cannot be parsed; `None` = it was parsed.
    pub problem: Option<String>,
    /// A hash of its name and spec.
    pub digest: PolicyDigest,
}

impl ParsedPolicy {
    /// Parses an object. If that fails, the policy allows nothing. It then keeps the valid entries of `spec.networks` if the
    /// object matches the CRD, and no networks otherwise.
    #[must_use]
    pub fn new(object: DynamicObject) -> Self {
        let name = object.metadata.name.clone().unwrap_or_default();
        let digest = revision::digest(&name, object.data.get("spec"));
        let deny_all = |networks: &[String]| PolicySpec {
            networks: networks
                .iter()
                .filter_map(|text| text.parse().ok())
                .map(|net: IpNet| net.trunc())
                .collect(),
            ..PolicySpec::default()
        };
        let (spec, problem) = match object.try_parse::<PeerPolicy>() {
            Ok(written) => match convert::policy::to_core(&written).spec {
                Ok(spec) => (spec, None),
                Err(problem) => (deny_all(&written.spec.networks), Some(problem)),
            },
            Err(error) => (
                deny_all(&[]),
                Some(format!("is not what the PeerPolicy CRD describes: {error}")),
            ),
        };
        Self { spec, problem, digest }
    }
}

/// The parsed values of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ParsedNode {
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// Host part of `kilo.squat.ai/wireguard-ip`.
    pub wireguard_ip: Option<IpAddr>,
    /// `status.addresses` of type InternalIP.
    pub internal_ips: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: BTreeSet<IpNet>,
    /// Values of this node's own Node; `None` = another Node.
    pub own: Option<OwnNode>,
}

/// Values of this node's own Node. [`crate::cache`] does not store those that soon become outdated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OwnNode {
    /// `status.addresses` of type ExternalIP.
    pub external_ips: Vec<IpAddr>,
    /// `kilo.squat.ai/force-endpoint`.
    pub force_endpoint: Option<Endpoint>,
    /// The node's location; empty if it has none.
    pub location: String,
    /// `kilo.squat.ai/last-seen`, Unix seconds. Only kg writes it.
    #[serde(skip)]
    pub kg_seen: Option<i64>,
    /// The current values of the annotations that this agent writes.
    #[serde(skip)]
    pub published: Annotations,
}

impl ParsedNode {
    /// Parses a Node. `me` is this node's name, `keys` are the annotations that this agent writes.
    #[must_use]
    pub fn new(node: &Node, me: &str, keys: &[&'static str]) -> Self {
        let observed = convert::node::to_core(node);
        let annotation = |key: &str| node.metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
        let own = (node.metadata.name.as_deref() == Some(me)).then(|| OwnNode {
            external_ips: observed.external_ips.clone(),
            force_endpoint: observed.force_endpoint.value().cloned(),
            location: observed.location.clone(),
            kg_seen: annotation(KILO_LAST_SEEN).and_then(|text| text.parse().ok()),
            published: keys.iter().map(|key| (*key, annotation(key))).collect(),
        });
        Self {
            created: observed.created,
            wireguard_ip: observed.wireguard_ip.value().map(IpNet::addr),
            internal_ips: observed.internal_ips,
            pod_cidrs: observed
                .pod_cidrs
                .iter()
                .filter_map(|claim| claim.value())
                .copied()
                .collect(),
            own,
        }
    }
}

/// The addresses and ports of an EndpointSlice.
#[must_use]
pub fn sockets(slice: &EndpointSlice) -> BTreeSet<SocketAddr> {
    let ports = || {
        slice
            .ports
            .iter()
            .flatten()
            .filter_map(|port| u16::try_from(port.port?).ok())
    };
    let addresses = slice
        .endpoints
        .iter()
        .flatten()
        .flat_map(|endpoint| &endpoint.addresses);
    addresses
        .filter_map(|text| text.parse::<IpAddr>().ok())
        .flat_map(|ip| ports().map(move |port| SocketAddr::new(ip.to_canonical(), port)))
        .collect()
}

/// The policy revision: a hash of all policies.
#[must_use]
pub fn policy_revision<'a>(policies: impl Iterator<Item = &'a ParsedPolicy>) -> String {
    revision::of_all(policies.map(|policy| &policy.digest))
}

#[cfg(test)]
mod tests {
    use clustermesh_core::mesh::Protocol;

    use super::*;

    fn object(value: serde_json::Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    fn policy_object(allow: serde_json::Value) -> DynamicObject {
        object(serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "PeerPolicy", "metadata": {"name": "m--a"},
            "spec": {
                "source": "a", "sources": ["10.5.0.0/16"], "networks": ["10.5.0.0/16", "100.67.0.0/16"], "allow": allow,
                "deny": [{"to": ["192.0.2.1/32"], "ports": [{"port": 6443}]}],
                "infrastructurePorts": [{"port": 10250, "protocol": "TCP"}],
                "anchored": ["10.96.0.0/12"],
            },
        }))
    }

    fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn policy_is_parsed_as_written() {
        let seen = ParsedPolicy::new(policy_object(serde_json::json!([{"to": ["10.4.0.0/16"]}])));
        let want = PolicySpec {
            sources: nets(&["10.5.0.0/16"]),
            networks: nets(&["10.5.0.0/16", "100.67.0.0/16"]),
            allow: nets(&["10.4.0.0/16"]),
            deny: ["192.0.2.1:6443".parse().unwrap()].into(),
            infrastructure_ports: [(Protocol::Tcp, 10250)].into(),
            anchored: nets(&["10.96.0.0/12"]),
            closed: false,
        };
        assert_eq!((seen.spec, seen.problem), (want, None));
    }

    // threat: unreadable-policy
    #[test]
    fn unparsable_policy_allows_nothing_and_keeps_its_networks() {
        let mut object = policy_object(serde_json::json!([{"to": ["10.4.0.0/16"]}]));
        object.data["spec"]["deny"][0]["ports"] = serde_json::json!([{"port": "https"}]);
        let seen = ParsedPolicy::new(object);
        let networks = nets(&["10.5.0.0/16", "100.67.0.0/16"]);
        assert_eq!(
            seen.spec,
            PolicySpec {
                networks,
                ..PolicySpec::default()
            }
        );
        let problem = seen.problem.unwrap();
        assert!(problem.starts_with("spec.deny[0].ports: "), "{problem}");
    }

    #[test]
    fn policy_of_a_sandbox_or_standard_member_is_closed() {
        let policy = |profile: &str| {
            let mut object = policy_object(serde_json::json!([{"to": ["10.4.0.0/16"]}]));
            object.data["spec"]["isolationProfile"] = profile.into();
            ParsedPolicy::new(object).spec
        };
        let closed = ["cluster-meshed", "sandbox", "standard"].map(|profile| policy(profile).closed);
        assert_eq!(closed, [false, true, true]);
        assert_eq!(policy("sandbox").allowed().count(), 0);
    }

    #[test]
    fn malformed_peer_gets_an_error_instead_of_a_spec() {
        let peer = ParsedPeer::new(object(serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
            "metadata": {"name": "p", "resourceVersion": "41"}, "spec": {"allowedIPs": 7},
        })));
        assert_eq!((peer.revision, peer.cluster.as_str()), (41, ""));
        assert!(peer.spec.unwrap_err().starts_with("is not what the Peer CRD describes"));
    }

    #[test]
    fn only_the_own_node_gets_last_seen_and_annotations() {
        let node = |seen: &str| -> Node {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "n", "annotations": {"kilo.squat.ai/last-seen": seen, "kilo.squat.ai/wireguard-ip": "10.4.0.1/16"}},
                "spec": {"podCIDRs": ["10.5.1.0/24", "fd00:5:0:1::/64"]},
                "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}]},
            }))
            .unwrap()
        };
        assert_eq!(
            ParsedNode::new(&node("1"), "other", &[]),
            ParsedNode::new(&node("2"), "other", &[])
        );
        let parsed = ParsedNode::new(&node("2"), "n", &["kilo.squat.ai/wireguard-ip", "kilo.squat.ai/key"]);
        assert_eq!(
            (parsed.wireguard_ip, parsed.internal_ips, parsed.pod_cidrs),
            (
                Some("10.4.0.1".parse().unwrap()),
                vec!["192.0.2.7".parse().unwrap()],
                nets(&["10.5.1.0/24", "fd00:5:0:1::/64"])
            )
        );
        let own_node = parsed.own.unwrap();
        assert_eq!(own_node.kg_seen, Some(2));
        assert_eq!(
            own_node.published,
            [
                ("kilo.squat.ai/wireguard-ip", Some("10.4.0.1/16".to_owned())),
                ("kilo.squat.ai/key", None)
            ]
            .into()
        );
    }

    #[test]
    fn sockets_combine_every_address_with_every_port() {
        let slice = serde_json::from_value(serde_json::json!({
            "addressType": "IPv4", "metadata": {"name": "kubernetes"},
            "endpoints": [{"addresses": ["192.0.2.1"]}, {"addresses": ["192.0.2.2"]}], "ports": [{"name": "https", "port": 6443}],
        }))
        .unwrap();
        assert_eq!(
            sockets(&slice),
            ["192.0.2.1:6443", "192.0.2.2:6443"].map(|s| s.parse().unwrap()).into()
        );
    }
}
