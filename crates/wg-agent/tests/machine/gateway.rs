//! Tests a gateway with the kernel's WireGuard: its tunnel works without the gateway's process (the userspace device's tunnel does
//! not), and the gateway serves grants behind kube-proxy in IPVS mode. `tests/node/gateway.rs` has the other tests of gateways.

mod kube_proxy;

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Command, Stdio},
};

use clustermesh_tests::{
    agent::{AS_AGENT, agent_program},
    netns::{NetNs, Running, wait_until},
    pair::{
        TIMEOUT,
        api::{ACCESSES, Api, GATEWAYS, GRANTED_SLICES, SERVICES},
    },
    traffic::{TCP_PORT, TcpConnection, serve_name},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::virtual_machine::run_in_machine;
use kube_proxy::{CLUSTER_IPS, KubeProxy, NODE, NODE_PORT};

const NAME: &str = "clustermesh-gateway-0";
const NAMESPACE: &str = "clustermesh-gateway";
// Addresses, one of each family: of the gateway's pod, of the database's pod, and the WireGuard addresses of the sandbox's
// node and of the gateway.
const POD: [&str; 2] = ["10.10.1.20", "fd00:10:0:1::20"];
const DB: [&str; 2] = ["10.10.1.9", "fd00:10:0:1::9"];
const SANDBOX: [&str; 2] = ["100.80.0.7", "fd80:a::7"];
const GATEWAY: [&str; 2] = ["100.66.255.1", "fd00:66:255::1"];
/// The gateway port of the grant.
const GATEWAY_PORT: u16 = 20001;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip(address), port)
}

#[test]
fn kernel_gateway_serves_grants_without_its_process() {
    run_in_machine!();
    let testbed = Testbed::new();
    let mut gateway = testbed.start_gateway();
    testbed.set_peer(at(POD[0], 51820));
    for to in GATEWAY {
        testbed.wait_for_answer(at(to, GATEWAY_PORT));
    }
    let link = testbed.pod.ip_json("-d link show wg0");
    assert_eq!(link[0]["linkinfo"]["info_kind"], "wireguard");
    // Closed: the gateway's admin port, the address of the database's pod, and another gateway port.
    for (address, port) in [(GATEWAY[0], 9587), (DB[0], TCP_PORT), (GATEWAY[1], GATEWAY_PORT + 1)] {
        assert!(testbed.try_connect(at(address, port)).is_none(), "{address} {port}");
    }
    let mut connection = TcpConnection::open(&testbed.sandbox, at(GATEWAY[0], GATEWAY_PORT));
    connection.request();

    // If the API server does not answer when the container restarts, the kernel state of the previous process remains.
    testbed.api.set_unresponsive(true);
    kill(Pid::from_raw(gateway.pid().cast_signed()), Signal::SIGKILL).expect("kill the gateway");
    gateway.wait(TIMEOUT);
    // Without a process.
    connection.request();
    gateway = testbed.start_gateway();
    wait_until("the next process to wait for the API server", TIMEOUT, || {
        testbed
            .readyz()
            .contains("objects: SandboxAccess has not been listed yet")
    });
    // With a process that has listed no objects.
    connection.request();
    testbed.wait_for_answer(at(GATEWAY[1], GATEWAY_PORT));
    let key = testbed.status()["publicKey"].clone();
    testbed.api.set_unresponsive(false);
    wait_until("the next process to be ready", TIMEOUT, || testbed.readyz() == "ok\n");
    // With a process that has listed all objects.
    connection.request();
    assert_eq!(testbed.status()["publicKey"], key);

    testbed.set_grants(2, &[]);
    wait_until("the removal of the grant to be applied", TIMEOUT, || {
        testbed.status()["applied"][0]["generation"] == 2
    });
    assert_eq!(connection.try_request(), None, "the connection ends with its grant");
    assert!(testbed.try_connect(at(GATEWAY[0], GATEWAY_PORT)).is_none());
    kill(Pid::from_raw(gateway.pid().cast_signed()), Signal::SIGTERM).expect("end the gateway");
    assert!(gateway.wait(TIMEOUT).success());
}

