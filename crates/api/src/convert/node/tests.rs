use std::collections::BTreeMap;

use clustermesh_core::enforcement::Bypass;
use kube::ResourceExt;
use serde_json::json;

use super::*;
use crate::annotations::IPVS;

const KEY: &str = "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=";

fn node(value: serde_json::Value) -> Node {
    serde_json::from_value(value).unwrap()
}

fn recorded(text: &str) -> BTreeMap<String, observe::Node> {
    let list: serde_json::Value = serde_json::from_str(text).unwrap();
    let nodes = list["items"].as_array().unwrap().iter().cloned().map(node);
    nodes.map(|n| (n.metadata.name.clone().unwrap(), to_core(&n))).collect()
}

#[test]
fn kg_leader_is_converted() {
    let nodes = recorded(include_str!("../../../tests/fixtures/nodes-location.json"));
    let endpoint = Claim::Valid(observe::Endpoint::Ip("198.51.100.111:51820".parse().unwrap()));
    let seen = [
        ("FOA4Fm2q3jL2DH8YZIflkrM21Se787ICn433LikzC0o=", "198.51.100.121:51820"),
        ("RZLoOCi9+okHNLHfdtAXzZ+joYGLXS+ekovca8DM9Sw=", "198.51.100.122:51820"),
        ("xEcJ1y+L/FVuAcjCMDSXKd7xjr+9ydiO+P+/A17HdVk=", "198.51.100.123:51820"),
    ];
    assert_eq!(
        nodes["c1n1"],
        observe::Node {
            created: 1_795_262_653,
            ready: nodes["c1n1"].ready,
            pod_cidrs: vec![Claim::Valid("10.101.4.0/24".parse().unwrap())],
            wireguard_ip: Claim::Valid("100.66.0.1/16".parse().unwrap()),
            public_key: Claim::Valid("KwaR/1MLyvshuWMRuzkJr/RSfVRyVLi5nR2t4mSTDVU=".parse().unwrap()),
            force_endpoint: endpoint.clone(),
            kilo_endpoint: endpoint,
            internal_ips: vec!["172.31.7.111".parse().unwrap()],
            kilo_internal_ip: Some("172.31.7.111".parse().unwrap()),
            location: "east".into(),
            granularity: Some(Granularity::Location),
            discovered: seen.map(|(k, a)| (k.parse().unwrap(), a.parse().unwrap())).into(),
            ..observe::Node::default()
        }
    );
    assert_eq!(
        nodes["c1n2"].wireguard_ip,
        Claim::Absent,
        "kg writes an empty text on a node that is not a leader"
    );
    assert!(nodes["c1n2"].ready);
    assert_eq!(nodes["c1n3"].location, "west");
}

#[test]
fn node_of_stopped_kg_has_only_pod_cidr_and_internal_ip() {
    let nodes = recorded(include_str!("../../../tests/fixtures/nodes-after-sigterm.json"));
    assert_eq!(
        nodes["c1n3"],
        observe::Node {
            created: 1_795_261_895,
            ready: true,
            pod_cidrs: vec![Claim::Valid("10.101.2.0/24".parse().unwrap())],
            internal_ips: vec!["172.31.7.113".parse().unwrap()],
            ..observe::Node::default()
        }
    );
}

#[test]
fn converted_node_does_not_contain_last_seen() {
    let with = |seen: &str| {
        to_core(&node(
            json!({"metadata": {"name": "n", "annotations": {"kilo.squat.ai/last-seen": seen}}}),
        ))
    };
    assert_eq!(with("1795262293"), with("1795262323"));
}

