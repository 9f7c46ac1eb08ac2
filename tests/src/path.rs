//! Sets up two clusters of network namespaces: the hub with two nodes, a member with one node, and a pod on each node.
//! Applies the same routes, rules and firewall as agents, but runs no agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer, compile},
    device::diff,
    numbers::MARK_UNDERLAY,
};
use clustermesh_core::{
    key::PublicKey,
    mesh::Protocol,
    observe::{PeerRole, PolicySpec},
};
use ipnet::IpNet;
use wg_agent::{
    device::{Configuration, Device, userspace::Userspace},
    firewall::{FirewallManager, Nft},
    route::{self, Netlink},
};

mod capture;
mod family;
pub mod real;
mod traffic;
mod worker;

pub use capture::Capture;
pub use family::{Family, V4, V4_OVER_V6, V6, V6_OVER_V4};
pub use traffic::{connect, outer_socket, request, serve, source_of};
pub use worker::MeshWithWorker;

use crate::netns::{NetNs, veth, wait_for};

/// Both clusters, with the desired state of an agent applied to the first node of each cluster.
pub struct Mesh {
    pub f: &'static Family,
    _switch: NetNs,
    pub hub: NetNs,
    pub hub2: NetNs,
    pub member: NetNs,
    pub hub_pod: NetNs,
    pub hub2_pod: NetNs,
    pub member_pod: NetNs,
    pub hub_inputs: Inputs,
    pub member_inputs: Inputs,
    _devices: Vec<Userspace>,
}

fn parse_all<T: std::str::FromStr<Err: std::fmt::Debug> + Ord>(texts: &[&str]) -> BTreeSet<T> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

/// The only policy of a node.
pub fn policy_of(inputs: &mut Inputs) -> &mut PolicySpec {
    inputs.policies.first_entry().unwrap().into_mut()
}

/// Creates a node with one pod. Its underlay is `switch`, and its CNI masquerades packets that leave the pod network of
/// the cluster.
fn node(f: &Family, switch: &NetNs, name: &str, addresses: [&str; 5]) -> (NetNs, NetNs) {
    let [address, bridge, pod, pods, net] = addresses;
    let (ns, pod_ns) = (NetNs::new(name), NetNs::new(&format!("{name}-pod")));
    disable_dad(&ns);
    disable_dad(&pod_ns);
    for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        ns.set_sysctl(key, "1");
    }
    veth(&ns, "eth0", &[&format!("{address}/{}", f.length)], switch, name, &[]);
    switch.ip(&format!("link set {name} master br0"));
    veth(
        &ns,
        "cni0",
        &[&format!("{bridge}/{}", f.length)],
        &pod_ns,
        "eth0",
        &[&format!("{pod}/{}", f.length)],
    );
    for (ns, via) in [(&ns, f.switch), (&pod_ns, bridge)] {
        ns.ip(&format!("-{} route add default via {via}", f.n));
    }
    masquerade(f, &ns, pods, net);
    (ns, pod_ns)
}

/// Opens a real WireGuard device and adds `address` to eth0. Needed only if outer packets have another address
/// family than inner ones; with equal families, the veth pair of [`tunnel`] is used instead.
fn device(ns: &NetNs, address: &str, key: u8, mtu: u16) -> Userspace {
    let length = if address.contains(':') { "64" } else { "24" };
    let nodad = if address.contains(':') { " nodad" } else { "" };
    ns.ip(&format!("addr add {address}/{length} dev eth0{nodad}"));
    let configuration = Configuration {
        private_key: [key; 32].into(),
        listen_port: 51820,
        fwmark: MARK_UNDERLAY,
        mtu,
    };
    ns.enter(|| Userspace::open("kilo0", &configuration))
        .expect("open a device")
}

/// The public key for a private key of 32 equal bytes.
fn public(key: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&x25519_dalek::StaticSecret::from([key; 32])).to_bytes())
}

/// Disables duplicate address detection, which would make IPv6 addresses unusable for one or two seconds.
fn disable_dad(ns: &NetNs) {
    for which in ["all", "default"] {
        ns.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
    }
}

