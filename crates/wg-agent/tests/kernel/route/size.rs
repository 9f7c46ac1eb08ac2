//! Tests routing tables with many routes of the agent and of other programs.

use super::*;

/// Runs `ip -batch` with these lines.
fn batch(ns: &NetNs, lines: impl Iterator<Item = String>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for line in lines {
        std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes()).unwrap();
    }
    ns.run("ip", &["-batch", file.path().to_str().unwrap()]);
}

#[test]
fn thirty_thousand_foreign_routes_hide_no_event() {
    let ns = node("bgp");
    converge_fully(&ns, &desired(&plan()));
    ns.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let mut watch = runtime.block_on(async { Watch::open("kilo0".parse().unwrap()).unwrap() });
        let mut next_event = |timeout| {
            runtime.block_on(async {
                let next = tokio::time::timeout(Duration::from_millis(timeout), watch.changed());
                next.await.ok().map(Result::unwrap)
            })
        };
        while next_event(300).is_some() {} // events of the new device
        let route = |n: u32| std::net::Ipv4Addr::from(0x0b00_0000 + (n << 8));
        // More events than fit into the socket's buffer, in two tables. The socket's filter drops all of them.
        batch(
            &ns,
            (0..30_000).map(|n| format!("route add {}/24 dev eth0 proto bgp", route(n))),
        );
        batch(
            &ns,
            (0..1000).map(|n| format!("route add {}/24 dev eth0 table 99 proto bgp", route(n))),
        );
        assert_eq!(next_event(300), None);
        ns.ip("route add default via 10.101.0.9 dev eth0 proto bgp");
        assert_eq!(next_event(60_000), Some(RoutingEvent::Underlay));
        ns.ip("route flush table 5182");
        assert_eq!(next_event(60_000), Some(RoutingEvent::Ours));
    });
}

/// The output of `ip monitor route` while `act` runs.
fn monitor_routes(ns: &NetNs, act: impl FnOnce()) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = std::process::Command::new("ip");
    command.args(["-4", "monitor", "route"]).stdout(file.reopen().unwrap());
    let _monitor = ns.spawn_command(&mut command);
    let output = || std::fs::read_to_string(file.path()).unwrap();
    // When `ip monitor` reports this route, it receives all later events.
    wait_for("ip monitor to listen", Duration::from_secs(60), || {
        ns.ip("route replace 192.0.2.1 dev eth0");
        ns.ip("route del 192.0.2.1 dev eth0");
        output().contains("192.0.2.1").then_some(())
    });
    act();
    ns.ip("route add 192.0.2.2 dev eth0");
    ns.ip("route del 192.0.2.2 dev eth0");
    wait_for("the last event", Duration::from_secs(60), || {
        output().contains("Deleted 192.0.2.2").then_some(())
    });
    output()
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
fn only_changed_routes_of_ten_thousand_are_written() {
    let ns = node("many");
    let net = |n: u32| ipnet::Ipv4Net::new((0x0a80_0000 + (n << 8)).into(), 24).unwrap();
    let peers = |count: u32| (0..count).map(|n| net(n).into()).collect();
    let all = Plan {
        peers: peers(10_000),
        mesh: ["10.128.0.0/9".parse().unwrap()].into(),
        ..Plan::default()
    };
    let first = pass(&ns, &desired(&all));
    // The Peers' routes, the `unreachable` route, the default route of the tunnel's table, and two rules.
    assert_eq!((first.done.len(), first.failed.len()), (10_000 + 1 + 1 + 2, 0));
    let shown = ns.sh("ip -4 route show table 5182 | grep -c kilo0");
    assert_eq!(shown.trim(), "10000");
    let one_less = Plan {
        peers: peers(9_999),
        ..all.clone()
    };
    let smaller_mtu = Plan {
        mtus: [(net(7).into(), 1328)].into(),
        ..one_less.clone()
    };
    let removed = net(9_999);
    assert_eq!(
        monitor_routes(&ns, || assert_eq!(pass(&ns, &desired(&one_less)).done.len(), 1)),
        [format!(
            "Deleted {removed} dev kilo0 table 5182 proto 117 scope link metric 20"
        )]
    );
    assert_eq!(
        monitor_routes(&ns, || assert_eq!(pass(&ns, &desired(&one_less)).done.len(), 0)),
        [""; 0]
    );
    // The Peer's route, and the default route of the tunnel's table: this route may lead to any Peer, so it has the smallest MTU.
    let replaced = monitor_routes(&ns, || assert_eq!(pass(&ns, &desired(&smaller_mtu)).done.len(), 2));
    assert_eq!(replaced.len(), 2, "{replaced:?}");
    ns.ip(&format!("route del {} table 5182 metric 20", net(1234)));
    assert_eq!(
        monitor_routes(&ns, || assert_eq!(pass(&ns, &desired(&smaller_mtu)).done.len(), 1)),
        [format!(
            "{} dev kilo0 table 5182 proto 117 scope link metric 20",
            net(1234)
        )]
    );
}
