//! Adds a worker to the mesh: a virtual machine in the hub's pod network that is a node of another member.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use super::*;

/// A mesh with a worker. The addresses of the worker and of its API server are in the hub's networks. The hub's
/// tunnel to `mesh.member` is replaced by one to the worker.
pub struct MeshWithWorker {
    pub mesh: Mesh,
    pub worker: NetNs,
    pub worker_pod: NetNs,
    pub inputs: Inputs,
}

impl MeshWithWorker {
    pub fn new(f: &'static Family) -> Self {
        let mesh = Mesh::new(f);
        let hub = &mesh.hub;
        // Puts the hub's pods and the worker on one bridge.
        hub.ip("link set cni0 down");
        hub.ip("link set cni0 name vpod");
        hub.ip("link add cni0 type bridge");
        hub.ip("addr flush dev vpod");
        hub.ip("link set vpod master cni0");
        hub.ip("link set vpod up");
        let (worker, worker_pod) = (NetNs::new("worker"), NetNs::new("worker-pod"));
        for ns in [&worker, &worker_pod] {
            disable_dad(ns);
            println!("{}", ns.enter_hint());
        }
        for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            worker.set_sysctl(key, "1");
        }
        veth(
            &worker,
            "eth0",
            &[&format!("{}/{}", f.worker, f.length)],
            hub,
            "vworker",
            &[],
        );
        hub.ip("link set vworker master cni0");
        hub.ip("link set cni0 up");
        hub.ip(&format!("addr add {}/{} dev cni0{}", f.hub_bridge, f.length, f.nodad));
        let pod_address = [&*format!("{}/{}", f.worker_pod, f.length)];
        veth(
            &worker,
            "cni0",
            &[&format!("{}/{}", f.worker_bridge, f.length)],
            &worker_pod,
            "eth0",
            &pod_address,
        );
        worker.ip(&format!("-{} route add default via {}", f.n, f.hub_bridge));
        worker_pod.ip(&format!("-{} route add default via {}", f.n, f.worker_bridge));
        masquerade(f, &worker, f.worker_pods, f.worker_pods);
        hub.ip("link del kilo0");
        tunnel(hub, 1420, &worker, 1420);
        let inputs = worker_inputs(f);
        let mut hub_inputs = mesh.hub_inputs.clone();
        hub_inputs.peers[0].allowed_ips = prefixes(&[f.worker_pods, f.worker_wireguard]);
        hub_inputs.peers[0].endpoint = Some(SocketAddr::new(f.worker.parse().unwrap(), 51820));
        let networks: BTreeSet<IpNet> = prefixes(&[f.worker_pods, f.worker_wireguard]).into_iter().collect();
        let policy = policy_of(&mut hub_inputs);
        policy.sources = networks.clone();
        policy.networks = networks;
        apply(hub, &hub_inputs);
        apply(&worker, &inputs);
        Self {
            mesh,
            worker,
            worker_pod,
            inputs,
        }
    }

    /// Writes the DNAT rule that kube-proxy would write for a NodePort of the worker.
    pub fn node_port(&self, port: u16, endpoint: &str) {
        let (ip, endpoint) = (self.mesh.f.ip(), self.mesh.f.url(endpoint));
        let rule = format!("fib daddr type local tcp dport {port} dnat to {endpoint}:8080");
        self.worker.sh(&format!(
            "nft 'table {ip} ports {{ chain pre {{ type nat hook prerouting priority -100; {rule}; }}; }}'"
        ));
    }

    /// Echoes UDP on the worker from a socket that is not bound to an address, so that the kernel chooses the source address of the
    /// reply.
    pub fn echo(&self, port: u16) {
        let any: IpAddr = if self.mesh.f.n == 4 { "0.0.0.0" } else { "::" }.parse().unwrap();
        let socket = self.worker.enter(|| UdpSocket::bind((any, port)).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 100];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        });
    }

    /// Sends a datagram to [`Self::echo`] and returns the reply. The socket is connected, so it accepts a reply only from
    /// the worker's address. `state` is text for the failure message: the state in which the reply is expected.
    pub fn ask_echo(&self, from: &NetNs, port: u16, state: &str) -> String {
        let any: IpAddr = if self.mesh.f.n == 4 { "0.0.0.0" } else { "::" }.parse().unwrap();
        let socket = from.enter(|| {
            let socket = UdpSocket::bind((any, 0)).unwrap();
            socket
                .connect((self.mesh.f.worker.parse::<IpAddr>().unwrap(), port))
                .unwrap();
            socket
        });
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut buffer = [0; 100];
        let reply = format!("a reply over UDP while {state}");
        wait_for(&reply, Duration::from_secs(60), || {
            socket.send(b"hello").ok()?;
            let length = socket.recv(&mut buffer).ok()?;
            Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
        })
    }
}

fn worker_inputs(f: &Family) -> Inputs {
    let mut common = inputs(f, "worker", 2);
    policy_of(&mut common).allow = prefixes(&[f.worker_pods, f.worker_wireguard]).into_iter().collect();
    Inputs {
        node: Node {
            wireguard_ips: parse_all(&[f.worker_wireguard]),
            mtu: 1420,
            underlay_addresses: parse_all(&[f.worker]),
            internal_ips: parse_all(&[f.worker]),
            pod_cidrs: parse_all(&[f.worker_pods]),
            ..common.node
        },
        throw: prefixes(&[f.hub_bridge]).into_iter().collect(),
        api_servers: [SocketAddr::new(f.service.parse().unwrap(), 80)].into(),
        all_node_addresses: parse_all(&[f.worker, f.worker_wireguard]),
        ..common
    }
}
