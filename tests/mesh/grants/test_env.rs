//! Sets up the hub with gateways and the two sandboxes, and finds the sockets that are granted to the sandboxes.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{Cluster, Lab, MESH, NAMESPACE, Product, RunningPod, TrafficClient, Tunnel, WEB};
use serde_json::Value;

use super::{
    POD_SERVICES, SANDBOX_V4, SANDBOX_V6,
    gateway::{self, Gateway},
    grants, text, unix_millis,
};
use crate::setup::{HUB, host, json, pod, wireguard};

/// One of the two sandboxes.
pub(super) struct Sandbox<'a> {
    pub(super) cluster: Cluster<'a>,
    pub(super) web: RunningPod,
    pub(super) wireguard: IpAddr,
}

impl Sandbox<'_> {
    pub(super) fn name(&self) -> &str {
        &self.cluster.plan().name
    }

    pub(super) fn clients(&self) -> [TrafficClient; 2] {
        [pod(&self.web), host(&self.web.node)]
    }

    /// Picks the address with the IP family of this sandbox's WireGuard address.
    pub(super) fn pick_address(&self, all: impl IntoIterator<Item = IpAddr>) -> IpAddr {
        let mut all = all.into_iter();
        all.find(|ip| ip.is_ipv4() == self.wireguard.is_ipv4()).unwrap()
    }

    /// The socket of a mirrored Service, with the IP family of this sandbox's WireGuard address.
    pub(super) async fn service_socket(&self, name: &str, port: u16) -> SocketAddr {
        let address = self.cluster.cluster_ip("default", name).await.unwrap();
        // Each sandbox reaches its gateways in one IP family only, which is also the first family of its Services.
        assert_eq!(address.is_ipv4(), self.wireguard.is_ipv4(), "{address}");
        SocketAddr::new(address, port)
    }
}

/// Addresses of a pod.
pub(super) fn addresses(pod: &RunningPod) -> impl Iterator<Item = IpAddr> + use<> {
    [Some(pod.ip), pod.second_ip].into_iter().flatten()
}

/// A port of a Service that a SandboxAccess grants.
pub(super) struct GrantedPort {
    pub(super) service: String,
    pub(super) port: String,
    pub(super) udp: bool,
    pub(super) gateway_port: u16,
}

impl GrantedPort {
    /// Whether a server answers at this port. `hosted` never answers, because gateways do not forward to the host network. The port
    /// `stream` has servers only while a step of [`super::live`] runs.
    pub(super) fn answers(&self) -> bool {
        self.service != "hosted" && self.port != "stream"
    }
}

pub(super) struct TestEnv<'a> {
    pub(super) lab: &'a Lab,
    pub(super) product: Product<'a>,
    pub(super) hub: Cluster<'a>,
    pub(super) sandboxes: [Sandbox<'a>; 2],
    pub(super) gateways: Vec<Gateway>,
}

impl<'a> TestEnv<'a> {
    pub(super) async fn up(lab: &'a Lab) -> Self {
        let mut product = Product::install(lab, &[HUB, SANDBOX_V4, SANDBOX_V6], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        product.install_gateways(&["default"]).await.unwrap();
        let hub = lab.cluster(HUB);
        hub.run_store().await.unwrap();
        let mut sandboxes = Vec::new();
        for name in [SANDBOX_V4, SANDBOX_V6] {
            let cluster = lab.cluster(name);
            cluster.apply(&WEB.replace("replicas: 2", "replicas: 1")).await.unwrap();
            cluster.wait_for_rollout("default", "deployment/web").await.unwrap();
            let web = cluster.web_pods().await.unwrap().remove(0);
            let wireguard = wireguard(&cluster, &web.node).await;
            sandboxes.push(Sandbox {
                cluster,
                web,
                wireguard,
            });
        }
        let Ok(sandboxes) = sandboxes.try_into() else {
            panic!("two sandboxes")
        };
        let env = Self {
            lab,
            gateways: gateway::all(&hub).await,
            product,
            hub,
            sandboxes,
        };
        env.apply_grants(&POD_SERVICES).await;
        let mesh = format!("cmesh/{MESH}");
        let ready = [
            "wait",
            "-n",
            NAMESPACE,
            &mesh,
            "--for=condition=Ready",
            "--timeout=180s",
        ];
        env.hub.kubectl(ready).await.unwrap();
        env
    }

    /// Grants exactly these Services and `hosted` to both sandboxes. Returns the time at which kubectl was called.
    pub(super) async fn apply_grants(&self, services: &[&str]) -> u128 {
        let grants = grants(services);
        let mesh = self.product.mesh_with(
            &[SANDBOX_V4, SANDBOX_V6],
            &[(SANDBOX_V4, &grants), (SANDBOX_V6, &grants)],
        );
        let called = unix_millis();
        self.hub.apply(&mesh).await.unwrap();
        called
    }

    /// The running pods of the store.
    pub(super) async fn store_pods(&self) -> Vec<RunningPod> {
        self.hub.pods_of_app("store").await.unwrap()
    }

    /// The sockets that answer over TCP, and those that answer over UDP.
    pub(super) async fn open_sockets(
        &self,
        from: &TrafficClient,
        sockets: &BTreeSet<SocketAddr>,
    ) -> [BTreeSet<SocketAddr>; 2] {
        let tcp = self.lab.scan(from, sockets.iter().copied()).await.unwrap();
        [tcp, self.lab.scan_udp(from, sockets.iter().copied()).await.unwrap()]
    }

    /// The granted ports in a sandbox's SandboxAccess, in its order.
    pub(super) async fn granted_ports(&self, sandbox: &Sandbox<'_>) -> Vec<GrantedPort> {
        let name = format!("{MESH}--{}", sandbox.name());
        let access = json(&self.hub, &["get", "sandboxaccess", &name]).await;
        let grants = access["spec"]["grants"].as_array().cloned().unwrap_or_default();
        let one = |grant: &Value| GrantedPort {
            service: text(&grant["service"]["name"]),
            port: text(&grant["port"]),
            udp: grant["protocol"] == "UDP",
            gateway_port: grant["gatewayPort"].as_u64().unwrap().try_into().unwrap(),
        };
        grants.iter().map(one).collect()
    }

    /// The sockets at which a sandbox reaches this port of a Service: one at each gateway.
    pub(super) async fn gateway_sockets(&self, sandbox: &Sandbox<'_>, service: &str, port: &str) -> Vec<SocketAddr> {
        let granted_ports = self.granted_ports(sandbox).await;
        let granted = granted_ports
            .iter()
            .find(|one| one.service == service && one.port == port);
        let port = granted.unwrap().gateway_port;
        let ips = self.gateways.iter().map(|gateway| gateway.address_for(sandbox));
        ips.map(|ip| SocketAddr::new(ip, port)).collect()
    }

    /// The gateway's sockets for the granted ports at which a server answers: those over TCP, and those over UDP.
    pub(super) async fn granted_sockets(&self, sandbox: &Sandbox<'_>, gateway: &Gateway) -> [BTreeSet<SocketAddr>; 2] {
        let granted_ports = self.granted_ports(sandbox).await;
        [false, true].map(|udp| {
            let ports = granted_ports
                .iter()
                .filter(|granted| granted.udp == udp && granted.answers());
            ports
                .map(|granted| SocketAddr::new(gateway.address_for(sandbox), granted.gateway_port))
                .collect()
        })
    }
}
