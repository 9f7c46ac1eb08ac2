//! The real controller on real API servers: what it writes into members, when, and what it leaves alone.

mod reconcile;

use std::collections::BTreeMap;

use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::{NAMESPACE, wait_until};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use reconcile::{LATER, SOON, World, key};
use serde_json::json;

const EVENTS: [&str; 6] = [
    "get",
    "events",
    "-n",
    NAMESPACE,
    "--no-headers",
    "-o=custom-columns=R:.reason,S:.series.count,M:.message",
];

#[tokio::test]
async fn peers_follow_the_nodes_and_a_bad_node_costs_itself() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    world.node("tenant-a", 2, 2).await;
    let mut controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;

    let peers = world
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
            SOON,
        )
        .await;
    world.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
    let spec = serde_json::to_value(&peers["prod--tenant-a--tenant-a-2"].spec).unwrap();
    assert_eq!(
        spec,
        json!({
            "publicKey": key(2, 2),
            "allowedIPs": ["10.2.2.0/24", "100.64.2.2/32", "198.51.2.2/32"],
            "endpoint": {"dnsOrIP": {"ip": "198.51.2.2"}, "port": 51820},
        })
    );
    world.until_condition("Ready", "True/Meshed", SOON).await;
    let columns = world
        .hub()
        .kubectl(["get", "cmesh", "-n", NAMESPACE, "--no-headers"])
        .await
        .unwrap()
        .stdout;
    let columns: Vec<&str> = columns.split_whitespace().collect();
    assert_eq!(&columns[..5], ["prod", "True", "Meshed", "2/2", "3"]);

    // A Node says something else, then what means nothing, then is mended; its neighbour's Peer stays untouched.
    let before = world.peers("mgmt").await;
    world
        .annotate(
            "tenant-a",
            "tenant-a-2",
            names::KILO_CLUSTERMESH_ENDPOINT,
            Some("203.0.113.9:4500"),
        )
        .await;
    let what = "the new endpoint in the Peer";
    wait_until(what, SOON, async || {
        let peers = world.peers("mgmt").await;
        let endpoint = peers["prod--tenant-a--tenant-a-2"].spec.endpoint.clone().unwrap();
        if endpoint.port == 4500 {
            Ok(())
        } else {
            Err(format!("{endpoint:?}"))
        }
    })
    .await
    .unwrap();
    world
        .annotate(
            "tenant-a",
            "tenant-a-2",
            names::KILO_CLUSTERMESH_ENDPOINT,
            Some("nonsense"),
        )
        .await;
    world.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    let message = world.until_condition("Degraded", "True/NodesSkipped", SOON).await;
    assert!(message.contains("tenant-a-2: NodeEndpointInvalid"), "{message}");
    let status = world.get_mesh().await.unwrap().status.unwrap();
    assert_eq!(
        (status.clusters[1].registered_peers, status.clusters[1].skipped_nodes),
        (1, 1)
    );
    assert_eq!(status.clusters[1].skipped[0].reason, "NodeEndpointInvalid");
    world
        .annotate("tenant-a", "tenant-a-2", names::KILO_CLUSTERMESH_ENDPOINT, None)
        .await;
    world
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
            SOON,
        )
        .await;
    world.until_condition("Degraded", "False/AllServed", SOON).await;

    world.remove_node("tenant-a", "tenant-a-2").await;
    let after = world.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    assert_eq!(
        after["prod--tenant-a--tenant-a-1"],
        before["prod--tenant-a--tenant-a-1"]
    );

    // Each thing was said once.
    let events = world.hub().kubectl(EVENTS).await.unwrap().stdout;
    let said = |word: &str| {
        let lines = events.lines().filter(|line| line.starts_with(word));
        lines
            .map(|line| line.split_whitespace().nth(1).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (said("NodeEndpointInvalid"), said("Meshed")),
        (vec!["<none>"], vec!["<none>"]),
        "{events}"
    );

    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
}

