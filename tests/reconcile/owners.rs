//! Tests meshes that write into the same clusters and have equal names or the same Nodes: meshes in two namespaces of a hub, two
//! meshes in one namespace, and meshes of two hubs. Each mesh keeps its objects, its credentials and its networks.

use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::{NAMESPACE, Running, wait_until};
use clustermesh_tests::test_env::{LATER, SOON, TestEnv, key};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::writes::{audit, until_passes};

/// A namespace of the hub with a mesh that has the name of the mesh in [`NAMESPACE`].
const OTHER: &str = "other";
/// The namespace of the mesh of another hub.
const ELSEWHERE: &str = "elsewhere";
/// A network that the mesh of [`NAMESPACE`] and the mesh of [`OTHER`] both want.
const WANTED_TWICE: &str = "10.9.0.0/16";
/// The name of the Peer that a mesh named `prod` writes for the node of its member `tenant-a`.
const OURS: &str = "prod--tenant-a--tenant-a-1";

/// Creates a namespace in which the controller may read Secrets, as docs/operations/install.md says.
async fn create_namespace(env: &TestEnv, namespace: &str) {
    let metadata = json!({"name": "clustermesh-controller", "namespace": namespace});
    let group = "rbac.authorization.k8s.io";
    let objects = [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "Role", "metadata": metadata,
            "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]}],
        }),
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "clustermesh-controller"},
            "subjects": [{"kind": "ServiceAccount", "name": "clustermesh-controller", "namespace": NAMESPACE}],
        }),
    ];
    for object in objects {
        env.hub().apply(&object.to_string()).await.unwrap();
    }
}

/// Copies the kubeconfig Secret of a member into a namespace of the hub.
async fn copy_secret(env: &TestEnv, member: &str, namespace: &str, name: &str) {
    let words = [
        "get",
        "secret",
        "-n",
        NAMESPACE,
        &format!("{member}-kubeconfig"),
        "-o",
        "json",
    ];
    let secret: Value = serde_json::from_str(&env.hub().kubectl(words).await.unwrap().stdout).unwrap();
    let copy = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}, "data": secret["data"],
    });
    env.hub().apply(&copy.to_string()).await.unwrap();
}

/// Waits until a condition of the mesh `prod` in a namespace has this `status/reason`. Returns the message of the condition.
async fn until_condition(env: &TestEnv, namespace: &str, kind: &str, want: &str) -> String {
    let path = format!(
        "jsonpath={{range .status.conditions[?(@.type==\"{kind}\")]}}{{.status}}/{{.reason}} {{.message}}{{end}}"
    );
    let words = ["get", "cmesh", "-n", namespace, "prod", "-o", &path];
    wait_until(format!("{kind} of {namespace}/prod to be {want}"), SOON, async || {
        let found = env.hub().kubectl(words).await.unwrap().stdout;
        match found.split_once(' ') {
            Some((state, message)) if state == want => Ok(message.to_owned()),
            _ => Err(found),
        }
    })
    .await
    .unwrap()
}

/// Uid, resourceVersion and name of each Peer of one mesh and hub in all clusters.
async fn peers_of(env: &TestEnv, hub: &str, namespace: &str) -> Vec<String> {
    let mut found = Vec::new();
    for cluster in ["mgmt", "tenant-a", "tenant-b"] {
        for (name, peer) in env.peers(cluster).await {
            let labels = peer.metadata.labels.unwrap_or_default();
            let value = |label: &str| labels.get(label).map(String::as_str);
            if (value(names::LABEL_HUB), value(names::LABEL_MESH_NAMESPACE)) == (Some(hub), Some(namespace)) {
                let (uid, version) = (peer.metadata.uid, peer.metadata.resource_version);
                found.push(format!("{cluster} {name} {} {}", uid.unwrap(), version.unwrap()));
            }
        }
    }
    found
}

fn names_of(peers: &[String]) -> Vec<String> {
    let words = peers.iter().map(|peer| peer.split(' ').take(2).collect::<Vec<_>>());
    words.map(|words| words.join(" ")).collect()
}

/// The mesh of [`NAMESPACE`]: `mgmt` and `tenant-a`.
fn first_mesh(env: &TestEnv) -> Value {
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"].as_array_mut().unwrap().truncate(2);
    mesh
}

/// The mesh of [`OTHER`]: `mgmt`, and tenant-b under the name of tenant-a.
fn other_mesh(env: &TestEnv) -> Value {
    let mut mesh = env.mesh();
    mesh["metadata"]["namespace"] = json!(OTHER);
    let clusters = mesh["spec"]["clusters"].as_array_mut().unwrap();
    clusters.remove(1);
    clusters[1]["name"] = json!("tenant-a");
    clusters[1]["kubeconfigSecretRef"]["name"] = json!("tenant-a-kubeconfig");
    clusters[1]["allowedNetworks"]
        .as_array_mut()
        .unwrap()
        .push(json!(WANTED_TWICE));
    mesh
}

