//! Restarts and upgrades real agents, changes their backend and rotates a key. A capture on the link checks that no packet
//! leaves unencrypted.

use std::{fs, path::Path};

use clustermesh_api::names::KILO_KEY;
use clustermesh_tests::{
    agent::agent_program,
    netns::wait_for,
    pair::{Flow, Site, TIMEOUT, UNENCRYPTED, api::PEERS, exchange_peers, start_nodes},
    path::Capture,
    sessions::check_session_kept,
};
use nix::sys::signal::Signal;

use crate::virtual_machine::run_in_machine;

/// Runs `action` while the pods send each other 20 packets a second. Returns the longest run of lost packets in each direction, and
/// the result of `action`.
fn longest_gaps_during<T>(sites: &[Site; 2], action: impl FnOnce() -> T) -> ([u32; 2], T) {
    let [a, b] = sites;
    let [to_a, to_b] = [a, b].map(|site| site.pod_ips()[0].clone());
    let flows = [Flow::start(&a.pod, &to_b), Flow::start(&b.pod, &to_a)];
    flows.iter().for_each(|flow| flow.wait_for_replies(10));
    let result = action();
    flows.iter().for_each(|flow| flow.wait_for_replies(10));
    let gaps = flows.map(|flow| {
        let (gap, answered) = flow.end();
        assert!(answered >= 20);
        gap
    });
    (gaps, result)
}

/// Checks the kind of the site's interface and returns its index.
fn check_kind_and_get_index(site: &Site, kind: &str) -> u64 {
    let link = site.ns.ip_json(&format!("-d link show {}", site.interface));
    assert_eq!(link[0]["linkinfo"]["info_kind"], kind);
    link[0]["ifindex"].as_u64().expect("a number")
}

#[test]
fn kernel_tunnel_survives_restart_upgrade_and_key_rotation() {
    run_in_machine!();
    let sites = start_nodes();
    let [a, b] = &sites;
    let before = a.kernel_state();
    let agent = a.agent("kernel");
    let other = b.agent("auto");
    exchange_peers(&sites);
    a.wait_until_reaches(b);
    b.wait_until_reaches(a);
    a.wait_until_ready();
    b.wait_until_ready();
    let capture = Capture::start(&a.ns, "eth0", UNENCRYPTED);
    let (index, handshake) = (check_kind_and_get_index(a, "wireguard"), a.wg_show("latest-handshakes"));

    let newer = a.file("wg-agent");
    fs::copy(agent_program(), &newer).expect("copy the program");
    let (gaps, agent) = longest_gaps_during(&sites, || {
        let restarted = [Signal::SIGKILL, Signal::SIGTERM]
            .into_iter()
            .fold(agent, |agent, signal| {
                agent.end(signal);
                let agent = a.agent("auto");
                a.wait_until_ready();
                agent
            });
        restarted.end(Signal::SIGTERM);
        let agent = a.agent_from(&newer, "kernel");
        a.wait_until_ready();
        agent
    });
    assert_eq!(gaps, [0, 0], "killed, stopped, upgraded");
    assert!(!agent.log().contains("firewall table written"), "{}", agent.log());
    assert_eq!(check_kind_and_get_index(a, "wireguard"), index);
    check_session_kept(&handshake, &a.wg_show("latest-handshakes"));
    assert_eq!(a.repairs(), [].into());

    // The other node's agent gets the new key during the flows.
    let old = a.annotations()[KILO_KEY].clone();
    a.run_command("rotate-key");
    let new = wait_for("another key on the Node", TIMEOUT, || {
        Some(a.annotations()[KILO_KEY].clone()).filter(|key| *key != old)
    });
    let ends = ["172.30.1.11", "172.30.2.11"];
    // Handshake initiations have 148 bytes, and the UDP header.
    let initiations = Capture::start(&a.ns, "eth0", "udp port 51820 and udp[4:2] = 156");
    let (gaps, _) = longest_gaps_during(&sites, || {
        b.api.put(PEERS, a.as_peer());
        wait_for("a handshake with the new key", TIMEOUT, || {
            b.wg_show("latest-handshakes")
                .get(&new)
                .filter(|at| *at != "0")
                .cloned()
        })
    });
    println!("longest runs of lost packets after a new key, of 20 a second: {gaps:?}");
    // The first initiation for the new key makes the node use this key, but gets no response. Then this node starts a handshake. Otherwise
    // the traffic would stop until the other node repeats its initiation, after 5 s.
    let initiations = initiations.finish(&a.ns, ends[0], ends[1]);
    let is_from = |line: &String, end: &str| line.contains(&format!("{end}.51820 > "));
    let mut after_first = initiations.iter().skip_while(|line| !is_from(line, ends[1]));
    assert!(after_first.any(|line| is_from(line, ends[0])), "{initiations:?}");
    assert_eq!(b.wg_show("latest-handshakes").keys().collect::<Vec<_>>(), [&new]);
    a.wait_until_ready();
    assert_eq!(check_kind_and_get_index(a, "wireguard"), index);

    // Both agents stop, and one node is cleaned up.
    other.end(Signal::SIGTERM);
    agent.end(Signal::SIGTERM);
    a.run_command("cleanup");
    assert_eq!(a.kernel_state(), before);
    assert_eq!(capture.finish(&a.ns, ends[0], ends[1]), Vec::<String>::new());
    // Control: after the cleanup, a capture with the same filter shows an unencrypted packet.
    let capture = Capture::start(&a.ns, "eth0", UNENCRYPTED);
    a.pod.output("ping", &["-n", "-c1", "-W1", &b.pod_ips()[0]]);
    let seen = capture.finish(&a.ns, ends[0], ends[1]);
    assert!(
        seen.iter()
            .any(|line| line.contains("10.10.1.9 > 10.20.1.9: ICMP echo request")),
        "{seen:?}"
    );
}

