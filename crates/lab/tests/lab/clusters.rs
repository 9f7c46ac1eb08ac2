//! Tests that whole clusters run pods and recover from power cuts, and what is left of a lab that is dropped, killed or kept.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clustermesh_lab::{Cluster, ImageSpec, Lab, LabPlan, down_kept, running_labs, wait_until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Environment variable with the file into which the process of [`start_owner`] writes its lab's directory.
const OWNER_FILE: &str = "LAB_TEST_OWNER_FILE";

/// A pod of the test's Deployment.
struct WebPod {
    name: String,
    node: String,
    ip: IpAddr,
}

async fn web_pods(cluster: &Cluster<'_>) -> Vec<WebPod> {
    let pods: Api<Pod> = Api::namespaced(cluster.client().await.unwrap(), "default");
    let pods = pods.list(&ListParams::default().labels("app=web")).await.unwrap();
    let web = |pod: Pod| {
        let status = pod.status?;
        (status.phase.as_deref() == Some("Running") && pod.metadata.deletion_timestamp.is_none()).then_some(())?;
        Some(WebPod {
            name: pod.metadata.name?,
            node: pod.spec?.node_name?,
            ip: status.pod_ip?.parse().ok()?,
        })
    };
    let mut webs: Vec<_> = pods.into_iter().filter_map(web).collect();
    webs.sort_by(|a, b| a.node.cmp(&b.node));
    webs
}

#[tokio::test]
async fn two_separate_clusters_work_and_are_removed_completely() {
    let start = Instant::now();
    let lab = Lab::start(LabPlan::clusters(&[("mgmt", 2), ("tenant-a", 2)]))
        .await
        .unwrap();
    println!("up in {:.1} s", start.elapsed().as_secs_f64());
    for name in ["mgmt", "tenant-a"] {
        let cluster = lab.cluster(name);
        cluster.apply(include_str!("clusters.yaml")).await.unwrap();
        cluster.wait_for_rollout("default", "daemonset/agent").await.unwrap();
        cluster.wait_for_rollout("default", "deployment/web").await.unwrap();
        check_workloads(&cluster).await;
    }
    println!("rolled out and checked after {:.1} s", start.elapsed().as_secs_f64());

    // The underlay connects the nodes of both clusters, but a pod of one cluster does not reach a pod of the other.
    let (ours, theirs) = (
        web_pods(&lab.cluster("mgmt")).await,
        web_pods(&lab.cluster("tenant-a")).await,
    );
    let url = format!("http://{}:8080", theirs[0].ip);
    let from = &ours[0];
    let answer = lab
        .node(&from.node)
        .pod_exec(from.ip, ["curl", "-sS", "-m", "2", &url])
        .await
        .unwrap();
    assert!(!answer.status.success(), "reached {url}: {}", answer.stdout);

    check_capture_and_masquerading(&lab, &ours[0]).await;
    check_node_changes(&lab).await;
    let directory = lab.directory().to_owned();
    drop(lab);
    assert_eq!(leftovers(&directory), Vec::<String>::new());
}

