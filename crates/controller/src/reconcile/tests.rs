use clustermesh_core::{
    observe::{Member, ObservedPeer, Owner},
    ownership::Claimant,
    plan::{MeshPlan, TargetPlan},
};

use super::*;

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

/// A mesh `m` with these entries that wants nothing anywhere.
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

/// A cluster that says this UID and holds one Peer of mesh `m`.
fn holding(uid: Option<&str>) -> Observation<Member> {
    let owner = Owner {
        mesh: Some("m".into()),
        mesh_namespace: Some("ns".into()),
        hub: Some("hub".into()),
        source_cluster: Some("gone".into()),
    };
    let peer = ObservedPeer {
        owner,
        spec: Err("what it says is of no interest".into()),
    };
    Observation::Fresh(Member {
        uid: uid.map(Into::into),
        peers: Some([("m--gone--n".to_owned(), peer)].into()),
        ..Member::default()
    })
}

fn deleted(plan: &Plan, members: &[(ClusterIdentity, Observation<Member>)]) -> Vec<ClusterIdentity> {
    let seen = Observations {
        members: members.iter().cloned().collect(),
        hub: "hub".into(),
        ..Observations::default()
    };
    let changes = changes(plan, &seen, diff);
    let with_deletes = changes.into_iter().filter(|(_, steps)| !steps.is_empty());
    with_deletes.map(|(identity, _)| identity).collect()
}

#[test]
fn a_second_secret_to_the_same_cluster_deletes_nothing_of_a_mesh_that_has_it_by_another() {
    let plan = plan_of(&[("a", secret("new"))], false);
    let (old, new) = (secret("old"), secret("new"));
    // What the entry itself does not want goes by the entry's own Secret.
    let same = [(old.clone(), holding(Some("u"))), (new.clone(), holding(Some("u")))];
    assert_eq!(deleted(&plan, &same), vec![new.clone()]);
    for (ours, theirs) in [(None, Some("u")), (Some("u"), None), (None, None)] {
        let unknown = [(old.clone(), holding(ours)), (new.clone(), holding(theirs))];
        assert_eq!(deleted(&plan, &unknown), vec![new.clone()], "{ours:?} {theirs:?}");
    }
    let pending = [
        (old.clone(), holding(Some("u"))),
        (new.clone(), Observation::Unreachable("not yet".into())),
    ];
    assert_eq!(deleted(&plan, &pending), []);
    let unseen = [(old.clone(), holding(Some("u")))];
    assert_eq!(deleted(&plan, &unseen), []);
}

#[test]
fn a_cluster_that_left_the_mesh_is_cleaned_and_so_is_every_one_when_the_mesh_goes() {
    let (old, new) = (secret("old"), secret("new"));
    let both = [(old.clone(), holding(Some("u"))), (new.clone(), holding(Some("v")))];
    let stays = plan_of(&[("a", new.clone())], false);
    assert_eq!(deleted(&stays, &both), [new.clone(), old.clone()]);
    let goes = plan_of(&[("a", new.clone())], true);
    let same = [(old.clone(), holding(Some("u"))), (new.clone(), holding(None))];
    assert_eq!(deleted(&goes, &same), [new, old]);
}

#[test]
fn a_key_that_no_longer_works_does_not_keep_the_other_key_of_its_secret_from_writing() {
    let key = |key: &str| ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: "s".into(),
        key: key.into(),
        context: None,
    };
    let Observation::Fresh(member) = holding(Some("u")) else {
        unreachable!()
    };
    let stale = Observation::Stale(member, "401".into());
    let plan = plan_of(&[("a", key("b"))], false);
    let members = [(key("a"), stale), (key("b"), holding(Some("u")))];
    assert_eq!(deleted(&plan, &members), [key("b")]);
    let members = [(key("a"), holding(Some("u"))), (key("b"), holding(Some("u")))];
    assert_eq!(deleted(&plan, &members), [key("b")]);
}

/// The hub takes requests and never answers.
#[tokio::test(start_paused = true)]
async fn silent_hub_delays_no_pass_and_no_gauge() {
    let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
    });
    let client = kube::Client::new(silent, "ns");
    let changed = Changed::default();
    let meshes = mesh_feed(Arc::clone(&changed));
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
            .expect("no budget");
    }
    meshes.set_trust(Trust::Live);
    let hub = Arc::new(Hub {
        client: client.clone(),
        id: "hub".into(),
        hosts: Default::default(),
        memory: clustermesh_access::memory::Memory::new(0, |_, _| {}),
        namespaces: clustermesh_core::hub::HubNamespaces::new(&[], &[], &[], "ns"),
        settings: Default::default(),
    });
    let events = crate::events::EventPublisher::new(client.clone(), None);
    let hub_writer = HubWriter::start(client, meshes.clone(), events);
    let metrics = Metrics::default();
    let mut registry = prometheus_client::registry::Registry::default();
    metrics.register(&mut registry);
    let mut reconciler = Reconciler::new(hub, meshes, hub_writer, metrics, changed, Shown::default());
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
        assert_eq!(series, 10, "{text}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