#[test]
fn last_seen_and_leader_annotations_are_read() {
    let with = |annotations: serde_json::Value| node(json!({"metadata": {"name": "n", "annotations": annotations}}));
    let seen = |text: &str| last_seen(&with(json!({"kilo.squat.ai/last-seen": text})));
    assert_eq!(seen("1795411942"), Some(1_795_411_942));
    assert_eq!(["", "soon", "1e9", "99999999999999999999"].map(seen), [None; 4]);
    let is_preferred_leader = |annotations| to_core(&with(annotations)).is_preferred_leader;
    // kg ignores the value of the annotation.
    assert!(
        is_preferred_leader(json!({"kilo.squat.ai/leader": "true"}))
            && is_preferred_leader(json!({"kilo.squat.ai/leader": "false"}))
    );
    assert!(!is_preferred_leader(json!({})));
}

/// Malformed items of fields without [`Claim`] (`x`, `garbage`) are left out.
#[test]
fn addresses_of_both_families_and_annotations_are_read() {
    let agent = r#"{"version":"0.1.0","mode":"policy","datapathBypassed":"netkit"}"#;
    let read = to_core(&node(json!({
        "metadata": {
            "name": "n",
            "creationTimestamp": "1970-01-01T00:00:07Z",
            "deletionTimestamp": "2026-11-21T12:00:00Z",
            "labels": {"topology.kubernetes.io/region": "east"},
            "annotations": {
                "kilo.squat.ai/key": KEY,
                "kilo.squat.ai/wireguard-ip": "fd00:66::9/64",
                "kilo.squat.ai/clustermesh-endpoint": "node.example.org:51820",
                "kilo.squat.ai/persistent-keepalive": "25",
                "kilo.squat.ai/location": "cellar",
                "kilo.squat.ai/granularity": "cross",
                "kilo.squat.ai/allowed-location-ips": "192.168.7.9/24,x, fd00:7::/64",
                "kilo-clustermesh.io/agent": agent,
            },
        },
        "spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.1.0.5/24", "fd00:1::/64", "y"]},
        "status": {
            "conditions": [{"type": "Ready", "status": "Unknown"}],
            "addresses": [
                {"type": "ExternalIP", "address": "192.0.2.7"},
                {"type": "ExternalIP", "address": "::ffff:192.0.2.8"},
                {"type": "InternalIP", "address": "fd00::7"},
                {"type": "InternalIP", "address": "garbage"},
                {"type": "Hostname", "address": "192.0.2.9"},
            ],
        },
    })));
    let bad = "\"y\" is not a network: write an address and a prefix length, such as 10.244.0.0/16 or fd00:10:244::/48";
    assert_eq!(
        read,
        observe::Node {
            created: 7,
            ready: false,
            deleting: true,
            pod_cidrs: vec![
                Claim::Valid("10.1.0.0/24".parse().unwrap()),
                Claim::Valid("fd00:1::/64".parse().unwrap()),
                Claim::Invalid(bad.into()),
            ],
            wireguard_ip: Claim::Valid("fd00:66::9/64".parse().unwrap()),
            public_key: Claim::Valid(KEY.parse().unwrap()),
            clustermesh_endpoint: Claim::Valid(observe::Endpoint::Dns("node.example.org".into(), 51820)),
            external_ips: vec!["192.0.2.7".parse().unwrap(), "192.0.2.8".parse().unwrap()],
            internal_ips: vec!["fd00::7".parse().unwrap()],
            persistent_keepalive: 25,
            location: "cellar".into(),
            granularity: Some(Granularity::Cross),
            allowed_location_ips: vec!["192.168.7.0/24".parse().unwrap(), "fd00:7::/64".parse().unwrap()],
            server: Server::AgentPolicy,
            bypassed: Some(Bypass::Cni),
            ..observe::Node::default()
        }
    );
}

