//! Tests that an agent follows changes of its node's network without a restart: the interface of the outer packets goes down and up, is
//! renamed or replaced, its address changes, the default route moves to another interface. The test prints how long no ping was answered.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use clustermesh_api::names::KILO_ENDPOINT;
use clustermesh_lab::wait_until;
use kube::api::{Patch, PatchParams};

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters, peer};

/// Time limit for the agent to notice that the connection of a watch is dead. By itself, a dead watch ends after at least 300 s.
const DEAD_CONNECTION: Duration = Duration::from_secs(50);
const DEFAULT_ROUTE: &str = "ip route replace default via 172.30.2.1";

struct TestEnv<'a> {
    clusters: &'a TwoClusters,
    /// The node whose network changes.
    moved: &'a Site,
    other: &'a Site,
}

#[tokio::test]
async fn changed_network_of_a_node_is_followed_without_a_restart() {
    let clusters = TwoClusters::start().await;
    let resolv = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(resolv.path(), "nameserver 172.30.2.53\n").expect("write the resolvers");
    let (moved, other) = (clusters.site(TENANT), clusters.site(MGMT));
    let _other = clusters.agent(other, "agent-mgmt");
    let agent = clusters.agent_with_resolvers(moved, "agent-tenant", resolv.path());
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(moved, other).await;
    let env = TestEnv {
        clusters: &clusters,
        moved,
        other,
    };

    let down_and_up = format!("ip link set eth0 down; sleep 2; ip link set eth0 up; {DEFAULT_ROUTE}");
    env.change("eth0 down for 2 s, and up again", &down_and_up).await;
    let rename = format!("ip link set eth0 down; ip link set eth0 name lan0; ip link set lan0 up; {DEFAULT_ROUTE}");
    env.change("eth0 renamed to lan0", &rename).await;
    env.wait_for_underlay("lan0").await;

    // DHCP gives the node another address, and its kubelet publishes it.
    let readdress =
        format!("ip addr del 172.30.2.11/16 dev lan0; ip addr add 172.30.2.77/16 dev lan0; {DEFAULT_ROUTE}");
    env.change("another address", &readdress).await;
    env.publish_internal_ip("172.30.2.77").await;

    // The node's cable moves to another interface with another address.
    env.add_second_interface().await;
    let replace = format!(
        "ip link set lan0 down; ip addr add 172.30.2.78/16 dev eth1; ip link set eth1 up; {DEFAULT_ROUTE} dev eth1"
    );
    env.change("another interface with another address", &replace).await;
    env.publish_internal_ip("172.30.2.78").await;
    env.wait_for_underlay("eth1").await;

    env.default_route_moves().await;
    env.resolvers_vanish(resolv.path()).await;
    env.privacy_addresses_change().await;
    assert!(agent.pid().is_some(), "the agent was not restarted: {}", agent.log());
}

