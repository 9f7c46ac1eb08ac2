//! Property tests for whole plans: networks, keys, policies, endpoints, and objects that must not change.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use clustermesh_core::{
    diff::{Action, Item},
    key::PublicKey,
    mesh::{Addressing, ClusterIdentity, Locations, Profile},
    observe::{Claim, Endpoint, Granularity, Node, Observation, Server},
    ownership::Ownership,
    plan::{Fact, Plan, Settings},
};
use clustermesh_scenarios::{Scenario, after_writes, identity, node, ownership_of, planned, scenario, steps};
use ipnet::IpNet;
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    // threat: foreign-network
    #[test]
    fn planned_objects_stay_inside_allowed_networks(scenario in scenario()) {
        let plan = planned(&scenario);
        for mesh in &scenario.meshes {
            let planned = &plan.meshes[&mesh.id];
            for (name, target) in &planned.targets {
                for peer in target.peers.values().filter(|peer| peer.source != *name) {
                    let accepted = &planned.clusters[&peer.source].accepted;
                    let entry = mesh.clusters.iter().find(|c| c.name == peer.source).unwrap();
                    // If a change of allowedNetworks is refused, the networks that an earlier plan accepted stay.
                    let before = mesh.accepted.get(&peer.source).into_iter().flatten();
                    let allowed_now_or_before: Vec<IpNet> = before.chain(&entry.allowed).copied().collect();
                    for net in &peer.spec.allowed_ips {
                        prop_assert!(accepted.iter().any(|a| a.contains(net)), "{net} of {peer:?} outside {accepted:?}");
                        prop_assert!(allowed_now_or_before.iter().any(|a| a.contains(net)));
                    }
                }
                for service in target.services.values() {
                    let accepted = &planned.clusters[&service.source].accepted;
                    for endpoint in service.slices.values().flat_map(|slice| &slice.endpoints) {
                        prop_assert!(accepted.iter().any(|a| a.contains(&endpoint.address)));
                    }
                }
            }
        }
    }

    // threat: duplicate-key-or-range
    #[test]
    fn key_and_prefix_have_one_owner_in_a_target(scenario in scenario()) {
        let plan = planned(&scenario);
        for n in 0..3 {
            let mut keys = BTreeSet::new();
            let mut prefixes = BTreeSet::new();
            let existing = scenario.seen.members[&identity(n)].last().and_then(|m| m.peers.clone()).unwrap_or_default();
            for (name, peer) in &existing {
                // These Peers keep their keys and prefixes: foreign and unlabelled ones, those of a paused mesh, those that describe
                // an unobserved member, and orphaned ones that overlap no network of a member connected to this target.
                let kept = match ownership_of(&plan, &peer.owner) {
                    Ownership::Foreign => true,
                    // Exception: a mesh that plans this Peer adopts it.
                    Ownership::Unlabelled => {
                        let mut targets = plan.meshes.values().filter_map(|mesh| mesh.targets.get(&format!("c{n}")));
                        !targets.any(|target| target.peers.contains_key(name))
                    }
                    Ownership::Mesh(id) if plan.meshes[id].paused => true,
                    Ownership::Mesh(id) => {
                        let mesh = &plan.meshes[id];
                        let source = peer.owner.source_cluster.clone().unwrap_or_default();
                        let target = mesh.targets.get(&format!("c{n}"));
                        let unseen = mesh.identities.get(&source).is_some_and(|i| scenario.seen.members[i].last().is_none());
                        unseen && target.is_some_and(|target| target.sources_not_fresh.contains(&source))
                    }
                    Ownership::Orphan => peer.spec.as_ref().is_ok_and(|spec| {
                        let targets = plan.meshes.values().filter_map(|mesh| mesh.targets.get(&format!("c{n}")));
                        let sources: BTreeSet<IpNet> = targets.flat_map(|target| target.source_networks.iter().copied()).collect();
                        let overlap = |a: &IpNet, b: &IpNet| a.contains(b) || b.contains(a);
                        !spec.allowed_ips.iter().any(|net| sources.iter().any(|source| overlap(source, net)))
                    }),
                };
                if let (true, Ok(spec)) = (kept, &peer.spec) {
                    keys.insert(spec.public_key);
                    prefixes.extend(spec.allowed_ips.iter().copied());
                }
            }
            for mesh in plan.meshes.values().filter(|mesh| !mesh.paused) {
                for peer in mesh.targets[&format!("c{n}")].peers.values() {
                    prop_assert!(keys.insert(peer.spec.public_key), "second owner of a key: {peer:?}");
                    for net in &peer.spec.allowed_ips {
                        prop_assert!(prefixes.insert(*net), "second owner of {net}: {peer:?}");
                        prop_assert_eq!(net.trunc(), *net);
                    }
                }
            }
        }
    }

    // threat: hostile-member-root
    #[test]
    fn policy_allows_only_own_networks_and_denies_api_servers(scenario in scenario()) {
        let plan = planned(&scenario);
        for mesh in plan.meshes.values() {
            for (name, target) in &mesh.targets {
                let (Some(report), Some(identity)) = (mesh.clusters.get(name), mesh.identities.get(name)) else {
                    prop_assert!(target.policies.is_empty(), "{name} is not in the plan: {target:?}");
                    continue;
                };
                let own = &report.accepted;
                // Accepted networks of all other clusters, in all meshes.
                let members = plan.meshes.values().flat_map(|mesh| mesh.clusters.iter().map(move |(name, report)| (mesh, name, report)));
                let others: Vec<IpNet> = members
                    .filter(|(mesh, name, _)| mesh.identities.get(*name) != Some(identity))
                    .flat_map(|(_, _, report)| report.accepted.iter().copied())
                    .collect();
                for policy in target.policies.values() {
                    for net in &policy.spec.allow {
                        prop_assert!(own.iter().any(|own| own.contains(net)), "{net} in {name}: {policy:?}");
                        prop_assert!(!others.iter().any(|other| other.contains(net) || net.contains(other)), "{net} in {name}: {policy:?}");
                    }
                    prop_assert_eq!(&policy.spec.infrastructure_ports, &Settings::default().infrastructure_ports);
                    if let Some(member) = scenario.seen.members[identity].last() {
                        prop_assert_eq!(&policy.spec.deny, &member.api_endpoints);
                    }
                }
            }
        }
    }

    // threat: overlapping-mesh
    #[test]
    fn accepted_networks_of_different_clusters_are_disjoint(scenario in scenario()) {
        let plan = planned(&scenario);
        let mut accepted_networks: Vec<(ClusterIdentity, IpNet)> = Vec::new();
        for mesh in plan.meshes.values() {
            for (name, report) in &mesh.clusters {
                accepted_networks.extend(report.accepted.iter().map(|net| (mesh.identities[name].clone(), *net)));
            }
        }
        for (a, net_a) in &accepted_networks {
            for (b, net_b) in accepted_networks.iter().filter(|(b, _)| b != a) {
                prop_assert!(!net_a.contains(net_b), "{net_a} of {a} contains {net_b} of {b}");
            }
        }
    }

    // threat: list-order
    #[test]
    fn plan_does_not_depend_on_input_order(scenario in scenario(), rotation in any::<prop::sample::Index>()) {
        let plan = planned(&scenario);
        let mut other = scenario.clone();
        let rotation = rotation.index(other.meshes.len());
        other.meshes.rotate_left(rotation);
        for mesh in &mut other.meshes {
            mesh.clusters.iter_mut().for_each(|cluster| cluster.allowed.reverse());
            mesh.accepted.values_mut().for_each(|list| list.reverse());
        }
        for member in other.seen.members.values_mut() {
            if let Observation::Fresh(member) | Observation::Stale(member, _) = member {
                for node in member.nodes.values_mut() {
                    node.allowed_location_ips.reverse();
                }
                member.slices.values_mut().for_each(|slice| slice.endpoints.reverse());
            }
        }
        prop_assert_eq!(planned(&other), plan);
    }

    // threat: malformed-node
    #[test]
    fn invalid_node_does_not_change_peers_of_other_nodes(
        scenario in scenario(),
        (n, mut bad) in (0usize..3).prop_flat_map(|n| (Just(n), node(n, 5))),
        how in 0u8..4,
    ) {
        // Longer than the 5 minutes for which a Node is held.
        bad.held_for = Some(Duration::from_secs(600));
        bad.granularity = Some(Granularity::Full);
        bad.location = "elsewhere".into();
        // If kg were active on this Node, no Peers between the locations of the Node's cluster would be planned.
        bad.silent = true;
        bad.discovered.clear();
        bad.persistent_keepalive = 0;
        match how {
            0 => bad.public_key = Claim::Invalid("x".into()),
            1 => bad.wireguard_ip = Claim::Valid("203.0.113.1/32".parse().unwrap()),
            2 => bad.force_endpoint = Claim::Invalid("x".into()),
            _ => bad.public_key = Claim::Absent,
        }
        // The youngest Node: it gets no key or prefix that another Node has.
        bad.created = 1_000_000;
        if bad.public_key.value().is_some() {
            bad.public_key = Claim::Valid(PublicKey::new([200; 32]));
        }
        // If a target is masqueraded or connects its locations, Peers of other members there get no allowed IPs that overlap a
        // podCIDR of the target's own Nodes. So podCIDRs of the bad Node could change these Peers.
        let clusters = scenario.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let mut own = clusters.filter(|cluster| cluster.identity.same_cluster(&identity(n)));
        if own.any(|cluster| {
            cluster.effective_addressing() == Addressing::Masqueraded || cluster.locations == Locations::Connected
        }) {
            bad.pod_cidrs.clear();
        }
        // Removes networks that contain all addresses: with them, the WireGuard address of case 1 would be valid.
        let mut scenario = scenario;
        for mesh in &mut scenario.meshes {
            mesh.clusters.iter_mut().for_each(|cluster| cluster.allowed.retain(|net| net.prefix_len() > 0));
            mesh.accepted.values_mut().for_each(|list| list.retain(|net| net.prefix_len() > 0));
        }
        // Writes the anchored networks to the status. A network that is not in the status is anchored only if no Node claims a
        // prefix inside it, so the bad Node could end its anchoring.
        let scenario = after_writes(scenario);
        let mut worse = scenario.clone();
        let Some(Observation::Fresh(member)) = worse.seen.members.get_mut(&identity(n)) else { return Ok(()) };
        // A Node's IP families, and whether it is behind a NAT, affect the Peers of other nodes. So the bad Node gets the addresses of
        // another Node. That Node must have no explicit endpoint, because the family of such an endpoint would count too. If
        // there is no such Node, the bad Node gets no addresses.
        let has_explicit = |node: &Node| node.clustermesh_endpoint != Claim::Absent || node.force_endpoint != Claim::Absent;
        let model = member.nodes.values().find(|node| !has_explicit(node)).cloned().unwrap_or_default();
        (bad.internal_ips, bad.external_ips, bad.kilo_endpoint) = (model.internal_ips, model.external_ips, model.kilo_endpoint);
        // This annotation has priority: with it, the invalid `force_endpoint` of case 2 would be ignored.
        bad.clustermesh_endpoint = Claim::Absent;
        if how != 2 {
            bad.force_endpoint = Claim::Absent;
        }
        // Whether a target keeps the Peers of quarantined members depends on whether wg-agent serves all its nodes that have a
        // tunnel (`only_agents`). The bad Node must not change this.
        let before = planned(&scenario);
        let reports = before.meshes.values().filter_map(|mesh| mesh.clusters.get(&format!("c{n}")));
        let is_agent = |node: &Node| node.server == Server::Agent;
        // For each mesh: whether wg-agent serves all nodes with a tunnel; `None` = no node has a tunnel.
        let only_agents: Vec<Option<bool>> = reports
            .map(|report| {
                let has_tunnel = |(name, node): &(&str, &Node)| {
                    node.public_key != Claim::Absent || report.held.contains_key(*name)
                };
                let mut with_tunnel = member.nodes.iter().filter(has_tunnel).peekable();
                with_tunnel.peek().is_some().then(|| with_tunnel.all(|(_, node)| is_agent(node)))
            })
            .collect();
        let first = only_agents.first().copied().flatten();
        let value_of_all = first.filter(|value| only_agents.iter().all(|other| *other == Some(*value)));
        // If `only_agents` is `Some(true)` for all meshes, wg-agent serves the bad Node; if it is `Some(false)` for all, kg does.
        // So the bad Node changes none of the values of `only_agents`. Otherwise it gets no key, so it has no tunnel and does not
        // count in `only_agents`. The planner also checks whether wg-agent serves any Node, with or without a tunnel: if none, it
        // assumes kg. So a bad Node without a key is served by wg-agent only if another Node is.
        let bad_node_has_agent = value_of_all.unwrap_or_else(|| {
            bad.public_key = Claim::Absent;
            member.nodes.values().any(is_agent)
        });
        bad.server = if bad_node_has_agent { Server::Agent } else { Server::Kilo };
        member.nodes.insert("zz-bad".into(), bad);
        let after = planned(&worse);
        // Paused meshes are not compared: `after_writes` adds none of their anchored networks to the status, so the bad Node may end the
        // anchoring.
        for (id, mesh) in before.meshes.iter().filter(|(_, mesh)| !mesh.paused) {
            for (target, target_plan) in &mesh.targets {
                let after = &after.meshes[id].targets[target].peers;
                let mut expected = target_plan.peers.clone();
                let mut after = after.clone();
                // The keepalive is not compared, because it depends on the target's own nodes.
                expected.values_mut().chain(after.values_mut()).for_each(|peer| peer.spec_mut().persistent_keepalive = 0);
                prop_assert_eq!(&after, &expected, "target {} of {}", target, id);
            }
        }
    }

    #[test]
    fn plan_is_stable_after_it_is_written(scenario in scenario()) {
        let scenario = after_writes(scenario);
        let plan = planned(&scenario);
        for (identity, steps) in steps(&plan, &scenario) {
            prop_assert_eq!(steps, vec![], "in {}", identity);
        }
    }

    // threat: empty-list
    #[test]
    fn foreign_objects_and_peers_of_unobserved_members_stay(scenario in scenario()) {
        let plan = planned(&scenario);
        for (target_identity, steps) in steps(&plan, &scenario) {
            let member = scenario.seen.members[&target_identity].fresh().unwrap();
            for step in steps {
                if step.action == Action::Create {
                    continue;
                }
                let owner = match &step.item {
                    Item::Peer(name, _) => member.peers.as_ref().unwrap()[name].owner.clone(),
                    Item::Policy(name, _) => member.policies.as_ref().unwrap()[name].owner.clone(),
                    Item::Access(name, _) => member.accesses.as_ref().unwrap()[name].owner.clone(),
                    Item::Service(name, _) => member.services[name].managed.clone().unwrap(),
                    Item::Slice(name, _) => member.slices[name].managed.clone().unwrap(),
                };
                prop_assert_ne!(ownership_of(&plan, &owner), Ownership::Foreign);
                let Ownership::Mesh(id) = ownership_of(&plan, &owner) else { continue };
                let mesh = &plan.meshes[id];
                prop_assert!(!mesh.paused);
                if step.action == Action::Delete && !mesh.deleting && matches!(step.item, Item::Peer(..)) {
                    let source = owner.source_cluster.unwrap_or_default();
                    let Some(source_identity) = mesh.identities.get(&source) else { continue };
                    let mesh_input = scenario.meshes.iter().find(|m| m.id == *id).unwrap();
                    let is_meshed = |name: &str| {
                        let cluster = mesh_input.clusters.iter().find(|c| c.name == name).unwrap();
                        let all_entries = scenario.meshes.iter().filter(|m| !m.deleting).flat_map(|m| &m.clusters);
                        let has_other_profile = all_entries
                            .filter(|c| c.identity == cluster.identity)
                            .any(|c| c.profile != Profile::ClusterMeshed);
                        !has_other_profile && !mesh.clusters[name].accepted.is_empty()
                    };
                    let target = mesh.identities.iter().find(|(_, i)| **i == target_identity).unwrap().0.clone();
                    // In targets that do not enforce policies, the Peers of a quarantined member are deleted even if it is not
                    // observed. Therefore Peers of quarantined members are not checked in any target.
                    let entries = scenario.meshes.iter().filter(|m| !m.deleting).flat_map(|m| &m.clusters);
                    if entries.into_iter().any(|c| c.quarantine && c.identity == *source_identity) {
                        continue;
                    }
                    if is_meshed(&source) && is_meshed(&target) && source != target {
                        let is_fresh = scenario.seen.members[source_identity].fresh().is_some();
                        prop_assert!(is_fresh, "{step:?} does not follow from an observation");
                    }
                }
            }
        }
    }

    // threat: forbidden-endpoint
    #[test]
    fn planned_endpoint_is_usable_and_outside_target_networks(scenario in scenario()) {
        let plan = planned(&scenario);
        for mesh in &scenario.meshes {
            let planned = &plan.meshes[&mesh.id];
            for (target, target_plan) in &planned.targets {
                for peer in target_plan.peers.values() {
                    let existing = scenario.seen.members[&planned.identities[target]].last().and_then(|m| m.peers.as_ref());
                    if planned.clusters[&peer.source].held.contains_key(&peer.node) && existing.is_some() {
                        // The Peer of a held node keeps its endpoint.
                        continue;
                    }
                    let first = match &peer.spec.endpoint {
                        Some(Endpoint::Ip(first)) => Some(*first),
                        other => {
                            prop_assert_eq!(other, &None);
                            prop_assert!(peer.spec.persistent_keepalive > 0);
                            None
                        }
                    };
                    let candidates = &peer.spec.candidates;
                    prop_assert!(candidates.is_empty() || candidates.first() == first.as_ref(), "{:?}", peer);
                    let entry = mesh.clusters.iter().find(|c| c.name == peer.source).unwrap();
                    for endpoint in candidates.iter().copied().chain(first) {
                        prop_assert!(can_be_endpoint(endpoint), "{endpoint} of {peer:?}");
                        let target_networks = &planned.clusters[target].accepted;
                        let inside = peer.source != *target && target_networks.iter().any(|net| net.contains(&endpoint.ip()));
                        // Exception: endpoints inside the source's `endpoint_networks`.
                        prop_assert!(!inside || entry.endpoint_networks.iter().any(|net| net.contains(&endpoint.ip())));
                    }
                }
            }
        }
    }
}

