//! What an operator does to two whole clusters in a mesh, and what happens to them: rights, nodes that come and go, pods
//! of ours that are deleted, a member's API server that stands still, new credentials, backends that go, and the end:
//! the mesh deleted and the nodes left clean, as README.md says.

mod mesh;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use clustermesh_lab::{AGENT_NAMESPACE, Cluster, Lab, MESH, NAMESPACE, Node, wait_until};
use mesh::state::{NodeState, condition, versions};
use mesh::{Mesh, PATIENCE, host, json, pod, two_clusters, url};

#[tokio::test]
async fn a_mesh_survives_its_operator_and_leaves_nothing_when_it_goes() {
    let lab = two_clusters().await;
    for cluster in [lab.cluster(mesh::HUB), lab.cluster(mesh::MEMBER)] {
        cluster.run_web().await.unwrap();
    }
    let before = all_nodes(&lab).await;
    let mut mesh = Mesh::up(&lab, &[]).await;

    our_processes_have_the_rights_of_deploy_and_no_more(&mesh).await;
    status_of_a_healthy_node_says_what_is_there(&mesh).await;
    a_long_flow_outlives_nodes_that_join_and_leave_and_agents_that_restart_elsewhere(&mesh).await;
    a_flow_outlives_an_upgrade_of_the_agents_and_a_new_key(&mesh).await;
    a_deleted_controller_rewrites_nothing_and_its_successor_works(&mut mesh).await;
    a_new_token_is_taken_up_without_a_restart_or_a_write(&mut mesh).await;
    a_frozen_api_server_of_a_member_costs_a_condition_and_nothing_else(&mesh).await;
    a_deleted_mesh_takes_everything_away(&mesh).await;
    cleanup_leaves_the_nodes_as_they_were(&mesh, &before).await;
}

/// The state of every node of the first hour, by name.
async fn all_nodes(lab: &Lab) -> BTreeMap<String, NodeState> {
    let mut states = BTreeMap::new();
    for name in [mesh::HUB, mesh::MEMBER] {
        for n in 1..=2 {
            let name = format!("{name}-{n}");
            states.insert(name.clone(), NodeState::of(&lab.node(&name)).await);
        }
    }
    states
}

/// What /proc says of the only process of that name: real user, capabilities, whether it may gain more, seccomp's mode.
fn rights(node: &Node<'_>, name: &str) -> BTreeMap<String, String> {
    let pids = node.pids_of(name).unwrap();
    let [pid] = pids[..] else {
        panic!("{} runs {name} as {pids:?}", node.name());
    };
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let wanted = [
        "Uid",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
    ];
    let lines = status.lines().filter_map(|line| line.split_once(":\t"));
    let wanted = lines.filter(|(key, _)| wanted.contains(key));
    wanted
        .map(|(key, value)| {
            (
                key.to_owned(),
                value.split_whitespace().next().unwrap_or_default().to_owned(),
            )
        })
        .collect()
}

/// Where the only process of that name may write to a file system and where it may not, of what matters, as its mount table
/// says (proc_pid_mountinfo(5)). The runtime's own mounts in /dev and /proc, and what cgroup v1 hangs its hierarchies on,
/// are not the Pod's to choose.
fn mounts(node: &Node<'_>, name: &str) -> (Vec<String>, Vec<String>) {
    let pids = node.pids_of(name).unwrap();
    let [pid] = pids[..] else {
        panic!("{} runs {name} as {pids:?}", node.name());
    };
    let table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let mounts = table.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(4);
        Some((
            words.next()?.to_owned(),
            words.next()?.split(',').any(|option| option == "rw"),
        ))
    });
    let mounts: BTreeMap<String, bool> = mounts.collect();
    let runtimes = |at: &str| {
        let own = [
            "/dev",
            "/dev/pts",
            "/dev/shm",
            "/dev/mqueue",
            "/dev/termination-log",
            "/sys/fs/cgroup",
        ];
        at.starts_with("/proc") || own.contains(&at)
    };
    let open = mounts.iter().filter(|(at, open)| **open && !runtimes(at));
    let closed = ["/", "/proc/sys", "/sys"]
        .into_iter()
        .filter(|at| mounts.get(*at) == Some(&false));
    (
        open.map(|(at, _)| at.clone()).collect(),
        closed.map(str::to_owned).collect(),
    )
}

