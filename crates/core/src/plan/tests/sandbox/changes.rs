//! Tests which objects exist after each write if the profile, grants or quarantine of a member change.

use super::*;

/// The states of the member `nb` in the hub: before the first write, and after each write that changes the state. A state is (`nb` has
/// a policy that is not closed, `nb` has Peers, `nb` has a SandboxAccess).
fn states_of(mesh: &Mesh, seen: &Observations) -> Vec<(bool, bool, bool)> {
    let (plan, _) = plan_mesh(mesh, seen);
    let mut member = seen.members[&ClusterIdentity::Local].last().unwrap().clone();
    let steps = diff(&plan, &ClusterIdentity::Local, &member);
    let state_of = |member: &Member| {
        let policy = member
            .policies
            .as_ref()
            .unwrap()
            .get("m--nb")
            .map(|p| p.spec.clone().unwrap());
        let peers = member.peers.as_ref().unwrap().values();
        let peers = peers.filter(|peer| peer.owner.source_cluster.as_deref() == Some("nb"));
        let open = policy.as_ref().is_some_and(|policy| !policy.closed);
        let has_access = member.accesses.as_ref().unwrap().contains_key("m--nb");
        (open, peers.count() > 0, has_access)
    };
    let mut states = vec![state_of(&member)];
    for step in &steps {
        apply(&mut member, std::slice::from_ref(step));
        states.push(state_of(&member));
    }
    states.dedup();
    states
}

// threat: profile-tightened
#[test]
fn profile_change_closes_policy_first_and_adds_peers_last() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
    let sandbox = mesh.clone();
    mesh.clusters[2].profile = Profile::ClusterMeshed;
    write_plan(&mesh, &mut seen);
    // The policy is closed before the Peers are deleted.
    assert_eq!(
        states_of(&sandbox, &seen),
        [
            (true, true, false),
            (false, true, false),
            (false, true, true),
            (false, false, true)
        ]
    );
    // The closed policy stays until the last Peer is gone, so only the second plan deletes it.
    write_plan(&sandbox, &mut seen);
    write_plan(&sandbox, &mut seen);
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

// threat: profile-tightened
#[test]
fn stricter_profile_closes_an_unobserved_member() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
    let sandbox = mesh.clone();
    mesh.clusters[2].profile = Profile::ClusterMeshed;
    write_plan(&mesh, &mut seen);
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
    let (_, mesh_plan) = plan_mesh(&sandbox, &seen);
    assert_eq!(
        mesh_plan.targets["mgmt"].policies["m--nb"].spec.sources,
        net_set(&["10.3.0.0/16", "100.66.3.0/24"])
    );
}

#[test]
fn sandbox_without_grants_leaves_no_objects() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    mesh.clusters[2].egress.clear();
    let (plan, _) = plan_mesh(&mesh, &seen);
    let member = seen.members[&ClusterIdentity::Local].fresh().unwrap();
    let steps = summaries(&diff(&plan, &ClusterIdentity::Local, member));
    assert_eq!(steps, [(Action::Delete, "m--nb".to_owned())]);
    write_plan(&mesh, &mut seen);
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
        (Some(&Rows::default()), Some(&BTreeMap::new()), 0, 0)
    );
}

// threat: quarantine
#[test]
fn quarantined_member_is_closed_and_keeps_its_peers() {
    for profile in [Profile::ClusterMeshed, Profile::Sandbox] {
        let (mut mesh, mut seen) = mesh_with_sandbox();
        mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
        mesh.clusters[2].profile = profile;
        write_plan(&mesh, &mut seen);
        write_plan(&mesh, &mut seen);
        let peer_counts =
            |mesh_plan: &MeshPlan| ["mgmt", "tenant", "nb"].map(|target| mesh_plan.targets[target].peers.len());
        let before = peer_counts(&plan_mesh(&mesh, &seen).1);
        mesh.clusters[2].quarantine = true;
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        if profile == Profile::ClusterMeshed {
            let networks = net_set(&["10.3.0.0/16", "100.66.3.0/24"]);
            let closed = PolicySpec {
                sources: networks.clone(),
                networks,
                ..closed_policy()
            };
            assert_eq!(mesh_plan.targets["mgmt"].policies["m--nb"].spec, closed);
        } else {
            assert_eq!(granted(&mesh, &seen), []);
        }
        assert_eq!(peer_counts(&mesh_plan), before);
        assert!(
            mesh_plan
                .facts
                .iter()
                .any(|fact| matches!(fact, Fact::Quarantined { cluster, .. } if cluster == "nb"))
        );
    }
}

/// A node of the hub has a podCIDR inside the quarantined member's network, so the PeerPolicy does not contain the whole network.
// threat: quarantine
#[test]
fn quarantine_closes_peers_but_not_own_pods() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    mesh.clusters[0].locations = Locations::Connected;
    mesh.clusters[2].allowed.extend(nets(&["10.3.0.0/16"]));
    mesh.clusters[2].profile = Profile::ClusterMeshed;
    mesh.clusters[2].quarantine = true;
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let mut own = node(1, 9);
        own.pod_cidrs = vec![Claim::Valid("10.3.7.0/24".parse().unwrap())];
        m.nodes.insert("own".into(), own);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let hub = &mesh_plan.targets["mgmt"];
    assert_eq!(
        hub.peers["m--nb--s"].spec.allowed_ips,
        net_set(&["10.3.1.0/24", "100.66.3.1/32"])
    );
    let spec = &hub.policies["m--nb"].spec;
    assert!(spec.closed);
    assert_eq!(spec.networks, net_set(&["10.3.1.0/24", "100.66.3.0/24"]));
}

// threat: profile-tightened
#[test]
fn member_set_to_standard_is_closed_before_peer_deletion() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    mesh.clusters[1].profile = Profile::Standard;
    let (plan, mesh_plan) = plan_mesh(&mesh, &seen);
    let spec = &mesh_plan.targets["mgmt"].policies["m--tenant"].spec;
    assert!(spec.closed && spec.allow.is_empty(), "{spec:?}");
    let Some(Observation::Fresh(member)) = seen.members.get(&ClusterIdentity::Local) else {
        unreachable!()
    };
    let steps = summaries(&diff(&plan, &ClusterIdentity::Local, member));
    let step = |action, name: &str| (action, name.to_owned());
    assert_eq!(
        steps,
        [step(Action::Update, "m--tenant"), step(Action::Delete, "m--tenant--x")]
    );
    // The closed policy stays until the last Peer is gone, so only the second plan deletes it.
    write_plan(&mesh, &mut seen);
    write_plan(&mesh, &mut seen);
    let left = seen.members[&ClusterIdentity::Local].last().unwrap();
    assert_eq!(left.policies, Some(BTreeMap::new()));
}

#[test]
fn sandbox_has_no_grants_in_quarantined_target() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    mesh.clusters[0].quarantine = true;
    assert_eq!(granted(&mesh, &seen), []);
}
