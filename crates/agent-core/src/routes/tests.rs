use super::*;
use crate::policy::{Port, Protocol};

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

fn text(changes: Option<Vec<Change>>) -> Vec<String> {
    changes.into_iter().flatten().map(|c| c.to_string()).collect()
}

fn member() -> Plan {
    Plan {
        addresses: ["100.66.2.1".parse().unwrap()].into(),
        peers: nets(&["10.101.0.0/24", "100.66.1.1/32"]),
        mesh: nets(&["10.101.0.0/16", "100.66.1.0/24"]),
        ..Plan::default()
    }
}

#[test]
fn the_closed_door_stands_before_anything_opens_it() {
    assert_eq!(
        text(diff(&Routes::default(), &desired(&member()))),
        [
            "address add 100.66.2.1",
            "route add unreachable 10.101.0.0/16 table 5182 metric 4096",
            "route add unreachable 100.66.1.0/24 table 5182 metric 4096",
            "route add 10.101.0.0/24 dev <device> table 5182 metric 20",
            "route add 100.66.1.1/32 dev <device> table 5182 metric 20",
            "route add 0.0.0.0/0 dev <device> table 5183 metric 20",
            "rule add pref 1000 fwmark 0x200000/0x300f00 lookup 5183",
            "rule add pref 1001 not fwmark 0x100000/0x300f00 lookup 5182",
        ]
    );
}

#[test]
fn a_peer_that_goes_takes_one_route_with_it() {
    let without = Plan {
        peers: nets(&["100.66.1.1/32"]),
        ..member()
    };
    assert_eq!(
        text(diff(&desired(&member()), &desired(&without))),
        ["route delete 10.101.0.0/24 dev <device> table 5182 metric 20"]
    );
}

#[test]
fn an_empty_mesh_leaves_rules_first_and_the_closed_door_last() {
    assert_eq!(
        text(diff(&desired(&member()), &Routes::default())),
        [
            "rule delete pref 1000 fwmark 0x200000/0x300f00 lookup 5183",
            "rule delete pref 1001 not fwmark 0x100000/0x300f00 lookup 5182",
            "route delete 10.101.0.0/24 dev <device> table 5182 metric 20",
            "route delete 100.66.1.1/32 dev <device> table 5182 metric 20",
            "route delete 0.0.0.0/0 dev <device> table 5183 metric 20",
            "route delete unreachable 10.101.0.0/16 table 5182 metric 4096",
            "route delete unreachable 100.66.1.0/24 table 5182 metric 4096",
            "address delete 100.66.2.1",
        ]
    );
}

#[test]
fn an_underlay_address_inside_the_mesh_is_the_source_and_the_device_the_first_fallback() {
    let worker = Plan {
        throw: nets(&["10.101.0.1/32", "192.0.2.1/32"]),
        underlay: ["10.101.0.200".parse().unwrap(), "192.0.2.9".parse().unwrap()].into(),
        mesh: nets(&["10.101.0.0/16"]),
        peers: nets(&["10.101.0.0/24"]),
        ..Plan::default()
    };
    let got: Vec<String> = desired(&worker).routes.iter().map(ToString::to_string).collect();
    assert_eq!(
        got,
        [
            "10.101.0.0/16 dev <device> src 10.101.0.200 table 5182 metric 4095",
            "unreachable 10.101.0.0/16 table 5182 metric 4096",
            "10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20",
            "throw 10.101.0.1/32 table 5182 metric 10",
            "0.0.0.0/0 dev <device> table 5183 metric 20",
        ]
    );
}

#[test]
fn a_new_source_address_replaces_routes_in_place() {
    let plan = |a: &str| Plan {
        underlay: [a.parse().unwrap()].into(),
        ..member()
    };
    assert_eq!(
        text(diff(&desired(&plan("10.101.9.9")), &desired(&plan("10.101.9.8")))),
        [
            "route replace 10.101.0.0/16 dev <device> src 10.101.9.8 table 5182 metric 4095",
            "route replace 100.66.1.0/24 dev <device> src 10.101.9.8 table 5182 metric 4095",
            "route replace 10.101.0.0/24 dev <device> src 10.101.9.8 table 5182 metric 20",
            "route replace 100.66.1.1/32 dev <device> src 10.101.9.8 table 5182 metric 20",
        ]
    );
}

#[test]
fn what_is_thrown_is_never_also_a_peers() {
    let plan = Plan {
        throw: nets(&["100.66.1.1/32"]),
        ..member()
    };
    let got: Vec<String> = desired(&plan)
        .routes
        .iter()
        .map(ToString::to_string)
        .filter(|r| r.contains("100.66.1.1/32"))
        .collect();
    assert_eq!(got, ["throw 100.66.1.1/32 table 5182 metric 10"]);
}

#[test]
fn a_family_without_mesh_prefixes_gets_no_rule() {
    let plan = Plan {
        mesh: nets(&["fd00:1::/48"]),
        ..Plan::default()
    };
    let families: BTreeSet<Family> = desired(&plan).rules.iter().map(|r| r.family).collect();
    assert_eq!(families, BTreeSet::from([Family::V6]));
}

#[test]
fn a_peer_that_takes_less_has_it_on_its_routes_alone() {
    let narrow = Plan {
        sizes: [("10.101.0.0/24".parse().unwrap(), 1328)].into(),
        ..member()
    };
    assert_eq!(
        text(diff(&desired(&member()), &desired(&narrow))),
        [
            "route replace 10.101.0.0/24 dev <device> mtu 1328 table 5182 metric 20",
            "route replace 0.0.0.0/0 dev <device> mtu 1328 table 5183 metric 20",
        ]
    );
}

