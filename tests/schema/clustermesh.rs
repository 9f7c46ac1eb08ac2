//! Tests the ClusterMesh CRD: which objects an API server accepts, the stored objects, and the messages of refusals.

use crate::api_server::ApiServer;
use serde_json::{Value, json};

const MESHES: &str = "/apis/kilo.squat.ai/v1alpha1/namespaces/default/clustermeshes";

/// The manifest in the README of the predecessor, without its comments.
const PREDECESSOR: &str = r#"
apiVersion: kilo.squat.ai/v1alpha1
kind: ClusterMesh
metadata:
  name: my-mesh
  namespace: default
spec:
  clusters:
    - name: cluster-a
      local: true
      allowedNetworks:
        - "10.1.0.0/16"
        - "10.200.0.0/24"
        - "10.96.0.0/12"
      wireguardPort: 51820
    - name: cluster-b
      kubeconfigSecretRef:
        name: cluster-b-kubeconfig
        key: kubeconfig
      allowedNetworks:
        - "10.2.0.0/16"
        - "10.200.1.0/24"
        - "10.112.0.0/12"
      wireguardPort: 51820
"#;

fn mesh(spec: Value) -> Value {
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": "prod", "namespace": "default"}, "spec": spec,
    })
}

fn two_clusters() -> Value {
    json!({"clusters": [
        {"name": "mgmt", "local": true, "allowedNetworks": ["10.244.0.0/16", "10.96.0.0/12"]},
        {"name": "tenant-a", "kubeconfigSecretRef": {"name": "tenant-a"}, "allowedNetworks": ["10.20.0.0/16"]},
    ]})
}

/// A mesh of [`two_clusters`] in which the value at each JSON pointer is set. A field of an object is removed if its value is null.
fn with(changes: &[(&str, Value)]) -> Value {
    let mut spec = two_clusters();
    for (path, value) in changes {
        let (parent, key) = path.rsplit_once('/').unwrap();
        let parent = spec.pointer_mut(parent).unwrap();
        match (parent, value) {
            (Value::Array(items), value) => items[key.parse::<usize>().unwrap()] = value.clone(),
            (Value::Object(fields), Value::Null) => drop(fields.remove(key)),
            (Value::Object(fields), value) => drop(fields.insert(key.to_owned(), value.clone())),
            (other, _) => panic!("{path} is inside {other}"),
        }
    }
    mesh(spec)
}

fn egress(cluster: &str) -> Value {
    json!([{"service": {"cluster": cluster, "namespace": "team-x", "name": "postgres-rw"}, "ports": [{"port": 5432}]}])
}

