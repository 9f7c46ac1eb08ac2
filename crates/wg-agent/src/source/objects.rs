//! What is kept of each object: its values, or why it cannot be used. How they are spelled is `clustermesh_api`'s; what
//! follows from them is `clustermesh_agent_core`'s.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::{
    policy::{Policy, Port, Protocol, Rule},
    prefixes::host,
};
use clustermesh_api::{
    convert,
    names::{KILO_LAST_SEEN, LABEL_MESH, LABEL_MESH_NAMESPACE, LABEL_SOURCE_CLUSTER, PEER_REQUIRES_POLICY},
    peer::Peer,
    policy::PeerPolicy,
    revision::{self, PolicyDigest},
};
use clustermesh_core::{
    mesh,
    observe::{Endpoint, PeerSpec, PolicySpec, ServiceGrant},
};
use ipnet::IpNet;
use k8s_openapi::api::{core::v1::Node, discovery::v1::EndpointSlice};
use kube::api::DynamicObject;

use crate::publish::Annotations;

/// A Peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSeen {
    /// The member whose node it is; empty where nobody says.
    pub cluster: String,
    /// Namespace and name of the ClusterMesh that the member is an entry of; empty where nobody says.
    pub mesh: (String, String),
    /// Its resourceVersion: which of two Peers was written last.
    pub revision: u64,
    /// `kilo-clustermesh.io/requires-policy`.
    pub requires_policy: Option<String>,
    /// Its values, or what is wrong with it.
    pub spec: Result<PeerSpec, String>,
}

impl PeerSeen {
    /// Takes an object apart. Never fails: a Peer that cannot be used says why.
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
        let annotation = |key| {
            object
                .metadata
                .annotations
                .as_ref()
                .and_then(|all| all.get(key))
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
            requires_policy: annotation(PEER_REQUIRES_POLICY),
            spec: match object.try_parse::<Peer>() {
                Ok(peer) => convert::peer::exact(&peer),
                Err(error) => Err(format!("is not what the Peer CRD describes: {error}")),
            },
        }
    }
}

/// A PeerPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicySeen {
    /// What to enforce. Of a policy that cannot be read, only the networks that must not leave in clear: it allows nothing. What
    /// a sandbox's grants come to here is not known yet.
    pub policy: Policy,
    /// The Services that a sandbox may reach.
    pub grants: BTreeSet<ServiceGrant>,
    /// What is wrong with it.
    pub problem: Option<String>,
    /// Changes with whatever it says.
    pub digest: PolicyDigest,
}

impl PolicySeen {
    /// Takes an object apart. Never fails: a policy that cannot be read closes what it can.
    #[must_use]
    pub fn new(object: DynamicObject) -> Self {
        let name = object.metadata.name.clone().unwrap_or_default();
        let digest = revision::digest(&name, object.data.get("spec"));
        let closed = |networks: &[String]| Policy {
            name: name.clone(),
            networks: networks
                .iter()
                .filter_map(|text| text.parse().ok())
                .map(|net: IpNet| net.trunc())
                .collect(),
            ..Policy::default()
        };
        let mut grants = BTreeSet::new();
        let (policy, problem) = match object.try_parse::<PeerPolicy>() {
            Ok(written) => match convert::policy::to_core(&written).spec {
                Ok(spec) if spec.sandbox && !spec.allow.is_empty() => (
                    closed(&written.spec.networks),
                    Some("spec.allow: holds networks, and a sandbox reaches Services alone: name them by `service`".to_owned()),
                ),
                Ok(spec) if !spec.sandbox && !spec.grants.is_empty() => (
                    closed(&written.spec.networks),
                    Some(
                        "spec.allow: names a Service, which is for isolationProfile: sandbox; other members reach networks"
                            .to_owned(),
                    ),
                ),
                Ok(spec) if !spec.grants.iter().all(|grant| plain(&grant.service)) => (
                    closed(&written.spec.networks),
                    Some("spec.allow: a service's namespace or name is none that Kubernetes takes".to_owned()),
                ),
                Ok(spec) => {
                    grants.clone_from(&spec.grants);
                    let policy = Policy {
                        revision: written.spec.revision(),
                        ..policy(&name, &spec)
                    };
                    (policy, None)
                }
                Err(problem) => (closed(&written.spec.networks), Some(problem)),
            },
            Err(error) => (
                closed(&[]),
                Some(format!("is not what the PeerPolicy CRD describes: {error}")),
            ),
        };
        Self {
            policy,
            grants,
            problem,
            digest,
        }
    }
}

