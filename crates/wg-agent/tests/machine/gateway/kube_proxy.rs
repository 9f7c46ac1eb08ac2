//! Runs the real kube-proxy in IPVS mode on the node of the pods.

use std::{fs, process::Stdio};

use clustermesh_lab::{ArtefactSet, Tools};
use clustermesh_tests::{
    netns::{NetNs, Running},
    pair::api::{ALL_SERVICES, ALL_SLICES, Api, NODES},
    traffic::TCP_PORT,
};
use serde_json::{Value, json};

use super::{DB, POD};

/// The node's addresses.
pub(super) const NODE: [&str; 2] = ["10.10.0.2", "fd00:10::2"];
/// The NodePort of the gateway.
pub(super) const NODE_PORT: u16 = 30820;
/// The ClusterIPs of the Service whose endpoints are [`DB`].
pub(super) const CLUSTER_IPS: [&str; 2] = ["10.96.0.10", "fd00:96::10"];

pub(super) struct KubeProxy {
    _running: Running,
    _files: tempfile::TempDir,
}

impl KubeProxy {
    /// Exposes the gateway at a NodePort and the database at a ClusterIP.
    pub(super) fn start(node: &NetNs) -> Self {
        // kube-proxy serves a NodePort at the addresses of the node.
        let [v4, v6] = NODE;
        node.sh(&format!(
            "ip addr add {v4}/32 dev lo; ip addr add {v6}/128 dev lo nodad"
        ));
        let api = Api::start(node);
        let addresses = NODE.map(|address| json!({"type": "InternalIP", "address": address}));
        api.put(
            NODES,
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}, "status": {"addresses": addresses}}),
        );
        let wireguard = json!({"port": 51820, "nodePort": NODE_PORT, "protocol": "UDP", "targetPort": 51820});
        create_service(
            &api,
            "gateway",
            "NodePort",
            ["10.96.0.20", "fd00:96::20"],
            wireguard,
            POD,
        );
        let sql = json!({"port": 5432, "protocol": "TCP", "targetPort": TCP_PORT});
        create_service(&api, "db", "ClusterIP", CLUSTER_IPS, sql, DB);

        let files = tempfile::tempdir().expect("a directory");
        let kubeconfig = files.path().join("kubeconfig");
        fs::write(&kubeconfig, api.kubeconfig()).expect("write a kubeconfig");
        let tools = Tools::ensure(&[ArtefactSet::Nodes], &|line| eprintln!("{line}")).expect("kube-proxy");
        let mut command = std::process::Command::new(tools.path("kube-proxy").expect("kube-proxy"));
        command.args([
            "--proxy-mode=ipvs",
            "--hostname-override=node",
            "--cluster-cidr=10.10.0.0/16,fd00:10::/32",
            "--kube-api-content-type=application/json",
            // 0 = do not change these sysctls.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            // The API server stub cannot stream lists.
            "--feature-gates=WatchListClient=false",
        ]);
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        Self {
            _running: node.spawn_command(command.stdin(Stdio::null())),
            _files: files,
        }
    }
}

fn create_service(api: &Api, name: &str, kind: &str, cluster_ips: [&str; 2], port: Value, endpoints: [&str; 2]) {
    let (target_port, protocol) = (port["targetPort"].clone(), port["protocol"].clone());
    let metadata = json!({"name": name, "namespace": "team"});
    let families = ["IPv4", "IPv6"];
    api.put(
        ALL_SERVICES,
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"type": kind, "clusterIP": cluster_ips[0], "clusterIPs": cluster_ips, "ipFamilies": families,
                     "ipFamilyPolicy": "RequireDualStack", "externalTrafficPolicy": "Cluster", "ports": [port]},
        }),
    );
    for (family, address) in families.into_iter().zip(endpoints) {
        let metadata = json!({"name": format!("{name}-{}", family.to_lowercase()), "namespace": "team",
                              "labels": {"kubernetes.io/service-name": name}});
        api.put(
            ALL_SLICES,
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata, "addressType": family,
                "ports": [{"name": "", "port": target_port, "protocol": protocol}],
                "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
            }),
        );
    }
}
