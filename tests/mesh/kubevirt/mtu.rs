//! Tests the MTU of a worker's tunnel inside the hub's pod network, which is a VXLAN between the hub's nodes: a tunnel in a tunnel.

use clustermesh_lab::wait_until;
use serde_json::Value;

use super::{HUB, MEMBER, PATIENCE, TestEnv, WORKER, pod};
use crate::setup::fetch_mebibyte;

/// Bytes that WireGuard adds to a packet over IPv4.
const WIREGUARD_OVERHEAD: u16 = 60;
/// Fragments of any packet.
const FRAGMENTS: &str = "ip[6:2] & 0x3fff != 0";
/// VXLAN packets with WireGuard packets inside. The inner UDP header follows the headers of UDP, VXLAN, Ethernet and IP.
const WIREGUARD_IN_VXLAN: &str = "(udp port 8472 and udp[52:2] == 51820)";

/// At each MTU of the pod network, packets up to the tunnel's MTU pass in both directions, larger ones get an ICMP error, large TCP
/// transfers pass, and no packet is fragmented.
pub(super) async fn tunnel_follows_mtu_of_pod_network(env: &TestEnv<'_>) {
    for mtu in [1400, 1450] {
        env.lab.set_pod_mtu(HUB, mtu).await.unwrap();
        let tunnel = mtu - WIREGUARD_OVERHEAD;
        tunnels_have_mtu(env, tunnel).await;
        let filter = format!("{FRAGMENTS} or {WIREGUARD_IN_VXLAN}");
        let on_underlay = env.lab.capture(&format!("mtu-{mtu}-underlay"), &filter).await.unwrap();
        let on_eth0 = env.worker.capture(&format!("mtu-{mtu}-eth0"), "ip").await.unwrap();
        let web = env.webs.iter().find(|web| web.node == WORKER).unwrap();
        for hub_web in &env.hub_webs {
            for (from, to) in [(web, hub_web), (hub_web, web)] {
                // The inner headers of IP and ICMP take 28 bytes.
                for (size, fits) in [(tunnel - 28, true), (tunnel - 27, false)] {
                    let (size, to) = (size.to_string(), to.ip.to_string());
                    let ping = ["ping", "-n", "-c", "1", "-W", "3", "-M", "do", "-s", &size, &to];
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
        assert_ne!(on_underlay.packets(WIREGUARD_IN_VXLAN).await.unwrap().len(), 0);
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
