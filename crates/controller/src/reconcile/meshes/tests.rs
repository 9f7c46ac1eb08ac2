use kube::Client;
use serde_json::{Value, json};

use super::*;
use clustermesh_access::{kubeconfig::HubHosts, memory::Memory};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};

/// `prod` with two entries, the second of which has these networks; its status grants 10.1/16 and 10.2/16.
fn object(networks: &Value, deleting: bool) -> Arc<ClusterMesh> {
    let mut object = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": "prod", "namespace": "ns", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"clusters": [
            {"name": "hub", "local": true, "allowedNetworks": ["10.1.0.0/16"]},
            {"name": "a", "kubeconfigSecretRef": {"name": "a", "key": "value"}, "allowedNetworks": networks},
        ]},
        "status": {"clusters": [
            {"name": "hub", "acceptedNetworks": ["10.1.0.0/16"], "registeredPeers": 0, "skippedNodes": 0},
            {"name": "a", "acceptedNetworks": ["10.2.0.0/16"], "registeredPeers": 0, "skippedNodes": 0},
        ]},
    });
    if deleting {
        object["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
    }
    Arc::new(serde_json::from_value(object).expect("a ClusterMesh"))
}

fn hub() -> Hub {
    hub_with(HubNamespaces::new(&[], &[], &[], "ns"))
}

fn hub_with(namespaces: HubNamespaces) -> Hub {
    let nobody = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
    });
    Hub {
        client: Client::new(nobody, "ns"),
        id: "hub".into(),
        hosts: HubHosts::default(),
        memory: Memory::new(0, |_, _| {}),
        namespaces,
        settings: Settings::default(),
    }
}

/// What it claims and where: entry, identity, networks.
fn claims(mesh: &Mesh) -> Vec<(String, ClusterIdentity, String)> {
    mesh.clusters
        .iter()
        .map(|cluster| {
            let networks: Vec<String> = cluster.allowed.iter().map(ToString::to_string).collect();
            (cluster.name.clone(), cluster.identity.clone(), networks.join(","))
        })
        .collect()
}

fn expected() -> Vec<(String, ClusterIdentity, String)> {
    let secret = ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: "a".into(),
        key: "value".into(),
        context: None,
    };
    vec![
        ("hub".into(), ClusterIdentity::Local, "10.1.0.0/16".into()),
        ("a".into(), secret, "10.2.0.0/16".into()),
    ]
}

#[tokio::test]
async fn a_mesh_whose_spec_is_refused_keeps_its_networks_and_its_clusters_and_is_paused() {
    let (good, bad) = (json!(["10.2.0.0/16"]), json!(["10.9.0.0/16", "nonsense"]));
    // As it was served, and as its status says after a restart.
    for seen_before in [true, false] {
        let mut served = Served::new();
        if seen_before {
            assert_eq!(one(object(&good, false), &hub(), &mut served).refused, None);
        }
        let known = one(object(&bad, false), &hub(), &mut served);
        assert_eq!(known.refused.as_ref().map(|(word, _)| *word), Some("SpecInvalid"));
        assert_eq!((known.mesh.paused, known.mesh.deleting), (true, false));
        assert_eq!(claims(&known.mesh), expected(), "seen before: {seen_before}");
        let accepted: Vec<_> = known.mesh.accepted.keys().collect();
        assert_eq!(accepted, ["a", "hub"]);
    }
}

#[tokio::test]
async fn a_refused_mesh_that_is_deleted_still_knows_whom_to_wait_for() {
    let known = one(object(&json!(["nonsense"]), true), &hub(), &mut Served::new());
    assert_eq!((known.mesh.paused, known.mesh.deleting), (false, true));
    let identities: Vec<_> = known
        .mesh
        .clusters
        .into_iter()
        .map(|cluster| cluster.identity)
        .collect();
    assert_eq!(
        identities,
        expected()
            .into_iter()
            .map(|(_, identity, _)| identity)
            .collect::<Vec<_>>()
    );
    assert_eq!(known.lost, BTreeSet::new());

    let mut without = ClusterMesh::clone(&object(&json!(["nonsense"]), true));
    without.spec.clusters.pop();
    let known = one(Arc::new(without), &hub(), &mut Served::new());
    assert_eq!(known.lost, BTreeSet::from(["a".to_owned()]));
}

#[tokio::test]
async fn a_mesh_that_was_never_served_claims_nothing_when_it_is_refused() {
    let mut new = ClusterMesh::clone(&object(&json!(["nonsense"]), false));
    new.status = None;
    let known = one(Arc::new(new), &hub(), &mut Served::new());
    assert_eq!(known.mesh, hollow(known.mesh.id.clone()));
}

#[tokio::test]
async fn confined_mesh_holds_no_network_outside_its_list_whatever_its_status_says() {
    let confined = |flag: &str| {
        let flags = [flag.parse().expect("a flag")];
        hub_with(HubNamespaces::new(
            &flags,
            &[],
            &["10.1.0.0/16".parse().expect("a network")],
            "own",
        ))
    };
    let asking = |networks: &Value, status: &str| {
        let mut object = ClusterMesh::clone(&object(networks, false));
        object.spec.clusters[1].isolation_profile = clustermesh_api::mesh::IsolationProfile::Sandbox;
        object.status.as_mut().expect("a status").clusters[1].accepted_networks = vec![status.to_owned()];
        Arc::new(object)
    };
    let (inside, outside) = (json!(["10.2.0.0/16"]), json!(["128.0.0.0/8"]));
    let listed = confined("ns=sandbox,10.2.0.0/16");
    let held = |known: &Known| {
        let accepted = known.mesh.accepted.get("a").map(Vec::len);
        let claimed: Vec<_> = claims(&known.mesh)
            .into_iter()
            .map(|(_, _, networks)| networks)
            .collect();
        (known.refused.as_ref().map(|(word, _)| *word), claimed, accepted)
    };
    let claimed = |hub: &str, a: &str| vec![hub.to_owned(), a.to_owned()];

    // Never served; its status names half of the internet, or what it may have.
    let never = one(asking(&outside, "128.0.0.0/1"), &listed, &mut Served::new());
    assert_eq!(
        held(&never),
        (Some("NetworksNotAllowed"), claimed("10.1.0.0/16", ""), None)
    );
    let never = one(asking(&outside, "10.2.0.0/16"), &listed, &mut Served::new());
    let kept = claimed("10.1.0.0/16", "10.2.0.0/16");
    assert_eq!(held(&never), (Some("NetworksNotAllowed"), kept.clone(), Some(1)));

    // Served, with a status that says more; then changed.
    let mut served = Served::new();
    let good = one(asking(&inside, "128.0.0.0/1"), &listed, &mut served);
    assert_eq!(held(&good), (None, kept.clone(), None));
    let changed = one(asking(&outside, "128.0.0.0/1"), &listed, &mut served);
    assert_eq!(held(&changed), (Some("NetworksNotAllowed"), kept, None));
    assert!(changed.mesh.paused);

    // In a namespace of which no flag speaks.
    let unlisted = one(asking(&inside, "10.2.0.0/16"), &confined("other"), &mut Served::new());
    assert_eq!(held(&unlisted), (Some("LocalNotAllowed"), claimed("", ""), None));
}
