//! Tests that existing objects are kept while the state from which they derive is not observed, and deleted when it is gone.

use super::*;

#[test]
fn member_that_is_not_fresh_causes_no_writes_in_hub() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    for lost in [
        Observation::Unreachable("connection refused".into()),
        Observation::Missing("no Secret".into()),
        Observation::Stale(Member::default(), "watch broken".into()),
    ] {
        let mut later = seen.clone();
        later.members.insert(secret("tenant"), lost);
        let (plan, mesh_plan) = plan_mesh(&mesh, &later);
        assert_eq!(
            diff(
                &plan,
                &ClusterIdentity::Local,
                later.members[&ClusterIdentity::Local].fresh().unwrap()
            ),
            vec![]
        );
        assert!(
            mesh_plan
                .facts
                .iter()
                .any(|fact| matches!(fact, Fact::MemberNotFresh { cluster, .. } if cluster == "tenant"))
        );
    }
}

// threat: empty-list
#[test]
fn node_without_annotations_keeps_its_peer_for_five_minutes() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
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
    // `None` = this plan is the first that holds the node.
    for held_for in [None, Some(Duration::from_secs(299))] {
        write(&mut seen, held_for);
        let (plan, mesh_plan) = plan_mesh(&mesh, &seen);
        assert_eq!(
            diff(
                &plan,
                &ClusterIdentity::Local,
                seen.members[&ClusterIdentity::Local].fresh().unwrap()
            ),
            vec![]
        );
        assert_eq!(
            mesh_plan.clusters["tenant"].held,
            BTreeMap::from([("x".to_owned(), Reason::NodeNoPublicKey)])
        );
    }
    write(&mut seen, Some(HOLD));
    let (plan, mesh_plan) = plan_mesh(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(summaries(&steps), vec![(Action::Delete, "m--tenant--x".to_owned())]);
    assert_eq!(mesh_plan.clusters["tenant"].skipped[0].reason, Reason::NodeNoPublicKey);
}

#[test]
fn unresolved_name_of_an_endpoint_causes_no_writes() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for node in m.nodes.values_mut() {
            node.force_endpoint = Claim::Valid(Endpoint::Dns("hub.example".into(), 51820));
            node.internal_ips.clear();
        }
    });
    seen.resolved.insert("hub.example".into(), "192.0.2.5".parse().unwrap());
    write_plan(&mesh, &mut seen);
    seen.resolved.clear();
    let (plan, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        diff(
            &plan,
            &secret("tenant"),
            seen.members[&secret("tenant")].fresh().unwrap()
        ),
        vec![]
    );
    assert!(
        mesh_plan
            .facts
            .iter()
            .any(|fact| matches!(fact, Fact::EndpointUnresolved { node, .. } if node == "a"))
    );
}

#[test]
fn deleted_mesh_and_removed_entry_delete_their_objects() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    let hub_steps = |seen: &Observations, mesh: &Mesh| {
        let (plan, _) = plan_mesh(mesh, seen);
        summaries(&diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        ))
    };
    let all_deleted = vec![
        (Action::Delete, "m--tenant--x".to_owned()),
        (Action::Delete, "m--tenant".to_owned()),
    ];
    assert_eq!(
        hub_steps(
            &seen,
            &Mesh {
                deleting: true,
                ..mesh.clone()
            }
        ),
        all_deleted
    );
    assert_eq!(
        hub_steps(
            &seen,
            &Mesh {
                deleting: true,
                paused: true,
                ..mesh.clone()
            }
        ),
        vec![]
    );
    let mut smaller = mesh.clone();
    smaller.clusters.truncate(1);
    assert_eq!(hub_steps(&seen, &smaller), all_deleted);
}

