//! Tests the operation of a mesh of two whole clusters: privileges of our processes, nodes that join and leave, deleted
//! pods and an update of the controller and the agents, a member's frozen API server, new credentials, and changed endpoints of a mirrored
//! Service. At the end the mesh is deleted and the nodes are cleaned up as docs/operations/removal.md says.

mod credentials;
mod links;
mod policy_enforcement;
mod replicas;
mod restarts;
mod rights;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use clustermesh_lab::{AGENT_NAMESPACE, Cluster, Lab, MESH, NAMESPACE, Node, wait_until};
use credentials::{frozen_member_api_server_changes_only_a_condition, new_token_is_used_without_restart_or_rewrite};
use links::{broken_links, link_down_is_reported, status_of_healthy_node_matches_wg_show};
use replicas::{changes_and_flow_continue_during_update, last_replica_is_not_evicted};
use restarts::{
    flow_survives_agent_upgrade_and_key_rotation, pods_communicate_again_after_agent_restart, published_key,
    wireguard_address,
};
use rights::{agent_token_cannot_change_another_node, processes_have_exactly_the_rights_of_deploy};

use crate::setup::{
    Mesh, PATIENCE, host, json, pod,
    state::{NodeState, condition, versions},
    two_clusters, url,
};

#[tokio::test]
async fn mesh_survives_operations_and_cleanup_leaves_only_the_key() {
    let lab = two_clusters().await;
    for cluster in [lab.cluster(crate::setup::HUB), lab.cluster(crate::setup::MEMBER)] {
        cluster.run_web().await.unwrap();
    }
    let before = initial_node_states(&lab).await;
    let mut mesh = Mesh::up(&lab, &[]).await;

    processes_have_exactly_the_rights_of_deploy(&mesh).await;
    agent_token_cannot_change_another_node(&mesh).await;
    status_of_healthy_node_matches_wg_show(&mesh).await;
    flow_survives_changes_of_other_nodes_and_agents(&mesh).await;
    flow_survives_agent_upgrade_and_key_rotation(&mesh).await;
    replaced_controller_rewrites_nothing_and_works(&mut mesh).await;
    last_replica_is_not_evicted(&mesh).await;
    changes_and_flow_continue_during_update(&mesh).await;
    new_token_is_used_without_restart_or_rewrite(&mut mesh).await;
    frozen_member_api_server_changes_only_a_condition(&mesh).await;
    deleted_mesh_removes_all_objects_and_routes(&mesh).await;
    cleanup_restores_original_node_state(&mesh, &before).await;
}

/// The states of the two nodes with which each cluster starts, by node name.
async fn initial_node_states(lab: &Lab) -> BTreeMap<String, NodeState> {
    let mut states = BTreeMap::new();
    for name in [crate::setup::HUB, crate::setup::MEMBER] {
        for n in 1..=2 {
            let name = format!("{name}-{n}");
            states.insert(name.clone(), NodeState::of(&lab.node(&name)).await);
        }
    }
    states
}

