//! Tests the MTU of a worker's tunnel inside the hub's pod network, which is a VXLAN or WireGuard between the hub's nodes: a tunnel in a
//! tunnel.

use clustermesh_lab::{ArtefactSet, Node, Running, Tools, wait_until};
use serde_json::Value;

use super::{HUB, MEMBER, PATIENCE, TestEnv, WORKER, pod};
use crate::setup::fetch_mebibyte;

/// Bytes that WireGuard adds to a packet over IPv4.
const WIREGUARD_OVERHEAD: u16 = 60;
/// Fragments of any packet.
const FRAGMENTS: &str = "ip[6:2] & 0x3fff != 0";
/// VXLAN packets with WireGuard packets inside. The inner UDP header follows the headers of UDP, VXLAN, Ethernet and IP.
const WIREGUARD_IN_VXLAN: &str = "(udp port 8472 and udp[52:2] == 51820)";
/// Packets of [`Overlay`]. Their content is encrypted, so the filter has the outer port only.
const WIREGUARD_IN_WIREGUARD: &str = "(udp port 51999)";
/// The device of [`Overlay`], and its MTU: that of the underlay without WireGuard's overhead over IPv6.
const OVERLAY: &str = "overlay";
const OVERLAY_MTU: u16 = 1420;

/// The tunnel's MTU follows the MTU of the pod network, first with a VXLAN as pod network, then with WireGuard.
pub(super) async fn tunnel_follows_mtu_of_pod_network(env: &TestEnv<'_>) {
    for mtu in [1400, 1450] {
        env.lab.set_pod_mtu(HUB, mtu).await.unwrap();
        packets_up_to_the_mtu_pass(env, mtu, WIREGUARD_IN_VXLAN).await;
    }
    env.lab.set_pod_mtu(HUB, OVERLAY_MTU).await.unwrap();
    let overlay = Overlay::up(env).await;
    packets_up_to_the_mtu_pass(env, OVERLAY_MTU, WIREGUARD_IN_WIREGUARD).await;
    overlay.down().await;
    env.lab.set_pod_mtu(HUB, 1450).await.unwrap();
}

/// Packets up to the tunnel's MTU pass in both directions, larger ones get an ICMP error, large TCP transfers pass, and no packet is
/// fragmented. `mtu` is that of the pod network. Between the hub's nodes the tunnel's packets match `carrier`.
async fn packets_up_to_the_mtu_pass(env: &TestEnv<'_>, mtu: u16, carrier: &str) {
    let tunnel = mtu - WIREGUARD_OVERHEAD;
    tunnels_have_mtu(env, tunnel).await;
    let filter = format!("{FRAGMENTS} or {WIREGUARD_IN_VXLAN} or {WIREGUARD_IN_WIREGUARD}");
    let on_underlay = env.lab.capture(&format!("mtu-{mtu}-underlay"), &filter).await.unwrap();
    let on_eth0 = env.worker.capture(&format!("mtu-{mtu}-eth0"), "ip").await.unwrap();
    let web = env.webs.iter().find(|web| web.node == WORKER).unwrap();
    for hub_web in &env.hub_webs {
        for (from, to) in [(web, hub_web), (hub_web, web)] {
            // The inner headers of IP and ICMP take 28 bytes.
            for (size, fits) in [(tunnel - 28, true), (tunnel - 27, false)] {
                let (size, to) = (size.to_string(), to.ip.to_string());
                let ping = ["ping", "-n", "-c", "1", "-W", "30", "-M", "do", "-s", &size, &to];
                let output = env.lab.run_at(&pod(from), &ping).await.unwrap();
                let printed = format!("{}{}", output.stdout, output.stderr);
                assert_eq!(
                    output.status.success(),
                    fits,
                    "{size} bytes {from:?} -> {to}: {printed}"
                );
                assert!(
                    fits || printed.contains(&tunnel.to_string()),
                    "the error names the MTU: {printed}"
                );
            }
            fetch_mebibyte(env.lab, from, to).await;
        }
    }
    let (on_underlay, on_eth0) = (on_underlay.stop().await.unwrap(), on_eth0.stop().await.unwrap());
    for captured in [&on_underlay, &on_eth0] {
        assert_eq!(captured.packets(FRAGMENTS).await.unwrap(), Vec::<String>::new());
    }
    let largest = format!("udp port 51820 and ip[2:2] == {mtu}");
    assert_ne!(on_eth0.packets(&largest).await.unwrap().len(), 0);
    assert_ne!(on_underlay.packets(carrier).await.unwrap().len(), 0);
    let other = format!("({WIREGUARD_IN_VXLAN} or {WIREGUARD_IN_WIREGUARD}) and not {carrier}");
    assert_eq!(on_underlay.packets(&other).await.unwrap(), Vec::<String>::new());
}