#[test]
fn cordoned_node_and_node_that_an_autoscaler_removes_are_leaving() {
    let leaving = |spec: serde_json::Value| to_core(&node(json!({"metadata": {"name": "n"}, "spec": spec}))).leaving;
    let taint =
        |key: &str| json!({"taints": [{"key": "a", "effect": "NoExecute"}, {"key": key, "effect": "NoSchedule"}]});
    assert!(leaving(json!({"unschedulable": true})));
    assert!(leaving(taint("ToBeDeletedByClusterAutoscaler")));
    assert!(leaving(taint("karpenter.sh/disrupted")));
    for stays in [
        json!({}),
        json!({"unschedulable": false}),
        taint("node-role.kubernetes.io/control-plane"),
    ] {
        assert!(!leaving(stays.clone()), "{stays}");
    }
}

#[test]
fn bypass_is_read_from_the_status_of_the_agent() {
    let read = |why: &str| {
        let agent = json!({"version": "0.1.0", "mode": "full", "datapathBypassed": why}).to_string();
        to_core(&node(
            json!({"metadata": {"name": "n", "annotations": {"kilo-clustermesh.io/agent": agent}}}),
        ))
        .bypassed
    };
    assert_eq!(
        ["", IPVS, "datapath-mode is netkit", "a reason of a later version"].map(read),
        [None, Some(Bypass::Ipvs), Some(Bypass::Cni), Some(Bypass::Cni)]
    );
}

#[test]
fn malformed_claim_is_kept_as_invalid_and_another_malformed_value_is_ignored() {
    let read = to_core(&node(json!({"metadata": {"annotations": {
        "kilo.squat.ai/key": "not a key",
        "kilo.squat.ai/wireguard-ip": "10.4.0.1",
        "kilo.squat.ai/force-endpoint": "192.0.2.1",
        "kilo.squat.ai/persistent-keepalive": "-3",
        "kilo.squat.ai/discovered-endpoints": "{",
        "kilo-clustermesh.io/agent": "full",
    }}})));
    assert_eq!(
        read,
        observe::Node {
            created: i64::MAX,
            public_key: Claim::Invalid(
                "\"not a key\" is not a WireGuard public key: expected 44 characters of base64 that hold 32 bytes, as `wg pubkey` prints".into()
            ),
            wireguard_ip: Claim::Invalid(
                "\"10.4.0.1\" is not an address and a prefix length, such as 10.4.0.1/16".into()
            ),
            force_endpoint: Claim::Invalid(
                "\"192.0.2.1\" has no port: write 192.0.2.1:51820, [2001:db8::1]:51820 or node.example.org:51820".into()
            ),
            ..observe::Node::default()
        }
    );
}

// threat: many-nodes
#[test]
fn messages_about_long_annotations_are_short() {
    let long = |unit: &str| unit.repeat(200_000 / unit.len());
    for unit in ["a", "10.0.0.1/32,", "\u{202e}é", "{\"", "9", "[::1]:1,", "AAAA=,"] {
        let mut node = Node::default();
        for annotation in [
            KILO_KEY,
            KILO_WIREGUARD_IP,
            KILO_ENDPOINT,
            KILO_FORCE_ENDPOINT,
            KILO_CLUSTERMESH_ENDPOINT,
            KILO_INTERNAL_IP,
            KILO_GRANULARITY,
            KILO_LOCATION,
            KILO_PERSISTENT_KEEPALIVE,
            KILO_ALLOWED_LOCATION_IPS,
            KILO_DISCOVERED_ENDPOINTS,
            NODE_AGENT,
        ] {
            node.annotations_mut().insert(annotation.to_owned(), long(unit));
        }
        let read = to_core(&node);
        let claims: [&dyn std::fmt::Debug; 5] = [
            &read.public_key,
            &read.wireguard_ip,
            &read.clustermesh_endpoint,
            &read.force_endpoint,
            &read.kilo_endpoint,
        ];
        for claim in claims {
            let text = format!("{claim:?}");
            assert!(text.len() < 1024, "{} bytes of {unit:?}: {}", text.len(), &text[..100]);
        }
        assert_eq!((read.server, read.discovered.len()), (Server::Kilo, 0), "{unit:?}");
    }
}
