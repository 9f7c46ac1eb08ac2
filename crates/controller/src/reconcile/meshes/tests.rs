use kube::Client;
use serde_json::{Value, json};

use super::*;
use crate::election::Election;
use clustermesh_access::{kubeconfig::HubHosts, memory::Memory};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};

/// Returns the mesh `prod` with two entries. `networks` are the allowed networks of the second entry. The accepted networks in the
/// status are 10.1.0.0/16 and 10.2.0.0/16.
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
    let no_server = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
    });
    let client = Client::new(no_server, "ns");
    Hub {
        election: Election::of_leader(client.clone()),
        client,
        id: "hub".into(),
        hosts: HubHosts::default(),
        memory: Memory::new(0, |_, _| {}),
        namespaces,
        settings: Settings::default(),
    }
}

/// Returns name, identity and allowed networks of each entry.
fn claims(mesh: &Mesh) -> Vec<(String, ClusterIdentity, String)> {
    mesh.clusters
        .iter()
        .map(|cluster| {
            let networks: Vec<String> = cluster.allowed.iter().map(ToString::to_string).collect();
            (cluster.name.clone(), cluster.identity.clone(), networks.join(","))
        })
        .collect()
}

fn expected_claims() -> Vec<(String, ClusterIdentity, String)> {
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
async fn refused_mesh_is_paused_and_keeps_networks_and_clusters() {
    let (good, bad) = (json!(["10.2.0.0/16"]), json!(["10.9.0.0/16", "nonsense"]));
    // Either the last valid content is known, or only the status, as after a restart.
    for seen_before in [true, false] {
        let mut last_valid = LastValidMeshes::new();
        if seen_before {
            assert_eq!(load_mesh(object(&good, false), &hub(), &mut last_valid).refused, None);
        }
        let loaded = load_mesh(object(&bad, false), &hub(), &mut last_valid);
        assert_eq!(loaded.refused.as_ref().map(|(reason, _)| *reason), Some("SpecInvalid"));
        assert_eq!((loaded.mesh.paused, loaded.mesh.deleting), (true, false));
        assert_eq!(claims(&loaded.mesh), expected_claims(), "seen before: {seen_before}");
        let accepted: Vec<_> = loaded.mesh.accepted.keys().collect();
        assert_eq!(accepted, ["a", "hub"]);
    }
}

#[tokio::test]
async fn refused_mesh_in_deletion_keeps_its_clusters() {
    let loaded = load_mesh(object(&json!(["nonsense"]), true), &hub(), &mut LastValidMeshes::new());
    assert_eq!((loaded.mesh.paused, loaded.mesh.deleting), (false, true));
    let identities: Vec<_> = loaded
        .mesh
        .clusters
        .into_iter()
        .map(|cluster| cluster.identity)
        .collect();
    assert_eq!(
        identities,
        expected_claims()
            .into_iter()
            .map(|(_, identity, _)| identity)
            .collect::<Vec<_>>()
    );
    assert_eq!(loaded.unlocatable, BTreeSet::new());

    // The status still has accepted networks of an entry that is missing in the spec: its cluster is unknown.
    let mut without_entry = ClusterMesh::clone(&object(&json!(["nonsense"]), true));
    without_entry.spec.clusters.pop();
    let loaded = load_mesh(Arc::new(without_entry), &hub(), &mut LastValidMeshes::new());
    assert_eq!(loaded.unlocatable, BTreeSet::from(["a".to_owned()]));
}

#[tokio::test]
async fn refused_mesh_that_was_never_valid_claims_nothing() {
    let mut new = ClusterMesh::clone(&object(&json!(["nonsense"]), false));
    new.status = None;
    let loaded = load_mesh(Arc::new(new), &hub(), &mut LastValidMeshes::new());
    assert_eq!(loaded.mesh, empty_mesh(loaded.mesh.id.clone()));
}

/// The mesh is restricted: `--hub-namespace` limits the profiles and networks that meshes of its namespace may use.
// threat: unlisted-network
#[tokio::test]
async fn restricted_mesh_ignores_unlisted_networks_in_its_status() {
    let hub_with_flag = |flag: &str| {
        let flags = [flag.parse().expect("a flag")];
        hub_with(HubNamespaces::new(
            &flags,
            &[],
            &["10.1.0.0/16".parse().expect("a network")],
            "own",
        ))
    };
    let sandbox = |networks: &Value, status: &str| {
        let mut object = ClusterMesh::clone(&object(networks, false));
        object.spec.clusters[1].isolation_profile = clustermesh_api::mesh::IsolationProfile::Sandbox;
        object.status.as_mut().expect("a status").clusters[1].accepted_networks = vec![status.to_owned()];
        Arc::new(object)
    };
    let (inside, outside) = (json!(["10.2.0.0/16"]), json!(["128.0.0.0/8"]));
    let restricted_hub = hub_with_flag("ns=sandbox,10.2.0.0/16");
    let summary = |loaded: &LoadedMesh| {
        let accepted = loaded.mesh.accepted.get("a").map(Vec::len);
        let networks: Vec<_> = claims(&loaded.mesh)
            .into_iter()
            .map(|(_, _, networks)| networks)
            .collect();
        (loaded.refused.as_ref().map(|(reason, _)| *reason), networks, accepted)
    };
    let networks_of = |hub: &str, a: &str| vec![hub.to_owned(), a.to_owned()];

    // The spec was never valid since the controller started. In the first case the status contains an unlisted network (half of all
    // IPv4 addresses), in the second case the listed one.
    let never = load_mesh(
        sandbox(&outside, "128.0.0.0/1"),
        &restricted_hub,
        &mut LastValidMeshes::new(),
    );
    assert_eq!(
        summary(&never),
        (Some("NetworksNotAllowed"), networks_of("10.1.0.0/16", ""), None)
    );
    let never = load_mesh(
        sandbox(&outside, "10.2.0.0/16"),
        &restricted_hub,
        &mut LastValidMeshes::new(),
    );
    let kept = networks_of("10.1.0.0/16", "10.2.0.0/16");
    assert_eq!(summary(&never), (Some("NetworksNotAllowed"), kept.clone(), Some(1)));

    // The spec is valid, but the status contains the unlisted network. Then the spec changes to an unlisted network, too.
    let mut last_valid = LastValidMeshes::new();
    let good = load_mesh(sandbox(&inside, "128.0.0.0/1"), &restricted_hub, &mut last_valid);
    assert_eq!(summary(&good), (None, kept.clone(), None));
    let changed = load_mesh(sandbox(&outside, "128.0.0.0/1"), &restricted_hub, &mut last_valid);
    assert_eq!(summary(&changed), (Some("NetworksNotAllowed"), kept, None));
    assert!(changed.mesh.paused);

    // No flag names the namespace of the mesh.
    let other_namespace = load_mesh(
        sandbox(&inside, "10.2.0.0/16"),
        &hub_with_flag("other"),
        &mut LastValidMeshes::new(),
    );
    assert_eq!(
        summary(&other_namespace),
        (Some("LocalNotAllowed"), networks_of("", ""), None)
    );
}
