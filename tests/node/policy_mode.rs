//! Tests `--mode=policy` on a node whose tunnel belongs to kg. wireguard-go with Kilo's annotations simulates kg; the
//! other node runs an agent in full mode. The agent must enforce the policy and must not change kg's state.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

use clustermesh_api::names::{
    KILO_ENDPOINT, KILO_GRANULARITY, KILO_INTERNAL_IP, KILO_KEY, KILO_LAST_SEEN, KILO_WIREGUARD_IP, NODE_AGENT,
};
use clustermesh_lab::{ArtefactSet, Running, Tools, wait_until};
use clustermesh_tests::netns::NetNs;
use kube::api::{Patch, PatchParams};
use nix::sched::{CloneFlags, setns};

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters, peer};

/// kg's WireGuard address of the node.
const KG_ADDRESS: &str = "100.66.1.7";
/// A second address of the node's pod, whose port 8080 the policy denies.
const DENIED_ADDRESS: &str = "10.10.1.77";
/// The address of a laptop, which is no member of any mesh.
const LAPTOP_ADDRESS: &str = "10.99.0.2";

/// wireguard-go and annotations, as kg creates them. Dropping it removes the control socket.
struct Kg {
    socket: PathBuf,
    _process: Running,
}

impl Drop for Kg {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Kg {
    async fn start(clusters: &TwoClusters, site: &Site) -> Self {
        let tools =
            Tools::ensure(&[ArtefactSet::WireguardGo], &|line| eprintln!("{line}")).expect("build wireguard-go");
        let program = tools.path("wireguard-go").expect("wireguard-go").display().to_string();
        let (host, interface) = (clusters.host(site), &site.interface);
        let process = host
            .spawn("kg", [&program, "-f", interface])
            .expect("start wireguard-go");
        let socket = PathBuf::from(format!("/var/run/wireguard/{interface}.sock"));
        let answers = async || std::os::unix::net::UnixStream::connect(&socket).map_err(|error| error.to_string());
        wait_until("wireguard-go", TIMEOUT, answers).await.expect("it listens");
        let key = clusters.key_file(site).with_file_name("kg");
        std::fs::create_dir_all(key.parent().expect("a directory")).expect("a directory");
        let script = format!(
            "umask 077; wg genkey > {key}
            wg set {interface} listen-port 51820 private-key {key}
            ip addr add {KG_ADDRESS}/24 dev {interface}
            ip link set {interface} mtu 1420 up
            wg show {interface} public-key",
            key = key.display()
        );
        let public_key = host.exec(["sh", "-ec", &script]).await.expect("configure it").stdout;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let annotations = BTreeMap::from([
            (KILO_KEY, public_key.trim().to_owned()),
            (KILO_WIREGUARD_IP, format!("{KG_ADDRESS}/24")),
            (KILO_ENDPOINT, format!("{}:51820", site.address)),
            (KILO_INTERNAL_IP, format!("{}/16", site.address)),
            (KILO_GRANULARITY, "full".to_owned()),
            (KILO_LAST_SEEN, now.expect("a clock").as_secs().to_string()),
        ]);
        let patch = serde_json::json!({"metadata": {"annotations": annotations}});
        let nodes = clusters.nodes(site).await;
        nodes
            .patch(site.node, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .expect("annotate the Node");
        Self {
            socket,
            _process: process,
        }
    }

    /// Adds `remote` as a WireGuard peer, as kg does: allowed IPs, and routes in the main table. The laptop's address is a further
    /// allowed IP.
    async fn add_peer(&self, clusters: &TwoClusters, site: &Site, remote: &Site) {
        let annotations = clusters.wait_for_published(remote).await;
        let spec = peer(remote, &annotations).spec;
        let more = format!("{LAPTOP_ADDRESS}/32");
        let allowed = spec.allowed_ips.iter().chain([&more]).cloned().collect::<Vec<_>>();
        let interface = &site.interface;
        let routes: String = allowed
            .iter()
            .map(|net| format!("ip route add {net} dev {interface}\n"))
            .collect();
        let script = format!(
            "wg set {interface} peer {key} endpoint {endpoint} persistent-keepalive 5 allowed-ips {allowed}\n{routes}",
            key = spec.public_key,
            endpoint = annotations[KILO_ENDPOINT],
            allowed = allowed.join(",")
        );
        clusters
            .host(site)
            .exec(["sh", "-ec", &script])
            .await
            .expect("add the peer");
    }
}

/// The state of a node that policy mode must not change: policy routing rules, routes, addresses, WireGuard configuration, kernel
/// settings, and the nftables tables and annotations that are not ours.
async fn foreign_state(clusters: &TwoClusters, site: &Site) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    for args in [
        &["ip", "-d", "rule"][..],
        &["ip", "-6", "-d", "rule"],
        &["ip", "route", "show", "table", "all"],
        &["ip", "-6", "route", "show", "table", "all"],
        &["ip", "addr"],
        &["wg", "showconf", &site.interface],
        &[
            "sh",
            "-c",
            "cd /proc/sys/net; grep -rs '' ipv4/conf ipv4/tcp_fwmark_accept ipv4/fwmark_reflect ipv6/fwmark_reflect",
        ],
        &["sh", "-c", "nft list tables | grep -v 'inet clustermesh' || true"],
    ] {
        let text = clusters
            .host(site)
            .exec(args)
            .await
            .expect("read the node's state")
            .stdout;
        // The lifetimes of addresses change continuously.
        out.insert(
            args.join(" "),
            text.lines()
                .filter(|line| !line.contains("valid_lft"))
                .collect::<Vec<_>>()
                .join("\n"),
        );
    }
    let mut annotations = clusters.annotations(site).await;
    annotations.remove(NODE_AGENT);
    out.insert("annotations".into(), format!("{annotations:#?}"));
    out
}

/// Waits until the kernel has finished duplicate address detection. It then adds a route for each IPv6 address.
async fn wait_for_link_local_addresses(clusters: &TwoClusters, site: &Site) {
    wait_until("the IPv6 addresses to be checked", TIMEOUT, async || {
        let shown = clusters
            .host(site)
            .exec(["ip", "-6", "addr", "show", "tentative"])
            .await;
        let tentative = shown.map_err(|error| error.to_string())?.stdout;
        if tentative.is_empty() { Ok(()) } else { Err(tentative) }
    })
    .await
    .expect("no tentative address");
}

/// Runs a closure on a thread inside a network namespace.
fn inside<T: Send + 'static>(netns: &Path, run_inside: impl FnOnce() -> T + Send + 'static) -> T {
    let file = std::fs::File::open(netns).expect("open a network namespace");
    let run = move || {
        setns(&file, CloneFlags::CLONE_NEWNET).expect("enter a network namespace");
        run_inside()
    };
    std::thread::spawn(run).join().expect("the thread inside the namespace")
}

