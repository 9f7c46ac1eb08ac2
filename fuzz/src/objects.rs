//! Fuzz targets for untrusted objects and annotations. `object` and `annotation` check that no parser panics, and that a round trip does
//! not change an accepted value. `compiled` checks the desired state that an agent makes of Peers and PeerPolicies.
//!
//! Each target returns whether the input was useful: an object with a kind, an accepted annotation, or a node with a peer.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_agent_core::{
    compile::{Compiled, Inputs, Node, Peer, compile},
    device,
    firewall::render,
    numbers::TABLE,
    prefixes::{covered, overlap},
    routes::{self, Kind},
};
use clustermesh_api::{annotations, convert, mesh::ClusterMesh, names, peer, policy::PeerPolicy};
use clustermesh_core::{
    key::PublicKey,
    observe::{Endpoint, Owner},
};
use k8s_openapi::api::{core::v1 as core, discovery::v1::EndpointSlice};
use kube::{ResourceExt, api::DynamicObject};
use serde_json::Value;
use wg_agent::source::objects::{ParsedNode, ParsedPeer, ParsedPolicy, sockets};

/// Parses a JSON object as every kind whose type accepts it.
pub fn object(bytes: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
        return false;
    };
    let has_kind = value.get("kind").is_some();
    if let Ok(object) = serde_json::from_value::<DynamicObject>(value.clone()) {
        assert_invalid_policy_allows_nothing(&ParsedPolicy::new(object.clone()));
        let _ = ParsedPeer::new(object);
    }
    if let Ok(peer) = serde_json::from_value::<peer::Peer>(value.clone()) {
        let _ = convert::peer::to_core(&peer);
        if let Ok(spec) = convert::peer::parse_strictly(&peer) {
            let written = convert::peer::from_core("p", &spec, &Owner::default());
            assert_eq!(
                convert::peer::parse_strictly(&written),
                Ok(spec),
                "a round trip does not change an accepted Peer"
            );
        }
    }
    if let Ok(policy) = serde_json::from_value::<PeerPolicy>(value.clone())
        && let Ok(spec) = convert::policy::to_core(&policy).spec
    {
        let written = convert::policy::from_core("p", "s", &spec, &Owner::default());
        assert_eq!(
            convert::policy::to_core(&written).spec,
            Ok(spec),
            "a round trip does not change an accepted PeerPolicy"
        );
    }
    if let Ok(node) = serde_json::from_value::<core::Node>(value.clone()) {
        let _ = ParsedNode::new(&node, &node.name_any(), &[names::KILO_KEY]);
        let _ = convert::node::agent(&node);
        for net in convert::node::to_core(&node)
            .pod_cidrs
            .iter()
            .filter_map(|claim| claim.value())
        {
            assert_eq!(*net, net.trunc(), "a pod CIDR has no host bits");
        }
    }
    if let Ok(mesh) = serde_json::from_value::<ClusterMesh>(value.clone())
        && let Err(findings) = convert::mesh::to_core(&mesh)
    {
        assert!(!findings.is_empty(), "a refusal has a reason");
    }
    if let Ok(slice) = serde_json::from_value::<EndpointSlice>(value.clone()) {
        let _ = convert::service::slice_to_core(&slice);
        let _ = sockets(&slice);
    }
    if let Ok(service) = serde_json::from_value::<core::Service>(value.clone()) {
        let _ = convert::service::to_core(&service);
    }
    if let Ok(pod) = serde_json::from_value::<core::Pod>(value) {
        let _ = convert::service::pod_to_core(&pod);
    }
    has_kind
}

/// Parses a text as every annotation.
pub fn annotation(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return false;
    };
    let mut accepted = annotations::host_and_prefix(text).is_ok();
    let endpoint = annotations::endpoint(text);
    accepted |= endpoint.is_ok();
    match endpoint {
        Ok(Endpoint::Ip(address)) => assert_ne!(address.port(), 0),
        Ok(Endpoint::Dns(name, port)) => {
            assert_ne!(port, 0);
            assert!(
                name.bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte)),
                "the invalid name {name:?} would be sent to a resolver"
            );
        }
        Err(why) => assert!(!why.is_empty()),
    }
    let found = annotations::discovered(text);
    assert_eq!(annotations::discovered(&annotations::discovered_text(&found)), found);
    accepted |= !found.is_empty();
    if let Ok(agent) = annotations::AgentStatus::parse(text) {
        accepted = true;
        // The output also contains the defaults of omitted fields, so it may exceed the length limit of 4096 bytes.
        let again = agent.to_string();
        assert!(again.len() > 4096 || annotations::AgentStatus::parse(&again) == Ok(agent));
    }
    if let Ok(key) = text.parse::<PublicKey>() {
        assert_eq!(key.to_string(), text);
        accepted = true;
    }
    accepted
}

