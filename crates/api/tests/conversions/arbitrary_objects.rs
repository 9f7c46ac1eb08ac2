//! Tests conversions and names with arbitrary input: nothing panics, written values are read back unchanged, and the names of Peers and
//! PeerPolicies are valid. With selected input: the Peers of different nodes have different names.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_api::{
    annotations,
    convert::{mesh, node, peer},
    names,
    peer::{DnsOrIp, Peer, PeerEndpoint, PeerSpec},
};
use clustermesh_core::{
    key::PublicKey,
    mesh::MeshId,
    observe::{self, Endpoint, Owner},
};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use proptest::prelude::*;

/// Texts that a hostile cluster may contain: arbitrary ones, and some that are nearly valid.
fn hostile() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[0-9a-fA-F.:/\\[\\]%x-]{0,50}",
        "[0-9]{1,3}(\\.[0-9]{1,3}){3}(/[0-9]{1,3}|:[0-9]{1,6})?",
        "[A-Za-z0-9+/]{43}=",
        "\\{\"[A-Za-z0-9+/]{43}=\":\\{\"IP\":\"[0-9.:]{0,20}\",\"Port\":-?[0-9]{1,20}\\}\\}",
        "(\\.|-|_|[a-z]){0,300}",
    ]
}

fn key() -> impl Strategy<Value = PublicKey> {
    // Keys that are points of low order are invalid.
    any::<[u8; 32]>()
        .prop_map(PublicKey::new)
        .prop_filter("low order", |k| k.to_string().parse::<PublicKey>().is_ok())
}

fn address() -> impl Strategy<Value = IpAddr> {
    any::<IpAddr>().prop_map(|a| a.to_canonical())
}

fn socket() -> impl Strategy<Value = SocketAddr> {
    (address(), 1_u16..).prop_map(|(a, p)| SocketAddr::new(a, p))
}

fn net() -> impl Strategy<Value = IpNet> {
    (address(), 0_u8..=128)
        .prop_map(|(a, len)| IpNet::new(a, if a.is_ipv4() { len % 33 } else { len }).unwrap().trunc())
        .prop_filter(
            "IPv4-mapped network",
            |n| !matches!(n, IpNet::V6(v6) if v6.addr().to_ipv4_mapped().is_some()),
        )
}

fn peer_spec() -> impl Strategy<Value = observe::PeerSpec> {
    let endpoint = prop_oneof![
        socket().prop_map(Endpoint::Ip),
        ("[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\\.[a-z]{2,5}){0,2}", 1_u16..).prop_map(|(n, p)| Endpoint::Dns(n, p)),
    ];
    (
        key(),
        proptest::collection::btree_set(net(), 0..8),
        proptest::option::of(endpoint),
        proptest::collection::vec(socket(), 0..4),
        any::<u16>(),
    )
        .prop_map(
            |(public_key, allowed_ips, endpoint, candidates, persistent_keepalive)| observe::PeerSpec {
                public_key,
                allowed_ips,
                endpoint,
                candidates,
                persistent_keepalive,
                role: observe::PeerRole::Node,
            },
        )
}

