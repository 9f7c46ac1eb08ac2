//! The addresses of the hub, a member and a worker in each IP version, so that the same tests run with IPv4 and IPv6.

/// The addresses of one family.
///
/// The nodes are `hub` and `hub2` in the hub, `member` in a second cluster, and `worker` in a third. Every node has one pod.
///
/// `*_pod` is the address of a node's pod, `*_pods` the pod CIDR of a node, `*_pod_net` the pod network of a cluster, and `*_bridge` the
/// address of a node on its pods' bridge.
pub struct Family {
    /// The IP version: 4 or 6.
    pub n: u8,
    /// The prefix length of a single address.
    pub host: u8,
    /// The length of IP and TCP headers in bytes.
    pub headers: u16,
    /// A suffix for `ip addr add`: no duplicate address detection.
    pub nodad: &'static str,
    /// The prefix length of pod CIDRs and of the underlay.
    pub length: u8,
    /// Underlay addresses of the nodes, and of the bridge that connects them (`switch`).
    pub hub: &'static str,
    pub hub2: &'static str,
    pub member: &'static str,
    pub switch: &'static str,
    pub hub_bridge: &'static str,
    pub hub_pod: &'static str,
    pub hub2_bridge: &'static str,
    pub hub2_pod: &'static str,
    pub member_bridge: &'static str,
    pub member_pod: &'static str,
    pub hub_wireguard: &'static str,
    pub member_wireguard: &'static str,
    pub hub_pods: &'static str,
    pub hub2_pods: &'static str,
    pub hub_pod_net: &'static str,
    pub member_pods: &'static str,
    pub member_pod_net: &'static str,
    /// WireGuard networks of the clusters.
    pub hub_wireguards: &'static str,
    pub member_wireguards: &'static str,
    /// The Service network of the hub, and one ClusterIP in it.
    pub services: &'static str,
    pub service: &'static str,
    /// A ClusterIP of the member.
    pub local_service: &'static str,
    /// A source address from which `member` sends, and which the allowed IPs of its Peer do not contain.
    pub stray: &'static str,
    /// An address in the hub's pod network. The hub's policies deny TCP port 9090 of this address.
    pub denied: &'static str,
    /// An address of a member that has no node here.
    pub elsewhere: &'static str,
    /// The address of a virtual machine in the hub's pod network that is a node of another member.
    pub worker: &'static str,
    pub worker_wireguard: &'static str,
    pub worker_pod: &'static str,
    pub worker_bridge: &'static str,
    pub worker_pods: &'static str,
    /// Endpoints of the hub and the member in the other family, for WireGuard devices. `None` = a veth pair is used
    /// instead of WireGuard devices.
    pub outer: Option<[&'static str; 2]>,
}

pub static V4: Family = Family {
    n: 4,
    host: 32,
    headers: 40,
    nodad: "",
    length: 24,
    hub: "172.29.0.111",
    hub2: "172.29.0.112",
    member: "172.29.0.121",
    switch: "172.29.0.1",
    hub_bridge: "10.101.0.1",
    hub_pod: "10.101.0.2",
    hub2_bridge: "10.101.1.1",
    hub2_pod: "10.101.1.2",
    member_bridge: "10.243.0.1",
    member_pod: "10.243.0.2",
    hub_wireguard: "100.66.1.1",
    member_wireguard: "100.66.2.1",
    hub_pods: "10.101.0.0/24",
    hub2_pods: "10.101.1.0/24",
    hub_pod_net: "10.101.0.0/16",
    member_pods: "10.243.0.0/24",
    member_pod_net: "10.243.0.0/16",
    hub_wireguards: "100.66.1.0/24",
    member_wireguards: "100.66.2.0/24",
    services: "10.111.0.0/16",
    service: "10.111.0.10",
    local_service: "10.95.0.10",
    stray: "192.0.2.7",
    denied: "10.101.9.9",
    elsewhere: "100.66.7.7",
    worker: "10.101.0.200",
    worker_wireguard: "100.66.9.1",
    worker_pod: "10.77.0.2",
    worker_bridge: "10.77.0.1",
    worker_pods: "10.77.0.0/24",
    outer: None,
};

pub static V6: Family = Family {
    n: 6,
    host: 128,
    headers: 60,
    nodad: " nodad",
    length: 64,
    hub: "fd00:29::111",
    hub2: "fd00:29::112",
    member: "fd00:29::121",
    switch: "fd00:29::1",
    hub_bridge: "fd00:101::1",
    hub_pod: "fd00:101::2",
    hub2_bridge: "fd00:101:0:1::1",
    hub2_pod: "fd00:101:0:1::2",
    member_bridge: "fd00:243::1",
    member_pod: "fd00:243::2",
    hub_wireguard: "fd00:66:1::1",
    member_wireguard: "fd00:66:2::1",
    hub_pods: "fd00:101::/64",
    hub2_pods: "fd00:101:0:1::/64",
    hub_pod_net: "fd00:101::/48",
    member_pods: "fd00:243::/64",
    member_pod_net: "fd00:243::/48",
    hub_wireguards: "fd00:66:1::/64",
    member_wireguards: "fd00:66:2::/64",
    services: "fd00:111::/48",
    service: "fd00:111::10",
    local_service: "fd00:95::10",
    stray: "fd00:5::7",
    denied: "fd00:101:0:9::9",
    elsewhere: "fd00:66:7::7",
    worker: "fd00:101::200",
    worker_wireguard: "fd00:66:9::1",
    worker_pod: "fd00:77::2",
    worker_bridge: "fd00:77::1",
    worker_pods: "fd00:77::/64",
    outer: None,
};

/// IPv4 inner packets in IPv6 outer packets.
pub static V4_OVER_V6: Family = Family {
    outer: Some(["fd00:39::111", "fd00:39::121"]),
    ..V4
};

/// IPv6 inner packets in IPv4 outer packets.
pub static V6_OVER_V4: Family = Family {
    outer: Some(["172.39.0.111", "172.39.0.121"]),
    ..V6
};

impl Family {
    /// The address as it is written in a URL.
    pub fn url(&self, address: &str) -> String {
        if self.n == 4 {
            address.to_owned()
        } else {
            format!("[{address}]")
        }
    }

    /// The nft keyword of the family.
    pub const fn ip(&self) -> &'static str {
        if self.n == 4 { "ip" } else { "ip6" }
    }
}
