//! Routes, rules, addresses and settings on the real kernel, read back with `ip -j`. Needs root.

#[allow(unreachable_pub, reason = "shared between test binaries")]
mod netns;

use std::{collections::BTreeSet, time::Duration};

use clustermesh_agent_core::{
    routes::{Change, Plan, Routes, desired},
    sysctl::{self, Sysctl},
};
use netns::{NetNs, wait_for, wait_until};
use serde_json::Value;
use wg_agent::route::{Netlink, News, Pass, Routing, Watch, cleanup, converge};

/// Runs a future in a namespace, on a runtime of its own.
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
    // Detection would alter the link-local addresses half a second into the test.
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
    fn all<T: std::str::FromStr<Err: std::fmt::Debug> + Ord>(texts: &[&str]) -> BTreeSet<T> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }
    Plan {
        addresses: all(&["100.66.9.1", "fd00:66:9::1"]),
        peers: all(&["10.101.0.0/24", "100.66.1.1/32", "fd00:101::/64", "fd00:66:1::1/128"]),
        mesh: all(&["10.101.0.0/16", "100.66.1.0/24", "fd00:101::/48", "fd00:66:1::/64"]),
        throw: all(&["10.101.0.1/32", "fd00:101::1/128"]),
        underlay: all(&["10.101.0.200", "fd00:101::200"]),
        ..Plan::default()
    }
}

fn pass(ns: &NetNs, wanted: &Routes) -> Pass {
    inside(ns, async {
        let mut kernel = Netlink::open("kilo0".parse().unwrap()).unwrap();
        converge(&mut kernel, wanted).await.unwrap()
    })
}

/// Converges, and the next pass finds nothing to do.
fn settle(ns: &NetNs, wanted: &Routes) -> Vec<String> {
    let first = pass(ns, wanted);
    assert!(first.failed.is_empty(), "{:?}", first.failed);
    let second = pass(ns, wanted);
    assert!(second.done.is_empty() && second.failed.is_empty(), "{second:?}");
    first.done.iter().map(Change::to_string).collect()
}

