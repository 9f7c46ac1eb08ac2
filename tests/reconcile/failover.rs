//! Tests two replicas of the controller: one leads, the other takes over when the leader fails, and the audit logs never show two
//! writers.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

use clustermesh_api::names;
use clustermesh_lab::{AuditedWrite, NAMESPACE, Node as Machine, Running, wait_until};
use clustermesh_tests::test_env::{LATER, SOON, TestEnv, process_id};
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::{Api, api::DeleteParams};
use nix::sys::signal::Signal;
use serde_json::json;

const CLUSTERS: [&str; 3] = ["mgmt", "tenant-a", "tenant-b"];

/// Two replicas on two hosts.
struct Replicas<'a> {
    env: &'a TestEnv,
    hosts: [Machine<'a>; 2],
    running: [Running; 2],
    /// The ids of the processes.
    processes: [String; 2],
}

/// The holder of the Lease: the name of the replica, and an id of its process.
async fn leader(env: &TestEnv) -> String {
    let holder = "jsonpath={.spec.holderIdentity}";
    let words = ["-n", NAMESPACE, "get", "lease", "clustermesh-controller", "-o", holder];
    env.hub().try_kubectl(words).await.unwrap().stdout
}

impl<'a> Replicas<'a> {
    /// Starts replica 0, which becomes the leader, and replica 1.
    async fn start(env: &'a TestEnv) -> Self {
        env.lab
            .add_host("other-controller", "172.30.1.201".parse().unwrap())
            .await
            .unwrap();
        let hosts = ["controller", "other-controller"].map(|name| env.lab.node(name));
        let first = env.start_replica(&hosts[0], "replica-0", 8081).await;
        until_leader(env, 0).await;
        let second = env.start_replica(&hosts[1], "replica-1", 8081).await;
        Self {
            env,
            hosts,
            processes: [process_id(&first), process_id(&second)],
            running: [first, second],
        }
    }

    async fn restart(&mut self, index: usize) {
        let name = format!("replica-{index}");
        self.running[index] = self.env.start_replica(&self.hosts[index], &name, 8081).await;
        self.processes[index] = process_id(&self.running[index]);
    }
}

async fn until_leader(env: &TestEnv, index: usize) {
    wait_until(
        format!("replica {index} to be the leader"),
        SOON,
        async || match leader(env).await {
            holder if holder.starts_with(&format!("replica-{index}_")) => Ok(()),
            holder => Err(holder),
        },
    )
    .await
    .unwrap();
}

/// The writes of all replicas to a cluster since `from`, except Leases, in the order in which the API server received them.
fn writes(env: &TestEnv, cluster: &str, from: &str) -> Vec<AuditedWrite> {
    let mut writes = env.lab.cluster(cluster).audited_writes().unwrap();
    writes.retain(|write| !write.is_of_lease() && write.received.as_str() > from);
    writes.sort_by(|a, b| a.received.cmp(&b.received));
    writes
}

/// The index of the replica whose process the user agent names.
fn replica(processes: &[String], write: &AuditedWrite) -> usize {
    let found = processes.iter().position(|process| write.user_agent.contains(process));
    found.unwrap_or_else(|| panic!("{write:?} is of none of {processes:?}"))
}

/// Waits for three writes of replica `index` to each member since `from`. Checks that after the first of them the other replica
/// writes nothing.
async fn until_only_writer(replicas: &Replicas<'_>, index: usize, from: &str) {
    let env = replicas.env;
    let is_of = |write: &AuditedWrite| replica(&replicas.processes, write) == index;
    let name = format!("replica-{index}");
    for cluster in &CLUSTERS[1..] {
        wait_until(format!("three writes of {name} to {cluster}"), LATER, async || {
            let writes = writes(env, cluster, from);
            let own = writes.iter().filter(|write| is_of(write)).count();
            if own >= 3 {
                Ok(())
            } else {
                Err(format!("{own} of {}", writes.len()))
            }
        })
        .await
        .unwrap();
    }
    for cluster in CLUSTERS {
        let writes = writes(env, cluster, from);
        let late = writes.iter().skip_while(|write| !is_of(write));
        let late: Vec<_> = late.filter(|write| !is_of(write)).collect();
        assert_eq!(late, Vec::<&AuditedWrite>::new(), "{cluster}: two writers");
        if let Some(first) = writes.iter().find(|write| is_of(write)) {
            println!(
                "{cluster}: the first write of {name} was received at {}",
                first.received
            );
        }
    }
}

