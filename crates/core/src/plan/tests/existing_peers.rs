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
            node.force_endpoint = Claim::Valid(Endpoint::Dns("hub.example".into(), 51820));
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
}

/// A hub from which a mesh was moved away, or whose mesh lost its finalizer to a person.
#[test]
fn objects_of_a_mesh_that_is_not_there_stay() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let here = seen.members[&ClusterIdentity::Local].fresh().unwrap();
    let steps = |meshes: &[Mesh]| {
        let plan = plan(meshes, &seen, &Settings::default(), &Plain);
        names(&diff(&plan, &ClusterIdentity::Local, here))
    };
    assert_eq!(steps(&[]), vec![]);
    // Another mesh serves the same networks: its own objects take their place.
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
    // One of other networks takes neither the key of a standing Peer nor its place.
    let network: IpNet = "10.99.0.0/16".parse().unwrap();
    other.clusters[1].allowed = vec![network];
    assert_eq!(steps(&[other]), vec![(Action::Create, "n--tenant".to_owned())]);
}

/// A member whose pods are exported, a sandbox and a member that are granted a Service of it: everything that is read by
/// namespace.
fn by_namespace() -> (Mesh, Observations) {
    let (mut mesh, mut seen) = sandbox::three();
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

/// What an observation has before anything of these namespaces was listed.
fn forget_namespaces(seen: &mut Observations) {
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
    let (plan, _) = run(mesh, seen);
    let members = seen.members.iter();
    let steps = members.flat_map(|(identity, seen)| names(&diff(&plan, identity, seen.fresh().unwrap())));
    steps.collect()
}

#[test]
fn namespaces_that_were_not_listed_cost_no_write() {
    let (mesh, mut seen) = by_namespace();
    settle(&mesh, &mut seen);
    settle(&mesh, &mut seen);
    assert_eq!(all_steps(&mesh, &seen), vec![]);
    let stands = |seen: &Observations, identity: &ClusterIdentity| {
        let member = seen.members[identity].fresh().unwrap();
        let managed = member.services.values().filter(|service| service.managed.is_some());
        (managed.count(), member.peers.as_ref().unwrap().len())
    };
    assert_eq!(
        (stands(&seen, &secret("nb")), stands(&seen, &secret("tenant"))),
        ((1, 2), (1, 2))
    );
    let of = |seen: &Observations| {
        let peers = seen.members[&ClusterIdentity::Local]
            .fresh()
            .unwrap()
            .peers
            .clone()
            .unwrap();
        peers["m--tenant--x"].spec.clone().unwrap().allowed_ips
    };
    assert_eq!(of(&seen), net_set(&["10.2.9.9/32", "100.66.2.1/32", "10.2.0.0/16"]));

    let listed = seen.clone();
    forget_namespaces(&mut seen);
    assert_eq!(all_steps(&mesh, &seen), vec![]);
    let (_, plan) = run(&mesh, &seen);
    let message = "the Services in namespace team-x of cluster \"mgmt\" are not known, an existing mirrored Service is kept: it is \
                   being read for the first time";
    let messages: Vec<&str> = plan.egress.iter().map(|grant| &*grant.message).collect();
    assert_eq!(messages, [message, message]);

    // An empty list is another thing: what came of the objects goes.
    let mut empty = listed;
    forget_namespaces(&mut empty);
    for observation in empty.members.values_mut() {
        if let Observation::Fresh(member) = observation {
            member.unlisted = Default::default();
        }
    }
    let steps = all_steps(&mesh, &empty);
    let goes = |name: &str| steps.contains(&(Action::Delete, name.to_owned()));
    assert!(goes("default/db") && goes("default/postgres"), "{steps:?}");
    for name in ["m--nb", "m--tenant--x"] {
        assert!(steps.contains(&(Action::Update, name.to_owned())), "{steps:?}");
    }
}

#[test]
fn a_namespace_that_is_refused_costs_its_grant_alone() {
    let (mut mesh, mut seen) = by_namespace();
    let mut other = sandbox::grant(sandbox::postgres(), &[], "other");
    other.service.namespace = "closed".into();
    mesh.clusters[1].egress.push(other);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.unlisted.services.insert(
            "closed".into(),
            "the account may not list and watch services (403)".into(),
        );
    });
    settle(&mesh, &mut seen);
    let (_, plan) = run(&mesh, &seen);
    let grants: Vec<(String, bool)> = (plan.egress.iter())
        .map(|grant| (grant.service.to_string(), grant.message.contains("(403)")))
        .collect();
    assert_eq!(
        grants,
        [
            ("default/db".to_owned(), false),
            ("default/other".to_owned(), true),
            ("default/postgres".to_owned(), false)
        ]
    );
    // A node that goes is no grant: its Peers go.
    edit(&mut seen, &ClusterIdentity::Local, |m| drop(m.nodes.remove("a")));
    assert!(all_steps(&mesh, &seen).contains(&(Action::Delete, "m--mgmt--a".to_owned())));
}
