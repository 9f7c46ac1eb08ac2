//! Tests agents on nodes with more than one network: a node whose default route leads through another VPN, as `wg-quick` sets it up for
//! `AllowedIPs = 0.0.0.0/0` (rules before the agent's own, and an nftables chain that restores the marks of UDP connections), and nodes
//! that reach each other only by their second interfaces. A firewall lets one of the nodes only dial out.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clustermesh_api::names::KILO_ENDPOINT;
use clustermesh_lab::{ArtefactSet, Node as Host, Running, Tools, wait_until};
use clustermesh_tests::netns::NetNs;
use kube::api::{Patch, PatchParams};

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters};

/// The address of the VPN's server.
const SERVER: &str = "172.30.2.99";
const PORT: u16 = 9000;
/// Runs a shell script. Its background processes are killed with it.
const IN_OWN_PIDS: [&str; 6] = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-ec"];

/// Drops new connections from the node's networks, so the node gets only replies from there.
const DIAL_OUT: &str = "nft 'table inet dial_out {
    chain received { type filter hook input priority 0; iifname { \"eth*\", \"vc*\" } ct state new counter drop; }
}'";

#[tokio::test]
async fn mesh_works_with_a_full_tunnel_vpn_and_by_a_second_network() {
    let clusters = TwoClusters::start().await;
    let (pods, _agents) = full_tunnel_vpn(&clusters).await;
    second_network(&clusters, &pods).await;
    let firewall = sh(&clusters.host(clusters.site(TENANT)), "nft list table inet dial_out").await;
    assert!(
        !firewall.contains("packets 0 "),
        "the firewall dropped nothing: {firewall}"
    );
}

async fn full_tunnel_vpn(clusters: &TwoClusters) -> ([Pod; 2], [Running; 2]) {
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    // Only a default route leads to the other node, and at first there is none.
    let no_route = "ip addr del 172.30.2.11/16 dev eth0; ip addr add 172.30.2.11/24 dev eth0; ip route flush default";
    sh(&clusters.host(tenant), no_route).await;
    sh(&clusters.host(tenant), DIAL_OUT).await;
    let pods = [pod(clusters, mgmt).await, pod(clusters, tenant).await];
    let vpn = Vpn::new(clusters).await;
    let first = clusters.agent(mgmt, "agent-mgmt");
    let mut second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    wait_for_rules(clusters, tenant, "1001:\tnot from all fwmark").await;

    // The VPN starts after the agent: the kernel puts the VPN's rules before the agent's.
    let client = vpn.connect(tenant).await;
    assert_pods_reach_each_other(clusters, &pods).await;
    let through_vpn = endpoint(clusters, mgmt).await;
    assert!(through_vpn.starts_with(SERVER), "{through_vpn}");
    wait_for_mtu(clusters, tenant, 1360).await;

    // The agent starts after the VPN: the kernel runs the agent's chains before the VPN's of the same priority.
    second.terminate(TIMEOUT).await.expect("the agent stops");
    clusters
        .host(tenant)
        .exec(clusters.command(tenant, &["cleanup"]))
        .await
        .expect("cleanup");
    second = clusters.agent(tenant, "agent-tenant-2");
    assert_pods_reach_each_other(clusters, &pods).await;

    vpn.disconnect(tenant, client).await;
    sh(&clusters.host(tenant), "ip route add default dev eth0").await;
    assert_pods_reach_each_other(clusters, &pods).await;
    assert_eq!(endpoint(clusters, mgmt).await, "172.30.2.11:51820");
    wait_for_mtu(clusters, tenant, 1440).await;
    wait_for_rules(clusters, tenant, "1001:\tnot from all fwmark").await;
    (pods, [first, second])
}

/// A second cable connects the nodes, and both drop outer packets that arrive from the first network. The kernel checks reverse paths
/// strictly.
async fn second_network(clusters: &TwoClusters, pods: &[Pod; 2]) {
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let mut cables = "ip link add br1 type bridge; ip link set br1 up\n".to_owned();
    for (number, site) in [(1, mgmt), (2, tenant)] {
        let netns = clusters.host(site).netns().display().to_string();
        cables += &format!(
            "ip link add s{number} type veth peer name eth1 netns {netns}; ip link set s{number} master br1 up\n"
        );
    }
    let words = ["sh", "-ec", &cables];
    clusters.lab.underlay_exec(words).await.expect("a second network");
    for (number, site) in [(1, mgmt), (2, tenant)] {
        let script = format!(
            "ip addr add 10.77.0.{number}/24 dev eth1; ip link set eth1 mtu 1400 up
            for file in /proc/sys/net/ipv4/conf/eth*/rp_filter /proc/sys/net/ipv4/conf/all/rp_filter; do echo 1 > $file; done
            nft 'table ip first_network {{
                chain received {{ type filter hook input priority 0; iifname eth0 udp dport 51820 drop; }}
            }}'"
        );
        sh(&clusters.host(site), &script).await;
    }
    let spec = serde_json::json!({"spec": {"endpoint": {"dnsOrIP": {"ip": "10.77.0.1"}, "port": 51820}}});
    let name = format!("mesh--{}--{}", mgmt.cluster, mgmt.node);
    let peers = clusters.peers(tenant).await;
    let patch = Patch::Merge(&spec);
    peers
        .patch(&name, &PatchParams::default(), &patch)
        .await
        .expect("change the Peer");
    assert_pods_reach_each_other(clusters, pods).await;
    assert_eq!(endpoint(clusters, mgmt).await, "10.77.0.2:51820");
    wait_for_mtu(clusters, tenant, 1340).await;
    let (_, state) = clusters.page(tenant, "/debug/state").await;
    assert!(state.contains("\"eth0\""), "the InternalIP is on eth0: {state}");

    // The kubelet publishes the address of the second network.
    let addresses = serde_json::json!([{"type": "InternalIP", "address": "10.77.0.2"}]);
    let status = serde_json::json!({"status": {"addresses": addresses}});
    let nodes = clusters.nodes(tenant).await;
    nodes
        .patch_status(tenant.node, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .expect("change the Node's address");
    wait_until(
        "the endpoint and interface of the second network",
        TIMEOUT,
        async || {
            let (_, state) = clusters.page(tenant, "/debug/state").await;
            let published = clusters.annotations(tenant).await.get(KILO_ENDPOINT).cloned();
            let is_used = state.contains("\"eth1\"") && published.as_deref() == Some("10.77.0.2:51820");
            is_used.then_some(()).ok_or_else(|| format!("{published:?} {state}"))
        },
    )
    .await
    .expect("the agent uses the second network");
    assert_pods_reach_each_other(clusters, pods).await;
}