/// The inputs of the first node of the hub (`key` 1) or of the member (`key` 2).
fn inputs(f: &Family, name: &str, key: u8) -> Inputs {
    let is_hub = key == 1;
    let [wireguard, address, pods] = if is_hub {
        [f.hub_wireguard, f.hub, f.hub_pods]
    } else {
        [f.member_wireguard, f.member, f.member_pods]
    };
    let hub_networks = [f.hub_pod_net, f.hub_wireguards, f.services, f.hub, f.hub2];
    let member_networks = [f.member_pod_net, f.member_wireguards];
    let (theirs, ours) = if is_hub {
        (&member_networks[..], &hub_networks[..])
    } else {
        (&hub_networks[..], &member_networks[..])
    };
    // In the member, the hub's second node has no Peer: its address and pods are allowed IPs of the first node's Peer.
    let allowed_ips = match is_hub {
        true => vec![f.member_pods, f.member_wireguards],
        false => vec![
            f.hub_pods,
            f.hub_wireguards,
            f.services,
            f.hub2_pods,
            f.denied,
            f.hub,
            f.hub2,
        ],
    };
    let policy = PolicySpec {
        sources: prefixes(theirs).into_iter().collect(),
        networks: prefixes(theirs).into_iter().collect(),
        allow: prefixes(ours).into_iter().collect(),
        deny: [SocketAddr::new(f.denied.parse().unwrap(), 9090)].into(),
        infrastructure_ports: [(Protocol::Tcp, 10250)].into(),
        ..PolicySpec::default()
    };
    Inputs {
        node: Node {
            name: name.to_owned(),
            public_key: public(key),
            wireguard_ips: parse_all(&[wireguard]),
            device: "kilo0".parse().unwrap(),
            listen_port: 51820,
            mtu: if is_hub { 1420 } else { 1380 },
            underlay: "eth0".parse().unwrap(),
            underlay_addresses: parse_all(&[address]),
            internal_ips: parse_all(&[address]),
            pod_cidrs: parse_all(&[pods]),
        },
        throw: BTreeSet::new(),
        api_servers: if is_hub {
            [SocketAddr::new(f.hub2_pod.parse().unwrap(), 6443)].into()
        } else {
            BTreeSet::new()
        },
        all_node_addresses: if is_hub {
            parse_all(&[f.hub, f.hub2, f.hub_wireguard])
        } else {
            parse_all(&[f.member, f.member_wireguard])
        },
        own_sources: BTreeSet::new(),
        pod_cidrs_of_other_nodes: if is_hub {
            parse_all(&[f.hub2_pods])
        } else {
            BTreeSet::new()
        },
        peers: vec![Peer {
            name: "other".to_owned(),
            revision: 1,
            public_key: public(3 - key),
            preshared_key: None,
            endpoint: Some(SocketAddr::new(
                match f.outer {
                    None => [f.hub, f.member],
                    Some(addresses) => addresses,
                }[usize::from(is_hub)]
                .parse()
                .unwrap(),
                51820,
            )),
            candidates: vec![],
            keepalive: None,
            role: PeerRole::Node,
            allowed_ips: prefixes(&allowed_ips),
        }],
        policies: [("other".to_owned(), policy)].into(),
        peer_mtus: BTreeMap::new(),
    }
}

impl Mesh {
    pub fn new(f: &'static Family) -> Self {
        let switch = NetNs::new("switch");
        disable_dad(&switch);
        switch.ip("link add br0 type bridge");
        switch.ip(&format!("addr add {}/{} dev br0{}", f.switch, f.length, f.nodad));
        switch.ip("link set br0 up");
        let (hub, hub_pod) = node(
            f,
            &switch,
            "hub",
            [f.hub, f.hub_bridge, f.hub_pod, f.hub_pods, f.hub_pod_net],
        );
        let (hub2, hub2_pod) = node(
            f,
            &switch,
            "hub2",
            [f.hub2, f.hub2_bridge, f.hub2_pod, f.hub2_pods, f.hub_pod_net],
        );
        let (member, member_pod) = node(
            f,
            &switch,
            "member",
            [f.member, f.member_bridge, f.member_pod, f.member_pods, f.member_pod_net],
        );
        hub.ip(&format!("route add {} via {}", f.hub2_pods, f.hub2));
        hub2.ip(&format!("route add {} via {}", f.hub_pods, f.hub));
        let (hub_inputs, member_inputs) = (inputs(f, "hub", 1), inputs(f, "member", 2));
        let mut devices = Vec::new();
        match f.outer {
            None => tunnel(&hub, 1420, &member, 1380),
            Some([hub_address, member_address]) => {
                devices.push(device(&hub, hub_address, 1, hub_inputs.node.mtu));
                devices.push(device(&member, member_address, 2, member_inputs.node.mtu));
            }
        }
        for ns in [&hub, &hub2, &member, &hub_pod, &hub2_pod, &member_pod] {
            println!("{}", ns.enter_hint());
        }
        apply(&hub, &hub_inputs);
        apply(&member, &member_inputs);
        for (device, inputs) in devices.iter_mut().zip([&hub_inputs, &member_inputs]) {
            let changes = diff(&device.observe().unwrap().peers, &compile(inputs).peers);
            device.apply(&changes.unwrap_or_default()).unwrap();
        }
        if f.outer.is_some() {
            // The pings start the first handshake.
            wait_for("the tunnel", Duration::from_secs(60), || {
                member_pod.pings(f.hub_pod).then_some(())
            });
        }
        Self {
            f,
            _switch: switch,
            hub,
            hub2,
            member,
            hub_pod,
            hub2_pod,
            member_pod,
            hub_inputs,
            member_inputs,
            _devices: devices,
        }
    }

