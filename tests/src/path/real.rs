//! Sets up nodes with real devices around one router, each with a dual-stack pod. The test chooses the outer address
//! family of each pair of nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::RangeInclusive,
    thread,
    time::Duration,
};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer, compile},
    device::diff,
    mtu::{self, Sizes},
    numbers::MARK_UNDERLAY,
    prefixes::Family,
};
use clustermesh_core::{
    key::PublicKey,
    observe::{PeerRole, PolicySpec},
};
use ipnet::IpNet;
use nix::errno::Errno;
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover};
use wg_agent::{
    device::{self, Backend, Configuration, Device},
    route::paths,
};
use x25519_dalek::StaticSecret;

use super::apply;
use crate::netns::{NetNs, unique_name, veth, wait_until};

const WIREGUARD_PORT: u16 = 51820;
const ECHO_PORT: u16 = 7;

/// A node with its pod and its WireGuard device.
pub struct Site {
    pub number: u8,
    pub ns: NetNs,
    pub pod: NetNs,
    pub inputs: Inputs,
    pub device: Box<dyn Device>,
    configuration: Configuration,
}

/// A router and the nodes around it.
pub struct Star {
    pub router: NetNs,
    pub sites: Vec<Site>,
}

/// The underlay address of a node.
pub fn underlay(number: u8, family: Family) -> IpAddr {
    address(family, format!("172.30.{number}.2"), format!("fd00:30:{number}::2"))
}

/// The address of the router on the link to a node.
pub fn router_address(number: u8, family: Family) -> IpAddr {
    address(family, format!("172.30.{number}.1"), format!("fd00:30:{number}::1"))
}

/// The WireGuard address of a node.
pub fn wireguard(number: u8, family: Family) -> IpAddr {
    address(family, format!("100.70.{number}.1"), format!("fd00:70:{number}::1"))
}

/// The address of a node's pod.
pub fn pod(number: u8, family: Family) -> IpAddr {
    address(family, format!("10.21{number}.0.2"), format!("fd00:21{number}::2"))
}

fn address(family: Family, v4: String, v6: String) -> IpAddr {
    if family == Family::V4 { v4 } else { v6 }.parse().unwrap()
}

fn net(address: IpAddr, v4: u8, v6: u8) -> IpNet {
    IpNet::new(address, if address.is_ipv4() { v4 } else { v6 })
        .unwrap()
        .trunc()
}

fn pod_networks(number: u8) -> BTreeSet<IpNet> {
    Family::BOTH.map(|f| net(pod(number, f), 24, 64)).into()
}

fn member_networks(number: u8) -> BTreeSet<IpNet> {
    let wireguard = Family::BOTH.map(|f| net(wireguard(number, f), 24, 64));
    pod_networks(number).into_iter().chain(wireguard).collect()
}

fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

