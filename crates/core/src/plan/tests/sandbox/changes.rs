//! A sandbox whose profile, grants or reachability change: what stands after each write.

use super::*;

/// What a target holds of `nb` after each write: whether its policy lets anything through, whether it has Peers, and whether it
/// enters through gateways.
fn states_of(mesh: &Mesh, seen: &Observations) -> Vec<(bool, bool, bool)> {
    let (plan, _) = run(mesh, seen);
    let mut member = seen.members[&ClusterIdentity::Local].last().unwrap().clone();
    let steps = diff(&plan, &ClusterIdentity::Local, &member);
    let look = |member: &Member| {
        let policy = member
            .policies
            .as_ref()
            .unwrap()
            .get("m--nb")
            .map(|p| p.spec.clone().unwrap());
        let peers = member.peers.as_ref().unwrap().values();
        let peers = peers.filter(|peer| peer.owner.source_cluster.as_deref() == Some("nb"));
        let open = policy.as_ref().is_some_and(|policy| !policy.closed);
        let enters = member.accesses.as_ref().unwrap().contains_key("m--nb");
        (open, peers.count() > 0, enters)
    };
    let mut states = vec![look(&member)];
    for step in &steps {
        apply(&mut member, std::slice::from_ref(step));
        states.push(look(&member));
    }
    states.dedup();
    states
}

#[test]
fn tightening_closes_before_anything_else_and_loosening_opens_after() {
    let (mut mesh, mut seen) = three();
    mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
    let sandbox = mesh.clone();
    mesh.clusters[2].profile = Profile::ClusterMeshed;
    settle(&mesh, &mut seen);
    // The policy closes before the Peers go.
    assert_eq!(
        states_of(&sandbox, &seen),
        [
            (true, true, false),
            (false, true, false),
            (false, true, true),
            (false, false, true)
        ]
    );
    settle(&sandbox, &mut seen);
    settle(&sandbox, &mut seen);
    assert_eq!(
        states_of(&mesh, &seen),
        [
            (false, false, true),
            (true, false, true),
            (true, false, false),
            (true, true, false)
        ]
    );
}

#[test]
fn what_was_wide_is_closed_also_while_its_member_is_not_seen() {
    let (mut mesh, mut seen) = three();
    mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
    let sandbox = mesh.clone();
    mesh.clusters[2].profile = Profile::ClusterMeshed;
    settle(&mesh, &mut seen);
    seen.members
        .insert(secret("nb"), Observation::Unreachable("refused".into()));
    assert_eq!(
        states_of(&sandbox, &seen),
        [
            (true, true, false),
            (false, true, false),
            (false, true, true),
            (false, false, true)
        ]
    );
    let (_, plan) = run(&sandbox, &seen);
    assert_eq!(
        plan.targets["mgmt"].policies["m--nb"].spec.sources,
        net_set(&["10.3.0.0/16", "100.66.3.0/24"])
    );
}

#[test]
fn nothing_is_left_of_a_sandbox_without_grants() {
    let (mut mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    mesh.clusters[2].egress.clear();
    let (plan, _) = run(&mesh, &seen);
    let member = seen.members[&ClusterIdentity::Local].fresh().unwrap();
    let steps = names(&diff(&plan, &ClusterIdentity::Local, member));
    assert_eq!(steps, [(Action::Delete, "m--nb".to_owned())]);
    settle(&mesh, &mut seen);
    let member = seen.members[&ClusterIdentity::Local].fresh().unwrap();
    assert_eq!(member.accesses, Some(BTreeMap::new()));
    let sandbox = seen.members[&secret("nb")].fresh().unwrap();
    assert_eq!(
        (
            sandbox.peers.as_ref(),
            sandbox.policies.as_ref(),
            sandbox.services.len(),
            sandbox.slices.len()
        ),
        (Some(&BTreeMap::new()), Some(&BTreeMap::new()), 0, 0)
    );
}

#[test]
fn a_member_in_quarantine_is_closed_and_keeps_its_objects() {
    for profile in [Profile::ClusterMeshed, Profile::Sandbox] {
        let (mut mesh, mut seen) = three();
        mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
        mesh.clusters[2].profile = profile;
        settle(&mesh, &mut seen);
        settle(&mesh, &mut seen);
        let count = |plan: &MeshPlan| ["mgmt", "tenant", "nb"].map(|t| sources(plan, t).len());
        let before = count(&run(&mesh, &seen).1);
        mesh.clusters[2].quarantine = true;
        let (_, plan) = run(&mesh, &seen);
        if profile == Profile::ClusterMeshed {
            let networks = net_set(&["10.3.0.0/16", "100.66.3.0/24"]);
            let shut = PolicySpec {
                sources: networks.clone(),
                networks,
                ..closed()
            };
            assert_eq!(plan.targets["mgmt"].policies["m--nb"].spec, shut);
        } else {
            assert_eq!(granted(&mesh, &seen), []);
        }
        assert_eq!(count(&plan), before);
        assert!(
            plan.facts
                .iter()
                .any(|fact| matches!(fact, Fact::Quarantined { cluster, .. } if cluster == "nb"))
        );
    }
}

#[test]
fn what_becomes_standard_is_closed_before_its_peers_go_one_by_one() {
    let (mut mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    mesh.clusters[1].profile = Profile::Standard;
    let (plan, planned) = run(&mesh, &seen);
    let spec = &planned.targets["mgmt"].policies["m--tenant"].spec;
    assert!(spec.closed && spec.allow.is_empty(), "{spec:?}");
    let Some(Observation::Fresh(member)) = seen.members.get(&ClusterIdentity::Local) else {
        unreachable!()
    };
    let steps = names(&diff(&plan, &ClusterIdentity::Local, member));
    let step = |action, name: &str| (action, name.to_owned());
    assert_eq!(
        steps,
        [step(Action::Update, "m--tenant"), step(Action::Delete, "m--tenant--x")]
    );
    settle(&mesh, &mut seen);
    settle(&mesh, &mut seen);
    let left = seen.members[&ClusterIdentity::Local].last().unwrap();
    assert_eq!(left.policies, Some(BTreeMap::new()));
}

#[test]
fn a_member_in_quarantine_gives_nothing_to_a_sandbox_either() {
    let (mut mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    mesh.clusters[0].quarantine = true;
    assert_eq!(granted(&mesh, &seen), []);
}
