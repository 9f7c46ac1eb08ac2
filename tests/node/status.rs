//! Tests the reports of a real agent about its peers and its admission policy: `wg-agent status`, metrics, and
//! annotations of the Node.

use std::{collections::BTreeMap, time::Duration};

use clustermesh_api::{
    annotations::{AgentStatus, Link},
    names::{LABEL_MESH, LABEL_MESH_NAMESPACE, LABEL_SOURCE_CLUSTER, NODE_AGENT},
    peer::{DnsOrIp, Peer, PeerEndpoint, PeerSpec},
};
use clustermesh_lab::wait_until;
use clustermesh_tests::agent::agent_program;
use kube::api::PostParams;

use crate::two_clusters::{MGMT, TENANT, TIMEOUT, TwoClusters};

/// A peer counts as down 15 s after the first handshake attempt; the agent publishes that within another 10 s.
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);

/// The Peer of a node that does not exist.
fn phantom() -> Peer {
    let mut peer = Peer::new(
        "prod--gone--gone-1",
        PeerSpec {
            allowed_ips: vec!["10.77.1.0/24".into()],
            endpoint: Some(PeerEndpoint {
                dns_or_ip: DnsOrIp {
                    ip: Some("172.30.1.77".into()),
                    dns: None,
                },
                port: 51820,
            }),
            persistent_keepalive: None,
            preshared_key: None,
            public_key: "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=".into(),
        },
    );
    let labels = [
        (LABEL_MESH_NAMESPACE, "ns"),
        (LABEL_MESH, "prod"),
        (LABEL_SOURCE_CLUSTER, "gone"),
    ];
    peer.metadata.labels = Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    peer
}

/// Runs a `wg-agent status` command on the node of a site. Returns exit code, standard output and standard error.
async fn status(clusters: &TwoClusters, site: usize, words: &[&str]) -> (i32, String, String) {
    let site = clusters.site(site);
    let output = clusters.host(site).try_exec(words).await.expect("run wg-agent status");
    (output.status.code().unwrap_or(-1), output.stdout, output.stderr)
}

