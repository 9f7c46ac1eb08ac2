//! Tests members that kg serves: restarts, leaders of locations, nodes on which kg is dead.

use super::*;

mod generated;

/// A node that kg serves, with the annotations that kg publishes.
fn kg_node(n: u8, granularity: Granularity) -> Node {
    let node = node(2, n);
    Node {
        server: Server::Kilo,
        granularity: Some(granularity),
        kilo_internal_ip: node.internal_ips.first().copied(),
        ..node
    }
}

/// A node that follows the leader of its location: kg writes an empty `wireguard-ip`.
fn follower(n: u8) -> Node {
    Node {
        wireguard_ip: Claim::Absent,
        ..kg_node(n, Granularity::Location)
    }
}

/// Removes the annotations that kg removes on SIGTERM.
fn stop_kg(node: &mut Node) {
    node.public_key = Claim::Absent;
    node.wireguard_ip = Claim::Absent;
    node.kilo_endpoint = Claim::Absent;
    node.kilo_internal_ip = None;
    node.granularity = None;
    node.discovered.clear();
}

/// A mesh of two clusters. The tenant has the nodes `k1`, `k2`, ...; allowedNetworks list the InternalIPs of `k1` and `k2`.
fn kilo_tenant(nodes: &[Node]) -> (Mesh, Observations) {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    mesh.clusters[1]
        .allowed
        .extend(nets(&["172.30.2.1/32", "172.30.2.2/32"]));
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes = (1..)
            .zip(nodes)
            .map(|(n, node)| (format!("k{n}"), node.clone()))
            .collect();
    });
    (mesh, seen)
}

/// All steps that would be written, by member.
fn pending_writes(mesh: &Mesh, seen: &Observations) -> Vec<(String, Vec<Arc<Step>>)> {
    let (plan, _) = plan_mesh(mesh, seen);
    let members = seen.members.iter();
    let written =
        members.map(|(identity, member)| (identity.to_string(), diff(&plan, identity, member.fresh().unwrap())));
    written.filter(|(_, steps)| !steps.is_empty()).collect()
}

#[test]
fn restart_of_kg_causes_no_writes_and_no_facts() {
    for (granularity, nodes) in [
        ("full", [kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)]),
        ("location", [kg_node(1, Granularity::Location), follower(2)]),
    ] {
        let (mesh, mut seen) = kilo_tenant(&nodes);
        write_plan(&mesh, &mut seen);
        let before = plan_mesh(&mesh, &seen).1;
        for restarting in [&["k1"][..], &["k2"], &["k1", "k2"]] {
            let mut restarted = seen.clone();
            edit(&mut restarted, &secret("tenant"), |m| {
                restarting
                    .iter()
                    .for_each(|name| stop_kg(m.nodes.get_mut(name).unwrap()));
            });
            assert_eq!(
                pending_writes(&mesh, &restarted),
                vec![],
                "{granularity}: {restarting:?}"
            );
            let after = plan_mesh(&mesh, &restarted).1;
            assert_eq!(after.facts, before.facts, "{granularity}: {restarting:?}");
            assert_eq!(
                after.clusters["tenant"].skipped,
                vec![],
                "{granularity}: {restarting:?}"
            );
        }
    }
}

/// wg-agent serves the other node, so the restarting node is the only one that shows that kg runs in this member.
#[test]
fn restart_of_the_only_kg_causes_no_writes() {
    let mut nodes = [kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)];
    nodes[1].server = Server::Agent;
    let (mesh, mut seen) = kilo_tenant(&nodes);
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &secret("tenant"), |m| {
        stop_kg(m.nodes.get_mut("k1").unwrap())
    });
    assert_eq!(pending_writes(&mesh, &seen), vec![]);
}

