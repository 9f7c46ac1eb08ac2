//! Tests which mesh or Node gets a key, prefix or Service name in a target if several claim it, and which Peers that lost their
//! mesh label are adopted.

use super::*;

/// A newer mesh that connects the hub and the cluster `third`.
fn newer_mesh() -> Mesh {
    let mut mesh = two_clusters();
    mesh.id.name = "n".into();
    mesh.created = 2;
    mesh.clusters[1] = entry("third", secret("third"), &["10.3.0.0/16", "100.66.3.0/24"]);
    mesh
}

fn seen_with_third(public_key: PublicKey) -> Observations {
    let mut seen = seen();
    let node = Node {
        public_key: Claim::Valid(public_key),
        ..node(3, 1)
    };
    seen.members
        .insert(secret("third"), Observation::Fresh(member(&[("t", node)])));
    seen
}

fn plan_of(meshes: &[&Mesh], seen: &Observations) -> Plan {
    let meshes: Vec<Mesh> = meshes.iter().map(|mesh| (*mesh).clone()).collect();
    plan(&meshes, seen, &Settings::default(), &TestNaming)
}

/// Writes the plan of all meshes twice, because some objects are planned only after others exist.
fn write_plans(meshes: &[&Mesh], seen: &mut Observations) {
    for _ in 0..2 {
        let plan = plan_of(meshes, seen);
        for (identity, observation) in &mut seen.members {
            if let Observation::Fresh(member) = observation {
                let steps = diff(&plan, identity, member);
                apply(member, &steps);
            }
        }
    }
}

/// The existing Peers in the hub: name and key.
fn existing_peers(seen: &Observations) -> Vec<(String, PublicKey)> {
    let peers = seen.members[&ClusterIdentity::Local]
        .last()
        .unwrap()
        .peers
        .as_ref()
        .unwrap();
    let peers = peers.iter();
    peers
        .map(|(name, peer)| (name.to_owned(), peer.spec.as_ref().unwrap().public_key))
        .collect()
}

fn skipped(plan: &Plan, mesh: &Mesh, cluster: &str) -> Vec<(String, Reason, String)> {
    let report = &plan.meshes[&mesh.id].clusters[cluster];
    let rows = report.skipped.iter();
    rows.map(|row| (row.node.clone(), row.reason, row.message.clone()))
        .collect()
}

#[test]
fn key_of_unobserved_member_of_other_mesh_is_not_reused() {
    let (older, newer) = (two_clusters(), newer_mesh());
    let mut seen = seen_with_third(key(49));
    write_plans(&[&older, &newer], &mut seen);
    let before = existing_peers(&seen);
    assert_eq!(
        before,
        [("m--tenant--x".into(), key(33)), ("n--third--t".into(), key(49))]
    );

    // `tenant` is not observed, and `third` copies the key of the node of `tenant`.
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()));
    edit(&mut seen, &secret("third"), |m| {
        m.nodes.get_mut("t").unwrap().public_key = Claim::Valid(key(33));
    });
    let plan = plan_of(&[&older, &newer], &seen);
    let message = format!(
        "toward cluster \"mgmt\": key {} belongs to Peer m--tenant--x there",
        key(33)
    );
    assert_eq!(
        skipped(&plan, &newer, "third"),
        [("t".to_owned(), Reason::PublicKeyDuplicate, message)]
    );
    write_plans(&[&older, &newer], &mut seen);
    assert_eq!(existing_peers(&seen), [("m--tenant--x".into(), key(33))]);
}

#[test]
fn key_planned_by_another_mesh_is_refused_with_reason() {
    let (older, newer) = (two_clusters(), newer_mesh());
    let mut seen = seen_with_third(key(33));
    let plan = plan_of(&[&older, &newer], &seen);
    let message = format!(
        "toward cluster \"mgmt\": key {} belongs to Peer m--tenant--x of ClusterMesh meshes/m there",
        key(33)
    );
    assert_eq!(
        skipped(&plan, &newer, "third"),
        [("t".to_owned(), Reason::PublicKeyDuplicate, message)]
    );
    let targets = plan.meshes[&newer.id].clusters["third"].skipped.iter();
    let targets: Vec<Option<&str>> = targets.map(|skipped| skipped.target.as_deref()).collect();
    assert_eq!(targets, [Some("mgmt")]);
    assert_eq!(plan.meshes[&newer.id].targets["mgmt"].peers, BTreeMap::new());
    // An existing Peer keeps the key even if its mesh is the newer one.
    write_plans(&[&newer], &mut seen);
    let plan = plan_of(&[&older, &newer], &seen);
    assert_eq!(plan.meshes[&older.id].targets["mgmt"].peers, BTreeMap::new());
    assert_eq!(plan.meshes[&newer.id].targets["mgmt"].peers.len(), 1);
}