/// What `ip -j` shows of a table, in one line a route.
fn table(ns: &NetNs, family: &str, table: u32) -> Vec<String> {
    // A table that never had a route is an error to `ip`.
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

/// Everything of routing but our two tables.
fn elsewhere(ns: &NetNs) -> String {
    ns.sh("ip rule; ip -6 rule; ip route show table main; ip -6 route show table main; ip route show table 99; ip addr show dev eth0; ip link show dev eth0")
}

#[test]
fn the_kernel_holds_what_was_wanted_in_both_families() {
    let ns = node("route");
    settle(&ns, &desired(&plan()));
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
fn a_change_to_one_peer_is_one_message() {
    let ns = node("one");
    settle(&ns, &desired(&plan()));
    let mut less = plan();
    less.peers.remove(&"10.101.0.0/24".parse().unwrap());
    assert_eq!(
        settle(&ns, &desired(&less)),
        ["route delete 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20"]
    );
    assert_eq!(
        settle(&ns, &desired(&plan())),
        ["route add 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20"]
    );
    let other = Plan {
        underlay: BTreeSet::new(),
        ..plan()
    };
    let changes = settle(&ns, &desired(&other));
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
fn what_is_not_ours_is_never_touched() {
    let ns = node("foreign");
    ns.ip("route add 10.101.5.0/24 dev eth0");
    ns.ip("route add 10.9.0.0/16 dev eth0 table 99 proto 117");
    ns.ip("route add 10.8.0.0/16 dev eth0 table 5182 proto 98");
    ns.ip("rule add pref 900 fwmark 0x1 lookup 99");
    ns.ip("-6 rule add pref 901 iif eth0 lookup 99");
    let before = elsewhere(&ns);
    settle(&ns, &desired(&plan()));
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
    assert_eq!(elsewhere(&ns), before);
    assert_eq!(table(&ns, "-4", 5182), ["10.8.0.0/16 eth0 98"]);
    assert_eq!(
        [table(&ns, "-6", 5182), table(&ns, "-4", 5183), table(&ns, "-6", 5183)],
        [const { Vec::<String>::new() }; 3]
    );
    assert_eq!(ns.sh("ip -o addr show dev kilo0 scope global"), "");
}

#[test]
fn someone_elses_route_in_our_place_is_named_and_stays() {
    let ns = node("taken");
    ns.ip("route add 10.101.0.0/24 dev eth0 table 5182 metric 20 proto 98");
    let got = pass(&ns, &desired(&plan()));
    assert_eq!(
        got.failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "route add 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20: File exists (os error 17); someone else's route has this place in table 5182, which is meant to be ours alone: remove it"
        ]
    );
    assert!(
        table(&ns, "-4", 5182).contains(&"10.101.0.0/24 eth0 98 20".to_owned()),
        "{:?}",
        table(&ns, "-4", 5182)
    );
}

#[test]
fn without_the_device_the_door_stays_closed_and_its_return_repairs_everything() {
    let ns = node("gone");
    let wanted = desired(&plan());
    settle(&ns, &wanted);
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
        "there is no interface kilo0; routes into it wait until the device is made again"
    );
    ns.ip("tuntap add dev kilo0 mode tun"); // and down: the pass sets it up
    settle(&ns, &wanted);
    assert_eq!(table(&ns, "-4", 5182).len(), 7);
}

#[test]
fn an_altered_route_of_ours_is_written_over() {
    let ns = node("altered");
    settle(&ns, &desired(&plan()));
    ns.ip("route replace 10.101.0.0/24 dev eth0 table 5182 metric 20 proto 117");
    ns.ip("-6 route del unreachable fd00:101::/48 table 5182 metric 4096");
    assert_eq!(
        settle(&ns, &desired(&plan())),
        [
            "route add unreachable fd00:101::/48 table 5182 metric 4096",
            "route replace 10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20",
        ]
    );
}

#[test]
fn drift_is_heard_of_and_anothers_business_is_not() {
    let ns = node("watch");
    settle(&ns, &desired(&plan()));
    inside(&ns, async {
        let mut watch = Watch::open("kilo0".parse().unwrap()).unwrap();
        let within = Duration::from_secs(5);
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
            ("ip route del 10.101.0.0/24 table 5182 metric 20", News::Ours),
            ("ip rule del pref 1001", News::Ours),
            ("ip -6 rule del pref 1000", News::Ours),
            ("ip addr del 100.66.9.1/32 dev kilo0", News::Ours),
            ("echo 1 > /proc/sys/net/ipv4/conf/kilo0/rp_filter", News::Settings),
            (
                "cd /proc/sys/net/ipv4; echo 0 > ip_forward; echo 1 > ip_forward",
                News::Settings,
            ),
            (
                "cd /proc/sys/net/ipv6/conf/all; echo 0 > forwarding; echo 1 > forwarding",
                News::Settings,
            ),
            ("ip link set kilo0 down", News::Ours),
            ("ip link del kilo0", News::Ours),
        ] {
            script(line).await.unwrap();
            let news = tokio::time::timeout(within, watch.changed()).await;
            let news = news.unwrap_or_else(|_| panic!("{line} unheard"));
            assert_eq!(news.unwrap(), want, "{line}");
            // What one command makes may come as several events.
            while tokio::time::timeout(Duration::from_millis(200), watch.changed())
                .await
                .is_ok()
            {}
        }
        script("ip route add 10.77.0.0/24 dev eth0; ip rule add pref 77 lookup 99; echo 1 > /proc/sys/net/ipv4/conf/eth0/rp_filter")
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
fn settings_are_written_and_what_cannot_be_is_named_with_its_remedy() {
    let ns = node("sysctl");
    for (key, value) in [
        ("net/ipv4/ip_forward", "0"),
        ("net/ipv4/conf/all/rp_filter", "1"),
        ("net/ipv4/conf/kilo0/rp_filter", "0"),
        ("net/ipv4/conf/eth0/src_valid_mark", "0"),
    ] {
        ns.set_sysctl(key, value);
    }
    let wanted = sysctl::desired(&"kilo0".parse().unwrap(), &"eth0".parse().unwrap(), &desired(&plan()));
    let missing = inside(&ns, async { wg_agent::route::sysctl::ensure(&wanted).await });
    let names: Vec<String> = missing.iter().map(|m| m.sysctl.name.to_string()).collect();
    assert_eq!(names, ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"]);
    assert_eq!(
        missing[0].to_string(),
        "net.ipv4.ip_forward is 0: pods reach the tunnel only through a node that forwards; set it on the host or in the DaemonSet's init container: sysctl -w net.ipv4.ip_forward=1"
    );
    let now = [
        "net/ipv4/conf/kilo0/rp_filter",
        "net/ipv4/conf/eth0/src_valid_mark",
        "net/ipv4/tcp_fwmark_accept",
        "net/ipv4/fwmark_reflect",
        "net/ipv6/fwmark_reflect",
        "net/ipv4/conf/kilo0/ignore_routes_with_linkdown",
        "net/ipv6/conf/default/ignore_routes_with_linkdown",
    ]
    .map(|key| ns.sysctl(key));
    assert_eq!(now, ["2", "1", "1", "1", "1", "1", "1"]);
}

#[test]
fn where_proc_is_read_only_an_interfaces_settings_go_over_netlink() {
    let ns = node("readonly");
    ns.set_sysctl("net/ipv4/conf/all/rp_filter", "1");
    ns.set_sysctl("net/ipv4/tcp_fwmark_accept", "0");
    let wanted = sysctl::desired(&"kilo0".parse().unwrap(), &"eth0".parse().unwrap(), &Routes::default());
    let wanted: Vec<Sysctl> = wanted.into_iter().filter(|s| s.write).collect();
    let missing: Vec<String> = ns.enter(|| {
        // A mount namespace of this thread alone, in which /proc/sys is as in a container.
        use nix::{
            mount::{MsFlags, mount},
            sched::{CloneFlags, unshare},
        };
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let mount = |flags| mount(Some("/proc/sys"), "/proc/sys", None::<&str>, flags, None::<&str>).unwrap();
        nix::mount::mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_PRIVATE | MsFlags::MS_REC,
            None::<&str>,
        )
        .unwrap();
        mount(MsFlags::MS_BIND);
        mount(MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime
            .block_on(wg_agent::route::sysctl::ensure(&wanted))
            .iter()
            .map(ToString::to_string)
            .collect()
    });
    assert_eq!(
        missing,
        [
            "net.ipv4.tcp_fwmark_accept is 0: a connection that came by the underlay is answered there even where its source is a mesh address; writing it failed: Read-only file system (os error 30); set it on the host or in the DaemonSet's init container: sysctl -w net.ipv4.tcp_fwmark_accept=1",
            "net.ipv4.fwmark_reflect is 0: resets and ICMP errors leave by the path their packet came by; writing it failed: Read-only file system (os error 30); set it on the host or in the DaemonSet's init container: sysctl -w net.ipv4.fwmark_reflect=1",
        ]
    );
    let now = [
        "net/ipv4/conf/kilo0/rp_filter",
        "net/ipv4/conf/kilo0/ignore_routes_with_linkdown",
        "net/ipv4/conf/eth0/src_valid_mark",
    ]
    .map(|key| ns.sysctl(key));
    assert_eq!(now, ["2", "1", "1"]);
}

#[test]
fn a_kernel_without_ipv6_on_the_device_keeps_the_rest() {
    let ns = node("no6");
    ns.set_sysctl("net/ipv6/conf/kilo0/disable_ipv6", "1");
    let got = pass(&ns, &desired(&plan()));
    assert!(
        got.failed
            .iter()
            .all(|e| e.to_string().contains("fd00:") || e.to_string().contains("::/0")),
        "{:?}",
        got.failed
    );
    assert_eq!(table(&ns, "-4", 5182).len(), 7);
    wait_until("the addresses", Duration::from_secs(1), || {
        ns.sh("ip -4 -o addr show dev kilo0").contains("100.66.9.1")
    });
    let _ = inside(&ns, async {
        Netlink::open("kilo0".parse().unwrap())
            .unwrap()
            .observe()
            .await
            .unwrap()
    });
}

/// Feeds `ip -batch` from a file.
fn batch(ns: &NetNs, lines: impl Iterator<Item = String>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for line in lines {
        std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes()).unwrap();
    }
    ns.run("ip", &["-batch", file.path().to_str().unwrap()]);
}

#[test]
fn a_routing_daemon_with_many_routes_wakes_nobody_and_hides_nothing() {
    let ns = node("bgp");
    settle(&ns, &desired(&plan()));
    ns.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let mut watch = runtime.block_on(async { Watch::open("kilo0".parse().unwrap()).unwrap() });
        let mut heard = |patience| {
            runtime.block_on(async {
                let next = tokio::time::timeout(Duration::from_millis(patience), watch.changed());
                next.await.ok().map(Result::unwrap)
            })
        };
        while heard(300).is_some() {} // of the device that was just made
        let route = |n: u32| std::net::Ipv4Addr::from(0x0b00_0000 + (n << 8));
        // More than the socket's buffer would hold.
        batch(
            &ns,
            (0..30_000).map(|n| format!("route add {}/24 dev eth0 proto bgp", route(n))),
        );
        batch(
            &ns,
            (0..1000).map(|n| format!("route add {}/24 dev eth0 table 99 proto bgp", route(n))),
        );
        assert_eq!(heard(300), None);
        ns.ip("route add default via 10.101.0.9 dev eth0 proto bgp");
        assert_eq!(heard(5000), Some(News::Underlay));
        ns.ip("route flush table 5182");
        assert_eq!(heard(5000), Some(News::Ours));
    });
}

/// What `ip monitor route` says while something is done.
fn monitored(ns: &NetNs, act: impl FnOnce()) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = std::process::Command::new("ip");
    command.args(["-4", "monitor", "route"]).stdout(file.reopen().unwrap());
    let _monitor = ns.spawn_command(&mut command);
    let said = || std::fs::read_to_string(file.path()).unwrap();
    // It listens when it tells of this one.
    wait_for("ip monitor to listen", Duration::from_secs(5), || {
        ns.ip("route replace 192.0.2.1 dev eth0");
        ns.ip("route del 192.0.2.1 dev eth0");
        said().contains("192.0.2.1").then_some(())
    });
    act();
    ns.ip("route add 192.0.2.2 dev eth0");
    ns.ip("route del 192.0.2.2 dev eth0");
    wait_for("the last event", Duration::from_secs(5), || {
        said().contains("Deleted 192.0.2.2").then_some(())
    });
    said()
        .lines()
        .filter(|line| !line.contains("192.0.2."))
        .map(|line| {
            line.trim_end_matches([' ', '\n'])
                .trim_end_matches("linkdown")
                .trim_end()
                .to_owned()
        })
        .collect()
}

