//! Tests the two replicas of the controller on real nodes: the last one is not evicted, and during an update Peers are still
//! written and a flow continues.

use k8s_openapi::api::{core::v1::Pod, policy::v1::PodDisruptionBudget};
use kube::{
    Api, Client, Config,
    api::{EvictParams, ListParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};

use super::{restarts::continues, *};

const DEPLOYMENT: &str = "deployment/clustermesh-controller";
const NAME: &str = "clustermesh-controller";

/// The pods of the controller that are not being deleted, with their nodes. A pod that is not scheduled has none.
async fn replicas(mesh: &Mesh<'_>) -> BTreeMap<String, Option<String>> {
    let pods: Api<Pod> = Api::namespaced(mesh.hub.client().await.unwrap(), NAMESPACE);
    let selector = ListParams::default().labels("app.kubernetes.io/name=clustermesh-controller");
    let pods = pods.list(&selector).await.unwrap().items.into_iter();
    pods.filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .map(|pod| (pod.metadata.name.unwrap(), pod.spec.unwrap().node_name))
        .collect()
}

/// Asserts that there are two replicas, on different nodes.
async fn two_replicas_on_two_nodes(mesh: &Mesh<'_>) -> BTreeMap<String, Option<String>> {
    mesh.hub.wait_for_rollout(NAMESPACE, DEPLOYMENT).await.unwrap();
    let replicas = replicas(mesh).await;
    let nodes: BTreeSet<&Option<String>> = replicas.values().collect();
    assert!(
        replicas.len() == 2 && nodes.len() == 2 && !nodes.contains(&None),
        "{replicas:?}"
    );
    replicas
}

/// Requests the eviction of a pod as a dry run. Succeeds if the pod may be evicted.
async fn dry_run_eviction(mesh: &Mesh<'_>, pod: &str) -> Result<(), kube::Error> {
    let kubeconfig = Kubeconfig::from_yaml(&mesh.hub.kubeconfig().unwrap()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let mut config = config.unwrap();
    // An eviction that is not allowed is answered with 429. By default the client would repeat such a request.
    config.default_retry = false;
    let pods: Api<Pod> = Api::namespaced(Client::try_from(config).unwrap(), NAMESPACE);
    let params = EvictParams {
        post_options: PostParams {
            dry_run: true,
            ..PostParams::default()
        },
        ..EvictParams::default()
    };
    pods.evict(pod, &params).await.map(drop)
}

/// Waits until this number of replicas may be evicted.
async fn until_evictable(mesh: &Mesh<'_>, want: i32) {
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(mesh.hub.client().await.unwrap(), NAMESPACE);
    wait_until(format!("{want} evictable replicas"), PATIENCE, async || {
        let budget = budgets.get(NAME).await.map_err(|error| error.to_string())?;
        let status = budget.status.unwrap_or_default();
        if status.disruptions_allowed == Some(want) && status.expected_pods == Some(2) {
            Ok(())
        } else {
            Err(format!("{status:?}"))
        }
    })
    .await
    .unwrap();
}

pub(super) async fn last_replica_is_not_evicted(mesh: &Mesh<'_>) {
    let replicas = two_replicas_on_two_nodes(mesh).await;
    let names: Vec<&String> = replicas.keys().collect();
    until_evictable(mesh, 1).await;
    dry_run_eviction(mesh, names[0]).await.unwrap();

    // Delete one replica, and keep its successor unscheduled. The nodes are tainted and not cordoned, because cordoned nodes
    // could lose their anchored networks.
    let taint = async |node: &str, word: &str| {
        mesh.hub.kubectl(["taint", "nodes", node, word]).await.unwrap();
    };
    taint("--all", "test=away:NoSchedule").await;
    let delete = ["-n", NAMESPACE, "delete", "pod", names[0]];
    mesh.hub.kubectl(delete).await.unwrap();
    until_evictable(mesh, 0).await;
    match dry_run_eviction(mesh, names[1]).await {
        Err(kube::Error::Api(status)) if status.code == 429 => {
            assert!(status.message.contains("disruption budget"), "{status:?}");
        }
        other => panic!("{other:?}"),
    }
    // The taint of the deleted replica's node goes first. Otherwise the successor would be scheduled next to the other replica.
    taint(replicas[names[0]].as_ref().unwrap(), "test-").await;
    two_replicas_on_two_nodes(mesh).await;
    taint(replicas[names[1]].as_ref().unwrap(), "test-").await;
}

/// Removes a label from a Peer that the controller wrote, and waits until the controller has restored it.
async fn change_arrives(cluster: &Cluster<'_>, peer: &str) {
    let label = "kilo-clustermesh.io/mesh";
    cluster
        .kubectl(["label", "peer", peer, &format!("{label}-")])
        .await
        .unwrap();
    wait_until(format!("the label of Peer {peer}"), PATIENCE, async || {
        let peer = json(cluster, &["get", "peer", peer]).await;
        match peer["metadata"]["labels"][label].as_str() {
            Some(_) => Ok(()),
            None => Err("it is missing".to_owned()),
        }
    })
    .await
    .unwrap();
}

pub(super) async fn changes_and_flow_continue_during_update(mesh: &Mesh<'_>) {
    let before = two_replicas_on_two_nodes(mesh).await;
    let written = written_versions(mesh).await;
    let (from, to) = (&mesh.member_webs[0], &mesh.hub_webs[0]);
    let ping = ["ping", "-n", "-D", "-i", "0.05", &to.ip.to_string()];
    let mut flow = mesh
        .lab
        .node(&from.node)
        .pod_spawn("ping-update", from.ip, ping)
        .unwrap();
    flow.wait_for_log("icmp_seq=20 ", PATIENCE).await.unwrap();

    let start = Instant::now();
    let restart = ["-n", NAMESPACE, "rollout", "restart", DEPLOYMENT];
    mesh.hub.kubectl(restart).await.unwrap();
    let rollout = mesh.hub.wait_for_rollout(NAMESPACE, DEPLOYMENT);
    // Each Peer is changed only twice. After a third change the controller would call it contested and delay its next write.
    let (hub, member) = (mesh.hub.plan().name.clone(), mesh.member.plan().name.clone());
    let mut changes = 0;
    let change = async {
        for n in [1, 2, 1, 2] {
            change_arrives(&mesh.member, &format!("{MESH}--{hub}--{hub}-{n}")).await;
            changes += 1;
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            change_arrives(&mesh.hub, &format!("{MESH}--{member}--{member}-{n}")).await;
            changes += 1;
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = rollout => done.unwrap(),
        () = change => {}
    }
    println!(
        "{changes} changes arrived in the {:.1} s of the update",
        start.elapsed().as_secs_f64()
    );
    assert!(changes > 0, "a change arrived during the update");
    continues(&flow, "an update of the controller").await;

    // Each replica is a new one, and they are on different nodes again.
    let after = two_replicas_on_two_nodes(mesh).await;
    assert!(
        after.keys().all(|pod| !before.contains_key(pod)),
        "{before:?} {after:?}"
    );
    // The new replicas have read everything. They have created and deleted nothing, and rewritten no PeerPolicy.
    mesh.product.wait_until_ready().await.unwrap();
    let now = written_versions(mesh).await;
    assert!(now.keys().eq(written.keys()), "{written:?} {now:?}");
    let policies = |all: &BTreeMap<String, String>| -> Vec<String> {
        let policies = all.iter().filter(|(name, _)| name.contains(" peerpolicies "));
        policies.map(|(name, version)| format!("{name} {version}")).collect()
    };
    assert_eq!(policies(&now), policies(&written));
}
