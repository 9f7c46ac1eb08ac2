//! Damages the kernel state of a node with a real agent. The agent must repair and count all damage, and follow changes
//! of the underlay. Each wait for a repair is shorter than the agent's resync interval, so a repair without a kernel event is
//! usually too late.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use clustermesh_lab::wait_until;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, api::PostParams};

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters};

/// Shorter than the 30 s from an agent's pass to its next resync. Each damage follows soon after a pass, which repaired the one before.
const EVENT_TIMEOUT: Duration = Duration::from_secs(25);

/// All rules of the node, and the agent's IPv4 routes and IPv4 addresses, as `ip` shows them.
async fn routing(clusters: &TwoClusters, site: &Site) -> String {
    let script = format!(
        "ip rule show; ip -6 rule show; ip route show table 5182; ip route show table 5183; ip -br -4 addr show dev {}",
        site.interface
    );
    let shown = clusters.host(site).try_exec(["sh", "-c", &script]).await.expect("ip");
    shown.stdout
}

/// `wg_agent_repairs_total` by part.
async fn repairs(clusters: &TwoClusters, site: &Site) -> BTreeMap<String, u64> {
    let (_, text) = clusters.page(site, "/metrics").await;
    assert!(text.contains("wg_agent_repairs_total"), "{text}");
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("wg_agent_repairs_total{part=\""));
    lines
        .filter_map(|line| {
            let (part, count) = line.split_once("\"} ")?;
            Some((part.to_owned(), count.parse().ok()?))
        })
        .collect()
}

async fn wait_for_route(clusters: &TwoClusters, site: &Site, route: &str) {
    wait_until(route, EVENT_TIMEOUT, async || {
        let shown = routing(clusters, site).await;
        if shown.lines().any(|line| line.trim() == route) {
            Ok(())
        } else {
            Err(shown)
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

#[tokio::test]
async fn drift_is_repaired_and_underlay_changes_are_followed() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let resolv = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(resolv.path(), "nameserver 192.0.2.53\n").expect("write");
    let agent = clusters.agent_with_resolvers(mgmt, "agent-mgmt", resolv.path());
    let _other = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    clusters.wait_until_ready(mgmt).await;

    wait_for_route(&clusters, mgmt, "unreachable 10.20.0.0/16 proto 117 metric 4096").await;
    let expected = routing(&clusters, mgmt).await;
    assert_eq!(
        repairs(&clusters, mgmt).await.get("routes"),
        Some(&0),
        "{}",
        agent.log()
    );
    let device = &mgmt.interface;
    let (address, _) = clusters.annotations(mgmt).await["kilo.squat.ai/wireguard-ip"]
        .split_once('/')
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .expect("an address");
    let mut counted = 0;
    // Each damage, with the number of rules, addresses and routes that the agent repairs. Table 5182 has a route to the tenant's pods, one
    // to its WireGuard address and two `unreachable` routes; table 5183 has one route.
    for (damage, repaired) in [
        (format!("ip route del {} table 5182", tenant.pods), 1),
        ("ip rule del pref 1001".to_owned(), 1),
        // With the last IPv4 address of a device, the kernel removes its IPv4 routes: two in table 5182, one in table 5183.
        (format!("ip addr del {address}/32 dev {device}"), 1 + 3),
        // All routes, each deleted once. `ip route flush` would read the table again and delete routes that the agent has repaired meanwhile.
        (
            "routes=$(ip route show table 5182 | sed 's/^/route del /; s/$/ table 5182/'); \
             printf '%s\n' \"$routes\" | ip -batch -"
                .to_owned(),
            4,
        ),
        (
            "printf 'rule flush\\nrule add pref 32766 lookup main\\nrule add pref 32767 lookup default\\n' | ip -batch -".to_owned(),
            2,
        ),
        (
            format!(
                "ip route replace {} dev eth0 proto 117 metric 20 table 5182",
                tenant.pods
            ),
            1,
        ),
    ] {
        clusters.host(mgmt).exec(["sh", "-ec", &damage]).await.expect("damage");
        let start = Instant::now();
        wait_until(format!("{damage} to be repaired"), EVENT_TIMEOUT, async || {
            let now = routing(&clusters, mgmt).await;
            if now == expected {
                Ok(())
            } else {
                Err(format!("{now}\ninstead of\n{expected}"))
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", agent.log()));
        println!("{damage}: repaired after {} ms", start.elapsed().as_millis());
        counted += repaired;
        wait_until("the repairs to be counted", TIMEOUT, async || {
            let now = repairs(&clusters, mgmt).await;
            if now.get("routes") == Some(&counted) {
                Ok(())
            } else {
                Err(format!("{now:?} instead of {counted}"))
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{damage}: {error}\n{}", agent.log()));
    }
    // A sysctl whose change the kernel reports as an event.
    assert_eq!(
        repairs(&clusters, mgmt).await.get("sysctls"),
        Some(&0),
        "{}",
        agent.log()
    );
    let sysctl = format!("/proc/sys/net/ipv4/conf/{device}/rp_filter");
    let damage = format!("echo 1 > {sysctl}");
    clusters.host(mgmt).exec(["sh", "-ec", &damage]).await.expect("damage");
    let start = Instant::now();
    wait_until("the sysctl to be repaired and counted", EVENT_TIMEOUT, async || {
        let now = clusters.host(mgmt).exec(["cat", &sysctl]).await.expect("read").stdout;
        match repairs(&clusters, mgmt).await.get("sysctls") {
            Some(1) if now == "2\n" => Ok(()),
            counted => Err(format!("{now}{counted:?}")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}", agent.log()));
    println!("{damage}: repaired after {} ms", start.elapsed().as_millis());
    clusters.wait_until_reaches(mgmt, tenant).await;
    // Deleting the device removes its routes and sessions, too.
    clusters
        .host(mgmt)
        .exec(["ip", "link", "del", device])
        .await
        .expect("delete the device");
    let start = Instant::now();
    wait_until("the device to be repaired", EVENT_TIMEOUT, async || {
        let now = routing(&clusters, mgmt).await;
        if now == expected { Ok(()) } else { Err(now) }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}", agent.log()));
    println!("ip link del: repaired after {} ms", start.elapsed().as_millis());
    clusters.wait_until_reaches(mgmt, tenant).await;
    assert_eq!(
        repairs(&clusters, mgmt).await.get("device"),
        Some(&1),
        "{}",
        agent.log()
    );

    // Addresses inside the tenant's network that must stay on the underlay: a resolver, a next hop, an API server.
    std::fs::write(resolv.path(), "nameserver 10.20.250.53\n").expect("write");
    wait_for_route(&clusters, mgmt, "throw 10.20.250.53 proto 117 metric 10").await;
    let hop = "ip route add default via 10.20.250.1 dev eth0 onlink metric 5000";
    clusters
        .host(mgmt)
        .exec(["sh", "-ec", hop])
        .await
        .expect("a default route");
    wait_for_route(&clusters, mgmt, "throw 10.20.250.1 proto 117 metric 10").await;
    let slice: EndpointSlice = serde_json::from_value(serde_json::json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "second-server", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "endpoints": [{"addresses": ["10.20.250.64"]}],
        "ports": [{"name": "https", "port": 6443, "protocol": "TCP"}],
    }))
    .expect("an EndpointSlice");
    let slices: Api<EndpointSlice> = Api::namespaced(clusters.client(mgmt).await, "default");
    slices
        .create(&PostParams::default(), &slice)
        .await
        .expect("create an EndpointSlice");
    wait_for_route(&clusters, mgmt, "throw 10.20.250.64 proto 117 metric 10").await;
}
