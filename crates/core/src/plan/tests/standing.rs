//! What stands already, and what is not seen: nothing is lost by either.

use super::*;

#[test]
fn a_member_that_is_not_seen_costs_nothing() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    for lost in [
        Observation::Unreachable("connection refused".into()),
        Observation::Missing("no Secret".into()),
        Observation::Stale(Member::default(), "watch broken".into()),
    ] {
        let mut later = seen.clone();
        later.members.insert(secret("tenant"), lost);
        let (plan, of_mesh) = run(&mesh, &later);
        assert_eq!(
            diff(
                &plan,
                &ClusterIdentity::Local,
                later.members[&ClusterIdentity::Local].fresh().unwrap()
            ),
            vec![]
        );
        assert!(
            of_mesh
                .facts
                .iter()
                .any(|fact| matches!(fact, Fact::MemberNotFresh { cluster, .. } if cluster == "tenant"))
        );
    }
}

#[test]
fn a_node_whose_annotations_vanish_keeps_its_peer_for_five_minutes() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let mut blank = node(2, 1);
    blank.public_key = Claim::Absent;
    blank.wireguard_ip = Claim::Absent;
    blank.kilo_endpoint = Claim::Absent;
    let write = |seen: &mut Observations, held_for| {
        let blank = Node {
            held_for,
            ..blank.clone()
        };
        edit(seen, &secret("tenant"), |m| {
            m.nodes.insert("x".into(), blank);
        });
    };
    for age in [None, Some(Duration::from_secs(299))] {
        write(&mut seen, age);
        let (plan, of_mesh) = run(&mesh, &seen);
        assert_eq!(
            diff(
                &plan,
                &ClusterIdentity::Local,
                seen.members[&ClusterIdentity::Local].fresh().unwrap()
            ),
            vec![]
        );
        assert_eq!(
            of_mesh.clusters["tenant"].held,
            BTreeMap::from([("x".to_owned(), Reason::NodeNoPublicKey)])
        );
    }
    write(&mut seen, Some(HOLD));
    let (plan, of_mesh) = run(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(names(&steps), vec![(Action::Delete, "m--tenant--x".to_owned())]);
    assert_eq!(of_mesh.clusters["tenant"].skipped[0].reason, Reason::NodeNoPublicKey);
}

#[test]
fn a_name_that_does_not_resolve_now_keeps_the_endpoint_and_the_anchor() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for node in m.nodes.values_mut() {
            node.force_endpoint = Claim::Is(Endpoint::Dns("hub.example".into(), 51820));
            node.internal_ips.clear();
        }
    });
    seen.resolved.insert("hub.example".into(), "192.0.2.5".parse().unwrap());
    settle(&mesh, &mut seen);
    seen.resolved.clear();
    let (plan, of_mesh) = run(&mesh, &seen);
    assert_eq!(
        diff(
            &plan,
            &secret("tenant"),
            seen.members[&secret("tenant")].fresh().unwrap()
        ),
        vec![]
    );
    assert!(
        of_mesh
            .facts
            .iter()
            .any(|fact| matches!(fact, Fact::EndpointUnresolved { node, .. } if node == "a"))
    );
}

#[test]
fn a_deleted_mesh_and_a_removed_entry_leave_nothing_behind() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let here = |seen: &Observations, mesh: &Mesh| {
        let (plan, _) = run(mesh, seen);
        names(&diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        ))
    };
    let all_gone = vec![
        (Action::Delete, "m--tenant--x".to_owned()),
        (Action::Delete, "m--tenant".to_owned()),
    ];
    assert_eq!(
        here(
            &seen,
            &Mesh {
                deleting: true,
                ..mesh.clone()
            }
        ),
        all_gone
    );
    assert_eq!(
        here(
            &seen,
            &Mesh {
                deleting: true,
                paused: true,
                ..mesh.clone()
            }
        ),
        vec![]
    );
    let mut shrunk = mesh.clone();
    shrunk.clusters.truncate(1);
    assert_eq!(here(&seen, &shrunk), all_gone);
    let plan_of_none = plan(&[], &seen, &Settings::default(), &Plain);
    let orphans = diff(
        &plan_of_none,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(
        names(&orphans),
        all_gone,
        "the mesh was deleted by force: what carries our hub label goes"
    );
}
