//! Sets up the testbed of the gateway's tests: one cluster with a real API server, a node with the gateway's pod and
//! two other pods, and the nodes of two sandboxes with WireGuard devices that the test implements. The test acts as the
//! controller and the kubelet.

pub(crate) mod hostile;
pub(crate) mod limits;
mod objects;
mod process;
pub(crate) mod refusals;

use std::{
    net::{IpAddr, SocketAddr},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use clustermesh_lab::{Cluster, Lab, LabPlan, wait_until};
use clustermesh_tests::{
    agent::agent_program,
    traffic::{TCP_PORT, TcpConnection, UdpFlow, count_datagrams, serve_name},
};
use kube::{
    Api, Client,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
pub(crate) use process::Gateway;
use serde_json::{Value, json};
use x25519_dalek::StaticSecret;

use clustermesh_tests::{
    attacker::{Tunnel, public},
    netns::{NetNs, unique_name},
};

/// A longer wait means a failure.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// The backend to test: `kernel` in the virtual machine, otherwise `userspace`, because this host's kernel may have no
/// WireGuard.
pub(crate) fn backend() -> &'static str {
    let is_in_machine = std::env::var_os("CLUSTERMESH_TEST_MACHINE").is_some();
    if is_in_machine { "kernel" } else { "userspace" }
}

const NODE: &str = "172.30.1.11";
/// The addresses of the gateway's pod.
pub(crate) const GATEWAY_POD: [&str; 2] = ["10.10.1.20", "fd00:10:0:1::20"];
/// The gateway's WireGuard addresses.
pub(crate) const GATEWAY: [&str; 2] = ["100.66.255.1", "fd00:66:255::1"];
/// The addresses of the pods `db` and `other`, which are the endpoints of the Services `db` and `web`.
pub(crate) const DB: [&str; 2] = ["10.10.1.9", "fd00:10:0:1::9"];
pub(crate) const OTHER_POD: [&str; 2] = ["10.10.1.10", "fd00:10:0:1::a"];
/// The node's addresses on the links to its pods.
const ROUTER: [&str; 2] = ["10.10.1.1", "fd00:10:0:1::1"];
/// A UDP port without a server.
const CLOSED_PORT: u16 = 5003;
/// A TCP port at which the pods `db` and `other` serve. It equals [`SQL_PORT`], so packets to the gateway and to these
/// pods differ only in the destination address.
const POD_SQL_PORT: u16 = 20001;
/// The port of the node that is translated to the gateway's listen port.
pub(crate) const HOST_PORT: u16 = 31820;
/// The gateway ports of a TCP and a UDP grant.
pub(crate) const SQL_PORT: u16 = 20001;
pub(crate) const LOG_PORT: u16 = 20002;
/// The gateway's limits: connections of one grant to one endpoint, and of one sandbox.
pub(crate) const ENDPOINT_CONNECTIONS: usize = 50;
pub(crate) const SANDBOX_CONNECTIONS: usize = 120;

pub(crate) const NAME: &str = "clustermesh-gateway-0";
pub(crate) const NAMESPACE: &str = "clustermesh-gateway";

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn socket_addr(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip(address), port)
}

/// A sandbox and its only node.
pub(crate) struct Sandbox {
    pub(crate) name: &'static str,
    pub(crate) ns: NetNs,
    pub(crate) tunnel: Tunnel,
    pub(crate) key: StaticSecret,
    pub(crate) addresses: [&'static str; 2],
    pub(crate) networks: [&'static str; 2],
}

pub(crate) struct Testbed {
    pub(crate) lab: Lab,
    pub(crate) client: Client,
    pub(crate) node: NetNs,
    pub(crate) gateway_pod: NetNs,
    /// The pods `db` and `other`.
    pub(crate) endpoint_pods: [NetNs; 2],
    pub(crate) sandboxes: [Sandbox; 2],
    /// The number of datagrams that the pod `db` has received at `MUTE_PORT`, from which it never answers.
    pub(crate) unanswered_datagrams: Arc<AtomicU64>,
    interface: String,
    pod_uid: String,
    files: tempfile::TempDir,
}

impl Drop for Testbed {
    /// A killed gateway leaves its lock, its status socket and its control socket in a directory that all network namespaces share.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/var/run/wireguard/{}.sock", self.interface));
        if let Ok(namespace) = std::fs::metadata(self.gateway_pod.path()) {
            for suffix in ["lock", "status"] {
                let _ = std::fs::remove_file(format!("/var/run/wireguard/wg-agent-{}.{suffix}", namespace.ino()));
            }
        }
    }
}

fn repository(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    path.display().to_string()
}

impl Sandbox {
    /// The reply to a request, which must be answered.
    #[track_caller]
    pub(crate) fn tcp_reply(&self, to: SocketAddr) -> String {
        TcpConnection::open(&self.ns, to).request()
    }

    /// Like [`Self::tcp_reply`], over UDP.
    #[track_caller]
    pub(crate) fn udp_reply(&self, to: SocketAddr) -> String {
        UdpFlow::open(&self.ns, to).request()
    }