#[test]
fn paused_mesh_reserves_no_unwritten_key_or_prefix() {
    let mut older = two_clusters();
    let mut newer = two_clusters();
    (newer.id.name, newer.created) = ("n".into(), 2);
    older.paused = true;
    let mut seen = seen();
    let plan = plan_of(&[&older, &newer], &seen);
    let without_paused = plan_of(&[&newer], &seen);
    // The plan is the same as without the paused mesh.
    assert_eq!(plan.meshes[&newer.id].targets, without_paused.meshes[&newer.id].targets);
    write_plans(&[&older, &newer], &mut seen);
    assert_eq!(existing_peers(&seen), [("n--tenant--x".into(), key(33))]);
}

#[test]
fn existing_peer_of_paused_mesh_keeps_key_and_prefixes() {
    let mut older = two_clusters();
    let mut newer = two_clusters();
    (newer.id.name, newer.created) = ("n".into(), 2);
    let mut seen = seen();
    write_plans(&[&older, &newer], &mut seen);
    older.paused = true;
    let before = seen.clone();
    write_plans(&[&older, &newer], &mut seen);
    assert_eq!(seen, before, "no other Peer is written for the same node");
    let plan = plan_of(&[&older, &newer], &seen);
    assert_eq!(skipped(&plan, &newer, "tenant"), [], "both describe the same node");

    // A node of another cluster that copies the key is refused.
    let other = newer_mesh();
    seen.members.extend(
        seen_with_third(key(33))
            .members
            .remove(&secret("third"))
            .map(|m| (secret("third"), m)),
    );
    let plan = plan_of(&[&older, &other], &seen);
    let message = format!(
        "toward cluster \"mgmt\": key {} belongs to Peer m--tenant--x there",
        key(33)
    );
    assert_eq!(
        skipped(&plan, &other, "third"),
        [("t".to_owned(), Reason::PublicKeyDuplicate, message)]
    );
}

#[test]
fn paused_mesh_reserves_no_service_name() {
    let grant = |name: &str| Grant {
        cluster: "tenant".into(),
        service: ObjectName {
            namespace: "a".into(),
            name: name.into(),
        },
        ports: vec![],
        local: ObjectName {
            namespace: "a".into(),
            name: "db".into(),
        },
    };
    let mut older = two_clusters();
    let mut newer = two_clusters();
    (newer.id.name, newer.created) = ("n".into(), 2);
    older.clusters[0].egress = vec![grant("old")];
    newer.clusters[0].egress = vec![grant("new")];
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        for name in ["old", "new"] {
            let service = Service {
                ports: vec![ServicePort {
                    name: String::new(),
                    port: 80,
                    protocol: Protocol::Tcp,
                }],
                ..Service::default()
            };
            m.services.insert(grant(name).service, service);
        }
    });
    let mirrored = |older: &Mesh| {
        let plan = plan_of(&[older, &newer], &seen);
        let targets = &plan.meshes[&newer.id].targets;
        targets["mgmt"].services.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(mirrored(&older), []);
    older.paused = true;
    assert_eq!(mirrored(&older), [grant("new").local]);
}

#[test]
fn peer_with_key_of_a_target_node_is_left_out_if_node_runs_kg() {
    // Node `copy` of the target `tenant` has the key of the hub's Node `a`. If a Peer in `tenant` had this key, kg would
    // permanently drop `copy` from the mesh of the nodes of `tenant`. A node in policy mode (`AgentPolicy`) runs kg, too.
    // In all cases `copy` itself is skipped: of two nodes with one key, the hub's node keeps it.
    let mesh = two_clusters();
    let peers = |server: Server| {
        let mut seen = seen();
        edit(&mut seen, &secret("tenant"), |m| {
            let copy = Node {
                public_key: Claim::Valid(key(17)),
                server,
                ..node(2, 2)
            };
            m.nodes.insert("copy".into(), copy);
        });
        let (plan, mesh_plan) = plan_mesh(&mesh, &seen);
        let peers: Vec<String> = mesh_plan.targets["tenant"].peers.keys().cloned().collect();
        (
            peers,
            skipped(&plan, &mesh, "tenant")
                .into_iter()
                .map(|row| row.0)
                .collect::<Vec<_>>(),
        )
    };
    let (a, b, copy) = (
        "m--mgmt--a".to_owned(),
        "m--mgmt--b".to_owned(),
        vec!["copy".to_owned()],
    );
    assert_eq!(peers(Server::Agent), (vec![a, b.clone()], copy.clone()));
    assert_eq!(peers(Server::Kilo), (vec![b.clone()], copy.clone()));
    assert_eq!(peers(Server::AgentPolicy), (vec![b], copy));
}

