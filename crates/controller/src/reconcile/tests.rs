use clustermesh_core::{
    diff::diff,
    observe::{Member, ObservedPeer, Owner},
    ownership::Claimant,
    plan::{MeshPlan, TargetPlan},
};

use super::{planning::select_steps, *};
use crate::election::Election;

fn secret(name: &str) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: name.into(),
        key: "value".into(),
        context: None,
    }
}

fn id(name: &str) -> MeshId {
    MeshId {
        namespace: "ns".into(),
        name: name.into(),
    }
}

/// Returns the plan of a mesh `m` with these entries. The plan contains no object in any of them.
fn plan_of(entries: &[(&str, ClusterIdentity)], deleting: bool) -> Plan {
    let mesh = MeshPlan {
        deleting,
        identities: entries.iter().map(|(n, i)| ((*n).to_owned(), i.clone())).collect(),
        targets: entries
            .iter()
            .map(|(n, _)| ((*n).to_owned(), TargetPlan::default()))
            .collect(),
        ..MeshPlan::default()
    };
    Plan {
        meshes: [(id("m"), mesh)].into(),
        claimants: vec![Claimant {
            mesh: id("m"),
            adopt_hub: None,
        }],
        hub: "hub".into(),
    }
}

/// Returns the observation of a cluster with this UID and one Peer of mesh `m`.
fn with_peer(uid: Option<&str>) -> Observation<Member> {
    let owner = Owner {
        mesh: Some("m".into()),
        mesh_namespace: Some("ns".into()),
        hub: Some("hub".into()),
        source_cluster: Some("gone".into()),
    };
    let peer = ObservedPeer {
        owner,
        spec: Err("irrelevant here".into()),
    };
    Observation::Fresh(Member {
        uid: uid.map(Into::into),
        peers: Some([("m--gone--n".to_owned(), peer)].into()),
        ..Member::default()
    })
}

/// Returns the members in which an object is deleted.
fn deleted(plan: &Plan, members: &[(ClusterIdentity, Observation<Member>)]) -> Vec<ClusterIdentity> {
    let seen = Observations {
        members: members.iter().cloned().collect(),
        hub: "hub".into(),
        ..Observations::default()
    };
    let steps = select_steps(plan, &seen, |identity, member| diff(plan, identity, member));
    let with_deletes = steps.into_iter().filter(|(_, steps)| !steps.is_empty());
    with_deletes.map(|(identity, _)| identity).collect()
}

// threat: same-cluster-twice
#[test]
fn unreferenced_secret_of_the_same_cluster_deletes_nothing() {
    let plan = plan_of(&[("a", secret("new"))], false);
    let (old, new) = (secret("old"), secret("new"));
    // Objects that the plan does not contain are deleted through the Secret that the entry references.
    let same = [(old.clone(), with_peer(Some("u"))), (new.clone(), with_peer(Some("u")))];
    assert_eq!(deleted(&plan, &same), vec![new.clone()]);
    // If a UID is unknown, both Secrets may be of one cluster.
    for (old_uid, new_uid) in [(None, Some("u")), (Some("u"), None), (None, None)] {
        let unknown = [(old.clone(), with_peer(old_uid)), (new.clone(), with_peer(new_uid))];
        assert_eq!(deleted(&plan, &unknown), vec![new.clone()], "{old_uid:?} {new_uid:?}");
    }
    // Until the cluster of the referenced Secret is read, both Secrets may be of one cluster.
    let pending = [
        (old.clone(), with_peer(Some("u"))),
        (new.clone(), Observation::Unreachable("not yet".into())),
    ];
    assert_eq!(deleted(&plan, &pending), []);
    let unseen = [(old.clone(), with_peer(Some("u")))];
    assert_eq!(deleted(&plan, &unseen), []);
}

