//! Tests parts of a ClusterMesh's status: tunnels that are down and nodes without enforcement, which the agents' Node
//! annotations report, and the anchors of anchored networks.

use clustermesh_api::{annotations, names, versions::VERSIONS};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::writes;

#[tokio::test]
async fn broken_tunnels_are_in_status_until_repaired() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    for n in [1, 2] {
        env.create_node("mgmt", 1, n).await;
        env.create_node("tenant-a", 2, n).await;
    }
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;
    env.until_condition("Degraded", "False/AllServed", SOON).await;

    // Writes the annotation of an agent. A key of `links` is MESH_NAMESPACE/MESH/MEMBER. Some of the keys below name another
    // mesh, or a member that does not exist, as a hostile node might report.
    let publish_links = async |n: u8, links: serde_json::Value| {
        let agent = json!({"version": env!("CARGO_PKG_VERSION"), "mode": "full", "mtu": 1420, "links": links});
        let node = format!("mgmt-{n}");
        env.annotate("mgmt", &node, names::NODE_AGENT, Some(&agent.to_string()))
            .await;
    };
    let broken_links = async || -> Vec<(String, String, i64, i64)> {
        let status = env.get_mesh().await.unwrap().status.unwrap();
        let links = status.broken_links.into_iter();
        links.map(|link| (link.from, link.to, link.up, link.total)).collect()
    };
    let until_broken_links = async |want: &[(&str, &str, i64, i64)]| {
        let want: Vec<_> = want
            .iter()
            .map(|(from, to, up, total)| ((*from).to_owned(), (*to).to_owned(), *up, *total))
            .collect();
        wait_until(format!("broken links {want:?}"), LATER, async || {
            let broken = broken_links().await;
            if broken == want {
                Ok(())
            } else {
                Err(format!("{broken:?}"))
            }
        })
        .await
        .unwrap();
    };
    let tenant = format!("{NAMESPACE}/prod/tenant-a");
    publish_links(
        1,
        json!({&tenant: {"up": 1, "down": 1, "total": 2}, "other/prod/tenant-a": {"down": 1, "total": 1}}),
    )
    .await;
    until_broken_links(&[("mgmt", "tenant-a", 1, 2)]).await;
    let message = env.until_condition("Degraded", "True/TunnelsDown", SOON).await;
    assert!(
        message.starts_with("1 of 2 tunnels from nodes of cluster \"mgmt\" to cluster \"tenant-a\" are down"),
        "{message}"
    );
    env.until_condition("Ready", "True/Meshed", SOON).await;
    // A compromised node reports more tunnels than it has, and tunnels to a cluster that does not exist. The controller counts at most
    // the two planned tunnels of the node as down, and ignores the unknown cluster.
    let unknown = format!("{NAMESPACE}/prod/unknown");
    let false_report = json!({
        &tenant: {"up": 4_000_000_000_u64, "down": 7, "total": 1},
        unknown: {"down": 9},
    });
    publish_links(2, false_report).await;
    until_broken_links(&[("mgmt", "tenant-a", 1, 4)]).await;

    for n in [1, 2] {
        publish_links(n, json!({})).await;
    }
    until_broken_links(&[]).await;
    env.until_condition("Degraded", "False/AllServed", SOON).await;
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    let published: Vec<&str> = events.lines().filter(|line| line.starts_with("TunnelsDown")).collect();
    assert_eq!(published.len(), 1, "{events}");
}