proptest! {
    #[test]
    fn planned_peer_is_read_back(spec in peer_spec()) {
        let owner = Owner { mesh: Some("m".into()), ..Owner::default() };
        let written = serde_json::to_string(&peer::from_core("p", &spec, &owner)).unwrap();
        let read: Peer = serde_json::from_str(&written).unwrap();
        prop_assert_eq!(peer::to_core(&read), observe::ObservedPeer { owner, spec: Ok(spec) });
    }

    #[test]
    fn any_peer_is_converted_or_refused(
        texts in proptest::collection::vec(hostile(), 6), numbers in any::<(i32, i64)>(), has_dns in any::<bool>(),
        has_mesh_label in any::<bool>(),
    ) {
        let mut object = Peer::new("p", PeerSpec {
            allowed_ips: texts[..2].to_vec(),
            endpoint: Some(PeerEndpoint {
                dns_or_ip: DnsOrIp { dns: Some(texts[2].clone()).filter(|_| has_dns), ip: Some(texts[3].clone()) },
                port: numbers.0,
            }),
            persistent_keepalive: Some(numbers.1),
            preshared_key: None,
            public_key: texts[4].clone(),
        });
        object.metadata.annotations = Some([(names::PEER_ENDPOINTS.to_owned(), texts[5].clone())].into());
        object.metadata.labels = has_mesh_label.then(|| [(names::LABEL_MESH.to_owned(), "m".to_owned())].into());
        if let Ok(spec) = peer::to_core(&object).spec {
            prop_assert!(spec.allowed_ips.iter().all(|net| *net == net.trunc()));
        }
    }

    // threat: malformed-node
    #[test]
    fn any_node_is_converted_to_valid_endpoints_and_networks(texts in proptest::collection::vec(hostile(), 16)) {
        let keys = [
            names::KILO_KEY, names::KILO_WIREGUARD_IP, names::KILO_ENDPOINT, names::KILO_FORCE_ENDPOINT,
            names::KILO_CLUSTERMESH_ENDPOINT, names::KILO_INTERNAL_IP, names::KILO_GRANULARITY, names::KILO_LOCATION,
            names::KILO_PERSISTENT_KEEPALIVE, names::KILO_ALLOWED_LOCATION_IPS, names::KILO_DISCOVERED_ENDPOINTS,
            names::NODE_AGENT,
        ];
        let annotations: BTreeMap<&str, &String> = keys.into_iter().zip(&texts).collect();
        let object: Node = serde_json::from_value(serde_json::json!({
            "metadata": {"name": texts[15], "annotations": annotations},
            "spec": {"podCIDRs": &texts[12..14]},
            "status": {"addresses": [{"type": "InternalIP", "address": texts[13]}, {"type": "ExternalIP", "address": texts[14]}]},
        })).unwrap();
        let read = node::to_core(&object);
        for claim in [&read.kilo_endpoint, &read.force_endpoint, &read.clustermesh_endpoint] {
            prop_assert!(claim.value().is_none_or(|endpoint| endpoint.port() > 0));
        }
        for net in read.pod_cidrs.iter().filter_map(|claim| claim.value()) {
            prop_assert_eq!(*net, net.trunc());
        }
    }

    #[test]
    fn any_mesh_is_converted_or_refused(texts in proptest::collection::vec(hostile(), 12), local in any::<bool>()) {
        let object = serde_json::from_value(serde_json::json!({
            "apiVersion": "v", "kind": "k", "metadata": {"name": texts[0], "namespace": texts[1]},
            "spec": {"clusters": [
                {"name": texts[2], "local": local, "allowedNetworks": [texts[3]], "anchoredNetworks": [texts[4]],
                 "exports": [{"namespace": texts[5], "podSelector": {"matchExpressions": [{"key": texts[6], "operator": texts[7]}]}}]},
                {"name": texts[8], "kubeconfigSecretRef": {"name": texts[9]}, "allowedNetworks": ["10.0.0.0/8"],
                 "egress": [{"service": {"cluster": texts[2], "namespace": texts[10], "name": texts[11]}, "ports": [{"port": texts[5]}]}]},
            ]},
        })).unwrap();
        if let Err(problems) = mesh::to_core(&object) {
            prop_assert!(!problems.is_empty());
        }
    }

    // threat: hostile-names
    #[test]
    fn peer_and_policy_names_are_valid_object_names(mesh in hostile(), cluster in hostile(), node in hostile(), is_taken in any::<bool>()) {
        let id = MeshId { namespace: "ns".into(), name: mesh };
        for name in [names::peer_name("hub", &id, &cluster, &node, is_taken), names::policy_name("hub", &id, &cluster, is_taken)] {
            prop_assert!(name.len() <= 253, "{}", name);
            for label in name.split('.') {
                let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
                prop_assert!(label.starts_with(plain) && label.ends_with(plain), "{}", name);
                prop_assert!(label.chars().all(|c| plain(c) || c == '-'), "{}", name);
            }
        }
    }

    #[test]
    fn discovered_endpoints_are_read_back(found in proptest::collection::btree_map(key(), socket(), 0..5)) {
        prop_assert_eq!(annotations::discovered(&annotations::discovered_text(&found)), found);
    }
}

// threat: hostile-names
#[test]
fn peer_names_of_different_nodes_differ() {
    let parts = ["a", "a-", "a--b", "b", "-b", "a.b", "A", "", "é"];
    let mut seen = BTreeSet::new();
    for mesh in parts {
        for cluster in parts {
            for node in parts {
                let id = MeshId {
                    namespace: "ns".into(),
                    name: mesh.into(),
                };
                assert!(
                    seen.insert(names::peer_name("hub", &id, cluster, node, false)),
                    "{mesh:?} {cluster:?} {node:?}"
                );
            }
        }
    }
}