/// The Peer of k1 does not contain the InternalIP of k2. In granularity `location`, the Peer of the leader k1 would contain it.
#[test]
fn internal_ip_is_only_in_own_peer_in_granularity_full() {
    let (mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)]);
    // k2 has never published anything.
    edit(&mut seen, &secret("tenant"), |m| {
        stop_kg(m.nodes.get_mut("k2").unwrap())
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let own = net_set(&["10.2.1.0/24", "100.66.2.1/32", "172.30.2.1/32"]);
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--k1"), own);
    // `anchored` in a PeerPolicy in the tenant lists those of the tenant's allowedNetworks in which no Node has an address. There
    // are none: 172.30.2.2/32 contains the InternalIP of k2, which counts although k2 has no Peer.
    let policy = &mesh_plan.targets["tenant"].policies["m--mgmt"];
    assert_eq!(policy.spec.anchored, net_set(&[]));
}

#[test]
fn location_with_policy_mode_agents_has_one_leader() {
    let (mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Location), follower(2)]);
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.values_mut().for_each(|node| node.server = Server::AgentPolicy);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(mesh_plan.clusters["tenant"].skipped, vec![]);
    let expected = [
        "10.2.1.0/24",
        "10.2.2.0/24",
        "100.66.2.1/32",
        "172.30.2.1/32",
        "172.30.2.2/32",
    ];
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--k1"), net_set(&expected));
}

/// The tenant's nodes: (nodes with a Peer in the hub, held nodes, skipped nodes).
fn outcome(mesh_plan: &MeshPlan) -> (Vec<&str>, Vec<&str>, Vec<(&str, Reason)>) {
    let report = &mesh_plan.clusters["tenant"];
    let held = report.held.keys().map(String::as_str).collect();
    let peers = mesh_plan.targets["mgmt"].peers.values().map(|peer| peer.node.as_str());
    let skipped = report
        .skipped
        .iter()
        .map(|skipped| (skipped.node.as_str(), skipped.reason));
    (peers.collect(), held, skipped.collect())
}

#[test]
fn silent_leader_is_replaced() {
    // kg on k1 is dead. The other nodes' kg elected k2, which has the WireGuard address that is still in k1's annotation.
    let mut elected = kg_node(2, Granularity::Location);
    elected.wireguard_ip = kg_node(1, Granularity::Location).wireguard_ip;
    let (mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Location), elected, follower(3)]);
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("k1").unwrap().silent = true
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(outcome(&mesh_plan), (vec!["k2"], vec![], vec![]));
    let expected = [
        "10.2.1.0/24",
        "10.2.2.0/24",
        "10.2.3.0/24",
        "100.66.2.1/32",
        "172.30.2.1/32",
        "172.30.2.2/32",
    ];
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--k2"), net_set(&expected));
    // kg on the new leader restarts while the annotations of k1 still exist.
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &secret("tenant"), |m| {
        stop_kg(m.nodes.get_mut("k2").unwrap())
    });
    assert_eq!(pending_writes(&mesh, &seen), vec![]);
}

#[test]
fn leader_is_chosen_in_the_order_of_kg() {
    let leader_after = |change: fn(&mut Rows<Node>)| {
        let (mesh, mut seen) = kilo_tenant(&[1, 2, 3].map(|n| kg_node(n, Granularity::Location)));
        edit(&mut seen, &secret("tenant"), |m| change(&mut m.nodes));
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        outcome(&mesh_plan).0.join(" ")
    };
    assert_eq!(leader_after(|_| ()), "k1", "the first by name");
    assert_eq!(
        leader_after(|nodes| nodes.get_mut("k1").unwrap().created = 9),
        "k1",
        "age does not matter"
    );
    assert_eq!(
        leader_after(|nodes| nodes.get_mut("k2").unwrap().is_preferred_leader = true),
        "k2"
    );
    // kg treats shared address space as public.
    assert_eq!(
        leader_after(|nodes| nodes.get_mut("k3").unwrap().kilo_endpoint =
            Claim::Valid(Endpoint::Ip("100.64.0.3:51820".parse().unwrap()))),
        "k3"
    );
    assert_eq!(
        leader_after(|nodes| {
            nodes.get_mut("k3").unwrap().kilo_endpoint =
                Claim::Valid(Endpoint::Ip("203.0.113.3:51820".parse().unwrap()));
            nodes.get_mut("k2").unwrap().is_preferred_leader = true;
        }),
        "k2",
        "a node with the leader annotation comes before one with a public endpoint"
    );
    assert_eq!(
        leader_after(|nodes| {
            nodes.values_mut().for_each(|node| node.is_preferred_leader = true);
            nodes.get_mut("k3").unwrap().kilo_endpoint =
                Claim::Valid(Endpoint::Ip("203.0.113.3:51820".parse().unwrap()));
        }),
        "k3"
    );
}

