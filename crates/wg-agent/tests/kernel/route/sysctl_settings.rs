//! Tests the sysctls that the agent writes and those that it can only report, and routes on a device without IPv6.

use super::*;

#[test]
fn sysctls_are_written_or_reported_with_a_remedy() {
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
fn forwarding_of_an_interface_is_set_although_all_is_1() {
    let ns = node("forwarding");
    ns.set_sysctl("net/ipv4/conf/all/forwarding", "1");
    ns.set_sysctl("net/ipv4/conf/eth0/forwarding", "0");
    let wanted = [Sysctl {
        name: Name::Interface("eth0".parse().unwrap(), "forwarding"),
        value: 1,
        accept: [1].into(),
        write: true,
        why: "a gateway forwards packets",
    }];
    let missing = inside(&ns, async { wg_agent::route::sysctl::ensure(&wanted).await });
    assert!(missing.is_empty(), "{missing:?}");
    assert_eq!(ns.sysctl("net/ipv4/conf/eth0/forwarding"), "1");
}

#[test]
fn interface_sysctls_are_set_over_netlink_on_read_only_proc() {
    let ns = node("readonly");
    ns.set_sysctl("net/ipv4/conf/all/rp_filter", "1");
    ns.set_sysctl("net/ipv4/tcp_fwmark_accept", "0");
    let wanted = sysctl::desired(&"kilo0".parse().unwrap(), &"eth0".parse().unwrap(), &Routes::default());
    let wanted: Vec<Sysctl> = wanted.into_iter().filter(|s| s.write).collect();
    let missing: Vec<String> = ns.enter(|| {
        // This thread gets its own mount namespace, in which /proc/sys is read-only as in a container.
        use nix::{
            mount::{MsFlags, mount},
            sched::{CloneFlags, unshare},
        };
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let mount_proc_sys = |flags| mount(Some("/proc/sys"), "/proc/sys", None::<&str>, flags, None::<&str>).unwrap();
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_PRIVATE | MsFlags::MS_REC,
            None::<&str>,
        )
        .unwrap();
        mount_proc_sys(MsFlags::MS_BIND);
        mount_proc_sys(MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY);
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
            "net.ipv4.tcp_fwmark_accept is 0: replies to a connection from a mesh source that came by the underlay must leave by the underlay; writing it failed: Read-only file system (os error 30); set it on the host or in the DaemonSet's init container: sysctl -w net.ipv4.tcp_fwmark_accept=1",
            "net.ipv4.fwmark_reflect is 0: resets and ICMP errors must leave by the path by which their packet came; writing it failed: Read-only file system (os error 30); set it on the host or in the DaemonSet's init container: sysctl -w net.ipv4.fwmark_reflect=1",
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
fn device_without_ipv6_gets_its_ipv4_routes() {
    let ns = node("no6");
    ns.set_sysctl("net/ipv6/conf/kilo0/disable_ipv6", "1");
    let got = pass(&ns, &desired(&plan()));
    assert!(!got.failed.is_empty(), "IPv6 routes and addresses cannot be written");
    assert!(
        got.failed
            .iter()
            .all(|e| e.to_string().contains("fd00:") || e.to_string().contains("::/0")),
        "{:?}",
        got.failed
    );
    // All IPv4 routes of the plan, in the agent's table.
    assert_eq!(table(&ns, "-4", 5182).len(), 7);
    wait_until("the addresses", Duration::from_secs(60), || {
        ns.sh("ip -4 -o addr show dev kilo0").contains("100.66.9.1")
    });
    // Reading the state back does not fail.
    let _ = inside(&ns, async {
        Netlink::open("kilo0".parse().unwrap())
            .unwrap()
            .observe()
            .await
            .unwrap()
    });
}
