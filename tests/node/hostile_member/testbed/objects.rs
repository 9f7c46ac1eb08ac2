//! Builds the objects that a controller writes into the target cluster about members, and makes the target's Node dual-stack.

use clustermesh_api::{
    peer::{DnsOrIp, Peer, PeerEndpoint, PeerSpec},
    policy::{Allow, InfrastructurePort, PeerPolicySpec},
};
use clustermesh_core::{mesh::Protocol, plan::Settings};
use clustermesh_tests::attacker::public;
use k8s_openapi::api::core::v1::Node;
use kube::api::PostParams;
use x25519_dalek::StaticSecret;

use crate::two_clusters::{Site, TwoClusters};

/// The PeerPolicy of a cluster-meshed member, with the default infrastructure ports. The member's networks are the /24 and
/// the /64 of its node's WireGuard addresses.
pub(super) fn policy(source: &str, wireguard: [&str; 2]) -> PeerPolicySpec {
    let [v4, v6] = wireguard.map(|address| address.rsplit_once(['.', ':']).expect("a last part").0.to_owned());
    let networks = vec![format!("{v4}.0/24"), format!("{v6}:/64")];
    let to = ["10.10.0.0/16", "100.66.1.0/24", "fd00:10::/32"]
        .map(str::to_owned)
        .into();
    PeerPolicySpec {
        source: source.into(),
        sources: networks.clone(),
        networks,
        allow: vec![Allow { to }],
        infrastructure_ports: infrastructure()
            .map(|port| InfrastructurePort {
                port,
                protocol: Protocol::default(),
            })
            .collect(),
        ..PeerPolicySpec::default()
    }
}

/// The infrastructure ports: closed to every member on every address of every node.
pub(super) fn infrastructure() -> impl Iterator<Item = u16> {
    Settings::default()
        .infrastructure_ports
        .into_iter()
        .map(|(_, port)| port)
}

/// A Peer whose allowed IPs are one address of each family.
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

/// Recreates the target's Node with pod networks of both families.
pub(super) async fn make_dual_stack(clusters: &TwoClusters, site: &Site) {
    let nodes = clusters.nodes(site).await;
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