// threat: overlapping-mesh, foreign-object
#[tokio::test]
async fn meshes_with_equal_names_or_node_keys_keep_their_objects() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "tenant-b"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    let with_equal_name = |node: &mut Value| node["metadata"]["name"] = json!("tenant-a-1");
    env.create_changed_node("tenant-b", (3, 1), with_equal_name).await;
    create_namespace(&env, OTHER).await;
    create_namespace(&env, ELSEWHERE).await;
    account_has_no_unneeded_rights(&env).await;
    let start = || env.start_controller_for(NAMESPACE, &["--hub-namespace", OTHER]);
    let mut controller = start().await;
    let hub = env.hub_id().await;
    let mut first = first_mesh(&env);
    let networks = &mut first["spec"]["clusters"][1]["allowedNetworks"];
    networks.as_array_mut().unwrap().push(json!(WANTED_TWICE));
    env.apply_mesh(&first).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    mesh_of_another_namespace_gets_no_credentials_or_networks(&env, &hub).await;
    released_network_is_accepted_in_the_waiting_mesh(&env).await;
    until_passes(&env, 1).await;
    let of_first = peers_of(&env, &hub, NAMESPACE).await;
    let of_other = peers_of(&env, &hub, OTHER).await;
    let wanted = [format!("mgmt {OURS}"), "tenant-a prod--mgmt--mgmt-1".to_owned()];
    assert_eq!(names_of(&of_first), wanted);
    // A Peer of the mesh in `NAMESPACE` has the name without a suffix, so the Peer of the mesh in `OTHER` has a suffix.
    let names = names_of(&of_other);
    assert!(
        names.len() == 2 && names[0].starts_with(&format!("mgmt {OURS}-")),
        "{names:?}"
    );
    assert_eq!(names[1], "tenant-b prod--mgmt--mgmt-1");

    lost_label_is_restored(&env).await;
    let of_first = peers_of(&env, &hub, NAMESPACE).await;
    let of_second_hub = second_hub_changes_no_peer_of_the_first(&env, controller, (&hub, &of_first, &of_other)).await;
    controller = start().await;
    // Two members of each mesh.
    env.until_read(4).await;
    until_passes(&env, 3).await;
    assert_eq!(peers_of(&env, "second", ELSEWHERE).await, of_second_hub);
    assert_eq!(peers_of(&env, &hub, NAMESPACE).await, of_first);

    second_mesh_takes_over_without_two_peers_of_one_key(&env, &of_first).await;
    assert_eq!(peers_of(&env, &hub, OTHER).await, of_other, "{}", controller.log());
    assert_eq!(peers_of(&env, "second", ELSEWHERE).await, of_second_hub);
}

/// The account of deploy/ reads Secrets only in the namespaces with its Role, and changes no Node and no CRD.
async fn account_has_no_unneeded_rights(env: &TestEnv) {
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:clustermesh-controller");
    let may = async |cluster: &str, words: &[&str]| {
        let words = [&["auth", "can-i", &account][..], words].concat();
        let answer = env.lab.cluster(cluster).try_kubectl(words).await.unwrap().stdout;
        answer.trim() == "yes"
    };
    assert!(may("mgmt", &["list", "secrets", "-n", NAMESPACE]).await);
    assert!(may("tenant-a", &["list", "nodes"]).await);
    for (cluster, words) in [
        ("mgmt", &["list", "secrets", "-n", "kube-system"][..]),
        ("mgmt", &["list", "secrets", "-A"]),
        ("mgmt", &["update", "customresourcedefinitions"]),
        ("mgmt", &["patch", "nodes"]),
        ("tenant-a", &["list", "secrets", "-A"]),
        ("tenant-a", &["update", "customresourcedefinitions"]),
        ("tenant-a", &["patch", "nodes"]),
    ] {
        assert!(!may(cluster, words).await, "{cluster}: {words:?}");
    }
}

/// Two meshes in different namespaces have an entry of the same name, which names a Secret of the same name. The newer mesh gets
/// neither the Secret nor the network of the older mesh.
async fn mesh_of_another_namespace_gets_no_credentials_or_networks(env: &TestEnv, hub: &str) {
    let before = peers_of(env, hub, NAMESPACE).await;
    let other = other_mesh(env);
    env.apply_mesh(&other).await;
    // The first status may be written before the Secret was looked for.
    wait_until("the missing Secret in the status", LATER, async || {
        let message = until_condition(env, OTHER, "Ready", "False/NetworksOverlap").await;
        if message.contains("Secret other/tenant-a-kubeconfig does not exist") {
            Ok(())
        } else {
            Err(message)
        }
    })
    .await
    .unwrap();
    copy_secret(env, "tenant-b", OTHER, "tenant-a-kubeconfig").await;
    let message = until_condition(env, OTHER, "NetworksOverlap", "True/CIDROverlap").await;
    assert!(
        message.contains(WANTED_TWICE) && message.contains("ClusterMesh clustermesh/prod"),
        "{message}"
    );
    let message = env.until_condition("NetworksOverlap", "True/CIDROverlap", SOON).await;
    assert!(
        message.contains(WANTED_TWICE) && message.contains("ClusterMesh other/prod"),
        "{message}"
    );
    until_passes(env, 2).await;
    assert_eq!(peers_of(env, hub, OTHER).await, Vec::<String>::new());
    assert_eq!(peers_of(env, hub, NAMESPACE).await, before);
}