async fn flow_survives_changes_of_other_nodes_and_agents(mesh: &Mesh<'_>) {
    let (from, to) = (&mesh.member_webs[1], &mesh.hub_webs[1]);
    let serve = [&mesh.probe(), "stream-serve", ":5201"];
    let mut serving = mesh.lab.node(&to.node).pod_spawn("stream-serve", to.ip, serve).unwrap();
    serving.wait_for_log("streaming on", PATIENCE).await.unwrap();
    let server_address = format!("{}:5201", to.ip);
    let get = [&mesh.probe(), "stream-get", &server_address, "3600", "60"];
    let mut stream = mesh.lab.node(&from.node).pod_spawn("stream-get", from.ip, get).unwrap();
    // The client prints "N after ... ms" for round trip number N.
    stream.wait_for_log("10 after", PATIENCE).await.unwrap();

    let start = Instant::now();
    let node = mesh.member.join_node().await.unwrap();
    let name = node.name().to_owned();
    println!("{name} Ready after {:.1} s", start.elapsed().as_secs_f64());
    let key = [
        "get",
        "node",
        &name,
        "-o",
        "jsonpath={.metadata.annotations.kilo\\.squat\\.ai/key}",
    ];
    wait_until(format!("the key of {name}"), PATIENCE, async || {
        let printed = mesh.member.kubectl(key).await.map_err(|error| error.to_string())?;
        if printed.stdout.is_empty() {
            Err("none yet".to_owned())
        } else {
            Ok(())
        }
    })
    .await
    .unwrap();
    let published = Instant::now();
    mesh.wait_for_answer(&host(&name), &url(mesh.hub_webs[0].ip, 8080))
        .await;
    println!(
        "{name} first reply {:.2} s after its annotations",
        published.elapsed().as_secs_f64()
    );
    mesh.product.wait_until_ready().await.unwrap();
    // A hub node without a handshake with the new node before the power cut would keep sending initiations to it, and so also
    // report a broken link. Only the node of `sender` (below) is expected to report one.
    for node in mesh.hub.nodes() {
        wait_until(
            format!("handshakes of {} with three peers", node.name()),
            PATIENCE,
            async || {
                let words = ["wg", "show", "kilo0", "latest-handshakes"];
                let shown = node.exec(words).await.map_err(|error| error.to_string())?.stdout;
                let connected = shown.lines().filter(|line| !line.ends_with("\t0")).count();
                if connected == 3 { Ok(()) } else { Err(shown) }
            },
        )
        .await
        .unwrap();
    }

    mesh.lab.node(&name).power_cut().await.unwrap();
    // Only a node that sends to the dead node notices that the tunnel is down, so a pod of the hub sends from now on.
    let address = wireguard_address(&mesh.member, &name).await;
    let to_dead = ["ping", "-n", "-i", "1", &address];
    let sender = &mesh.hub_webs[0];
    let _ping = mesh
        .lab
        .node(&sender.node)
        .pod_spawn("to-dead", sender.ip, to_dead)
        .unwrap();
    let cut = Instant::now();

    // Meanwhile the agent restarts on a node that the stream does not use. Only that node's tunnels are down for a moment.
    pods_communicate_again_after_agent_restart(mesh).await;

    link_down_is_reported(mesh, &sender.node, &name, cut).await;
    mesh.member.kubectl(["delete", "node", &name]).await.unwrap();
    let deleted = Instant::now();
    wait_until(format!("the Peers of {name} to be deleted"), PATIENCE, async || {
        let left = versions(&mesh.hub, "peers").await;
        let left: Vec<_> = left.keys().filter(|peer| peer.ends_with(&name)).collect();
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
    .await
    .unwrap();
    println!(
        "its Peers deleted {:.2} s after its Node",
        deleted.elapsed().as_secs_f64()
    );
    wait_until("no broken link in the status", PATIENCE, async || {
        let links = broken_links(mesh).await;
        match condition(&mesh.hub, "Degraded").await {
            (status, reason, _) if links.is_empty() && status == "False" && reason == "AllServed" => Ok(()),
            other => Err(format!("{links:?} {other:?}")),
        }
    })
    .await
    .unwrap();
    println!(
        "the status has no broken link {:.1} s after the Node was deleted",
        deleted.elapsed().as_secs_f64()
    );

    // The stream client exits if its connection breaks, or if an echo takes longer than 60 s. A new line shows that it still runs.
    let line = |log: &str| log.lines().last().unwrap_or_default().to_owned();
    let last = line(&stream.log());
    wait_until("the stream to continue", PATIENCE, async || match stream.log() {
        log if log.contains(" after ") && line(&log) != last => Ok(()),
        log => Err(line(&log)),
    })
    .await
    .unwrap();
    assert!(line(&stream.log()).contains(" after "), "{}", line(&stream.log()));
    let log = stream.log();
    let round_trips = log
        .lines()
        .filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok());
    println!("the stream's longest round trip: {:?} ms", round_trips.max());
}

/// Peers and PeerPolicies of both clusters, with their resourceVersions.
async fn written_versions(mesh: &Mesh<'_>) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for cluster in [&mesh.hub, &mesh.member] {
        for kind in ["peers", "peerpolicies"] {
            for (name, version) in versions(cluster, kind).await {
                all.insert(format!("{} {kind} {name}", cluster.plan().name), version);
            }
        }
    }
    assert!(all.len() >= 6, "two Peers and a policy in each: {all:?}");
    all
}

