//! `deploy/admission.yaml`: what an API server refuses beyond rights, with the accounts that `deploy/` makes.

mod api_server;

use api_server::ApiServer;
use serde_json::{Value, json};

const PEERS: &str = "/apis/kilo.squat.ai/v1alpha1/peers";
const CONTROLLER: &str = "system:serviceaccount:clustermesh:clustermesh-controller";
const AGENT: &str = "system:serviceaccount:clustermesh-agent:wg-agent";

fn peer(name: &str, managed: bool, range: &str) -> Value {
    let labels = if managed {
        json!({"kilo-clustermesh.io/mesh": "prod", "kilo-clustermesh.io/source-cluster": "tenant-a"})
    } else {
        json!({})
    };
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": name, "labels": labels},
        "spec": {"publicKey": "A".repeat(43) + "=", "allowedIPs": [range]},
    })
}

fn deploy(file: &str) -> String {
    std::fs::read_to_string(format!("{}/../../deploy/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// A server with the accounts, and the policies in force.
async fn server(networks: &str) -> ApiServer {
    let server = ApiServer::start().await;
    for file in ["agent.yaml", "member-account.yaml"] {
        server.apply(&deploy(file)).await;
    }
    let admission = deploy("admission.yaml");
    let note = "  # networks: 10.20.0.0/16, 100.66.0.0/16\n";
    assert!(admission.contains(note));
    server.apply(&admission.replace(note, networks)).await;
    // A policy is in force some time after it is written, each for itself.
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "annotations": {"team": "x"}}});
    server.post("/api/v1/nodes", &node).await.unwrap();
    let (stranger, agent) = (peer("in-force", true, "10.20.0.0/24"), server.acting(AGENT, &[]));
    clustermesh_lab::wait_until(
        "the policies to be in force",
        std::time::Duration::from_secs(60),
        async || {
            let label = json!({"metadata": {"labels": {"in": "force"}}});
            let answers = [
                server.dry_run(PEERS, &stranger).await,
                agent.patch("/api/v1/nodes/n1?dryRun=All", &label).await,
            ];
            match answers {
                [Err((403, _)), Err((403, _))] => Ok(()),
                other => Err(format!("{other:?}")),
            }
        },
    )
    .await
    .unwrap();
    server
}

#[tokio::test]
async fn only_the_controller_writes_what_is_a_meshs_and_only_within_the_networks_that_the_cluster_sets() {
    let server = server("  networks: 10.20.0.0/16, fd00:20::/48\n").await;
    let controller = server.acting(CONTROLLER, &[]);
    let managed = peer("prod--tenant-a--n1", true, "10.20.1.0/24");
    assert_eq!(controller.post(PEERS, &managed).await.map(drop), Ok(()));
    let (code, message) = server
        .post(PEERS, &peer("prod--tenant-a--n2", true, "10.20.2.0/24"))
        .await
        .unwrap_err();
    assert_eq!(code, 403);
    assert!(
        message.contains("may not write objects of a ClusterMesh: change the ClusterMesh in its hub, or name this user under writers in the ConfigMap clustermesh-admission"),
        "{message}"
    );
    // A person's own Peer is nobody's business; to take one out of a mesh by its label is.
    assert_eq!(
        server
            .post(PEERS, &peer("laptop", false, "10.99.0.1/32"))
            .await
            .map(drop),
        Ok(())
    );
    for (change, words) in [
        (
            json!({"metadata": {"labels": {"kilo-clustermesh.io/mesh": null}}}),
            "may not write objects of a ClusterMesh",
        ),
        (
            json!({"spec": {"allowedIPs": ["0.0.0.0/0"]}}),
            "may not write objects of a ClusterMesh",
        ),
    ] {
        let (code, message) = server
            .patch(&format!("{PEERS}/prod--tenant-a--n1"), &change)
            .await
            .unwrap_err();
        assert_eq!((code, message.contains(words)), (403, true), "{message}");
    }
    let (code, _) = server.delete(&format!("{PEERS}/prod--tenant-a--n1")).await.unwrap_err();
    assert_eq!(code, 403);

    for (range, refused) in [
        ("10.21.0.0/24", true),
        ("10.0.0.0/8", true),
        ("fd00:21::/64", true),
        ("fd00:20:0:1::/64", false),
    ] {
        let answer = controller
            .post(&format!("{PEERS}?dryRun=All"), &peer("prod--tenant-a--n3", true, range))
            .await;
        assert_eq!(answer.is_err(), refused, "{range}: {answer:?}");
        if let Err((code, message)) = answer {
            let words =
                format!("spec.allowedIPs: {range} lies outside the networks in the ConfigMap clustermesh-admission");
            assert_eq!((code, message.contains(&words)), (403, true), "{message}");
        }
    }
    assert_eq!(
        controller
            .delete(&format!("{PEERS}/prod--tenant-a--n1"))
            .await
            .map(drop),
        Ok(())
    );
}

#[tokio::test]
async fn an_agent_writes_what_it_publishes_on_its_own_node_and_nothing_else() {
    let server = server("").await;
    let other = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}});
    server.post("/api/v1/nodes", &other).await.unwrap();
    let agent = server.acting(AGENT, &[("authentication.kubernetes.io/node-name", "n1")]);
    let unbound = server.acting(AGENT, &[]);
    let annotations = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
    let key = annotations("kilo.squat.ai/key", json!("k"));
    assert_eq!(agent.patch("/api/v1/nodes/n1", &key).await.map(drop), Ok(()));
    let own = "an agent writes its own Node alone; this token is not bound to a pod on it";
    for (who, node, change, words) in [
        (&agent, "n2", key.clone(), own),
        (&unbound, "n1", annotations("kilo.squat.ai/key", json!("j")), own),
        (
            &agent,
            "n1",
            annotations("team", json!(null)),
            "an agent does not write the annotation team",
        ),
        (
            &agent,
            "n1",
            annotations("kilo.squat.ai/force-endpoint", json!("192.0.2.1:1")),
            "an agent does not write the annotation kilo.squat.ai/force-endpoint",
        ),
        (
            &agent,
            "n1",
            json!({"metadata": {"labels": {"a": "b"}}}),
            "an agent writes annotations of its Node and nothing else",
        ),
        (
            &agent,
            "n1",
            json!({"spec": {"unschedulable": true}}),
            "an agent writes annotations of its Node and nothing else",
        ),
    ] {
        let (code, message) = who
            .patch(&format!("/api/v1/nodes/{node}"), &change)
            .await
            .expect_err(words);
        assert_eq!((code, message.contains(words)), (403, true), "{message}");
    }
    // Everybody else writes Nodes as before.
    assert_eq!(
        server
            .patch("/api/v1/nodes/n2", &json!({"metadata": {"labels": {"a": "b"}}}))
            .await
            .map(drop),
        Ok(())
    );
}
