//! Tests that keys, prefixes and objects stay with their owners: Nodes, members, meshes, other hubs and persons.

use super::*;

#[test]
fn predecessor_peer_is_adopted_by_changing_labels() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for peer in m.peers.as_mut().unwrap().values_mut() {
            peer.owner.hub = None;
            peer.owner.mesh_namespace = None;
        }
    });
    let (plan, _) = plan_mesh(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(summaries(&steps), vec![(Action::Update, "m--tenant--x".to_owned())]);
    assert_eq!(steps[0].fields, vec!["metadata.labels"]);
}

// threat: foreign-object
#[test]
fn foreign_peer_keeps_its_name_key_and_prefixes() {
    let mesh = two_clusters();
    let mut seen = seen();
    let foreign_peer = |n: u8, net: &str| ObservedPeer {
        owner: Owner::default(),
        spec: Ok(PeerSpec {
            public_key: key(n),
            allowed_ips: net_set(&[net]),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 25,
            role: PeerRole::Node,
        }),
    };
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes = Rows::default();
        m.peers
            .as_mut()
            .unwrap()
            .insert("m--tenant--x".into(), foreign_peer(99, "10.2.1.0/24"));
    });
    let (plan, _) = plan_mesh(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    let peers: Vec<_> = steps.iter().filter(|step| step.item.kind() == "Peer").collect();
    assert_eq!(peers.len(), 1);
    assert_eq!(peers[0].item.name(), "m--tenant--x-meshes");
    let Item::Peer(_, Some(spec)) = &peers[0].item else {
        panic!("expected a Peer")
    };
    assert_eq!(spec.allowed_ips, net_set(&["100.66.2.1/32"]));

    // The second name may be taken, too.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let peers = m.peers.as_mut().unwrap();
        peers.insert("m--tenant--x-meshes".into(), foreign_peer(98, "10.2.1.0/24"));
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let names: Vec<_> = mesh_plan.targets["mgmt"].peers.keys().collect();
    assert_eq!(names, ["m--tenant--x-meshes-1"]);

    // A foreign Peer with the key of Node x.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.peers
            .as_mut()
            .unwrap()
            .insert("laptop".into(), foreign_peer(33, "192.0.2.1/32"));
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        mesh_plan.clusters["tenant"].skipped[0].reason,
        Reason::PublicKeyDuplicate
    );
}

// threat: duplicate-key-or-range
#[test]
fn copied_key_stays_with_the_local_cluster() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().public_key = Claim::Valid(key(17));
        m.nodes.get_mut("x").unwrap().created = -1_000;
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(mesh_plan.targets["mgmt"].peers, BTreeMap::new());
    assert_eq!(
        mesh_plan.clusters["tenant"].skipped[0].reason,
        Reason::PublicKeyDuplicate
    );
    // Node a of mgmt owns the key, and keeps its Peer in tenant although Node x there has copied the key. If kg served tenant,
    // the planner would leave this Peer out: kg removes a node of its own cluster, here x, from its mesh if a Peer has the
    // node's key.
    assert_eq!(
        mesh_plan.clusters["mgmt"].registered, 2,
        "only the copy is skipped: the owner keeps its Peer in tenant"
    );
}

// threat: key-of-silent-member
#[test]
fn copied_key_stays_with_an_unobserved_owner() {
    let mut mesh = two_clusters();
    mesh.clusters.insert(
        1,
        entry("hostile", secret("hostile"), &["10.3.0.0/16", "100.66.3.0/24"]),
    );
    let mut seen = seen();
    seen.members.insert(secret("hostile"), Observation::Fresh(member(&[])));
    write_plan(&mesh, &mut seen);
    let copy = Node {
        public_key: Claim::Valid(key(33)),
        ..node(3, 1)
    };
    edit(&mut seen, &secret("hostile"), |m| {
        m.nodes.insert("e".into(), copy);
    });
    // The controller restarts, and the API server of the key's owner does not answer yet.
    let observed_tenant = seen
        .members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()))
        .unwrap();
    let before = seen.members[&ClusterIdentity::Local].fresh().unwrap().peers.clone();
    write_plan(&mesh, &mut seen);
    assert_eq!(seen.members[&ClusterIdentity::Local].fresh().unwrap().peers, before);
    seen.members.insert(secret("tenant"), observed_tenant);
    write_plan(&mesh, &mut seen);
    assert_eq!(seen.members[&ClusterIdentity::Local].fresh().unwrap().peers, before);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let skipped: Vec<_> = mesh_plan.clusters["hostile"]
        .skipped
        .iter()
        .map(|s| (s.node.as_str(), s.reason))
        .collect();
    assert_eq!(skipped, vec![("e", Reason::PublicKeyDuplicate)]);
    assert_eq!(mesh_plan.clusters["tenant"].registered, 1);
}

#[test]
fn key_in_peer_of_unobserved_member_stays_taken() {
    let mut mesh = two_clusters();
    mesh.clusters
        .push(entry("third", secret("third"), &["10.3.0.0/16", "100.66.3.0/24"]));
    let mut seen = seen();
    seen.members
        .insert(secret("third"), Observation::Fresh(member(&[("t", node(3, 1))])));
    write_plan(&mesh, &mut seen);
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.get_mut("a").unwrap().public_key = Claim::Valid(key(33));
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let third = &mesh_plan.targets["third"].peers;
    assert_eq!(
        third.keys().collect::<Vec<_>>(),
        vec!["m--mgmt--b"],
        "the key of Node a is that of the existing Peer of x"
    );
}

