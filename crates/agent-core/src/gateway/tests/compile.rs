//! Tests which parts of SandboxAccesses are served.

use std::num::NonZeroU32;

use super::*;
use crate::device::PeerSpec;

#[test]
fn sandbox_with_a_grant_is_compiled_in_both_families() {
    let inputs = with(|inputs| inputs.accesses.truncate(1));
    // The numbers are hashes. Later versions have to assign the same numbers, because the conntrack marks of open connections contain
    // them.
    let (sandbox, id) = (SandboxId(0x889c_903f), GrantId(0xa106_c3a3));
    let grant = Grant {
        id,
        service: team("db"),
        balancer: Balancer {
            v4: sockets(&["10.244.1.5:5432"]),
            v6: sockets(&["[fd10:244::5]:5432"]),
            sticky: false,
        },
        allowed_endpoints: sockets(&["10.244.1.5:5432", "[fd10:244::5]:5432"]),
    };
    let peer = PeerSpec {
        allowed_ips: nets(&["100.80.1.1/32", "fd80:1::1/128"]),
        ..PeerSpec::default()
    };
    let parameters = RuleParameters {
        interface: "clustermesh0".parse().unwrap(),
        listen_port: 51820,
        admin_port: 9587,
        addresses: [ip("100.66.255.1"), ip("fd66::1")].into(),
        sandbox_connections: NonZeroU32::new(16_000),
        endpoint_connections: NonZeroU32::new(4000),
    };
    let want = Compiled {
        peers: [(key(1), peer)].into(),
        routes: nets(&["100.80.1.0/24", "fd80:1::/64"]),
        table: Table {
            parameters,
            sandboxes: nets(&["100.80.1.0/24", "fd80:1::/64"])
                .into_iter()
                .map(|net| (net, sandbox))
                .collect(),
            rates: [(sandbox, NonZeroU32::new(1000).unwrap())].into(),
            grants: [((sandbox, Protocol::Tcp, 20001), grant)].into(),
        },
        served: ["a".to_owned()].into(),
        refused: BTreeSet::new(),
    };
    assert_eq!(compile(&inputs), want);
}

#[test]
fn network_that_does_not_parse_is_refused() {
    let bad = with(|inputs| {
        inputs.accesses[0]
            .networks
            .push(Err("\"x\" is not a network".to_owned()))
    });
    let refused = "SandboxAccess a: spec.networks[2]: NetworkInvalid: \"x\" is not a network";
    assert_refused(&bad, &inputs(), &[refused]);
}

#[test]
fn network_wider_than_a_slash_8_or_7_is_refused() {
    let wide = ["10.0.0.0/7", "fc00::/6"].map(|text| Ok(net(text)));
    let bad = with(|inputs| inputs.accesses[0].networks.extend(wide));
    let refused = [
        "SandboxAccess a: spec.networks[2]: NetworkInvalid: 10.0.0.0/7 is wider than /8: name the networks of the sandbox",
        "SandboxAccess a: spec.networks[3]: NetworkInvalid: fc00::/6 is wider than /7: name the networks of the sandbox",
    ];
    assert_refused(&bad, &inputs(), &refused);
    let widest = ["11.0.0.0/8", "fa00::/7"].map(|text| Ok(net(text)));
    let good = with(|inputs| inputs.accesses[0].networks.extend(widest));
    let compiled = compile(&good);
    assert_eq!(messages(&compiled), [""; 0]);
    assert!(compiled.routes.is_superset(&nets(&["11.0.0.0/8", "fa00::/7"])));
}

#[test]
fn network_that_overlaps_a_reserved_one_is_refused() {
    for (network, range) in [
        ("100.66.0.0/16", "100.66.255.0/28"),
        ("100.66.255.8/29", "100.66.255.0/28"),
        ("172.30.0.1/32", "172.30.0.1/32"),
        ("10.244.7.0/24", "10.244.0.0/16"),
        ("fd10:244::/48", "fd10:244::/56"),
        ("0.0.0.0/8", "0.0.0.0/8"),
        ("127.0.0.1/32", "127.0.0.0/8"),
        ("169.254.0.0/17", "169.254.0.0/16"),
        ("224.0.0.0/8", "224.0.0.0/4"),
        ("255.0.0.0/8", "255.255.255.255/32"),
        ("::/64", "::/127"),
        ("fe80::/64", "fe80::/10"),
        ("ff02::/16", "ff00::/8"),
    ] {
        let bad = with(|inputs| inputs.accesses[0].networks.push(Ok(net(network))));
        let refused = format!(
            "SandboxAccess a: spec.networks[2]: NetworkInvalid: {network} overlaps {range}, which this cluster or the gateway \
             uses or which is a special-purpose range: give the sandbox another range"
        );
        assert_refused(&bad, &inputs(), &[&refused]);
    }
}

