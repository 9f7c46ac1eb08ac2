//! Property tests for members whose tunnels kg owns (kg alone, or with wg-agent in policy mode): stopping kg on any of their nodes
//! causes no writes, and no anchored network in a Peer contains the InternalIP of a node, with two exceptions that the test explains.

use std::net::IpAddr;

use proptest::{collection, prelude::*, sample::select};

use super::*;

/// A generated member whose tunnels kg owns.
#[derive(Debug, Clone)]
struct Tenant {
    nodes: Vec<Node>,
    allowed: Vec<&'static str>,
    anchored: Option<Vec<&'static str>>,
    anchors: u16,
    /// For each node: whether its kg is stopped.
    stopped: Vec<bool>,
    /// Whether kg serves the hub.
    hub_has_kg: bool,
}

fn tenant() -> impl Strategy<Value = Tenant> {
    let allowed = collection::vec(
        select(vec!["172.30.2.1/32", "172.30.2.2/32", "172.30.2.3/32", "172.30.2.0/24"]),
        0..4,
    );
    let anchored = select(vec![
        None,
        Some(vec![]),
        Some(vec!["10.97.0.0/16"]),
        Some(vec!["172.30.2.0/24"]),
    ]);
    let kind = (
        any::<bool>(),
        any::<bool>(),
        select(vec![Server::Kilo, Server::AgentPolicy]),
        any::<bool>(),
    );
    let stopped = collection::vec(any::<bool>(), 5);
    (kind, 1..5u8, allowed, anchored, 1u16..4, stopped).prop_map(
        |((by_location, two_locations, server, hub_has_kg), count, mut allowed, anchored, anchors, stopped)| {
            let nodes = (1..=count).map(|n| {
                let west = two_locations && n > 2;
                let node = match (by_location, n == 1 || (west && n == 3)) {
                    (false, _) => kg_node(n, Granularity::Full),
                    (true, true) => kg_node(n, Granularity::Location),
                    (true, false) => follower(n),
                };
                Node {
                    server,
                    location: if west { "west".into() } else { String::new() },
                    ..node
                }
            });
            allowed.push("10.97.0.0/16");
            allowed.extend(anchored.iter().flatten());
            allowed.sort_unstable();
            allowed.dedup();
            Tenant {
                nodes: nodes.collect(),
                allowed,
                anchored,
                anchors,
                stopped,
                hub_has_kg,
            }
        },
    )
}

impl Tenant {
    fn mesh_and_observations(&self) -> (Mesh, Observations) {
        let (mut mesh, mut seen) = (two_clusters(), seen());
        let entry = &mut mesh.clusters[1];
        entry.allowed.extend(nets(&self.allowed));
        entry.anchored = self.anchored.as_deref().map(nets);
        entry.anchors = self.anchors;
        edit(&mut seen, &secret("tenant"), |m| {
            let named = (1..).zip(&self.nodes);
            m.nodes = named.map(|(n, node)| (format!("k{n}"), node.clone())).collect();
        });
        if self.hub_has_kg {
            edit(&mut seen, &ClusterIdentity::Local, |m| {
                m.nodes.values_mut().for_each(|node| node.server = Server::Kilo);
            });
        }
        (mesh, seen)
    }

    fn stop_kgs(&self, seen: &mut Observations) {
        edit(seen, &secret("tenant"), |m| {
            let stopped = m.nodes.values_mut().zip(&self.stopped).filter(|(_, stopped)| **stopped);
            stopped.for_each(|(node, _)| stop_kg(node));
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stopping_any_kg_causes_no_writes(tenant in tenant()) {
        let (mesh, mut seen) = tenant.mesh_and_observations();
        write_plan(&mesh, &mut seen);
        prop_assert_eq!(pending_writes(&mesh, &seen), vec![]);
        let before = plan_mesh(&mesh, &seen).1;
        tenant.stop_kgs(&mut seen);
        prop_assert_eq!(pending_writes(&mesh, &seen), vec![]);
        let after = plan_mesh(&mesh, &seen).1;
        prop_assert_eq!(&after.clusters["tenant"].skipped, &vec![]);
        prop_assert_eq!(&after.facts, &before.facts);
    }

    #[test]
    fn anchored_network_contains_no_node_address(tenant in tenant()) {
        let (mesh, mut seen) = tenant.mesh_and_observations();
        tenant.stop_kgs(&mut seen);
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        let nodes = &seen.members[&secret("tenant")].fresh().unwrap().nodes;
        let peers = mesh_plan.targets["mgmt"].peers.values();
        let node_prefixes: BTreeSet<IpNet> = nodes.values().flat_map(|node| {
            let pods = node.pod_cidrs.iter().filter_map(Claim::value).copied();
            pods.chain(node.wireguard_ip.value().map(|net| IpNet::from(net.addr())))
        }).collect();
        for peer in peers {
            let planned_node = &nodes[&peer.node];
            let same_location = nodes.values().filter(|node| node.location == planned_node.location);
            let same_segment = same_location.filter(|node| node.granularity != Some(Granularity::Full));
            let segment_ips: BTreeSet<IpAddr> =
                same_segment.chain([planned_node]).flat_map(|node| node.internal_ips.iter().copied()).collect();
            for net in peer.spec.allowed_ips.iter().filter(|net| !node_prefixes.contains(net)) {
                let mut addresses = nodes.values().flat_map(|node| &node.internal_ips);
                let contained = addresses.find(|address| net.contains(*address));
                // First exception: an operator may anchor the nodes' network if wg-agent serves the hub. wg-agent marks its outer
                // packets, so they do not use the route to that network. Second exception: the /32 of an InternalIP. The Peer of
                // the address's node may contain it. The Peer of another node in the same location may contain it, too, unless the
                // address's node has granularity full.
                let may_anchor_node_network = tenant.anchored.is_some() && !tenant.hub_has_kg;
                prop_assert!(
                    contained.is_none_or(|address| {
                        may_anchor_node_network || (*net == IpNet::from(*address) && segment_ips.contains(address))
                    }),
                    "{net}: {peer:?}"
                );
            }
        }
    }
}