/// Creates a network namespace as a pod of a site. Moves the site's pod address from the node's `lo` to the pod, and also gives the
/// pod the addresses `more`. An address on the node is not enough, because packets to the node itself pass other firewall rules.
async fn make_pod(clusters: &TwoClusters, site: &Site, name: &str, more: &[&str]) -> NetNs {
    let pod = NetNs::new(name);
    let next_hop = site.pods.replace(".0/24", ".1");
    let routes: String = more
        .iter()
        .map(|address| format!("ip route add {address} dev cni0\n"))
        .collect();
    let script = format!(
        "echo 1 > /proc/sys/net/ipv4/ip_forward
        ip addr del {pod}/32 dev lo
        ip link add cni0 type veth peer name eth0 netns {pod_netns}
        ip addr add {next_hop}/24 dev cni0
        ip link set cni0 up
        {routes}",
        pod = site.pod,
        pod_netns = pod.path(),
    );
    clusters
        .host(site)
        .exec(["sh", "-ec", &script])
        .await
        .expect("set up the node");
    for address in [site.pod].iter().chain(more) {
        pod.ip(&format!("addr add {address}/24 dev eth0"));
    }
    pod.ip("link set eth0 up");
    pod.ip(&format!("route add default via {next_hop}"));
    pod
}

