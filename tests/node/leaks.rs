//! Checks that mesh packets never leave a node unencrypted. Programs in pods and on the nodes send into the mesh
//! continuously, over IPv4 and IPv6, while agents start, stop, crash and are upgraded, Peers and keys change, and
//! external changes remove kernel state. A capture on the link between the nodes must show no unencrypted mesh packet, and
//! senders must get errors where there is no route.

mod sender;

use std::{
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use clustermesh_api::{
    names::KILO_KEY,
    policy::{Allow, PeerPolicy, PeerPolicySpec},
};
use clustermesh_lab::{Running, wait_until};
use clustermesh_tests::{agent::agent_program, netns::NetNs};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use nix::sys::signal::Signal;
use sender::{Sender, Senders, wait_for_new_errors};

use crate::two_clusters::{MGMT, TENANT, TIMEOUT, TwoClusters, cluster_pods, peer};

/// Time limit of a wait for answers or errors of senders, also on a loaded machine.
const SENDER_TIMEOUT: Duration = Duration::from_secs(60);

/// The IPv6 networks and addresses of a cluster. The IPv4 networks are in `two_clusters::Site`, the IPv4 addresses in [`IPV4`].
struct Ipv6 {
    pods: &'static str,
    /// The cluster's pod network, a /32. `pods` is the part of its node.
    wide: &'static str,
    next_hop: &'static str,
    pod: &'static str,
    unassigned: &'static str,
    underlay: &'static str,
}

const IPV6: [Ipv6; 2] = [
    Ipv6 {
        pods: "fd00:10:0:1::/64",
        wide: "fd00:10::/32",
        next_hop: "fd00:10:0:1::1",
        pod: "fd00:10:0:1::9",
        unassigned: "fd00:10:0:9::9",
        underlay: "fd00:30::1:11",
    },
    Ipv6 {
        pods: "fd00:20:0:1::/64",
        wide: "fd00:20::/32",
        next_hop: "fd00:20:0:1::1",
        pod: "fd00:20:0:1::9",
        unassigned: "fd00:20:0:9::9",
        underlay: "fd00:30::2:11",
    },
];
/// The pod, the next hop of its default route (the node), and an address of the cluster's pod network that no node has.
const IPV4: [[&str; 3]; 2] = [
    ["10.10.1.9", "10.10.1.1", "10.10.99.9"],
    ["10.20.1.9", "10.20.1.1", "10.20.99.9"],
];
/// Further addresses of the pod under test, one for each sender of [`Senders::slow`], because Linux rate-limits ICMP errors
/// per source.
const SLOW_SENDERS: [&str; 3] = ["10.20.1.21", "10.20.1.22", "10.20.1.23"];
/// tcpdump filter: packets from or to an inner address.
const INNER: &str = "net 10.10.0.0/16 or net 10.20.0.0/16 or net 100.66.0.0/16 or net fd00:10::/32 or net fd00:20::/32";

/// Two dual-stack clusters with one node and one pod each. The node and the pod under test are those of [`TENANT`].
struct Testbed {
    clusters: TwoClusters,
    pods: [NetNs; 2],
}

impl Testbed {
    async fn start() -> Self {
        let clusters = TwoClusters::start().await;
        let pods = ["mgmt-pod", "tenant-pod"].map(NetNs::new);
        for index in [MGMT, TENANT] {
            set_up_dual_stack_node(&clusters, index, &pods[index]).await;
        }
        Self { clusters, pods }
    }

    fn pod(&self, index: usize) -> PathBuf {
        self.pods[index].path().into()
    }

    fn host(&self, index: usize) -> PathBuf {
        self.clusters.host(self.clusters.site(index)).netns()
    }

    /// Writes the Peer and the PeerPolicy of `source` into `target` for both families, as a controller does.
    async fn write_peer_and_policy(&self, target: usize, source: usize) {
        let (target_site, source_site) = (self.clusters.site(target), self.clusters.site(source));
        self.clusters
            .peers(target_site)
            .await
            .create(&PostParams::default(), &self.peer(source).await)
            .await
            .expect("create the Peer");
        let networks = vec![
            cluster_pods(source_site),
            source_site.wireguard.into(),
            IPV6[source].wide.into(),
        ];
        let to = vec![
            cluster_pods(target_site),
            target_site.wireguard.into(),
            IPV6[target].wide.into(),
        ];
        let allow = Allow { to };
        let spec = PeerPolicySpec {
            source: source_site.cluster.into(),
            sources: networks.clone(),
            networks,
            allow: vec![allow],
            ..PeerPolicySpec::default()
        };
        self.clusters
            .policies(target_site)
            .await
            .create(&PostParams::default(), &PeerPolicy::new("mesh", spec))
            .await
            .expect("create the PeerPolicy");
    }

    async fn peer(&self, source: usize) -> clustermesh_api::peer::Peer {
        let site = self.clusters.site(source);
        let mut peer = peer(site, &self.clusters.wait_for_published(site).await);
        peer.metadata.name = Some("other".into());
        peer.spec.allowed_ips.push(IPV6[source].pods.into());
        peer
    }

    async fn wireguard_address(&self, index: usize) -> IpAddr {
        let annotations = self.clusters.wait_for_published(self.clusters.site(index)).await;
        let address = &annotations[clustermesh_api::names::KILO_WIREGUARD_IP];
        address.split('/').next().unwrap().parse().unwrap()
    }

    /// Starts all senders.
    async fn senders(&self) -> Senders {
        let (pod, host) = (self.pod(TENANT), self.host(TENANT));
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let wireguard = self.wireguard_address(MGMT).await;
        let start = |from: &str, netns: &PathBuf, to: IpAddr| Sender::start(&format!("{from} -> {to}"), netns, to);
        let [pod_ip, _, unassigned] = IPV4[MGMT];
        Senders {
            reach: vec![
                start("pod", &pod, ip(pod_ip)),
                start("pod", &pod, ip(IPV6[MGMT].pod)),
                start("host", &host, ip(pod_ip)),
            ],
            to_wireguard_address: vec![start("pod", &pod, wireguard), start("host", &host, wireguard)],
            back: vec![
                start("mgmt pod", &self.pod(MGMT), ip(IPV4[TENANT][0])),
                start("mgmt pod", &self.pod(MGMT), ip(IPV6[TENANT].pod)),
                start("mgmt host", &self.host(MGMT), ip(IPV4[TENANT][0])),
            ],
            unassigned: vec![
                start("pod", &pod, ip(unassigned)),
                start("pod", &pod, ip(IPV6[MGMT].unassigned)),
                start("host", &host, ip(unassigned)),
                start("host", &host, ip(IPV6[MGMT].unassigned)),
            ],
            slow: [pod_ip.to_owned(), wireguard.to_string(), unassigned.to_owned()]
                .iter()
                .zip(SLOW_SENDERS)
                .map(|(to, source)| Sender::slow(&format!("slow pod -> {to}"), &pod, ip(source), ip(to)))
                .collect(),
        }
    }

    async fn wait_for_table(&self, index: usize) {
        let host = self.clusters.host(self.clusters.site(index));
        wait_until("the firewall table", TIMEOUT, async || {
            let args = ["nft", "list", "table", "inet", "clustermesh"];
            match host.try_exec(args).await.map_err(|e| e.to_string())? {
                output if output.status.success() => Ok(()),
                output => Err(output.stderr),
            }
        })
        .await
        .unwrap();
    }

    /// Waits until the firewall table, the rules and routes of the agent's routing tables (5182 and 5183) all exist and the
    /// device is up.
    async fn wait_until_restored(&self, after: &str) {
        let host = self.clusters.host(self.clusters.site(TENANT));
        let interface = &self.clusters.site(TENANT).interface;
        let checks = format!(
            "nft list table inet clustermesh > /dev/null
            for f in -4 -6; do
                ip $f rule show | grep -q 'lookup 5182'
                ip $f rule show | grep -q 'lookup 5183'
                ip $f route show table 5182 | grep -q unreachable
                ip $f route show table 5182 | grep -q 'dev {interface}'
                ip $f route show table 5183 | grep -q 'dev {interface}'
            done
            ip link show dev {interface} up | grep -q UP"
        );
        wait_until(
            format!("table, rules and routes to be restored after {after}"),
            TIMEOUT,
            async || match host
                .try_exec(["sh", "-exc", &checks])
                .await
                .map_err(|e| e.to_string())?
            {
                output if output.status.success() => Ok(()),
                output => Err(output.stderr),
            },
        )
        .await
        .unwrap();
    }

    fn agent(&self, index: usize, log: &str) -> Running {
        self.clusters.agent(self.clusters.site(index), log)
    }

    async fn damage(&self, line: &str) {
        let host = self.clusters.host(self.clusters.site(TENANT));
        host.exec(["sh", "-ec", line]).await.expect(line);
    }
}

/// Replaces a site's Node object by one with podCIDRs of both families. Gives the node IPv6, forwarding, a pod, and CNI rules that
/// masquerade packets to destinations outside the cluster's pod network. Packets that leak out of the tunnel leave by the default routes.
async fn set_up_dual_stack_node(clusters: &TwoClusters, index: usize, pod: &NetNs) {
    let (site, ipv6) = (clusters.site(index), &IPV6[index]);
    let [address, next_hop, _] = IPV4[index];
    let nodes = clusters.nodes(site).await;
    let mut node: Node = nodes.get(site.node).await.expect("the Node");
    nodes
        .delete(site.node, &Default::default())
        .await
        .expect("delete the Node");
    (node.metadata.resource_version, node.metadata.uid) = (None, None);
    if let Some(spec) = &mut node.spec {
        spec.pod_cidrs = Some(vec![site.pods.into(), ipv6.pods.into()]);
    }
    nodes
        .create(&PostParams::default(), &node)
        .await
        .expect("create it anew");
    let Ipv6 {
        wide: wide6, underlay, ..
    } = ipv6;
    let (pod_netns, wide4) = (pod.path(), cluster_pods(site));
    let script = format!(
        "
        for f in all default; do echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; done
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
        ip addr add {underlay}/64 dev eth0 nodad
        ip -6 route add default via fd00:30::1 dev eth0
        ip -6 neigh add fd00:30::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
        ip link add cni0 type veth peer name eth0 netns {pod_netns}
        ip addr add {next_hop}/24 dev cni0
        ip addr add {next_hop6}/64 dev cni0 nodad
        ip link set cni0 up
        nft 'table ip cni {{ chain post {{ type nat hook postrouting priority 100; ip saddr {wide4} ip daddr != {wide4} masquerade; }}; }}'
        nft 'table ip6 cni {{ chain post {{ type nat hook postrouting priority 100; ip6 saddr {wide6} ip6 daddr != {wide6} masquerade; }}; }}'
        ",
        next_hop6 = ipv6.next_hop,
    );
    clusters
        .host(site)
        .exec(["sh", "-ec", &script])
        .await
        .expect("set up the node");
    for f in ["all", "default"] {
        pod.set_sysctl(&format!("net/ipv6/conf/{f}/accept_dad"), "0");
    }
    pod.ip(&format!("addr add {address}/24 dev eth0"));
    pod.ip(&format!("addr add {}/64 dev eth0 nodad", ipv6.pod));
    pod.ip("link set eth0 up");
    pod.ip(&format!("route add default via {next_hop}"));
    pod.ip(&format!("-6 route add default via {}", ipv6.next_hop));
    for to in [address, ipv6.pod] {
        sender::echo(&PathBuf::from(pod.path()), to.parse().unwrap());
    }
    for more in SLOW_SENDERS.iter().filter(|_| index == TENANT) {
        pod.ip(&format!("addr add {more}/24 dev eth0"));
    }
}

// threat: unencrypted-packet
#[tokio::test]
async fn mesh_packets_never_leave_unencrypted() {
    let testbed = Testbed::start().await;
    let clusters = &testbed.clusters;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let mut mgmt_agent = testbed.agent(MGMT, "mgmt");
    let mut tenant_agent = testbed.agent(TENANT, "tenant");
    testbed.write_peer_and_policy(MGMT, TENANT).await;
    testbed.write_peer_and_policy(TENANT, MGMT).await;
    clusters.wait_until_ready(mgmt).await;
    sender::echo(&testbed.host(MGMT), testbed.wireguard_address(MGMT).await);

    // Positive control: without a mesh, a capture shows the senders' packets. So the capture below would show leaks.
    tenant_agent.terminate(TIMEOUT).await.expect("it ends");
    let cleanup = clusters.command(tenant, &["cleanup"]);
    clusters.host(tenant).exec(cleanup).await.expect("cleanup");
    let senders = testbed.senders().await;
    assert_unencrypted_is_captured(&testbed, "before", "no mesh").await;

    let began = Instant::now();
    let step = |what: &str| println!("{:6.1} s {what}", began.elapsed().as_secs_f64());
    // The capture runs from the moment the table exists until the end.
    tenant_agent = testbed.agent(TENANT, "tenant-1");
    testbed.wait_for_table(TENANT).await;
    let filter = format!("({INNER}) and not udp port 51820");
    let capture = clusters
        .lab
        .capture("unencrypted", &filter)
        .await
        .expect("start a capture");
    step("the table exists");
    senders.wait_for_answers("the first start").await;
    senders
        .wait_for_errors_about_unassigned("no node has this address")
        .await;

    step("the peer's agent is killed");
    mgmt_agent.signal(Signal::SIGKILL).expect("kill");
    mgmt_agent.wait_for_exit(TIMEOUT).await.expect("dead");
    // The kernel rate-limits the ICMP errors that fast senders in a pod get. Senders on the host get each error.
    let mgmt_host_senders = senders
        .back
        .iter()
        .filter(|sender| sender.name.starts_with("mgmt host"));
    wait_for_new_errors(mgmt_host_senders, "the peer's agent is dead").await;
    mgmt_agent = testbed.agent(MGMT, "mgmt-2");
    senders.wait_for_answers("the peer is back").await;

    step("the Peer is deleted");
    clusters.delete_peer(tenant, "other").await;
    senders.wait_for_errors("no Peer has these addresses").await;
    let same_peer = testbed.peer(MGMT).await;
    let peers = clusters.peers(tenant).await;
    peers.create(&PostParams::default(), &same_peer).await.expect("create");
    senders.wait_for_answers("the Peer is back").await;

    step("the peer's key changes");
    let real = clusters.wait_for_published(mgmt).await[KILO_KEY].clone();
    let wrong = clustermesh_core::key::PublicKey::new([77; 32]).to_string();
    let set_key = async |key: &str| {
        let patch = serde_json::json!({"spec": {"publicKey": key}});
        let patch = Patch::Merge(&patch);
        peers
            .patch("other", &PatchParams::default(), &patch)
            .await
            .expect("patch");
    };
    set_key(&wrong).await;
    wait_until("the device to have the wrong key", TIMEOUT, async || {
        let (_, state) = clusters.page(tenant, "/debug/state").await;
        if state.contains(&wrong) { Ok(()) } else { Err(state) }
    })
    .await
    .unwrap();
    set_key(&real).await;
    senders.wait_for_answers("the right key is back").await;

    step("the agent is stopped");
    tenant_agent.terminate(TIMEOUT).await.expect("it ends");
    senders.wait_for_errors("the agent is stopped").await;
    tenant_agent = testbed.agent(TENANT, "tenant-2");
    senders.wait_for_answers("the agent is started again").await;

    step("the agent is upgraded");
    // The upgrade starts a copy of the program as soon as the old agent has exited.
    let files = tempfile::tempdir().expect("a directory");
    let newer = files.path().join("wg-agent");
    std::fs::copy(agent_program(), &newer).expect("copy the program");
    tenant_agent.terminate(TIMEOUT).await.expect("it ends");
    let mut args = clusters.command(tenant, &[]);
    args[0] = newer.display().to_string();
    tenant_agent = clusters
        .host(tenant)
        .spawn("tenant-3", args)
        .expect("start the copied program");
    senders.wait_for_answers("the agent is upgraded").await;

    step("the agent is killed repeatedly");
    tenant_agent.signal(Signal::SIGKILL).expect("kill");
    tenant_agent.wait_for_exit(TIMEOUT).await.expect("dead");
    for (round, milliseconds) in [0, 20, 60, 120, 250, 500, 1000].into_iter().enumerate() {
        let mut crashing = testbed.agent(TENANT, &format!("tenant-crash-{round}"));
        // Kill the agent at an arbitrary stage of its startup.
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        let _ = crashing.signal(Signal::SIGKILL);
        crashing.wait_for_exit(TIMEOUT).await.expect("dead");
    }
    senders.wait_for_errors("the agent does not come up").await;

    step("the agent's API server is down");
    let cluster = clusters.lab.cluster(tenant.cluster);
    cluster.kill_api().expect("kill the API server");
    tenant_agent = testbed.agent(TENANT, "tenant-4");
    // The agent has Peers and PeerPolicies from its cache, so only senders to unassigned addresses must get errors.
    senders.wait_for_errors_about_unassigned("the API server is down").await;
    tenant_agent.signal(Signal::SIGKILL).expect("kill");
    tenant_agent.wait_for_exit(TIMEOUT).await.expect("dead");
    tenant_agent = testbed.agent(TENANT, "tenant-5");
    cluster.start_api().await.expect("start the API server");
    senders.wait_for_answers("the API server is back").await;

    for line in [
        "nft flush ruleset",
        "nft delete table inet clustermesh",
        "for f in -4 -6; do ip $f rule del pref 1000; ip $f rule del pref 1001; done",
        "for f in -4 -6; do ip $f route flush table 5182; ip $f route flush table 5183; done",
        &format!("ip link del {}", tenant.interface),
        &format!("ip link set {} down", tenant.interface),
    ] {
        step(line);
        testbed.damage(line).await;
        // One external change at a time: while one part is missing, the others keep packets off the underlay.
        testbed.wait_until_restored(line).await;
        senders.wait_for_answers(line).await;
    }
    step("end");

    let seen = capture.stop().await.expect("the capture ends");
    let seen = seen.packets("").await.expect("read it");
    assert_eq!(
        seen.iter().take(20).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "{} unencrypted packets",
        seen.len()
    );
    drop(mgmt_agent);
    // The same positive control again.
    tenant_agent.terminate(TIMEOUT).await.expect("it ends");
    let cleanup = clusters.command(tenant, &["cleanup"]);
    clusters.host(tenant).exec(cleanup).await.expect("cleanup");
    assert_unencrypted_is_captured(&testbed, "after", "after cleanup").await;
}

/// Checks that a capture shows the senders' packets of each family.
async fn assert_unencrypted_is_captured(testbed: &Testbed, name: &str, why: &str) {
    for (family, net) in [
        ("ip", cluster_pods(testbed.clusters.site(MGMT))),
        ("ip6", IPV6[MGMT].wide.to_owned()),
    ] {
        wait_until(
            format!("unencrypted packets of {family}: {why}"),
            SENDER_TIMEOUT,
            async || {
                let (name, filter) = (format!("{name}-{family}"), format!("{family} and dst net {net}"));
                let capture = testbed.clusters.lab.capture(&name, &filter).await;
                let capture = capture.map_err(|error| error.to_string())?;
                tokio::time::sleep(Duration::from_millis(500)).await;
                let seen = capture.stop().await.expect("the capture ends").packets("").await;
                if seen.expect("read it").is_empty() {
                    Err("none".to_owned())
                } else {
                    Ok(())
                }
            },
        )
        .await
        .unwrap();
    }
}