/// Whether both parts are DNS labels: they go into a request's path and its label selector.
fn plain(service: &mesh::ObjectName) -> bool {
    let letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let label = |text: &str| (1..=63).contains(&text.len()) && text.bytes().all(letter);
    label(&service.namespace) && label(&service.name)
}

/// The agent's word for a protocol.
pub(crate) const fn protocol(protocol: mesh::Protocol) -> Protocol {
    match protocol {
        mesh::Protocol::Tcp => Protocol::Tcp,
        mesh::Protocol::Udp => Protocol::Udp,
        mesh::Protocol::Sctp => Protocol::Sctp,
    }
}

fn policy(name: &str, spec: &PolicySpec) -> Policy {
    let PolicySpec {
        sources,
        networks,
        allow,
        deny,
        infrastructure_ports,
        anchored,
        sandbox,
        grants: _, // for the slices to say
    } = spec;
    let closed = |at: &SocketAddr| Rule {
        to: [host(at.ip().to_canonical())].into(),
        ports: [Port {
            protocol: Protocol::Tcp,
            port: at.port(),
        }]
        .into(),
    };
    Policy {
        name: name.to_owned(),
        sources: sources.clone(),
        networks: networks.clone(),
        allow: if allow.is_empty() {
            Vec::new()
        } else {
            vec![Rule {
                to: allow.clone(),
                ports: BTreeSet::new(),
            }]
        },
        deny: deny.iter().map(closed).collect(),
        anchored: anchored.clone(),
        infrastructure_ports: infrastructure_ports
            .iter()
            .map(|(name, port)| Port {
                protocol: protocol(*name),
                port: *port,
            })
            .collect(),
        sandbox: *sandbox,
        ..Policy::default()
    }
}

/// A Node. Of every Node the claims that concern all; of this one also what it is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeSeen {
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// Host part of `kilo.squat.ai/wireguard-ip`.
    pub wireguard_ip: Option<IpAddr>,
    /// `status.addresses` of type InternalIP.
    pub internal_ips: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: BTreeSet<IpNet>,
    /// Only of this node.
    pub own: Option<OwnNode>,
}

/// What this node's object says about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnNode {
    /// `status.addresses` of type ExternalIP.
    pub external_ips: Vec<IpAddr>,
    /// `kilo.squat.ai/force-endpoint`.
    pub force_endpoint: Option<Endpoint>,
    /// `kilo.squat.ai/last-seen`, Unix seconds: when kg, which this agent is not, last wrote it.
    pub kg_seen: Option<i64>,
    /// The annotations this agent writes, as they stand.
    pub published: Annotations,
}

impl NodeSeen {
    /// What concerns this agent of a Node. `me` is this node's name, `keys` the annotations it writes.
    #[must_use]
    pub fn new(node: &Node, me: &str, keys: &[&'static str]) -> Self {
        let seen = convert::node::to_core(node);
        let annotation = |key: &str| node.metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
        let own = (node.metadata.name.as_deref() == Some(me)).then(|| OwnNode {
            external_ips: seen.external_ips.clone(),
            force_endpoint: seen.force_endpoint.value().cloned(),
            kg_seen: annotation(KILO_LAST_SEEN).and_then(|text| text.parse().ok()),
            published: keys.iter().map(|key| (*key, annotation(key))).collect(),
        });
        Self {
            created: seen.created,
            wireguard_ip: seen.wireguard_ip.value().map(IpNet::addr),
            internal_ips: seen.internal_ips,
            pod_cidrs: seen
                .pod_cidrs
                .iter()
                .filter_map(|claim| claim.value())
                .copied()
                .collect(),
            own,
        }
    }
}

/// The sockets of an EndpointSlice.
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

/// A hash over the policies, which changes with whatever they say.
#[must_use]
pub fn revision<'a>(policies: impl Iterator<Item = &'a PolicySeen>) -> String {
    revision::of_all(policies.map(|policy| &policy.digest))
}

#[cfg(test)]
mod tests {
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
    fn a_policy_is_enforced_as_it_is_written() {
        let seen = PolicySeen::new(policy_object(serde_json::json!([{"to": ["10.4.0.0/16"]}])));
        let tcp = |port| Port {
            protocol: Protocol::Tcp,
            port,
        };
        let want = Policy {
            name: "m--a".into(),
            sources: nets(&["10.5.0.0/16"]),
            networks: nets(&["10.5.0.0/16", "100.67.0.0/16"]),
            allow: vec![Rule {
                to: nets(&["10.4.0.0/16"]),
                ports: BTreeSet::new(),
            }],
            deny: vec![Rule {
                to: nets(&["192.0.2.1/32"]),
                ports: [tcp(6443)].into(),
            }],
            infrastructure_ports: [tcp(10250)].into(),
            anchored: nets(&["10.96.0.0/12"]),
            revision: seen.policy.revision.clone(),
            ..Policy::default()
        };
        assert_eq!(seen.policy.revision.len(), 16);
        assert_eq!((seen.policy, seen.problem), (want, None));
    }

