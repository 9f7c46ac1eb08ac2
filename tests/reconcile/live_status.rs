//! Tests `clustermeshctl status --live` with the kubeconfigs in the mesh's Secrets: what it shows while no controller runs.

use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::{
    program,
    test_env::{LATER, TestEnv},
};
use kube::{Api, api::DeleteParams};
use serde_json::{Value, json};

/// `clustermeshctl` on the controller's host, which reaches the API servers at the addresses in the Secrets.
struct Command<'e> {
    env: &'e TestEnv,
    kubeconfig: String,
}

impl<'e> Command<'e> {
    fn new(env: &'e TestEnv) -> Self {
        let kubeconfig = env.lab.directory().join("live.kubeconfig");
        std::fs::write(&kubeconfig, env.hub().inside_kubeconfig().unwrap()).unwrap();
        Self {
            env,
            kubeconfig: kubeconfig.display().to_string(),
        }
    }

    /// Returns the exit code and standard output.
    async fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        let program = program("clustermeshctl");
        let words = [&[&*program, "status", "--kubeconfig", &self.kubeconfig], words].concat();
        let output = self.env.controller_host().try_exec(words).await.unwrap();
        assert_eq!(output.stderr, "");
        (output.status.code(), output.stdout)
    }

    /// Returns the exit code and the text without line breaks.
    async fn text(&self, words: &[&str]) -> (Option<i32>, String) {
        let (code, out) = self.run(words).await;
        assert!(out.lines().count() <= 10, "{out}");
        (code, out.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    async fn until_healthy(&self) -> String {
        wait_until("the members to be healthy", LATER, async || {
            match self.text(&["--live"]).await {
                (Some(0), text) => Ok(text),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap()
    }
}

#[tokio::test]
async fn live_status_shows_members_while_no_controller_runs() {
    let (env, mut controller) = TestEnv::start_meshed(&["mgmt", "tenant-a", "tenant-b"]).await;
    let status = Command::new(&env);
    let healthy = "read now: 3/3 members answer, 3/3 Nodes registered, 6/6 Peers as planned";
    let text = status.until_healthy().await;
    assert!(text.contains(healthy), "{text}");

    assert!(controller.terminate(LATER).await.unwrap().success());
    let peers: Api<Peer> = Api::all(env.client("mgmt").await);
    let deleted = "prod--tenant-a--tenant-a-1";
    peers.delete(deleted, &DeleteParams::default()).await.unwrap();
    let agent = json!({
        "version": env!("CARGO_PKG_VERSION"), "mode": "full", "mtu": 1420,
        "links": {format!("{NAMESPACE}/prod/mgmt"): {"up": 0, "down": 1, "total": 1}},
    });
    env.annotate("tenant-a", "tenant-a-1", names::NODE_AGENT, Some(&agent.to_string()))
        .await;
    let good = env.kubeconfig("tenant-b").await;
    env.write_secret("tenant-b", &good.replace("token: ", "token: x")).await;

    // The status in the hub is still that of the controller.
    let (code, text) = status.text(&[]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("3/3 members reachable, 3/3 nodes meshed DOWN"), "{text}");
    assert!(
        text.contains("NoController: no replica holds the controller's Lease."),
        "{text}"
    );
    assert!(text.contains("the states below may be old: add --live"), "{text}");

    let (code, text) = status.text(&["--live"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(" DOWN ") && text.ends_with(": add --all"), "{text}");
    let (_, all) = status.run(&["--live", "--all"]).await;
    let text = all.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "read now: 2/3 members answer, 2/2 Nodes registered, 1/2 Peers as planned",
        "NoController: no replica holds the controller's Lease; the controller has no pod. ",
        "clustermesh/prod tenant-b: MemberUnreachable: ",
        "(401)",
        &format!("-> it is Secret {NAMESPACE}/tenant-b-kubeconfig"),
        "clustermesh/prod tenant-a to mgmt: TunnelsDown: 1 of 1 tunnels ",
        &format!(
            "clustermesh/prod mgmt: ObjectsDiffer: 1 object(s) in it are not as planned, first Peer {deleted}, which is missing"
        ),
    ] {
        assert!(text.contains(part), "{part:?}: {text}");
    }
    let (_, out) = status.run(&["--live", "--output=json"]).await;
    let report: Value = serde_json::from_str(&out).unwrap();
    let rows = report["problems"].as_array().unwrap().iter();
    let rows: Vec<[&str; 3]> = rows
        .map(|row| ["severity", "cluster", "reason"].map(|field| row[field].as_str().unwrap_or_default()))
        .collect();
    let want = [
        ["down", "", "NoController"],
        ["down", "tenant-b", "MemberUnreachable"],
        ["partly", "tenant-a", "TunnelsDown"],
        ["partly", "mgmt", "ObjectsDiffer"],
    ];
    assert_eq!(rows, want, "{out}");
    let live = &report["meshes"][0]["live"];
    let share = |working: u8, total: u8| json!({"working": working, "total": total});
    let member = |nodes: Value, peers: Value| json!({"answers": true, "nodes": nodes, "peers": peers});
    assert_eq!(live["mgmt"], member(share(1, 1), share(0, 1)));
    assert_eq!(live["tenant-a"], member(share(1, 1), share(1, 1)));
    assert_eq!(live["tenant-b"]["answers"], false);

    env.write_secret("tenant-b", &good).await;
    let agent = json!({"version": env!("CARGO_PKG_VERSION"), "mode": "full", "mtu": 1420});
    env.annotate("tenant-a", "tenant-a-1", names::NODE_AGENT, Some(&agent.to_string()))
        .await;
    let _controller = env.start_controller().await;
    let text = status.until_healthy().await;
    assert!(text.contains(healthy), "{text}");
}
