use super::*;

fn ours() -> Owner {
    Owner {
        mesh: Some("prod".into()),
        mesh_namespace: Some("team".into()),
        hub: Some("hub-1".into()),
        source_cluster: Some("tenant-a".into()),
    }
}

fn planned() -> observe::PolicySpec {
    let nets = |texts: &[&str]| texts.iter().map(|t| t.parse().unwrap()).collect();
    observe::PolicySpec {
        sources: nets(&["10.20.0.0/16"]),
        networks: nets(&["10.20.0.0/16", "100.66.0.0/24"]),
        allow: nets(&["10.244.0.0/16", "fd00:1::/64"]),
        deny: ["192.0.2.1:6443", "192.0.2.1:2379", "[fd00:1::1]:6443"]
            .map(|a| a.parse().unwrap())
            .into(),
        infrastructure_ports: [(Protocol::Tcp, 10250), (Protocol::Udp, 53)].into(),
        anchored: nets(&["10.96.0.0/12"]),
        closed: false,
    }
}

#[test]
fn planned_policy_is_written_and_read_back() {
    let policy = from_core("prod--tenant-a", "tenant-a", &planned(), &ours());
    assert_eq!(
        serde_json::to_value(&policy.spec).unwrap(),
        serde_json::json!({
            "source": "tenant-a",
            "sources": ["10.20.0.0/16"],
            "networks": ["10.20.0.0/16", "100.66.0.0/24"],
            "allow": [{"to": ["10.244.0.0/16", "fd00:1::/64"]}],
            "deny": [
                {"to": ["192.0.2.1/32"], "ports": [{"port": 2379, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]},
                {"to": ["fd00:1::1/128"], "ports": [{"port": 6443, "protocol": "TCP"}]},
            ],
            "infrastructurePorts": [{"port": 10250, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}],
            "anchored": ["10.96.0.0/12"],
        })
    );
    assert_eq!(
        to_core(&policy),
        ObservedPolicy {
            owner: ours(),
            spec: Ok(planned())
        }
    );
}

#[test]
fn closed_policy_has_profile_standard_and_allows_nothing() {
    let closed = observe::PolicySpec {
        allow: BTreeSet::new(),
        closed: true,
        ..planned()
    };
    let policy = from_core("prod--notebooks", "notebooks", &closed, &ours());
    let written = serde_json::to_value(&policy.spec).unwrap();
    assert_eq!(
        (&written["isolationProfile"], written.get("allow")),
        (&"standard".into(), None)
    );
    assert_eq!(to_core(&policy).spec, Ok(closed));
}

#[test]
fn invalid_policy_is_an_error_that_names_the_field() {
    type Change = fn(&mut PeerPolicySpec);
    let cases: [(Change, &str); 5] = [
        (|s| s.sources[0] = "x".into(), "spec.sources[0]"),
        (
            |s| s.allow[0].to[1] = "10.0.0.1/8".into(),
            "spec.allow[0].to[1]: 10.0.0.1/8 has host bits: write 10.0.0.0/8",
        ),
        (|s| s.deny[0].ports.clear(), "spec.deny[0].ports"),
        (|s| s.deny[0].to[0] = "10.0.0.0/8".into(), "spec.deny[0].to"),
        (
            |s| s.deny[0].ports[0].port = IntOrString::String("https".into()),
            "spec.deny[0].ports",
        ),
    ];
    for (change, expected) in cases {
        let mut policy = from_core("p", "tenant-a", &planned(), &ours());
        change(&mut policy.spec);
        let why = to_core(&policy).spec.unwrap_err();
        assert!(why.starts_with(expected), "{why}");
    }
}
