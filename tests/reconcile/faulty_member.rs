//! Tests members whose API servers misbehave in each way that a proxy can produce. The status of the mesh shows what is wrong and
//! since when, the other members still get each other's changes, and the log does not grow with the number of failures.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use clustermesh_api::{
    mesh::{ClusterMesh, MeshProblem},
    names,
};
use clustermesh_lab::{NAMESPACE, Running, wait_until};
use clustermesh_tests::{
    faulty::{Fault, FaultyApi, Requests},
    test_env::{LATER, TestEnv},
};
use futures::{StreamExt, stream};
use kube::Api;
use serde_json::json;

/// The cluster whose changes reach the others in each case.
const HEALTHY: &str = "tenant-a";
/// The members behind proxies.
const FAULTY: [&str; 3] = ["tenant-b", "tenant-c", "tenant-d"];
/// The most lines of the log, at level info or above, while one member has one fault.
const MAX_LINES: usize = 40;

/// A fault, and the problem in the status: its reason and a part of its message.
type Case = (Fault, &'static str, &'static str);

const NO_ANSWER: &str = "its API server does not answer";
const NO_KUBERNETES: &str = "its API server answers something that is not Kubernetes";

/// The cases of each faulty member, one after another. The members have their faults at the same time.
const CASES: [&[Case]; 3] = [
    &[
        (Fault::Slow(Duration::from_secs(30)), "MemberStale", NO_ANSWER),
        (
            Fault::Status(Requests::All, 429),
            "MemberStale",
            "its API server asks to slow down (429)",
        ),
        // A proxy answers so while the API server behind it does not run. It must not look as if the CRDs were not installed.
        (
            Fault::Status(Requests::All, 404),
            "MemberStale",
            "does not find nodes (404)",
        ),
        (
            Fault::Status(Requests::Writes, 500),
            "WriteFailed",
            "(500): see its log, or the log of an admission webhook",
        ),
    ],
    &[
        (Fault::OtherAuthority, "MemberStale", NO_ANSWER),
        (
            Fault::Status(Requests::All, 401),
            "MemberStale",
            "(401): renew the kubeconfig in the Secret",
        ),
        (
            Fault::Status(Requests::All, 500),
            "MemberStale",
            "its API server fails (500)",
        ),
        (
            Fault::Status(Requests::Writes, 409),
            "WriteFailed",
            "one of the two writers has to stop",
        ),
        // The controller trusts such a server again only when a watch has lasted for 20 s.
        (
            Fault::Status(Requests::Watches, 410),
            "MemberStale",
            "calls every version of",
        ),
    ],
    &[
        (Fault::NotJson, "MemberStale", NO_KUBERNETES),
        (
            Fault::Status(Requests::All, 403),
            "MemberStale",
            "(403): apply the member's RBAC manifests",
        ),
        (
            Fault::Status(Requests::Writes, 403),
            "WriteFailed",
            "(403): apply the member's RBAC manifests",
        ),
        (
            Fault::Filler(64 << 20),
            "MemberStale",
            // The rest of the message depends on whether a list or a watch event is too large. Either can occur.
            "over its budget: its API server",
        ),
    ],
];

/// The problem of a member that makes the condition Ready of the mesh False.
async fn problem(env: &TestEnv, member: &str) -> Option<MeshProblem> {
    let problems = env.get_mesh().await?.status?.problems;
    let of_member = |problem: &MeshProblem| problem.condition == "Ready" && problem.cluster.as_deref() == Some(member);
    problems.into_iter().find(of_member)
}