#[test]
fn own_objects_that_lost_their_mesh_label_are_adopted() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    let before = seen.clone();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.peers.as_mut().unwrap().get_mut("m--tenant--x").unwrap().owner.mesh = None;
        m.policies.as_mut().unwrap().get_mut("m--tenant").unwrap().owner.mesh = None;
    });
    let (plan, mesh_plan) = plan_mesh(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    let steps: Vec<_> = steps
        .into_iter()
        .map(|step| (step.action, step.item.name(), step.fields.clone()))
        .collect();
    assert_eq!(
        steps,
        [
            (Action::Update, "m--tenant".to_owned(), vec!["metadata.labels"]),
            (Action::Update, "m--tenant--x".to_owned(), vec!["metadata.labels"]),
        ]
    );
    assert_eq!(mesh_plan.clusters["tenant"].skipped, []);
    write_plan(&mesh, &mut seen);
    assert_eq!(seen, before);
}

#[test]
fn peer_with_other_labels_or_key_is_not_adopted() {
    let mesh = two_clusters();
    let mut written = seen();
    write_plan(&mesh, &mut written);
    let changed = |change: &dyn Fn(&mut ObservedPeer)| {
        let mut seen = written.clone();
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            let peer = m.peers.as_mut().unwrap().get_mut("m--tenant--x").unwrap();
            peer.owner.mesh = None;
            change(peer);
        });
        let (plan, _) = plan_mesh(&mesh, &seen);
        let steps = diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        );
        let peers = steps.iter().filter(|step| step.item.kind() == "Peer");
        (
            peers.map(|step| (step.action, step.item.name())).collect::<Vec<_>>(),
            skipped(&plan, &mesh, "tenant"),
        )
    };
    let message = format!(
        "toward cluster \"mgmt\": key {} belongs to Peer m--tenant--x there",
        key(33)
    );
    let refused = |remedy: &str| {
        let message = format!("{message}{remedy}");
        (vec![], vec![("x".to_owned(), Reason::PublicKeyDuplicate, message)])
    };
    let remedy =
        ". This Peer has lost its label kilo-clustermesh.io/mesh: delete it, and the controller writes the Node's Peer";
    // In each case the Peer has no mesh label. In the first case it has no other label either, as a Peer that a person
    // wrote. In the other cases its hub, namespace or source is another one.
    assert_eq!(changed(&|peer| peer.owner = Owner::default()), refused(""));
    assert_eq!(changed(&|peer| peer.owner.hub = Some("other".into())), refused(""));
    assert_eq!(
        changed(&|peer| peer.owner.mesh_namespace = Some("other".into())),
        refused(remedy)
    );
    assert_eq!(
        changed(&|peer| peer.owner.source_cluster = Some("other".into())),
        refused(remedy)
    );
    // A Peer with another key does not describe this node: it is kept, and the node gets a Peer with another name.
    let (steps, _) = changed(&|peer| peer.spec.as_mut().unwrap().public_key = key(99));
    assert_eq!(steps, [(Action::Create, "m--tenant--x-meshes".to_owned())]);
}

#[test]
fn unplanned_peer_without_mesh_label_is_kept() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.peers.as_mut().unwrap().get_mut("m--tenant--x").unwrap().owner.mesh = None;
    });
    let peers = |mesh: &Mesh, seen: &Observations| {
        let (plan, _) = plan_mesh(mesh, seen);
        let steps = diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        );
        steps
            .into_iter()
            .filter(|step| step.item.kind() == "Peer")
            .collect::<Vec<_>>()
    };
    let paused = Mesh {
        paused: true,
        ..mesh.clone()
    };
    assert_eq!(peers(&paused, &seen), []);
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()));
    assert_eq!(peers(&mesh, &seen), []);
}
