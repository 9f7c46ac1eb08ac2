//! A sandbox whose profile, grants or reachability change: what stands after each write.

use super::*;

#[test]
fn a_sandbox_that_is_not_seen_keeps_its_peers_and_they_follow_its_policy() {
    let (mut mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    seen.members
        .insert(secret("nb"), Observation::Unreachable("refused".into()));
    mesh.clusters[2].egress[0].ports[0].port = PortRef::Number(9187);
    let (_, plan) = run(&mesh, &seen);
    let policy = closed(granted(&["metrics"]));
    assert_eq!(plan.targets["mgmt"].policies["m--nb"].spec, policy);
    let peer = &plan.targets["mgmt"].peers["m--nb--s"].spec;
    assert_eq!(
        (&peer.allowed_ips, &peer.requires_policy),
        (&net_set(&["100.66.3.1/32"]), &requires(&policy))
    );
}

/// What a target holds of `nb` after each write: whether its policy lets more through than grants, whether its Peers are
/// wide, and whether they wait for a policy that is not the one there.
fn prefixes_of(mesh: &Mesh, seen: &Observations) -> Vec<(bool, bool, bool)> {
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
        let peers: Vec<PeerSpec> = peers.map(|peer| peer.spec.clone().unwrap()).collect();
        let open = policy.as_ref().is_some_and(|policy| !policy.sandbox);
        let wide = peers
            .iter()
            .any(|p| p.allowed_ips.iter().any(|net| net.prefix_len() < 32));
        let waiting = peers.iter().any(|peer| {
            let named = peer.requires_policy.is_some();
            named && peer.requires_policy != policy.as_ref().and_then(requires)
        });
        (open, wide, waiting)
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
    // The policy closes first; only then the Peers shrink, and name it.
    assert_eq!(
        prefixes_of(&sandbox, &seen),
        [(true, true, false), (false, true, false), (false, false, false)]
    );
    settle(&sandbox, &mut seen);
    // The policy opens while the Peers wait for another one; then they grow.
    assert_eq!(
        prefixes_of(&mesh, &seen),
        [(false, false, false), (true, false, true), (true, true, false)]
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
        prefixes_of(&sandbox, &seen),
        [(true, true, false), (false, true, false), (false, false, false)]
    );
    let (_, plan) = run(&sandbox, &seen);
    assert_eq!(
        plan.targets["mgmt"].policies["m--nb"].spec.sources,
        net_set(&["10.3.0.0/16", "100.66.3.0/24"])
    );
}

#[test]
fn the_last_grant_is_closed_before_its_peers_go_and_then_nothing_is_left() {
    let (mut mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    mesh.clusters[2].egress.clear();
    let (plan, _) = run(&mesh, &seen);
    let steps = |plan: &Plan, seen: &Observations, identity: &ClusterIdentity| {
        names(&diff(plan, identity, seen.members[identity].fresh().unwrap()))
    };
    assert_eq!(
        steps(&plan, &seen, &ClusterIdentity::Local),
        [
            (Action::Update, "m--nb".to_owned()),
            (Action::Delete, "m--nb--s".to_owned())
        ]
    );
    assert_eq!(
        plan.meshes[&id()].targets["mgmt"].policies["m--nb"].spec,
        closed(BTreeSet::new())
    );
    settle(&mesh, &mut seen);
    let (plan, _) = run(&mesh, &seen);
    assert_eq!(
        steps(&plan, &seen, &ClusterIdentity::Local),
        [(Action::Delete, "m--nb".to_owned())]
    );
    settle(&mesh, &mut seen);
    let empty = |identity: &ClusterIdentity| {
        let member = seen.members[identity].fresh().unwrap();
        let ours = |owner: &Owner| owner.source_cluster.as_deref() == Some("nb");
        let peers = member
            .peers
            .as_ref()
            .unwrap()
            .values()
            .filter(|peer| ours(&peer.owner))
            .count();
        peers
            + member
                .policies
                .as_ref()
                .unwrap()
                .values()
                .filter(|p| ours(&p.owner))
                .count()
    };
    assert_eq!(empty(&ClusterIdentity::Local), 0);
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
        let before: Vec<_> = ["mgmt", "tenant", "nb"]
            .map(|t| sources(&run(&mesh, &seen).1, t).len())
            .into();
        mesh.clusters[2].quarantine = true;
        let (_, plan) = run(&mesh, &seen);
        let policy = &plan.targets["mgmt"].policies["m--nb"].spec;
        let networks = net_set(&["10.3.0.0/16", "100.66.3.0/24"]);
        let shut = PolicySpec {
            sources: networks.clone(),
            networks,
            ..closed(BTreeSet::new())
        };
        assert_eq!(*policy, shut);
        let peer = &plan.targets["mgmt"].peers["m--nb--s"].spec;
        let named = (profile == Profile::Sandbox).then(|| requires(policy)).flatten();
        assert_eq!(peer.requires_policy, named);
        let after: Vec<_> = ["mgmt", "tenant", "nb"].map(|t| sources(&plan, t).len()).into();
        assert_eq!(after, before);
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
    assert!(
        spec.sandbox && spec.allow.is_empty() && spec.grants.is_empty(),
        "{spec:?}"
    );
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
    assert_eq!(left.policies.as_ref().unwrap().keys().collect::<Vec<_>>(), ["m--nb"]);
}

#[test]
fn a_member_in_quarantine_gives_nothing_to_a_sandbox_either() {
    let (mut mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    mesh.clusters[0].quarantine = true;
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(plan.targets["mgmt"].policies["m--nb"].spec, closed(BTreeSet::new()));
}