#[tokio::test]
async fn invalid_clustermesh_is_refused_with_expected_message() {
    let server = ApiServer::start().await;
    let label =
        "must be a DNS-1123 label: lower-case letters, digits and '-', beginning and ending with a letter or a digit";
    let cidr = "is not a network: write an address and a prefix length, such as 10.244.0.0/16 or fd00:10:244::/48";
    let local = "spec.clusters: Invalid value: more than one entry has `local: true`: only the cluster this object lives in may";
    let inside = "spec.clusters[0].anchoredNetworks: Invalid value: anchoredNetworks must lie inside allowedNetworks: add the network to allowedNetworks or take it out of anchoredNetworks";
    let secret = "kubeconfigSecretRef is missing: name the Secret in this namespace that holds the cluster's kubeconfig (only the entry with `local: true` needs none)";
    let own = "spec.clusters[1].egress: Invalid value: egress names this very cluster: `service.cluster` must be another entry, its own Services are reached without a mesh";
    let unknown = "spec.clusters: Invalid value: egress names a cluster that is not an entry of this mesh: `service.cluster` must be the `name` of one of spec.clusters";

    let name = "/clusters/1/name";
    let networks = "/clusters/1/allowedNetworks";
    let anchored = "/clusters/0/anchoredNetworks";
    let a64 = "a".repeat(64);
    // Each case: an accepted object, a refused one, and the message of the refusal.
    let cases = [
        (with(&[]), with(&[("/clusters/1/local", json!(true))]), local.to_owned()),
        // The accepted mesh has no entry for the hub.
        (
            with(&[("/clusters/0/kubeconfigSecretRef", json!({"name": "x"})), ("/clusters/0/local", json!(null))]),
            with(&[("/clusters/0/local", json!(null))]),
            format!("spec.clusters[0].kubeconfigSecretRef: Invalid value: {secret}"),
        ),
        (
            with(&[]),
            with(&[("/clusters/1/kubeconfigSecretRef", json!(null))]),
            format!("spec.clusters[1].kubeconfigSecretRef: Invalid value: {secret}"),
        ),
        (
            with(&[(name, json!("b"))]),
            with(&[(name, json!("mgmt"))]),
            "spec.clusters[1]: Duplicate value: {\"name\":\"mgmt\"}".to_owned(),
        ),
        (
            with(&[(name, json!("9-a"))]),
            with(&[(name, json!("Tenant_a"))]),
            format!("spec.clusters[1].name: Invalid value: \"Tenant_a\": {label}"),
        ),
        (
            with(&[(name, json!(&a64[..63]))]),
            with(&[(name, json!(a64))]),
            "[spec.clusters[1].name: Too long: may not be more than 63 bytes, <nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation]".to_owned(),
        ),
        (
            with(&[(networks, json!(["10.20.3.4/16", "fd00:20::/48"]))]),
            with(&[(networks, json!(["10.20.0.0"]))]),
            format!("spec.clusters[1].allowedNetworks[0]: Invalid value: \"10.20.0.0\": {cidr}"),
        ),
        (
            with(&[("/clusters/1/endpointNetworks", json!(["10.244.0.0/16"]))]),
            with(&[("/clusters/1/endpointNetworks", json!(["10.244.0.0/33"]))]),
            format!("spec.clusters[1].endpointNetworks[0]: Invalid value: \"10.244.0.0/33\": {cidr}"),
        ),
        (
            with(&[(anchored, json!(["10.96.0.0/16"]))]),
            with(&[(anchored, json!(["10.96.0.0/16", "10.0.0.0/8"]))]),
            inside.to_owned(),
        ),
        (
            with(&[(anchored, json!([]))]),
            with(&[(anchored, json!(["service"]))]),
            format!("spec.clusters[0].anchoredNetworks[0]: Invalid value: \"service\": {cidr}"),
        ),
        (
            with(&[("/clusters/1/egress", egress("mgmt"))]),
            with(&[("/clusters/1/egress", egress("tenant-a"))]),
            own.to_owned(),
        ),
        (
            with(&[("/clusters/0/egress", egress("tenant-a"))]),
            with(&[("/clusters/1/egress", egress("tenant-b"))]),
            unknown.to_owned(),
        ),
        (
            with(&[("/clusters/1/wireguardPort", json!(65535))]),
            with(&[("/clusters/1/wireguardPort", json!(65536))]),
            "spec.clusters[1].wireguardPort: Invalid value: 65536: spec.clusters[1].wireguardPort in body should be less than or equal to 65535".to_owned(),
        ),
        (
            with(&[("/clusters/1/isolationProfile", json!("sandbox"))]),
            with(&[("/clusters/1/isolationProfile", json!("open"))]),
            "[spec.clusters[1].isolationProfile: Unsupported value: \"open\": supported values: \"cluster-meshed\", \"sandbox\", \"standard\", <nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation]".to_owned(),
        ),
    ];
    for (accepted, invalid, expected) in cases {
        server
            .dry_run(MESHES, &accepted)
            .await
            .unwrap_or_else(|refused| panic!("{expected}: {refused:?}"));
        let refused = server.dry_run(MESHES, &invalid).await.expect_err(&expected);
        assert_eq!(
            refused,
            (
                422,
                format!("ClusterMesh.kilo.squat.ai \"prod\" is invalid: {expected}")
            )
        );
    }

    let mut long = mesh(two_clusters());
    long["metadata"]["name"] = json!(&a64[..63]);
    server.dry_run(MESHES, &long).await.unwrap();
    long["metadata"]["name"] = json!(a64);
    let refused = server.dry_run(MESHES, &long).await.unwrap_err();
    let message = "metadata.name must have at most 63 characters: it becomes the value of a label on every Peer";
    assert_eq!(
        refused,
        (
            422,
            format!("ClusterMesh.kilo.squat.ai \"{a64}\" is invalid: <nil>: Invalid value: {message}")
        )
    );

    let refused = server
        .dry_run(MESHES, &with(&[("/clusters/1/allowednetworks", json!([]))]))
        .await
        .unwrap_err();
    assert_eq!(refused.0, 400);
    assert!(
        refused.1.contains("unknown field \"spec.clusters[1].allowednetworks\""),
        "{}",
        refused.1
    );
}