/// Listens until the test ends, and sends each client the address that the server sees.
fn serve(netns: &Path, address: &str, port: u16) {
    let at = SocketAddr::new(address.parse::<IpAddr>().unwrap(), port);
    let listener = inside(netns, move || TcpListener::bind(at).expect("listen"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            use std::io::Write;
            let mut stream = stream;
            let from = stream.peer_addr().expect("a peer").ip().to_string();
            let _ = stream.write_all(from.as_bytes());
        }
    });
}

/// The source address that a server sees, or the error of the connection. Opens one connection, because its first packet fixes its
/// NAT, and waits up to 30 s for it.
fn seen_source(from: &NetNs, source: &str, to: &str, port: u16) -> Result<String, std::io::ErrorKind> {
    seen_source_within(Duration::from_secs(30), from, source, to, port)
}

/// The same with a short time limit, for a connection that must be blocked.
fn seen_source_if_open(from: &NetNs, source: &str, to: &str, port: u16) -> Result<String, std::io::ErrorKind> {
    seen_source_within(Duration::from_secs(2), from, source, to, port)
}

fn seen_source_within(
    limit: Duration,
    from: &NetNs,
    source: &str,
    to: &str,
    port: u16,
) -> Result<String, std::io::ErrorKind> {
    let at = SocketAddr::new(to.parse::<IpAddr>().unwrap(), port);
    let source = SocketAddr::new(source.parse::<IpAddr>().unwrap(), 0);
    inside(Path::new(&from.path()), move || {
        use std::io::Read;
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        socket.bind(&source.into()).expect("bind");
        socket
            .connect_timeout(&at.into(), limit)
            .map_err(|error| error.kind())?;
        let mut stream = TcpStream::from(socket);
        // Shorter than the callers wait: a connection that is blocked after its handshake must not be their only attempt.
        stream
            .set_read_timeout(Some(limit + Duration::from_secs(3)))
            .expect("a timeout");
        let mut text = String::new();
        stream.read_to_string(&mut text).map_err(|error| error.kind())?;
        Ok(text)
    })
}

/// Waits until the agent's table has the network of the member, and returns all mesh networks.
async fn wait_for_mesh_networks(clusters: &TwoClusters, site: &Site) -> String {
    wait_until("the member's network in nftables", TIMEOUT, async || {
        let words = ["nft", "list", "set", "inet", "clustermesh", "mesh4"];
        let listed = clusters
            .host(site)
            .try_exec(words)
            .await
            .map_err(|error| error.to_string())?;
        if listed.stdout.contains("10.20.0.0/16") {
            Ok(listed.stdout)
        } else {
            Err(format!("{}{}", listed.stdout, listed.stderr))
        }
    })
    .await
    .expect("the agent writes its table")
}

fn command(clusters: &TwoClusters, site: &Site, more: &[&str]) -> Vec<String> {
    let mut args = clusters.command(site, more);
    args.push("--mode=policy".into());
    args
}