/// A node's public key.
pub fn key(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

impl Star {
    /// Creates nodes 1, 2, .. with userspace devices, whose links to the router have these MTUs; `outer` returns the outer family of
    /// a pair. Peers, routes and rules are not configured yet.
    pub fn new(mtus: &[u16], outer: impl Fn(u8, u8) -> Family) -> Self {
        Self::with_backends(mtus, |_| Backend::Userspace, outer)
    }

    /// Like [`Self::new`], with a backend for each node.
    pub fn with_backends(mtus: &[u16], backend: impl Fn(u8) -> Backend, outer: impl Fn(u8, u8) -> Family) -> Self {
        let router = forwarding("router");
        let numbers: Vec<u8> = (1..).take(mtus.len()).collect();
        let site = |(number, mtu): (&u8, &u16)| site(&router, *number, *mtu, &numbers, backend(*number), &outer);
        let sites = numbers.iter().zip(mtus).map(site).collect();
        println!("{}", router.enter_hint());
        Self { router, sites }
    }

    /// Like [`Self::new`], then configures all nodes and waits until they are connected.
    pub fn connected(mtus: &[u16], outer: impl Fn(u8, u8) -> Family) -> Self {
        let mut star = Self::new(mtus, outer);
        star.reconcile();
        star.wait_until_connected();
        star
    }

    /// Applies the desired state on every node, as the agents do.
    pub fn reconcile(&mut self) {
        self.sites.iter_mut().for_each(Site::reconcile);
    }

    /// Starts an echo server in every pod and at every WireGuard address. Waits until all pods reach each other in both families.
    pub fn wait_until_connected(&self) {
        for site in &self.sites {
            for family in Family::BOTH {
                start_echo_server(&site.pod, pod(site.number, family));
                start_echo_server(&site.ns, wireguard(site.number, family));
            }
        }
        for a in &self.sites {
            for b in self.sites.iter().filter(|b| b.number != a.number) {
                for family in Family::BOTH {
                    let to = pod(b.number, family).to_string();
                    wait_until(
                        &format!("node {} to reach {to}", a.number),
                        Duration::from_secs(60),
                        || a.pod.pings(&to),
                    );
                }
            }
        }
    }
}

fn forwarding(name: &str) -> NetNs {
    let ns = NetNs::new(name);
    for which in ["all", "default"] {
        ns.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
    }
    ns.set_sysctl("net/ipv4/ip_forward", "1");
    ns.set_sysctl("net/ipv6/conf/all/forwarding", "1");
    ns
}

fn site(router: &NetNs, number: u8, mtu: u16, all: &[u8], backend: Backend, outer: &impl Fn(u8, u8) -> Family) -> Site {
    let ns = forwarding(&format!("node-{number}"));
    let inside = NetNs::new(&format!("pod-{number}"));
    inside.set_sysctl("net/ipv6/conf/default/accept_dad", "0");
    let with_prefix_length = |a: IpAddr| format!("{a}/{}", if a.is_ipv4() { 24 } else { 64 });
    let far = format!("r{number}");
    let [near4, near6] = Family::BOTH.map(|f| with_prefix_length(underlay(number, f)));
    let [far4, far6] = Family::BOTH.map(|f| with_prefix_length(router_address(number, f)));
    veth(&ns, "eth0", &[&near4, &near6], router, &far, &[&far4, &far6]);
    ns.ip(&format!("link set eth0 mtu {mtu}"));
    router.ip(&format!("link set {far} mtu {mtu}"));
    let [pod4, pod6] = Family::BOTH.map(|f| pod(number, f));
    let pod_gateways = [format!("10.21{number}.0.1"), format!("fd00:21{number}::1")];
    let [cni4, cni6] = [format!("{}/24", pod_gateways[0]), format!("{}/64", pod_gateways[1])];
    let (pod_net4, pod_net6) = (with_prefix_length(pod4), with_prefix_length(pod6));
    veth(&ns, "cni0", &[&cni4, &cni6], &inside, "eth0", &[&pod_net4, &pod_net6]);
    for (n, family) in [(4, Family::V4), (6, Family::V6)] {
        ns.ip(&format!(
            "-{n} route add default via {}",
            router_address(number, family)
        ));
    }
    for (n, via) in [(4, &pod_gateways[0]), (6, &pod_gateways[1])] {
        inside.ip(&format!("-{n} route add default via {via}"));
    }
    let interface = unique_name("pm");
    let configuration = Configuration {
        private_key: secret(number),
        listen_port: WIREGUARD_PORT,
        fwmark: MARK_UNDERLAY,
        mtu: mtu::MINIMUM,
    };
    let device = ns
        .enter(|| device::open(backend, &interface, &configuration, Default::default()))
        .expect("open a device")
        .device;
    for ns in [&ns, &inside] {
        println!("{}", ns.enter_hint());
    }
    Site {
        number,
        inputs: inputs(number, &interface, all, outer),
        ns,
        pod: inside,
        device,
        configuration,
    }
}

fn inputs(number: u8, interface: &str, all: &[u8], outer: &impl Fn(u8, u8) -> Family) -> Inputs {
    let others = || all.iter().copied().filter(|other| *other != number);
    Inputs {
        node: Node {
            name: format!("node-{number}"),
            public_key: key(number),
            wireguard_ips: Family::BOTH.map(|f| wireguard(number, f)).into(),
            device: interface.parse().unwrap(),
            listen_port: WIREGUARD_PORT,
            mtu: mtu::MINIMUM,
            underlay: "eth0".parse().unwrap(),
            underlay_addresses: Family::BOTH.map(|f| underlay(number, f)).into(),
            internal_ips: Family::BOTH.map(|f| underlay(number, f)).into(),
            pod_cidrs: pod_networks(number),
        },
        throw: BTreeSet::new(),
        api_servers: BTreeSet::new(),
        all_node_addresses: BTreeSet::new(),
        pod_cidrs_of_other_nodes: BTreeSet::new(),
        own_sources: BTreeSet::new(),
        peers: others()
            .map(|other| Peer {
                name: format!("node-{other}"),
                revision: 1,
                public_key: key(other),
                preshared_key: None,
                endpoint: Some(SocketAddr::new(underlay(other, outer(number, other)), WIREGUARD_PORT)),
                candidates: vec![],
                keepalive: None,
                allowed_ips: pod_networks(other)
                    .into_iter()
                    .chain(Family::BOTH.map(|f| wireguard(other, f).into()))
                    .collect(),
                role: PeerRole::Node,
            })
            .collect(),
        policies: others()
            .map(|other| {
                let policy = PolicySpec {
                    sources: member_networks(other),
                    networks: member_networks(other),
                    allow: member_networks(number),
                    ..PolicySpec::default()
                };
                (format!("node-{other}"), policy)
            })
            .collect(),
        peer_mtus: BTreeMap::new(),
    }
}

impl Site {
    /// Applies the desired state, as an agent does.
    pub fn reconcile(&mut self) {
        let sizes = self.sizes();
        self.inputs.node.mtu = sizes.device;
        self.inputs.peer_mtus = sizes.peer_mtus;
        self.configuration.mtu = sizes.device;
        let Self {
            ns,
            device,
            configuration,
            ..
        } = self;
        ns.enter(|| device.configure(configuration))
            .expect("configure the device");
        apply(&self.ns, &self.inputs);
        let changes = diff(&self.device.observe().unwrap().peers, &compile(&self.inputs).peers);
        self.device
            .apply(&changes.unwrap_or_default())
            .expect("configure the peers");
    }

    /// Computes the MTUs from the path MTUs that this node's kernel knows.
    pub fn sizes(&self) -> Sizes {
        let endpoints: BTreeMap<PublicKey, IpAddr> = self
            .inputs
            .peers
            .iter()
            .map(|p| (p.public_key, p.endpoint.unwrap().ip()))
            .collect();
        let path_mtus = self
            .ns
            .enter(|| paths::mtus(&endpoints.values().copied().collect(), MARK_UNDERLAY))
            .expect("read the path MTUs");
        let path = |(key, endpoint): (&PublicKey, &IpAddr)| {
            let path = mtu::Path {
                mtu: path_mtus[endpoint],
                outer: Family::of(&(*endpoint).into()),
            };
            (*key, path)
        };
        mtu::auto(1500, &endpoints.iter().map(path).collect())
    }

    /// The number of fragments that this node's kernel has created, inner and outer, in both families.
    pub fn fragments(&self) -> u64 {
        let text = self.ns.sh("nstat -asz IpFragCreates Ip6FragCreates");
        let count = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
        text.lines()
            .filter(|line| line.contains("FragCreates"))
            .filter_map(count)
            .sum()
    }
}

/// Starts a UDP server that echoes every datagram, in fragments if necessary, until the test ends.
fn start_echo_server(ns: &NetNs, at: IpAddr) {
    let socket = ns.enter(|| UdpSocket::bind((at, ECHO_PORT))).unwrap();
    if at.is_ipv4() {
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DONT).unwrap();
    }
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    });
}