impl TestEnv<'_> {
    async fn sh(&self, script: &str) {
        let words = ["sh", "-ec", script];
        self.clusters
            .host(self.moved)
            .exec(words)
            .await
            .expect("change the network");
    }

    /// Runs a script that changes the moved node's network, and waits until the nodes reach each other again. The other node
    /// learns the new address from the packets of the moved node.
    async fn change(&self, what: &str, script: &str) {
        self.sh(script).await;
        let changed = Instant::now();
        self.clusters.wait_until_reaches(self.moved, self.other).await;
        self.clusters.wait_until_reaches(self.other, self.moved).await;
        println!("{what}: both directions after {:.1} s", changed.elapsed().as_secs_f64());
    }

    /// Sets the Node's address, and waits until the agent publishes it as its endpoint. Then writes this endpoint into the Peer
    /// in the other cluster.
    async fn publish_internal_ip(&self, address: &str) {
        let addresses = serde_json::json!([{"type": "InternalIP", "address": address}]);
        let status = serde_json::json!({"status": {"addresses": addresses}});
        let nodes = self.clusters.nodes(self.moved).await;
        let patch = Patch::Merge(&status);
        nodes
            .patch_status(self.moved.node, &PatchParams::default(), &patch)
            .await
            .expect("change the Node's address");
        let began = Instant::now();
        let endpoint = format!("{address}:51820");
        let annotations = wait_until(format!("the endpoint {endpoint}"), DEAD_CONNECTION, async || {
            let annotations = self.clusters.annotations(self.moved).await;
            match annotations.get(KILO_ENDPOINT) {
                Some(published) if *published == endpoint => Ok(annotations),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .expect("the agent publishes its endpoint");
        println!("{endpoint} published after {:.1} s", began.elapsed().as_secs_f64());
        let moved = peer(self.moved, &annotations);
        let name = moved.metadata.name.clone().expect("a name");
        let spec = serde_json::json!({"spec": moved.spec});
        let peers = self.clusters.peers(self.other).await;
        peers
            .patch(&name, &PatchParams::default(), &Patch::Merge(&spec))
            .await
            .expect("change the Peer");
        self.clusters.wait_until_reaches(self.other, self.moved).await;
    }

    /// Waits until the agent uses this interface for its outer packets.
    async fn wait_for_underlay(&self, interface: &str) {
        let began = Instant::now();
        wait_until(format!("the underlay interface {interface}"), TIMEOUT, async || {
            let (_, state) = self.clusters.page(self.moved, "/debug/state").await;
            let found = state.contains(&format!("\"{interface}\""));
            found.then_some(()).ok_or(state)
        })
        .await
        .expect("the agent finds the interface");
        println!("{interface} found after {:.1} s", began.elapsed().as_secs_f64());
    }

    async fn add_second_interface(&self) {
        let netns = self.clusters.host(self.moved).netns().display().to_string();
        let cable =
            format!("ip link add second type veth peer name eth1 netns {netns}; ip link set second master br0 up");
        let words = ["sh", "-ec", &cable];
        self.clusters.lab.underlay_exec(words).await.expect("add an interface");
    }

    /// Both interfaces are up and have an address, and only the default route leads to the other node. The agent's underlay
    /// interface is still eth1, which has the InternalIP.
    async fn default_route_moves(&self) {
        self.sh("ip addr flush dev lan0; ip addr flush dev eth1; ip link set lan0 up
            ip addr add 172.30.2.77/32 dev lan0; ip addr add 172.30.2.78/32 dev eth1
            ip route replace default dev eth1 src 172.30.2.78")
            .await;
        self.clusters.wait_until_reaches(self.moved, self.other).await;
        for (interface, address) in [("lan0", "172.30.2.77"), ("eth1", "172.30.2.78")] {
            let route = format!("ip route replace default dev {interface} src {address}");
            let before = self.sent_packets(interface).await;
            self.change(&format!("the default route moved to {interface}"), &route)
                .await;
            assert!(self.sent_packets(interface).await > before, "{interface} is unused");
        }
    }

    async fn sent_packets(&self, interface: &str) -> u64 {
        let words = ["ip", "-s", "-j", "link", "show", interface];
        let shown = self
            .clusters
            .host(self.moved)
            .exec(words)
            .await
            .expect("show the interface");
        let links: serde_json::Value = serde_json::from_str(&shown.stdout).expect("JSON of ip");
        links[0]["stats64"]["tx"]["packets"].as_u64().expect("a counter")
    }

    /// Without name servers, the agent still applies what changes.
    async fn resolvers_vanish(&self, file: &Path) {
        std::fs::write(file, "").expect("empty the resolvers");
        let name = format!("mesh--{}--{}", self.other.cluster, self.other.node);
        let peers = self.clusters.peers(self.moved).await;
        let allowed_ips = [self.other.pods, self.other.wireguard, "10.10.7.0/24"];
        let patch = serde_json::json!({"spec": {"allowedIPs": allowed_ips}});
        peers
            .patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .expect("change the Peer");
        wait_until("the new allowed IP", TIMEOUT, async || {
            let words = ["wg", "show", &self.moved.interface, "allowed-ips"];
            let shown = self
                .clusters
                .host(self.moved)
                .exec(words)
                .await
                .map_err(|error| error.to_string())?;
            let found = shown.stdout.contains("10.10.7.0/24");
            found.then_some(()).ok_or(shown.stdout)
        })
        .await
        .expect("the agent applies the Peer");
        std::fs::write(file, "nameserver 172.30.2.53\n").expect("restore the resolvers");
        self.clusters.wait_until_reaches(self.moved, self.other).await;
    }

    /// The kernel replaces a temporary IPv6 address (RFC 8981): it deprecates the old one and deletes it later.
    async fn privacy_addresses_change(&self) {
        for (site, address) in [(self.moved, "fd77::2"), (self.other, "fd77::1")] {
            let interface = if site.node == self.moved.node { "eth1" } else { "eth0" };
            let words = ["ip", "addr", "add", &format!("{address}/64"), "dev", interface, "nodad"];
            self.clusters.host(site).exec(words).await.expect("an address");
        }
        let name = format!("mesh--{}--{}", self.other.cluster, self.other.node);
        let spec = serde_json::json!({"spec": {"endpoint": {"dnsOrIP": {"ip": "fd77::1"}, "port": 51820}}});
        let peers = self.clusters.peers(self.moved).await;
        // The session is alive at the IPv4 endpoint. This change removes that endpoint from the candidates, so the agent uses
        // the new first candidate at once.
        peers
            .patch(&name, &PatchParams::default(), &Patch::Merge(&spec))
            .await
            .expect("change the Peer");
        let wait_for_endpoint_of_moved = async |address: &str| {
            wait_until(format!("packets from {address}"), TIMEOUT, async || {
                self.clusters.pings(self.moved, self.other).await?;
                let words = ["wg", "show", &self.other.interface, "endpoints"];
                let shown = self
                    .clusters
                    .host(self.other)
                    .exec(words)
                    .await
                    .map_err(|error| error.to_string())?;
                let found = shown.stdout.contains(&format!("[{address}]:51820"));
                found.then_some(()).ok_or(shown.stdout)
            })
            .await
            .expect("the address");
        };
        wait_for_endpoint_of_moved("fd77::2").await;
        // As in the kernel's WireGuard, packets keep their source address while it exists.
        let replace = "ip addr add fd77::abcd/64 dev eth1 nodad; ip addr change fd77::2/64 dev eth1 preferred_lft 0";
        self.change("a new temporary IPv6 address", replace).await;
        self.change(
            "the old temporary IPv6 address deleted",
            "ip addr del fd77::2/64 dev eth1",
        )
        .await;
        wait_for_endpoint_of_moved("fd77::abcd").await;
    }
}
