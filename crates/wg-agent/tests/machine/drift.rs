//! Checks repairs of the kernel's WireGuard device: when `wg set` and `ip link set` change it, the agent must restore and
//! count each changed part. Also checks the size of the conntrack table that `prepare` sets.

use std::collections::BTreeMap;

use clustermesh_tests::{
    netns::wait_until,
    pair::{Agent, Site, TIMEOUT, exchange_peers, start_nodes},
};
use nix::sys::signal::Signal;

use crate::virtual_machine::run_in_machine;

/// The configuration of a device: the sorted words of `wg showconf`, then MTU and flags of the link.
fn device_config(site: &Site) -> Vec<String> {
    let text = site.ns.run("wg", &["showconf", &site.interface]);
    let mut words: Vec<String> = text.split([' ', ',', '\n']).map(str::to_owned).collect();
    words.sort();
    let link = &site.ns.ip_json(&format!("link show {}", site.interface))[0];
    words.push(format!("{} {}", link["mtu"], link["flags"]));
    words
}

/// Repairs by kind since `before`.
fn repairs_since(site: &Site, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let now = site.repairs();
    let more = now.into_iter().map(|(kind, count)| {
        let known = before.get(&kind).copied().unwrap_or(0);
        (kind, count - known)
    });
    more.filter(|(_, count)| *count > 0).collect()
}

/// Runs the command `damage` and waits until device and routes are restored. The agent must count the repairs `want`.
fn check_repair(sites: &[Site; 2], agent: &Agent, damage: &str, want: &[(&str, u64)]) {
    let [a, _] = sites;
    // The routes to the peers are in the routing table 5182.
    let routes = || {
        (
            a.ns.ip_json("route show table 5182"),
            a.ns.ip_json("-6 route show table 5182"),
        )
    };
    let (config, routes_before, repairs_before) = (device_config(a), routes(), a.repairs());
    let start = std::time::Instant::now();
    a.ns.sh(&damage.replace("DEV", &a.interface));
    wait_until(&format!("{damage} to be repaired"), TIMEOUT, || {
        device_config(a) == config && routes() == routes_before
    });
    println!("{:.1} s: {damage}", start.elapsed().as_secs_f64());
    // The agent updates the metric after the repair.
    let want: BTreeMap<String, u64> = want.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect();
    wait_until(
        &format!("{want:?} to be counted for {damage}, {}", agent.log()),
        TIMEOUT,
        || repairs_since(a, &repairs_before) == want,
    );
}

#[test]
fn changed_kernel_device_is_restored_and_counted_by_kind() {
    run_in_machine!();
    let sites = start_nodes();
    let [a, b] = &sites;
    let agent = a.agent("kernel");
    let _other = b.agent("kernel");
    exchange_peers(&sites);
    a.wait_until_reaches(b);
    a.wait_until_ready();
    assert_eq!(a.repairs(), [].into());
    let peer = a.wg_show("latest-handshakes").into_keys().next().expect("a peer");
    let other_key = a.file("other-key");
    let other_key = other_key.display();
    a.ns.sh(&format!("wg genkey > {other_key}"));

    check_repair(&sites, &agent, "ip link set DEV mtu 1300", &[("mtu", 1)]);
    check_repair(
        &sites,
        &agent,
        &format!("wg set DEV listen-port 5555 fwmark 7 private-key {other_key}"),
        &[("listen_port", 1), ("fwmark", 1), ("private_key", 1)],
    );
    b.wait_until_reaches(a);
    check_repair(
        &sites,
        &agent,
        &format!("wg set DEV peer {peer} remove peer $(wg pubkey < {other_key}) allowed-ips 10.99.0.0/16"),
        &[("peers", 2)],
    );
    check_repair(
        &sites,
        &agent,
        &format!("wg set DEV peer {peer} persistent-keepalive 7 allowed-ips 10.99.0.0/16"),
        &[("peers", 1)],
    );
    b.wait_until_reaches(a);
    a.wait_until_reaches(b);

    // Not `check_repair`: a link that is down also loses its routes, and their repairs can be counted too.
    let before = a.repairs();
    let (config, start) = (device_config(a), std::time::Instant::now());
    a.ns.ip(&format!("link set {} down", a.interface));
    wait_until("the link to be up", TIMEOUT, || device_config(a) == config);
    println!("{:.1} s: link down", start.elapsed().as_secs_f64());
    a.wait_until_reaches(b);
    b.wait_until_reaches(a);
    wait_until("the repair to be counted", TIMEOUT, || {
        repairs_since(a, &before).get("link_down") == Some(&1)
    });
    agent.end(Signal::SIGTERM);
}

// threat: conntrack-exhaustion
#[test]
fn conntrack_table_is_raised_and_never_lowered() {
    run_in_machine!();
    let file = |name: &str| format!("/proc/sys/net/netfilter/nf_conntrack_{name}");
    let limits = || ["max", "buckets"].map(|name| std::fs::read_to_string(file(name)).unwrap().trim().to_owned());
    let set = |name: &str, value: &str| std::fs::write(file(name), value).unwrap();
    let prepare = |words: &[&str]| {
        let done = std::process::Command::new(clustermesh_tests::agent::agent_program())
            .arg("prepare")
            .args(words)
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    set("buckets", "4096");
    set("max", "5000");
    prepare(&["--conntrack-min=0"]);
    assert_eq!(limits(), ["5000", "4096"]);
    prepare(&["--conntrack-min=32768"]);
    assert_eq!(limits(), ["32768", "8192"]);
    prepare(&[]);
    assert_eq!(limits(), ["262144", "65536"]);
    prepare(&["--conntrack-min=100000"]);
    assert_eq!(limits(), ["262144", "65536"]);
}