/// Sends an unfragmentable packet of each size (ascending, in bytes including the IP header) to an echo server. Returns the range of sizes
/// that were echoed. Panics if a size in the range was not echoed, or if the sender gets neither a reply nor "too large".
pub fn probe_sizes(from: &NetNs, to: IpAddr, sizes: impl Iterator<Item = u16>) -> Option<RangeInclusive<u16>> {
    let any: IpAddr = if to.is_ipv4() { "0.0.0.0" } else { "::" }.parse().unwrap();
    let socket = from.enter(|| {
        let socket = UdpSocket::bind((any, 0)).unwrap();
        socket.connect((to, ECHO_PORT)).unwrap();
        socket
    });
    let headers = if to.is_ipv4() {
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
        28
    } else {
        set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DO).unwrap();
        48
    };
    socket.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    let mut echoed: Option<RangeInclusive<u16>> = None;
    let mut too_large = Vec::new();
    for size in sizes {
        let passed = (0..150).find_map(|_| probe_once(&socket, usize::from(size - headers)));
        match passed.unwrap_or_else(|| panic!("{} -> {to}: no reply and no error for {size} bytes", from.name)) {
            true => echoed = Some(echoed.map_or(size..=size, |r| *r.start()..=size)),
            false => too_large.push(size),
        }
    }
    if let Some(echoed) = &echoed {
        let hole = too_large.iter().find(|size| echoed.contains(size));
        assert_eq!(
            hole, None,
            "{} -> {to}: {hole:?} bytes are too large, but larger packets pass: {echoed:?}",
            from.name
        );
    }
    echoed
}

/// One attempt: `true` = echoed, `false` = "too large", `None` = no reply.
fn probe_once(socket: &UdpSocket, length: usize) -> Option<bool> {
    let classify = |error: std::io::Error| match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EMSGSIZE) => Some(false),
        _ if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => None,
        other => panic!("a datagram of {length}: {error} ({other:?})"),
    };
    if let Err(error) = socket.send(&vec![7; length]) {
        return classify(error);
    }
    let mut buffer = vec![0; 1 << 16];
    loop {
        match socket.recv(&mut buffer) {
            Ok(got) if got == length => return Some(true),
            Ok(_) => {} // the late echo of another packet
            Err(error) => return classify(error),
        }
    }
}
