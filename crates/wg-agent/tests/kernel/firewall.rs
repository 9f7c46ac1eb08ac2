//! Applies the firewall table to the real kernel and reads it back with `nft -j`. Needs root and nft.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::mpsc,
    time::Duration,
};

use clustermesh_agent_core::firewall::{Firewall, Plan, RuleParameters, Scope, Update, desired, update};
use clustermesh_core::{mesh::Protocol, observe::PolicySpec};
use clustermesh_tests::netns::{self, NetNs};
use ipnet::IpNet;
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use wg_agent::firewall::{Backend, Error, FirewallManager, Nft, Watch};

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

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

/// A table that allows packets from `sources` to `to`. `ports` are the infrastructure ports. At the first address of each network
/// of `to`, TCP to all these port numbers is denied, even if the infrastructure port is a UDP or SCTP port.
fn firewall(sources: &BTreeSet<IpNet>, to: &BTreeSet<IpNet>, ports: &BTreeSet<(Protocol, u16)>) -> Firewall {
    let denied = |net: &IpNet| {
        let address = net.addr();
        ports.iter().map(move |(_, port)| SocketAddr::new(address, *port))
    };
    let api: BTreeSet<SocketAddr> = ["172.29.0.11:6443".parse().unwrap(), "[fd00::11]:6443".parse().unwrap()].into();
    let policies = [PolicySpec {
        sources: sources.clone(),
        networks: sources.clone(),
        allow: to.clone(),
        deny: to.iter().flat_map(denied).collect(),
        infrastructure_ports: ports.clone(),
        ..PolicySpec::default()
    }];
    desired(&Plan {
        parameters: RuleParameters {
            scope: Scope::Tunnel,
            device: "kilo0".parse().unwrap(),
            listen_port: 51820,
            mtu: 1420,
            wireguard_v4: Some("100.66.1.1".parse().unwrap()),
            wireguard_v6: Some("fd00:66:1::1".parse().unwrap()),
        },
        mesh: sources,
        throw: to,
        published: to,
        own_cluster: &BTreeSet::new(),
        gateways: &BTreeSet::new(),
        own_sources: &BTreeSet::new(),
        own_pods: &BTreeSet::new(),
        policies: &policies,
        internal_ips: &["10.101.0.1".parse().unwrap(), "10.101.0.9".parse().unwrap()].into(),
        api_servers: &api,
        nodes: &["172.29.0.112".parse().unwrap(), "fd00::112".parse().unwrap()].into(),
        pod_cidrs_of_other_nodes: to,
    })
}

/// A table that allows packets from `sources` to `to`, but not to the IPv4 networks `denied`.
fn firewall_that_denies(sources: &BTreeSet<IpNet>, to: &BTreeSet<IpNet>, denied: &BTreeSet<IpNet>) -> Firewall {
    let mut firewall = firewall(sources, to, &BTreeSet::new());
    let pairs = sources
        .iter()
        .flat_map(|from| denied.iter().map(move |to| (*from, *to)));
    firewall.v4.deny = pairs.collect();
    firewall
}

fn example() -> Firewall {
    firewall(
        &nets(&["10.243.0.0/16", "fd00:243::/48"]),
        &nets(&["10.101.0.0/16", "fd00:101::/48"]),
        &[(Protocol::Tcp, 10250)].into(),
    )
}

