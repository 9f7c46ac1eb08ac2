//! Reads the rights of our processes on a node from /proc, and checks that they are exactly those that `deploy/` grants.
//! This file lists the expected rights. Also checks that an agent's token can change only annotations of its own Node.

use super::*;

/// User, capabilities, no_new_privs and seccomp mode of the only process with that name, from /proc.
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

/// The writable mounts of the only process with that name, and which of `/`, `/proc/sys` and `/sys` are read-only for
/// it (proc_pid_mountinfo(5)). Left out are mounts that the container runtime adds in /dev and /proc and for cgroup v1,
/// because the Pod cannot choose them.
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
    let is_of_runtime = |path: &str| {
        let added = [
            "/dev",
            "/dev/pts",
            "/dev/shm",
            "/dev/mqueue",
            "/dev/termination-log",
            "/sys/fs/cgroup",
        ];
        path.starts_with("/proc") || added.contains(&path)
    };
    let writable = mounts
        .iter()
        .filter(|(path, writable)| **writable && !is_of_runtime(path));
    let read_only = ["/", "/proc/sys", "/sys"]
        .into_iter()
        .filter(|path| mounts.get(*path) == Some(&false));
    (
        writable.map(|(path, _)| path.clone()).collect(),
        read_only.map(str::to_owned).collect(),
    )
}

pub(super) async fn processes_have_exactly_the_rights_of_deploy(mesh: &Mesh<'_>) {
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
            of("Seccomp", "2"), // SECCOMP_MODE_FILTER
        ]
        .into()
    };
    for cluster in [&mesh.hub, &mesh.member] {
        for node in cluster.nodes() {
            // CAP_NET_ADMIN is number 12 in linux/capability.h.
            assert_eq!(rights(&node, "wg-agent"), expected("0", 1 << 12), "{}", node.name());
            let writable = ["/dev/net/tun", "/etc/hosts", "/var/lib/kilo", "/var/run/wireguard"].map(String::from);
            let read_only = ["/", "/proc/sys", "/sys"].map(String::from);
            assert_eq!(
                mounts(&node, "wg-agent"),
                (writable.into(), read_only.into()),
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

/// Uses the token that the kubelet gave to the agent's pod.
// threat: stolen-agent-token
pub(super) async fn agent_token_cannot_change_another_node(mesh: &Mesh<'_>) {
    for cluster in [&mesh.hub, &mesh.member] {
        let nodes = cluster.nodes();
        let [own, other] = &nodes[..] else {
            panic!("{nodes:?}");
        };
        let pids = own.pids_of("wg-agent").unwrap();
        let token = format!(
            "/proc/{}/root/var/run/secrets/kubernetes.io/serviceaccount/token",
            pids[0]
        );
        let token = format!("authorization: Bearer {}", std::fs::read_to_string(token).unwrap());
        let patch = async |node: &Node<'_>, change: &str| {
            let api = cluster.plan().api_address();
            let url = format!("https://{api}:6443/api/v1/nodes/{}?dryRun=All", node.name());
            let patch_type = "content-type: application/merge-patch+json";
            let command = [
                "curl", "-sSk", "-X", "PATCH", "-H", &token, "-H", patch_type, "-d", change, &url,
            ];
            let answer: serde_json::Value = serde_json::from_str(&own.exec(command).await.unwrap().stdout).unwrap();
            answer["message"].as_str().map(|message| {
                let (_, reason) = message.split_once(" denied request: ").expect(message);
                reason.to_owned()
            })
        };
        let set_key = r#"{"metadata": {"annotations": {"kilo.squat.ai/key": "x"}}}"#;
        assert_eq!(patch(own, set_key).await, None);
        let elsewhere = format!(
            "an agent may write only its own Node, and this token does not belong to a pod on {name}; an agent outside the DaemonSet \
             needs the account clustermesh-agent/wg-agent.{name}",
            name = other.name()
        );
        for (node, change, refused) in [
            (other, set_key, &*elsewhere),
            (other, r#"{"spec": {"unschedulable": true}}"#, &*elsewhere),
            (
                own,
                r#"{"metadata": {"labels": {"a": "b"}}}"#,
                "an agent may write only annotations of its Node",
            ),
        ] {
            assert_eq!(patch(node, change).await.as_deref(), Some(refused), "{change}");
        }
    }
}
