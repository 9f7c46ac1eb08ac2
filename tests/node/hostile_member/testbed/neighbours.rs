//! Sets up two machines around the target node that belong to no mesh. One is a neighbour on a local network, and also has
//! a cloud's metadata addresses. The other is a container on the bridge of another container runtime.

use clustermesh_tests::{attacker::echo, netns::NetNs};

use super::{TCP_PORT, UDP_PORT, ip};

/// The addresses (IPv4, IPv6) of a neighbour on the node's local network.
pub(super) const NEIGHBOUR: [&str; 2] = ["192.168.77.5", "fd00:77::5"];
/// The node's addresses on that network.
pub(super) const NODE_ON_LAN: [&str; 2] = ["192.168.77.1", "fd00:77::1"];
/// The metadata addresses at which clouds serve credentials of the node. The IPv4 address is link-local, the IPv6
/// address (of AWS) is not.
pub(super) const METADATA: [&str; 2] = ["169.254.169.254", "fd00:ec2::254"];
/// A container on another bridge of the node.
pub(super) const CONTAINER: [&str; 2] = ["172.17.0.2", "fd00:17::2"];
/// The node's addresses on that bridge.
pub(super) const BRIDGE: [&str; 2] = ["172.17.0.1", "fd00:17::1"];
/// A Service of the target with a manual endpoint outside the cluster: the neighbour.
pub(super) const EXTERNAL_SERVICE: [&str; 2] = ["10.10.96.11", "fd00:10:96::b"];

/// The network namespaces of the machines.
pub(crate) struct Surroundings {
    /// The neighbour, which also has the metadata addresses.
    pub(crate) neighbour: NetNs,
    pub(crate) container: NetNs,
}

impl Surroundings {
    /// Each machine echoes what arrives at [`UDP_PORT`] and [`TCP_PORT`] of its addresses, and routes its replies through the node.
    pub(super) fn new(node: &NetNs) -> Self {
        let [neighbour, container] = ["the node's neighbour", "a container"].map(NetNs::new);
        node.ip("link add docker0 type bridge mcast_snooping 0");
        for (link, machine, addresses, node_addresses) in [
            ("lan0", &neighbour, &[NEIGHBOUR, METADATA][..], NODE_ON_LAN),
            ("docker1", &container, &[CONTAINER], BRIDGE),
        ] {
            for which in ["all", "default"] {
                machine.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
            }
            node.ip(&format!(
                "link add {link} type veth peer name eth0 netns {}",
                machine.path()
            ));
            let device = if link == "docker1" { "docker0" } else { link };
            if device != link {
                node.ip(&format!("link set {link} master {device}"));
            }
            let [v4, v6] = node_addresses;
            node.ip(&format!("link set {device} up"));
            node.ip(&format!("link set {link} up"));
            node.ip(&format!("addr add {v4}/24 dev {device}"));
            node.ip(&format!("addr add {v6}/64 dev {device} nodad"));
            machine.ip("link set eth0 up");
            for [v4, v6] in addresses {
                machine.ip(&format!("addr add {v4}/24 dev eth0"));
                machine.ip(&format!("addr add {v6}/64 dev eth0 nodad"));
            }
            machine.ip(&format!("route add default via {v4}"));
            machine.ip(&format!("-6 route add default via {v6}"));
            for address in addresses.iter().flatten() {
                echo(machine, ip(address), UDP_PORT, TCP_PORT);
            }
        }
        let [v4, v6] = METADATA;
        node.ip(&format!("route add {v4} dev lan0"));
        node.ip(&format!("-6 route add {v6} dev lan0"));
        // kube-proxy in iptables mode sets this sysctl. So the firewall, not the kernel default, must protect the
        // loopback addresses.
        node.set_sysctl("net/ipv4/conf/all/route_localnet", "1");
        // Some SYNs arrive while the agent's nftables table is deleted. If the node retransmitted its SYN-ACKs, it would answer
        // these SYNs for up to a minute, even after the agent has restored the table.
        node.set_sysctl("net/ipv4/tcp_synack_retries", "0");
        Self { neighbour, container }
    }
}

/// DNAT rules for [`EXTERNAL_SERVICE`], as kube-proxy would write them.
pub(super) fn external_service() -> String {
    let ([vip, vip6], [to, to6]) = (EXTERNAL_SERVICE, NEIGHBOUR);
    format!(
        "ip daddr {vip} tcp dport 80 dnat ip to {to}:{TCP_PORT}
         ip6 daddr {vip6} tcp dport 80 dnat ip6 to [{to6}]:{TCP_PORT}"
    )
}