#[test]
fn network_that_an_older_sandbox_has_is_refused() {
    let bad = with(|inputs| inputs.accesses[1].networks.push(Ok(net("100.80.1.128/25"))));
    let refused = "SandboxAccess b: spec.networks[2]: NetworkOverlap: 100.80.1.128/25 overlaps 100.80.1.0/24 of SandboxAccess a, which \
                   comes first and keeps it";
    assert_refused(&bad, &inputs(), &[refused]);
}

#[test]
fn network_inside_another_of_its_sandbox_is_refused() {
    let bad = with(|inputs| inputs.accesses[0].networks.push(Ok(net("100.80.1.0/25"))));
    let refused = "SandboxAccess a: spec.networks[2]: NetworkOverlap: 100.80.1.0/25 overlaps 100.80.1.0/24 of the same sandbox: name one \
                   of them";
    assert_refused(&bad, &inputs(), &[refused]);
}

#[test]
fn conflict_is_won_by_the_older_access_then_by_name() {
    for (created, keeps) in [([1, 2], "a"), ([2, 1], "b"), ([1, 1], "a")] {
        let [mut a, mut b] = [sandbox("a", 1), sandbox("b", 1)];
        [a.created, b.created] = created;
        for order in [[a.clone(), b.clone()], [b, a]] {
            let compiled = compile(&with(|inputs| inputs.accesses = order.into()));
            assert_eq!(compiled.served, BTreeSet::from([keeps.to_owned()]));
            let refused = compiled
                .refused
                .iter()
                .map(|refused| (&*refused.access, refused.reason));
            let other = if keeps == "a" { "b" } else { "a" };
            assert_eq!(refused.collect::<Vec<_>>(), [(other, Reason::NetworkOverlap); 2]);
        }
    }
}

#[test]
fn access_without_a_served_network_is_not_served() {
    let bad = with(|inputs| {
        let mut c = sandbox("c", 3);
        c.networks = vec![Err("wrong".to_owned())];
        // Not reported: the nodes of a SandboxAccess without a valid network are not looked at.
        c.nodes[0].public_key = Err("invalid".to_owned());
        inputs.accesses.push(c);
    });
    let refused = "SandboxAccess c: spec.networks[0]: NetworkInvalid: wrong";
    assert_refused(&bad, &inputs(), &[refused]);
}

#[test]
fn node_with_an_invalid_key_is_refused() {
    let bad = with(|inputs| {
        let mut node = node(9, &["100.80.1.9"]);
        node.public_key = Err("wrong".to_owned());
        inputs.accesses[0].nodes.push(node);
    });
    let refused = "SandboxAccess a: spec.nodes[1].publicKey: PublicKeyInvalid: wrong";
    assert_refused(&bad, &inputs(), &[refused]);
}

#[test]
fn later_node_with_a_duplicate_key_is_refused() {
    let bad = with(|inputs| {
        inputs.accesses[0].nodes.push(node(1, &["100.80.1.9"]));
        inputs.accesses[1].nodes.push(node(1, &["100.80.2.9"]));
        // Equals the node of SandboxAccess a. Equal nodes are accepted only in SandboxAccesses of the same sandbox.
        inputs.accesses[1].nodes.push(node(1, &["100.80.1.1", "fd80:1::1"]));
    });
    let refused = [("a", 1), ("b", 1), ("b", 2)].map(|(access, node)| {
        format!(
            "SandboxAccess {access}: spec.nodes[{node}].publicKey: PublicKeyDuplicate: SandboxAccess a spec.nodes[0] has this key, too, \
             and keeps it: each node needs a key of its own"
        )
    });
    assert_refused(&bad, &inputs(), &refused.each_ref().map(String::as_str));
}

#[test]
fn address_that_does_not_parse_or_lies_outside_is_refused() {
    let bad = with(|inputs| {
        let addresses = &mut inputs.accesses[0].nodes[0].addresses;
        addresses.extend([Err("wrong".to_owned()), Ok(ip("100.80.2.7"))]);
    });
    let refused = [
        "SandboxAccess a: spec.nodes[0].wireguardIPs[2]: AddressInvalid: wrong",
        "SandboxAccess a: spec.nodes[0].wireguardIPs[3]: AddressInvalid: 100.80.2.7 lies outside the networks of this sandbox that are \
         served (spec.networks)",
    ];
    assert_refused(&bad, &inputs(), &refused);
}

