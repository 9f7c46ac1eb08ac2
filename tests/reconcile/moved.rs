//! Tests a mesh that the real `clusterctl move` moves from one hub to another.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use clustermesh_api::{
    mesh::ClusterMesh,
    names::{self, ADOPT_HUB},
};
use clustermesh_lab::{MOVE_LABEL, NAMESPACE, clusterctl_move, wait_until};
use clustermesh_tests::test_env::{LATER, SOON, TestEnv, process_id};
use kube::Api;
use serde_json::json;

const MEMBERS: [&str; 2] = ["tenant-a", "tenant-b"];
const NEW_HUB: &str = "mgmt-new";
/// The UID of each Peer and PeerPolicy in the members, and its content without metadata.
async fn objects(env: &TestEnv) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for member in MEMBERS {
        let columns = "-o=jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid} {.spec}{\"\\n\"}{end}";
        let words = ["get", "peers,peerpolicies", columns];
        let listed = env.lab.cluster(member).kubectl(words).await.unwrap().stdout;
        all.extend(listed.lines().map(|line| {
            let (name, rest) = line.split_once(' ').unwrap();
            (format!("{member} {name}"), rest.to_owned())
        }));
    }
    all
}

/// The value of the hub's label on the Peers of the members.
async fn hubs(env: &TestEnv) -> Vec<String> {
    let mut hubs = Vec::new();
    for member in MEMBERS {
        let peers = env.peers(member).await;
        hubs.extend(
            peers
                .values()
                .map(|peer| peer.metadata.labels.as_ref().unwrap()[names::LABEL_HUB].clone()),
        );
    }
    hubs
}

#[tokio::test]
async fn clusterctl_moves_a_mesh_and_its_secrets() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "tenant-b", NEW_HUB]).await;
    for (m, name) in (2..).zip(MEMBERS) {
        env.create_node(name, m, 1).await;
    }
    let _old = env.start_controller().await;
    // The mesh gets no entry for the hub: after the move, such an entry would mean the new hub.
    let mut mesh = env.mesh();
    let entries = mesh["spec"]["clusters"].as_array_mut().unwrap();
    entries.retain(|entry| MEMBERS.iter().any(|name| entry["name"] == *name));
    mesh["metadata"]["labels"] = json!({MOVE_LABEL: ""});
    env.apply_mesh(&mesh).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    let before = objects(&env).await;
    assert_eq!(before.len(), 4, "{before:?}");
    let old_hub = env.hub_id().await;

    // As docs/operations/migration.md describes.
    for secret in ["tenant-a-kubeconfig", "tenant-b-kubeconfig"] {
        let label = format!("{MOVE_LABEL}=");
        env.hub()
            .kubectl(["-n", NAMESPACE, "label", "secret", secret, &label])
            .await
            .unwrap();
    }
    let adopt = format!("{ADOPT_HUB}={old_hub}");
    let words = [
        "-n",
        NAMESPACE,
        "annotate",
        "cmesh",
        "prod",
        &adopt,
        "cluster.x-k8s.io/paused=true",
    ];
    env.hub().kubectl(words).await.unwrap();
    env.until_condition("Paused", "True/Paused", SOON).await;

    let new_controller = env.start_other_hub(NEW_HUB).await;
    let [from, to] = ["mgmt", NEW_HUB].map(|hub| env.lab.cluster(hub));
    let moved = clusterctl_move(&from, &to, &|line| println!("{line}")).await.unwrap();
    let printed = moved.stderr;
    assert!(env.get_mesh().await.is_none(), "{printed}");

    let meshes: Api<ClusterMesh> = Api::namespaced(env.client(NEW_HUB).await, NAMESPACE);
    let is_paused = async || {
        meshes.get("prod").await.unwrap().status.is_some_and(|status| {
            status
                .conditions
                .iter()
                .any(|condition| condition.type_ == "Paused" && condition.status == "True")
        })
    };
    wait_until("the new hub to read the mesh", SOON, async || {
        if is_paused().await { Ok(()) } else { Err(String::new()) }
    })
    .await
    .unwrap();
    assert_eq!(objects(&env).await, before);
    assert!(
        hubs(&env).await.iter().all(|hub| *hub == old_hub),
        "nothing is written while the mesh is paused"
    );

    let words = ["-n", NAMESPACE, "annotate", "cmesh", "prod", "cluster.x-k8s.io/paused-"];
    env.lab.cluster(NEW_HUB).kubectl(words).await.unwrap();
    wait_until("the new hub to take the Peers over", LATER, async || {
        let hubs = hubs(&env).await;
        if hubs.iter().all(|hub| *hub != old_hub) {
            Ok(())
        } else {
            Err(format!("{hubs:?}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(objects(&env).await, before);
    // After a change in a member, only the new controller writes. The old one still runs and writes nothing.
    let process = process_id(&new_controller);
    let old_writes = MEMBERS.map(|member| env.lab.cluster(member).audited_writes().unwrap());
    env.create_node("tenant-a", 2, 2).await;
    let after = ["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"];
    env.until_peers("tenant-b", &after, SOON).await;
    change_node_for(observation_time(), &env).await;
    let mut count = 0;
    for (member, old) in MEMBERS.iter().zip(old_writes) {
        let writes = env.lab.cluster(member).audited_writes().unwrap();
        let deletes = writes.iter().filter(|write| write.request.starts_with("delete"));
        assert_eq!(deletes.count(), 0, "{writes:?}");
        let new = &writes[old.len()..];
        assert!(new.iter().all(|write| write.user_agent.contains(&process)), "{new:?}");
        count += new.len();
    }
    let after = objects(&env).await;
    let kept = before.iter().filter(|(name, object)| after.get(*name) == Some(object));
    assert_eq!(kept.count(), before.len(), "{before:?} {after:?}");
    assert_ne!(env.page("/metrics").await, "", "the old controller still runs");
    println!(
        "the new controller has sent {count} writes, the old one none; no delete; the first Peers have kept their UIDs"
    );
}

/// For how long a Node keeps changing while the old controller runs: `CLUSTERMESH_MOVED_MINUTES`, by default zero.
fn observation_time() -> Duration {
    let minutes = std::env::var("CLUSTERMESH_MOVED_MINUTES").unwrap_or_default();
    match minutes.as_str() {
        "" => Duration::ZERO,
        minutes => Duration::from_secs(60 * minutes.parse::<u64>().expect("CLUSTERMESH_MOVED_MINUTES is a number")),
    }
}

/// Changes the endpoint of a node every five seconds, for this time. Waits for each change to reach the other member.
async fn change_node_for(time: Duration, env: &TestEnv) {
    let until = Instant::now() + time;
    for port in 20_000.. {
        if Instant::now() >= until {
            return;
        }
        let endpoint = format!("198.51.2.2:{port}");
        env.annotate("tenant-a", "tenant-a-2", names::KILO_FORCE_ENDPOINT, Some(&endpoint))
            .await;
        wait_until("the new endpoint", SOON, async || {
            let peers = env.peers("tenant-b").await;
            let peer = serde_json::to_string(&peers["prod--tenant-a--tenant-a-2"].spec).unwrap();
            if peer.contains(&port.to_string()) {
                Ok(())
            } else {
                Err(peer)
            }
        })
        .await
        .unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}