async fn wait_for_links(clusters: &TwoClusters, want: BTreeMap<String, Link>) {
    wait_until(format!("links {want:?} on the Node"), REPORT_TIMEOUT, async || {
        let all = clusters.annotations(clusters.site(TENANT)).await;
        let agent = AgentStatus::parse(all.get(NODE_AGENT).ok_or("no annotation")?)?;
        if agent.links == want {
            Ok(())
        } else {
            Err(format!("{agent:?}"))
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

#[tokio::test]
async fn peer_that_is_down_is_reported_everywhere_until_removed() {
    let clusters = TwoClusters::start().await;
    let tenant = clusters.site(TENANT);
    let (code, _, stderr) = status(&clusters, TENANT, &[agent_program(), "status"]).await;
    assert!(
        code == 2 && stderr.contains("no wg-agent runs in this network namespace"),
        "{code}: {stderr}"
    );

    let _mgmt = clusters.agent(clusters.site(MGMT), "agent-mgmt");
    let words = clusters.command(tenant, &["--metrics-per-peer", "--listen=127.0.0.1:9587"]);
    let mut agent = clusters
        .host(tenant)
        .spawn("agent-tenant", words)
        .expect("start the agent");
    clusters.wait_for_published(tenant).await;
    let peers = clusters.peers(tenant).await;
    peers
        .create(&PostParams::default(), &phantom())
        .await
        .expect("create the Peer");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(tenant, clusters.site(MGMT)).await;

    // The peer in the other cluster is up, and the phantom Peer is down. The annotation has only links with a tunnel that is down; the
    // other reports show both peers.
    let gone = [(
        "ns/prod/gone".to_owned(),
        Link {
            up: 0,
            down: 1,
            total: 1,
        },
    )]
    .into();
    wait_for_links(&clusters, gone).await;
    let (code, page, stderr) = status(&clusters, TENANT, &[agent_program(), "status"]).await;
    assert_eq!((code, stderr.as_str()), (1, ""), "{page}");
    let row = |name: &str| {
        let line = page
            .lines()
            .find(|line| line.contains(name))
            .unwrap_or_else(|| panic!("no {name} in {page}"));
        line.split_whitespace().take(4).map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(
        row("gone-1"),
        ["gone", "prod--gone--gone-1", "down", "172.30.1.77:51820"]
    );
    assert_eq!(row("mgmt-1"), ["mgmt", "mesh--mgmt--mgmt-1", "up", "172.30.1.11:51820"]);
    assert!(
        page.contains("Peers      1 up, 1 down, 0 unknown") && page.contains("\n1 down: most likely UDP"),
        "{page}"
    );
    let (code, page, _) = status(&clusters, TENANT, &[agent_program(), "status", "--cluster=mgmt"]).await;
    assert!(code == 0 && !page.contains("gone"), "{code}: {page}");
    let (code, json, _) = status(&clusters, TENANT, &[agent_program(), "status", "-o", "json"]).await;
    let state: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (code, &state["peers"]["prod--gone--gone-1"]["state"]),
        (1, &"down".into()),
        "{json}"
    );
    assert_eq!(
        state["inputs"]["peers"]["prod--gone--gone-1"]["endpoint"],
        "172.30.1.77:51820"
    );
    assert_eq!(state["device"]["backend"], state["agent"]["backend"]);
    assert_eq!(
        (&state["troubles"], &state["refused"]),
        (&serde_json::json!([]), &serde_json::json!([]))
    );
    let key = std::fs::read_to_string(clusters.key_file(tenant)).expect("the key");
    assert!(!json.contains(key.trim()), "the private key is not shown");
    let unprivileged = ["setpriv", "--reuid=65534", "--clear-groups", agent_program(), "status"];
    let (code, page, stderr) = status(&clusters, TENANT, &unprivileged).await;
    assert!(
        code == 2 && page.is_empty() && stderr.contains("it answers only root"),
        "{code}: {page}{stderr}"
    );
    let (_, metrics) = clusters.page(tenant, "/metrics").await;
    for line in [
        "wg_agent_peers{cluster=\"gone\",state=\"down\"} 1",
        "wg_agent_peer_state{cluster=\"gone\",peer=\"prod--gone--gone-1\",state=\"down\"} 1",
        "wg_agent_peer_state{cluster=\"mgmt\",peer=\"mesh--mgmt--mgmt-1\",state=\"up\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in {metrics}");
    }

    clusters.delete_peer(tenant, "prod--gone--gone-1").await;
    wait_for_links(&clusters, BTreeMap::new()).await;
    let (code, page, _) = status(&clusters, TENANT, &[agent_program(), "status"]).await;
    assert!(code == 0 && !page.contains("gone"), "{code}: {page}");
    assert!(
        agent.terminate(TIMEOUT).await.expect("the agent exits").success(),
        "{}",
        agent.log()
    );
    let (code, _, _) = status(&clusters, TENANT, &[agent_program(), "status"]).await;
    assert_eq!(code, 2);
}

/// An admission policy for all accounts. That of deploy/agent.yaml applies to a ServiceAccount that this test does not use.
const ADMISSION: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: agents}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
    - {apiGroups: [""], apiVersions: [v1], operations: [UPDATE], resources: [nodes]}
  validations:
  - expression: "object.metadata.?labels == oldObject.metadata.?labels"
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: agents}
spec: {policyName: agents, validationActions: [Deny]}
"#;

#[tokio::test]
async fn only_a_missing_admission_policy_is_reported() {
    let clusters = TwoClusters::start().await;
    let tenant = clusters.site(TENANT);
    let mut agent = clusters.agent(tenant, "agent-without-policy");
    clusters.wait_until_ready(tenant).await;
    wait_until(
        "the agent to report the missing policy",
        TIMEOUT,
        async || match status(&clusters, TENANT, &[agent_program(), "status"]).await {
            (0, page, _) if page.contains("Admission  no admission policy restricts") => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await
    .expect("it is reported");
    let (code, text) = clusters.page(tenant, "/readyz").await;
    assert!(
        code == 200 && text.contains("but: admission: no admission policy restricts"),
        "{code}: {text}"
    );
    assert!(agent.log().contains("no admission policy restricts"), "{}", agent.log());
    // The agent tests the admission policy with a dry run, which changes nothing.
    let labels = clusters
        .nodes(tenant)
        .await
        .get(tenant.node)
        .await
        .expect("the Node")
        .metadata
        .labels;
    assert!(!format!("{labels:?}").contains("admission-probe"), "{labels:?}");

    agent.terminate(TIMEOUT).await.expect("the agent exits");
    let file = clusters.kubeconfig(tenant).with_extension("admission.yaml");
    std::fs::write(&file, ADMISSION).expect("write a manifest");
    let cluster = clusters.lab.cluster(tenant.cluster);
    let file = file.display().to_string();
    cluster.kubectl(["apply", "-f", &file]).await.expect("apply the policy");
    wait_until("the policy to be in force", TIMEOUT, async || {
        let label = ["label", "node", tenant.node, "probe=1", "--dry-run=server"];
        match cluster.kubectl(label).await {
            Ok(_) => Err("accepted".to_owned()),
            Err(_) => Ok(()),
        }
    })
    .await
    .expect("the policy is in force");
    let agent = clusters.agent(tenant, "agent-with-policy");
    clusters.wait_until_ready(tenant).await;
    wait_until("the agent to notice the policy", TIMEOUT, async || {
        let (_, state) = clusters.page(tenant, "/debug/state").await;
        let state: serde_json::Value = serde_json::from_str(&state).map_err(|error| error.to_string())?;
        if state["admission"] == "restricted" {
            Ok(())
        } else {
            Err(state["admission"].to_string())
        }
    })
    .await
    .expect("the agent reports the policy");
    wait_until("no line about the policy", TIMEOUT, async || {
        match clusters.try_page(tenant, "/readyz").await? {
            (200, page) if page == "ok\n" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .expect("the agent reports nothing");
    assert!(!agent.log().contains("no admission policy"), "{}", agent.log());
}

// threat: admin-port-flood
#[tokio::test]
async fn policy_is_enforced_during_two_thousand_idle_connections() {
    let clusters = TwoClusters::start().await;
    let tenant = clusters.site(TENANT);
    // The lowest limit of file descriptors that container runtimes set.
    let mut words: Vec<String> = ["prlimit", "--nofile=1024:1024"].map(String::from).into();
    words.extend(clusters.command(tenant, &[]));
    let _agent = clusters.host(tenant).spawn("agent", words).expect("start the agent");
    clusters.wait_until_ready(tenant).await;
    let host = clusters.host(tenant).netns();
    let idle = std::thread::spawn(move || {
        let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
        let (_, hard) = nix::sys::resource::getrlimit(limit).expect("a limit");
        nix::sys::resource::setrlimit(limit, hard, hard).expect("raise the limit");
        let host = std::fs::File::open(host).expect("open a network namespace");
        nix::sched::setns(&host, nix::sched::CloneFlags::CLONE_NEWNET).expect("enter the namespace");
        let one = || std::net::TcpStream::connect_timeout(&([127, 0, 0, 1], 9587).into(), TIMEOUT);
        (0..2000).map(|_| one()).collect::<Result<Vec<_>, _>>()
    });
    let idle = idle.join().expect("no panic").expect("2,000 connections");
    let mgmt = clusters.site(MGMT);
    let policy = clustermesh_api::policy::PeerPolicySpec {
        source: mgmt.cluster.into(),
        sources: vec![mgmt.pods.into()],
        networks: vec![mgmt.pods.into()],
        ..Default::default()
    };
    let policies = clusters.policies(tenant).await;
    let policy = clustermesh_api::policy::PeerPolicy::new("mesh", policy);
    policies
        .create(&PostParams::default(), &policy)
        .await
        .expect("create the PeerPolicy");
    wait_until("the policy in nftables", TIMEOUT, async || {
        let list = ["nft", "list", "set", "inet", "clustermesh", "mesh4"];
        let list = clusters
            .host(tenant)
            .try_exec(list)
            .await
            .map_err(|error| error.to_string())?;
        if list.stdout.contains(mgmt.pods) {
            Ok(())
        } else {
            Err(format!("{}{}", list.stdout, list.stderr))
        }
    })
    .await
    .expect("the policy is enforced");
    assert_eq!(clusters.page(tenant, "/healthz").await, (200, "ok\n".to_owned()));
    drop(idle);
}