/// The current time, as in the audit logs.
fn now() -> String {
    k8s_openapi::jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%S.%6fZ")
        .to_string()
}

/// Changes the endpoint of a node of each tenant ten times a second, so that there is always something to write.
async fn change_endpoints(env: &TestEnv, count: &AtomicU32, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let port = 20_000 + count.fetch_add(1, Ordering::Relaxed) % 20_000;
        for (m, cluster) in (1..).zip(CLUSTERS).skip(1) {
            let endpoint = format!("198.51.{m}.1:{port}");
            env.annotate(cluster, &format!("{cluster}-1"), names::KILO_ENDPOINT, Some(&endpoint))
                .await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until the Peers have the last endpoints.
async fn until_settled(env: &TestEnv, count: &AtomicU32) {
    let port = u16::try_from(20_000 + (count.load(Ordering::Relaxed) - 1) % 20_000).unwrap();
    wait_until(format!("the endpoint's port {port} in tenant-b"), LATER, async || {
        let peers = env.peers("tenant-b").await;
        let endpoint = peers["prod--tenant-a--tenant-a-1"].spec.endpoint.clone();
        match endpoint.as_ref().map(|endpoint| endpoint.port) {
            Some(found) if found == i32::from(port) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn other_replica_takes_over_and_never_two_write() {
    let env = TestEnv::start(&CLUSTERS).await;
    for (m, name) in (1..).zip(CLUSTERS) {
        env.create_node(name, m, 1).await;
    }
    let mut replicas = Replicas::start(&env).await;
    env.apply_mesh(&env.mesh()).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    let (count, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let disturb = async {
        leader_is_killed(&mut replicas).await;
        leader_is_stopped_and_continues(&replicas).await;
        leader_is_cut_off_from_the_hub(&replicas).await;
        replica_with_an_old_view_takes_over(&mut replicas).await;
        hub_is_down(&replicas, 0).await;
        leader_exits(&mut replicas).await;
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(disturb, change_endpoints(&env, &count, &stop));
    until_settled(&env, &count).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
    // The Peers of all nodes are there, and a replica that took over has deleted none.
    for cluster in CLUSTERS {
        let deletes: Vec<_> = writes(&env, cluster, "")
            .into_iter()
            .filter(|write| write.request.starts_with("delete"))
            .collect();
        assert_eq!(deletes, [], "{cluster}");
    }
}

/// Replica 0 leads before, replica 1 after.
async fn leader_is_killed(replicas: &mut Replicas<'_>) {
    until_only_writer(replicas, 0, "").await;
    let from = now();
    println!("{from}: the leader is killed");
    replicas.running[0].signal(Signal::SIGKILL).unwrap();
    until_only_writer(replicas, 1, &from).await;
    replicas.restart(0).await;
}

/// Replica 1 leads before, replica 0 after.
async fn leader_is_stopped_and_continues(replicas: &Replicas<'_>) {
    let from = now();
    println!("{from}: the leader is stopped");
    replicas.running[1].signal(Signal::SIGSTOP).unwrap();
    until_only_writer(replicas, 0, &from).await;
    replicas.running[1].signal(Signal::SIGCONT).unwrap();
    println!("{}: the old leader continues", now());
    log_contains(&replicas.running[1], "it is a standby now").await;
    until_only_writer(replicas, 0, &from).await;
}

async fn log_contains(running: &Running, text: &str) {
    wait_until(format!("{text:?} in the log"), SOON, async || {
        if running.log().contains(text) {
            Ok(())
        } else {
            Err(String::new())
        }
    })
    .await
    .unwrap();
}

/// Replica 0 leads before, replica 1 after.
async fn leader_is_cut_off_from_the_hub(replicas: &Replicas<'_>) {
    let env = replicas.env;
    let hub = format!("{}/32", env.hub().plan().api_address());
    let from = now();
    println!("{from}: the leader is cut off from the hub");
    replicas.hosts[0]
        .exec(["ip", "route", "add", "blackhole", &hub])
        .await
        .unwrap();
    until_only_writer(replicas, 1, &from).await;
    replicas.hosts[0]
        .exec(["ip", "route", "del", "blackhole", &hub])
        .await
        .unwrap();
    log_contains(&replicas.running[0], "it is a standby now").await;
    until_only_writer(replicas, 1, &from).await;
}

/// Replica 1 leads before, replica 0 after. While replica 0 is cut off from the hub, a node of the hub joins. When replica 0 is
/// connected again, the hub's TCP waits for seconds before it retransmits the lost events.
async fn replica_with_an_old_view_takes_over(replicas: &mut Replicas<'_>) {
    let env = replicas.env;
    let hub = format!("{}/32", env.hub().plan().api_address());
    let cut = |verb| ["ip", "route", verb, "blackhole", &hub];
    replicas.hosts[0].exec(cut("add")).await.unwrap();
    // The first events after the cut arrive: only their acknowledgements are lost.
    env.annotate("mgmt", "mgmt-1", names::KILO_ENDPOINT, Some("198.51.100.1:51820"))
        .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    env.create_node("mgmt", 1, 2).await;
    for member in &CLUSTERS[1..] {
        wait_until(format!("the Peer of mgmt-2 in {member}"), LATER, async || {
            match env.peers(member).await {
                peers if peers.contains_key("prod--mgmt--mgmt-2") => Ok(()),
                peers => Err(format!("{:?}", peers.keys())),
            }
        })
        .await
        .unwrap();
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    replicas.hosts[0].exec(cut("del")).await.unwrap();
    let from = now();
    println!("{from}: replica 0 reaches the hub again, and the leader exits");
    let exit = replicas.running[1].terminate(SOON).await.unwrap();
    assert!(exit.success(), "{}", replicas.running[1].log());
    until_only_writer(replicas, 0, &from).await;
    replicas.restart(1).await;
}

/// Replica `index` leads before, and either replica after.
async fn hub_is_down(replicas: &Replicas<'_>, index: usize) {
    let env = replicas.env;
    env.hub().kill_api().unwrap();
    // The Lease expires.
    log_contains(&replicas.running[index], "has lapsed").await;
    let from = now();
    println!("{from}: the hub is down, and the Lease has lapsed");
    until_only_writer(replicas, index, &from).await;
    env.hub().start_api().await.unwrap();
    env.annotate("mgmt", "mgmt-1", "example.com/turn", Some("after")).await;
}

/// Either replica leads before, the other one after.
async fn leader_exits(replicas: &mut Replicas<'_>) {
    let env = replicas.env;
    wait_until("a leader", SOON, async || match leader(env).await {
        holder if holder.starts_with("replica-") => Ok(()),
        holder => Err(holder),
    })
    .await
    .unwrap();
    let index = usize::from(leader(env).await.starts_with("replica-1"));
    until_only_writer(replicas, index, &now()).await;
    let from = now();
    println!("{from}: the leader is told to exit");
    let exit = replicas.running[index].terminate(SOON).await.unwrap();
    assert!(exit.success(), "{}", replicas.running[index].log());
    until_only_writer(replicas, 1 - index, &from).await;
}

/// Deletes the permission for Leases in a cluster. Returns the object, to apply it again.
async fn deny_leases(env: &TestEnv, cluster: &str) -> String {
    let cluster = env.lab.cluster(cluster);
    let bindings: Api<RoleBinding> = Api::namespaced(cluster.client().await.unwrap(), NAMESPACE);
    let RoleBinding { role_ref, subjects, .. } = bindings.get("clustermesh-leases").await.unwrap();
    bindings
        .delete("clustermesh-leases", &DeleteParams::default())
        .await
        .unwrap();
    let object = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "clustermesh-leases", "namespace": NAMESPACE}, "roleRef": role_ref, "subjects": subjects,
    });
    object.to_string()
}

#[tokio::test]
async fn leader_without_hub_lease_writes_where_it_renews_member_lease() {
    let env = TestEnv::start(&CLUSTERS).await;
    for (m, name) in (1..).zip(CLUSTERS) {
        env.create_node(name, m, 1).await;
    }
    deny_leases(&env, "tenant-a").await;
    let host = env.controller_host();
    let mut running = env.start_replica(&host, "replica-0", 8081).await;
    env.apply_mesh(&env.mesh()).await;
    // While the leader holds the hub's Lease, it also writes into a member without the permission.
    env.until_condition("Ready", "True/Meshed", SOON).await;
    let log = running.log();
    assert!(
        log.contains("does not permit the Lease") && log.contains("apply deploy/member-account.yaml"),
        "{log}"
    );

    let permission = deny_leases(&env, "mgmt").await;
    log_contains(&running, "has lapsed").await;
    log_contains(
        &running,
        "may not get, create and update Leases in its namespace: apply deploy/controller.yaml",
    )
    .await;
    env.create_node("mgmt", 1, 2).await;
    let with_new = ["prod--mgmt--mgmt-1", "prod--mgmt--mgmt-2", "prod--tenant-a--tenant-a-1"];
    env.until_peers("tenant-b", &with_new, SOON).await;
    // The hub answers, so the node is known to be gone.
    env.remove_node("mgmt", "mgmt-1").await;
    env.until_peers("tenant-b", &with_new[1..], SOON).await;
    let unchanged = ["prod--mgmt--mgmt-1", "prod--tenant-b--tenant-b-1"];
    env.until_peers("tenant-a", &unchanged, SOON).await;

    env.hub().apply(&permission).await.unwrap();
    let after = ["prod--mgmt--mgmt-2", "prod--tenant-b--tenant-b-1"];
    env.until_peers("tenant-a", &after, SOON).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    assert!(running.terminate(SOON).await.unwrap().success(), "{}", running.log());
    unchanged_lease_is_taken_whatever_its_times(&env).await;
}

/// Another replica, `ghost_0`, writes times of years ago, and then of the far future, into the Lease, as with a wrong clock.
/// Only the time since the last change of the Lease counts.
async fn unchanged_lease_is_taken_whatever_its_times(env: &TestEnv) {
    let lease = [
        "-n",
        NAMESPACE,
        "patch",
        "lease",
        "clustermesh-controller",
        "--type=merge",
        "-p",
    ];
    let renew = async |turn: usize| {
        let spec = format!(
            r#"{{"spec":{{"holderIdentity":"ghost_0","renewTime":"2020-01-01T00:00:{turn:02}.000000Z","leaseDurationSeconds":10}}}}"#
        );
        env.hub()
            .kubectl(lease.into_iter().chain([spec.as_str()]))
            .await
            .unwrap();
    };
    renew(0).await;
    let host = env.controller_host();
    let running = env.start_replica(&host, "replica-1", 8081).await;
    // The loop takes longer than the duration of the Lease, which is 10 s.
    for turn in 1..8 {
        renew(turn).await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert_eq!(leader(env).await, "ghost_0");
    }
    let future = r#"{"spec":{"renewTime":"2100-01-01T00:00:00.000000Z"}}"#;
    env.hub().kubectl(lease.into_iter().chain([future])).await.unwrap();
    until_leader(env, 1).await;
    log_contains(&running, "is the leader now").await;
}