#[tokio::test]
async fn set_fields_are_stored_and_omitted_fields_are_defaulted() {
    let server = ApiServer::start().await;
    let spec = json!({"paused": true, "clusters": [
        {"name": "mgmt", "local": true, "allowedNetworks": ["10.244.0.0/16", "10.96.0.0/12"],
         "anchoredNetworks": ["10.96.0.0/12"], "anchors": 2, "podNetwork": "Shared", "locations": "Connected",
         "exports": [{"namespace": "rook-ceph", "podSelector": {"matchLabels": {"app": "rook-ceph-osd"}}}],
         "wireguardPort": 51821, "persistentKeepalive": 25, "isolationProfile": "cluster-meshed", "addressing": "Routed"},
        {"name": "notebooks", "kubeconfigSecretRef": {"name": "kc", "context": "admin"}, "isolationProfile": "sandbox",
         "quarantine": true, "allowedNetworks": ["100.80.16.0/20"], "endpointNetworks": ["10.244.0.0/16"],
         "egress": [{"service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres-rw"},
            "ports": [{"port": "pg"}], "as": {"namespace": "default", "name": "postgres"}}]},
    ]});
    let mut expected = spec.clone();
    let notebooks = &mut expected["clusters"][1];
    notebooks["kubeconfigSecretRef"]["key"] = json!("value");
    notebooks["egress"][0]["ports"][0]["protocol"] = json!("TCP");
    for (field, default) in [
        ("addressing", json!("Routed")),
        ("anchors", json!(1)),
        ("podNetwork", json!("PerNode")),
        ("locations", json!("Ignored")),
        ("wireguardPort", json!(51820)),
        ("persistentKeepalive", json!(0)),
    ] {
        notebooks[field] = default;
    }
    let stored = server.dry_run(MESHES, &mesh(spec)).await.unwrap();
    assert_eq!(stored["spec"], expected);
}

#[tokio::test]
async fn predecessor_manifest_applies_and_kubectl_prints_status() {
    let server = ApiServer::start().await;
    assert_eq!(
        server.apply(PREDECESSOR).await,
        "clustermesh.kilo.squat.ai/my-mesh created\n"
    );
    let status = r#"{"status":{"members":"2/2","registeredPeers":5,"conditions":[{"type":"Ready","status":"True","reason":"Reconciled","message":"all is well","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}"#;
    server
        .kubectl(&[
            "patch",
            "cmesh",
            "my-mesh",
            "--subresource=status",
            "--type=merge",
            "-p",
            status,
        ])
        .await;
    let words = |text: String| {
        text.lines()
            .map(|l| l.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    let table = words(server.kubectl(&["get", "cmesh", "-o", "wide"]).await);
    assert_eq!(
        table[0],
        ["NAME", "READY", "REASON", "MEMBERS", "PEERS", "AGE", "MESSAGE"]
    );
    assert_eq!(table[1][..5], ["my-mesh", "True", "Reconciled", "2/2", "5"]);
    assert_eq!(table[1][6..].join(" "), "all is well");
}

// threat: expensive-spec
#[tokio::test]
async fn largest_mesh_stays_within_cost_limit_of_rules() {
    let server = ApiServer::start().await;
    let name = |index: usize| format!("c{index:02}{}", "x".repeat(60));
    let clusters: Vec<Value> = (0..100)
        .map(|index| {
            let network = |number: usize| format!("fd00:{index:04x}:{number:04x}:0000:0000:0000:0000:0000/48");
            // The rules search lists. A match at the end makes the search as expensive as possible.
            let last = if index == 99 { name(98) } else { name(99) };
            let mut entry = json!({
                "name": name(index),
                "allowedNetworks": (0..64).map(network).collect::<Vec<_>>(),
                "anchoredNetworks": vec![network(63); 16],
                "endpointNetworks": (0..64).map(network).collect::<Vec<_>>(),
                "egress": (0..64).map(|number| json!({"service": {"cluster": last, "namespace": "n", "name": format!("s{number}")}})).collect::<Vec<_>>(),
            });
            if index == 0 {
                entry["local"] = json!(true);
            } else {
                entry["kubeconfigSecretRef"] = json!({"name": format!("s{index}")});
            }
            entry
        })
        .collect();
    let stored = server.post(MESHES, &mesh(json!({"clusters": clusters}))).await.unwrap();
    assert_eq!(stored["spec"]["clusters"].as_array().unwrap().len(), 100);

    let mut too_many = clusters;
    too_many.push(json!({"name": "one-more", "kubeconfigSecretRef": {"name": "s"}, "allowedNetworks": ["10.0.0.0/8"]}));
    let refused = server
        .dry_run(MESHES, &mesh(json!({"clusters": too_many})))
        .await
        .unwrap_err();
    assert_eq!(refused.0, 422);
    assert!(
        refused
            .1
            .contains("spec.clusters: Too many: 101: must have at most 100 items"),
        "{}",
        refused.1
    );
}
