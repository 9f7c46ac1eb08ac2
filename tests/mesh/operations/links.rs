//! Tests what nodes report about their tunnels: `wg-agent status` on a healthy node, and the mesh's status when a link
//! is down.

use super::*;

/// Runs `wg-agent status` in an agent's pod with these arguments. Returns exit code and output.
async fn status(mesh: &Mesh<'_>, cluster: &Cluster<'_>, node: &str, args: &[&str]) -> (Option<i32>, String) {
    let agent = mesh.product.agent_pod(&cluster.plan().name, node).await.unwrap();
    let exec = ["-n", AGENT_NAMESPACE, "exec", &agent, "--", "/wg-agent", "status"];
    let output = cluster.try_kubectl([&exec[..], args].concat()).await.unwrap();
    (output.status.code(), output.stdout)
}

pub(super) async fn status_of_healthy_node_matches_wg_show(mesh: &Mesh<'_>) {
    for (cluster, webs) in [(&mesh.hub, &mesh.hub_webs), (&mesh.member, &mesh.member_webs)] {
        let name = &webs[0].node;
        let node = mesh.lab.node(name);
        let show = async |what: &str| node.exec(["wg", "show", "kilo0", what]).await.unwrap().stdout;
        // Peers have no namespace, so `versions` returns `/NAME`.
        let peers: Vec<String> = versions(cluster, "peers").await.into_keys().collect();
        let peers: Vec<&str> = peers.iter().map(|peer| peer.trim_start_matches('/')).collect();
        let page = wait_until("every peer to be up", PATIENCE, async || {
            match status(mesh, cluster, name, &[]).await {
                (Some(0), page) if page.contains("Peers     2 up, 0 down, 0 unknown") => Ok(page),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap();
        let address = mesh.wireguard[name];
        for line in [
            format!("Node      {name}, WireGuard address {address}\n"),
            format!("Key       {}\n", published_key(cluster, name).await),
            "Device    kilo0, userspace (set by --backend=userspace), MTU 1440, UDP port 51820\n".to_owned(),
        ] {
            assert!(page.contains(&line), "{line}{page}");
        }
        assert!(!page.contains("Troubles") && !page.contains("Left out"), "{page}");
        for peer in &peers {
            assert!(page.contains(peer), "{peer}: {page}");
        }
        let (code, state) = status(mesh, cluster, name, &["-o", "json"]).await;
        let state: serde_json::Value = serde_json::from_str(&state).unwrap();
        let reported: BTreeMap<String, (String, String)> = (state["peers"].as_object().unwrap().iter())
            .map(|(name, peer)| {
                let text = |key: &str| peer[key].as_str().unwrap_or_default().to_owned();
                (name.clone(), (text("key"), text("liveEndpoint")))
            })
            .collect();
        assert_eq!(
            (code, reported.keys().map(String::as_str).collect::<Vec<_>>()),
            (Some(0), peers)
        );
        let mut reported: Vec<String> = reported
            .into_values()
            .map(|(key, endpoint)| format!("{key}\t{endpoint}"))
            .collect();
        reported.sort();
        let shown = show("endpoints").await;
        let mut shown: Vec<&str> = shown.lines().collect();
        shown.sort_unstable();
        assert_eq!(reported, shown, "wg-agent status and wg show");
    }
}

/// `status.brokenLinks` as `from->to of total`. `total` counts all tunnels to the member `to`, but only on nodes of the member
/// `from` that report a broken tunnel.
pub(super) async fn broken_links(mesh: &Mesh<'_>) -> Vec<String> {
    let object = json(&mesh.hub, &["-n", NAMESPACE, "get", "clustermesh", MESH]).await;
    let links = object["status"]["brokenLinks"].as_array().cloned().unwrap_or_default();
    let text = |link: &serde_json::Value| {
        let word = |key: &str| link[key].as_str().unwrap_or_default().to_owned();
        format!("{}->{} of {}", word("from"), word("to"), link["total"])
    };
    links.iter().map(text).collect()
}

/// `sender` sends to the node `dead`, which lost its power at `since`. Checks that the mesh's status reports the broken link,
/// and that the agent on `sender` reports the peer as down.
pub(super) async fn link_down_is_reported(mesh: &Mesh<'_>, sender: &str, dead: &str, since: Instant) {
    // Only `sender` sends to `dead`, so only `sender` notices that a tunnel is down. The member now has three nodes, `dead` among them,
    // and `sender` has a tunnel to each.
    let link = format!("{}->{} of 3", crate::setup::HUB, crate::setup::MEMBER);
    wait_until("the broken link in the status", PATIENCE, async || {
        let links = broken_links(mesh).await;
        match condition(&mesh.hub, "Degraded").await {
            (status, reason, message)
                if links == [link.clone()]
                    && status == "True"
                    && reason == "TunnelsDown"
                    && message.contains("1 of 3 tunnels") =>
            {
                Ok(())
            }
            other => Err(format!("{links:?} {other:?}")),
        }
    })
    .await
    .unwrap();
    println!(
        "a dead node is reported {:.0} s after its power cut",
        since.elapsed().as_secs_f64()
    );
    let described = mesh
        .hub
        .kubectl(["-n", NAMESPACE, "describe", "clustermesh", MESH])
        .await;
    let described = described.unwrap().stdout;
    let (_, events) = described.split_once("Events:").expect("Events");
    assert!(
        events
            .lines()
            .any(|line| line.contains("Warning") && line.contains("TunnelsDown")),
        "{described}"
    );
    let (code, page) = status(mesh, &mesh.hub, sender, &[]).await;
    let peer = format!("{MESH}--{}--{dead}", crate::setup::MEMBER);
    let row = page.lines().find(|line| line.contains(&peer)).unwrap_or_default();
    assert!(code == Some(1) && row.contains(" down "), "{code:?}: {page}");
    assert_eq!(condition(&mesh.hub, "Ready").await.1, "Meshed");
}