fn can_be_endpoint(endpoint: SocketAddr) -> bool {
    let special = match endpoint.ip().to_canonical() {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let ip = endpoint.ip().to_canonical();
    endpoint.port() != 0 && !special && !ip.is_loopback() && !ip.is_multicast() && !ip.is_unspecified()
}

/// The cases listed in `generated_scenarios_cover_the_required_cases` that this scenario covers.
fn reached_cases(scenario: &Scenario, plan: &Plan) -> BTreeSet<&'static str> {
    let mut cases = BTreeSet::new();
    for mesh in plan.meshes.values().filter(|mesh| !mesh.paused) {
        let peers = || mesh.targets.values().flat_map(|target| target.peers.values());
        let reports = || mesh.clusters.values();
        let entries_of_all_meshes = scenario.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let has_fact = |is: fn(&Fact) -> bool| mesh.facts.iter().any(is);
        let reached = [
            ("a Peer", peers().next().is_some()),
            (
                "Peers of three members",
                peers().map(|peer| &peer.source).collect::<BTreeSet<_>>().len() == 3,
            ),
            (
                "a SandboxAccess",
                mesh.targets.values().any(|target| !target.accesses.is_empty()),
            ),
            ("several candidates", peers().any(|peer| peer.spec.candidates.len() > 1)),
            ("a skipped node", reports().any(|report| !report.skipped.is_empty())),
            (
                "a skipped node next to a Peer",
                reports().any(|report| !report.skipped.is_empty() && report.registered > 0),
            ),
            ("a held node", reports().any(|report| !report.held.is_empty())),
            (
                "an anchor",
                reports().any(|report| report.anchored.values().any(|nodes| !nodes.is_empty())),
            ),
            (
                "a previously anchored network",
                entries_of_all_meshes
                    .into_iter()
                    .any(|entry| !entry.previous_anchors.is_empty() && entry.anchored.is_none()),
            ),
            (
                "a quarantine",
                has_fact(|fact| matches!(fact, Fact::Quarantined { .. })) && peers().next().is_some(),
            ),
            (
                "a shared address",
                has_fact(|fact| matches!(fact, Fact::AddressShared { .. })),
            ),
            (
                "a mirrored Service",
                mesh.targets.values().any(|target| !target.services.is_empty()),
            ),
            (
                "networks that overlap",
                has_fact(|fact| matches!(fact, Fact::NetworksOverlap { .. })),
            ),
        ];
        cases.extend(
            reached
                .into_iter()
                .filter(|(_, reached)| *reached)
                .map(|(case, _)| case),
        );
    }
    cases
}