#[test]
fn address_in_a_refused_network_is_refused_with_it() {
    let bad = with(|inputs| {
        inputs.accesses[1].networks.push(Ok(net("100.80.1.128/25")));
        inputs.accesses[1].nodes[0].addresses.push(Ok(ip("100.80.1.129")));
    });
    let refused = [
        "SandboxAccess b: spec.networks[2]: NetworkOverlap: 100.80.1.128/25 overlaps 100.80.1.0/24 of SandboxAccess a, which comes first \
         and keeps it",
        "SandboxAccess b: spec.nodes[0].wireguardIPs[2]: AddressInvalid: 100.80.1.129 lies outside the networks of this sandbox that \
         are served (spec.networks)",
    ];
    assert_refused(&bad, &inputs(), &refused);
}

#[test]
fn address_that_another_node_has_is_refused() {
    let bad = with(|inputs| inputs.accesses[0].nodes.push(node(9, &["100.80.1.1", "100.80.1.9"])));
    let rest = with(|inputs| inputs.accesses[0].nodes.push(node(9, &["100.80.1.9"])));
    let refused = "SandboxAccess a: spec.nodes[1].wireguardIPs[0]: AddressDuplicate: SandboxAccess a spec.nodes[0] has 100.80.1.1, too, \
                   and keeps it";
    assert_refused(&bad, &rest, &[refused]);
}

#[test]
fn key_of_a_node_without_a_valid_address_stays_free() {
    let bad = with(|inputs| {
        inputs.accesses[0].nodes.push(node(9, &["100.80.9.9"]));
        inputs.accesses[1].nodes.push(node(9, &["100.80.2.9"]));
    });
    let rest = with(|inputs| inputs.accesses[1].nodes.push(node(9, &["100.80.2.9"])));
    let refused = "SandboxAccess a: spec.nodes[1].wireguardIPs[0]: AddressInvalid: 100.80.9.9 lies outside the networks of this sandbox \
                   that are served (spec.networks)";
    assert_refused(&bad, &rest, &[refused]);
}

#[test]
fn port_that_another_grant_has_is_refused() {
    let bad = with(|inputs| inputs.accesses[0].grants.push(sql("web", 20001)));
    let refused = "SandboxAccess a: spec.grants[1].gatewayPort: PortDuplicate: port 20001 (tcp) belongs to another grant, which comes first \
                   and keeps it";
    assert_refused(&bad, &inputs(), &[refused]);
}

#[test]
fn port_stays_with_its_grant_while_service_is_unknown() {
    let compiled = compile(&with(|inputs| {
        inputs.services.insert(team("db"), Service::Unknown("later".to_owned()));
        inputs.accesses[0].grants.push(sql("web", 20001));
    }));
    let reasons: Vec<Reason> = compiled.refused.iter().map(|refused| refused.reason).collect();
    assert!(
        reasons.contains(&Reason::ServiceUnknown) && reasons.contains(&Reason::PortDuplicate),
        "{reasons:?}"
    );
    let web = compiled
        .table
        .grants
        .values()
        .filter(|grant| grant.service == team("web"));
    assert_eq!(web.count(), 0);
}

#[test]
fn same_port_of_another_protocol_or_sandbox_is_served() {
    // Both sandboxes already have a grant at TCP port 20001.
    let inputs = with(|inputs| {
        let udp = GrantSpec {
            protocol: Protocol::Udp,
            ..sql("db", 20001)
        };
        inputs.accesses[0].grants.push(udp);
        let mut db = observed_service([endpoint("10.244.1.5")]);
        db.ports.insert((Protocol::Udp, "sql".to_owned()));
        inputs.services.insert(team("db"), Service::Observed(db));
    });
    let compiled = compile(&inputs);
    assert_eq!(messages(&compiled), [""; 0]);
    let ids: BTreeSet<GrantId> = compiled.table.grants.values().map(|grant| grant.id).collect();
    assert_eq!((compiled.table.grants.len(), ids.len()), (3, 3));
}

#[test]
fn sctp_is_refused() {
    let bad = with(|inputs| {
        let sctp = GrantSpec {
            protocol: Protocol::Sctp,
            ..sql("db", 20002)
        };
        inputs.accesses[0].grants.push(sctp);
    });
    let refused = "SandboxAccess a: spec.grants[1].protocol: ProtocolNotServed: a gateway translates only TCP and UDP";
    assert_refused(&bad, &inputs(), &[refused]);
}

/// A second SandboxAccess of the sandbox `a`, as another mesh writes it.
fn second_access_of_a() -> Access {
    Access {
        name: "z".to_owned(),
        created: 9,
        ..sandbox("a", 1)
    }
}

