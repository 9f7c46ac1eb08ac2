//! Property tests for sandboxes: the hostile observed state of a sandbox affects only its own part of the plan.

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, ClusterIdentity, Mesh, Profile},
    observe::{Claim, Member, Node, Observation, PolicySpec},
    plan::MeshPlan,
};
use clustermesh_scenarios::{Scenario, identity, member, planned, sandboxed, scenario};
use ipnet::IpNet;
use proptest::prelude::*;

/// The profile that applies: the most restrictive one of the cluster's entries in meshes that are not being deleted. Standard if it
/// has no entry.
fn profile(scenario: &Scenario, identity: &ClusterIdentity) -> Profile {
    let meshes = scenario.meshes.iter().filter(|mesh| !mesh.deleting);
    let entries = meshes.flat_map(|mesh| &mesh.clusters);
    let same = entries.filter(|cluster| cluster.identity == *identity);
    same.map(|cluster| cluster.profile).max().unwrap_or(Profile::Standard)
}

fn is_host(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

/// The plan of one mesh as text, without the objects in the member `sandbox`, its nodes (in Peers and SandboxAccesses) and the reports
/// of its egress.
pub(crate) fn plan_without(mesh: &MeshPlan, sandbox: &str) -> Vec<String> {
    let mut parts = Vec::new();
    for (target, target_plan) in mesh.targets.iter().filter(|(target, _)| *target != sandbox) {
        let peers = target_plan.peers.iter().filter(|(_, peer)| peer.source != sandbox);
        parts.extend(peers.map(|(name, peer)| format!("{target} {name} {peer:?}")));
        parts.extend(
            target_plan
                .policies
                .iter()
                .map(|(name, policy)| format!("{target} {name} {policy:?}")),
        );
        // A sandbox may change its own nodes.
        let accesses = target_plan.accesses.iter().map(|(name, access)| {
            let nodes = (access.source != sandbox).then_some(&access.spec.nodes);
            format!(
                "{target} {name} {:?} {:?} {nodes:?}",
                access.spec.networks, access.spec.grants
            )
        });
        parts.extend(accesses);
        parts.extend(
            target_plan
                .services
                .iter()
                .map(|(name, service)| format!("{target} {name} {service:?}")),
        );
    }
    let egress = mesh.egress.iter().filter(|report| report.cluster != sandbox);
    parts.extend(egress.map(|report| format!("{report:?}")));
    parts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// The addresses of nodes in SandboxAccesses are inside the accepted networks of their member. PeerPolicies for a sandbox are
    /// closed.
    // threat: sandbox-forged-networks
    #[test]
    fn target_has_no_sandbox_peer_and_only_accepted_addresses(
        scenario in prop_oneof![scenario(), sandboxed()],
    ) {
        let plan = planned(&scenario);
        for mesh in plan.meshes.values() {
            for (name, target) in &mesh.targets {
                let target_profile = profile(&scenario, &mesh.identities[name]);
                for peer in target.peers.values().filter(|peer| peer.source != *name) {
                    prop_assert_ne!(profile(&scenario, &mesh.identities[&peer.source]), Profile::Sandbox);
                    prop_assert!(target_profile != Profile::Standard);
                }
                for policy in target.policies.values() {
                    let PolicySpec { sources, networks, allow, closed, .. } = &policy.spec;
                    // A member that became a sandbox has a closed policy until its last Peer is deleted.
                    if profile(&scenario, &mesh.identities[&policy.source]) == Profile::Sandbox {
                        prop_assert!(*closed && allow.is_empty() && sources == networks);
                    }
                }
                for access in target.accesses.values() {
                    // A SandboxAccess is always in a cluster-meshed member, and for a sandbox or for an importer of a masqueraded member.
                    prop_assert_eq!(target_profile, Profile::ClusterMeshed);
                    let is_masqueraded = |mesh: &Mesh| mesh.clusters.iter().any(|c| c.name == *name && c.effective_addressing() == Addressing::Masqueraded);
                    let is_sandbox = profile(&scenario, &mesh.identities[&access.source]) == Profile::Sandbox;
                    // A member with networks that were accepted before stays masqueraded if its change to Routed is refused.
                    let may_have_stayed_masqueraded = |mesh: &Mesh| mesh.accepted.contains_key(name);
                    prop_assert!(is_sandbox || scenario.meshes.iter().any(|mesh| is_masqueraded(mesh) || may_have_stayed_masqueraded(mesh)));
                    let accepted = &mesh.clusters[&access.source].accepted;
                    let addresses = access.spec.nodes.values().flat_map(|node| &node.addresses);
                    for address in addresses {
                        prop_assert!(accepted.iter().any(|net| net.contains(address)), "{address} of {access:?}");
                    }
                }
            }
        }
    }

    // threat: sandbox-reads-target
    #[test]
    fn sandbox_has_only_gateway_peers(scenario in prop_oneof![scenario(), sandboxed()]) {
        let plan = planned(&scenario);
        for mesh in plan.meshes.values() {
            for (name, target) in mesh.targets.iter().filter(|(name, _)| profile(&scenario, &mesh.identities[*name]) == Profile::Sandbox) {
                for peer in target.peers.values().filter(|peer| peer.source != *name) {
                    let member = scenario.seen.members[&mesh.identities[&peer.source]].last().unwrap();
                    // Several gateways may publish the same key; the Peer belongs to one of them.
                    let mut gateways = member.gateways.values().filter(|gateway| gateway.public_key == peer.spec.public_key);
                    let matches_gateway = gateways.any(|gateway| {
                        peer.spec.allowed_ips.iter().all(|net| is_host(net) && gateway.addresses.contains(&net.addr()))
                    });
                    prop_assert!(matches_gateway, "{peer:?}");
                    prop_assert!(peer.spec.endpoint.is_some());
                }
                for policy in target.policies.values() {
                    prop_assert!(policy.spec.allow.is_empty() && policy.spec.sources.iter().all(is_host));
                }
            }
        }
    }

    // threat: sandbox-forged-objects
    #[test]
    fn sandbox_state_does_not_change_plans_of_others(
        scenario in sandboxed(),
        mut hostile in member(2),
    ) {
        let sandbox = identity(2);
        let mut scenario = scenario;
        // Each node gets its own key, because another test covers copied keys.
        let set_own_keys = |member: &mut Member| {
            for (n, node) in member.nodes.values_mut().enumerate() {
                if let Claim::Valid(key) = &mut node.public_key {
                    *key = PublicKey::new([100 + u8::try_from(n).unwrap(); 32]);
                }
            }
        };
        set_own_keys(&mut hostile);
        let mut quiet = Member { peers: Some([].into()), policies: Some([].into()), ..Member::default() };
        quiet.nodes.insert("a".into(), Node::default());
        scenario.seen.members.insert(sandbox.clone(), Observation::Fresh(quiet));
        let mut with_hostile = scenario.clone();
        with_hostile.seen.members.insert(sandbox, Observation::Fresh(hostile));
        let (before, after) = (planned(&scenario), planned(&with_hostile));
        for (id, mesh) in &before.meshes {
            prop_assert_eq!(plan_without(mesh, "c2"), plan_without(&after.meshes[id], "c2"), "mesh {}", id);
        }
    }
}