#[tokio::test]
async fn what_means_nothing_to_the_planner_and_a_restart_write_nothing() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let mut mesh = world.mesh();
    mesh["spec"]["clusters"][0]["egress"] =
        json!([{"service": {"cluster": "tenant-a", "namespace": "default", "name": "db"}}]);
    world.lab.cluster("tenant-a").apply(DB).await.unwrap();
    let mut controller = world.controller().await;
    world.apply_mesh(&mesh).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
    world.until_condition("EgressResolved", "True/Resolved", SOON).await;

    // Kilo writes this every 30 s on every node.
    let (before, plans) = (
        world.versions().await,
        world.metric("clustermesh_controller_reconciles_total").await,
    );
    for second in 0..20 {
        world
            .annotate(
                "tenant-a",
                "tenant-a-1",
                names::KILO_LAST_SEEN,
                Some(&format!("17000000{second:02}")),
            )
            .await;
    }
    // A change that is read comes after them on the same watch.
    world
        .annotate(
            "tenant-a",
            "tenant-a-1",
            names::KILO_CLUSTERMESH_ENDPOINT,
            Some("203.0.113.1:1"),
        )
        .await;
    wait_until("the change behind the churn", SOON, async || {
        let peers = world.peers("mgmt").await;
        let port = peers["prod--tenant-a--tenant-a-1"]
            .spec
            .endpoint
            .as_ref()
            .map(|endpoint| endpoint.port);
        if port == Some(1) {
            Ok(())
        } else {
            Err(format!("{port:?}"))
        }
    })
    .await
    .unwrap();
    let more = world.metric("clustermesh_controller_reconciles_total").await - plans;
    assert!(more < 10.0, "{more} passes for one change among 20 heartbeats");
    // But for that Peer, and the time of its writing in the status.
    let others = |mut versions: BTreeMap<String, String>| {
        versions.retain(|object, _| object != "mesh" && object != "mgmt Peer/prod--tenant-a--tenant-a-1");
        versions
    };
    assert_eq!(others(world.versions().await), others(before));

    // A restart.
    let before = world.versions().await;
    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    let controller = world.controller().await;
    wait_until("the members to be read after the restart", SOON, async || {
        let state = world.ask("/debug/state").await;
        let fresh = state.matches("\"observation\": \"Fresh\"").count();
        if fresh == 2 { Ok(()) } else { Err(state) }
    })
    .await
    .unwrap();
    // A pass that wrote something would have been followed by another; both are over when this change has come through.
    world.node("tenant-a", 2, 9).await;
    world
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-9"],
            SOON,
        )
        .await;
    let mut after = world.versions().await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-9");
    let (mut before, mesh) = (before, after.remove("mesh"));
    assert!(mesh.is_some() && before.remove("mesh").is_some());
    assert_eq!(after, before, "{}", controller.log());
}