fn served() -> Plan {
    let udp = |port| Port {
        protocol: Protocol::Udp,
        port,
    };
    Plan {
        peers: nets(&["10.101.0.0/16", "100.66.1.1/32"]),
        mesh: nets(&["10.101.0.0/16", "100.66.0.0/16"]),
        sandboxes: nets(&["100.66.1.0/24"]),
        answers: [Answer {
            from: "172.29.0.111".parse().unwrap(),
            to: "100.66.1.0/24".parse().unwrap(),
            port: udp(53),
        }]
        .into(),
        ..Plan::default()
    }
}

#[test]
fn a_sandbox_is_reached_by_what_the_firewall_table_marked_and_by_nothing_else() {
    let steps = text(diff(&Routes::default(), &desired(&served())));
    assert_eq!(
        steps,
        [
            "route add unreachable 10.101.0.0/16 table 5182 metric 4096",
            "route add unreachable 100.66.0.0/16 table 5182 metric 4096",
            "route add unreachable 100.66.1.0/24 table 5182 metric 4096",
            "route add 10.101.0.0/16 dev <device> table 5182 metric 20",
            "route add 0.0.0.0/0 dev <device> table 5183 metric 20",
            "route add 100.66.1.1/32 dev <device> table 5183 metric 20",
            "rule add pref 996 from 100.66.1.0/24 fwmark 0x0/0x300000 iif <device> blackhole",
            "rule add pref 997 from 172.29.0.111/32 to 100.66.1.0/24 iif lo ipproto udp sport 53 lookup 5183",
            "rule add pref 998 to 100.66.1.0/24 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole",
            "rule add pref 999 to 100.66.1.0/24 fwmark 0x300000/0x300f00 lookup 5183",
            "rule add pref 1000 fwmark 0x200000/0x300f00 lookup 5183",
            "rule add pref 1001 not fwmark 0x100000/0x300f00 lookup 5182",
        ]
    );
}

#[test]
fn an_underlay_address_inside_a_sandboxs_network_opens_no_way_to_it() {
    let plan = Plan {
        underlay: ["100.66.1.200".parse().unwrap()].into(),
        mesh: nets(&["100.66.1.0/24"]),
        peers: nets(&["100.66.1.1/32"]),
        ..served()
    };
    let got: Vec<String> = desired(&plan).routes.iter().map(ToString::to_string).collect();
    assert_eq!(
        got,
        [
            "unreachable 100.66.1.0/24 table 5182 metric 4096",
            "0.0.0.0/0 dev <device> table 5183 metric 20",
            "100.66.1.1/32 dev <device> src 100.66.1.200 table 5183 metric 20",
        ]
    );
}

/// What stood before: by a version that had sandboxes' routes among the mesh's.
#[test]
fn what_locks_a_sandbox_goes_before_its_peer_and_opens_nothing() {
    let want = desired(&served());
    let open: Route = Route {
        table: TABLE,
        prefix: "100.66.1.1/32".parse().unwrap(),
        metric: METRIC_PEER,
        kind: Kind::Device {
            source: None,
            mtu: None,
        },
    };
    let mut before = Routes {
        routes: [open].into(),
        rules: rules(Family::V4).into(),
        ..Routes::default()
    };
    let changes = diff(&before, &want).unwrap();
    let (locks, rest): (Vec<_>, Vec<_>) = changes.into_iter().partition(|change| want.locks(change));
    assert_eq!(
        text(Some(locks.clone())),
        [
            "route add unreachable 100.66.1.0/24 table 5182 metric 4096",
            "route add 0.0.0.0/0 dev <device> table 5183 metric 20",
            "route add 100.66.1.1/32 dev <device> table 5183 metric 20",
            "rule add pref 996 from 100.66.1.0/24 fwmark 0x0/0x300000 iif <device> blackhole",
            "rule add pref 997 from 172.29.0.111/32 to 100.66.1.0/24 iif lo ipproto udp sport 53 lookup 5183",
            "rule add pref 998 to 100.66.1.0/24 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole",
            "rule add pref 999 to 100.66.1.0/24 fwmark 0x300000/0x300f00 lookup 5183",
            "route delete 100.66.1.1/32 dev <device> table 5182 metric 20",
        ]
    );
    locks.iter().chain(&rest).for_each(|change| before.step(change));
    assert_eq!(before, want);
    let without = Plan {
        sandboxes: BTreeSet::new(),
        answers: BTreeSet::new(),
        ..served()
    };
    let gone = text(diff(&want, &desired(&without)));
    let rules: Vec<_> = gone.iter().filter(|change| change.starts_with("rule")).collect();
    assert_eq!(
        rules,
        [
            "rule delete pref 996 from 100.66.1.0/24 fwmark 0x0/0x300000 iif <device> blackhole",
            "rule delete pref 997 from 172.29.0.111/32 to 100.66.1.0/24 iif lo ipproto udp sport 53 lookup 5183",
            "rule delete pref 998 to 100.66.1.0/24 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole",
            "rule delete pref 999 to 100.66.1.0/24 fwmark 0x300000/0x300f00 lookup 5183",
        ]
    );
}
