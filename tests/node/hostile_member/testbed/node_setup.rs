//! Prepares the target node before its agent starts.

use clustermesh_tests::{
    attacker::{
        echo,
        witness::{CountingPoint, rules},
    },
    netns::NetNs,
};

use super::{ALLOWED_POD, DB, NODE_ON_POD_LINKS, TCP_PORT, UDP_PORT, VIP, ip, neighbours};

/// The nftables tables of the target node besides the agent's table: one that counts packets
/// (see [`clustermesh_tests::attacker::witness`]), and one with DNAT rules like kube-proxy's.
pub(super) fn tables(interface: &str) -> String {
    let [db, db6] = DB;
    let [vip, vip6] = VIP;
    format!(
        "{}
        table inet services {{
            chain pre {{
                type nat hook prerouting priority dstnat; policy accept;
                ip daddr {vip} tcp dport 80 dnat ip to {db}:{TCP_PORT}
                ip6 daddr {vip6} tcp dport 80 dnat ip6 to [{db6}]:{TCP_PORT}
                ip daddr 172.30.1.11 tcp dport 30080 dnat ip to {db}:{TCP_PORT}
                {}
            }}
        }}
        ",
        rules(CountingPoint::AfterFilters, interface),
        neighbours::external_service(),
    )
}

/// Sets up the target node and its dual-stack pods, each on its own link. With the IPv6 default route, IPv6 packets can also
/// leave the node outside the tunnel.
pub(super) fn set_up_node(node: &NetNs, pods: &[NetNs; 2]) {
    node.sh("
        for f in all default; do echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; done
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
        # The kernel limits ICMP errors to one a second for a destination, which would hide most of them.
        echo 0 > /proc/sys/net/ipv4/icmp_ratelimit
        echo 0 > /proc/sys/net/ipv6/icmp/ratelimit
        ip addr add fd00:30::1:11/64 dev eth0 nodad
        ip -6 route add default via fd00:30::1 dev eth0
        ip -6 neigh add fd00:30::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent");
    let [node4, node6] = NODE_ON_POD_LINKS;
    for (number, (pod, addresses)) in pods.iter().zip([DB, ALLOWED_POD]).enumerate() {
        let link = format!("cni{number}");
        for which in ["all", "default"] {
            pod.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
        }
        // The attacker floods the pod with SYNs and does not answer its SYN-ACKs. With the default of five retransmissions,
        // half-open connections would fill the pod's queue for a minute.
        pod.set_sysctl("net/ipv4/tcp_synack_retries", "1");
        node.ip(&format!(
            "link add {link} type veth peer name eth0 netns {}",
            pod.path()
        ));
        node.ip(&format!("addr add {node4}/32 dev {link}"));
        node.ip(&format!("addr add {node6}/128 dev {link} nodad"));
        node.ip(&format!("link set {link} up"));
        pod.ip("link set eth0 up");
        let [v4, v6] = addresses;
        pod.ip(&format!("addr add {v4}/32 dev eth0"));
        pod.ip(&format!("addr add {v6}/128 dev eth0 nodad"));
        node.ip(&format!("route add {v4} dev {link}"));
        node.ip(&format!("-6 route add {v6} dev {link}"));
        pod.ip(&format!("route add {node4} dev eth0"));
        pod.ip(&format!("route add default via {node4} src {v4}"));
        pod.ip(&format!("-6 route add {node6} dev eth0"));
        pod.ip(&format!("-6 route add default via {node6}"));
        for address in addresses {
            echo(pod, ip(address), UDP_PORT, TCP_PORT);
        }
    }
}
