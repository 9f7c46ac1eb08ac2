//! Applies routes, rules, addresses and sysctls to the real kernel and reads them back with `ip -j`. Needs root.

mod size;
mod sysctl_settings;

use std::{collections::BTreeSet, time::Duration};

use clustermesh_agent_core::{
    routes::{Change, Plan, Routes, desired},
    sysctl::{self, Name, Sysctl},
};
use clustermesh_tests::netns::{NetNs, wait_for, wait_until};
use serde_json::Value;
use wg_agent::route::{Netlink, Outcome, Routing, RoutingEvent, Watch, cleanup, converge};

/// Runs a future in a namespace, on its own runtime.
fn inside<T: Send>(ns: &NetNs, future: impl Future<Output = T> + Send) -> T {
    ns.enter(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(future)
    })
}

fn node(name: &str) -> NetNs {
    let ns = NetNs::new(name);
    // Duplicate address detection would change link-local addresses half a second into the test.
    ns.set_sysctl("net/ipv6/conf/default/accept_dad", "0");
    ns.ip("tuntap add dev kilo0 mode tun");
    ns.ip("link set kilo0 up");
    ns.ip("link add eth0 type veth peer name eth1");
    ns.ip("addr add 10.101.0.200/24 dev eth0");
    ns.ip("addr add fd00:101::200/64 dev eth0 nodad");
    ns.ip("link set eth0 up");
    ns.ip("link set eth1 up");
    ns
}

fn plan() -> Plan {
    fn parse_all<T: std::str::FromStr<Err: std::fmt::Debug> + Ord>(texts: &[&str]) -> BTreeSet<T> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }
    Plan {
        addresses: parse_all(&["100.66.9.1", "fd00:66:9::1"]),
        peers: parse_all(&["10.101.0.0/24", "100.66.1.1/32", "fd00:101::/64", "fd00:66:1::1/128"]),
        mesh: parse_all(&["10.101.0.0/16", "100.66.1.0/24", "fd00:101::/48", "fd00:66:1::/64"]),
        throw: parse_all(&["10.101.0.1/32", "fd00:101::1/128"]),
        underlay: parse_all(&["10.101.0.200", "fd00:101::200"]),
        ..Plan::default()
    }
}

fn pass(ns: &NetNs, wanted: &Routes) -> Outcome {
    inside(ns, async {
        let mut kernel = Netlink::open("kilo0".parse().unwrap()).unwrap();
        converge(&mut kernel, wanted).await.unwrap()
    })
}

/// Runs two passes, checks that the second changes nothing, and returns the changes of the first.
fn converge_fully(ns: &NetNs, wanted: &Routes) -> Vec<String> {
    let first = pass(ns, wanted);
    assert!(first.failed.is_empty(), "{:?}", first.failed);
    let second = pass(ns, wanted);
    assert!(second.done.is_empty() && second.failed.is_empty(), "{second:?}");
    first.done.iter().map(Change::to_string).collect()
}

/// The routes of a table as `ip -j` shows them, one line each.
fn table(ns: &NetNs, family: &str, table: u32) -> Vec<String> {
    // `ip` fails for a table that does not exist.
    let output = ns.output("ip", &[family, "-j", "route", "show", "table", &table.to_string()]);
    let Value::Array(routes) = serde_json::from_slice(&output.stdout).unwrap_or_default() else {
        return vec![];
    };
    let text = |r: &Value, k: &str| r.get(k).map(|v| v.to_string().replace('"', "")).unwrap_or_default();
    let keys = ["type", "dst", "dev", "protocol", "metric", "prefsrc"];
    let mut out: Vec<String> = routes
        .iter()
        .map(|r| keys.map(|k| text(r, k)).join(" ").trim().to_owned())
        .collect();
    out.sort();
    out
}

/// The policy routing rules for the agent's tables, 5182 and 5183.
fn rules(ns: &NetNs, family: &str) -> Vec<String> {
    let rules = ns.ip_json(&format!("{family} rule show"));
    rules
        .as_array()
        .unwrap()
        .iter()
        .map(Value::to_string)
        .filter(|r| r.contains("518"))
        .collect()
}

/// All policy routing rules, and the routes, addresses and link of other programs.
fn foreign_state(ns: &NetNs) -> String {
    ns.sh("ip rule; ip -6 rule; ip route show table main; ip -6 route show table main; ip route show table 99; ip addr show dev eth0; ip link show dev eth0")
}

