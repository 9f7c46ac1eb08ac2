//! What a controller writes into the target's API server about the attacker and the member, and the Service that is granted.

use clustermesh_api::{
    mesh::{IsolationProfile, Protocol},
    names::PEER_REQUIRES_POLICY,
    peer::{DnsOrIp, Peer, PeerEndpoint, PeerSpec},
    policy::{Allow, InfrastructurePort, LocalService, PeerPolicySpec},
};
use clustermesh_core::plan::Settings;
use k8s_openapi::api::{core::v1::Node, discovery::v1::EndpointSlice};
use kube::api::PostParams;
use x25519_dalek::StaticSecret;

use super::{ATTACKER, TCP_PORT, UDP_PORT};
use crate::{
    attacker::public,
    node::{Site, World},
};

pub(crate) const POLICY: &str = "mesh--tenant-a";
pub(crate) const PEER: &str = "mesh--tenant-a--tenant-a-1";

pub(crate) fn attackers_key() -> StaticSecret {
    StaticSecret::from([77; 32])
}

/// What the sandbox may reach: its own networks, and one Service.
pub(crate) fn policy(service: &str) -> PeerPolicySpec {
    let networks = vec!["100.66.2.0/24".to_owned(), "fd00:66:2::/64".to_owned()];
    PeerPolicySpec {
        source: "tenant-a".into(),
        isolation_profile: IsolationProfile::Sandbox,
        sources: networks.clone(),
        networks,
        allow: vec![Allow {
            to: ["10.10.0.0/16", "fd00:10::/32"].map(str::to_owned).into(),
            service: Some(LocalService {
                namespace: "default".into(),
                name: service.into(),
            }),
            ..Allow::default()
        }],
        infrastructure_ports: [6443, 10250]
            .map(|port| InfrastructurePort {
                port,
                protocol: Protocol::default(),
            })
            .into(),
        ..PeerPolicySpec::default()
    }
}

/// What a trusted member may, with the ports that a controller closes unless it is told otherwise.
pub(super) fn trusting(source: &str, nodes: [&str; 2]) -> PeerPolicySpec {
    let [v4, v6] = nodes.map(|node| node.rsplit_once(['.', ':']).expect("a last part").0.to_owned());
    let networks = vec![format!("{v4}.0/24"), format!("{v6}:/64")];
    let to = ["10.10.0.0/16", "100.66.1.0/24", "fd00:10::/32"]
        .map(str::to_owned)
        .into();
    PeerPolicySpec {
        source: source.into(),
        sources: networks.clone(),
        networks,
        allow: vec![Allow { to, ..Allow::default() }],
        infrastructure_ports: infrastructure()
            .map(|port| InfrastructurePort {
                port,
                protocol: Protocol::default(),
            })
            .collect(),
        ..PeerPolicySpec::default()
    }
}

/// TCP ports that are closed to every member on every address of every node.
pub(super) fn infrastructure() -> impl Iterator<Item = u16> {
    Settings::default()
        .infrastructure_ports
        .into_iter()
        .map(|(_, port)| port)
}

/// A Peer with a pair of addresses.
pub(super) fn peer(name: &str, key: &StaticSecret, addresses: [&str; 2], endpoint: Option<&str>) -> Peer {
    let [v4, v6] = addresses;
    Peer::new(
        name,
        PeerSpec {
            allowed_ips: vec![format!("{v4}/32"), format!("{v6}/128")],
            endpoint: endpoint.map(|ip| PeerEndpoint {
                dns_or_ip: DnsOrIp {
                    ip: Some(ip.into()),
                    dns: None,
                },
                port: 51820,
            }),
            persistent_keepalive: None,
            preshared_key: None,
            public_key: public(key).to_string(),
        },
    )
}

/// The Peer of the attacker's node, on the condition that a policy stands that says this.
pub(crate) fn sandboxs_peer(policy: &PeerPolicySpec) -> Peer {
    let mut peer = peer(PEER, &attackers_key(), ATTACKER, None);
    let required = format!("{POLICY}@{}", policy.revision());
    peer.metadata.annotations = Some([(PEER_REQUIRES_POLICY.to_owned(), required)].into());
    peer
}

/// A slice of a Service with one endpoint on the target's node.
pub(crate) fn slice(service: &str, family: usize, address: &str, terminating: bool) -> EndpointSlice {
    let (number, kind) = [(4, "IPv4"), (6, "IPv6")][family];
    serde_json::from_value(serde_json::json!({
        "metadata": {
            "name": format!("{service}-{number}"), "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": kind,
        "ports": [
            {"name": "sql", "port": TCP_PORT, "protocol": "TCP"}, {"name": "log", "port": UDP_PORT, "protocol": "UDP"},
        ],
        "endpoints": [{
            "addresses": [address], "nodeName": "mgmt-1",
            "conditions": {"ready": !terminating, "serving": true, "terminating": terminating},
        }],
    }))
    .expect("an EndpointSlice")
}

/// The target's Node with pod networks of both families.
pub(super) async fn two_families(world: &World, site: &Site) {
    let nodes = world.nodes(site).await;
    let mut node: Node = nodes.get(site.node).await.expect("the Node");
    nodes
        .delete(site.node, &Default::default())
        .await
        .expect("delete the Node");
    (node.metadata.resource_version, node.metadata.uid) = (None, None);
    if let Some(spec) = &mut node.spec {
        spec.pod_cidrs = Some(vec![site.pods.into(), "fd00:10:0:1::/64".into()]);
    }
    nodes
        .create(&PostParams::default(), &node)
        .await
        .expect("create it anew");
}