async fn sh(host: &Host<'_>, script: &str) -> String {
    let output = host.exec(["sh", "-ec", script]).await;
    output.expect("run a script").stdout
}

/// The endpoint of the only peer of a site's node.
async fn endpoint(clusters: &TwoClusters, site: &Site) -> String {
    let shown = sh(&clusters.host(site), &format!("wg show {} endpoints", site.interface)).await;
    shown.split_whitespace().last().unwrap_or_default().to_owned()
}

async fn wait_for_rules(clusters: &TwoClusters, site: &Site, rule: &str) {
    wait_until(format!("the rule {rule:?}"), TIMEOUT, async || {
        let rules = sh(&clusters.host(site), "ip rule").await;
        rules.contains(rule).then_some(()).ok_or(rules)
    })
    .await
    .expect("the agent's rules");
}

async fn wait_for_mtu(clusters: &TwoClusters, site: &Site, mtu: u16) {
    let began = Instant::now();
    wait_until(format!("an MTU of {mtu}"), TIMEOUT, async || {
        let link = sh(&clusters.host(site), &format!("ip link show {}", site.interface)).await;
        link.contains(&format!(" mtu {mtu} ")).then_some(()).ok_or(link)
    })
    .await
    .expect("the MTU of the path");
    println!("MTU {mtu}: after {:.1} s", began.elapsed().as_secs_f64());
}

/// A pod with a UDP echo server, and the address of the pod.
struct Pod {
    netns: NetNs,
    address: IpAddr,
}

/// Creates a pod on the site's node.
async fn pod(clusters: &TwoClusters, site: &Site) -> Pod {
    let netns = NetNs::new(&format!("{}-pod", site.cluster));
    let [address, next_hop] = ["6", "1"].map(|host| site.pods.replace("0/24", host));
    let script = format!(
        "echo 1 > /proc/sys/net/ipv4/ip_forward
        ip link add cni0 type veth peer name eth0 netns {}
        ip addr add {next_hop}/32 dev cni0
        ip link set cni0 up
        ip route add {address} dev cni0",
        netns.path()
    );
    sh(&clusters.host(site), &script).await;
    netns.ip(&format!("addr add {address}/24 dev eth0"));
    netns.ip("link set eth0 up");
    netns.ip(&format!("route add default via {next_hop}"));
    let address: IpAddr = address.parse().expect("an address");
    let server = netns.enter(|| UdpSocket::bind((address, PORT)).expect("a server"));
    std::thread::spawn(move || {
        let mut buffer = [0; 2000];
        while let Ok((length, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..length], from);
        }
    });
    Pod { netns, address }
}