    #[test]
    fn a_policy_that_asks_for_more_than_is_served_allows_nothing_and_still_closes_its_networks() {
        let grant = serde_json::json!([{"service": {"namespace": "a", "name": "b"}}]);
        let seen = PolicySeen::new(policy_object(grant));
        let networks = nets(&["10.5.0.0/16", "100.67.0.0/16"]);
        assert_eq!(
            seen.policy,
            Policy {
                name: "m--a".into(),
                networks,
                ..Policy::default()
            }
        );
        assert!(seen.problem.unwrap().starts_with("spec.allow: names a Service"));
    }

    #[test]
    fn a_sandboxs_policy_says_which_services_and_never_which_networks() {
        let of = |allow| {
            let mut object = policy_object(allow);
            object.data["spec"]["isolationProfile"] = "sandbox".into();
            PolicySeen::new(object)
        };
        let service = serde_json::json!({
            "to": ["10.1.0.0/16"], "service": {"namespace": "a", "name": "b"}, "ports": [{"port": "sql", "protocol": "TCP"}],
        });
        let seen = of(serde_json::json!([service]));
        let grant = ServiceGrant {
            service: mesh::ObjectName {
                namespace: "a".into(),
                name: "b".into(),
            },
            ports: [(mesh::Protocol::Tcp, "sql".to_owned())].into(),
            within: ["10.1.0.0/16".parse().unwrap()].into(),
        };
        assert_eq!(seen.problem, None);
        assert_eq!(seen.grants, [grant].into());
        assert!(seen.policy.sandbox && seen.policy.allow.is_empty() && seen.policy.granted.is_empty());
        for name in ["a,b", "..", "", "a/b"] {
            let odd = of(serde_json::json!([{"service": {"namespace": name, "name": "b"}}]));
            assert!(odd.grants.is_empty() && odd.problem.is_some(), "{name}");
        }
        let wide = of(serde_json::json!([service, {"to": ["10.4.0.0/16"]}]));
        assert!(wide.problem.unwrap().starts_with("spec.allow: holds networks"));
        assert_eq!((wide.grants, wide.policy.revision.as_str()), (BTreeSet::new(), ""));
    }

    #[test]
    fn what_is_no_peer_at_all_says_so() {
        let peer = PeerSeen::new(object(serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
            "metadata": {"name": "p", "resourceVersion": "41"}, "spec": {"allowedIPs": 7},
        })));
        assert_eq!(
            (peer.revision, peer.cluster.as_str(), peer.requires_policy),
            (41, "", None)
        );
        assert!(peer.spec.unwrap_err().starts_with("is not what the Peer CRD describes"));
    }

    #[test]
    fn only_this_nodes_heartbeat_is_a_change() {
        let node = |seen: &str| -> Node {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "n", "annotations": {"kilo.squat.ai/last-seen": seen, "kilo.squat.ai/wireguard-ip": "10.4.0.1/16"}},
                "spec": {"podCIDRs": ["10.5.1.0/24", "fd00:5:0:1::/64"]},
                "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}]},
            }))
            .unwrap()
        };
        assert_eq!(
            NodeSeen::new(&node("1"), "other", &[]),
            NodeSeen::new(&node("2"), "other", &[])
        );
        let own = NodeSeen::new(&node("2"), "n", &["kilo.squat.ai/wireguard-ip", "kilo.squat.ai/key"]);
        assert_eq!(
            (own.wireguard_ip, own.internal_ips, own.pod_cidrs),
            (
                Some("10.4.0.1".parse().unwrap()),
                vec!["192.0.2.7".parse().unwrap()],
                nets(&["10.5.1.0/24", "fd00:5:0:1::/64"])
            )
        );
        let published = own.own.unwrap();
        assert_eq!(published.kg_seen, Some(2));
        assert_eq!(
            published.published,
            [
                ("kilo.squat.ai/wireguard-ip", Some("10.4.0.1/16".to_owned())),
                ("kilo.squat.ai/key", None)
            ]
            .into()
        );
    }

    #[test]
    fn sockets_are_addresses_times_ports() {
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