/// The elements of a set, parsed without the parser of the agent.
fn elements(ns: &NetNs, set: &str) -> Vec<String> {
    let json: serde_json::Value =
        serde_json::from_str(&ns.run("nft", &["-j", "list", "set", "inet", "clustermesh", set])).unwrap();
    let text = |v: &serde_json::Value| match v.get("prefix") {
        Some(p) => format!("{}/{}", p["addr"].as_str().unwrap(), p["len"]),
        None => v.to_string().replace('"', ""),
    };
    let elements = json["nftables"][1]["set"]["elem"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    elements
        .iter()
        .map(|e| match e.get("concat").and_then(|c| c.as_array()) {
            Some(parts) => parts.iter().map(text).collect::<Vec<_>>().join(" . "),
            None => text(e),
        })
        .collect()
}

#[test]
fn kernel_accepts_the_table_with_expected_chains_and_sets() {
    let ns = NetNs::new("table");
    inside(&ns, async {
        FirewallManager::new(Nft::default()).converge(&example()).await.unwrap()
    });
    let json: serde_json::Value =
        serde_json::from_str(&ns.run("nft", &["-j", "list", "table", "inet", "clustermesh"])).unwrap();
    let chains: Vec<String> = json["nftables"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|o| o.get("chain"))
        .filter_map(|c| {
            Some(format!(
                "{} {} {} {}",
                c["name"].as_str()?,
                c["type"].as_str()?,
                c["hook"].as_str()?,
                c["prio"]
            ))
        })
        .collect();
    assert_eq!(
        chains,
        [
            "path_in filter prerouting -149",
            "path_dnat filter prerouting -99",
            "path_out route output -150",
            "policy_input filter input -10",
            "policy_forward filter forward -10",
            "nat nat postrouting 90",
            "mss filter forward -150",
            "leave filter postrouting 110",
        ]
    );
    assert_eq!(elements(&ns, "allow4"), ["10.243.0.0/16 . 10.101.0.0/16"]);
    assert_eq!(
        elements(&ns, "deny_ports6"),
        ["fd00:243::/48 . fd00:101:: . tcp . 10250"]
    );
    assert_eq!(elements(&ns, "api6"), ["fd00::11 . 6443"]);
    assert_eq!(elements(&ns, "infrastructure"), ["tcp . 10250"]);
}

#[test]
fn repeated_update_is_empty_and_changed_sets_update_elements() {
    let ns = NetNs::new("delta");
    inside(&ns, async {
        let mut manager = FirewallManager::new(Nft::default());
        assert!(matches!(
            manager.converge(&example()).await.unwrap(),
            Some(Update::Whole { .. })
        ));
        assert_eq!(manager.converge(&example()).await.unwrap(), None);
        let mut changed = example();
        let net: IpNet = "10.242.0.0/15".parse().unwrap();
        (changed.v4.mesh, changed.v6.mesh) = ([net].into(), BTreeSet::new());
        changed.v4.pairs = [(net, net)].into();
        let step = manager.converge(&changed).await.unwrap();
        assert!(matches!(step, Some(Update::Elements { .. })), "{step:?}");
        assert!(manager.matches_kernel().await.unwrap());
    });
    assert_eq!(elements(&ns, "mesh4"), ["10.242.0.0/15"]);
    assert_eq!(elements(&ns, "mesh6"), Vec::<String>::new());
    assert_eq!(elements(&ns, "pairs4"), ["10.242.0.0/15 . 10.242.0.0/15"]);
}

#[test]
fn external_changes_are_drift_but_counters_are_not() {
    let ns = NetNs::new("drift");
    ns.ip("addr add 10.243.0.1/32 dev lo");
    ns.ip("addr add 10.243.0.2/32 dev lo");
    inside(&ns, async {
        let mut manager = FirewallManager::new(Nft::default());
        manager.converge(&example()).await.unwrap();
        assert!(
            ns.output("ping", &["-c1", "-W1", "-I", "10.243.0.1", "10.243.0.2"])
                .status
                .success()
        );
        assert!(
            ns.sh("nft list chain inet clustermesh path_in").contains("packets 1 "),
            "the ping was not counted"
        );
        assert!(manager.matches_kernel().await.unwrap());
        for line in [
            "nft add rule inet clustermesh from_mesh accept",
            "nft flush chain inet clustermesh from_mesh",
            "nft add element inet clustermesh allow4 { 10.9.0.0/16 . 10.101.0.0/16 }",
            "nft flush set inet clustermesh mesh4",
            "nft delete table inet clustermesh",
            "nft flush ruleset",
        ] {
            ns.sh(line);
            assert!(!manager.matches_kernel().await.unwrap(), "{line} is not detected");
            let step = manager.converge(&example()).await.unwrap();
            assert!(matches!(step, Some(Update::Whole { .. })), "{line}: {step:?}");
            assert_eq!(manager.converge(&example()).await.unwrap(), None, "{line}");
        }
    });
}

#[test]
fn table_is_listed_once_for_each_ruleset_generation() {
    let (ns, other) = (NetNs::new("listed"), NetNs::new("unlisted"));
    let directory = tempfile::tempdir().unwrap();
    let (program, log) = (directory.path().join("nft"), directory.path().join("log"));
    let script = format!("#!/bin/sh\necho \"$*\" >> {}\nexec nft \"$@\"\n", log.display());
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let listed = || {
        let calls = std::fs::read_to_string(&log).unwrap_or_default();
        calls.lines().filter(|line| line.contains("list")).count()
    };
    let mut manager = FirewallManager::new(Nft::new(&program));
    inside(&ns, async {
        assert_eq!(manager.backend().observe().await.unwrap(), None);
        assert_eq!(manager.backend().observe().await.unwrap(), None);
        assert_eq!(listed(), 1);
        manager.converge(&example()).await.unwrap();
        for _ in 0..3 {
            assert!(manager.matches_kernel().await.unwrap());
            assert_eq!(manager.converge(&example()).await.unwrap(), None);
        }
        assert_eq!(listed(), 2, "the agent lists the table once after it wrote it");
        // Another program adds its own table, then deletes the agent's table.
        ns.sh("nft add table inet other");
        assert!(manager.matches_kernel().await.unwrap() && manager.matches_kernel().await.unwrap());
        assert_eq!(listed(), 3);
        ns.sh("nft flush ruleset");
        assert!(!manager.matches_kernel().await.unwrap());
        manager.converge(&example()).await.unwrap();
        assert!(manager.matches_kernel().await.unwrap());
    });
    // Another namespace has no such table, and its generation passes through the same numbers. The backend must not return the
    // table that it remembers from the first namespace.
    inside(&other, async {
        for number in 0..20 {
            let mut same = manager.backend().clone();
            assert_eq!(same.observe().await.unwrap(), None, "{number}");
            let verb = if number % 2 == 0 { "add" } else { "delete" };
            other.sh(&format!("nft {verb} table inet clustermesh2"));
        }
    });
}

#[test]
fn destroy_removes_only_our_table() {
    let ns = NetNs::new("others");
    ns.sh("nft add table ip cni; nft 'add chain ip cni post { type nat hook postrouting priority 100; }'; nft add table inet clustermesh2");
    let before = ns.sh("nft list ruleset");
    inside(&ns, async {
        let mut manager = FirewallManager::new(Nft::default());
        manager.converge(&example()).await.unwrap();
        assert_ne!(ns.sh("nft list ruleset"), before);
        manager.destroy().await.unwrap();
        manager.destroy().await.unwrap(); // a missing table is no error
        assert_eq!(manager.backend().observe().await.unwrap(), None);
    });
    assert_eq!(ns.sh("nft list ruleset"), before);
}

#[test]
fn failing_script_changes_nothing_and_returns_the_error() {
    let ns = NetNs::new("mistake");
    let (before, error) = inside(&ns, async {
        let mut manager = FirewallManager::new(Nft::default());
        manager.converge(&example()).await.unwrap();
        let before = ns.sh("nft list ruleset");
        let script = "flush chain inet clustermesh from_mesh\nadd rule inet clustermesh from_mesh jump nowhere\n";
        (before, manager.backend().run(script).await.unwrap_err())
    });
    assert_eq!(ns.sh("nft list ruleset"), before);
    assert!(
        matches!(&error, Error::Refused { stderr, .. } if stderr.contains("No such file or directory")),
        "{error}"
    );
}

#[test]
fn missing_nft_is_reported_with_its_remedy() {
    let ns = NetNs::new("missing");
    let error = inside(&ns, async { Nft::new("/nonexistent/nft").observe().await.unwrap_err() });
    assert_eq!(
        error.to_string(),
        "cannot start /nonexistent/nft: No such file or directory (os error 2); the nft program of nftables 1.0.6 or newer must be in the image or on the node"
    );
}

// threat: foreign-change
#[test]
fn table_write_is_reported_once_and_flush_is_reported() {
    let ns = NetNs::new("events");
    inside(&ns, async {
        let mut watch = Watch::open().unwrap();
        let within = Duration::from_secs(60);
        FirewallManager::new(Nft::default()).converge(&example()).await.unwrap(); // hundreds of events
        tokio::time::timeout(within, watch.changed())
            .await
            .expect("no event for the new table")
            .unwrap();
        assert!(
            tokio::time::timeout(Duration::from_millis(300), watch.changed())
                .await
                .is_err(),
            "a second event for the same write"
        );
        tokio::task::spawn_blocking(|| {
            assert!(
                std::process::Command::new("nft")
                    .args(["flush", "ruleset"])
                    .status()
                    .unwrap()
                    .success()
            );
        })
        .await
        .unwrap();
        tokio::time::timeout(within, watch.changed())
            .await
            .expect("no event for the flush")
            .unwrap();
    });
}

async fn run_update(nft: &mut Nft, step: &Update) -> Result<(), String> {
    for script in step.scripts() {
        nft.run(script).await.map_err(|error| format!("{error}\n{script}"))?;
    }
    Ok(())
}

/// If the update writes the whole table, adds 500 rules before the lookup of the allow set, and 500 at the start of the chain `allowed`,
/// which then looks up the deny sets. An update of elements stays the same. The rules delay packets, so that many packets are between
/// the two lookups during an update.
fn with_slow_rules(step: Update) -> Update {
    let Update::Whole { script } = step else {
        return step;
    };
    let long = "    meta length 0 counter\n".repeat(500);
    let lookup = "    ip saddr . ip daddr @allow4";
    let chain = "  chain allowed {\n";
    assert!(script.contains(lookup) && script.contains(chain), "{script}");
    let script = script.replacen(lookup, &format!("{long}{lookup}"), 1);
    Update::Whole {
        script: script.replacen(chain, &format!("{chain}{long}"), 1),
    }
}

/// A transaction is not atomic for packets: its updates of several sets take effect one after the other.
// threat: table-update-window
#[test]
fn denied_packets_never_pass_during_table_updates() {
    const OPEN: &str = "10.101.0.1:9";
    const DENIED: &str = "10.101.0.9:9";
    let (member, node) = (NetNs::new("a member"), NetNs::new("a node"));
    netns::veth(&member, "eth0", &["10.243.0.1/16"], &node, "kilo0", &["10.243.0.2/16"]);
    for address in ["10.101.0.1/32", "10.101.0.9/32"] {
        node.ip(&format!("addr add {address} dev lo"));
    }
    member.ip("route add 10.101.0.0/16 via 10.243.0.2");
    node.nft(
        "table inet counted { chain input { type filter hook input priority filter + 10;
            ip daddr 10.101.0.1 udp dport 9 counter
            ip daddr 10.101.0.9 udp dport 9 counter
        }
        }",
    );
    let counted = || -> Vec<u64> {
        let text = node.run("nft", &["-j", "list", "chain", "inet", "counted", "input"]);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let rules = json["nftables"].as_array().unwrap().iter();
        let statements = rules.filter_map(|object| object["rule"]["expr"].as_array()).flatten();
        statements
            .filter_map(|statement| statement["counter"]["packets"].as_u64())
            .collect()
    };
    let table = |sources: &[&str]| {
        let (sources, to) = (nets(sources), nets(&["10.101.0.0/16"]));
        firewall_that_denies(&sources, &to, &nets(&["10.101.0.9/32"]))
    };
    let with_member = table(&["10.243.0.0/16", "10.244.0.0/16"]);
    let without_member = table(&["10.244.0.0/16"]);
    inside(&node, async {
        let whole = with_slow_rules(update(None, &with_member).unwrap());
        run_update(&mut Nft::default(), &whole).await.unwrap()
    });

    std::thread::scope(|scope| {
        // The sending thread ends when `_running` is dropped, also after a panic.
        let (_running, ended) = mpsc::channel::<()>();
        let socket = member.enter(|| UdpSocket::bind("10.243.0.1:9")).unwrap();
        scope.spawn(move || {
            while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {
                for to in std::iter::once(OPEN).chain([DENIED; 50]) {
                    // If a queue is full, the kernel may return an error.
                    let _ = socket.send_to(b"?", to.parse::<SocketAddr>().unwrap());
                }
            }
        });
        inside(&node, async {
            let mut nft = Nft::default();
            for _ in 0..150 {
                for (old, new) in [
                    (None, &with_member),
                    (Some(&with_member), &without_member),
                    (Some(&without_member), &with_member),
                ] {
                    run_update(&mut nft, &with_slow_rules(update(old, new).unwrap()))
                        .await
                        .unwrap();
                }
            }
        });
    });
    let counted = counted();
    println!("{counted:?}");
    assert!(matches!(counted[..], [(1..), 0]), "open, denied: {counted:?}");
}