const DB: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: db, namespace: default}
spec: {selector: {app: db}, ports: [{port: 5432, targetPort: 15432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: default, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: "", port: 15432, protocol: TCP}]
endpoints: [{addresses: [10.2.1.7], conditions: {ready: true, serving: true, terminating: false}}]
"#;

#[tokio::test]
async fn a_granted_service_is_mirrored_with_its_endpoints_and_goes_with_its_grant() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let tenant = world.lab.cluster("tenant-a");
    tenant.apply(DB).await.unwrap();
    let hub = world.hub();
    // Somebody's own Service, under a name that a grant asks for.
    hub.kubectl(["create", "service", "clusterip", "taken", "--tcp=80"])
        .await
        .unwrap();
    let service = |name| json!({"cluster": "tenant-a", "namespace": "default", "name": name});
    let mut mesh = world.mesh();
    mesh["spec"]["clusters"][0]["egress"] = json!([
        {"service": service("db"), "as": {"name": "remote-db"}},
        {"service": service("db"), "as": {"name": "taken"}},
    ]);
    let _controller = world.controller().await;
    world.apply_mesh(&mesh).await;

    let slices = [
        "get",
        "endpointslices",
        "-l",
        "kubernetes.io/service-name=remote-db",
        "-o",
        "jsonpath={.items[*].endpoints[*].addresses[*]} {.items[*].ports[*].port}",
    ];
    let mirrored = async |want: &str| {
        wait_until(format!("the mirrored endpoints to be {want:?}"), SOON, async || {
            let seen = hub.kubectl(slices).await.unwrap().stdout;
            if seen == want { Ok(()) } else { Err(seen) }
        })
        .await
        .unwrap();
    };
    mirrored("10.2.1.7 15432").await;
    let spec = hub
        .kubectl([
            "get",
            "service",
            "remote-db",
            "-o",
            "jsonpath={.spec.ports[0].port} {.spec.selector} {.metadata.labels}",
        ])
        .await;
    let spec = spec.unwrap().stdout;
    assert!(
        spec.starts_with("5432  {") && spec.contains(names::LABEL_MANAGED_BY),
        "{spec}"
    );
    let message = world.until_condition("EgressResolved", "False/Unresolved", SOON).await;
    assert!(
        message.contains("default/taken") && message.contains("not ours"),
        "{message}"
    );

    let moved = DB.replace("10.2.1.7", "10.2.1.8");
    tenant.apply(&moved).await.unwrap();
    mirrored("10.2.1.8 15432").await;

    mesh["spec"]["clusters"][0]["egress"] = json!([]);
    world.apply_mesh(&mesh).await;
    mirrored(" ").await;
    wait_until("the mirrored Service to go", SOON, async || {
        let left = hub
            .kubectl(["get", "services", "-o", "jsonpath={.items[*].metadata.name}"])
            .await
            .unwrap()
            .stdout;
        if left.contains("remote-db") { Err(left) } else { Ok(()) }
    })
    .await
    .unwrap();
    let taken = hub
        .kubectl(["get", "service", "taken", "-o", "jsonpath={.spec.ports[0].port}"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(taken, "80");
}

#[tokio::test]
async fn a_member_that_is_down_costs_nothing_and_catches_up() {
    let world = World::start(&["mgmt", "tenant-a", "tenant-b"]).await;
    for (m, cluster) in [(1, "mgmt"), (2, "tenant-a"), (3, "tenant-b")] {
        world.node(cluster, m, 1).await;
    }
    let _controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
    let before = world.peers("mgmt").await;

    // Frozen: connections stay open and nothing answers.
    let frozen = world.lab.cluster("tenant-b");
    frozen.freeze_api().unwrap();
    world.node("tenant-a", 2, 2).await;
    let all = [
        "prod--tenant-a--tenant-a-1",
        "prod--tenant-a--tenant-a-2",
        "prod--tenant-b--tenant-b-1",
    ];
    world.until_peers("mgmt", &all, SOON).await;
    let message = world.until_condition("Ready", "False/MemberStale", LATER).await;
    assert!(
        message.contains("tenant-b") && message.contains("does not answer"),
        "{message}"
    );
    world.node("tenant-a", 2, 3).await;
    let all = [&all[..2], &["prod--tenant-a--tenant-a-3", all[2]]].concat();
    let during = world.until_peers("mgmt", &all, SOON).await;
    assert_eq!(
        during["prod--tenant-b--tenant-b-1"],
        before["prod--tenant-b--tenant-b-1"]
    );

    // Back: it gets what it missed, and what changed there meanwhile is seen.
    frozen.thaw_api().unwrap();
    let names = [
        "prod--mgmt--mgmt-1",
        "prod--tenant-a--tenant-a-1",
        "prod--tenant-a--tenant-a-2",
        "prod--tenant-a--tenant-a-3",
    ];
    world.until_peers("tenant-b", &names, LATER).await;
    world.until_condition("Ready", "True/Meshed", LATER).await;

    // Killed: connections are refused.
    frozen.kill_api().unwrap();
    world.until_condition("Ready", "False/MemberStale", LATER).await;
    world.remove_node("tenant-a", "tenant-a-3").await;
    world
        .until_peers(
            "mgmt",
            &[
                "prod--tenant-a--tenant-a-1",
                "prod--tenant-a--tenant-a-2",
                "prod--tenant-b--tenant-b-1",
            ],
            SOON,
        )
        .await;
    frozen.start_api().await.unwrap();
    world.until_peers("tenant-b", &names[..3], LATER).await;
    world.until_condition("Ready", "True/Meshed", LATER).await;
    let after = world.peers("mgmt").await;
    assert_eq!(
        after["prod--tenant-b--tenant-b-1"],
        before["prod--tenant-b--tenant-b-1"]
    );
}

#[tokio::test]
async fn a_kubeconfig_is_swapped_in_place_and_a_bad_one_is_refused_by_field() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
    let before = world.versions().await;
    let pid = controller.pid();

    // The same account with another token.
    world.give_secret("tenant-a", &world.kubeconfig("tenant-a").await).await;
    world.node("tenant-a", 2, 2).await;
    world
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
            SOON,
        )
        .await;
    let mut after = world.versions().await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-2");
    let untouched = |versions: &BTreeMap<String, String>| {
        versions
            .iter()
            .filter(|(object, _)| *object != "mesh")
            .map(|(o, v)| (o.clone(), v.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(untouched(&after), untouched(&before));

    // Hostile: refused with the field, and what stands stays.
    let good = world.kubeconfig("tenant-a").await;
    let hostile = good.replace("    token: ", "    exec: {apiVersion: v1, command: sh}\n    token: ");
    world.give_secret("tenant-a", &hostile).await;
    let message = world.until_condition("Ready", "False/MemberMissing", SOON).await;
    assert!(
        message.contains("users[].user.exec") && message.contains("clustermesh/tenant-a-kubeconfig"),
        "{message}"
    );
    world
        .hub()
        .kubectl(["delete", "secret", "-n", NAMESPACE, "tenant-a-kubeconfig"])
        .await
        .unwrap();
    wait_until("the missing Secret to be named", SOON, async || {
        match world.condition("Ready").await {
            Some((_, message)) if message.contains("is not there") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    world
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
            SOON,
        )
        .await;
    world.give_secret("tenant-a", &good).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
    assert_eq!(controller.pid(), pid);
}

#[tokio::test]
async fn a_member_that_is_named_by_another_secret_keeps_what_it_holds() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
    let before = world.versions().await;

    // The old Secret stays, and so for a while does the session that reads it.
    world
        .give_secret_as("renamed", &world.kubeconfig("tenant-a").await)
        .await;
    let mut mesh = world.mesh();
    mesh["spec"]["clusters"][1]["kubeconfigSecretRef"]["name"] = json!("renamed");
    world.apply_mesh(&mesh).await;
    wait_until("both sessions to have read the cluster", SOON, async || {
        let state = world.ask("/debug/state").await;
        let known = state.matches("\"silent\": null,\n").count();
        let named = state.matches("renamed key").count();
        let pending = state.matches("\"uid\": null").count();
        if (known, pending) == (3, 0) && named > 1 {
            Ok(())
        } else {
            Err(state)
        }
    })
    .await
    .unwrap();
    // Whatever the passes until now decided has been written when these changes have come through, both ways.
    world.node("tenant-a", 2, 2).await;
    world.node("mgmt", 1, 2).await;
    world
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
            SOON,
        )
        .await;
    world
        .until_peers("tenant-a", &["prod--mgmt--mgmt-1", "prod--mgmt--mgmt-2"], SOON)
        .await;
    let mut after = world.versions().await;
    after.retain(|object, _| before.contains_key(object) && object != "mesh");
    let mut before = before;
    before.remove("mesh");
    assert_eq!(after, before, "{}", controller.log());
}

#[tokio::test]
async fn a_mesh_takes_everything_with_it_and_waits_for_members_that_are_away() {
    let world = World::start(&["mgmt", "tenant-a", "tenant-b"]).await;
    for (m, cluster) in [(1, "mgmt"), (2, "tenant-a"), (3, "tenant-b")] {
        world.node(cluster, m, 1).await;
    }
    // A person's own Peer.
    let peers: Api<Peer> = Api::all(world.client("mgmt").await);
    let own: Peer = serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
        "spec": {"publicKey": key(9, 9), "allowedIPs": ["192.0.2.7/32"]},
    }))
    .unwrap();
    let own = peers.create(&PostParams::default(), &own).await.unwrap();
    let _controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;

    // An entry that leaves takes its objects along, there and elsewhere.
    let mut smaller = world.mesh();
    smaller["spec"]["clusters"].as_array_mut().unwrap().remove(2);
    world.apply_mesh(&smaller).await;
    world.until_peers("tenant-b", &[], SOON).await;
    world
        .until_peers("mgmt", &["laptop", "prod--tenant-a--tenant-a-1"], SOON)
        .await;
    world.apply_mesh(&world.mesh()).await;
    world
        .until_peers("tenant-b", &["prod--mgmt--mgmt-1", "prod--tenant-a--tenant-a-1"], SOON)
        .await;

    let away = world.lab.cluster("tenant-b");
    away.kill_api().unwrap();
    world
        .hub()
        .kubectl(["delete", "cmesh", "-n", NAMESPACE, "prod", "--wait=false"])
        .await
        .unwrap();
    world.until_peers("mgmt", &["laptop"], SOON).await;
    world.until_peers("tenant-a", &[], SOON).await;
    wait_until("the condition to name who is waited for", LATER, async || {
        match world.condition("Ready").await {
            Some((state, message)) if state == "False/Deleting" && message.contains("tenant-b") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    away.start_api().await.unwrap();
    wait_until("the mesh to be let go", LATER, async || match world.get_mesh().await {
        None => Ok(()),
        Some(mesh) => Err(format!("{:?}", mesh.status)),
    })
    .await
    .unwrap();
    world.until_peers("tenant-b", &[], SOON).await;
    let policies = away
        .kubectl(["get", "peerpolicies", "-o", "name"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(policies, "");
    assert_eq!(peers.get("laptop").await.unwrap(), own);
    peers.delete("laptop", &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn the_predecessors_peers_are_taken_over_and_a_missing_crd_is_waited_for() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let tenant = world.lab.cluster("tenant-a");
    tenant
        .kubectl(["delete", "crd", "peers.kilo.squat.ai", "peerpolicies.kilo.squat.ai"])
        .await
        .unwrap();
    // As the Go operator wrote it: two labels, and more allowedIPs than we would.
    let peers: Api<Peer> = Api::all(world.client("mgmt").await);
    let old: Peer = serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
        "metadata": {"name": "prod--tenant-a--tenant-a-1", "labels": {
            names::LABEL_MESH: "prod", names::LABEL_SOURCE_CLUSTER: "tenant-a",
        }},
        "spec": {
            "publicKey": key(2, 1), "persistentKeepalive": 5,
            "allowedIPs": ["10.2.1.0/24", "100.64.2.1/32", "198.51.2.1/32", "192.0.2.0/24"],
        },
    }))
    .unwrap();
    let old = peers.create(&PostParams::default(), &old).await.unwrap();
    let _controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;

    let adopted = wait_until("the Peer to carry our labels", SOON, async || {
        let peer = peers.get("prod--tenant-a--tenant-a-1").await.unwrap();
        let labels = peer.metadata.labels.clone().unwrap();
        if labels.contains_key(names::LABEL_HUB) {
            Ok(peer)
        } else {
            Err(format!("{labels:?}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(adopted.metadata.uid, old.metadata.uid);
    assert_eq!(
        adopted.spec.allowed_ips,
        ["10.2.1.0/24", "100.64.2.1/32", "198.51.2.1/32"]
    );

    let message = world.until_condition("Ready", "False/PeerCRDMissing", SOON).await;
    assert!(message.contains("tenant-a"), "{message}");
    world.install_peer_crds("tenant-a").await;
    world.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
}

#[tokio::test]
async fn a_mesh_that_may_not_use_the_hub_or_means_nothing_is_refused_and_writes_nothing() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    world.hub().kubectl(["create", "namespace", "elsewhere"]).await.unwrap();
    let _controller = world.controller().await;
    let mut mesh = world.mesh();
    mesh["metadata"]["namespace"] = json!("elsewhere");
    world.apply_mesh(&mesh).await;
    let ready = |namespace| {
        let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].reason} {.metadata.finalizers}";
        ["get", "cmesh", "-n", namespace, "prod", "-o", path]
    };
    wait_until("the refusal", SOON, async || {
        let seen = world.hub().kubectl(ready("elsewhere")).await.unwrap().stdout;
        if seen == "LocalNotAllowed " { Ok(()) } else { Err(seen) }
    })
    .await
    .unwrap();
    world.until_peers("tenant-a", &[], SOON).await;
    // It is no obstacle either.
    world
        .hub()
        .kubectl(["delete", "cmesh", "-n", "elsewhere", "prod", "--timeout=30s"])
        .await
        .unwrap();
}

#[tokio::test]
async fn a_paused_mesh_is_left_as_it_stands_and_a_forced_one_lets_go_of_who_is_away() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let _controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;

    let hub = world.hub();
    let annotate = async |text: &str| {
        hub.kubectl(["annotate", "cmesh", "-n", NAMESPACE, "prod", text, "--overwrite"])
            .await
            .unwrap();
    };
    annotate("cluster.x-k8s.io/paused=true").await;
    world.until_condition("Paused", "True/Paused", SOON).await;
    // The status counts what is seen, and nothing is written.
    let counted = async |nodes: i64| {
        wait_until(format!("{nodes} nodes to be counted"), SOON, async || {
            let mesh = world.get_mesh().await.unwrap();
            let agents = mesh.status.unwrap().clusters[1].agents;
            if agents.is_some_and(|agents| agents.total == nodes) {
                Ok(())
            } else {
                Err(format!("{agents:?}"))
            }
        })
        .await
        .unwrap();
        let peers: Vec<String> = world.peers("mgmt").await.into_keys().collect();
        assert_eq!(peers, ["prod--tenant-a--tenant-a-1"]);
    };
    world.node("tenant-a", 2, 2).await;
    counted(2).await;
    world.remove_node("tenant-a", "tenant-a-1").await;
    counted(1).await;
    annotate("cluster.x-k8s.io/paused=false").await;
    world.until_peers("mgmt", &["prod--tenant-a--tenant-a-2"], SOON).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;

    world.lab.cluster("tenant-a").kill_api().unwrap();
    hub.kubectl(["delete", "cmesh", "-n", NAMESPACE, "prod", "--wait=false"])
        .await
        .unwrap();
    world.until_peers("mgmt", &[], SOON).await;
    wait_until("the condition to name the way out", LATER, async || {
        match world.condition("Ready").await {
            Some((_, message)) if message.contains(names::FORCE_CLEANUP) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    annotate(&format!("{}=true", names::FORCE_CLEANUP)).await;
    wait_until("the mesh to be let go", SOON, async || match world.get_mesh().await {
        None => Ok(()),
        Some(mesh) => Err(format!("{:?}", mesh.status)),
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn tunnels_that_nodes_say_are_down_stand_in_the_status_until_they_are_mended() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    for n in [1, 2] {
        world.node("mgmt", 1, n).await;
        world.node("tenant-a", 2, n).await;
    }
    let _controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("Degraded", "False/AllServed", SOON).await;

    // What the agents publish; the last of the links is of no member, as somebody hostile would write it.
    let says = async |n: u8, links: serde_json::Value| {
        let agent = json!({"version": env!("CARGO_PKG_VERSION"), "mode": "full", "mtu": 1420, "links": links});
        let node = format!("mgmt-{n}");
        world
            .annotate("mgmt", &node, names::NODE_AGENT, Some(&agent.to_string()))
            .await;
    };
    let links = async || -> Vec<(String, String, i64, i64)> {
        let status = world.get_mesh().await.unwrap().status.unwrap();
        let links = status.broken_links.into_iter();
        links.map(|link| (link.from, link.to, link.up, link.total)).collect()
    };
    let until = async |want: &[(&str, &str, i64, i64)]| {
        let want: Vec<_> = want
            .iter()
            .map(|(from, to, up, total)| ((*from).to_owned(), (*to).to_owned(), *up, *total))
            .collect();
        wait_until(format!("broken links {want:?}"), LATER, async || {
            let links = links().await;
            if links == want {
                Ok(())
            } else {
                Err(format!("{links:?}"))
            }
        })
        .await
        .unwrap();
    };
    let tenant = format!("{NAMESPACE}/prod/tenant-a");
    says(
        1,
        json!({&tenant: {"up": 1, "down": 1, "total": 2}, "other/prod/tenant-a": {"down": 1, "total": 1}}),
    )
    .await;
    until(&[("mgmt", "tenant-a", 1, 2)]).await;
    let message = world.until_condition("Degraded", "True/TunnelsDown", SOON).await;
    assert!(
        message.starts_with("1 of 2 tunnels from nodes of cluster \"mgmt\" to cluster \"tenant-a\" are down"),
        "{message}"
    );
    world.until_condition("Ready", "True/Meshed", SOON).await;
    let lies = json!({&tenant: {"up": 4_000_000_000_u64, "down": 7, "total": 1}, format!("{NAMESPACE}/prod/nobody"): {"down": 9}});
    says(2, lies).await;
    until(&[("mgmt", "tenant-a", 1, 4)]).await;

    for n in [1, 2] {
        says(n, json!({})).await;
    }
    until(&[]).await;
    world.until_condition("Degraded", "False/AllServed", SOON).await;
    let events = world.hub().kubectl(EVENTS).await.unwrap().stdout;
    let said: Vec<&str> = events.lines().filter(|line| line.starts_with("TunnelsDown")).collect();
    assert_eq!(said.len(), 1, "{events}");
}

#[tokio::test]
async fn nodes_on_which_policies_are_not_enforced_are_named_until_they_are() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    for n in [1, 2] {
        world.node("mgmt", 1, n).await;
        world.node("tenant-a", 2, n).await;
    }
    let _controller = world.controller().await;
    world.apply_mesh(&world.mesh()).await;
    world.until_condition("PolicyEnforced", "True/Enforced", SOON).await;

    let agent = |bypassed: &str| {
        let version = env!("CARGO_PKG_VERSION");
        json!({"version": version, "mode": "full", "mtu": 1420, "datapathBypassed": bypassed}).to_string()
    };
    // What somebody hostile writes is quoted and cut.
    let text = format!("datapath-mode is netkit\n{}", "x".repeat(1000));
    for n in [1, 2] {
        let node = format!("tenant-a-{n}");
        world
            .annotate("tenant-a", &node, names::NODE_AGENT, Some(&agent(&text)))
            .await;
    }
    // Kilo alone serves this one.
    world.annotate("mgmt", "mgmt-2", names::NODE_AGENT, None).await;
    let want = format!(
        "on Nodes tenant-a-1, tenant-a-2 of cluster \"tenant-a\" the CNI leads packets of pods past netfilter \
         (\"datapath-mode is netkit\\n{}…\"): PeerPolicies do not see them, and pods there may not reach the mesh. Set \
         enable-host-legacy-routing to \"true\" and datapath-mode to \"veth\" in kube-system/cilium-config there (Helm: \
         bpf.hostLegacyRouting=true) and restart Cilium; on Node mgmt-2 of cluster \"mgmt\" kg runs without wg-agent and \
         accepts whatever its Peers admit: run wg-agent there with --mode=policy",
        "x".repeat(101)
    );
    wait_until("both to be said", SOON, async || {
        match world.condition("PolicyEnforced").await {
            Some((state, message)) if state == "False/DatapathBypassed" && message == want => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    world.until_condition("Ready", "True/Meshed", SOON).await;

    for n in [1, 2] {
        let node = format!("tenant-a-{n}");
        world
            .annotate("tenant-a", &node, names::NODE_AGENT, Some(&agent("")))
            .await;
    }
    world.until_condition("PolicyEnforced", "False/NoAgent", SOON).await;
    world
        .annotate("mgmt", "mgmt-2", names::NODE_AGENT, Some(&agent("")))
        .await;
    world.until_condition("PolicyEnforced", "True/Enforced", SOON).await;
    let events = world.hub().kubectl(EVENTS).await.unwrap().stdout;
    for reason in ["DatapathBypassed", "NoAgent"] {
        assert!(
            events.lines().any(|line| line.starts_with(reason)),
            "{reason}: {events}"
        );
    }
}