/// Compiles a JSON list of Peers and PeerPolicies to the desired state of a node with the pod CIDR 10.101.0.0/24.
pub fn compiled(bytes: &[u8]) -> bool {
    let Ok(objects) = serde_json::from_slice::<Vec<DynamicObject>>(bytes) else {
        return false;
    };
    let inputs = inputs(objects);
    let out = compile(&inputs);
    assert_peers_are_consistent(&out);
    assert_routes_stay_in_the_mesh(&inputs, &out);
    let text = render(&out.firewall);
    // No table contains the command `flush`, so only injected text could.
    assert!(!text.contains("flush"), "{text}");
    let from_mesh = text
        .split("chain from_mesh {")
        .nth(1)
        .and_then(|rest| rest.split("\n  }").next());
    let last = from_mesh.and_then(|chain| chain.trim_end().lines().last());
    assert!(
        last.is_some_and(|rule| rule.trim().starts_with("counter drop")),
        "{text}"
    );
    // A short name may also be a word of the table.
    for name in inputs.policies.keys().filter(|name| name.len() > 20) {
        assert!(!text.contains(name.as_str()), "the text of nftables contains {name:?}");
    }
    assert_eq!(routes::diff(&out.routes, &out.routes), None);
    !out.peers.is_empty()
}

fn inputs(objects: Vec<DynamicObject>) -> Inputs {
    let (mut peers, mut policies) = (Vec::new(), BTreeMap::new());
    for object in objects {
        let name = object.name_any();
        if object.data["spec"].get("publicKey").is_none() {
            policies.insert(name, ParsedPolicy::new(object).spec);
            continue;
        }
        let ParsedPeer {
            cluster: _,
            mesh: _,
            revision,
            spec,
        } = ParsedPeer::new(object);
        if let Ok(spec) = spec {
            peers.push(Peer {
                name,
                revision,
                public_key: spec.public_key,
                preshared_key: None,
                endpoint: match spec.endpoint {
                    Some(Endpoint::Ip(address)) => Some(address),
                    _ => None,
                },
                candidates: spec.candidates,
                keepalive: std::num::NonZeroU16::new(spec.persistent_keepalive),
                allowed_ips: spec.allowed_ips.into_iter().collect(),
                role: spec.role,
            });
        }
    }
    Inputs {
        node: Node {
            name: "node".into(),
            public_key: PublicKey::new([9; 32]),
            wireguard_ips: ["100.66.9.1".parse().expect("an address")].into(),
            device: "kilo0".parse().expect("a name"),
            listen_port: 51820,
            mtu: 1420,
            underlay: "eth0".parse().expect("a name"),
            underlay_addresses: ["172.29.0.111".parse().expect("an address")].into(),
            internal_ips: ["172.29.0.111".parse().expect("an address")].into(),
            pod_cidrs: ["10.101.0.0/24".parse().expect("a network")].into(),
        },
        throw: ["172.29.0.1/32".parse().expect("a network")].into(),
        api_servers: ["172.29.0.11:6443".parse().expect("a socket")].into(),
        all_node_addresses: BTreeSet::new(),
        pod_cidrs_of_other_nodes: BTreeSet::new(),
        own_sources: BTreeSet::new(),
        peers,
        policies,
        peer_mtus: Default::default(),
    }
}

fn assert_invalid_policy_allows_nothing(policy: &ParsedPolicy) {
    assert!(policy.problem.is_none() || policy.spec.allow.is_empty(), "{policy:?}");
}

/// Checks that no two peers have the same allowed IP, and that a device without peers needs a change exactly if peers are desired.
fn assert_peers_are_consistent(out: &Compiled) {
    let mut owned = BTreeSet::new();
    for net in out.peers.values().flat_map(|peer| &peer.allowed_ips) {
        assert_eq!(*net, net.trunc());
        assert!(owned.insert(*net), "two peers have the allowed IP {net}");
    }
    let nothing = device::ObservedPeers::new();
    assert_eq!(device::diff(&nothing, &out.peers).is_none(), out.peers.is_empty());
}

fn assert_routes_stay_in_the_mesh(inputs: &Inputs, out: &Compiled) {
    let mesh_routes = || out.routes.routes.iter().filter(|route| route.table == TABLE);
    let unreachable = mesh_routes().filter(|route| route.kind == Kind::Unreachable);
    let unreachable: BTreeSet<_> = unreachable.map(|route| route.prefix).collect();
    for route in mesh_routes() {
        assert!(route.prefix.prefix_len() > 0, "{route} is a default route");
        assert!(
            covered(&route.prefix, &unreachable),
            "no unreachable route covers {route}"
        );
        let overlaps_pods = inputs.node.pod_cidrs.iter().any(|pods| overlap(pods, &route.prefix));
        assert!(
            !overlaps_pods || route.kind == Kind::Throw,
            "{route} overlaps the pod CIDR of this node"
        );
    }
}
