//! Tests a member whose API server refuses the old token, or is frozen.

use super::{
    policy_enforcement::{stop_agent_and_add_policy, stopped_agent_is_named_until_it_continues},
    *,
};

pub(super) async fn new_token_is_used_without_restart_or_rewrite(mesh: &mut Mesh<'_>) {
    let written = written_versions(mesh).await;
    let pods_before = controller_pods(&mesh.hub).await;
    // To save time, the test of a stopped agent runs at the same time: while that test waits for a report, this one waits until
    // the old token is refused.
    let stopped_node = stop_agent_and_add_policy(mesh).await;
    let secret = json(
        &mesh.member,
        &["-n", NAMESPACE, "get", "secret", "clustermesh-controller"],
    )
    .await;
    let old = decode_base64(&mesh.member, secret["data"]["token"].as_str().unwrap()).await;
    let create = [
        "-n",
        NAMESPACE,
        "create",
        "token",
        "clustermesh-controller",
        "--duration=1h",
    ];
    let new = mesh.member.kubectl(create).await.unwrap().stdout.trim().to_owned();
    let file = mesh.lab.directory().join("tenant-a.member.kubeconfig");
    let kubeconfig = std::fs::read_to_string(&file).unwrap();
    assert!(kubeconfig.contains(&old), "the kubeconfig lacks the old token");
    std::fs::write(&file, kubeconfig.replace(&old, &new)).unwrap();
    let from = format!("--from-file=value={}", file.display());
    let create_secret = [
        "create",
        "secret",
        "generic",
        "tenant-a-kubeconfig",
        &from,
        "--dry-run=client",
        "-o",
        "yaml",
    ];
    let new_secret = mesh
        .hub
        .kubectl([&["-n", NAMESPACE][..], &create_secret].concat())
        .await
        .unwrap()
        .stdout;
    mesh.hub.apply(&new_secret).await.unwrap();
    // Revoke the old token, so that only the new one works.
    mesh.member
        .kubectl(["-n", NAMESPACE, "delete", "secret", "clustermesh-controller"])
        .await
        .unwrap();
    let server = format!("https://{}:6443/api/v1/nodes", mesh.member.plan().api_address());
    let bearer = format!("Authorization: Bearer {old}");
    wait_until("the old token to be refused", PATIENCE, async || {
        let args = [
            "curl",
            "-sk",
            "-m",
            "5",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "-H",
            &bearer,
            &server,
        ];
        let output = mesh
            .lab
            .run_at(&host("tenant-a-1"), &args)
            .await
            .map_err(|error| error.to_string())?;
        if output.stdout == "401" {
            Ok(())
        } else {
            Err(output.stdout)
        }
    })
    .await
    .unwrap();
    stopped_agent_is_named_until_it_continues(mesh, &stopped_node).await;
    // With the new token, the controller can write into the member: the EndpointSlices follow the hub's pods. It has not
    // written Peers or PeerPolicies again.
    scale_backends_and_wait(mesh, 1).await;
    scale_backends_and_wait(mesh, 2).await;
    mesh.product.wait_until_ready().await.unwrap();
    assert_eq!(written_versions(mesh).await, written);
    assert_eq!(controller_pods(&mesh.hub).await, pods_before);
}

async fn decode_base64(cluster: &Cluster<'_>, text: &str) -> String {
    let node = &cluster.nodes()[0];
    node.exec_with_stdin(["base64", "-d"], text).await.unwrap().stdout
}

pub(super) async fn frozen_member_api_server_changes_only_a_condition(mesh: &Mesh<'_>) {
    let written = written_versions(mesh).await;
    mesh.member.freeze_api().unwrap();
    let frozen = Instant::now();
    let reason = wait_until(
        "Ready to report that the member does not answer",
        PATIENCE,
        async || {
            let (status, reason, message) = condition(&mesh.hub, "Ready").await;
            match (status.as_str(), reason.as_str()) {
                ("False", "MemberStale" | "MemberUnreachable") => Ok((reason, message)),
                _ => Err(format!("{status} {reason}: {message}")),
            }
        },
    )
    .await
    .unwrap();
    println!("{:.1} s after the freeze: {reason:?}", frozen.elapsed().as_secs_f64());
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for from in clients {
            for to in servers {
                let answer = mesh.wait_for_answer(&pod(from), &url(to.ip, 8080)).await;
                assert_eq!(
                    answer,
                    mesh.expected_answer(to, from.ip),
                    "{from:?} while the API server is frozen"
                );
            }
        }
    }
    mesh.member.thaw_api().unwrap();
    let thawed = Instant::now();
    mesh.product.wait_until_ready().await.unwrap();
    println!("Ready {:.1} s after the thaw", thawed.elapsed().as_secs_f64());
    assert_eq!(written_versions(mesh).await, written);
}