    /// The reply to a request within a short time.
    pub(crate) fn try_tcp_reply(&self, to: SocketAddr) -> Option<String> {
        TcpConnection::try_open(&self.ns, to)?.try_request()
    }

    /// Like [`Self::try_tcp_reply`], over UDP.
    pub(crate) fn try_udp_reply(&self, to: SocketAddr) -> Option<String> {
        UdpFlow::open(&self.ns, to).try_request()
    }

    /// Sends requests until `pod` replies. The first may be lost while the WireGuard session is established.
    pub(crate) async fn wait_for_answer_from(&self, to: SocketAddr, pod: &str) {
        wait_until(
            format!("{} to get a reply from {pod} at {to}", self.name),
            TIMEOUT,
            async || match self.try_tcp_reply(to) {
                Some(answer) if answer.starts_with(pod) => Ok(()),
                other => Err(format!("{other:?}")),
            },
        )
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Waits until many new connections in a row all get a reply from `pod`. There are many, because the gateway chooses the endpoint of
    /// each at random.
    pub(crate) async fn wait_for_answers_only_from(&self, to: SocketAddr, pod: &str) {
        wait_until(format!("only {pod} to answer at {to}"), TIMEOUT, async || {
            match (0..24)
                .map(|_| self.try_tcp_reply(to))
                .find(|answer| answer.as_ref().is_none_or(|answer| !answer.starts_with(pod)))
            {
                None => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// The spec of the sandbox's SandboxAccess, with these grants.
    pub(crate) fn access(&self, grants: &[Value]) -> Value {
        json!({
            "sandbox": self.name,
            "networks": self.networks,
            "nodes": [{"name": format!("{}-1", self.name), "publicKey": public(&self.key).to_string(), "wireguardIPs": self.addresses}],
            "grants": grants,
        })
    }
}

/// A grant of a port of a Service in the namespace `team`.
pub(crate) fn grant(service: &str, port: &str, protocol: &str, gateway_port: u16) -> Value {
    json!({"service": {"namespace": "team", "name": service}, "port": port, "protocol": protocol, "gatewayPort": gateway_port})
}

impl Testbed {
    pub(crate) async fn start() -> Self {
        let lab = Lab::start(LabPlan::control_planes(&["mgmt"]))
            .await
            .expect("start the lab");
        let host = async |name: &str, address: &str| {
            let host = lab
                .add_host(name, address.parse().expect("an address"))
                .await
                .expect("add a host");
            NetNs::open(name, &host.netns())
        };
        let node = host("mgmt-1", NODE).await;
        let [gateway_pod, db, other] = ["the gateway", "db", "other"].map(NetNs::new);
        node.sh(
            "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
                 for f in all default; do echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; done",
        );
        for (number, (ns, [v4, v6])) in [(&gateway_pod, GATEWAY_POD), (&db, DB), (&other, OTHER_POD)]
            .into_iter()
            .enumerate()
        {
            let (link, [router, router6]) = (format!("cni{number}"), ROUTER);
            ns.set_sysctl("net/ipv6/conf/all/accept_dad", "0");
            ns.set_sysctl("net/ipv6/conf/default/accept_dad", "0");
            node.ip(&format!("link add {link} type veth peer name eth0 netns {}", ns.path()));
            node.sh(&format!(
                "ip link set {link} mtu 1400 up; ip addr add {router}/32 dev {link}; ip addr add {router6}/128 dev {link} nodad"
            ));
            ns.sh(&format!(
                "ip link set eth0 mtu 1400 up; ip addr add {v4}/32 dev eth0; ip addr add {v6}/128 dev eth0 nodad
                 ip route add {router} dev eth0; ip route add default via {router}
                 ip -6 route add {router6} dev eth0; ip -6 route add default via {router6}"
            ));
            node.sh(&format!(
                "ip route add {v4} dev {link}; ip -6 route add {v6} dev {link}"
            ));
        }
        // The node routes packets from pods to sandboxes through the gateway, so that only the gateway's firewall stops them.
        node.sh(&format!(
            "ip route add 100.80.0.0/16 via {}; ip -6 route add fd80::/16 via {}",
            GATEWAY_POD[0], GATEWAY_POD[1]
        ));
        // Rules of the portmap plugin and the CNI: a hostPort, and masquerading of packets from pods to addresses outside the cluster.
        node.nft(&format!(
            "table ip cni {{
                chain pre {{
                    type nat hook prerouting priority dstnat; policy accept;
                    ip daddr {NODE} udp dport {HOST_PORT} dnat to {}:51820
                }}
                chain post {{
                    type nat hook postrouting priority srcnat; policy accept;
                    ip saddr 10.10.1.0/24 oifname eth0 masquerade
                }}
            }}\n",
            GATEWAY_POD[0]
        ));
        for (ns, name, addresses) in [(&db, "db", DB), (&other, "other", OTHER_POD)] {
            for address in addresses {
                [TCP_PORT, POD_SQL_PORT]
                    .into_iter()
                    .for_each(|port| serve_name(ns, name, ip(address), port));
            }
        }
        let unanswered_datagrams = count_datagrams(&db, ip(DB[0]));
        gateway_pod.run(agent_program(), &["prepare", "--mode=gateway"]);

        let a = (
            host("sandbox-a-1", "172.30.2.11").await,
            "a",
            ["100.80.0.7", "fd80:a::7"],
            ["100.80.0.0/20", "fd80:a::/64"],
        );
        let b = (
            host("sandbox-b-1", "172.30.3.11").await,
            "b",
            ["100.80.16.7", "fd80:b::7"],
            ["100.80.16.0/20", "fd80:b::/64"],
        );
        let sandbox = |number: u8, (ns, name, addresses, networks): (NetNs, _, [&'static str; 2], _)| {
            let key = StaticSecret::from([number; 32]);
            for which in ["all", "default"] {
                ns.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
            }
            // Root on a sandbox's node can route any network into the tunnel.
            let routes = ["100.66.255.0/28", "10.0.0.0/8", "::/0"];
            let tunnel = Tunnel::open(&ns, &unique_name("ks"), key.clone(), &addresses.map(ip), &routes);
            Sandbox {
                name,
                ns,
                tunnel,
                key,
                addresses,
                networks,
            }
        };
        let sandboxes = [sandbox(71, a), sandbox(72, b)];
        let client = lab.cluster("mgmt").client().await.expect("a client");
        let mut testbed = Self {
            lab,
            client,
            node,
            gateway_pod,
            endpoint_pods: [db, other],
            sandboxes,
            unanswered_datagrams,
            interface: unique_name("kg"),
            pod_uid: String::new(),
            files: tempfile::tempdir().expect("a directory"),
        };
        testbed.install().await;
        testbed
    }

    pub(crate) fn cluster(&self) -> Cluster<'_> {
        self.lab.cluster("mgmt")
    }

    /// Installs the CRDs, the manifest of the gateway and the Pod object that a kubelet would run. Writes a kubeconfig with a token of
    /// this Pod, and the Services `db` and `web` with their endpoints.
    async fn install(&mut self) {
        let cluster = self.lab.cluster("mgmt");
        let crds = ["sandboxaccesses", "sandboxgateways"];
        cluster.install_crds(&crds).await.expect("the CRDs are served");
        let manifest = std::fs::read_to_string(repository("deploy/gateway.yaml")).expect("deploy/gateway.yaml");
        cluster.apply(&manifest).await.expect("apply deploy/gateway.yaml");
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        let pod = json!({
            "metadata": {"name": NAME}, "spec": {
                "serviceAccountName": "clustermesh-gateway", "nodeName": "mgmt-1",
                "containers": [{"name": "gateway", "image": "none"}],
            },
        });
        let pod = serde_json::from_value(pod).expect("a Pod");
        let pod = pods.create(&PostParams::default(), &pod).await.expect("create the Pod");
        self.pod_uid = pod.metadata.uid.unwrap_or_default();
        self.client
            .clone()
            .send(
                http::Request::post("/api/v1/namespaces")
                    .header("content-type", "application/json")
                    .body(kube::client::Body::from(
                        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
                            .to_string()
                            .into_bytes(),
                    ))
                    .expect("a request"),
            )
            .await
            .expect("create the namespace");
        let token = [
            "create",
            "token",
            "clustermesh-gateway",
            "-n",
            NAMESPACE,
            "--duration=2h",
            "--bound-object-kind=Pod",
            "--bound-object-name",
            NAME,
        ];
        let token = cluster.kubectl(token).await.expect("a token of the pod").stdout;
        let mut config = Kubeconfig::from_yaml(&cluster.inside_kubeconfig().expect("a kubeconfig")).expect("read it");
        for user in &mut config.auth_infos {
            user.auth_info = Some(kube::config::AuthInfo {
                token: Some(token.trim().to_owned().into()),
                ..Default::default()
            });
        }
        let text = serde_json::to_string(&config).expect("write a kubeconfig");
        std::fs::write(self.file("kubeconfig"), text).expect("write a kubeconfig");
        self.write_endpoints("db", &[DB]).await;
        self.write_endpoints("web", &[OTHER_POD]).await;
        for service in ["db", "web"] {
            self.write_service(service, json!({"selector": {"app": service}})).await;
        }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// A client with the gateway's service account.
    pub(crate) async fn gateway_client(&self) -> Client {
        let mut config = Kubeconfig::read_from(self.file("kubeconfig")).expect("read a kubeconfig");
        let outside = Kubeconfig::from_yaml(&self.cluster().kubeconfig().expect("a kubeconfig")).expect("read it");
        config.clusters = outside.clusters;
        let options = KubeConfigOptions::default();
        let config = kube::Config::from_custom_kubeconfig(config, &options)
            .await
            .expect("a configuration");
        Client::try_from(config).expect("a client")
    }
}
