//! The routing tables, metrics, rule priorities and marks in the expected texts are those of [`crate::numbers`].

use super::*;

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

fn text(changes: Option<Vec<Change>>) -> Vec<String> {
    changes.into_iter().flatten().map(|c| c.to_string()).collect()
}

fn plan_of_a_node() -> Plan {
    Plan {
        addresses: ["100.66.2.1".parse().unwrap()].into(),
        peers: nets(&["10.101.0.0/24", "100.66.1.1/32"]),
        mesh: nets(&["10.101.0.0/16", "100.66.1.0/24"]),
        ..Plan::default()
    }
}

#[test]
fn unreachable_routes_are_added_before_device_routes_and_rules() {
    assert_eq!(
        text(diff(&Routes::default(), &desired(&plan_of_a_node()))),
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
fn removed_peer_prefix_deletes_one_route() {
    let without = Plan {
        peers: nets(&["100.66.1.1/32"]),
        ..plan_of_a_node()
    };
    assert_eq!(
        text(diff(&desired(&plan_of_a_node()), &desired(&without))),
        ["route delete 10.101.0.0/24 dev <device> table 5182 metric 20"]
    );
}

#[test]
fn unreachable_routes_are_deleted_after_rules_and_device_routes() {
    assert_eq!(
        text(diff(&desired(&plan_of_a_node()), &Routes::default())),
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
fn underlay_address_in_mesh_is_src_of_peer_and_fallback_routes() {
    let plan = Plan {
        throw: nets(&["10.101.0.1/32", "192.0.2.1/32"]),
        underlay: ["10.101.0.200".parse().unwrap(), "192.0.2.9".parse().unwrap()].into(),
        mesh: nets(&["10.101.0.0/16"]),
        peers: nets(&["10.101.0.0/24"]),
        ..Plan::default()
    };
    let got: Vec<String> = desired(&plan).routes.iter().map(ToString::to_string).collect();
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
fn changed_source_address_replaces_routes() {
    let plan = |a: &str| Plan {
        underlay: [a.parse().unwrap()].into(),
        ..plan_of_a_node()
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
fn throw_prefix_gets_no_device_route() {
    let plan = Plan {
        throw: nets(&["100.66.1.1/32"]),
        ..plan_of_a_node()
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
fn family_without_mesh_prefixes_gets_no_rule() {
    let plan = Plan {
        mesh: nets(&["fd00:1::/48"]),
        ..Plan::default()
    };
    let families: BTreeSet<Family> = desired(&plan).rules.iter().map(|r| r.family).collect();
    assert_eq!(families, BTreeSet::from([Family::V6]));
}

#[test]
fn mtu_of_a_prefix_is_set_on_its_route_and_the_default_route() {
    let smaller_mtu = Plan {
        mtus: [("10.101.0.0/24".parse().unwrap(), 1328)].into(),
        ..plan_of_a_node()
    };
    assert_eq!(
        text(diff(&desired(&plan_of_a_node()), &desired(&smaller_mtu))),
        [
            "route replace 10.101.0.0/24 dev <device> mtu 1328 table 5182 metric 20",
            "route replace 0.0.0.0/0 dev <device> mtu 1328 table 5183 metric 20",
        ]
    );
}