/// Scales the hub's web servers. Waits until the endpoints of the member's mirrored Service are exactly the running pods, and until
/// only these pods answer at its ClusterIP.
async fn scale_backends_and_wait(mesh: &mut Mesh<'_>, replicas: usize) {
    let scale = format!("--replicas={replicas}");
    mesh.hub.kubectl(["scale", "deployment/web", &scale]).await.unwrap();
    let start = Instant::now();
    wait_until(format!("{replicas} endpoints of hub-web"), PATIENCE, async || {
        let webs = mesh.hub.web_pods().await.map_err(|error| error.to_string())?;
        let mut pods: Vec<String> = webs.iter().map(|web| web.ip.to_string()).collect();
        pods.sort();
        let selector = "kubernetes.io/service-name=hub-web";
        let slices = json(&mesh.member, &["get", "endpointslices", "-l", selector]).await;
        let slices = slices["items"].as_array().unwrap().iter();
        let endpoints = slices.flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten());
        let ready = endpoints.filter(|endpoint| endpoint["conditions"]["ready"] == true);
        let mut addresses: Vec<String> = ready
            .map(|endpoint| endpoint["addresses"][0].as_str().unwrap_or_default().to_owned())
            .collect();
        addresses.sort();
        if pods.len() == replicas && addresses == pods {
            Ok(())
        } else {
            Err(format!("{pods:?}: {addresses:?}"))
        }
    })
    .await
    .unwrap();
    println!(
        "{replicas} endpoints {:.2} s after scaling",
        start.elapsed().as_secs_f64()
    );
    mesh.hub_webs = mesh.hub.web_pods().await.unwrap();
    let service = mesh.member.cluster_ip("default", "hub-web").await.unwrap();
    for from in &mesh.member_webs {
        let want: Vec<_> = mesh
            .hub_webs
            .iter()
            .map(|to| mesh.expected_answer(to, from.ip))
            .collect();
        // The member's own kube-proxy applies the slices a moment later.
        wait_until("kube-proxy to apply the EndpointSlices", PATIENCE, async || {
            for _ in 0..10 {
                let answer = mesh.wait_for_answer(&pod(from), &url(service, 80)).await;
                if !want.contains(&answer) {
                    return Err(format!("{answer:?}"));
                }
            }
            Ok(())
        })
        .await
        .unwrap();
        mesh.assert_answers(&pod(from), &url(service, 80), &want).await;
    }
}

/// The controller's pods by name, with the number of their restarts.
async fn controller_pods(hub: &Cluster<'_>) -> BTreeMap<String, serde_json::Value> {
    let pods = json(hub, &["-n", NAMESPACE, "get", "pods"]).await;
    let pods = pods["items"].as_array().unwrap().iter();
    let live = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    live.map(|pod| {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        (name, pod["status"]["containerStatuses"][0]["restartCount"].clone())
    })
    .collect()
}

async fn replaced_controller_rewrites_nothing_and_works(mesh: &mut Mesh<'_>) {
    let written = written_versions(mesh).await;
    let old = mesh.product.controller_pod().await.unwrap().name;
    mesh.hub
        .kubectl(["-n", NAMESPACE, "delete", "pod", &old])
        .await
        .unwrap();
    mesh.hub
        .wait_for_rollout(NAMESPACE, "deployment/clustermesh-controller")
        .await
        .unwrap();
    // A change of the mirrored endpoints proves that the new controller has read both clusters.
    scale_backends_and_wait(mesh, 1).await;
    scale_backends_and_wait(mesh, 2).await;
    mesh.product.wait_until_ready().await.unwrap();
    assert_eq!(written_versions(mesh).await, written);
}

