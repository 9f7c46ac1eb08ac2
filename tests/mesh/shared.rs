//! Tests a hub with `podNetwork: Shared`, the setting for CNIs whose pod addresses are independent of Node.podCIDRs
//! (kube-ovn, or pools of Calico or Cilium). An exported pod is reached on the node that runs it, every other pod
//! through the anchor. Packets from pods of the hub have their node's WireGuard address as the source.

mod roaming;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use clustermesh_lab::{Lab, Product, Tunnel, wait_until};

use crate::setup::{HUB, MEMBER, PATIENCE, anchors_of, curl, json, pod, two_clusters, url};
use roaming::Roaming;

const SHARED_HUB: &str = "local: true
    podNetwork: Shared
    exports: [{namespace: default, podSelector: {matchLabels: {app: web}}}]
";

#[tokio::test]
async fn exported_pods_use_their_node_and_others_use_anchor() {
    let lab = two_clusters().await;
    let (hub, member) = (lab.cluster(HUB), lab.cluster(MEMBER));
    let product = Product::install(&lab, &[HUB, MEMBER], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let (hub_webs, member_webs) = (hub.run_web().await.unwrap(), member.run_web().await.unwrap());
    let manifest = product.mesh(&[]).replacen("local: true\n", SHARED_HUB, 1);
    product.mesh_up(&manifest).await.unwrap();

    // The Peer of each node has its exported pods as `/32` allowed IPs, and one of the Peers has the whole pod range.
    let exported: BTreeMap<String, BTreeSet<String>> = hub_webs
        .iter()
        .map(|web| (format!("demo--{HUB}--{}", web.node), [format!("{}/32", web.ip)].into()))
        .collect();
    let pods = hub.plan().pod_cidr;
    let inside = |range: &str| {
        range
            .parse::<ipnet::Ipv4Net>()
            .is_ok_and(|net| net != pods && pods.contains(&net))
    };
    wait_until("exported pods in the member's Peers", PATIENCE, async || {
        let peers = json(&member, &["get", "peers"]).await;
        let mut exported_by_peer = BTreeMap::new();
        let mut anchor_count = 0;
        for peer in peers["items"].as_array().unwrap() {
            let ranges = peer["spec"]["allowedIPs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|r| r.as_str().unwrap());
            let (whole, parts): (Vec<&str>, Vec<&str>) = ranges.partition(|range| *range == pods.to_string());
            anchor_count += whole.len();
            let parts: BTreeSet<String> = parts.into_iter().filter(|r| inside(r)).map(str::to_owned).collect();
            exported_by_peer.insert(peer["metadata"]["name"].as_str().unwrap().to_owned(), parts);
        }
        if exported_by_peer == exported && anchor_count == 1 {
            Ok(())
        } else {
            Err(format!("{anchor_count} anchors, {exported_by_peer:?}"))
        }
    })
    .await
    .unwrap();

    for from in &member_webs {
        for to in &hub_webs {
            let answer = lab
                .http_get_until_answered(&pod(from), &url(to.ip, 8080))
                .await
                .unwrap();
            assert_eq!((answer.pod, answer.node), (to.name.clone(), to.node.clone()));
        }
        let other = unexported_pod_ip(&lab).await;
        let answer = curl(&lab, &pod(from), &[&format!("http://{other}:8181/ready")]).await;
        assert_eq!(answer, "OK", "{from:?} -> {other}");
    }
    let wireguard = hub_wireguard_addresses(&lab).await;
    for from in &hub_webs {
        for to in &member_webs {
            let answer = lab
                .http_get_until_answered(&pod(from), &url(to.ip, 8080))
                .await
                .unwrap();
            assert_eq!((answer.pod, answer.client_ip), (to.name.clone(), wireguard[&from.node]));
        }
    }

    let anchors = anchors_of(&pods.to_string(), &member).await;
    let [anchor] = &anchors[..] else {
        panic!("{pods} must have exactly one anchor: {anchors:?}");
    };
    let nodes = hub.nodes();
    let other = nodes.iter().find(|node| node.name() != anchor).unwrap();
    let roaming = Roaming::start(&lab).await;
    roaming
        .address_follows_pod_and_bypasses_anchor(&member_webs[0], anchor, other.name())
        .await;
    roaming.end().await;
}

/// The address of a CoreDNS pod, which no export selects. If no pod has CoreDNS's usual label, takes the first pod in kube-system.
async fn unexported_pod_ip(lab: &Lab) -> IpAddr {
    let pods = json(
        &lab.cluster(HUB),
        &["get", "pods", "-n", "kube-system", "-l", "k8s-app=kube-dns"],
    )
    .await;
    let pods = match pods["items"].as_array().unwrap().as_slice() {
        [] => json(&lab.cluster(HUB), &["get", "pods", "-n", "kube-system"]).await,
        _ => pods,
    };
    pods["items"][0]["status"]["podIP"].as_str().unwrap().parse().unwrap()
}

async fn hub_wireguard_addresses(lab: &Lab) -> BTreeMap<String, IpAddr> {
    let nodes = json(&lab.cluster(HUB), &["get", "nodes"]).await;
    let address = |node: &serde_json::Value| {
        let annotation = node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"]
            .as_str()
            .unwrap();
        let address = annotation.split_once('/').unwrap().0.parse().unwrap();
        (node["metadata"]["name"].as_str().unwrap().to_owned(), address)
    };
    nodes["items"].as_array().unwrap().iter().map(address).collect()
}
