//! Tests that pods and nodes of whole clusters reach pods and Services of each other with kube-proxy in iptables mode. Then
//! another program flushes a node's nftables ruleset: the test checks that the agent restores its table and that pods still reach
//! each other. The test in `flows` uses kube-proxy in nftables mode.

use std::time::Instant;

use clustermesh_lab::{Answer, Lab, LabPlan, Node, ProxyMode, wait_until};

use crate::setup::{HUB, MEMBER, Mesh, PATIENCE, host, pod, url};

#[tokio::test]
async fn flows_work_with_kube_proxy_in_iptables_mode() {
    let plan = LabPlan::clusters(&[(HUB, 2), (MEMBER, 1)]).with_proxy(ProxyMode::Iptables);
    let lab = Lab::start(plan).await.unwrap();
    for cluster in [HUB, MEMBER] {
        for node in lab.cluster(cluster).nodes() {
            wait_until(format!("kube-proxy's rules on {}", node.name()), PATIENCE, async || {
                let rules = node.exec(["iptables-save", "-t", "nat"]).await;
                let rules = rules.map_err(|error| error.to_string())?.stdout;
                rules.contains(":KUBE-POSTROUTING").then_some(()).ok_or(rules)
            })
            .await
            .unwrap();
            let tables = node.exec(["nft", "list", "tables"]).await.unwrap().stdout;
            assert!(!tables.contains("kube-proxy"), "{}: {tables}", node.name());
        }
    }
    let mesh = Mesh::up(&lab, &[]).await;
    let capture = lab.capture("iptables", "ip").await.unwrap();
    flows_reach_pods_and_services(&mesh).await;
    let captured = capture.stop().await.unwrap();
    assert_eq!(mesh.unencrypted(&captured).await, Vec::<String>::new());

    agents_table_is_restored_after_flush(&mesh).await;
}

async fn flows_reach_pods_and_services(mesh: &Mesh<'_>) {
    let from = &mesh.member_webs[0];
    for to in &mesh.hub_webs {
        assert_eq!(
            mesh.wait_for_answer(&pod(from), &url(to.ip, 8080)).await,
            mesh.expected_answer(to, from.ip)
        );
        assert_eq!(
            mesh.wait_for_answer(&pod(to), &url(from.ip, 8080)).await,
            mesh.expected_answer(from, to.ip)
        );
        let wireguard = &mesh.wireguard[&from.node];
        assert_eq!(
            mesh.wait_for_answer(&host(&from.node), &url(to.ip, 8080)).await,
            mesh.expected_answer(to, *wireguard)
        );
    }
    // A mirrored Service: the member's kube-proxy chooses among the hub's pods, and masquerades requests of the node
    // itself.
    let service = mesh.member.cluster_ip("default", "hub-web").await.unwrap();
    let expected_answers = |source| {
        mesh.hub_webs
            .iter()
            .map(|to| mesh.expected_answer(to, source))
            .collect::<Vec<Answer>>()
    };
    mesh.assert_answers(&pod(from), &url(service, 80), &expected_answers(from.ip))
        .await;
    let answers = expected_answers(mesh.wireguard[&from.node]);
    mesh.assert_answers(&host(&from.node), &url(service, 80), &answers)
        .await;
    // A ClusterIP of the hub is reached through the anchor. The hub's kube-proxy chooses the pod.
    let service = mesh.hub.cluster_ip("default", "web").await.unwrap();
    let answer = mesh.wait_for_answer(&pod(from), &url(service, 80)).await;
    assert!(mesh.hub_webs.iter().any(|web| web.name == answer.pod), "{answer:?}");
}

async fn agents_table_is_restored_after_flush(mesh: &Mesh<'_>) {
    let (from, to) = (&mesh.member_webs[0], &mesh.hub_webs[0]);
    let node: Node<'_> = mesh.lab.node(&from.node);
    node.exec(["nft", "flush", "ruleset"]).await.unwrap();
    let start = Instant::now();
    wait_until("the agent's table", PATIENCE, async || {
        let args = ["nft", "list", "table", "inet", "clustermesh"];
        match node.try_exec(args).await.map_err(|error| error.to_string())? {
            output if output.status.success() => Ok(()),
            output => Err(output.stderr),
        }
    })
    .await
    .unwrap();
    println!(
        "the agent's table is restored {:.2} s after the flush",
        start.elapsed().as_secs_f64()
    );
    assert_eq!(
        mesh.wait_for_answer(&pod(from), &url(to.ip, 8080)).await,
        mesh.expected_answer(to, from.ip)
    );
    assert_eq!(
        mesh.wait_for_answer(&pod(to), &url(from.ip, 8080)).await,
        mesh.expected_answer(from, to.ip)
    );
}
