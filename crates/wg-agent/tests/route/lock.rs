//! Routes and rules that keep a sandbox closed, and what the kernel makes of them.

use clustermesh_agent_core::{
    policy::{Port, Protocol},
    routes::{Answer, Rule},
};

use super::super::*;

const SANDBOXES: [&str; 2] = ["100.66.1.0/24", "fd00:66:1::/64"];

/// The node's own address, in which the underlay lies inside the mesh: its fallback routes must not lead to a sandbox.
fn served() -> Plan {
    let answers = ["10.101.0.200", "fd00:101::200"].into_iter().zip(SANDBOXES);
    let answer = |(from, to): (&str, &str)| {
        [(Protocol::Udp, 53), (Protocol::Tcp, 80)].map(|(protocol, port)| Answer {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            port: Port { protocol, port },
        })
    };
    Plan {
        sandboxes: SANDBOXES.map(|net| net.parse().unwrap()).into(),
        answers: answers.flat_map(answer).collect(),
        ..plan()
    }
}

/// A rule of ours as `ip` takes it, behind `ip` and the verb.
fn as_ip(verb: &str, rule: &str) -> String {
    let rule = rule.replace("<device>", "kilo0");
    match rule.strip_prefix("-6 ") {
        Some(rule) => format!("-6 rule {verb} {rule}"),
        None => format!("rule {verb} {rule}"),
    }
}

#[test]
fn a_sandboxs_rules_come_and_go_with_it_and_drift_of_each_is_repaired() {
    let ns = node("lock");
    settle(&ns, &desired(&plan()));
    let without = ns.sh("ip rule; ip -6 rule");
    let wanted = desired(&served());
    settle(&ns, &wanted);
    assert_eq!(
        rules(&ns, "-4")[..3],
        [
            r#"{"dst":"100.66.1.0","dstlen":24,"iif":"lo","ipproto":"udp","priority":997,"protocol":"117","sport":53,"src":"10.101.0.200","table":"5183"}"#,
            r#"{"dst":"100.66.1.0","dstlen":24,"fwmark":"0x300000","fwmask":"0x300f00","iif":"lo","ipproto":"tcp","priority":997,"protocol":"117","sport":80,"src":"10.101.0.200","table":"5183"}"#,
            r#"{"dst":"100.66.1.0","dstlen":24,"fwmark":"0x300000","fwmask":"0x300f00","priority":999,"protocol":"117","src":"all","table":"5183"}"#,
        ]
    );
    let closed = ns.sh("for pref in 996 998; do ip rule show pref $pref; ip -6 rule show pref $pref; done");
    assert_eq!(
        closed.lines().map(str::trim_end).collect::<Vec<_>>(),
        [
            "996:\tfrom 100.66.1.0/24 fwmark 0/0x300000 iif kilo0 blackhole proto 117",
            "996:\tfrom fd00:66:1::/64 fwmark 0/0x300000 iif kilo0 blackhole proto 117",
            "998:\tfrom all to 100.66.1.0/24 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole proto 117",
            "998:\tfrom all to fd00:66:1::/64 fwmark 0x300000/0x300f00 iif lo ipproto tcp blackhole proto 117",
        ]
    );
    let locks: Vec<String> = wanted
        .rules
        .iter()
        .filter(|rule| rule.of_sandbox())
        .map(Rule::to_string)
        .collect();
    assert_eq!(locks.len(), 10);
    for rule in &locks {
        ns.ip(&as_ip("del", rule));
        assert_eq!(settle(&ns, &wanted), [format!("rule add {rule}")]);
    }
    // Another's hand, or an earlier process: a grant that is gone, and a device that had another name.
    for stray in [
        "pref 997 from 10.101.0.200/32 to 100.66.1.0/24 iif lo ipproto udp sport 54 lookup 5183",
        "-6 pref 996 from fd00:66:1::/64 fwmark 0x0/0x300000 iif wg9 blackhole",
    ] {
        ns.ip(&format!("{} protocol 117", as_ip("add", stray)));
        assert_eq!(settle(&ns, &wanted), [format!("rule delete {stray}")]);
    }
    // The device comes back with another index, and its rule with it.
    ns.ip("link del kilo0");
    ns.ip("tuntap add dev kilo0 mode tun");
    settle(&ns, &wanted);
    assert_eq!(ns.sh("ip rule show pref 996 | grep -c detached || true"), "0\n");
    settle(&ns, &desired(&plan()));
    assert_eq!(
        ns.sh("ip rule; ip -6 rule"),
        without,
        "with the last sandbox its rules go"
    );
    settle(&ns, &wanted);
    let left = inside(&ns, async {
        let mut kernel = Netlink::open("kilo0".parse().unwrap()).unwrap();
        cleanup(&mut kernel).await
    });
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(ns.sh("ip rule; ip -6 rule").matches("proto 117").count(), 0);
}

#[test]
fn the_kernel_leads_to_a_sandbox_what_the_table_marked_and_what_is_answered_from_a_granted_port() {
    let ns = node("way");
    // As a version had it that knew no lock: the sandbox's way lay among the mesh's.
    let open = plan();
    settle(&ns, &desired(&open));
    for (family, to, from) in [
        ("-4", "100.66.1.1", "10.101.0.200"),
        ("-6", "fd00:66:1::1", "fd00:101::200"),
    ] {
        let way = |more: &str| {
            let line = format!("{family} route get {to} {more}");
            let output = ns.output("ip", &line.split_whitespace().collect::<Vec<_>>());
            String::from_utf8_lossy(&output.stdout).contains("dev kilo0")
        };
        assert!(way(""));
        settle(&ns, &desired(&served()));
        let ways = [
            ("", false),
            ("mark 0x100000", false),
            ("mark 0x300000", true),
            ("mark 0x300400", false),
            (&format!("from {from}"), false),
            (&format!("from {from} ipproto udp sport 53"), true),
            (&format!("from {from} ipproto udp sport 54"), false),
            (&format!("from {from} ipproto tcp sport 80"), false),
            (&format!("from {from} ipproto tcp sport 80 mark 0x300000"), true),
            (&format!("from {from} ipproto tcp sport 53 mark 0x300000"), false),
            (&format!("from {from} ipproto udp sport 54 mark 0x300000"), true),
        ];
        for (more, leads) in ways {
            assert_eq!(way(more), leads, "{family} {more}");
        }
        settle(&ns, &desired(&open));
    }
}
