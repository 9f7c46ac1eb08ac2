//! Tests a controller with a low memory limit and members whose API servers send endless responses.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::{
    https_server,
    test_env::{LATER, SOON, TestEnv},
};
use kube::ResourceExt;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::TlsAcceptor;

use crate::sandbox;

const MIB: usize = 1024 * 1024;
/// Memory limit of the controller.
const LIMIT: usize = 256 * MIB;
/// Length of an endless response, if a client reads all of it.
const RESPONSE_LENGTH: usize = 2048 * MIB;
const ADDRESS: &str = "172.30.1.201";

/// What a server sends without end. Its other responses are valid: empty lists, watches without events, and `/version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flood {
    /// Lists of Nodes in which one name is endless.
    List,
    /// Lists of an endless number of small values, which need much more memory when parsed than as text.
    Values,
    /// Watches with one endless line.
    Line,
    /// An endless number of Nodes, in pages of normal size; no Node exceeds a limit.
    Objects,
    /// All responses, with an error status.
    Error,
    /// `/version`.
    Version,
}

impl Flood {
    const ALL: [Self; 6] = [
        Self::List,
        Self::Values,
        Self::Line,
        Self::Objects,
        Self::Error,
        Self::Version,
    ];

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// The response to a path with its query: status, beginning, and the part that is repeated.
    fn response(self, path: &str) -> (u16, String, Option<String>) {
        let list = r#"{"apiVersion":"v1","kind":"NodeList","metadata":{"resourceVersion":"1"},"items":["#;
        let watch = path.contains("watch=true");
        let nodes = path.starts_with("/api/v1/nodes") && !watch;
        let filler = || Some("x".repeat(16 * 1024));
        match self {
            Self::List if nodes => (200, format!(r#"{list}{{"metadata":{{"name":""#), filler()),
            Self::Values if nodes => (200, format!(r#"{list}{{"x":["#), Some(r#"{"":[0]},"#.repeat(1024))),
            Self::Line if watch => (200, r#"{"type":"ADDED","object":{"x":""#.to_owned(), filler()),
            Self::Error => (500, String::new(), filler()),
            Self::Version if path == "/version" => (200, r#"{"gitVersion":""#.to_owned(), filler()),
            Self::Objects if nodes => {
                static NODES: AtomicUsize = AtomicUsize::new(0);
                let node = |_| {
                    let number = NODES.fetch_add(1, Ordering::Relaxed);
                    let text = "x".repeat(60_000);
                    format!(
                        r#"{{"metadata":{{"name":"n-{number}","resourceVersion":"1","annotations":{{"kilo.squat.ai/x":"{text}"}}}}}}"#
                    )
                };
                let nodes: Vec<String> = (0..20).map(node).collect();
                let more = list.replace(r#""1"}"#, r#""1","continue":"more"}"#);
                (200, format!("{more}{}]}}", nodes.join(",")), None)
            }
            _ if path == "/version" => (
                200,
                r#"{"major":"1","minor":"36","gitVersion":"v1.36.3"}"#.to_owned(),
                None,
            ),
            // The watch stays open without an event.
            _ if watch => (200, String::new(), Some(String::new())),
            _ => (200, format!("{list}]}}"), None),
        }
    }
}

/// An API server that sends endless responses.
struct Server {
    flood: Flood,
    address: SocketAddr,
    /// Number of endless responses that have begun. [`Flood::Objects`] has none, so its server counts every response that ends.
    floods: Arc<AtomicUsize>,
}

impl Server {
    /// Listens in the network namespace of a host of the lab.
    fn start(env: &TestEnv, flood: Flood, port: u16, tls: &TlsAcceptor) -> Self {
        let address: SocketAddr = (ADDRESS.parse::<IpAddr>().unwrap(), port).into();
        let (listener, tls) = (https_server::listen(&env.lab.node("hostile"), address), tls.clone());
        let floods = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&floods);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(flood, stream, tls.clone(), Arc::clone(&counter)));
            }
        });
        Self { flood, address, floods }
    }
}

/// Answers the first request of a connection; an endless response ends when the client stops reading.
async fn serve(flood: Flood, stream: TcpStream, tls: TlsAcceptor, floods: Arc<AtomicUsize>) -> std::io::Result<()> {
    let mut stream = tls.accept(stream).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let (status, begin, repeat) = flood.response(head.split(' ').nth(1).unwrap_or_default());
    let start = format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n{begin}");
    stream.write_all(start.as_bytes()).await?;
    match repeat {
        Some(text) if text.is_empty() => {
            stream.flush().await?;
            std::future::pending::<()>().await;
        }
        Some(text) => {
            floods.fetch_add(1, Ordering::Relaxed);
            for _ in 0..RESPONSE_LENGTH / text.len() {
                stream.write_all(text.as_bytes()).await?;
            }
        }
        None => {
            if flood == Flood::Objects {
                floods.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    stream.shutdown().await
}

/// A shell line that moves its process into a cgroup with this memory limit and execs the program in its arguments. As in
/// a pod, the kernel kills a process that exceeds the limit. Without a usable cgroup, `ulimit` sets the limit. Also returns the
/// cgroup's directory, which the caller removes.
fn limited(bytes: usize) -> (String, Option<std::path::PathBuf>) {
    let own = format!("clustermesh-flood-{}", std::process::id());
    for (root, limit) in [
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ] {
        let directory = std::path::Path::new(root).join(&own);
        if std::fs::create_dir_all(&directory).is_ok() {
            if std::fs::write(directory.join(limit), bytes.to_string()).is_ok() {
                let line = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", directory.display());
                return (line, Some(directory));
            }
            let _ = std::fs::remove_dir(&directory);
        }
    }
    (format!("ulimit -d {} && exec \"$@\"", bytes / 1024), None)
}

// threat: endless-answer
#[tokio::test]
async fn endless_responses_do_not_exhaust_memory_or_delay_quarantine() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    for (m, name) in [(1, "mgmt"), (2, "tenant-a")] {
        env.create_node(name, m, 1).await;
    }
    env.lab.add_host("hostile", ADDRESS.parse().unwrap()).await.unwrap();
    let (ca, tls) = https_server::tls(ADDRESS.parse().unwrap());
    let servers: Vec<Server> = (Flood::ALL.iter().zip(7001..))
        .map(|(flood, port)| Server::start(&env, *flood, port, &tls))
        .collect();
    let mut mesh = env.mesh();
    for (server, m) in servers.iter().zip(11..) {
        let name = server.flood.name();
        let secret = format!("{name}-kubeconfig");
        env.write_secret(&name, &https_server::kubeconfig(server.address, &ca, "t"))
            .await;
        let entry = json!({
            "name": name, "kubeconfigSecretRef": {"name": secret},
            "allowedNetworks": [format!("10.{m}.0.0/16"), format!("100.64.{m}.0/24")],
        });
        mesh["spec"]["clusters"].as_array_mut().unwrap().push(entry);
    }

    let (line, cgroup) = limited(LIMIT);
    // The manifest passes the pod's limit in this variable.
    let memory = format!("MEMORY_LIMIT={LIMIT}");
    let prefix = ["sh", "-c", &line, "sh", "env", &memory];
    let mut controller = env.start_controller_with_prefix(&prefix).await;
    let pid = controller.pid().unwrap();
    env.apply_mesh(&mesh).await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], LATER).await;

    // The controller has read from every server, and has rejected the server's endless responses because of the intended limit.
    let over_budget = |member: &str, limit: &str| {
        format!("over_budget_total{{member=\"Secret clustermesh/{member}-kubeconfig key value\",limit=\"{limit}\"}}")
    };
    let want = [
        over_budget("list", "answer"),
        over_budget("values", "values"),
        over_budget("line", "event"),
        over_budget("objects", "member"),
        over_budget("error", "answer"),
        over_budget("version", "answer"),
    ];
    wait_until("every endless response to be rejected", LATER, async || {
        let metrics = env.page("/metrics").await;
        let missing: Vec<&String> = want.iter().filter(|line| !metrics.contains(&***line)).collect();
        let lines: Vec<&str> = metrics.lines().filter(|line| line.contains("over_budget")).collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!("{missing:?} in {lines:?}"))
        }
    })
    .await
    .unwrap();
    for server in &servers {
        assert!(server.floods.load(Ordering::Relaxed) > 0, "{:?}", server.flood);
    }
    let why = "over its budget: its API server answers with more than 4 MiB at once";
    wait_until("the reason in the status", LATER, async || {
        match env.condition("Ready").await {
            Some((state, message)) if state.starts_with("False/Member") && message.contains(why) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    assert!(controller.log().contains(why), "{}", controller.log());

    // Meanwhile a quarantine takes effect, both for a normal member and for a member with endless responses.
    let begun: Vec<usize> = servers.iter().map(|s| s.floods.load(Ordering::Relaxed)).collect();
    let words = [
        "annotate",
        "cmesh",
        "prod",
        "-n",
        NAMESPACE,
        "kilo-clustermesh.io/quarantine=tenant-a,list",
    ];
    env.hub().kubectl(words).await.unwrap();
    wait_until("both quarantines", SOON, async || {
        let policies = sandbox::policies(&env, "mgmt").await;
        let open: Vec<String> = (policies.values())
            .filter(|policy| !policy.spec.allow.is_empty())
            .map(ResourceExt::name_any)
            .collect();
        // The hub has a policy for tenant-a and for each server. Two of them must be closed.
        let is_closed = |name: &str| policies.contains_key(name) && !open.iter().any(|open| open == name);
        if is_closed("prod--tenant-a") && is_closed("prod--list") && open.len() == Flood::ALL.len() - 1 {
            Ok(())
        } else {
            Err(format!("open: {open:?}"))
        }
    })
    .await
    .unwrap();
    wait_until("another endless response to begin", LATER, async || {
        let now = servers.iter().map(|s| s.floods.load(Ordering::Relaxed));
        if now.zip(&begun).any(|(now, begun)| now > *begun) {
            Ok(())
        } else {
            Err(format!("{begun:?}"))
        }
    })
    .await
    .unwrap();

    // The process was not restarted, and never used more memory than the limit.
    assert_eq!(controller.pid(), Some(pid), "{}", controller.log());
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: usize = peak.trim().trim_end_matches(" kB").parse().unwrap();
    println!("peak: {} MiB of {}, limited by {cgroup:?}", peak / 1024, LIMIT / MIB);
    assert!(peak * 1024 < LIMIT, "{peak} kB");
    assert!(controller.terminate(SOON).await.unwrap().success());
    if let Some(cgroup) = cgroup {
        std::fs::remove_dir(cgroup).unwrap();
    }
}