/// A mesh is absent if it was moved to another hub, or if a person removed its finalizer.
#[test]
fn objects_of_absent_mesh_stay_until_replaced() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    let hub = seen.members[&ClusterIdentity::Local].fresh().unwrap();
    let steps = |meshes: &[Mesh]| {
        let plan = plan(meshes, &seen, &Settings::default(), &TestNaming);
        summaries(&diff(&plan, &ClusterIdentity::Local, hub))
    };
    assert_eq!(steps(&[]), vec![]);
    // Another mesh connects the same networks: its objects replace those of the absent mesh.
    let mut other = mesh.clone();
    other.id.name = "n".into();
    assert_eq!(
        steps(std::slice::from_ref(&other)),
        vec![
            (Action::Create, "n--tenant".to_owned()),
            (Action::Delete, "m--tenant--x".to_owned()),
            (Action::Create, "n--tenant--x".to_owned()),
            (Action::Delete, "m--tenant".to_owned()),
        ]
    );
    // A mesh with other networks replaces nothing, and gets no Peer with the key of an existing Peer.
    let network: IpNet = "10.99.0.0/16".parse().unwrap();
    other.clusters[1].allowed = vec![network];
    assert_eq!(steps(&[other]), vec![(Action::Create, "n--tenant".to_owned())]);
}

/// Another mesh mirrors the same Service into another namespace, so its slices do not replace those of the absent mesh.
#[test]
fn absent_mesh_keeps_its_slice_in_another_namespace() {
    let (mut mesh, mut seen) = sandbox::mesh_with_sandbox();
    mesh.clusters[1].egress = vec![sandbox::grant(sandbox::postgres(), &[], "db")];
    write_plan(&mesh, &mut seen);
    let deleted_slices = |mesh: &Mesh| {
        let (plan, _) = plan_mesh(mesh, &seen);
        let tenant = seen.members[&secret("tenant")].fresh().unwrap();
        let steps = diff(&plan, &secret("tenant"), tenant).into_iter();
        let slices = steps.filter(|step| matches!(step.item, Item::Slice(_, None)));
        slices.map(|step| step.item.name()).collect::<Vec<_>>()
    };
    let mut other = mesh.clone();
    other.id.name = "n".into();
    other.clusters[1].egress[0].local.namespace = "elsewhere".into();
    assert_eq!(deleted_slices(&other), Vec::<String>::new());
}

/// A mesh that uses all state that is listed per namespace: `tenant` exports pods; `tenant` and the sandbox `nb` are granted a
/// Service.
fn mesh_with_namespaced_state() -> (Mesh, Observations) {
    let (mut mesh, mut seen) = sandbox::mesh_with_sandbox();
    mesh.clusters[1].egress = vec![sandbox::grant(sandbox::postgres(), &[], "db")];
    mesh.clusters[1].pod_network = PodNetwork::Shared;
    mesh.clusters[1].exports = vec![Export {
        namespace: "ceph".into(),
        selector: vec![],
    }];
    edit(&mut seen, &secret("tenant"), |m| {
        let pod = Pod {
            node: "x".into(),
            addresses: vec!["10.2.9.9".parse().unwrap()],
            ..Pod::default()
        };
        let name = ObjectName {
            namespace: "ceph".into(),
            name: "osd".into(),
        };
        m.pods.insert(name, pod);
    });
    (mesh, seen)
}

/// Changes the observations of [`mesh_with_namespaced_state`] as if Services and Pods, which are listed per namespace,
/// had not been listed yet. Managed objects stay, because they are listed for all namespaces together.
fn mark_namespaces_unlisted(seen: &mut Observations) {
    let why = || "it is being read for the first time".to_owned();
    edit(seen, &ClusterIdentity::Local, |m| {
        m.services.retain(|_, service| service.managed.is_some());
        m.slices.retain(|_, slice| slice.managed.is_some());
        m.unlisted.services.insert("team-x".into(), why());
    });
    for name in ["tenant", "nb"] {
        edit(seen, &secret(name), |m| {
            m.pods.clear();
            m.unlisted.services.insert("default".into(), why());
            m.unlisted.pods.insert("ceph".into(), why());
        });
    }
}