/// Checks logs, exec, connections between pods, Services, DNS, access to the API, seccomp, and what the DaemonSet `agent` of
/// clusters.yaml needs: its TUN device, its file in /var/lib/kilo, and its privileged init container, which writes a sysctl.
async fn check_workloads(cluster: &Cluster<'_>) {
    let webs = web_pods(cluster).await;
    let nodes: Vec<_> = cluster.nodes().iter().map(|node| node.name().to_owned()).collect();
    assert_eq!(
        webs.iter().map(|web| web.node.clone()).collect::<Vec<_>>(),
        nodes,
        "one web pod on each node"
    );
    for from in &webs {
        assert!(
            cluster
                .kubectl(["logs", &from.name])
                .await
                .unwrap()
                .stdout
                .starts_with("serving on")
        );
        let mut argv = vec![
            "exec".to_owned(),
            from.name.clone(),
            "--".into(),
            "/bin/probe".into(),
            "get".into(),
        ];
        argv.extend(webs.iter().map(|to| format!("http://{}:8080", to.ip)));
        argv.push("http://web.default.svc.cluster.local".into());
        // kube-proxy on a node rejects connections to a Service until it knows the Service's endpoints.
        let answers = async || {
            let output = cluster.kubectl(&argv).await.map_err(|error| error.to_string())?;
            Ok(output.stdout)
        };
        let output = wait_until("the pods and the Service to answer", Duration::from_secs(30), answers)
            .await
            .unwrap();
        for (line, to) in output.lines().zip(&webs) {
            let want = format!(
                "http://{}:8080 200 hello from {} on {} to {}:",
                to.ip, to.name, to.node, from.ip
            );
            assert!(line.starts_with(&want), "{line:?} does not start with {want:?}");
        }
        assert!(
            output.lines().last().unwrap().contains("200 hello from web-"),
            "{output}"
        );
        let status = cluster
            .kubectl(["exec", &from.name, "--", "grep", "^Seccomp:", "/proc/1/status"])
            .await
            .unwrap();
        assert_eq!(status.stdout, "Seccomp:\t2\n");

        let credentials = "/var/run/secrets/kubernetes.io/serviceaccount";
        let read = async |file: &str| {
            cluster
                .kubectl(["exec", &from.name, "--", "cat", &format!("{credentials}/{file}")])
                .await
                .unwrap()
                .stdout
        };
        let (token, ca) = (read("token").await, read("ca.crt").await);
        let node = cluster
            .nodes()
            .into_iter()
            .find(|node| node.name() == from.node)
            .unwrap();
        node.exec_with_stdin(["tee", "/tmp/ca.crt"], &ca).await.unwrap();
        let api = format!("https://{}/api", cluster.plan().api_service_ip());
        let bearer = format!("Authorization: Bearer {token}");
        let curl = ["curl", "-sS", "-m", "5", "--cacert", "/tmp/ca.crt", "-H", &bearer, &api];
        let answer = node.pod_exec(from.ip, curl).await.unwrap();
        assert!(answer.stdout.contains("\"APIVersions\""), "{answer:?}");
    }
    for node in cluster.nodes() {
        let cluster_ip = ["get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"];
        let url = format!("http://{}", cluster.kubectl(cluster_ip).await.unwrap().stdout);
        let answer = node.exec(["curl", "-sS", "-m", "5", &url]).await.unwrap();
        assert!(answer.stdout.starts_with("hello from web-"), "{}", answer.stdout);
        assert_eq!(node.exec(["cat", "/var/lib/kilo/key"]).await.unwrap().stdout, "key\n");
        assert_eq!(
            node.exec(["cat", "/proc/sys/net/ipv4/conf/default/rp_filter"])
                .await
                .unwrap()
                .stdout,
            "2\n"
        );
    }
    let agents = cluster
        .kubectl(["logs", "-l", "app=agent", "--prefix=false"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(
        agents.matches("/dev/net/tun").count(),
        cluster.nodes().len(),
        "{agents}"
    );
}

/// Checks that a pod's connection to a host outside the cluster is masqueraded with the address of the pod's node, and that a capture
/// on the underlay shows this.
async fn check_capture_and_masquerading(lab: &Lab, web: &WebPod) {
    let node = lab.node(&web.node);
    let outside = lab.add_host("outside", "172.30.9.9".parse().unwrap()).await.unwrap();
    let probe = env!("CARGO_BIN_EXE_lab-probe");
    let mut server = outside.spawn("serve", [probe, "serve", ":8080"]).unwrap();
    server
        .wait_for_log("serving on", Duration::from_secs(10))
        .await
        .unwrap();
    let capture = lab.capture("outside", "tcp port 8080").await.unwrap();
    let answer = node
        .pod_exec(web.ip, ["curl", "-sS", "-m", "5", "http://172.30.9.9:8080"])
        .await
        .unwrap();
    assert!(
        answer.stdout.contains(&format!(" to {}:", node.address())),
        "{answer:?}"
    );
    let captured = capture.stop().await.unwrap();
    assert!(
        captured
            .packets(&format!("src {}", node.address()))
            .await
            .unwrap()
            .len()
            >= 3
    );
    assert_eq!(
        captured.packets(&format!("host {}", web.ip)).await.unwrap(),
        Vec::<String>::new()
    );
}

/// Checks a power cut, a node that joins, an image that is loaded into the running cluster, and a killed kubelet.
async fn check_node_changes(lab: &Lab) {
    let tenant = lab.cluster("tenant-a");
    let cut = lab.node("tenant-a-2");
    cut.exec(["ip", "link", "add", "mark0", "type", "bridge"])
        .await
        .unwrap();
    cut.power_cut().await.unwrap();
    assert!(!cut.is_up());
    assert!(cut.exec(["true"]).await.is_err());
    let start = Instant::now();
    cut.power_on().await.unwrap();
    println!(
        "Ready again {:.1} s after the power was restored",
        start.elapsed().as_secs_f64()
    );
    assert!(
        !cut.try_exec(["ip", "link", "show", "mark0"])
            .await
            .unwrap()
            .status
            .success(),
        "kernel state survived"
    );

    let start = Instant::now();
    let joined = tenant.join_node().await.unwrap();
    println!("{} joined in {:.1} s", joined.name(), start.elapsed().as_secs_f64());
    assert_eq!(joined.name(), "tenant-a-3");

    let archive = lab.directory().join("late.tar");
    let probe = Path::new(env!("CARGO_BIN_EXE_lab-probe"));
    let image = ImageSpec::new("lab.local/late:7").program(probe, "/probe").unwrap();
    image.entrypoint(&["/probe", "serve", ":8080"]).write(&archive).unwrap();
    tenant.load_image(&archive).await.unwrap();
    let overrides = r#"{"spec": {"nodeName": "tenant-a-3", "terminationGracePeriodSeconds": 1}}"#;
    let run = [
        "run",
        "late",
        "--image=lab.local/late:7",
        "--image-pull-policy=IfNotPresent",
        "--overrides",
        overrides,
    ];
    tenant.kubectl(run).await.unwrap();
    tenant
        .kubectl(["wait", "pod/late", "--for=condition=Ready", "--timeout=60s"])
        .await
        .unwrap();
    // An older node has a route to the new node's pod.
    let ip = tenant
        .kubectl(["get", "pod", "late", "-o", "jsonpath={.status.podIP}"])
        .await
        .unwrap()
        .stdout;
    let url = format!("http://{ip}:8080");
    let client = lab.node("tenant-a-1");
    let answer = client.exec(["curl", "-sS", "-m", "5", &url]).await.unwrap();
    assert!(answer.stdout.starts_with("hello from late "), "{answer:?}");
    assert!(
        answer.stdout.contains(&format!(" to {}:", client.address())),
        "{answer:?}"
    );

    // A killed service is restarted with another pid.
    let before = joined.pids_of("kubelet").unwrap();
    joined.signal("kubelet", Signal::SIGKILL).unwrap();
    wait_until("a new kubelet", Duration::from_secs(20), async || {
        match joined.pids_of("kubelet") {
            Ok(pids) if !pids.is_empty() && pids != before => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn killed_owner_leaves_nothing_behind() {
    // If this variable is set, this process is the owner that `start_owner` started.
    if let Some(file) = std::env::var_os(OWNER_FILE) {
        let lab = Lab::start(LabPlan::clusters(&[("solo", 1)])).await.unwrap();
        std::fs::write(file, lab.directory().as_os_str().as_encoded_bytes()).unwrap();
        return std::future::pending().await;
    }
    let (mut owner, directory) = start_owner().await;
    kill(Pid::from_raw(i32::try_from(owner.id()).unwrap()), Signal::SIGKILL).unwrap();
    owner.wait().unwrap();
    wait_until(
        "the lab of the killed owner to disappear",
        Duration::from_secs(30),
        async || match leftovers(&directory) {
            left if left.is_empty() => Ok(()),
            left => Err(left.join(", ")),
        },
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn killed_supervisor_leaves_only_files_which_next_lab_removes() {
    let (mut owner, directory) = start_owner().await;
    let pid: i32 = std::fs::read_to_string(directory.join("supervisor.pid"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let processes = |directory: &Path| {
        let left = leftovers(directory);
        left.into_iter()
            .filter(|what| !what.starts_with('/'))
            .collect::<Vec<_>>()
    };
    wait_until(
        "the lab's processes to exit",
        Duration::from_secs(30),
        async || match processes(&directory) {
            left if left.is_empty() => Ok(()),
            left => Err(left.join(", ")),
        },
    )
    .await
    .unwrap();
    owner.kill().unwrap();
    owner.wait().unwrap();
    // The start of any lab removes the files of dead labs.
    drop(Lab::start(LabPlan::default()).await.unwrap());
    assert_eq!(leftovers(&directory), Vec::<String>::new());
}

#[tokio::test]
async fn kept_lab_continues_until_it_is_taken_down() {
    let mut lab = Lab::start(LabPlan::control_planes(&["mgmt"])).await.unwrap();
    lab.keep().unwrap();
    let directory = lab.directory().to_owned();
    drop(lab);
    let attached = Lab::attach(&directory).unwrap();
    assert_eq!(
        attached
            .cluster("mgmt")
            .kubectl(["get", "--raw", "/readyz"])
            .await
            .unwrap()
            .stdout,
        "ok"
    );
    let owned = Lab::start(LabPlan::default()).await.unwrap();
    // `down_kept` must not take down a kept lab that is not in its list, such as a developer's.
    let mut other = Lab::start(LabPlan::default()).await.unwrap();
    other.keep().unwrap();
    let other_directory = other.directory().to_owned();
    drop(other);
    assert_eq!(down_kept([directory.clone(), owned.directory().to_owned()]).unwrap(), 1);
    assert_eq!(leftovers(&directory), Vec::<String>::new());
    assert!(
        running_labs().contains(&owned.directory().to_owned()),
        "a lab with a living owner was taken down"
    );
    assert!(attached.down().is_ok(), "taking down a missing lab failed");
    assert!(!running_labs().contains(&directory));
    assert!(
        running_labs().contains(&other_directory),
        "another kept lab was taken down"
    );
    assert!(Lab::attach(&other_directory).unwrap().down().is_ok());
}

/// Starts this test program as the owner of a lab with one node, and returns the process and the lab's directory. The
/// process runs only `killed_owner_leaves_nothing_behind`, which starts the lab and waits if [`OWNER_FILE`] is set.
async fn start_owner() -> (std::process::Child, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lab");
    let owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "clusters::killed_owner_leaves_nothing_behind"])
        .env(OWNER_FILE, &file)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let lab = wait_until(
        "the owner to start its lab",
        Duration::from_secs(150),
        async || match std::fs::read_to_string(&file) {
            Ok(text) if !text.is_empty() => Ok(PathBuf::from(text)),
            other => Err(format!("{other:?}")),
        },
    )
    .await
    .unwrap();
    (owner, lab)
}

/// The paths and processes ("pid command line") of a lab that still exist.
fn leftovers(directory: &Path) -> Vec<String> {
    let name = directory.file_name().unwrap().to_str().unwrap().to_owned();
    let mut left = vec![];
    if directory.exists() {
        left.push(directory.display().to_string());
    }
    // The hierarchies of cgroup v1 are folders in /sys/fs/cgroup. The only one of cgroup v2 is /sys/fs/cgroup itself.
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup")
        .unwrap()
        .map(|entry| entry.unwrap().path());
    for root in hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]) {
        let cgroup = root.join("clustermesh-lab").join(&name);
        if cgroup.exists() {
            left.push(cgroup.display().to_string());
        }
    }
    if std::fs::read_to_string("/proc/mounts").unwrap().contains(&name) {
        left.push("/proc/mounts".into());
    }
    let own = std::process::id().to_string();
    for entry in std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()) {
        let pid = entry.file_name().into_string().unwrap();
        let read = |file: &str| std::fs::read(entry.path().join(file)).unwrap_or_default();
        let [line, cgroup] = ["cmdline", "cgroup"].map(|file| String::from_utf8_lossy(&read(file)).into_owned());
        let is_other_process = pid.parse::<u32>().is_ok() && pid != own;
        if is_other_process && (line.contains(directory.to_str().unwrap()) || cgroup.contains(&name)) {
            left.push(format!("{pid} {}", line.replace('\0', " ")));
        }
    }
    left
}