async fn our_processes_have_the_rights_of_deploy_and_no_more(mesh: &Mesh<'_>) {
    let expected = |uid: &str, capabilities: u64| -> BTreeMap<String, String> {
        let set = format!("{capabilities:016x}");
        let of = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        [
            of("Uid", uid),
            of("CapInh", &format!("{:016x}", 0)),
            of("CapPrm", &set),
            of("CapEff", &set),
            of("CapBnd", &set),
            of("CapAmb", &format!("{:016x}", 0)),
            of("NoNewPrivs", "1"),
            of("Seccomp", "2"),
        ]
        .into()
    };
    for cluster in [&mesh.hub, &mesh.member] {
        for node in cluster.nodes() {
            // CAP_NET_ADMIN is number 12 of linux/capability.h.
            assert_eq!(rights(&node, "wg-agent"), expected("0", 1 << 12), "{}", node.name());
            let open = ["/dev/net/tun", "/etc/hosts", "/var/lib/kilo", "/var/run/wireguard"].map(String::from);
            let closed = ["/", "/proc/sys", "/sys"].map(String::from);
            assert_eq!(
                mounts(&node, "wg-agent"),
                (open.into(), closed.into()),
                "{}",
                node.name()
            );
        }
    }
    let controller = "clustermesh-controller";
    let runs = |node: &Node<'_>| !node.pids_of(controller).unwrap().is_empty();
    let node = mesh
        .hub
        .nodes()
        .into_iter()
        .find(runs)
        .expect("a node that runs the controller");
    assert_eq!(rights(&node, controller), expected("65532", 0));
}