/// WireGuard between the hub's two nodes. It takes the place of the VXLAN in the routes of the pod network.
struct Overlay<'a> {
    /// Each node, its process, and the routes by the VXLAN, as arguments of `ip route replace`.
    nodes: Vec<(Node<'a>, Running, Vec<String>)>,
}

impl<'a> Overlay<'a> {
    async fn up(env: &TestEnv<'a>) -> Self {
        let tools = Tools::ensure(&[ArtefactSet::WireguardGo], &|line| eprintln!("lab: {line}")).unwrap();
        let program = tools.path("wireguard-go").unwrap().display().to_string();
        let mut nodes = vec![];
        let mut keys = vec![];
        for node in env.lab.cluster(HUB).nodes() {
            let running = node.spawn(OVERLAY, [&*program, "-f", OVERLAY]).unwrap();
            let script = format!(
                "umask 077; wg genkey > /run/{OVERLAY}.key
                wg set {OVERLAY} listen-port 51999 private-key /run/{OVERLAY}.key
                ip link set {OVERLAY} mtu {OVERLAY_MTU} up
                wg show {OVERLAY} public-key"
            );
            let key = wait_until("wireguard-go", PATIENCE, async || {
                let output = node.try_exec(["sh", "-ec", &script]).await.unwrap();
                if output.status.success() {
                    Ok(output.stdout.trim().to_owned())
                } else {
                    Err(output.stderr)
                }
            })
            .await
            .unwrap();
            keys.push(key);
            let routes = node.exec(["ip", "route", "show", "dev", "vx"]).await.unwrap().stdout;
            nodes.push((node, running, routes.lines().map(str::to_owned).collect::<Vec<_>>()));
        }
        let pods = env.lab.cluster(HUB).plan().pod_cidr;
        for (position, (node, _, routes)) in nodes.iter().enumerate() {
            let other = 1 - position;
            let (key, endpoint) = (&keys[other], nodes[other].0.address());
            // The other node's own address is also allowed: the outer packets of its mesh tunnels to workers have it as source.
            let peer = format!("wg set {OVERLAY} peer {key} endpoint {endpoint}:51999 allowed-ips {pods},{endpoint}\n");
            let destinations = routes.iter().map(|route| route.split(' ').next().unwrap());
            let routes = destinations.map(|net| format!("ip route replace {net} dev {OVERLAY}\n"));
            let script = peer + &routes.collect::<String>();
            node.exec(["sh", "-ec", &script]).await.unwrap();
        }
        Self { nodes }
    }

    /// Restores the routes by the VXLAN.
    async fn down(self) {
        for (node, _, routes) in &self.nodes {
            let routes = routes.iter().map(|route| format!("ip route replace {route} dev vx\n"));
            let script = routes.collect::<String>();
            node.exec(["sh", "-ec", &script]).await.unwrap();
        }
    }
}

async fn tunnels_have_mtu(env: &TestEnv<'_>, mtu: u16) {
    let clusters = [HUB, MEMBER].map(|name| env.lab.cluster(name));
    for node in clusters.iter().flat_map(|cluster| cluster.nodes()) {
        wait_until(
            format!("the MTU {mtu} of the tunnel on {}", node.name()),
            PATIENCE,
            async || {
                let shown = node.exec(["ip", "-j", "link", "show", "kilo0"]).await;
                let shown = shown.map_err(|error| error.to_string())?.stdout;
                let link: Value = serde_json::from_str(&shown).map_err(|error| error.to_string())?;
                if link[0]["mtu"] == mtu {
                    Ok(())
                } else {
                    Err(link[0]["mtu"].to_string())
                }
            },
        )
        .await
        .unwrap();
    }
}