#[test]
fn removed_cluster_or_deleted_mesh_is_cleaned_up() {
    let (old, new) = (secret("old"), secret("new"));
    let both = [(old.clone(), with_peer(Some("u"))), (new.clone(), with_peer(Some("v")))];
    let kept_mesh = plan_of(&[("a", new.clone())], false);
    assert_eq!(deleted(&kept_mesh, &both), [new.clone(), old.clone()]);
    let deleted_mesh = plan_of(&[("a", new.clone())], true);
    // Of a deleted mesh, all objects are deleted, even if both Secrets may be of one cluster.
    let maybe_same = [(old.clone(), with_peer(Some("u"))), (new.clone(), with_peer(None))];
    assert_eq!(deleted(&deleted_mesh, &maybe_same), [new, old]);
}

#[test]
fn of_two_keys_in_a_secret_only_the_referenced_one_deletes() {
    let key = |key: &str| ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: "s".into(),
        key: key.into(),
        context: None,
    };
    let Observation::Fresh(member) = with_peer(Some("u")) else {
        unreachable!()
    };
    let stale = Observation::Stale(member, "401".into());
    let plan = plan_of(&[("a", key("b"))], false);
    let members = [(key("a"), stale), (key("b"), with_peer(Some("u")))];
    assert_eq!(deleted(&plan, &members), [key("b")]);
    let members = [(key("a"), with_peer(Some("u"))), (key("b"), with_peer(Some("u")))];
    assert_eq!(deleted(&plan, &members), [key("b")]);
}

/// The hub accepts requests and never responds.
#[tokio::test(start_paused = true)]
async fn unresponsive_hub_delays_no_pass_and_no_gauge() {
    let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
    });
    let client = kube::Client::new(silent, "ns");
    let changed = Changed::default();
    let meshes = mesh_feed(Arc::clone(&changed));
    // The first pass of the leader requires a new list, which makes the feed `Broken` until the list is complete. In this test
    // no list is ever complete. With a broken feed, a pass plans only if `Feed::has_answer` is true; `Absent` makes it true.
    meshes.set_trust(Trust::Absent);
    for n in 0..5 {
        let secret = |entry: &str| serde_json::json!({"name": format!("{entry}-{n}")});
        let mesh = serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": format!("m-{n}"), "namespace": "ns", "uid": format!("u-{n}"), "resourceVersion": "1"},
            "spec": {"clusters": [
                {"name": "hub", "local": true, "allowedNetworks": ["10.99.0.0/16"]},
                {"name": "a", "kubeconfigSecretRef": secret("a"), "allowedNetworks": [format!("10.{n}.0.0/16")]},
            ]},
        });
        meshes
            .put(serde_json::from_value(mesh).expect("an object"))
            .expect("a feed without a budget");
    }
    meshes.set_trust(Trust::Live);
    let election = Election::of_leader(client.clone());
    let hub = Arc::new(Hub {
        client: client.clone(),
        election: Arc::clone(&election),
        id: "hub".into(),
        hosts: Default::default(),
        memory: clustermesh_access::memory::Memory::new(0, |_, _| {}),
        namespaces: clustermesh_core::hub::HubNamespaces::new(&[], &[], &[], "ns"),
        settings: Default::default(),
    });
    let hub_writer = HubWriter::start(client, None, meshes.clone(), election, Default::default());
    let metrics = Metrics::default();
    let mut registry = prometheus_client::registry::Registry::default();
    metrics.register(&mut registry);
    let mut reconciler = Reconciler::new(hub, meshes, hub_writer, metrics, changed, SharedDebugView::default());
    // A new leader requires new lists. For up to 2 s (`takeover.rs`) it plans without writing and reporting.
    reconciler.pass().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    for _ in 0..3 {
        let began = tokio::time::Instant::now();
        reconciler.pass().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
        let series = text
            .lines()
            .filter(|line| line.starts_with("registered_nodes{"))
            .count();
        // Two clusters of each of the five meshes.
        assert_eq!(series, 10, "{text}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