#[test]
fn generated_scenarios_cover_the_required_cases() {
    const SCENARIOS: usize = 256;
    let minima = [
        ("a Peer", 130),
        ("Peers of three members", 20),
        ("a SandboxAccess", 10),
        ("several candidates", 80),
        ("a skipped node", 120),
        ("a skipped node next to a Peer", 80),
        ("a held node", 16),
        ("an anchor", 60),
        ("a previously anchored network", 30),
        ("a quarantine", 40),
        ("a shared address", 7),
        ("a mirrored Service", 10),
        ("networks that overlap", 30),
    ];
    let mut runner = TestRunner::deterministic();
    let mut reached: BTreeMap<&str, usize> = minima.iter().map(|(case, _)| (*case, 0)).collect();
    for _ in 0..SCENARIOS {
        let scenario = scenario().new_tree(&mut runner).unwrap().current();
        for case in reached_cases(&scenario, &planned(&scenario)) {
            *reached.entry(case).or_default() += 1;
        }
    }
    let missed: Vec<_> = minima
        .iter()
        .filter(|(case, minimum)| reached[case] < *minimum)
        .collect();
    assert!(
        missed.is_empty(),
        "cases in {SCENARIOS} scenarios: {reached:?}; expected at least: {missed:?}"
    );
}