#[test]
fn converge_writes_the_desired_state_of_both_families() {
    let ns = node("route");
    converge_fully(&ns, &desired(&plan()));
    assert_eq!(
        table(&ns, "-4", 5182),
        [
            "10.101.0.0/16 kilo0 117 4095 10.101.0.200",
            "10.101.0.0/24 kilo0 117 20 10.101.0.200",
            "100.66.1.0/24 kilo0 117 4095 10.101.0.200",
            "100.66.1.1 kilo0 117 20 10.101.0.200",
            "throw 10.101.0.1  117 10",
            "unreachable 10.101.0.0/16  117 4096",
            "unreachable 100.66.1.0/24  117 4096",
        ]
    );
    assert_eq!(
        table(&ns, "-6", 5182),
        [
            "fd00:101::/48 kilo0 117 4095 fd00:101::200",
            "fd00:101::/64 kilo0 117 20 fd00:101::200",
            "fd00:66:1::/64 kilo0 117 4095 fd00:101::200",
            "fd00:66:1::1 kilo0 117 20 fd00:101::200",
            "throw fd00:101::1 lo 117 10",
            "unreachable fd00:101::/48 lo 117 4096",
            "unreachable fd00:66:1::/64 lo 117 4096",
        ]
    );
    assert_eq!(table(&ns, "-4", 5183), ["default kilo0 117 20"]);
    assert_eq!(table(&ns, "-6", 5183), ["default kilo0 117 20"]);
    for family in ["-4", "-6"] {
        assert_eq!(
            rules(&ns, family),
            [
                r#"{"fwmark":"0x200000","fwmask":"0x300f00","priority":1000,"protocol":"117","src":"all","table":"5183"}"#,
                r#"{"fwmark":"0x100000","fwmask":"0x300f00","not":null,"priority":1001,"protocol":"117","src":"all","table":"5182"}"#,
            ]
        );
    }
    let addresses = ns.sh("ip -o addr show dev kilo0 scope global | awk '{print $4}'");
    assert_eq!(addresses, "100.66.9.1/32\nfd00:66:9::1/128\n");
}

#[test]
fn change_of_peer_or_underlay_writes_only_affected_routes() {
    let ns = node("one");
    converge_fully(&ns, &desired(&plan()));
    let mut without_route = plan();
    without_route.peers.remove(&"10.101.0.0/24".parse().unwrap());
    assert_eq!(
        converge_fully(&ns, &desired(&without_route)),
        ["route delete 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20"]
    );
    assert_eq!(
        converge_fully(&ns, &desired(&plan())),
        ["route add 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20"]
    );
    // Without an underlay address that lies in a mesh network, the four routes to peers lose their source address, and there are no
    // fallback routes (metric 4095).
    let without_underlay = Plan {
        underlay: BTreeSet::new(),
        ..plan()
    };
    let changes = converge_fully(&ns, &desired(&without_underlay));
    assert_eq!(
        changes.iter().filter(|c| c.starts_with("route replace")).count(),
        4,
        "{changes:?}"
    );
    assert_eq!(
        changes.iter().filter(|c| c.starts_with("route delete")).count(),
        4,
        "{changes:?}"
    );
}

#[test]
fn foreign_routes_and_rules_are_never_changed() {
    let ns = node("foreign");
    ns.ip("route add 10.101.5.0/24 dev eth0");
    ns.ip("route add 10.9.0.0/16 dev eth0 table 99 proto 117");
    ns.ip("route add 10.8.0.0/16 dev eth0 table 5182 proto 98");
    ns.ip("rule add pref 900 fwmark 0x1 lookup 99");
    ns.ip("-6 rule add pref 901 iif eth0 lookup 99");
    let before = foreign_state(&ns);
    converge_fully(&ns, &desired(&plan()));
    assert_eq!(
        table(&ns, "-4", 5182)
            .iter()
            .filter(|r| r.starts_with("10.8."))
            .collect::<Vec<_>>(),
        ["10.8.0.0/16 eth0 98"]
    );
    let left = inside(&ns, async {
        let mut kernel = Netlink::open("kilo0".parse().unwrap()).unwrap();
        cleanup(&mut kernel).await
    });
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(foreign_state(&ns), before);
    assert_eq!(table(&ns, "-4", 5182), ["10.8.0.0/16 eth0 98"]);
    assert_eq!(
        [table(&ns, "-6", 5182), table(&ns, "-4", 5183), table(&ns, "-6", 5183)],
        [const { Vec::<String>::new() }; 3]
    );
    assert_eq!(ns.sh("ip -o addr show dev kilo0 scope global"), "");
}