#[test]
fn two_meshes_of_same_clusters_plan_one_peer_per_key() {
    let older = two_clusters();
    let mut newer = two_clusters();
    newer.id.name = "n".into();
    newer.created = 2;
    let owners = |seen: &Observations| -> BTreeMap<String, String> {
        let plan = plan(&[newer.clone(), older.clone()], seen, &Settings::default(), &TestNaming);
        let meshes = plan.meshes.iter();
        let peers = meshes.flat_map(|(id, mesh)| {
            mesh.targets["tenant"]
                .peers
                .values()
                .map(|peer| (peer.node.clone(), id.name.clone()))
                .collect::<Vec<_>>()
        });
        let mut owners = BTreeMap::new();
        for (node, mesh) in peers {
            assert_eq!(owners.insert(node, mesh), None, "a node has more than one Peer");
        }
        let all_peers = plan
            .meshes
            .values()
            .flat_map(|mesh| mesh.targets["tenant"].peers.values());
        let service: IpNet = "10.96.0.0/16".parse().unwrap();
        assert_eq!(
            all_peers
                .filter(|peer| peer.spec.allowed_ips.contains(&service))
                .count(),
            1,
            "an anchored network has one anchor"
        );
        owners
    };
    let mut seen = seen();
    assert_eq!(
        owners(&seen),
        BTreeMap::from([("a".into(), "m".into()), ("b".into(), "m".into())])
    );
    // The newer mesh has an existing Peer for `a`, with the anchored network. That Peer is kept; `b` stays with the older mesh.
    let spec = plan_mesh(&newer, &seen).1.targets["tenant"].peers["n--mgmt--a"]
        .spec
        .clone();
    edit(&mut seen, &secret("tenant"), |m| {
        let owner = Owner {
            mesh: Some("n".into()),
            mesh_namespace: Some("meshes".into()),
            hub: Some("hub".into()),
            source_cluster: Some("mgmt".into()),
        };
        let mut spec = Arc::unwrap_or_clone(spec);
        spec.allowed_ips.insert("10.96.0.0/16".parse().unwrap());
        m.peers
            .as_mut()
            .unwrap()
            .insert("n--mgmt--a".into(), ObservedPeer { owner, spec: Ok(spec) });
    });
    assert_eq!(
        owners(&seen),
        BTreeMap::from([("a".into(), "n".into()), ("b".into(), "m".into())])
    );
}

#[test]
fn deleted_mesh_keeps_its_keys_while_it_is_paused() {
    let mut deleted = two_clusters();
    deleted.id.name = "n".into();
    let mut seen = seen();
    write_plan(&deleted, &mut seen);
    // A Peer without a source label still belongs to the mesh of its mesh label.
    edit(&mut seen, &secret("tenant"), |m| {
        let peer = m.peers.as_mut().unwrap().get_mut("n--mgmt--a").unwrap();
        peer.owner.source_cluster = None;
    });
    // A paused mesh that is being deleted removes nothing until it is resumed.
    (deleted.paused, deleted.deleting) = (true, true);
    let mesh = two_clusters();
    // The number of Peers that `mesh` plans, and whether any object is deleted.
    let planned = |deleted: &Mesh| {
        let plan = plan(
            &[mesh.clone(), deleted.clone()],
            &seen,
            &Settings::default(),
            &TestNaming,
        );
        let member = seen.members[&secret("tenant")].fresh().unwrap();
        let steps = summaries(&diff(&plan, &secret("tenant"), member));
        let deletes = steps.iter().filter(|(action, _)| *action == Action::Delete);
        (plan.meshes[&mesh.id].targets["tenant"].peers.len(), deletes.count() > 0)
    };
    assert_eq!(planned(&deleted), (0, false));
    deleted.paused = false;
    assert_eq!(planned(&deleted), (2, true));
}

// threat: foreign-object
#[test]
fn peers_of_another_hub_change_only_when_adopted() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes = Rows::default();
        m.peers
            .as_mut()
            .unwrap()
            .values_mut()
            .for_each(|peer| peer.owner.hub = Some("other-hub".into()));
    });
    let touched = |mesh: &Mesh| {
        let (plan, _) = plan_mesh(mesh, &seen);
        let steps = diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        );
        steps
            .into_iter()
            .filter(|s| s.item.kind() == "Peer")
            .map(|s| (s.action, s.item.name(), s.fields.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        touched(&mesh),
        vec![],
        "a Peer of the other hub has the node's key, so no Peer is created"
    );
    assert_eq!(
        touched(&Mesh {
            deleting: true,
            ..mesh.clone()
        }),
        vec![]
    );
    let adopting = Mesh {
        adopt_hub: Some("other-hub".into()),
        ..mesh
    };
    assert_eq!(
        touched(&adopting),
        vec![(Action::Update, "m--tenant--x".to_owned(), vec!["metadata.labels"])]
    );
}