// threat: target-does-not-enforce
#[test]
fn gateway_behind_kube_proxy_in_ipvs_mode_serves_grants() {
    run_in_machine!();
    let testbed = Testbed::new();
    let _gateway = testbed.start_gateway();
    let _proxy = KubeProxy::start(&testbed.node);
    let from_pod = |to: SocketAddr| TcpConnection::try_open(&testbed.pod, to)?.try_request();
    for (service, pod) in CLUSTER_IPS.into_iter().zip(POD) {
        // The database's answer contains the client's address.
        wait_until("a pod to reach another by its Service", TIMEOUT, || {
            from_pod(at(service, 5432)) == Some(format!("db {pod}"))
        });
        // In mode ipvs, kube-proxy assigns the ClusterIPs to the interface kube-ipvs0.
        let links = testbed.node.ip(&format!("addr show to {service}"));
        assert!(links.contains("kube-ipvs0"), "{service}: {links}");
        // Routes the sandbox's packets to the ClusterIP into the tunnel. The grant opens only the gateway port.
        testbed.sandbox.ip(&format!("route add {service} dev ks0"));
    }
    for node in NODE {
        testbed.set_peer(at(node, NODE_PORT));
        for to in GATEWAY {
            testbed.wait_for_answer(at(to, GATEWAY_PORT));
        }
        for (service, db) in CLUSTER_IPS.into_iter().zip(DB) {
            for closed in [at(service, 5432), at(db, TCP_PORT), at(GATEWAY[0], GATEWAY_PORT + 1)] {
                assert!(testbed.try_connect(closed).is_none(), "{closed}");
            }
        }
    }
}

/// The node of a sandbox, the gateway's pod with an API server stub, the pod of a database, and the node of both pods.
struct Testbed {
    sandbox: NetNs,
    pod: NetNs,
    api: Api,
    files: tempfile::TempDir,
    /// The node of the pods.
    node: NetNs,
    _db: NetNs,
}

impl Testbed {
    fn new() -> Self {
        let [node, sandbox, pod, db] = ["node", "sandbox", "gateway", "db"].map(NetNs::new);
        let sandbox_underlay = ["10.30.0.7", "fd00:30::7"];
        node.sh("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding");
        for (number, (ns, [v4, v6])) in [(&sandbox, sandbox_underlay), (&pod, POD), (&db, DB)]
            .into_iter()
            .enumerate()
        {
            let link = format!("to{number}");
            node.ip(&format!("link add {link} type veth peer name eth0 netns {}", ns.path()));
            node.sh(&format!(
                "ip link set {link} up; ip addr add 169.254.1.1/32 dev {link}; ip addr add fe80::1/64 dev {link} nodad
                 ip route add {v4} dev {link}; ip -6 route add {v6} dev {link}"
            ));
            ns.sh(&format!(
                "ip link set eth0 up; ip addr add {v4}/32 dev eth0; ip addr add {v6}/128 dev eth0 nodad
                 ip route add 169.254.1.1 dev eth0; ip route add default via 169.254.1.1; ip -6 route add default via fe80::1 dev eth0"
            ));
        }
        for address in DB {
            serve_name(&db, "db", ip(address), TCP_PORT);
        }
        let [v4, v6] = SANDBOX;
        sandbox.sh(&format!(
            "ip link add ks0 type wireguard; wg genkey | wg set ks0 private-key /dev/stdin; ip link set ks0 mtu 1400 up
             ip addr add {v4}/32 dev ks0; ip addr add {v6}/128 dev ks0
             for net in 100.66.255.0/28 10.10.1.9 fd00:66:255::/64 fd00:10:0:1::9; do ip route add $net dev ks0; done"
        ));
        pod.run(agent_program(), &["prepare", "--mode=gateway"]);
        let api = Api::start(&pod);
        let files = tempfile::tempdir().expect("a directory");
        fs::write(files.path().join("kubeconfig"), api.kubeconfig()).expect("write a kubeconfig");
        let testbed = Self {
            sandbox,
            pod,
            api,
            files,
            node,
            _db: db,
        };
        testbed.create_objects();
        testbed
    }

