//! Tests `clustermeshctl verify`. While nftables rules close the underlay, it finds no violation: only the gateways' granted sockets and
//! the mirrored Service are open. Without these rules and with a revoked grant that is still in force, it reports violations on the
//! underlay and in the tunnel.

use std::{collections::BTreeSet, net::SocketAddr, process::ExitCode, time::Instant};

use serde_json::Value;

use super::{GRANT, SANDBOX, TestEnv};
use crate::setup::{HUB, merged_kubeconfig};

/// The nftables table that simulates NetworkPolicies.
const POLICIES: &str = "inet networkpolicies";

// threat: open-underlay
pub(super) async fn verify_lists_grants_and_reports_other_open_sockets(env: &TestEnv<'_>) {
    let started = Instant::now();
    let kubeconfig = kubeconfig(env);
    close_the_underlay(env).await;
    let report = verify(&kubeconfig, &[]).await;
    println!("verify from all clusters: {:.1} s", started.elapsed().as_secs_f64());
    assert_eq!(report["exitCode"], 0, "{report:#}");
    let granted = env.granted().await;
    let granted_texts: BTreeSet<String> = granted.iter().map(ToString::to_string).collect();
    let mirror = env.sandbox.cluster_ip("default", "hub-web").await.unwrap();
    let expected: BTreeSet<String> = granted_texts.iter().cloned().chain([format!("{mirror}:80")]).collect();
    for kind in ["node", "pod"] {
        assert_eq!(sockets(&report, kind, HUB, "open", "tunnel"), expected, "from a {kind}");
        assert_eq!(sockets(&report, kind, super::MEMBER, "open", "tunnel"), BTreeSet::new());
    }

    explain_names_unreachable_member_and_continues(env, &kubeconfig).await;

    // The controller writes nothing for a paused mesh, so the revoked grant stays open.
    let without_grant = env.product.mesh_with(&[SANDBOX], &[]);
    let paused = without_grant.replacen("spec:\n", "spec:\n  paused: true\n", 1);
    env.hub.apply(&paused).await.unwrap();
    node(env)
        .exec(["nft", "delete", "table", "inet", "networkpolicies"])
        .await
        .unwrap();
    let report = verify(&kubeconfig, &[SANDBOX]).await;
    assert_eq!(report["exitCode"], 1, "{report:#}");
    let api = SocketAddr::new(env.hub.plan().api_address(), 6443).to_string();
    for kind in ["node", "pod"] {
        assert_eq!(
            sockets(&report, kind, HUB, "violations", "tunnel"),
            granted_texts,
            "from a {kind}"
        );
        let on_underlay = sockets(&report, kind, HUB, "violations", "underlay");
        assert!(
            on_underlay.contains(&api),
            "from a {kind}: {api} is not in {on_underlay:?}"
        );
    }

    for cluster in [&env.hub, &env.member, &env.sandbox] {
        let get_leftovers = [
            "get",
            "jobs,pods",
            "-A",
            "-l",
            "app.kubernetes.io/name=clustermesh-verify",
            "-o",
            "name",
        ];
        assert_eq!(
            cluster.kubectl(get_leftovers).await.unwrap().stdout,
            "",
            "verify deletes its Jobs and pods"
        );
    }
    let with_grant = env.product.mesh_with(&[SANDBOX], &[(SANDBOX, GRANT)]);
    let unpaused = with_grant.replacen("spec:\n", "spec:\n  paused: false\n", 1);
    env.product.mesh_up(&unpaused).await.unwrap();
    // The controller did not remove the grant while the mesh was paused, so the sockets are still open.
    for from in env.clients() {
        env.lab.wait_for_open_sockets(&from, &granted).await.unwrap();
    }
    println!("verify twice: {:.1} s", started.elapsed().as_secs_f64());
}