fn all_steps(mesh: &Mesh, seen: &Observations) -> Vec<(Action, String)> {
    let (plan, _) = plan_mesh(mesh, seen);
    let members = seen.members.iter();
    let steps = members.flat_map(|(identity, seen)| summaries(&diff(&plan, identity, seen.fresh().unwrap())));
    steps.collect()
}

#[test]
fn unlisted_namespaces_cause_no_writes() {
    let (mesh, mut seen) = mesh_with_namespaced_state();
    // Twice, because some objects are planned only after others exist.
    write_plan(&mesh, &mut seen);
    write_plan(&mesh, &mut seen);
    assert_eq!(all_steps(&mesh, &seen), vec![]);
    let existing_counts = |seen: &Observations, identity: &ClusterIdentity| {
        let member = seen.members[identity].fresh().unwrap();
        let managed = member.services.values().filter(|service| service.managed.is_some());
        (managed.count(), member.peers.as_ref().unwrap().len())
    };
    assert_eq!(
        (
            existing_counts(&seen, &secret("nb")),
            existing_counts(&seen, &secret("tenant"))
        ),
        ((1, 2), (1, 2))
    );
    let allowed_ips = |seen: &Observations| {
        let peers = seen.members[&ClusterIdentity::Local]
            .fresh()
            .unwrap()
            .peers
            .clone()
            .unwrap();
        peers["m--tenant--x"].spec.clone().unwrap().allowed_ips
    };
    assert_eq!(
        allowed_ips(&seen),
        net_set(&["10.2.9.9/32", "100.66.2.1/32", "10.2.0.0/16"])
    );

    let listed = seen.clone();
    mark_namespaces_unlisted(&mut seen);
    assert_eq!(all_steps(&mesh, &seen), vec![]);
    let (_, plan) = plan_mesh(&mesh, &seen);
    let message = "the Services in namespace team-x of cluster \"mgmt\" are not known: it is being read for the first time; an \
                   existing mirrored Service is kept";
    let messages: Vec<&str> = plan.egress.iter().map(|grant| &*grant.message).collect();
    assert_eq!(messages, [message, message]);

    // If the namespaces were listed and are empty, the objects that were derived from them are deleted.
    let mut empty = listed;
    mark_namespaces_unlisted(&mut empty);
    for observation in empty.members.values_mut() {
        if let Observation::Fresh(member) = observation {
            member.unlisted = Default::default();
        }
    }
    let steps = all_steps(&mesh, &empty);
    let is_deleted = |name: &str| steps.contains(&(Action::Delete, name.to_owned()));
    assert!(is_deleted("default/db") && is_deleted("default/postgres"), "{steps:?}");
    for name in ["m--nb", "m--tenant--x"] {
        assert!(steps.contains(&(Action::Update, name.to_owned())), "{steps:?}");
    }
}

#[test]
fn forbidden_namespace_affects_only_its_own_grant() {
    let (mut mesh, mut seen) = mesh_with_namespaced_state();
    let mut other = sandbox::grant(sandbox::postgres(), &[], "other");
    other.service.namespace = "forbidden".into();
    mesh.clusters[1].egress.push(other);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.unlisted.services.insert(
            "forbidden".into(),
            "the account may not list and watch services (403)".into(),
        );
    });
    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    // `service` of a planned grant is the mirrored Service. Its namespace is `default`, also if the granted Service has another one.
    let grants: Vec<(String, bool)> = (plan.egress.iter())
        .map(|planned| (planned.service.to_string(), planned.message.contains("(403)")))
        .collect();
    assert_eq!(
        grants,
        [
            ("default/db".to_owned(), false),
            ("default/other".to_owned(), true),
            ("default/postgres".to_owned(), false)
        ]
    );
    // The Peers of a deleted node do not depend on the namespace: they are deleted.
    edit(&mut seen, &ClusterIdentity::Local, |m| assert!(m.nodes.remove("a")));
    assert!(all_steps(&mesh, &seen).contains(&(Action::Delete, "m--mgmt--a".to_owned())));
}
