//! ClusterMeshes for the tests of `status` and `graph`.

use clustermesh_api::mesh::ClusterMesh;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::snapshot::{Leader, Snapshot};

/// The time of all snapshots.
pub(crate) const NOW: &str = "2026-01-10T12:00:00Z";

pub(crate) fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// A healthy mesh of the hub and these members. Each has 3 nodes.
pub(crate) fn healthy(namespace: &str, members: &[&str]) -> Value {
    let network = |index: usize| format!("10.{}.0.0/16", index + 1);
    let mut clusters = vec![json!({"name": "mgmt", "local": true, "allowedNetworks": [network(0)]})];
    clusters.extend(members.iter().enumerate().map(|(index, name)| {
        let secret = json!({"name": format!("{name}-kubeconfig")});
        json!({"name": name, "kubeconfigSecretRef": secret, "allowedNetworks": [network(index + 1)]})
    }));
    let rows = clusters.iter().map(|entry| {
        json!({
            "name": entry["name"], "acceptedNetworks": entry["allowedNetworks"], "registeredPeers": 3, "reachable": true,
            "kubernetesVersion": "v1.36.3", "agents": {"total": 3, "full": 3},
        })
    });
    let rows: Vec<Value> = rows.collect();
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": "prod", "namespace": namespace, "generation": 2, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"clusters": clusters},
        "status": {
            "observedGeneration": 2,
            "conditions": [condition("Ready", "True", "Meshed", "2026-01-07T11:00:00Z")],
            "clusters": rows,
        },
    })
}

pub(crate) fn condition(kind: &str, status: &str, reason: &str, since: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": format!("message of {reason}"), "lastTransitionTime": since})
}

/// Adds a row to `status.problems` of `mesh`, and sets the condition accordingly. `ends` are the row's `cluster` and `to`.
pub(crate) fn add_problem(
    mesh: &mut Value,
    (condition, reason): (&str, &str),
    ends: [&str; 2],
    since: &str,
    message: &str,
) {
    let mut row = json!({"condition": condition, "reason": reason, "since": since, "message": message});
    for (key, end) in ["cluster", "to"].into_iter().zip(ends) {
        if !end.is_empty() {
            row[key] = json!(end);
        }
    }
    let status = &mut mesh["status"];
    let is_true_good = !matches!(condition, "Degraded" | "NetworksOverlap");
    let conditions = status["conditions"].as_array_mut().unwrap();
    conditions.retain(|other| other["type"] != condition);
    conditions.push(self::condition(
        condition,
        if is_true_good { "False" } else { "True" },
        reason,
        since,
    ));
    if status["problems"].is_null() {
        status["problems"] = json!([]);
    }
    status["problems"].as_array_mut().unwrap().push(row);
}

/// Makes the API server of a member unreachable.
pub(crate) fn make_unreachable(mesh: &mut Value, member: &str, since: &str) {
    let rows = mesh["status"]["clusters"].as_array_mut().unwrap();
    let row = rows.iter_mut().find(|row| row["name"] == member).unwrap();
    row["reachable"] = json!(false);
    let message = format!(
        "cluster {member:?}: its API server does not answer: the request failed: error trying to connect: tcp connect error: \
         Connection refused (os error 111)"
    );
    add_problem(mesh, ("Ready", "MemberStale"), [member, ""], since, &message);
}

/// A mesh with a problem of each kind.
pub(crate) fn broken() -> Value {
    let mut mesh = healthy("acme", &["tenant-a", "tenant-b", "tenant-c"]);
    let waiting =
        "3 objects are still to be written or deleted; 2 of them in cluster \"tenant-b\" for cluster \"mgmt\"";
    let since = "2026-01-10T11:41:50Z";
    add_problem(&mut mesh, ("Ready", "Converging"), ["tenant-b", ""], since, waiting);
    make_unreachable(&mut mesh, "tenant-b", "2026-01-10T11:42:00Z");
    let open = "on Node w1 of cluster \"tenant-c\" kg runs without wg-agent and accepts all packets from its Peers: run wg-agent there with \
                --mode=policy";
    add_problem(
        &mut mesh,
        ("PolicyEnforced", "NoAgent"),
        ["tenant-c", ""],
        "2026-01-10T02:00:00Z",
        open,
    );
    let skipped = "2 node(s) of cluster \"tenant-a\" have no Peer, first w4: NodeNoPublicKey (the annotation kilo.squat.ai/key is missing: does \
                   wg-agent run there?)";
    add_problem(
        &mut mesh,
        ("Degraded", "NodesSkipped"),
        ["tenant-a", ""],
        "2026-01-10T09:30:00Z",
        skipped,
    );
    let tunnels = "2 of 9 tunnels from nodes of cluster \"mgmt\" to cluster \"tenant-a\" are down; `wg-agent status` on each node of \"mgmt\" \
                   lists its own. Most likely UDP is blocked, an endpoint is wrong, or a node is down";
    add_problem(
        &mut mesh,
        ("Degraded", "TunnelsDown"),
        ["mgmt", "tenant-a"],
        "2026-01-10T11:59:10Z",
        tunnels,
    );
    let egress =
        "data/postgres-rw in cluster \"tenant-a\": Service data/postgres-rw of cluster \"mgmt\" has no ready endpoint";
    add_problem(
        &mut mesh,
        ("EgressResolved", "Unresolved"),
        ["tenant-a", ""],
        "2026-01-08T00:00:00Z",
        egress,
    );
    let status = &mut mesh["status"];
    let rows = status["clusters"].as_array_mut().unwrap();
    rows[1]["skippedNodes"] = json!(2);
    rows[1]["skipped"] =
        json!([{"node": "w4", "reason": "NodeNoPublicKey"}, {"node": "w5", "reason": "NodeNoPublicKey"}]);
    rows[0]["agents"]["outdated"] = json!(1);
    rows[1]["credentialsExpire"] = json!("2026-01-14T00:00:00Z");
    status["brokenLinks"] = json!([{"from": "mgmt", "to": "tenant-a", "up": 7, "total": 9}]);
    let service = json!({"cluster": "mgmt", "namespace": "data", "name": "postgres-rw"});
    status["egress"] = json!([{"cluster": "tenant-a", "service": service, "ready": false}, {"cluster": "tenant-b", "service": service, "ready": true}]);
    mesh
}

pub(crate) fn snapshot(meshes: impl IntoIterator<Item = Value>) -> Snapshot {
    let meshes = meshes
        .into_iter()
        .map(|mesh| serde_json::from_value::<ClusterMesh>(mesh).unwrap());
    Snapshot {
        time: time(NOW),
        meshes: meshes.collect(),
        controller: Some(Leader {
            holder: Some("clustermesh-controller-7d9c-x2x".to_owned()),
            renewed: Some(time("2026-01-10T11:59:59Z")),
            is_alive: true,
        }),
        replicas: None,
        notes: Vec::new(),
    }
}