/// Drops new TCP connections from the sandbox's node and pods to other clusters over the underlay, as NetworkPolicies
/// of the surrounding cluster do. It must not drop replies: all API servers of the lab share a network namespace, and connect to
/// kubelets from the address of the hub's API server. That address is in the rule, and the sandbox's kubelet must reply to it.
async fn close_the_underlay(env: &TestEnv<'_>) {
    let mut others = BTreeSet::new();
    for cluster in [&env.hub, &env.member] {
        let sockets = cluster.sockets().await.unwrap();
        others.extend(sockets.keys().map(|socket| socket.ip().to_string()));
    }
    let others: Vec<String> = others.into_iter().collect();
    // At postrouting, because in earlier hooks a DNATed packet still has the interface of its original route.
    let table = format!(
        "table {POLICIES} {{\n chain out {{\n type filter hook postrouting priority 10\n \
         oifname \"eth0\" tcp flags & (syn | ack) == syn ip daddr {{ {} }} drop\n }}\n}}\n",
        others.join(", ")
    );
    node(env).exec_with_stdin(["nft", "-f", "-"], &table).await.unwrap();
}

fn node<'a>(env: &TestEnv<'a>) -> clustermesh_lab::Node<'a> {
    env.lab.node(&env.sandbox_webs[0].node)
}

fn kubeconfig(env: &TestEnv<'_>) -> std::path::PathBuf {
    let clusters = [&env.hub, &env.member, &env.sandbox];
    let file = env.lab.directory().join("operator.kubeconfig");
    std::fs::write(
        &file,
        merged_kubeconfig(clusters, |cluster| cluster.kubeconfig().unwrap()),
    )
    .unwrap();
    file
}

async fn explain_names_unreachable_member_and_continues(env: &TestEnv<'_>, kubeconfig: &std::path::Path) {
    let from = format!("{SANDBOX}/{}", env.sandbox_webs[0].node);
    let mut args = vec!["clustermeshctl".to_owned(), "explain".to_owned(), from];
    args.push(env.granted().await.first().unwrap().to_string());
    args.push(format!("--kubeconfig={}", kubeconfig.display()));
    let flags = [
        "--context=mgmt",
        "--member-context=notebooks=notebooks",
        "--member-context=tenant-a=nowhere",
    ];
    args.extend(flags.map(str::to_owned));
    let (code, out, err) = clustermeshctl(args).await;
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::SUCCESS), "{out}{err}");
    let warning = "warning: cluster \"tenant-a\" (Secret clustermesh/tenant-a-kubeconfig key value) cannot be read: context \"nowhere\"";
    assert!(err.contains(warning), "{err}");
}

/// Runs clustermeshctl. Returns its exit code, standard output and standard error.
async fn clustermeshctl(args: Vec<String>) -> (ExitCode, String, String) {
    let run = move || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = clustermeshctl::run(args, &mut std::io::empty(), &mut out, &mut err);
        (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// Runs verify from these clusters (none = from all), and returns its report.
async fn verify(kubeconfig: &std::path::Path, from: &[&str]) -> Value {
    let mut args = ["clustermeshctl", "verify", "--output=json", "--context=mgmt"]
        .map(str::to_owned)
        .to_vec();
    args.push(format!("--kubeconfig={}", kubeconfig.display()));
    args.extend([SANDBOX, super::MEMBER].map(|name| format!("--member-context={name}={name}")));
    args.extend(from.iter().map(|name| format!("--from={name}")));
    let (code, out, err) = clustermeshctl(args).await;
    println!("{err}");
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    let reported = u8::try_from(report["exitCode"].as_u64().unwrap()).unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(reported)));
    report
}

/// The sockets of cluster `to` in a `list` of the report: those that the sandbox's node or pod (`kind`) reached on `path`.
fn sockets(report: &Value, kind: &str, to: &str, list: &str, path: &str) -> BTreeSet<String> {
    let probes = report["probes"].as_array().unwrap().iter();
    let from =
        |probe: &&Value| probe["from"]["cluster"] == SANDBOX && probe["from"]["kind"] == kind && probe["to"] == to;
    let items = probes.filter(from).flat_map(|probe| probe[list].as_array().unwrap());
    let items = items.filter(|item| item["path"] == path);
    items.map(|item| item["socket"].as_str().unwrap().to_owned()).collect()
}