#[test]
fn obsolete_rules_of_the_agent_are_removed() {
    let ns = node("before");
    for rule in [
        "rule add pref 996 iif kilo0 from 100.66.1.0/24 fwmark 0x0/0x300000 protocol 117 blackhole",
        "rule add pref 996 iif kilo0 from 100.66.2.0/24 fwmark 0x0/0x300000 protocol 117 blackhole",
        "rule add pref 997 iif lo from 10.101.0.200 to 100.66.1.0/24 ipproto udp sport 53 protocol 117 lookup 5183",
        "-6 rule add pref 999 to fd00:66:1::/64 fwmark 0x300000/0x300f00 protocol 117 lookup 5183",
    ] {
        ns.ip(rule);
    }
    // These rules are kept. The first is of another program. The second has the agent's protocol number, but a form that the agent
    // never writes. It is kept because it has the priority of a rule that the agent needs: deleting it could remove the needed
    // rule instead (`parse_rule`).
    for rule in [
        "rule add pref 996 from 192.0.2.0/24 lookup 99",
        "rule add pref 1001 from 192.0.2.7 protocol 117 lookup 99",
    ] {
        ns.ip(rule);
    }
    converge_fully(&ns, &desired(&plan()));
    let shown = |family| -> Vec<String> {
        let all = ns.sh(&format!("ip {family} rule show"));
        let fields = all.lines().filter_map(|line| line.split_once(':'));
        fields
            .filter(|(pref, _)| (900..1100).contains(&pref.parse::<u32>().unwrap()))
            .map(|(pref, rule)| format!("{pref} {}", rule.trim()))
            .collect()
    };
    assert_eq!(
        shown("-4"),
        [
            "996 from 192.0.2.0/24 lookup 99",
            "1000 from all fwmark 0x200000/0x300f00 lookup 5183 proto 117",
            "1001 from 192.0.2.7 lookup 99 proto 117",
            "1001 not from all fwmark 0x100000/0x300f00 lookup 5182 proto 117",
        ]
    );
    assert_eq!(shown("-6").len(), 2);
}

#[test]
fn foreign_route_with_our_key_is_reported_and_kept() {
    let ns = node("taken");
    ns.ip("route add 10.101.0.0/24 dev eth0 table 5182 metric 20 proto 98");
    let got = pass(&ns, &desired(&plan()));
    assert_eq!(
        got.failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "route add 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20: File exists (os error 17); another program's route has this key in table 5182, which must contain only wg-agent's routes: remove it"
        ]
    );
    assert!(
        table(&ns, "-4", 5182).contains(&"10.101.0.0/24 eth0 98 20".to_owned()),
        "{:?}",
        table(&ns, "-4", 5182)
    );
}

#[test]
fn unreachable_routes_remain_while_device_is_missing() {
    let ns = node("gone");
    let wanted = desired(&plan());
    converge_fully(&ns, &wanted);
    ns.ip("link del kilo0");
    assert_eq!(
        table(&ns, "-4", 5182),
        [
            "throw 10.101.0.1  117 10",
            "unreachable 10.101.0.0/16  117 4096",
            "unreachable 100.66.1.0/24  117 4096",
        ]
    );
    let got = pass(&ns, &wanted);
    assert!(got.done.is_empty(), "{:?}", got.done);
    assert_eq!(
        got.failed[0].to_string(),
        "there is no interface kilo0; its routes are added when the device exists again"
    );
    ns.ip("tuntap add dev kilo0 mode tun"); // it is down; the pass sets it up
    converge_fully(&ns, &wanted);
    assert_eq!(table(&ns, "-4", 5182).len(), 7);
}

#[test]
fn altered_or_deleted_route_of_the_agent_is_restored() {
    let ns = node("altered");
    converge_fully(&ns, &desired(&plan()));
    ns.ip("route replace 10.101.0.0/24 dev eth0 table 5182 metric 20 proto 117");
    ns.ip("-6 route del unreachable fd00:101::/48 table 5182 metric 4096");
    assert_eq!(
        converge_fully(&ns, &desired(&plan())),
        [
            "route add unreachable fd00:101::/48 table 5182 metric 4096",
            "route replace 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20",
        ]
    );
}