async fn deleted_mesh_removes_all_objects_and_routes(mesh: &Mesh<'_>) {
    let start = Instant::now();
    let delete = ["-n", NAMESPACE, "delete", "clustermesh", MESH, "--timeout=150s"];
    mesh.hub.kubectl(delete).await.unwrap();
    println!("the finalizer was removed after {:.2} s", start.elapsed().as_secs_f64());
    let nothing: BTreeMap<String, String> = BTreeMap::new();
    for cluster in [&mesh.hub, &mesh.member] {
        for kind in ["peers", "peerpolicies"] {
            assert_eq!(
                versions(cluster, kind).await,
                nothing,
                "{kind} of {}",
                cluster.plan().name
            );
        }
        for kind in ["services", "endpointslices"] {
            let left = versions(cluster, kind).await;
            let left: Vec<_> = left.keys().filter(|name| name.contains("hub-web")).collect();
            assert!(left.is_empty(), "{kind} of {}: {left:?}", cluster.plan().name);
        }
    }
    assert_eq!(versions(&mesh.hub, "clustermeshes").await, nothing);
    for node in ["mgmt-1", "mgmt-2", "tenant-a-1", "tenant-a-2"].map(|name| mesh.lab.node(name)) {
        wait_until(
            format!("the agent of {} to have no peers and routes", node.name()),
            PATIENCE,
            async || {
                let run = async |args: &[&str]| {
                    node.exec(args)
                        .await
                        .map(|output| output.stdout)
                        .map_err(|e| e.to_string())
                };
                let peers = run(&["wg", "show", "kilo0", "peers"]).await?;
                let routes = run(&["ip", "-j", "route", "show", "table", "5182"]).await?;
                let routes: serde_json::Value = serde_json::from_str(&routes).map_err(|error| error.to_string())?;
                // Throw routes for the underlay may remain.
                let routes = routes
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|route| route["type"] != "throw");
                let routes: Vec<String> = routes.map(ToString::to_string).collect();
                if peers.is_empty() && routes.is_empty() {
                    Ok(())
                } else {
                    Err(format!("{peers}{routes:#?}"))
                }
            },
        )
        .await
        .unwrap();
    }
}

/// Follows docs/operations/removal.md, "The agents", but deletes only agent.yaml of the manifests.
async fn cleanup_restores_original_node_state(mesh: &Mesh<'_>, before: &BTreeMap<String, NodeState>) {
    let patch = r#"[
        {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["cleanup"]},
        {"op": "replace", "path": "/spec/updateStrategy/rollingUpdate/maxUnavailable", "value": "100%"}]"#;
    for cluster in [&mesh.hub, &mesh.member] {
        let args = [
            "-n",
            AGENT_NAMESPACE,
            "patch",
            "daemonset",
            "wg-agent",
            "--type=json",
            "-p",
            patch,
        ];
        cluster.kubectl(args).await.unwrap();
        let done = "nothing of wg-agent is left on this node but its key";
        wait_until(
            format!("every agent of {} to log the end of cleanup", cluster.plan().name),
            PATIENCE,
            async || {
                let selector = "app.kubernetes.io/name=wg-agent";
                let args = ["-n", AGENT_NAMESPACE, "logs", "-l", selector, "--prefix", "--tail=2"];
                let printed = cluster
                    .try_kubectl(args)
                    .await
                    .map_err(|error| error.to_string())?
                    .stdout;
                let pods: BTreeSet<&str> = printed
                    .lines()
                    .filter(|line| line.contains(done))
                    .filter_map(|line| line.split(' ').next())
                    .collect();
                if pods.len() == 2 { Ok(()) } else { Err(printed) }
            },
        )
        .await
        .unwrap();
        let deploy = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/agent.yaml");
        cluster
            .kubectl(["delete", "--ignore-not-found", "-f", deploy])
            .await
            .unwrap();
    }
    for (name, before) in before {
        let node = mesh.lab.node(name);
        assert_eq!(node.pids_of("wg-agent").unwrap(), Vec::<i32>::new());
        assert_eq!(&NodeState::of(&node).await, before, "{name}");
        assert_eq!(node.exec(["ls", "/var/lib/kilo"]).await.unwrap().stdout, "key\n");
    }
}