    fn create_objects(&self) {
        let version = "kilo.squat.ai/v1alpha1";
        let gateway = json!({"name": NAME, "namespace": NAMESPACE});
        self.api.put(
            GATEWAYS,
            json!({"apiVersion": version, "kind": "SandboxGateway", "metadata": gateway, "spec": {}}),
        );
        let ports = |port: u16| json!([{"name": "sql", "port": port, "protocol": "TCP"}]);
        let service = json!({"selector": {"app": "db"}, "ports": ports(5432)});
        self.api.put(
            SERVICES,
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "db", "namespace": "team"}, "spec": service}),
        );
        for (family, address) in ["IPv4", "IPv6"].into_iter().zip(DB) {
            let labels = json!({"kubernetes.io/service-name": "db"});
            let name = format!("db-{}", family.to_lowercase());
            self.api.put(
                GRANTED_SLICES,
                json!({
                    "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
                    "metadata": {"name": name, "namespace": "team", "labels": labels}, "ports": ports(TCP_PORT),
                    "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
                }),
            );
        }
        let grant = json!({"service": {"namespace": "team", "name": "db"}, "port": "sql", "protocol": "TCP", "gatewayPort": GATEWAY_PORT});
        self.set_grants(1, &[grant]);
    }

    fn set_grants(&self, generation: u64, grants: &[Value]) {
        let key = self.sandbox.run("wg", &["show", "ks0", "public-key"]);
        let node = json!({"name": "a-1", "publicKey": key.trim(), "wireguardIPs": SANDBOX});
        self.api.put(
            ACCESSES,
            json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess", "metadata": {"name": "m--a", "uid": "a", "generation": generation},
                "spec": {"sandbox": "a", "networks": ["100.80.0.0/20", "fd80:a::/64"], "nodes": [node], "grants": grants},
            }),
        );
    }

    /// Starts the gateway with only the privileges of its container.
    fn start_gateway(&self) -> Running {
        let file = |name: &str| -> PathBuf { self.files.path().join(name) };
        let [unshare, privileges @ ..] = AS_AGENT;
        let mut command = Command::new(unshare);
        command.args(privileges).args([agent_program(), "--mode=gateway"]);
        command.args([
            "--backend=kernel",
            "--interface=wg0",
            "--gateway-cidr=100.66.255.0/28,fd00:66:255::/64",
            "--endpoint-network=10.10.0.0/16,fd00:10::/32",
        ]);
        command.arg(format!("--kubeconfig={}", file("kubeconfig").display()));
        command.arg(format!("--key-file={}", file("key").display()));
        let variables = [
            ("POD_NAME", NAME.to_owned()),
            ("POD_NAMESPACE", NAMESPACE.to_owned()),
            ("POD_UID", "pod".to_owned()),
            ("POD_IPS", POD.join(",")),
        ];
        self.pod.spawn_command(command.envs(variables).stdin(Stdio::null()))
    }

    /// Configures the gateway as a peer of the sandbox's node.
    fn set_peer(&self, endpoint: SocketAddr) {
        wait_until("the gateway to publish its key", TIMEOUT, || {
            self.status()["publicKey"].is_string()
        });
        let status = self.status();
        let key = status["publicKey"].as_str().expect("a key");
        let endpoint = endpoint.to_string();
        let words = [
            "set",
            "ks0",
            "peer",
            key,
            "endpoint",
            &endpoint,
            "allowed-ips",
            "0.0.0.0/0,::/0",
        ];
        self.sandbox.run("wg", &words);
    }

    fn status(&self) -> Value {
        self.api.get(GATEWAYS, NAME)["status"].clone()
    }

    fn readyz(&self) -> String {
        let output = self
            .pod
            .output("curl", &["-sS", "-m", "30", "http://127.0.0.1:9587/readyz"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn try_connect(&self, to: SocketAddr) -> Option<TcpConnection> {
        TcpConnection::try_open(&self.sandbox, to)
    }

    fn wait_for_answer(&self, to: SocketAddr) {
        wait_until(&format!("an answer at {to}"), TIMEOUT, || {
            self.try_connect(to)
                .and_then(|mut connection| connection.try_request())
                .is_some()
        });
    }
}