#[test]
fn backend_change_at_restart_leaves_nothing_behind() {
    run_in_machine!();
    let sites = start_nodes();
    let [a, b] = &sites;
    let before = a.kernel_state();
    let _other = b.agent("kernel");
    let mut agent = a.agent("kernel");
    exchange_peers(&sites);
    a.wait_until_reaches(b);
    a.wait_until_ready();
    let capture = Capture::start(&a.ns, "eth0", UNENCRYPTED);
    let routed = || a.ns.ip_json("route show table 5182");
    let (first, socket) = (routed(), format!("/var/run/wireguard/{}.sock", a.interface));
    for (backend, kind) in [("userspace", "tun"), ("auto", "wireguard")] {
        agent.end(Signal::SIGTERM);
        agent = a.agent(backend);
        // A switch to the kernel takes up to 27 s: see backend_switch_leaves_nothing_of_old_device in `device`.
        a.wait_until_reaches(b);
        b.wait_until_reaches(a);
        a.wait_until_ready();
        check_kind_and_get_index(a, kind);
        let names: Vec<String> = links(a);
        assert_eq!(names, ["cni0", "eth0", &a.interface, "lo"]);
        assert_eq!(Path::new(&socket).exists(), kind == "tun", "{backend}");
        assert_eq!(routed(), first);
        let annotation = a.annotations()["kilo-clustermesh.io/agent"].clone();
        assert!(
            annotation.contains(if kind == "tun" { "\"userspace\"" } else { "\"kernel\"" }),
            "{annotation}"
        );
    }
    agent.end(Signal::SIGTERM);
    a.run_command("cleanup");
    assert_eq!(a.kernel_state(), before);
    assert_eq!(
        capture.finish(&a.ns, "172.30.1.11", "172.30.2.11"),
        Vec::<String>::new()
    );
}

fn links(site: &Site) -> Vec<String> {
    let links = site.ns.ip_json("link show");
    let names = links.as_array().expect("a list").iter();
    let mut names: Vec<String> = names
        .map(|link| link["ifname"].as_str().expect("a name").to_owned())
        .collect();
    names.sort();
    names
}
