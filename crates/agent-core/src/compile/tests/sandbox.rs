//! Peers of a sandbox's nodes.

use super::*;

/// The hub's node once more, of which a sandbox may reach a pod and the node itself; one endpoint drains.
pub(crate) fn hub_node_of_a_sandbox() -> Inputs {
    let mut inputs = hub_node();
    let at = |text: &str, protocol, port| (text.parse().unwrap(), Port { protocol, port });
    inputs.policies.push(Policy {
        name: "notebooks".to_owned(),
        sources: nets(&["100.80.16.0/20", "fd00:80::/64"]),
        networks: nets(&["100.80.16.0/20", "fd00:80::/64"]),
        sandbox: true,
        granted: [
            at("10.101.0.5", Protocol::Tcp, 5432),
            at("172.29.0.111", Protocol::Udp, 53),
            at("fd00:101::5", Protocol::Tcp, 5432),
        ]
        .into(),
        draining: [
            at("10.101.0.5", Protocol::Tcp, 5432),
            at("10.101.0.6", Protocol::Tcp, 5432),
        ]
        .into(),
        revision: "00112233aabbccdd".to_owned(),
        infrastructure_ports: hub_node().policies[0].infrastructure_ports.clone(),
        ..Policy::default()
    });
    inputs.peers.push(sandbox_peer());
    inputs
}

fn sandbox_peer() -> Peer {
    Peer {
        endpoint: None,
        requires_policy: Some("notebooks@00112233aabbccdd".to_owned()),
        ..peer(
            31,
            "mesh--notebooks--n1",
            "192.0.2.9:51820",
            &["100.80.16.1/32", "fd00:80::1/128"],
        )
    }
}

#[test]
fn a_sandboxs_node_is_a_peer_that_its_policy_has_to_stand_for() {
    let got = compile(&hub_node_of_a_sandbox());
    assert_eq!(got.refused, []);
    assert_eq!(got.gated, [(key(31), "notebooks".to_owned())].into());
    let spec = PeerSpec {
        allowed_ips: nets(&["100.80.16.1/32", "fd00:80::1/128"]),
        ..PeerSpec::default()
    };
    assert_eq!(got.peers[&key(31)], spec);
}

#[test]
fn a_sandboxs_peer_that_says_more_than_it_may_is_left_out() {
    let refused = |peer: Peer| {
        let mut inputs = hub_node_of_a_sandbox();
        *inputs.peers.last_mut().unwrap() = peer;
        let got = compile(&inputs);
        assert_eq!(got.gated, BTreeMap::new());
        assert!(!got.peers.contains_key(&key(31)));
        got.refused.iter().map(|refused| refused.reason).collect::<Vec<_>>()
    };
    let good = sandbox_peer;
    let requires = |text: &str| Peer {
        requires_policy: Some(text.to_owned()),
        ..good()
    };
    for (peer, reason) in [
        (requires("other@00112233aabbccdd"), Reason::PolicyMissing),
        (requires("c2@"), Reason::PolicyMismatch),
        (
            Peer {
                requires_policy: None,
                ..good()
            },
            Reason::PolicyRequired,
        ),
        (
            Peer {
                endpoint: Some("192.0.2.9:51820".parse().unwrap()),
                ..good()
            },
            Reason::PolicyMismatch,
        ),
        (
            Peer {
                candidates: vec!["192.0.2.9:51820".parse().unwrap()],
                ..good()
            },
            Reason::PolicyMismatch,
        ),
        (
            Peer {
                allowed_ips: vec!["100.80.16.0/31".parse().unwrap()],
                ..good()
            },
            Reason::PolicyMismatch,
        ),
        (
            Peer {
                allowed_ips: vec!["100.80.16.1/32".parse().unwrap(), "10.243.9.9/32".parse().unwrap()],
                ..good()
            },
            Reason::PolicyMismatch,
        ),
    ] {
        assert_eq!(refused(peer.clone()), [reason], "{peer:?}");
    }
    let mut inputs = hub_node_of_a_sandbox();
    inputs.policies.last_mut().unwrap().sandbox = false;
    let reasons: Vec<Reason> = compile(&inputs).refused.iter().map(|refused| refused.reason).collect();
    assert_eq!(reasons, [Reason::PolicyMismatch]);
}

/// Two nodes of the sandbox, the second of which requires the policy as it stands.
fn two_nodes(first: &str) -> Inputs {
    let mut inputs = hub_node_of_a_sandbox();
    inputs.peers.push(Peer {
        endpoint: None,
        requires_policy: Some("notebooks@00112233aabbccdd".to_owned()),
        ..peer(32, "mesh--notebooks--n2", "192.0.2.9:51820", &["100.80.16.2/32"])
    });
    let peer = inputs.peers.iter_mut().find(|peer| peer.public_key == key(31)).unwrap();
    peer.requires_policy = Some(first.to_owned());
    inputs
}

