//! Property test for the Peers of a member's nodes in their own cluster.

use std::collections::BTreeSet;

use clustermesh_core::{
    mesh::Locations,
    observe::{Claim, PeerRole},
};
use clustermesh_scenarios::{planned, scenario};
use ipnet::IpNet;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn peer_of_own_node_has_only_its_addresses(scenario in scenario()) {
        let plan = planned(&scenario);
        for mesh in &scenario.meshes {
            let planned = &plan.meshes[&mesh.id];
            for (name, target) in &planned.targets {
                for (peer_name, peer) in target.peers.iter().filter(|(_, peer)| peer.source == *name) {
                    let entry = mesh.clusters.iter().find(|c| c.name == *name).unwrap();
                    prop_assert_eq!(entry.locations, Locations::Connected);
                    let member = scenario.seen.members[&planned.identities[name]].last().unwrap();
                    if planned.clusters[name].held.contains_key(&peer.node) {
                        prop_assert!(member.peers.as_ref().unwrap().contains_key(peer_name));
                        continue;
                    }
                    let node = &member.nodes[&peer.node];
                    prop_assert_eq!(&peer.spec.role, &PeerRole::OwnNode(node.location.clone()));
                    let addresses = node.internal_ips.iter().copied().chain(node.wireguard_ip.value().map(IpNet::addr));
                    let mut own: BTreeSet<IpNet> = addresses.map(|address| IpNet::from(address.to_canonical())).collect();
                    own.extend(node.pod_cidrs.iter().filter_map(Claim::value).map(IpNet::trunc));
                    own.extend(node.allowed_location_ips.iter().map(IpNet::trunc));
                    prop_assert!(peer.spec.allowed_ips.is_subset(&own), "{peer:?} of {node:?}");
                    let api = member.api_endpoints.iter().map(|at| IpNet::from(at.ip()));
                    prop_assert!(!api.into_iter().any(|api| peer.spec.allowed_ips.contains(&api)));
                }
            }
        }
    }
}
