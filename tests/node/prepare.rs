//! Runs `wg-agent prepare` in a network namespace, as the DaemonSet's init container does on a node.

use clustermesh_tests::{agent::agent_program, netns::NetNs};

#[test]
fn prepare_reserves_the_port_and_sets_sysctls_except_ipv6_forwarding() {
    let ns = NetNs::new("node");
    let keys = [
        "ipv4/ip_forward",
        "ipv4/tcp_fwmark_accept",
        "ipv4/fwmark_reflect",
        "ipv6/fwmark_reflect",
        "ipv6/conf/all/forwarding",
    ];
    let values = || keys.map(|key| ns.sysctl(&format!("net/{key}")));
    for key in keys {
        ns.set_sysctl(&format!("net/{key}"), "0");
    }
    ns.run(agent_program(), &["prepare"]);
    assert_eq!(values(), ["1", "1", "1", "1", "0"]);
    // The port is added once to the ports that are already reserved.
    let reserved = "net/ipv4/ip_local_reserved_ports";
    assert_eq!(ns.sysctl(reserved), "51820");
    ns.set_sysctl(reserved, "8080");
    for _ in 0..2 {
        ns.run(agent_program(), &["prepare", "--port=51821"]);
        assert_eq!(ns.sysctl(reserved), "8080,51821");
    }
}