// threat: node-listener, kg-node
#[tokio::test]
async fn policy_mode_enforces_policies_and_leaves_kg_alone() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let kg = Kg::start(&clusters, mgmt).await;
    let mgmt_pod = make_pod(&clusters, mgmt, "mgmt-pod", &[DENIED_ADDRESS]).await;
    let tenant_pod = make_pod(&clusters, tenant, "tenant-pod", &[]).await;
    let _full_agent = clusters.agent(tenant, "agent-tenant");
    // In add-on mode, kg does not masquerade pods. The CNI masquerades packets that leave the cluster.
    let masquerade = "nft 'table ip cni { chain post { type nat hook postrouting priority 100; ip saddr 10.10.0.0/16 ip daddr != 10.10.0.0/16 masquerade; }; }'";
    clusters
        .host(mgmt)
        .exec(["sh", "-ec", masquerade])
        .await
        .expect("a CNI's rule");
    clusters.write_all_peers().await;
    kg.add_peer(&clusters, mgmt, tenant).await;
    // The laptop's address is an allowed IP of the same WireGuard peer, but belongs to no mesh.
    let laptop = format!("ip addr add {LAPTOP_ADDRESS}/32 dev lo");
    clusters
        .host(tenant)
        .exec(["sh", "-ec", &laptop])
        .await
        .expect("an address");
    wait_until("a ping between the pods", TIMEOUT, async || {
        if tenant_pod.pings(mgmt.pod) {
            Ok(())
        } else {
            Err("no reply".to_owned())
        }
    })
    .await
    .expect("the tunnel");
    for (address, port) in [(mgmt.pod, 8080), (DENIED_ADDRESS, 8080)] {
        serve(Path::new(&mgmt_pod.path()), address, port);
    }
    for port in [8080, 10250] {
        serve(&clusters.host(mgmt).netns(), KG_ADDRESS, port);
    }
    serve(Path::new(&tenant_pod.path()), tenant.pod, 8080);
    let timed_out = Err(std::io::ErrorKind::TimedOut);
    let patch = serde_json::json!({"spec": {
        "infrastructurePorts": [{"port": 10250, "protocol": "TCP"}],
        "deny": [{"to": [format!("{DENIED_ADDRESS}/32")], "ports": [{"port": 8080, "protocol": "TCP"}]}],
    }});
    let policies = clusters.policies(mgmt).await;
    policies
        .patch("mesh--tenant-a", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .expect("close a port and an address");

    // Without the agent, kg accepts all packets from its peers' allowed IPs, and the CNI masquerades the pod.
    for port in [8080, 10250] {
        assert_eq!(
            seen_source(&tenant_pod, tenant.pod, KG_ADDRESS, port),
            Ok(tenant.pod.to_owned())
        );
    }
    assert_eq!(
        seen_source(&tenant_pod, tenant.pod, DENIED_ADDRESS, 8080),
        Ok(tenant.pod.to_owned())
    );
    assert_eq!(
        seen_source(&mgmt_pod, mgmt.pod, tenant.pod, 8080),
        Ok(KG_ADDRESS.to_owned())
    );

    wait_for_link_local_addresses(&clusters, mgmt).await;
    let before = foreign_state(&clusters, mgmt).await;
    // As in its container, the agent has only NET_ADMIN and a read-only /proc/sys.
    let args = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; exec setpriv --bounding-set=-all,+net_admin --no-new-privs -- \"$@\"",
        "sh",
    ];
    let args: Vec<String> = args
        .map(String::from)
        .into_iter()
        .chain(command(&clusters, mgmt, &[]))
        .collect();
    let mut agent = clusters.host(mgmt).spawn("agent-mgmt", args).expect("start the agent");
    clusters.wait_until_ready(mgmt).await;
    wait_until("the annotation", TIMEOUT, async || {
        let annotation = clusters
            .annotations(mgmt)
            .await
            .get(NODE_AGENT)
            .cloned()
            .unwrap_or_default();
        if annotation.contains(r#""mode":"policy""#) {
            Ok(())
        } else {
            Err(annotation)
        }
    })
    .await
    .expect("the agent publishes its mode");

    wait_for_mesh_networks(&clusters, mgmt).await;
    assert_eq!(
        seen_source(&tenant_pod, tenant.pod, mgmt.pod, 8080),
        Ok(tenant.pod.to_owned())
    );
    assert_eq!(
        seen_source_if_open(&tenant_pod, tenant.pod, KG_ADDRESS, 8080),
        timed_out,
        "the node's own address"
    );
    tenant_pod.run("ping", &["-n", "-c1", "-W30", KG_ADDRESS]);
    assert_eq!(
        seen_source(&mgmt_pod, mgmt.pod, tenant.pod, 8080),
        Ok(mgmt.pod.to_owned())
    );
    assert_eq!(
        seen_source_if_open(&tenant_pod, tenant.pod, KG_ADDRESS, 10250),
        timed_out,
        "an infrastructure port"
    );
    assert_eq!(
        seen_source_if_open(&tenant_pod, tenant.pod, DENIED_ADDRESS, 8080),
        timed_out,
        "denied"
    );
    assert_eq!(foreign_state(&clusters, mgmt).await, before);

    // The agent takes the mesh networks from Peers and PeerPolicies, not from the allowed IPs of kg's other peers.
    let networks = wait_for_mesh_networks(&clusters, mgmt).await;
    assert!(!networks.contains("10.99"), "{networks}");

    // A flushed table is restored.
    clusters
        .host(mgmt)
        .exec(["nft", "flush", "ruleset"])
        .await
        .expect("flush");
    wait_for_mesh_networks(&clusters, mgmt).await;
    assert_eq!(
        seen_source_if_open(&tenant_pod, tenant.pod, KG_ADDRESS, 10250),
        timed_out,
        "after a flush"
    );

    // Without a PeerPolicy a member reaches nothing, although kg still has its peer.
    policies
        .delete("mesh--tenant-a", &Default::default())
        .await
        .expect("delete the PeerPolicy");
    wait_until("the member to be blocked", TIMEOUT, async || match seen_source_if_open(
        &tenant_pod,
        tenant.pod,
        mgmt.pod,
        8080,
    ) {
        Err(std::io::ErrorKind::TimedOut) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await
    .expect("closed");

    // The member is still blocked when its Peer object is deleted too. The simulated kg never removes the WireGuard peer.
    clusters.delete_peer(mgmt, "mesh--tenant-a--tenant-a-1").await;
    wait_until("the agent to have no such Peer", TIMEOUT, async || {
        let (_, state) = clusters.try_page(mgmt, "/debug/state").await?;
        let is_gone = !state.contains("mesh--tenant-a--tenant-a-1");
        is_gone.then_some(()).ok_or(state)
    })
    .await
    .expect("the deletion is handled");
    assert_eq!(
        seen_source_if_open(&tenant_pod, tenant.pod, mgmt.pod, 8080),
        timed_out,
        "the Peer is deleted"
    );

    // After the agent stops, the node stays closed to the member. After cleanup, the node's state is as before the
    // agent started.
    let status = agent.terminate(TIMEOUT).await.expect("it ends");
    assert!(status.success(), "{}", agent.log());
    assert_eq!(
        seen_source_if_open(&tenant_pod, tenant.pod, mgmt.pod, 8080),
        timed_out,
        "the agent is stopped"
    );
    let cleanup = clusters
        .host(mgmt)
        .exec(command(&clusters, mgmt, &["cleanup"]))
        .await
        .expect("cleanup");
    let mut after = foreign_state(&clusters, mgmt).await;
    // The test itself flushed the other tables.
    let tables = "sh -c nft list tables | grep -v 'inet clustermesh' || true";
    after.insert(tables.into(), before[tables].clone());
    assert_eq!(after, before, "{}", cleanup.stderr);
    let left = clusters
        .host(mgmt)
        .exec(["nft", "list", "tables"])
        .await
        .expect("nft")
        .stdout;
    assert!(!left.contains("clustermesh"), "{left}");
    assert!(!clusters.annotations(mgmt).await.contains_key(NODE_AGENT));
    assert_eq!(
        seen_source(&tenant_pod, tenant.pod, KG_ADDRESS, 10250),
        Ok(tenant.pod.to_owned())
    );
    drop(kg);
}
