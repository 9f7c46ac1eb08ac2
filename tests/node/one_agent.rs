//! Tests one real agent against its cluster's API server: its annotations, the states in which it waits, and its
//! reports.

use clustermesh_api::names::{
    KILO_CLUSTERMESH_ENDPOINT, KILO_ENDPOINT, KILO_FORCE_ENDPOINT, KILO_KEY, KILO_LAST_SEEN, KILO_WIREGUARD_IP,
    NODE_AGENT,
};
use clustermesh_lab::wait_until;
use clustermesh_tests::agent::agent_program;
use futures::{StreamExt, stream};
use k8s_openapi::api::{core::v1::Node, storage::v1::CSINode};
use kube::{Api, api::PostParams};

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters};

async fn wait_for_annotation(clusters: &TwoClusters, site: &Site, key: &str, want: &str) {
    wait_until(format!("{key} = {want}"), TIMEOUT, async || {
        let all = clusters.annotations(site).await;
        if all.get(key).is_some_and(|value| value == want) {
            Ok(())
        } else {
            Err(format!("{:?}", all.get(key)))
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

#[tokio::test]
async fn agent_publishes_its_identity_and_restores_it() {
    let clusters = TwoClusters::start().await;
    let site = clusters.site(MGMT);
    create_nodes(&clusters, site).await;
    let mut agent = clusters.agent(site, "agent");
    let first = clusters.wait_for_published(site).await;
    clusters.wait_until_ready(site).await;
    assert_eq!(first[KILO_ENDPOINT], "172.30.1.11:51820");
    let status: serde_json::Value = serde_json::from_str(&first[NODE_AGENT]).expect("JSON");
    assert_eq!(
        [&status["backend"], &status["mode"], &status["mtu"]],
        [
            &serde_json::json!("userspace"),
            &serde_json::json!("full"),
            &serde_json::json!(1420)
        ]
    );

    // The agent reverts foreign changes of its own annotations. It follows an administrator's annotations and never
    // writes them.
    clusters.annotate(site, KILO_KEY, "nonsense").await;
    wait_for_annotation(&clusters, site, KILO_KEY, &first[KILO_KEY]).await;
    clusters.annotate(site, KILO_CLUSTERMESH_ENDPOINT, "192.0.2.1:1").await;
    clusters
        .annotate(site, KILO_FORCE_ENDPOINT, "node.example.org:4711")
        .await;
    wait_for_annotation(&clusters, site, KILO_ENDPOINT, "node.example.org:4711").await;
    let all = clusters.annotations(site).await;
    assert_eq!(
        (
            all[KILO_CLUSTERMESH_ENDPOINT].as_str(),
            all[KILO_FORCE_ENDPOINT].as_str()
        ),
        ("192.0.2.1:1", "node.example.org:4711")
    );

    // The node keeps its WireGuard address after a restart of the agent, and when a younger Node claims the same address.
    assert!(
        agent.terminate(TIMEOUT).await.expect("it ends").success(),
        "{}",
        agent.log()
    );
    let again = clusters.agent(site, "agent-2");
    clusters.wait_until_ready(site).await;
    assert_eq!(
        clusters.annotations(site).await[KILO_WIREGUARD_IP],
        first[KILO_WIREGUARD_IP]
    );
    let rival: Node = serde_json::from_value(serde_json::json!({
        // For Nodes that were created in the same second, the name decides, and this Node loses.
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "zz-late", "annotations": {KILO_WIREGUARD_IP: first[KILO_WIREGUARD_IP]}},
        "status": {"addresses": [{"type": "InternalIP", "address": RIVAL}]},
    }))
    .expect("a Node");
    let nodes = clusters.nodes(site).await;
    nodes
        .create(&PostParams::default(), &rival)
        .await
        .expect("create a Node");
    // The kubelet of a new Node creates its CSINode. The agent watches CSINodes, and reads a Node when its CSINode appears.
    let csi_nodes: Api<CSINode> = Api::all(clusters.client(site).await);
    let csi_node = serde_json::json!({"metadata": {"name": "zz-late"}, "spec": {"drivers": []}});
    let csi_node = serde_json::from_value(csi_node).expect("a CSINode");
    csi_nodes
        .create(&PostParams::default(), &csi_node)
        .await
        .expect("create a CSINode");
    wait_until_rival_is_known(&clusters, site, true).await;
    // The agent would write a changed WireGuard address in the same request as the restored key.
    clusters.annotate(site, KILO_KEY, "nonsense").await;
    wait_for_annotation(&clusters, site, KILO_KEY, &first[KILO_KEY]).await;
    assert_eq!(
        clusters.annotations(site).await[KILO_WIREGUARD_IP],
        first[KILO_WIREGUARD_IP],
        "{}",
        again.log()
    );
    nodes
        .delete("zz-late", &Default::default())
        .await
        .expect("delete the Node");
    csi_nodes
        .delete("zz-late", &Default::default())
        .await
        .expect("delete the CSINode");
    wait_until_rival_is_known(&clusters, site, false).await;
}

/// The InternalIP of a Node that is created while an agent runs.
const RIVAL: &str = "192.0.2.77";

/// Creates so many Nodes that an agent requests the table of all Nodes (as `kubectl get nodes` does) only every 50 to 100 s.
async fn create_nodes(clusters: &TwoClusters, site: &Site) {
    let nodes = clusters.nodes(site).await;
    let create = |n: u8| {
        let node = serde_json::json!({"metadata": {"name": format!("other-{n}")}});
        let (node, nodes) = (serde_json::from_value(node).expect("a Node"), nodes.clone());
        async move {
            nodes
                .create(&PostParams::default(), &node)
                .await
                .expect("create a Node")
        }
    };
    stream::iter(1..=200)
        .map(create)
        .buffer_unordered(8)
        .for_each(|_| async {})
        .await;
}

/// Waits until the agent knows the Node with the address [`RIVAL`], or has forgotten it. The timeout is shorter than the time
/// until the agent requests the table of Nodes again.
async fn wait_until_rival_is_known(clusters: &TwoClusters, site: &Site, is_known: bool) {
    let timeout = std::time::Duration::from_secs(40);
    wait_until(format!("{RIVAL} to be known: {is_known}"), timeout, async || {
        let (_, state) = clusters.page(site, "/debug/state").await;
        (state.contains(RIVAL) == is_known).then_some(()).ok_or(state)
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

#[tokio::test]
async fn younger_node_with_a_duplicate_address_takes_another() {
    let clusters = TwoClusters::start().await;
    let site = clusters.site(MGMT);
    let _agent = clusters.agent(site, "agent");
    let first = clusters.wait_for_published(site).await;
    // The other Node must be older, so our Node is deleted and created again with its annotations.
    let rival: Node = serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "aa", "annotations": {KILO_WIREGUARD_IP: first[KILO_WIREGUARD_IP]}},
    }))
    .expect("a Node");
    let nodes = clusters.nodes(site).await;
    nodes
        .create(&PostParams::default(), &rival)
        .await
        .expect("create a Node");
    let mut own = nodes.get(site.node).await.expect("our Node");
    own.metadata.resource_version = None;
    own.metadata.uid = None;
    nodes
        .delete(site.node, &Default::default())
        .await
        .expect("delete our Node");
    nodes
        .create(&PostParams::default(), &own)
        .await
        .expect("create our Node anew");
    wait_until("another address", TIMEOUT, async || {
        let now = clusters
            .annotations(site)
            .await
            .get(KILO_WIREGUARD_IP)
            .cloned()
            .unwrap_or_default();
        if !now.is_empty() && now != first[KILO_WIREGUARD_IP] {
            Ok(())
        } else {
            Err(now)
        }
    })
    .await
    .expect("the agent takes another address");
    let now = clusters.annotations(site).await[KILO_WIREGUARD_IP].clone();
    let host = now.split('/').next().expect("a host").to_owned();
    let shown = clusters
        .host(site)
        .exec(["ip", "-br", "addr", "show", "dev", &site.interface])
        .await
        .expect("ip")
        .stdout;
    assert!(shown.contains(&format!("{host}/32")), "{now}: {shown}");
}

#[tokio::test]
async fn agent_waits_if_kg_was_seen_and_withdraws_when_kg_returns() {
    let clusters = TwoClusters::start().await;
    let site = clusters.site(TENANT);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a clock")
        .as_secs();
    clusters.annotate(site, KILO_LAST_SEEN, &now.to_string()).await;
    let wait_for_reason = async |why: &str| {
        wait_until(
            format!("the agent to report why it waits: {why}"),
            TIMEOUT,
            async || match clusters.page(site, "/readyz").await {
                (503, text) if text.contains(why) => Ok(()),
                (code, text) => Err(format!("{code}: {text}")),
            },
        )
        .await
        .expect("readyz");
    };
    let our_state = async || {
        let commands = "ip -br link; ip rule show; ip route show table all; nft list tables";
        let output = clusters
            .host(site)
            .exec(["sh", "-ec", commands])
            .await
            .expect("read the node's state")
            .stdout;
        // 5182 and 5183 are the agent's routing tables.
        let is_ours = |line: &&str| {
            [site.interface.as_str(), "5182", "5183", "clustermesh"]
                .iter()
                .any(|part| line.contains(part))
        };
        output.lines().filter(is_ours).map(str::to_owned).collect::<Vec<_>>()
    };
    let nothing = Vec::<String>::new();
    let mut agent = clusters.agent(site, "agent");
    wait_for_reason("take kg off it").await;
    assert_eq!(our_state().await, nothing);
    // kg removes its annotation when it ends.
    let patch = serde_json::json!({"metadata": {"annotations": {KILO_LAST_SEEN: null}}});
    let nodes = clusters.nodes(site).await;
    nodes
        .patch(site.node, &Default::default(), &kube::api::Patch::Merge(&patch))
        .await
        .expect("patch");
    wait_for_reason("may be back in a moment").await;
    assert_eq!(our_state().await, nothing);

    // An agent that starts without kg's annotations takes over the node, until kg is back and writes its own
    // annotations.
    agent.terminate(TIMEOUT).await.expect("it ends");
    agent = clusters.agent(site, "agent-alone");
    clusters.wait_until_ready(site).await;
    clusters.wait_for_published(site).await;
    assert_ne!(our_state().await, nothing);
    let kg_key = "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=";
    clusters.annotate(site, KILO_KEY, kg_key).await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.expect("a clock").as_secs().to_string();
    clusters.annotate(site, KILO_LAST_SEEN, &now).await;
    wait_for_reason("take kg off it").await;
    assert_eq!(our_state().await, nothing);
    wait_until("the agent's annotation to be removed", TIMEOUT, async || {
        let all = clusters.annotations(site).await;
        if all.contains_key(NODE_AGENT) {
            Err(format!("{all:?}"))
        } else {
            Ok(())
        }
    })
    .await
    .expect("removed");

    // `cleanup` removes no annotation of kg. The agent may have overwritten kg's key before it withdrew.
    clusters.annotate(site, KILO_KEY, kg_key).await;
    let before = clusters.annotations(site).await;
    agent.terminate(TIMEOUT).await.expect("it ends");
    let cleanup = clusters.command(site, &["cleanup"]);
    clusters.host(site).exec(cleanup).await.expect("cleanup");
    assert_eq!(clusters.annotations(site).await, before);
}

#[tokio::test]
async fn foreign_interface_with_device_name_stops_kernel_writes() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let host = clusters.host(tenant);
    let _first = clusters.agent(mgmt, "agent-mgmt");
    host.exec(["ip", "link", "add", &tenant.interface, "type", "bridge"])
        .await
        .expect("make a bridge");
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.write_peer_and_policy(tenant, mgmt).await;
    wait_until(
        "the agent to report the foreign interface",
        TIMEOUT,
        async || match clusters.page(tenant, "/readyz").await {
            (503, text) if text.contains("exists already") => Ok(()),
            (code, text) => Err(format!("{code}: {text}")),
        },
    )
    .await
    .expect("readyz");
    // The interface may be another program's tunnel, which our rules and routes would cut off.
    let commands = "ip rule show; ip route show table all; nft list tables";
    let written = host
        .exec(["sh", "-ec", commands])
        .await
        .expect("read the node's state")
        .stdout;
    assert!(
        !written.contains("5182") && !written.contains("5183") && !written.contains("clustermesh"),
        "{written}"
    );
    host.exec(["ip", "link", "del", &tenant.interface])
        .await
        .expect("delete the bridge");
    clusters.wait_until_ready(tenant).await;
    clusters.write_peer_and_policy(mgmt, tenant).await;
    clusters.wait_until_reaches(mgmt, tenant).await;
}

#[tokio::test]
async fn crds_installed_later_are_noticed() {
    let clusters = TwoClusters::start_without_crds().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let first = clusters.agent(mgmt, "agent-mgmt");
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.wait_until_ready(mgmt).await;
    assert!(
        first.log().contains("the CRD of Peer is not installed"),
        "{}",
        first.log()
    );
    clusters.install_crds(mgmt).await;
    clusters.install_crds(tenant).await;
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    clusters.wait_until_reaches(tenant, mgmt).await;
    assert!(first.log().contains("resolved"), "{}", first.log());
}

/// Waits until the agent's annotation gives `why` as the reason of the bypassed datapath.
async fn wait_for_bypass(clusters: &TwoClusters, site: &Site, why: &str) {
    let nodes: Api<Node> = Api::all(clusters.client(site).await);
    wait_until("the annotation of the bypassed datapath", TIMEOUT, async || {
        let list = nodes
            .list(&Default::default())
            .await
            .map_err(|error| error.to_string())?;
        let published = list.items.iter().find_map(|node| {
            let text = node.metadata.annotations.as_ref()?.get("kilo-clustermesh.io/agent")?;
            serde_json::from_str::<serde_json::Value>(text).ok()
        });
        let reason = published.as_ref().and_then(|agent| agent["datapathBypassed"].as_str());
        if reason == Some(why) {
            Ok(())
        } else {
            Err(format!("{published:?}"))
        }
    })
    .await
    .expect("it is published");
}

// threat: datapath-bypassed
#[tokio::test]
async fn bypassed_datapath_is_reported_with_its_remedy() {
    let clusters = TwoClusters::start().await;
    let site = clusters.site(TENANT);
    let host = clusters.host(site);
    // What Cilium creates: its interface on the node, and its ConfigMap in the cluster.
    let link = [
        "ip",
        "link",
        "add",
        "cilium_host",
        "type",
        "veth",
        "peer",
        "name",
        "cilium_net",
    ];
    host.exec(link).await.expect("add the interface");
    let config: k8s_openapi::api::core::v1::ConfigMap = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "cilium-config"},
        "data": {"kube-proxy-replacement": "true", "enable-bpf-masquerade": "true"},
    }))
    .expect("a ConfigMap");
    let maps = Api::namespaced(clusters.client(site).await, "kube-system");
    maps.create(&Default::default(), &config).await.expect("create it");
    let agent = clusters.agent(site, "agent");
    clusters.wait_until_ready(site).await;
    wait_until("the metric and the log", TIMEOUT, async || {
        let (_, metrics) = clusters.page(site, "/metrics").await;
        let log = agent.log();
        if metrics.contains("wg_agent_datapath_bypassed 1") && log.contains("DatapathBypassed: Cilium forwards packets")
        {
            Ok(())
        } else {
            Err(log)
        }
    })
    .await
    .expect("it is reported");
    assert_eq!(clusters.page(site, "/readyz").await.0, 200);
    let why = "kube-proxy-replacement and masquerading in BPF imply host routing in BPF";
    wait_for_bypass(&clusters, site, why).await;
    let program = agent_program();
    let kubeconfig = clusters.kubeconfig(site).display().to_string();
    let preflight = [program, "preflight", "--kubeconfig", &kubeconfig];
    let assert_reported = async |why: &str, remedy: &str| {
        let status = host.try_exec([program, "status"]).await.expect("run it");
        assert_eq!(status.status.code(), Some(1), "{status:?}");
        assert!(
            status.stdout.contains(&format!("Datapath   bypassed ({why})")) && status.stdout.contains(remedy),
            "{status:?}"
        );
        let preflight = host.try_exec(preflight).await.expect("run it");
        assert!(preflight.stderr.contains(remedy), "{preflight:?}");
    };
    assert_reported(why, "bpf.hostLegacyRouting=true").await;

    // While the agent runs, Cilium is removed and kube-proxy changes to mode ipvs, and later to another mode.
    let link = [
        "ip",
        "link",
        "add",
        "kube-ipvs0",
        "type",
        "veth",
        "peer",
        "name",
        "ipvs-peer",
    ];
    host.exec(link).await.expect("add the interface");
    let delete_link = async |link: &str| {
        host.exec(["ip", "link", "delete", link])
            .await
            .expect("remove the interface");
    };
    delete_link("cilium_host").await;
    // The fixed text of `annotations::IPVS`: IPVS changes a packet's destination after the PeerPolicies have checked the packet.
    let why = "kube-proxy in mode ipvs translates after the policies looked";
    wait_for_bypass(&clusters, site, why).await;
    assert_reported(why, "`ip link delete kube-ipvs0`").await;
    assert_eq!(clusters.page(site, "/readyz").await.0, 200);
    delete_link("kube-ipvs0").await;
    wait_until("the metric to be 0", TIMEOUT, async || {
        let (_, metrics) = clusters.page(site, "/metrics").await;
        let is_zero = metrics.contains("wg_agent_datapath_bypassed 0");
        is_zero.then_some(()).ok_or(metrics)
    })
    .await
    .expect("the datapath is no longer bypassed");
}