async fn a_long_flow_outlives_nodes_that_join_and_leave_and_agents_that_restart_elsewhere(mesh: &Mesh<'_>) {
    let (from, to) = (&mesh.member_webs[1], &mesh.hub_webs[1]);
    let serve = [&mesh.probe(), "stream-serve", ":5201"];
    let mut serving = mesh.lab.node(&to.node).pod_spawn("stream-serve", to.ip, serve).unwrap();
    serving.says("streaming on", PATIENCE).await.unwrap();
    let there = format!("{}:5201", to.ip);
    let get = [&mesh.probe(), "stream-get", &there, "600"];
    let mut stream = mesh.lab.node(&from.node).pod_spawn("stream-get", from.ip, get).unwrap();
    stream.says("10 after", PATIENCE).await.unwrap();

    let start = Instant::now();
    let node = mesh.member.join_node().await.unwrap();
    let name = node.name().to_owned();
    println!("{name} Ready after {:.1} s", start.elapsed().as_secs_f64());
    let key = [
        "get",
        "node",
        &name,
        "-o",
        "jsonpath={.metadata.annotations.kilo\\.squat\\.ai/key}",
    ];
    wait_until(format!("the key of {name}"), PATIENCE, async || {
        let said = mesh.member.kubectl(key).await.map_err(|error| error.to_string())?;
        if said.stdout.is_empty() {
            Err("none yet".to_owned())
        } else {
            Ok(())
        }
    })
    .await
    .unwrap();
    let published = Instant::now();
    mesh.answered(&host(&name), &url(mesh.hub_webs[0].ip, 8080)).await;
    println!(
        "{name} first reply {:.2} s after its annotations",
        published.elapsed().as_secs_f64()
    );
    mesh.product.ready().await.unwrap();

    mesh.lab.node(&name).power_cut().await.unwrap();
    // Somebody goes on talking to it.
    let address = wireguard_address(&mesh.member, &name).await;
    let to_dead = ["ping", "-n", "-i", "1", &address];
    let asker = &mesh.hub_webs[0];
    let _talks = mesh
        .lab
        .node(&asker.node)
        .pod_spawn("to-dead", asker.ip, to_dead)
        .unwrap();
    let cut = Instant::now();

    // Meanwhile an agent elsewhere restarts: its own node's tunnel is down for a moment, no other.
    an_agent_restarts(mesh).await;

    a_link_that_is_down_is_told(mesh, &asker.node, &name, cut).await;
    mesh.member.kubectl(["delete", "node", &name]).await.unwrap();
    let deleted = Instant::now();
    wait_until(format!("the Peers of {name} to go"), PATIENCE, async || {
        let left = versions(&mesh.hub, "peers").await;
        let left: Vec<_> = left.keys().filter(|peer| peer.ends_with(&name)).collect();
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
    .await
    .unwrap();
    println!("its Peers gone {:.2} s after its Node", deleted.elapsed().as_secs_f64());
    wait_until("the broken link to be gone", PATIENCE, async || {
        let links = broken_links(mesh).await;
        match condition(&mesh.hub, "Degraded").await {
            (status, reason, _) if links.is_empty() && status == "False" && reason == "AllServed" => Ok(()),
            other => Err(format!("{links:?} {other:?}")),
        }
    })
    .await
    .unwrap();
    println!(
        "mended in the status {:.1} s after its Node went",
        deleted.elapsed().as_secs_f64()
    );

    // No line took two seconds all the while: else the stream has ended.
    let line = |log: &str| log.lines().last().unwrap_or_default().to_owned();
    let last = line(&stream.log());
    wait_until("the stream to go on", PATIENCE, async || match stream.log() {
        log if log.contains(" after ") && line(&log) != last => Ok(()),
        log => Err(line(&log)),
    })
    .await
    .unwrap();
    assert!(line(&stream.log()).contains(" after "), "{}", line(&stream.log()));
    println!("the stream's last line: {}", line(&stream.log()));
}

/// `wg-agent status` in an agent's pod, with these words: exit code and output.
async fn status(mesh: &Mesh<'_>, cluster: &Cluster<'_>, node: &str, words: &[&str]) -> (Option<i32>, String) {
    let agent = mesh.product.agent_pod(&cluster.plan().name, node).await.unwrap();
    let exec = ["-n", AGENT_NAMESPACE, "exec", &agent, "--", "/wg-agent", "status"];
    let output = cluster.try_kubectl([&exec[..], words].concat()).await.unwrap();
    (output.status.code(), output.stdout)
}

async fn status_of_a_healthy_node_says_what_is_there(mesh: &Mesh<'_>) {
    for (cluster, webs) in [(&mesh.hub, &mesh.hub_webs), (&mesh.member, &mesh.member_webs)] {
        let name = &webs[0].node;
        let node = mesh.lab.node(name);
        let show = async |what: &str| node.exec(["wg", "show", "kilo0", what]).await.unwrap().stdout;
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
        for says in [
            format!("Node      {name}, WireGuard address {address}\n"),
            format!("Key       {}\n", published_key(cluster, name).await),
            "Device    kilo0, userspace (--backend=userspace asks for it), MTU 1440, UDP port 51820\n".to_owned(),
        ] {
            assert!(page.contains(&says), "{says}{page}");
        }
        assert!(!page.contains("Troubles") && !page.contains("Left out"), "{page}");
        for peer in &peers {
            assert!(page.contains(peer), "{peer}: {page}");
        }
        let (code, state) = status(mesh, cluster, name, &["-o", "json"]).await;
        let state: serde_json::Value = serde_json::from_str(&state).unwrap();
        let told: BTreeMap<String, (String, String)> = (state["peers"].as_object().unwrap().iter())
            .map(|(name, peer)| {
                let text = |key: &str| peer[key].as_str().unwrap_or_default().to_owned();
                (name.clone(), (text("key"), text("liveEndpoint")))
            })
            .collect();
        assert_eq!(
            (code, told.keys().map(String::as_str).collect::<Vec<_>>()),
            (Some(0), peers)
        );
        let mut told: Vec<String> = told.into_values().map(|(key, at)| format!("{key}\t{at}")).collect();
        told.sort();
        let shown = show("endpoints").await;
        let mut shown: Vec<&str> = shown.lines().collect();
        shown.sort_unstable();
        assert_eq!(told, shown, "wg-agent status and wg show");
    }
}

/// `status.brokenLinks` as `from->to of total`.
async fn broken_links(mesh: &Mesh<'_>) -> Vec<String> {
    let object = json(&mesh.hub, &["-n", NAMESPACE, "get", "clustermesh", MESH]).await;
    let links = object["status"]["brokenLinks"].as_array().cloned().unwrap_or_default();
    let text = |link: &serde_json::Value| {
        let word = |key: &str| link[key].as_str().unwrap_or_default().to_owned();
        format!("{}->{} of {}", word("from"), word("to"), link["total"])
    };
    links.iter().map(text).collect()
}

/// Of the node that talks to a dead one: its agent, and the mesh, say so.
async fn a_link_that_is_down_is_told(mesh: &Mesh<'_>, talker: &str, dead: &str, since: Instant) {
    let link = format!("{}->{} of 3", mesh::HUB, mesh::MEMBER);
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
        "a dead node told {:.0} s after its power went",
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
    let (code, page) = status(mesh, &mesh.hub, talker, &[]).await;
    let peer = format!("{MESH}--{}--{dead}", mesh::MEMBER);
    let row = page.lines().find(|line| line.contains(&peer)).unwrap_or_default();
    assert!(code == Some(1) && row.contains(" down "), "{code:?}: {page}");
    assert_eq!(condition(&mesh.hub, "Ready").await.1, "Meshed");
}

async fn an_agent_restarts(mesh: &Mesh<'_>) {
    let (restarted, peer) = (&mesh.member_webs[0], &mesh.hub_webs[0]);
    let agent = mesh.product.agent_pod(mesh::MEMBER, &restarted.node).await.unwrap();
    let node = mesh.lab.node(&restarted.node);
    let pid = node.pids_of("wg-agent").unwrap();
    let delete = ["-n", AGENT_NAMESPACE, "delete", "pod", &agent, "--wait=true"];
    mesh.member.kubectl(delete).await.unwrap();
    let gone = Instant::now();
    let answer = wait_until("the next agent to carry data", PATIENCE, async || {
        let now = node.pids_of("wg-agent").map_err(|error| error.to_string())?;
        if now.is_empty() || now == pid {
            return Err(format!("agent {now:?}"));
        }
        let asked = mesh.lab.ask(&pod(restarted), &url(peer.ip, 8080)).await;
        asked.map_err(|error| error.to_string())?
    })
    .await
    .unwrap();
    assert_eq!(answer, mesh.seen(peer, restarted.ip));
    println!(
        "data again {:.2} s after the agent's pod was gone",
        gone.elapsed().as_secs_f64()
    );
    let answer = mesh.answered(&pod(peer), &url(restarted.ip, 8080)).await;
    assert_eq!(answer, mesh.seen(restarted, peer.ip));
}

/// The longest time without a reply in what `ping -D` has printed so far, and when the last one came.
fn longest_silence(log: &str) -> (f64, f64) {
    let replies = log.lines().filter(|line| line.contains("bytes from"));
    let times = replies.filter_map(|line| line.strip_prefix('[')?.split_once(']')?.0.parse::<f64>().ok());
    let times: Vec<f64> = times.collect();
    let longest = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    (longest, times.last().copied().unwrap_or_default())
}

/// How many of the packets that `ping` sent so far, but for the last second's, were not answered, and how many those are.
fn unanswered(log: &str) -> (usize, usize) {
    let replies = log.lines().filter(|line| line.contains("bytes from"));
    let numbers = replies.filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok());
    let numbers: BTreeSet<usize> = numbers.collect();
    let sent = numbers.last().copied().unwrap_or_default();
    (sent - numbers.len(), sent)
}

/// The WireGuard address that a node has published.
async fn wireguard_address(cluster: &Cluster<'_>, node: &str) -> String {
    let node = json(cluster, &["get", "node", node]).await;
    let address = node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"]
        .as_str()
        .unwrap();
    address.split_once('/').unwrap().0.to_owned()
}

/// What the agent of a node published as its key.
async fn published_key(cluster: &Cluster<'_>, node: &str) -> String {
    let node = json(cluster, &["get", "node", node]).await;
    node["metadata"]["annotations"]["kilo.squat.ai/key"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

async fn a_flow_outlives_an_upgrade_of_the_agents_and_a_new_key(mesh: &Mesh<'_>) {
    let (from, to) = (&mesh.member_webs[0], &mesh.hub_webs[0]);
    let (node, remote) = (mesh.lab.node(&from.node), mesh.lab.node(&to.node));
    let ping = ["ping", "-n", "-D", "-i", "0.05", &to.ip.to_string()];
    let flow = |name| node.pod_spawn(name, from.ip, ping);
    let goes_on = async |flow: &clustermesh_lab::Running, what: &str| {
        let before = longest_silence(&flow.log()).1;
        wait_until("the flow to go on", PATIENCE, async || {
            match longest_silence(&flow.log()) {
                (_, last) if last > before => Ok(()),
                (_, last) => Err(format!("last reply at {last}")),
            }
        })
        .await
        .unwrap();
        println!(
            "{what}: at most {:.2} s without a reply, of 20 a second",
            longest_silence(&flow.log()).0
        );
    };

    // A new pod on every node, one after the other, as a new image brings it. Nothing for the mesh passes beside the tunnel
    // while there is none.
    let capture = mesh.lab.capture("upgrade", "ip").await.unwrap();
    let mut pings = flow("ping-upgrade").unwrap();
    pings.says("icmp_seq=20 ", PATIENCE).await.unwrap();
    let before = (
        NodeState::of(&node).await,
        published_key(&mesh.member, &from.node).await,
    );
    let old = node.pids_of("wg-agent").unwrap();
    let restart = ["-n", AGENT_NAMESPACE, "rollout", "restart", "daemonset/wg-agent"];
    mesh.member.kubectl(restart).await.unwrap();
    mesh.member
        .rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
        .await
        .unwrap();
    goes_on(&pings, "an upgrade of the member's agents").await;
    let (lost, sent) = unanswered(&pings.log());
    println!("an upgrade of the member's agents: {lost} of {sent} packets without a reply");
    let captured = capture.stop().await.unwrap();
    assert!(mesh.tunnelled(&captured).await > 0, "the capture hears the wire");
    assert_eq!(mesh.in_clear(&captured).await, Vec::<String>::new());
    let now = node.pids_of("wg-agent").unwrap();
    assert!(now.len() == 1 && now != old, "{old:?} {now:?}");
    let after = (
        NodeState::of(&node).await,
        published_key(&mesh.member, &from.node).await,
    );
    assert_eq!(
        after, before,
        "nothing is added and nothing is missing, and it is the same node"
    );
    drop(pings);

    // As README.md says.
    let mut pings = flow("ping-key").unwrap();
    pings.says("icmp_seq=20 ", PATIENCE).await.unwrap();
    let agent = mesh.product.agent_pod(mesh::MEMBER, &from.node).await.unwrap();
    let rotate = ["-n", AGENT_NAMESPACE, "exec", &agent, "--", "/wg-agent", "rotate-key"];
    mesh.member.kubectl(rotate).await.unwrap();
    let new = wait_until("the new key on the other side", PATIENCE, async || {
        let new = published_key(&mesh.member, &from.node).await;
        let words = ["wg", "show", "kilo0", "latest-handshakes"];
        let said = remote.exec(words).await.map_err(|error| error.to_string())?.stdout;
        let line = said.lines().find(|line| line.starts_with(&new));
        let waits = node
            .try_exec(["test", "-e", "/var/lib/kilo/key.next"])
            .await
            .map_err(|error| error.to_string())?;
        match line {
            Some(line) if new != before.1 && !line.ends_with("\t0") && !waits.status.success() => Ok(new.clone()),
            _ => Err(format!("{new}: {said}")),
        }
    })
    .await
    .unwrap();
    goes_on(&pings, "a new key").await;
    drop(pings);
    mesh.product.ready().await.unwrap();
    assert_eq!(published_key(&mesh.member, &from.node).await, new);
    assert_eq!(NodeState::of(&node).await, before.0);
    let answer = mesh.answered(&pod(to), &url(from.ip, 8080)).await;
    assert_eq!(answer, mesh.seen(from, to.ip));
}

/// Peers and policies of both clusters with their resourceVersions.
async fn everything_written(mesh: &Mesh<'_>) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for cluster in [&mesh.hub, &mesh.member] {
        for kind in ["peers", "peerpolicies"] {
            for (name, version) in versions(cluster, kind).await {
                all.insert(format!("{} {kind} {name}", cluster.plan().name), version);
            }
        }
    }
    assert!(all.len() >= 6, "two Peers and a policy in each: {all:?}");
    all
}

/// Scales the hub's web servers and waits until the member's mirrored Service has exactly the pods that are left.
async fn backends_follow(mesh: &mut Mesh<'_>, replicas: usize) {
    let scale = format!("--replicas={replicas}");
    mesh.hub.kubectl(["scale", "deployment/web", &scale]).await.unwrap();
    let start = Instant::now();
    wait_until(format!("{replicas} endpoints of hub-web"), PATIENCE, async || {
        let webs = mesh.hub.webs().await.map_err(|error| error.to_string())?;
        let mut pods: Vec<String> = webs.iter().map(|web| web.ip.to_string()).collect();
        pods.sort();
        let selector = "kubernetes.io/service-name=hub-web";
        let slices = json(&mesh.member, &["get", "endpointslices", "-l", selector]).await;
        let slices = slices["items"].as_array().unwrap().iter();
        let endpoints = slices.flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten());
        let ready = endpoints.filter(|endpoint| endpoint["conditions"]["ready"] == true);
        let mut addresses: Vec<String> = ready
            .map(|endpoint| endpoint["addresses"][0].as_str().unwrap_or_default().to_owned())
            .collect();
        addresses.sort();
        if pods.len() == replicas && addresses == pods {
            Ok(())
        } else {
            Err(format!("{pods:?}: {addresses:?}"))
        }
    })
    .await
    .unwrap();
    println!(
        "{replicas} endpoints {:.2} s after scaling",
        start.elapsed().as_secs_f64()
    );
    mesh.hub_webs = mesh.hub.webs().await.unwrap();
    let service = mesh.member.cluster_ip("default", "hub-web").await.unwrap();
    for from in &mesh.member_webs {
        let want: Vec<_> = mesh.hub_webs.iter().map(|to| mesh.seen(to, from.ip)).collect();
        mesh.answers(&pod(from), &url(service, 80), &want).await;
    }
}

/// The controller's pod.
async fn controller_pod(hub: &Cluster<'_>) -> serde_json::Value {
    let pods = json(hub, &["-n", NAMESPACE, "get", "pods"]).await;
    let live = |pod: &&serde_json::Value| pod["metadata"]["deletionTimestamp"].is_null();
    let live: Vec<_> = pods["items"].as_array().unwrap().iter().filter(live).cloned().collect();
    assert_eq!(live.len(), 1, "{pods:#}");
    live[0].clone()
}

async fn a_deleted_controller_rewrites_nothing_and_its_successor_works(mesh: &mut Mesh<'_>) {
    let written = everything_written(mesh).await;
    let old = controller_pod(&mesh.hub).await["metadata"]["name"]
        .as_str()
        .unwrap()
        .to_owned();
    mesh.hub
        .kubectl(["-n", NAMESPACE, "delete", "pod", &old])
        .await
        .unwrap();
    mesh.hub
        .rollout(NAMESPACE, "deployment/clustermesh-controller")
        .await
        .unwrap();
    // That it follows a backend shows that it has seen both clusters.
    backends_follow(mesh, 1).await;
    backends_follow(mesh, 2).await;
    mesh.product.ready().await.unwrap();
    assert_eq!(everything_written(mesh).await, written);
}

async fn a_new_token_is_taken_up_without_a_restart_or_a_write(mesh: &mut Mesh<'_>) {
    let written = everything_written(mesh).await;
    let runs = controller_pod(&mesh.hub).await;
    let secret = json(
        &mesh.member,
        &["-n", NAMESPACE, "get", "secret", "clustermesh-controller"],
    )
    .await;
    let old = decoded(&mesh.member, secret["data"]["token"].as_str().unwrap()).await;
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
    assert!(kubeconfig.contains(&old), "the Secret was made of the old token");
    std::fs::write(&file, kubeconfig.replace(&old, &new)).unwrap();
    let from = format!("--from-file=value={}", file.display());
    let make = [
        "create",
        "secret",
        "generic",
        "tenant-a-kubeconfig",
        &from,
        "--dry-run=client",
        "-o",
        "yaml",
    ];
    let made = mesh
        .hub
        .kubectl([&["-n", NAMESPACE][..], &make].concat())
        .await
        .unwrap()
        .stdout;
    mesh.hub.apply(&made).await.unwrap();
    // The old one ends; from then on only the new one opens anything.
    mesh.member
        .kubectl(["-n", NAMESPACE, "delete", "secret", "clustermesh-controller"])
        .await
        .unwrap();
    let server = format!("https://{}:6443/api/v1/nodes", mesh.member.plan().api_address());
    let bearer = format!("Authorization: Bearer {old}");
    wait_until("the old token to be refused", PATIENCE, async || {
        let words = [
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
            .run_at(&host("tenant-a-1"), &words)
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
    backends_follow(mesh, 1).await;
    backends_follow(mesh, 2).await;
    mesh.product.ready().await.unwrap();
    assert_eq!(everything_written(mesh).await, written);
    let still = controller_pod(&mesh.hub).await;
    let restarts = |pod: &serde_json::Value| pod["status"]["containerStatuses"][0]["restartCount"].clone();
    assert_eq!(
        (&still["metadata"]["name"], restarts(&still)),
        (&runs["metadata"]["name"], restarts(&runs))
    );
}

/// base64, by a program that everyone has.
async fn decoded(cluster: &Cluster<'_>, text: &str) -> String {
    let node = &cluster.nodes()[0];
    node.feed(["base64", "-d"], text).await.unwrap().stdout
}

async fn a_frozen_api_server_of_a_member_costs_a_condition_and_nothing_else(mesh: &Mesh<'_>) {
    let written = everything_written(mesh).await;
    mesh.member.freeze_api().unwrap();
    let frozen = Instant::now();
    let reason = wait_until("Ready to say that the member does not answer", PATIENCE, async || {
        let (status, reason, message) = condition(&mesh.hub, "Ready").await;
        match (status.as_str(), reason.as_str()) {
            ("False", "MemberStale" | "MemberUnreachable") => Ok((reason, message)),
            _ => Err(format!("{status} {reason}: {message}")),
        }
    })
    .await
    .unwrap();
    println!("{:.1} s after the freeze: {reason:?}", frozen.elapsed().as_secs_f64());
    for (ours, theirs) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for from in ours {
            for to in theirs {
                let asked = mesh.lab.ask(&pod(from), &url(to.ip, 8080)).await.unwrap();
                assert_eq!(
                    asked,
                    Ok(mesh.seen(to, from.ip)),
                    "{from:?} while the API server stands still"
                );
            }
        }
    }
    mesh.member.thaw_api().unwrap();
    let thawed = Instant::now();
    mesh.product.ready().await.unwrap();
    println!("Ready {:.1} s after the thaw", thawed.elapsed().as_secs_f64());
    assert_eq!(everything_written(mesh).await, written);
}

async fn a_deleted_mesh_takes_everything_away(mesh: &Mesh<'_>) {
    let start = Instant::now();
    let delete = ["-n", NAMESPACE, "delete", "clustermesh", MESH, "--timeout=60s"];
    mesh.hub.kubectl(delete).await.unwrap();
    println!("the finalizer let go after {:.2} s", start.elapsed().as_secs_f64());
    let nothing: BTreeMap<String, String> = BTreeMap::new();
    for cluster in [&mesh.hub, &mesh.member] {
        for kind in ["peers", "peerpolicies"] {
            assert_eq!(
                versions(cluster, kind).await,
                nothing,
                "{kind} of {}",
                cluster.plan().name
            );
        }
        for kind in ["services", "endpointslices"] {
            let left = versions(cluster, kind).await;
            let left: Vec<_> = left.keys().filter(|name| name.contains("hub-web")).collect();
            assert!(left.is_empty(), "{kind} of {}: {left:?}", cluster.plan().name);
        }
    }
    assert_eq!(versions(&mesh.hub, "clustermeshes").await, nothing);
    for node in ["mgmt-1", "mgmt-2", "tenant-a-1", "tenant-a-2"].map(|name| mesh.lab.node(name)) {
        wait_until(
            format!("the agent of {} to hold nothing", node.name()),
            PATIENCE,
            async || {
                let run = async |words: &[&str]| {
                    node.exec(words)
                        .await
                        .map(|output| output.stdout)
                        .map_err(|e| e.to_string())
                };
                let peers = run(&["wg", "show", "kilo0", "peers"]).await?;
                let routes = run(&["ip", "-j", "route", "show", "table", "5182"]).await?;
                let routes: serde_json::Value = serde_json::from_str(&routes).map_err(|error| error.to_string())?;
                // What the underlay needs may stay exempt.
                let routes = routes
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|route| route["type"] != "throw");
                let routes: Vec<String> = routes.map(ToString::to_string).collect();
                if peers.is_empty() && routes.is_empty() {
                    Ok(())
                } else {
                    Err(format!("{peers}{routes:#?}"))
                }
            },
        )
        .await
        .unwrap();
    }
}

/// The words of README.md, "Removing it".
async fn cleanup_leaves_the_nodes_as_they_were(mesh: &Mesh<'_>, before: &BTreeMap<String, NodeState>) {
    let patch = r#"[
        {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["cleanup"]},
        {"op": "replace", "path": "/spec/updateStrategy/rollingUpdate/maxUnavailable", "value": "100%"}]"#;
    for cluster in [&mesh.hub, &mesh.member] {
        let words = [
            "-n",
            AGENT_NAMESPACE,
            "patch",
            "daemonset",
            "wg-agent",
            "--type=json",
            "-p",
            patch,
        ];
        cluster.kubectl(words).await.unwrap();
        let done = "nothing of wg-agent is left on this node but its key";
        wait_until(
            format!("every agent of {} to say so", cluster.plan().name),
            PATIENCE,
            async || {
                let selector = "app.kubernetes.io/name=wg-agent";
                let words = ["-n", AGENT_NAMESPACE, "logs", "-l", selector, "--prefix", "--tail=2"];
                let said = cluster
                    .try_kubectl(words)
                    .await
                    .map_err(|error| error.to_string())?
                    .stdout;
                let pods: BTreeSet<&str> = said
                    .lines()
                    .filter(|line| line.contains(done))
                    .filter_map(|line| line.split(' ').next())
                    .collect();
                if pods.len() == 2 { Ok(()) } else { Err(said) }
            },
        )
        .await
        .unwrap();
        let deploy = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/agent.yaml");
        cluster
            .kubectl(["delete", "--ignore-not-found", "-f", deploy])
            .await
            .unwrap();
    }
    for (name, before) in before {
        let node = mesh.lab.node(name);
        assert_eq!(node.pids_of("wg-agent").unwrap(), Vec::<i32>::new());
        assert_eq!(&NodeState::of(&node).await, before, "{name}");
        assert_eq!(node.exec(["ls", "/var/lib/kilo"]).await.unwrap().stdout, "key\n");
    }
}