#[test]
fn of_ten_thousand_routes_one_that_changes_is_one_message() {
    let ns = node("many");
    let net = |n: u32| ipnet::Ipv4Net::new((0x0a80_0000 + (n << 8)).into(), 24).unwrap();
    let peers = |count: u32| (0..count).map(|n| net(n).into()).collect();
    let all = Plan {
        peers: peers(10_000),
        mesh: ["10.128.0.0/9".parse().unwrap()].into(),
        ..Plan::default()
    };
    let first = pass(&ns, &desired(&all));
    assert_eq!((first.done.len(), first.failed.len()), (10_000 + 1 + 1 + 2, 0));
    let shown = ns.sh("ip -4 route show table 5182 | grep -c kilo0");
    assert_eq!(shown.trim(), "10000");
    let one_less = Plan {
        peers: peers(9_999),
        ..all.clone()
    };
    let narrower = Plan {
        sizes: [(net(7).into(), 1328)].into(),
        ..one_less.clone()
    };
    let gone = net(9_999);
    assert_eq!(
        monitored(&ns, || assert_eq!(pass(&ns, &desired(&one_less)).done.len(), 1)),
        [format!(
            "Deleted {gone} dev kilo0 table 5182 proto 117 scope link metric 20"
        )]
    );
    assert_eq!(
        monitored(&ns, || assert_eq!(pass(&ns, &desired(&one_less)).done.len(), 0)),
        [""; 0]
    );
    let replaced = monitored(&ns, || assert_eq!(pass(&ns, &desired(&narrower)).done.len(), 2));
    assert_eq!(replaced.len(), 2, "{replaced:?}");
    ns.ip(&format!("route del {} table 5182 metric 20", net(1234)));
    assert_eq!(
        monitored(&ns, || assert_eq!(pass(&ns, &desired(&narrower)).done.len(), 1)),
        [format!(
            "{} dev kilo0 table 5182 proto 117 scope link metric 20",
            net(1234)
        )]
    );
}

#[test]
fn a_peers_own_packet_size_is_on_its_routes_and_a_forwarder_of_ipv6_heeds_it() {
    let ns = node("sizes");
    let sizes = ["10.101.0.0/24", "fd00:101::/64"].map(|net| (net.parse().unwrap(), 1328));
    let narrow = Plan {
        sizes: sizes.into(),
        ..plan()
    };
    settle(&ns, &desired(&narrow));
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
    // Without its lock, or with another number, it is put right.
    ns.ip("-6 route replace fd00:101::/64 dev kilo0 table 5182 metric 20 proto 117 src fd00:101::200 mtu 1328");
    ns.ip("route replace 10.101.0.0/24 dev kilo0 table 5182 metric 20 proto 117 src 10.101.0.200 mtu 1300");
    assert_eq!(
        settle(&ns, &desired(&narrow)),
        [
            "route replace 10.101.0.0/24 dev <device> src 10.101.0.200 mtu 1328 table 5182 metric 20",
            "route replace fd00:101::/64 dev <device> src fd00:101::200 mtu 1328 table 5182 metric 20",
        ]
    );
    settle(&ns, &desired(&plan()));
    assert!(!shown("-4", "10.101.0.0/24").contains("mtu"));
}