/// Waits until the problem of a member has this reason and message. `None` = it has none.
async fn until_problem(env: &TestEnv, member: &str, want: Option<(&str, &str)>) -> Option<MeshProblem> {
    wait_until(format!("the problem of {member}: {want:?}"), LATER, async || {
        match (problem(env, member).await, want) {
            (None, None) => Ok(None),
            (Some(problem), Some((reason, text))) if problem.reason == reason && problem.message.contains(text) => {
                Ok(Some(problem))
            }
            (other, _) => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap()
}

/// Changes the endpoint of a node of [`HEALTHY`], and waits until the hub has it.
async fn others_follow(env: &TestEnv, port: &AtomicU16) {
    let port = port.fetch_add(1, Ordering::Relaxed);
    let endpoint = format!("198.51.2.1:{port}");
    env.annotate(HEALTHY, "tenant-a-1", names::KILO_ENDPOINT, Some(&endpoint))
        .await;
    wait_until(format!("the port {port} in the hub"), LATER, async || {
        let peers = env.peers("mgmt").await;
        let found = peers["prod--tenant-a--tenant-a-1"]
            .spec
            .endpoint
            .as_ref()
            .map(|endpoint| endpoint.port);
        // Another member's case may have changed it again.
        if found >= Some(port.into()) {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    })
    .await
    .unwrap();
}

/// The number of lines of the log at level info or above, except those about successful writes.
fn lines(controller: &Running) -> usize {
    let log = controller.log();
    let count = log
        .lines()
        .filter(|line| !line.contains("DEBUG") && !line.contains(": written "));
    count.count()
}

async fn cases(env: &TestEnv, controller: &Running, proxy: &FaultyApi, member: &str, cases: &[Case], port: &AtomicU16) {
    for (fault, reason, text) in cases {
        let before = lines(controller);
        proxy.set(Some(*fault));
        // This change also requires a write into the faulty member.
        others_follow(env, port).await;
        let problem = until_problem(env, member, Some((reason, text))).await.unwrap();
        let lines = lines(controller) - before;
        println!(
            "{member} {fault:?}: {lines} lines; since {}: {}",
            problem.since.0, problem.message
        );
        // The cases of the other members write into the same log.
        assert!(lines <= FAULTY.len() * MAX_LINES, "{fault:?}: {lines} lines");
        proxy.set(None);
        until_problem(env, member, None).await;
    }
}

// threat: slow-api-server
#[tokio::test]
async fn each_fault_of_a_member_is_named_and_hurts_no_other() {
    let env = TestEnv::start(&[&["mgmt", HEALTHY], &FAULTY[..]].concat()).await;
    for (m, name) in (1..).zip(["mgmt", HEALTHY].into_iter().chain(FAULTY)) {
        env.create_node(name, m, 1).await;
    }
    let host = env
        .lab
        .add_host("proxies", "172.30.1.201".parse().unwrap())
        .await
        .unwrap();
    let mut proxies = Vec::new();
    for (member, port) in FAULTY.into_iter().zip(7001..) {
        let proxy = FaultyApi::start(&host, port, &env.lab.cluster(member)).await;
        env.write_secret(member, &proxy.kubeconfig(&env.kubeconfig(member).await))
            .await;
        proxies.push(proxy);
    }
    let controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
    let before = env.peers("mgmt").await;

    let port = AtomicU16::new(20_000);
    let [b, c, d] = [0, 1, 2].map(|n| cases(&env, &controller, &proxies[n], FAULTY[n], CASES[n], &port));
    tokio::join!(b, c, d);
    env.until_condition("Ready", "True/Meshed", LATER).await;
    flapping_member_is_named(&env, &controller, &proxies[0], &port).await;
    // Nothing was deleted or created again.
    let after = env.peers("mgmt").await;
    let uid = |peers: &std::collections::BTreeMap<String, clustermesh_api::peer::Peer>| -> Vec<_> {
        peers.values().map(|peer| peer.metadata.uid.clone()).collect()
    };
    assert_eq!(uid(&after), uid(&before));
    for cluster in ["mgmt", HEALTHY].into_iter().chain(FAULTY) {
        let writes = env.lab.cluster(cluster).audit().unwrap();
        assert!(
            !writes.iter().any(|write| write.starts_with("delete")),
            "{cluster}: {writes:?}"
        );
    }
    thousand_refused_objects_are_one_problem(&env, &controller, &proxies[0]).await;
}

/// An API server that is away for every other second has one problem, which does not come and go.
async fn flapping_member_is_named(env: &TestEnv, controller: &Running, proxy: &FaultyApi, port: &AtomicU16) {
    let before = lines(controller);
    // On a loaded machine the API server can answer for longer than a second, and then the problem is really over.
    let longest_open = Cell::new(Duration::ZERO);
    let flap = async {
        loop {
            proxy.set(Some(Fault::Closed));
            tokio::time::sleep(Duration::from_secs(1)).await;
            proxy.set(None);
            let opened = Instant::now();
            tokio::time::sleep(Duration::from_secs(1)).await;
            longest_open.set(longest_open.get().max(opened.elapsed()));
        }
    };
    let observe = async {
        let want = Some(("MemberStale", NO_ANSWER));
        let mut first = until_problem(env, FAULTY[0], want).await.unwrap();
        let mut unchanged = 0;
        while unchanged < 5 {
            others_follow(env, port).await;
            let now = until_problem(env, FAULTY[0], want).await.unwrap();
            if now.since == first.since {
                unchanged += 1;
            } else {
                let open = longest_open.take();
                assert!(
                    open > Duration::from_secs(2),
                    "since {:?}, then {:?}",
                    first.since,
                    now.since
                );
                println!("flapping: the API server answered for {open:?}; observed again");
                (first, unchanged) = (now, 0);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        () = flap => unreachable!("it has no end"),
        () = observe => {}
    }
    let lines = lines(controller) - before;
    println!("flapping: {lines} lines");
    assert!(lines <= MAX_LINES, "{lines} lines");
    proxy.set(None);
    until_problem(env, FAULTY[0], None).await;
}

/// A second mesh has a member of 1,000 nodes, and another member that refuses the Peers of these nodes and the PeerPolicy.
async fn thousand_refused_objects_are_one_problem(env: &TestEnv, controller: &Running, proxy: &FaultyApi) {
    let before = lines(controller);
    proxy.set(Some(Fault::Status(Requests::Writes, 422)));
    let numbers = (100..105).flat_map(|m| (0..200).map(move |n| (m, n)));
    let nodes = stream::iter(numbers).map(|(m, n)| {
        let name = json!(format!("crowd-{m}-{n}"));
        env.create_changed_node(HEALTHY, (m, n), move |node| node["metadata"]["name"] = name)
    });
    nodes.buffer_unordered(16).for_each(|_| std::future::ready(())).await;
    let mut mesh = env.mesh();
    mesh["metadata"]["name"] = json!("crowd");
    let entries = mesh["spec"]["clusters"].as_array_mut().unwrap();
    entries.retain(|entry| [HEALTHY, FAULTY[0]].iter().any(|name| entry["name"] == *name));
    let networks: Vec<String> = (100..105)
        .flat_map(|m| [format!("10.{m}.0.0/16"), format!("100.64.{m}.0/24")])
        .collect();
    entries[0]["allowedNetworks"] = json!(networks);
    entries[1]["allowedNetworks"] = json!(["10.120.0.0/16"]);
    env.apply_mesh(&mesh).await;
    let meshes: Api<ClusterMesh> = Api::namespaced(env.client("mgmt").await, NAMESPACE);
    let message = wait_until("the refusals in the status", LATER, async || {
        let problems = meshes.get("crowd").await.unwrap().status.unwrap_or_default().problems;
        let is_named =
            |problem: &&MeshProblem| problem.reason == "WriteFailed" && problem.message.contains("; and 1000 more");
        match problems.iter().find(is_named) {
            Some(problem) => Ok(problem.message.clone()),
            None => Err(format!("{problems:?}")),
        }
    })
    .await
    .unwrap();
    let lines = lines(controller) - before;
    println!("1,000 refused objects: {lines} lines; {message}");
    assert!(lines <= 3 * MAX_LINES, "{lines} lines");
}