#[test]
fn a_sandboxs_peer_stays_while_its_policy_is_one_that_nobody_knows_and_reaches_nothing() {
    let good = compile(&hub_node_of_a_sandbox());
    for requires in ["notebooks@00112233aabbccde", "notebooks", "notebooks@"] {
        let got = compile(&two_nodes(requires));
        assert_eq!(got.peers[&key(31)], good.peers[&key(31)]);
        assert_eq!(got.gated[&key(31)], "notebooks");
        let refused: Vec<_> = (got.refused.iter())
            .map(|refused| (&refused.object, refused.reason))
            .collect();
        let object = Object::Peer("mesh--notebooks--n1".to_owned());
        assert_eq!(refused, [(&object, Reason::PolicyChanged)]);
        let text = firewall::render(&got.firewall);
        assert!(!text.contains("100.80.16.1 "), "{text}");
        assert!(text.contains("100.80.16.2 . 10.101.0.5 . tcp . 5432"), "{text}");
    }
    // Of no revision at all.
    let mut inputs = hub_node_of_a_sandbox();
    inputs.policies.last_mut().unwrap().revision.clear();
    inputs.peers.last_mut().unwrap().requires_policy = Some("notebooks@".to_owned());
    assert_eq!(compile(&inputs).refused[0].reason, Reason::PolicyChanged);
}

#[test]
fn between_two_revisions_of_a_policy_what_both_grant_is_open() {
    let at = |text: &str, protocol, port| (text.parse().unwrap(), Port { protocol, port });
    let (kept, gone, new) = (
        at("10.101.0.5", Protocol::Tcp, 5432),
        at("172.29.0.111", Protocol::Udp, 53),
        at("10.101.0.7", Protocol::Tcp, 80),
    );
    let first = hub_node_of_a_sandbox();
    let mut inputs = two_nodes("notebooks@00112233aabbccdd");
    inputs.earlier = remember(&first);
    let changed = inputs.policies.last_mut().unwrap();
    changed.revision = "b".to_owned();
    changed.granted = [kept, new].into();
    changed.draining = [gone, at("10.101.0.8", Protocol::Tcp, 80)].into();
    changed.infrastructure_ports = [].into();

    let got = compile(&inputs);
    let reasons: Vec<_> = got.refused.iter().map(|refused| refused.reason).collect();
    assert_eq!(reasons, [Reason::PolicyChanged; 2]);
    let mut meant = first.clone();
    meant.peers = two_nodes("notebooks@00112233aabbccdd").peers;
    meant.policies.last_mut().unwrap().granted = [kept].into();
    meant.policies.last_mut().unwrap().draining = [gone].into();
    assert_eq!(got.firewall, compile(&meant).firewall);

    // One of the two Peers was written: the other still holds them both to what it names.
    let earlier = remember(&inputs);
    let mut half = Inputs {
        earlier,
        ..inputs.clone()
    };
    half.peers.last_mut().unwrap().requires_policy = Some("notebooks@b".to_owned());
    assert_eq!(compile(&half).firewall, got.firewall);
    let mut whole = Inputs {
        earlier: remember(&half),
        ..half
    };
    for peer in whole.peers.iter_mut().filter(|peer| peer.requires_policy.is_some()) {
        peer.requires_policy = Some("notebooks@b".to_owned());
    }
    let text = firewall::render(&compile(&whole).firewall);
    assert!(text.contains("100.80.16.1 . 10.101.0.7 . tcp . 80"), "{text}");
    assert_eq!(remember(&whole).into_keys().collect::<Vec<_>>(), ["notebooks@b"]);
}

#[test]
fn a_backend_in_host_network_answers_a_sandbox_from_its_port_alone() {
    let mut inputs = hub_node_of_a_sandbox();
    let at = |text: &str, protocol, port| (text.parse().unwrap(), Port { protocol, port });
    let policy = inputs.policies.last_mut().unwrap();
    policy.granted.extend([
        at("10.101.0.5", Protocol::Udp, 7),
        at("172.29.0.111", Protocol::Tcp, 8),
        at("fd00:66:1::1", Protocol::Sctp, 9),
    ]);
    policy.draining = [at("172.29.0.111", Protocol::Udp, 54)].into();
    let rules = compile(&inputs).routes.rules;
    let sandbox = rules.iter().filter(|rule| rule.of_sandbox()).map(ToString::to_string);
    assert_eq!(
        sandbox.collect::<Vec<_>>(),
        [
            "pref 996 from 100.80.16.0/20 fwmark 0x0/0x300000 iif <device> blackhole",
            "pref 997 from 172.29.0.111/32 to 100.80.16.0/20 iif lo ipproto udp sport 53 lookup 5183",
            "pref 997 from 172.29.0.111/32 to 100.80.16.0/20 iif lo ipproto udp sport 54 lookup 5183",
            "pref 997 from 172.29.0.111/32 to 100.80.16.0/20 fwmark 0x300000/0x300f00 iif lo ipproto tcp sport 8 lookup 5183",
            "pref 998 to 100.80.16.0/20 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole",
            "pref 999 to 100.80.16.0/20 fwmark 0x300000/0x300f00 lookup 5183",
            "-6 pref 996 from fd00:80::/64 fwmark 0x0/0x300000 iif <device> blackhole",
            "-6 pref 997 from fd00:66:1::1/128 to fd00:80::/64 iif lo ipproto sctp sport 9 lookup 5183",
            "-6 pref 998 to fd00:80::/64 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole",
            "-6 pref 999 to fd00:80::/64 fwmark 0x300000/0x300f00 lookup 5183",
        ]
    );
    // Nobody pays who serves none.
    let without = compile(&hub_node()).routes.rules;
    assert_eq!(without, Family::BOTH.into_iter().flat_map(routes::rules).collect());
}