/// Waits until each pod gets three echoes in a row from the other pod's server over one UDP socket. One echo is not enough:
/// conntrack and marks treat the first packet of a connection differently from the following ones.
async fn assert_pods_reach_each_other(clusters: &TwoClusters, [mgmt, tenant]: &[Pod; 2]) {
    for (from, to) in [(tenant, mgmt), (mgmt, tenant)] {
        let what = format!("{} to get UDP echoes from {}", from.address, to.address);
        let echoes = async || echoes(from, (to.address, PORT).into()).map_err(|error| error.to_string());
        let began = Instant::now();
        if let Err(error) = wait_until(&what, TIMEOUT, echoes).await {
            let script = "ip rule; nft list ruleset | grep -E 'chain|drop'";
            panic!("{error}\n{}", sh(&clusters.host(clusters.site(TENANT)), script).await);
        }
        println!("{what}: after {:.1} s", began.elapsed().as_secs_f64());
    }
}

fn echoes(from: &Pod, to: SocketAddr) -> std::io::Result<()> {
    let socket = from.netns.enter(|| UdpSocket::bind((from.address, 0)))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    for number in 0..3_u8 {
        socket.send(&[number])?;
        let mut buffer = [0; 2000];
        let length = socket.recv(&mut buffer)?;
        assert_eq!(&buffer[..length], [number]);
    }
    Ok(())
}

/// A VPN server, and the configuration of its only client.
struct Vpn<'a> {
    clusters: &'a TwoClusters,
    /// The path of wireguard-go, which wg-quick starts if the kernel has no WireGuard.
    program: String,
    _server: Running,
    directory: tempfile::TempDir,
    names: [String; 2],
}

impl Drop for Vpn<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = std::fs::remove_file(format!("/var/run/wireguard/{name}.sock"));
        }
    }
}

impl<'a> Vpn<'a> {
    /// Starts the server on a host of its own. It masquerades the packets of its client.
    async fn new(clusters: &'a TwoClusters) -> Self {
        let tools = Tools::ensure(&[ArtefactSet::WireguardGo], &|line| eprintln!("{line}")).expect("wireguard-go");
        let program = tools.path("wireguard-go").expect("wireguard-go").display().to_string();
        let address = SERVER.parse().expect("an address");
        let host = clusters.lab.add_host("vpn-server", address).await.expect("a host");
        // Unique, because all namespaces share the directory of the control sockets.
        let names = ["vs", "vc"].map(|prefix| format!("{prefix}{}", std::process::id()));
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().display();
        let [server, client] = &names;
        let process = host
            .spawn("vpn-server", [&program, "-f", server])
            .expect("start the server");
        wait_for_socket(server).await;
        let setup = format!(
            "umask 077; cd {path}
            for side in server client; do wg genkey > $side; wg pubkey < $side > $side.pub; done
            wg set {server} listen-port 4500 private-key server peer $(cat client.pub) allowed-ips 10.99.0.2/32
            ip addr add 10.99.0.1/24 dev {server}
            ip link set {server} mtu 1420 up
            echo 1 > /proc/sys/net/ipv4/ip_forward
            nft 'table ip nat {{ chain post {{ type nat hook postrouting priority 100; oifname eth0 ip saddr 10.99.0.2 masquerade; }}; }}'
            cat > {client}.conf <<END
[Interface]
PrivateKey = $(cat client)
Address = 10.99.0.2/24
MTU = 1420
[Peer]
PublicKey = $(cat server.pub)
AllowedIPs = 0.0.0.0/0
Endpoint = {SERVER}:4500
END"
        );
        sh(&host, &setup).await;
        Self {
            clusters,
            program,
            _server: process,
            directory,
            names,
        }
    }

    /// Connects a node, with `wg-quick up`.
    async fn connect(&self, site: &Site) -> Running {
        let script = format!(
            "export WG_QUICK_USERSPACE_IMPLEMENTATION={}
            wg-quick up {}
            touch {}
            exec sleep infinity",
            self.program,
            self.configuration().display(),
            self.path("up").display()
        );
        let host = self.clusters.host(site);
        let process = host
            .spawn("vpn-client", [&IN_OWN_PIDS[..], &[&script]].concat())
            .expect("connect");
        let up = self.path("up");
        let is_up = async || up.exists().then_some(()).ok_or_else(|| process.log());
        wait_until("wg-quick", TIMEOUT, is_up).await.expect("the VPN is up");
        println!("{}", sh(&host, "ip rule").await);
        process
    }

    async fn disconnect(&self, site: &Site, client: Running) {
        let down = format!("wg-quick down {}", self.configuration().display());
        sh(&self.clusters.host(site), &down).await;
        drop(client);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn configuration(&self) -> PathBuf {
        self.path(&format!("{}.conf", self.names[1]))
    }
}

async fn wait_for_socket(interface: &str) {
    let socket = format!("/var/run/wireguard/{interface}.sock");
    let exists = async || {
        Path::new(&socket)
            .exists()
            .then_some(())
            .ok_or_else(|| "no socket".to_owned())
    };
    wait_until("wireguard-go", TIMEOUT, exists).await.expect("it listens");
}