    /// Writes the DNAT rule of kube-proxy from port 80 of a Service to port 8080 of its only endpoint.
    pub fn service(&self, ns: &NetNs, address: &str, endpoint: &str) {
        self.service_on(ns, address, endpoint, 8080);
    }

    /// Like [`Self::service`], for an endpoint on another port.
    pub fn service_on(&self, ns: &NetNs, address: &str, endpoint: &str, port: u16) {
        let (ip, endpoint) = (self.f.ip(), self.f.url(endpoint));
        let rule = format!("{ip} daddr {address} tcp dport 80 dnat to {endpoint}:{port}");
        ns.sh(&format!(
            "nft 'table {ip} proxy {{ chain pre {{ type nat hook prerouting priority -100; {rule}; }}; chain out {{ type nat hook output priority -100; {rule}; }}; }}'"
        ));
    }
}

/// Parses prefixes; a plain address is a host prefix.
fn prefixes(texts: &[&str]) -> Vec<IpNet> {
    texts
        .iter()
        .map(|t| t.parse().unwrap_or_else(|_| IpNet::from(t.parse::<IpAddr>().unwrap())))
        .collect()
}

/// Writes the masquerading rule of a CNI, for packets that leave the pod network.
fn masquerade(f: &Family, ns: &NetNs, pods: &str, net: &str) {
    let ip = f.ip();
    ns.sh(&format!(
        "nft 'table {ip} cni {{ chain post {{ type nat hook postrouting priority 100; {ip} saddr {pods} {ip} daddr != {net} counter masquerade; }}; }}'"
    ));
}

/// Creates a veth pair named kilo0 that behaves like a tunnel: a packet to any address that is routed into one end arrives
/// at the other, without neighbour discovery.
pub fn tunnel(a: &NetNs, a_mtu: u16, b: &NetNs, b_mtu: u16) {
    veth(a, "kilo0", &[], b, "kilo0", &[]);
    for (ns, mtu) in [(a, a_mtu), (b, b_mtu)] {
        // Without ARP a frame is sent to the sender's own hardware address, so both ends have the same address.
        ns.ip("link set kilo0 down");
        ns.ip("link set kilo0 address 02:00:00:00:00:01 arp off");
        ns.ip(&format!("link set kilo0 mtu {mtu} up"));
    }
}

/// Applies the desired state of `inputs` to a node's kernel.
pub fn apply(ns: &NetNs, inputs: &Inputs) {
    let failed = converge(ns, inputs);
    assert!(failed.is_empty(), "{failed:?}");
}

/// Like [`apply`], on a node without the device: routes and sysctls of the device must fail, and nothing else.
pub fn apply_without_device(ns: &NetNs, inputs: &Inputs) {
    let failed = converge(ns, inputs);
    assert!(
        !failed.is_empty()
            && failed
                .iter()
                .all(|e| e.contains("no interface kilo0") || e.contains("conf.kilo0")),
        "{failed:?}"
    );
}

fn converge(ns: &NetNs, inputs: &Inputs) -> Vec<String> {
    let compiled = compile(inputs);
    assert_eq!(compiled.refused, []);
    ns.enter(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(async {
                FirewallManager::new(Nft::default())
                    .converge(&compiled.firewall)
                    .await
                    .unwrap();
                let mut routing = Netlink::open(inputs.node.device.clone()).unwrap();
                let pass = route::converge(&mut routing, &compiled.routes).await.unwrap();
                let missing = route::sysctl::ensure(&compiled.sysctls).await;
                pass.failed
                    .iter()
                    .map(ToString::to_string)
                    .chain(missing.iter().map(ToString::to_string))
                    .collect()
            })
    })
}