/// When the mesh in [`NAMESPACE`] gives up the network, the mesh in [`OTHER`] gets it without a change of its own.
async fn released_network_is_accepted_in_the_waiting_mesh(env: &TestEnv) {
    env.apply_mesh(&first_mesh(env)).await;
    until_condition(env, OTHER, "Ready", "True/Meshed").await;
    until_condition(env, OTHER, "NetworksOverlap", "False/NoOverlap").await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
}

async fn lost_label_is_restored(env: &TestEnv) {
    let peers: Api<Peer> = Api::all(env.client("mgmt").await);
    let patch = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_MESH: null}}}));
    let before = peers.get(OURS).await.unwrap();
    peers.patch(OURS, &PatchParams::default(), &patch).await.unwrap();
    let after = wait_until("the label to be restored", SOON, async || {
        let peer = peers.get(OURS).await.unwrap();
        match &peer.metadata.labels {
            Some(labels) if labels.contains_key(names::LABEL_MESH) => Ok(peer),
            labels => Err(format!("{labels:?}")),
        }
    })
    .await
    .unwrap();
    assert_eq!((after.metadata.uid, after.spec), (before.metadata.uid, before.spec));
    env.until_condition("Ready", "True/Meshed", SOON).await;
}

/// Ends the controller and runs one with another hub id, which writes into tenant-a and tenant-b for a mesh of the same name.
/// Returns the Peers of that mesh.
async fn second_hub_changes_no_peer_of_the_first(
    env: &TestEnv,
    mut controller: Running,
    (hub, of_first, of_other): (&str, &[String], &[String]),
) -> Vec<String> {
    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    for member in ["tenant-a", "tenant-b"] {
        copy_secret(env, member, ELSEWHERE, &format!("{member}-kubeconfig")).await;
    }
    let mut second = env.start_controller_for(ELSEWHERE, &["--hub-id=second"]).await;
    let mut mesh = env.mesh();
    mesh["metadata"]["namespace"] = json!(ELSEWHERE);
    mesh["spec"]["clusters"].as_array_mut().unwrap().remove(0);
    env.apply_mesh(&mesh).await;
    until_condition(env, ELSEWHERE, "Ready", "True/Meshed").await;
    let of_second_hub = peers_of(env, "second", ELSEWHERE).await;
    let names = names_of(&of_second_hub);
    assert_eq!(
        names,
        ["tenant-a prod--tenant-b--tenant-a-1", &format!("tenant-b {OURS}")]
    );
    assert_eq!(peers_of(env, hub, NAMESPACE).await, of_first);
    assert_eq!(peers_of(env, hub, OTHER).await, of_other);
    assert!(second.terminate(SOON).await.unwrap().success(), "{}", second.log());
    // The first hub must not see the mesh of the second one. Only in this test do both hubs share an API server.
    let words = ["patch", "cmesh", "-n", ELSEWHERE, "prod", "--type=merge", "-p"];
    let patch = "{\"metadata\":{\"finalizers\":null}}";
    env.hub().kubectl([&words[..], &[patch]].concat()).await.unwrap();
    env.hub()
        .kubectl(["delete", "cmesh", "-n", ELSEWHERE, "prod"])
        .await
        .unwrap();
    of_second_hub
}

/// A second mesh of the same clusters writes no Peer as long as the first has the keys, and takes them over when the first is deleted.
/// The old Peer is deleted first, because kg loses a key when one of two Peers with it is deleted.
async fn second_mesh_takes_over_without_two_peers_of_one_key(env: &TestEnv, of_first: &[String]) {
    let mut second = first_mesh(env);
    second["metadata"]["name"] = json!("second");
    env.apply_mesh(&second).await;
    until_passes(env, 3).await;
    let hub = env.hub_id().await;
    assert_eq!(peers_of(env, &hub, NAMESPACE).await, of_first);
    let words = ["delete", "cmesh", "-n", NAMESPACE, "prod", "--timeout=60s"];
    env.hub().kubectl(words).await.unwrap();
    let taken_over = "second--tenant-a--tenant-a-1";
    wait_until("the Peers of the second mesh", LATER, async || {
        let names = names_of(&peers_of(env, &hub, NAMESPACE).await);
        if names == [format!("mgmt {taken_over}"), "tenant-a second--mgmt--mgmt-1".to_owned()] {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(env.peers("mgmt").await[taken_over].spec.public_key, key(2, 1));
    let [in_hub, _] = audit(env);
    let at = |words: &[&str]| {
        let is_wanted = |line: &&String| words.iter().all(|word| line.contains(word));
        in_hub.iter().rposition(|line| is_wanted(&line))
    };
    let deleted = at(&["delete peers", &format!("/{OURS} ")]);
    let created = at(&["create peers", &format!("/{taken_over} ")]);
    assert!(deleted.is_some() && deleted < created, "{in_hub:?}");
}
