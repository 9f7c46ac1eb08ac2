//! Tests the TUN interface: the agent uses no interface of another program, and its own remains when the process exits without
//! `close`.

use clustermesh_tests::netns::{NetNs, unique_name, wait_until};
use wg_agent::device::{
    Configuration, DeviceError,
    userspace::{Userspace, remove_interface},
};

use super::{Node, Options, PORT, TIMEOUT, counters, node_pair, secret};

pub(super) fn open_refuses_foreign_interface_used_port_and_bad_name(options: Options) {
    let ns = NetNs::new("refused");
    let open = |interface: &str, port| {
        let configuration = Configuration {
            private_key: secret(1),
            listen_port: port,
            fwmark: 0,
            mtu: 1420,
        };
        ns.enter(|| Userspace::open_with(interface, &configuration, options))
            .map(drop)
    };
    let first = unique_name("wd");
    let configuration = Configuration {
        private_key: secret(1),
        listen_port: PORT,
        fwmark: 0,
        mtu: 1420,
    };
    let _device = ns
        .enter(|| Userspace::open_with(&first, &configuration, options))
        .expect("open a device");
    let busy = open(&first, 1).expect_err("the interface is open");
    assert!(matches!(&busy, DeviceError::Exists(name) if *name == first), "{busy}");
    ns.ip("link add veth0 type veth peer name veth1");
    ns.ip("tuntap add dev tun0 mode tun");
    for interface in ["veth0", "tun0"] {
        let error = open(interface, 1).expect_err("another program's interface");
        assert!(
            error
                .to_string()
                .starts_with(&format!("interface {interface} exists already")),
            "{error}"
        );
        ns.ip(&format!("link show {interface}"));
    }
    let other = unique_name("wd");
    let taken = open(&other, PORT).expect_err("the port is taken");
    assert!(matches!(taken, DeviceError::Listen { port: PORT, .. }), "{taken}");
    assert_eq!(
        ns.output("ip", &["link", "show", &other]).status.code(),
        Some(1),
        "an interface is left behind"
    );
    for name in ["", "much-too-long-name", "a/b", "with space"] {
        assert!(matches!(open(name, 1), Err(DeviceError::Name(_))), "{name:?}");
    }
}

pub(super) fn interface_remains_after_process_and_is_reused(options: Options) {
    let [mut a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
    a.ns.ip(&format!("route add 10.50.0.0/16 dev {}", a.interface));
    let shown = |a: &Node| {
        let link = a.ns.ip_json(&format!("link show {}", a.interface));
        let routes = a.ns.ip_json(&format!("route show dev {}", a.interface));
        let destinations: Vec<_> = routes
            .as_array()
            .expect("routes")
            .iter()
            .map(|route| route["dst"].clone())
            .collect();
        (link[0]["ifindex"].clone(), link[0]["ifalias"].clone(), destinations)
    };
    let before = shown(&a);
    assert_eq!(before.1, "clustermesh wg-agent");
    // The device is dropped without `close`, as if the process was killed.
    drop(a.device.take());
    assert_eq!(shown(&a), before);
    assert!(!a.reaches(2) && !a.ns.pings("10.50.0.1"), "no process forwards packets");
    a.ns.sh("nft 'add table inet t { chain out { type filter hook output priority 0; ip daddr 10.9.0.0/24 oifname eth0 counter; }; }'");
    assert!(!a.reaches(2));
    assert_eq!(counters(&a.ns), [0], "no packet leaves by another interface");
    let device =
        a.ns.enter(|| Userspace::open_with(&a.interface, &a.configuration, options));
    a.device = Some(Box::new(device.expect("reuse the interface")));
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping after the restart", TIMEOUT, || b.reaches(1));
    assert_eq!(shown(&a), before);
    // `remove_interface` removes the agent's interface, unless a process has it open.
    let in_use =
        a.ns.enter(|| remove_interface(&a.interface))
            .expect_err("the interface is in use");
    assert!(matches!(in_use, DeviceError::Exists(_)), "{in_use}");
    drop(a.device.take());
    assert!(a.ns.enter(|| remove_interface(&a.interface)).expect("removed"));
    assert_eq!(
        a.ns.output("ip", &["link", "show", &a.interface]).status.code(),
        Some(1)
    );
    // It removes no interface that another program created, even with the same name.
    a.ns.ip(&format!("tuntap add dev {} mode tun", a.interface));
    assert!(!a.ns.enter(|| remove_interface(&a.interface)).expect("not removed"));
}

pub(super) fn tunnel_works_despite_interface_of_older_version(options: Options) {
    let [mut a, b] = node_pair(options);
    drop(a.device.take());
    assert!(a.ns.enter(|| remove_interface(&a.interface)).expect("removed"));
    // An older version of the agent created the interface without the flags `multi_queue` and `vnet_hdr`. The kernel refuses to attach
    // with other flags, so the agent recreates the interface.
    a.ns.sh(&format!(
        "ip tuntap add dev {0} mode tun; ip link set {0} alias 'clustermesh wg-agent'",
        a.interface
    ));
    a.open();
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping", TIMEOUT, || b.reaches(1));
}
