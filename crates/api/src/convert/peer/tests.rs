use std::collections::BTreeMap;

use super::*;
use crate::names::{LABEL_HUB, LABEL_MESH, LABEL_MESH_NAMESPACE, LABEL_SOURCE_CLUSTER};

const KEY: &str = "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=";

fn ours() -> Owner {
    Owner {
        mesh: Some("prod".into()),
        mesh_namespace: Some("team".into()),
        hub: Some("hub-1".into()),
        source_cluster: Some("tenant-a".into()),
    }
}

fn spec() -> observe::PeerSpec {
    observe::PeerSpec {
        public_key: KEY.parse().unwrap(),
        allowed_ips: ["10.20.1.0/24", "100.66.0.3/32", "fd00:1::/64"]
            .map(|n| n.parse().unwrap())
            .into(),
        endpoint: Some(Endpoint::Ip("[2001:db8::1]:51820".parse().unwrap())),
        candidates: vec![
            "[2001:db8::1]:51820".parse().unwrap(),
            "192.0.2.1:51821".parse().unwrap(),
        ],
        persistent_keepalive: 25,
        role: PeerRole::Node,
    }
}

#[test]
fn planned_peer_is_written_and_read_back() {
    let peer = from_core("prod--tenant-a--n1", &spec(), &ours());
    assert_eq!(
        serde_json::to_value(&peer).unwrap(),
        serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1",
            "kind": "Peer",
            "metadata": {
                "name": "prod--tenant-a--n1",
                "labels": {
                    "kilo-clustermesh.io/mesh": "prod",
                    "kilo-clustermesh.io/mesh-namespace": "team",
                    "kilo-clustermesh.io/hub": "hub-1",
                    "kilo-clustermesh.io/source-cluster": "tenant-a",
                },
                "annotations": {
                    "kilo-clustermesh.io/endpoints": "[2001:db8::1]:51820,192.0.2.1:51821",
                },
            },
            "spec": {
                "allowedIPs": ["10.20.1.0/24", "100.66.0.3/32", "fd00:1::/64"],
                "endpoint": {"dnsOrIP": {"ip": "2001:db8::1"}, "port": 51820},
                "persistentKeepalive": 25,
                "publicKey": KEY,
            },
        })
    );
    assert_eq!(
        to_core(&peer),
        ObservedPeer {
            owner: ours(),
            spec: Ok(spec())
        }
    );
}

#[test]
fn update_keeps_foreign_metadata_and_replaces_the_spec() {
    let mut peer = from_core("p", &spec(), &ours());
    peer.metadata.resource_version = Some("7".into());
    peer.labels_mut().insert("team".into(), "x".into());
    peer.annotations_mut().insert("note".into(), "y".into());
    peer.spec.preshared_key = Some("z".into());
    let bare = observe::PeerSpec {
        endpoint: None,
        candidates: Vec::new(),
        persistent_keepalive: 0,
        ..spec()
    };
    let without_hub = Owner {
        hub: None,
        mesh_namespace: None,
        ..ours()
    };
    update(&mut peer, &bare, &without_hub);
    assert_eq!(
        peer.metadata.labels,
        Some(BTreeMap::from(
            [(LABEL_MESH, "prod"), (LABEL_SOURCE_CLUSTER, "tenant-a"), ("team", "x")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
        ))
    );
    assert!(!peer.labels().contains_key(LABEL_HUB) && !peer.labels().contains_key(LABEL_MESH_NAMESPACE));
    assert_eq!(
        peer.metadata.annotations,
        Some(BTreeMap::from([("note".to_owned(), "y".to_owned())]))
    );
    assert_eq!(peer.metadata.resource_version.as_deref(), Some("7"));
    assert_eq!(
        peer.spec,
        PeerSpec {
            allowed_ips: ["10.20.1.0/24", "100.66.0.3/32", "fd00:1::/64"]
                .map(str::to_owned)
                .into(),
            public_key: KEY.into(),
            ..PeerSpec::default()
        }
    );
}

#[test]
fn invalid_mesh_peer_is_an_error_that_names_the_field() {
    type Change = fn(&mut Peer);
    let cases: [(Change, &str); 11] = [
        (|p| p.spec.public_key = "x".into(), "spec.publicKey"),
        (
            |p| p.spec.allowed_ips[0] = "10.20.1.5/24".into(),
            "spec.allowedIPs[0]: 10.20.1.5/24 has host bits: write 10.20.1.0/24",
        ),
        (
            |p| p.spec.allowed_ips[1] = "10.20.1.0/24".into(),
            "spec.allowedIPs[1]: 10.20.1.0/24 is listed twice",
        ),
        (|p| p.spec.allowed_ips[0] = "10.20.1.5".into(), "spec.allowedIPs[0]"),
        (
            |p| p.spec.allowed_ips[0] = "::ffff:10.0.0.0/104".into(),
            "spec.allowedIPs[0]",
        ),
        (|p| p.spec.preshared_key = Some("x".into()), "spec.presharedKey"),
        (
            |p| p.spec.persistent_keepalive = Some(25_000_000_000),
            "spec.persistentKeepalive",
        ),
        (|p| p.spec.endpoint.as_mut().unwrap().port = 65536, "spec.endpoint.port"),
        (
            |p| p.spec.endpoint.as_mut().unwrap().dns_or_ip.dns = Some("a.example".into()),
            "spec.endpoint.dnsOrIP: has both",
        ),
        (
            |p| p.spec.endpoint.as_mut().unwrap().dns_or_ip.ip = Some("<nil>".into()),
            "spec.endpoint.dnsOrIP.ip",
        ),
        (
            |p| {
                drop(
                    p.annotations_mut()
                        .insert(PEER_ENDPOINTS.into(), "192.0.2.1:51820,x".into()),
                )
            },
            "annotation kilo-clustermesh.io/endpoints: \"x\"",
        ),
    ];
    for (change, expected) in cases {
        let mut peer = from_core("p", &spec(), &ours());
        change(&mut peer);
        let why = to_core(&peer).spec.unwrap_err();
        assert!(why.starts_with(expected), "{why}");
    }
}

#[test]
fn foreign_peer_with_errors_is_read_unless_its_key_is_invalid() {
    let mut peer = Peer::new(
        "laptop",
        PeerSpec {
            // Host bits are cleared. A network without a prefix length is left out.
            allowed_ips: ["10.5.0.9/24", "x", "10.5.0.9"].map(str::to_owned).into(),
            endpoint: Some(PeerEndpoint {
                port: -1,
                ..PeerEndpoint::default()
            }),
            persistent_keepalive: Some(-1),
            preshared_key: Some("x".into()),
            public_key: KEY.into(),
        },
    );
    let expected = observe::PeerSpec {
        public_key: KEY.parse().unwrap(),
        allowed_ips: ["10.5.0.0/24".parse().unwrap()].into(),
        endpoint: None,
        candidates: Vec::new(),
        persistent_keepalive: 0,
        role: PeerRole::Node,
    };
    assert_eq!(
        to_core(&peer),
        ObservedPeer {
            owner: Owner::default(),
            spec: Ok(expected)
        }
    );
    peer.spec.public_key = "x".into();
    assert!(to_core(&peer).spec.unwrap_err().starts_with("spec.publicKey"));
}