#[test]
fn address_of_silent_node_goes_to_the_active_one() {
    let (mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)]);
    write_plan(&mesh, &mut seen);
    // kg has given the address of k1 to k2. The annotation of k1 still contains the address, and k1 is not silent yet.
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("k2").unwrap().wireguard_ip = m.nodes["k1"].wireguard_ip.clone();
    });
    assert_eq!(
        outcome(&plan_mesh(&mesh, &seen).1),
        (vec!["k1", "k2"], vec!["k2"], vec![]),
        "kg runs on both nodes, and may be changing their addresses"
    );
    let silent = |held_for| {
        let mut seen = seen.clone();
        edit(&mut seen, &secret("tenant"), |m| {
            let dead = m.nodes.get_mut("k1").unwrap();
            (dead.silent, dead.held_for) = (true, held_for);
        });
        plan_mesh(&mesh, &seen).1
    };
    let (at_first, later) = (silent(None), silent(Some(HOLD)));
    assert_eq!(outcome(&at_first), (vec!["k1", "k2"], vec!["k1"], vec![]));
    let prefixes_of_k2 = net_set(&["10.2.2.0/24", "100.66.2.1/32", "172.30.2.2/32"]);
    assert_eq!(*allowed(&at_first, "mgmt", "m--tenant--k2"), prefixes_of_k2);
    assert_eq!(
        outcome(&later),
        (vec!["k2"], vec![], vec![("k1", Reason::WGIPDuplicate)])
    );
    assert_eq!(*allowed(&later, "mgmt", "m--tenant--k2"), prefixes_of_k2);
}

#[test]
fn anchor_moves_from_a_silent_to_an_active_node() {
    let (mut mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)]);
    let service: IpNet = "10.97.0.0/16".parse().unwrap();
    mesh.clusters[1].allowed.push(service);
    write_plan(&mesh, &mut seen);
    let carrier = |seen: &Observations| {
        let (_, mesh_plan) = plan_mesh(&mesh, seen);
        let mut peers = mesh_plan.targets["mgmt"].peers.values();
        peers
            .find(|peer| peer.spec.allowed_ips.contains(&service))
            .map(|peer| peer.node.clone())
    };
    let first = carrier(&seen).unwrap();
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut(&first).unwrap().silent = true
    });
    let second = carrier(&seen).unwrap();
    assert_ne!(second, first);
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut(&second).unwrap().silent = true
    });
    assert_eq!(
        carrier(&seen),
        Some(first),
        "kg checks in for no node, so the anchor stays as in the existing Peers, which were not updated"
    );
}

/// The reason of the condition Degraded, and its message.
fn degraded(mesh_plan: &MeshPlan) -> (&'static str, String) {
    let conditions = crate::status::conditions(mesh_plan, &BTreeMap::new(), &BTreeMap::new(), &[], &BTreeMap::new());
    let degraded = conditions
        .into_iter()
        .find(|condition| condition.kind == "Degraded")
        .unwrap();
    (degraded.reason, degraded.message)
}

#[test]
fn held_nodes_are_reported_after_half_a_minute() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    let held_nodes_after = |held_for: u64| {
        let mut seen = seen.clone();
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            for node in m.nodes.values_mut() {
                stop_kg(node);
                node.server = Server::Kilo;
                node.held_for = Some(Duration::from_secs(held_for));
            }
        });
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        mesh_plan.facts.into_iter().find_map(|fact| match fact {
            Fact::NodesHeld { cluster, nodes } => Some((cluster, nodes)),
            _ => None,
        })
    };
    let held = BTreeMap::from(["a", "b"].map(|node| (node.to_owned(), Reason::NodeNoPublicKey)));
    assert_eq!(
        [1, 29, 30].map(held_nodes_after),
        [None, None, Some(("mgmt".to_owned(), held))]
    );

    edit(&mut seen, &secret("tenant"), |m| {
        let node = m.nodes.get_mut("x").unwrap();
        stop_kg(node);
        node.held_for = Some(Duration::from_secs(73));
    });
    let message = "Node x of cluster \"tenant\": NodeNoPublicKey. Their last Peers are kept for 5 minutes and then removed. \
                   Check wg-agent or kg on these nodes";
    assert_eq!(degraded(&plan_mesh(&mesh, &seen).1), ("NodesHeld", message.to_owned()));
}