fn net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        (0u8..4, 0u8..8, 20u8..=32).prop_map(|(a, b, l)| IpNet::new(IpAddr::from([10, a, 0, b]), l).unwrap().trunc()),
        (0u16..2, 0u16..4, 110u8..=128).prop_map(|(a, b, l)| IpNet::new(
            IpAddr::from([0xfd00, a, 0, 0, 0, 0, 0, b]),
            l
        )
        .unwrap()
        .trunc()),
    ]
}

fn port() -> impl Strategy<Value = (Protocol, u16)> {
    (
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Sctp)],
        1u16..4,
    )
}

/// Both nft and the kernel check intervals for overlap. They must accept the update from any table to any other.
#[test]
fn kernel_accepts_any_update_between_two_tables() {
    let ns = NetNs::new("steps");
    let table = || {
        (
            proptest::collection::btree_set(net(), 0..6),
            proptest::collection::btree_set(net(), 0..6),
            proptest::collection::btree_set(port(), 0..3),
        )
            .prop_map(|(sources, to, ports)| firewall(&sources, &to, &ports))
    };
    let mut runner = TestRunner::new(Config {
        cases: 60,
        failure_persistence: None,
        ..Config::default()
    });
    let run = runner.run(&(table(), table()), |(a, b)| {
        inside(&ns, async {
            let mut nft = Nft::default();
            for step in [update(None, &a), update(Some(&a), &b)].iter().flatten() {
                run_update(&mut nft, step).await.map_err(TestCaseError::fail)?;
            }
            let stepped = nft.observe().await.unwrap();
            run_update(&mut nft, &update(None, &b).unwrap()).await.unwrap();
            prop_assert_eq!(stepped, nft.observe().await.unwrap());
            Ok(())
        })
    });
    run.unwrap();
}