// threat: datapath-bypassed
#[tokio::test]
async fn nodes_without_enforcement_are_named_until_enforced() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    for n in [1, 2] {
        env.create_node("mgmt", 1, n).await;
        env.create_node("tenant-a", 2, n).await;
    }
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;
    env.until_condition("PolicyEnforced", "True/Enforced", SOON).await;

    let agent = |bypassed: &str| {
        let version = env!("CARGO_PKG_VERSION");
        json!({"version": version, "mode": "full", "mtu": 1420, "datapathBypassed": bypassed}).to_string()
    };
    // Hostile text is quoted and truncated.
    let text = format!("datapath-mode is netkit\n{}", "x".repeat(1000));
    for n in [1, 2] {
        let node = format!("tenant-a-{n}");
        env.annotate("tenant-a", &node, names::NODE_AGENT, Some(&agent(&text)))
            .await;
    }
    // On mgmt-2, kg runs without wg-agent. On mgmt-1, kube-proxy in mode ipvs translates packets after the agent's rules.
    env.annotate("mgmt", "mgmt-2", names::NODE_AGENT, None).await;
    env.annotate("mgmt", "mgmt-1", names::NODE_AGENT, Some(&agent(annotations::IPVS)))
        .await;
    let want = format!(
        "on Nodes tenant-a-1, tenant-a-2 of cluster \"tenant-a\" the CNI forwards packets of pods without netfilter \
         (\"datapath-mode is netkit\\n{}…\"): PeerPolicies do not apply to them, and pods there may fail to reach the mesh. Set \
         enable-host-legacy-routing to \"true\" and datapath-mode to \"veth\" in kube-system/cilium-config there (Helm: \
         bpf.hostLegacyRouting=true) and restart Cilium; on Node mgmt-1 of cluster \"mgmt\" kube-proxy in mode ipvs translates \
         packets for Services after the PeerPolicies, so these do not apply to their final destinations: set mode: nftables (or \
         iptables) in kube-proxy's configuration and restart it, then remove the interface kube-ipvs0, which it leaves behind \
         (`ip link delete kube-ipvs0`, or a reboot); on Node mgmt-2 of cluster \"mgmt\" kg runs without wg-agent and accepts \
         all packets from its Peers: run wg-agent there with --mode=policy",
        "x".repeat(101)
    );
    wait_until("the message for all nodes", SOON, async || {
        match env.condition("PolicyEnforced").await {
            Some((state, message)) if state == "False/DatapathBypassed" && message == want => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    env.until_condition("Ready", "True/Meshed", SOON).await;

    for n in [1, 2] {
        let node = format!("tenant-a-{n}");
        env.annotate("tenant-a", &node, names::NODE_AGENT, Some(&agent("")))
            .await;
    }
    env.annotate("mgmt", "mgmt-1", names::NODE_AGENT, Some(&agent("")))
        .await;
    env.until_condition("PolicyEnforced", "False/NoAgent", SOON).await;
    env.annotate("mgmt", "mgmt-2", names::NODE_AGENT, Some(&agent("")))
        .await;
    env.until_condition("PolicyEnforced", "True/Enforced", SOON).await;
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    for reason in ["DatapathBypassed", "NoAgent"] {
        assert!(
            events.lines().any(|line| line.starts_with(reason)),
            "{reason}: {events}"
        );
    }
    versions_that_do_not_match_are_named(&env).await;
}

/// Only an agent whose reports the controller does not understand makes the condition False.
async fn versions_that_do_not_match_are_named(env: &TestEnv) {
    env.until_condition("VersionsCompatible", "True/Compatible", SOON).await;
    let report = async |version: &str| {
        let agent = json!({"version": version, "mode": "full", "mtu": 1420}).to_string();
        env.annotate("tenant-a", "tenant-a-1", names::NODE_AGENT, Some(&agent))
            .await;
    };
    let own = env!("CARGO_PKG_VERSION");
    report("0.0.9").await;
    let message = env
        .until_condition("VersionsCompatible", "False/AgentTooOld", SOON)
        .await;
    let oldest = VERSIONS.agent.oldest;
    assert_eq!(
        message,
        format!(
            "wg-agent on Node tenant-a-1 of cluster \"tenant-a\" has version 0.0.9, and the controller {own} works with {oldest} or \
             newer: apply deploy/agent.yaml of {own} there"
        )
    );
    env.until_condition("Ready", "True/Meshed", SOON).await;
    wait_until("an Event about the agent", SOON, async || {
        let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
        match events.lines().any(|line| line.starts_with("AgentTooOld")) {
            true => Ok(()),
            false => Err(events),
        }
    })
    .await
    .unwrap();
    report("99.0.0").await;
    let message = env.until_condition("VersionsCompatible", "True/AgentNewer", SOON).await;
    assert!(message.contains("Node tenant-a-1"), "{message}");
    report(own).await;
    env.until_condition("VersionsCompatible", "True/Compatible", SOON).await;

    let nodes: Api<Node> = Api::all(env.client("tenant-a").await);
    for (kernel, want) in [
        ("4.19.0-27-amd64", "True/NotTested"),
        ("6.12.117+deb12-amd64", "True/Compatible"),
    ] {
        let status = Patch::Merge(json!({"status": {"nodeInfo": {"kernelVersion": kernel}}}));
        let params = PatchParams::default();
        nodes.patch_status("tenant-a-2", &params, &status).await.unwrap();
        env.until_condition("VersionsCompatible", want, SOON).await;
    }
}

/// The status names the anchor of a network. From then on, no Node can claim a part of this network.
// threat: anchored-range-claimed
#[tokio::test]
async fn anchored_network_survives_restart_and_node_claims() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    for n in [1, 2] {
        env.create_node("tenant-a", 2, n).await;
    }
    let mut mesh = env.mesh();
    let networks = &mut mesh["spec"]["clusters"][1]["allowedNetworks"];
    networks.as_array_mut().unwrap().push(json!("10.97.0.0/16"));
    let mut controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    let anchors_in_status = async || {
        let rows = env.get_mesh().await.unwrap().status.unwrap().clusters;
        serde_json::to_value(&rows[1].anchored).unwrap()
    };
    let anchors_in_peers = async || -> Vec<String> {
        let peers = env.peers("mgmt").await.into_iter();
        let with_network = peers.filter(|(_, peer)| peer.spec.allowed_ips.iter().any(|net| net == "10.97.0.0/16"));
        with_network
            .map(|(name, _)| name.replace("prod--tenant-a--", ""))
            .collect()
    };
    let first = anchors_in_peers().await;
    assert_eq!(first.len(), 1);
    assert_eq!(
        anchors_in_status().await,
        json!([{"network": "10.97.0.0/16", "nodes": first}])
    );

    // A restart changes nothing.
    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    let before = writes::audit(&env);
    let _controller = env.start_controller().await;
    wait_until("the members to be read after the restart", SOON, async || {
        let state = env.page("/debug/state").await;
        let fresh = state.matches("\"observation\": \"Fresh\"").count();
        if fresh == 2 { Ok(()) } else { Err(state) }
    })
    .await
    .unwrap();
    writes::until_passes(&env, 3).await;
    assert_eq!(writes::audit(&env), before);

    // A new Node claims a part of the network while the anchor is deleted. The new Node is skipped, and the other node
    // becomes the anchor.
    env.create_node("tenant-a", 97, 9).await;
    env.annotate(
        "tenant-a",
        "tenant-a-9",
        names::KILO_WIREGUARD_IP,
        Some("100.64.2.9/24"),
    )
    .await;
    env.remove_node("tenant-a", &first[0]).await;
    let other = ["tenant-a-1", "tenant-a-2"].into_iter().find(|name| *name != first[0]);
    let want = json!([{"network": "10.97.0.0/16", "nodes": [other]}]);
    wait_until("the other node to become the anchor", SOON, async || {
        let rows = env.get_mesh().await.unwrap().status.unwrap().clusters;
        let skipped = rows[1].skipped.first();
        let is_skipped = skipped.is_some_and(|skipped| skipped.reason == "NodePodCIDROutOfRange");
        let anchored = anchors_in_status().await;
        if is_skipped && anchored == want {
            Ok(())
        } else {
            Err(format!("{skipped:?}, {anchored}"))
        }
    })
    .await
    .unwrap();
    let rows = env.get_mesh().await.unwrap().status.unwrap().clusters;
    let message = &rows[1].skipped[0].message;
    assert!(
        message.contains("overlaps 10.97.0.0/16") && message.contains("anchoredNetworks"),
        "{message}"
    );
    assert_eq!(anchors_in_peers().await, [other.unwrap()]);

    // `anchoredNetworks` can name a part of a network in which nodes have pod CIDRs.
    mesh["spec"]["clusters"][1]["anchoredNetworks"] = json!(["10.2.200.0/24"]);
    env.apply_mesh(&mesh).await;
    let want = json!([{"network": "10.2.200.0/24", "nodes": [other]}]);
    wait_until(
        "the network that the entry names",
        SOON,
        async || match anchors_in_status().await {
            found if found == want => Ok(()),
            found => Err(found.to_string()),
        },
    )
    .await
    .unwrap();
    let peers = env.peers("mgmt").await;
    let anchor = &peers[&format!("prod--tenant-a--{}", other.unwrap())].spec.allowed_ips;
    assert!(anchor.contains(&"10.2.200.0/24".to_owned()), "{anchor:?}");
    assert_eq!(anchors_in_peers().await, Vec::<String>::new());
}