#[test]
fn node_without_kg_check_in_is_reported() {
    let (mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)]);
    assert_eq!(degraded(&plan_mesh(&mesh, &seen).1).0, "AllServed");
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("k2").unwrap().silent = true
    });
    let message = "kg has not checked in for 65 seconds for Node k2 of cluster \"tenant\" (annotation kilo.squat.ai/last-seen): its \
                   annotations may be outdated, and changed Peers have no effect there. Check kg on these nodes; if it does not \
                   run any more, remove its annotations";
    assert_eq!(degraded(&plan_mesh(&mesh, &seen).1), ("KgSilent", message.to_owned()));
    // On a node that an agent in full mode serves, annotations that kg left behind are ignored.
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("k2").unwrap().server = Server::Agent
    });
    assert_eq!(degraded(&plan_mesh(&mesh, &seen).1).0, "AllServed");
}

/// In a target that kg serves, a Peer whose endpoint is its node's InternalIP does not contain that InternalIP. Otherwise kg would
/// route the tunnel's own packets into the tunnel.
#[test]
fn internal_ip_that_kg_cannot_route_is_reported() {
    let (mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Full), kg_node(2, Granularity::Full)]);
    let omitted = |seen: &Observations| {
        let (_, mesh_plan) = plan_mesh(&mesh, seen);
        mesh_plan.facts.into_iter().find_map(|fact| match fact {
            Fact::HostNetworkNotServed { cluster, target, nodes } => Some((cluster, target, nodes)),
            _ => None,
        })
    };
    assert_eq!(omitted(&seen), None, "wg-agent serves the target");
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.values_mut().for_each(|node| node.server = Server::Kilo);
    });
    let both = BTreeSet::from(["k1", "k2"].map(str::to_owned));
    assert_eq!(omitted(&seen), Some(("tenant".to_owned(), "mgmt".to_owned(), both)));
    // The endpoint of k1 is not its InternalIP any more.
    edit(&mut seen, &secret("tenant"), |m| {
        let node = m.nodes.get_mut("k1").unwrap();
        node.force_endpoint = Claim::Valid(Endpoint::Ip("203.0.113.1:51820".parse().unwrap()));
    });
    let one = BTreeSet::from(["k2".to_owned()]);
    assert_eq!(omitted(&seen), Some(("tenant".to_owned(), "mgmt".to_owned(), one)));
}

#[test]
fn quarantine_fact_names_targets_that_remove_peers() {
    let (mut mesh, mut seen) = kilo_tenant(&[kg_node(1, Granularity::Full)]);
    let message_and_peer_count = |mesh: &Mesh, seen: &Observations| {
        let (_, mesh_plan) = plan_mesh(mesh, seen);
        let fact = mesh_plan.facts.iter().find_map(|fact| match fact {
            Fact::Quarantined { message, .. } => Some(message.clone()),
            _ => None,
        });
        (fact.unwrap(), mesh_plan.targets["tenant"].peers.len())
    };
    mesh.clusters[0].quarantine = true;
    let all_kept = "cluster \"mgmt\" is quarantined by ClusterMesh meshes/m: all traffic from and to it is denied, and its objects are kept";
    let some_removed =
        format!("{all_kept}, except its Peers in \"tenant\", whose nodes enforce no policy: those are removed");
    assert_eq!(message_and_peer_count(&mesh, &seen), (some_removed, 0));
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("k1").unwrap().server = Server::Agent
    });
    assert_eq!(message_and_peer_count(&mesh, &seen), (all_kept.to_owned(), 2));
}