#[test]
fn watch_reports_changes_of_own_state_and_ignores_foreign() {
    let ns = node("watch");
    converge_fully(&ns, &desired(&plan()));
    inside(&ns, async {
        let mut watch = Watch::open("kilo0".parse().unwrap()).unwrap();
        let within = Duration::from_secs(60);
        let script = |line: &'static str| {
            tokio::task::spawn_blocking(move || {
                assert!(
                    std::process::Command::new("sh")
                        .args(["-ec", line])
                        .status()
                        .unwrap()
                        .success()
                );
            })
        };
        for (line, want) in [
            ("ip route del 10.101.0.0/24 table 5182 metric 20", RoutingEvent::Ours),
            ("ip rule del pref 1001", RoutingEvent::Ours),
            ("ip -6 rule del pref 1000", RoutingEvent::Ours),
            // A rule of another program that matches most packets and comes before the agent's rules, so the agent must move its rules.
            ("ip rule add pref 998 not fwmark 7 lookup 7", RoutingEvent::Ours),
            ("ip addr del 100.66.9.1/32 dev kilo0", RoutingEvent::Ours),
            (
                "echo 1 > /proc/sys/net/ipv4/conf/kilo0/rp_filter",
                RoutingEvent::Settings,
            ),
            (
                "cd /proc/sys/net/ipv4; echo 0 > ip_forward; echo 1 > ip_forward",
                RoutingEvent::Settings,
            ),
            (
                "cd /proc/sys/net/ipv6/conf/all; echo 0 > forwarding; echo 1 > forwarding",
                RoutingEvent::Settings,
            ),
            ("ip link set kilo0 down", RoutingEvent::Ours),
            ("ip link del kilo0", RoutingEvent::Ours),
        ] {
            script(line).await.unwrap();
            let event = tokio::time::timeout(within, watch.changed()).await;
            let event = event.unwrap_or_else(|_| panic!("no event for {line}"));
            assert_eq!(event.unwrap(), want, "{line}");
            // One command may cause several events.
            while tokio::time::timeout(Duration::from_millis(200), watch.changed())
                .await
                .is_ok()
            {}
        }
        script("ip route add 10.77.0.0/24 dev eth0; ip rule add pref 77 from 10.77.0.1 lookup 99; ip rule add pref 2000 lookup 99; echo 1 > /proc/sys/net/ipv4/conf/eth0/rp_filter")
            .await
            .unwrap();
        assert!(
            tokio::time::timeout(Duration::from_millis(300), watch.changed())
                .await
                .is_err()
        );
    });
}

#[test]
fn smaller_peer_mtu_is_set_on_its_routes() {
    let ns = node("mtus");
    let mtus = ["10.101.0.0/24", "fd00:101::/64"].map(|net| (net.parse().unwrap(), 1328));
    let smaller_mtu = Plan {
        mtus: mtus.into(),
        ..plan()
    };
    converge_fully(&ns, &desired(&smaller_mtu));
    // Only the MTU of an IPv6 route is locked: some kernels otherwise ignore it for forwarded packets. For IPv4 a lock would disable
    // path MTU discovery.
    let shown = |family, net| ns.sh(&format!("ip {family} route show table 5182 | grep '^{net} dev kilo0'"));
    assert!(
        shown("-4", "10.101.0.0/24").contains(" mtu 1328"),
        "{}",
        shown("-4", "10.101.0.0/24")
    );
    assert!(
        shown("-6", "fd00:101::/64").contains(" mtu lock 1328"),
        "{}",
        shown("-6", "fd00:101::/64")
    );
    // A missing lock or another value is repaired.
    ns.ip("-6 route replace fd00:101::/64 dev kilo0 table 5182 metric 20 proto 117 src fd00:101::200 mtu 1328");
    ns.ip("route replace 10.101.0.0/24 dev kilo0 table 5182 metric 20 proto 117 src 10.101.0.200 mtu 1300");
    assert_eq!(
        converge_fully(&ns, &desired(&smaller_mtu)),
        [
            "route replace 10.101.0.0/24 dev <device> src 10.101.0.200 mtu 1328 table 5182 metric 20",
            "route replace fd00:101::/64 dev <device> src fd00:101::200 mtu 1328 table 5182 metric 20",
        ]
    );
    converge_fully(&ns, &desired(&plan()));
    assert!(!shown("-4", "10.101.0.0/24").contains("mtu"));
}