#[test]
fn equal_accesses_of_one_sandbox_are_served_as_one() {
    let compiled = compile(&with(|inputs| inputs.accesses.push(second_access_of_a())));
    let mut want = compile(&inputs());
    want.served.insert("z".to_owned());
    assert_eq!(compiled, want);
}

#[test]
fn different_accesses_of_one_sandbox_are_merged() {
    let add_parts = |inputs: &mut Inputs, access: usize| {
        let access = &mut inputs.accesses[access];
        access.networks.push(Ok(net("100.81.0.0/24")));
        access.nodes.push(node(9, &["100.81.0.9"]));
        access.grants.push(sql("web", 20002));
    };
    let compiled = compile(&with(|inputs| {
        inputs.accesses.push(second_access_of_a());
        add_parts(inputs, 2);
    }));
    let mut want = compile(&with(|inputs| add_parts(inputs, 0)));
    want.served.insert("z".to_owned());
    assert_eq!(compiled, want);
}

#[test]
fn conflicts_between_accesses_of_one_sandbox_are_refused() {
    let bad = with(|inputs| {
        let mut z = second_access_of_a();
        z.networks = vec![Ok(net("100.80.1.0/25")), Ok(net("fd80:1::/64"))];
        z.nodes = vec![node(1, &["fd80:1::2"])];
        z.grants = vec![sql("web", 20001)];
        inputs.accesses.push(z);
    });
    let rest = with(|inputs| {
        let mut z = second_access_of_a();
        z.networks = vec![Ok(net("fd80:1::/64"))];
        (z.nodes, z.grants) = (Vec::new(), Vec::new());
        inputs.accesses.push(z);
    });
    let refused = [
        "SandboxAccess z: spec.grants[0].gatewayPort: PortDuplicate: port 20001 (tcp) belongs to another grant, which comes first and keeps it",
        "SandboxAccess z: spec.networks[0]: NetworkOverlap: 100.80.1.0/25 overlaps 100.80.1.0/24 of SandboxAccess a, which comes first and \
         keeps it",
        "SandboxAccess z: spec.nodes[0].publicKey: PublicKeyDuplicate: SandboxAccess a spec.nodes[0] has this key, too, and keeps it: \
         each node needs a key of its own",
    ];
    assert_refused(&bad, &rest, &refused);
}

#[test]
fn serves_setting_limits_sandboxes_unless_empty() {
    let serves = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        compile(&with(|inputs| {
            // The setting lists sandboxes (`b`), not SandboxAccesses (`mesh--b`).
            for access in &mut inputs.accesses {
                access.name = format!("mesh--{}", access.sandbox);
            }
            inputs.settings.serves = names;
        }))
    };
    assert_eq!(serves(&[]).served.len(), 2);
    let only = serves(&["b", "mesh--a"]);
    assert_eq!(only.served, BTreeSet::from(["mesh--b".to_owned()]));
    assert_eq!(only.routes, nets(&["100.80.2.0/24", "fd80:2::/64"]));
    assert_eq!(
        (only.peers.len(), only.table.grants.len(), only.refused.len()),
        (1, 1, 0)
    );
}

#[test]
fn rate_is_that_of_the_access_or_the_default() {
    let rates = |default, own: [Option<u32>; 3]| {
        let table = compile(&with(|inputs| {
            inputs.settings.new_connections = default;
            inputs.accesses.push(second_access_of_a());
            for (access, own) in inputs.accesses.iter_mut().zip(own) {
                access.new_connections = own;
            }
        }))
        .table;
        let rate = |network| table.rates.get(&table.sandboxes[&net(network)]).map(|rate| rate.get());
        [rate("100.80.1.0/24"), rate("100.80.2.0/24")]
    };
    assert_eq!(rates(1000, [None, Some(7), None]), [Some(1000), Some(7)]);
    assert_eq!(rates(0, [None, Some(7), None]), [None, Some(7)]);
    // Of two SandboxAccesses of one sandbox, the older one sets the rate.
    assert_eq!(rates(1000, [Some(5), None, Some(6)]), [Some(5), Some(1000)]);
}

#[test]
fn connection_limit_0_is_no_limit() {
    let inputs = with(|inputs| inputs.settings.endpoint_connections = 0);
    let parameters = compile(&inputs).table.parameters;
    assert_eq!(
        (parameters.sandbox_connections, parameters.endpoint_connections),
        (NonZeroU32::new(16_000), None)
    );
    let inputs = with(|inputs| inputs.settings.sandbox_connections = 0);
    let parameters = compile(&inputs).table.parameters;
    assert_eq!(
        (parameters.sandbox_connections, parameters.endpoint_connections),
        (None, NonZeroU32::new(4000))
    );
}
