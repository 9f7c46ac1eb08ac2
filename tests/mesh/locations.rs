//! Tests a member whose nodes are in three locations, on whole clusters: two nodes in a datacenter behind a NAT, and one in each of two
//! clouds. Without the mesh, pods in the datacenter and pods in a cloud cannot reach each other. The CNI of
//! the member is flannel (VXLAN); in `cargo xtask demo --scenario locations` it is one with plain routes. The endpoint of
//! the Service `default/kubernetes` is the address of `tenant-a-3`, the node in cloud A, as if the API server ran there.

mod api_server;

use std::net::IpAddr;

use clustermesh_lab::{Answer, Cluster, Lab, LabPlan, NatKind, Product, RunningPod, Tunnel, wait_until};
use serde_json::Value;

use crate::setup::{
    HUB, MEMBER, PATIENCE, assert_answers, assert_answers_or, assert_pings, expected_answer, fetch_mebibyte, host,
    json, pod, unix_millis, url, wireguard,
};

/// The location of each node of the member.
const LOCATIONS: [(&str, &str); 4] = [
    ("tenant-a-1", "datacenter"),
    ("tenant-a-2", "datacenter"),
    ("tenant-a-3", "cloud-a"),
    ("tenant-a-4", "cloud-b"),
];
const LAN: &str = "192.168.1.0/24";
/// The device of flannel's VXLAN.
const VXLAN: &str = "flannel.1";
/// The MTU of pods with flannel.
const POD_MTU: u16 = 1500 - 50;
/// The UDP port of the echo servers in pods.
const ECHO_PORT: u16 = 9091;

struct TestEnv<'a> {
    lab: &'a Lab,
    hub: Cluster<'a>,
    member: Cluster<'a>,
    hub_webs: Vec<RunningPod>,
    webs: Vec<RunningPod>,
}

#[tokio::test]
async fn nodes_in_several_locations_are_one_cluster() {
    let nat = NatKind::EndpointIndependent { first_port: 40001 };
    let plan = LabPlan::clusters(&[(HUB, 1), (MEMBER, 4)])
        .with_nat_for(2, MEMBER, LAN, nat)
        .with_flannel(MEMBER)
        .with_api_on_node(MEMBER, 3);
    let lab = Lab::start(plan).await.unwrap();
    let product = Product::install(&lab, &[HUB, MEMBER], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let [hub, member] = [HUB, MEMBER].map(|name| lab.cluster(name));
    for (node, location) in LOCATIONS {
        label(&member, node, &format!("topology.kubernetes.io/region={location}")).await;
    }
    let webs = member.run_web_on_each_node().await.unwrap();
    let mut env = TestEnv {
        lab: &lab,
        hub_webs: hub.run_web().await.unwrap(),
        webs,
        hub,
        member,
    };
    env.locations_are_apart_without_the_mesh().await;
    let open_flows = api_server::open_flows(&env).await;
    let capture = lab.capture("locations", "ip").await.unwrap();
    // The pods' addresses are outside allowedNetworks: a masqueraded member lists only the addresses that other members see.
    let mesh = product.mesh_masqueraded(&[MEMBER], &[]);
    let mesh = mesh.replace(
        "addressing: Masqueraded",
        "addressing: Masqueraded\n    locations: Connected",
    );
    product.mesh_up(&mesh).await.unwrap();
    env.every_node_uses_its_tunnels().await;
    api_server::open_flows_continue(open_flows).await;
    let vxlan = lab.capture("locations-vxlan", "udp port 8472").await.unwrap();

    env.pods_reach_pods_with_their_own_address().await;
    env.services_have_endpoints_in_every_location().await;
    env.nodes_are_reached_at_their_addresses().await;
    env.kubelets_answer_the_api_server().await;
    env.packets_too_large_for_the_tunnel_get_an_error().await;
    env.location_uses_its_own_network().await;
    env.hub_is_reached_from_every_location().await;
    let captured = capture.stop().await.unwrap();
    let plan = env.member.plan();
    let unencrypted = format!(
        "not udp port 51820 and not udp portrange 40001-40002 and (net {} or net {} or net {LAN})",
        plan.pod_cidr, plan.wireguard_cidr
    );
    // The API server reaches the kubelets in the datacenter without the mesh.
    let filter = format!("{unencrypted} and not host {}", plan.api_address());
    assert_eq!(captured.packets(&filter).await.unwrap(), Vec::<String>::new());
    // Both clouds are on the captured underlay, and flannel has routes between them. The capture would contain packets that
    // used those routes.
    let vxlan = vxlan.stop().await.unwrap();
    assert_eq!(vxlan.packets("udp").await.unwrap(), Vec::<String>::new());

    api_server::is_reached_without_tunnels(&env).await;
    api_server::killed_agents_become_ready(&env).await;
    api_server::node_of_the_api_server_reboots(&mut env).await;
    env.node_is_followed_into_another_location().await;
    env.node_without_location_is_reported().await;
}

/// The address of the flannel device of a pod's node: the first of the node's pod range.
fn flannel_address(pod: &RunningPod) -> IpAddr {
    let IpAddr::V4(address) = pod.ip else {
        panic!("{} has no IPv4 address", pod.name);
    };
    let [a, b, c, _] = address.octets();
    IpAddr::from([a, b, c, 0])
}

async fn label(cluster: &Cluster<'_>, node: &str, label: &str) {
    cluster
        .kubectl(["label", "node", node, label, "--overwrite"])
        .await
        .unwrap();
}

impl TestEnv<'_> {
    fn web(&self, node: &str) -> &RunningPod {
        self.webs.iter().find(|web| web.node == node).unwrap()
    }

    async fn locations_are_apart_without_the_mesh(&self) {
        let (here, there) = (self.web("tenant-a-1"), self.web("tenant-a-3"));
        for (from, to) in [(here, there), (there, here)] {
            // Not tested with TCP: the server would repeat its SYN-ACK for a minute, unencrypted, even after the capture begins.
            let is_answered = self.lab.ping(&pod(from), to.ip).await.unwrap();
            assert!(!is_answered, "{} -> {}", from.node, to.node);
        }
        let near = url(self.web("tenant-a-2").ip, 8080);
        let answer = self.lab.http_get_until_answered(&pod(here), &near).await.unwrap();
        assert_eq!(answer.client_ip, here.ip);
    }

    /// Waits until packets between pods in different locations use the tunnels. Before, flannel encapsulates them.
    async fn every_node_uses_its_tunnels(&self) {
        let location = |node: &str| LOCATIONS.iter().find(|(name, _)| *name == node).unwrap().1;
        for from in &self.webs {
            for to in &self.webs {
                if location(&from.node) != location(&to.node) {
                    self.wait_for_device(&from.node, to.ip, "kilo0").await;
                }
            }
        }
    }

    async fn pods_reach_pods_with_their_own_address(&self) {
        for from in &self.webs {
            for to in &self.webs {
                assert_answers(self.lab, &pod(from), &url(to.ip, 8080), &[expected_answer(to, from.ip)]).await;
            }
        }
    }

    async fn services_have_endpoints_in_every_location(&self) {
        let web = self.member.cluster_ip("default", "web").await.unwrap();
        for from in &self.webs {
            let others = self.webs.iter().filter(|to| to.name != from.name);
            let wanted: Vec<_> = others.map(|to| expected_answer(to, from.ip)).collect();
            // If kube-proxy chooses the client itself as the endpoint, it masquerades the client.
            let is_from_itself = |answer: &Answer| answer.pod == from.name;
            assert_answers_or(self.lab, &pod(from), &url(web, 80), &wanted, is_from_itself).await;
        }
    }

    /// Pings each node from every pod and from every node, at its InternalIP and at the address of its flannel device.
    async fn nodes_are_reached_at_their_addresses(&self) {
        for from in &self.webs {
            for to in &self.webs {
                for address in [self.lab.node(&to.node).address(), flannel_address(to)] {
                    for client in [pod(from), host(&from.node)] {
                        assert_pings(self.lab, &client, address).await;
                    }
                }
            }
        }
    }

    async fn kubelets_answer_the_api_server(&self) {
        for web in &self.webs {
            let output = self.member.kubectl(["exec", &web.name, "--", "true"]).await;
            output.unwrap();
        }
    }

    /// Between pods of one location, a packet with the MTU of flannel's pods passes. Between locations it is too large for the tunnel,
    /// whose MTU is 1500 - 60.
    async fn packets_too_large_for_the_tunnel_get_an_error(&self) {
        // The headers of IP and ICMP take 28 bytes.
        let size = (POD_MTU - 28).to_string();
        let here = self.web("tenant-a-1");
        for (to, error) in [("tenant-a-2", None), ("tenant-a-4", Some("mtu = 1440"))] {
            let to = self.web(to);
            let address = to.ip.to_string();
            let ping = ["ping", "-n", "-c", "1", "-W", "30", "-M", "do", "-s", &size, &address];
            let output = self.lab.run_at(&pod(here), &ping).await.unwrap();
            let has_error = error.is_none_or(|error| output.stdout.contains(error));
            assert!(
                has_error && output.status.success() == error.is_none(),
                "{size} bytes to {}: {}{}",
                to.node,
                output.stdout,
                output.stderr
            );
            fetch_mebibyte(self.lab, here, to).await;
        }
    }

    /// The datacenter's nodes have no tunnel to each other, and the address of `tenant-a-3`, at which the API server
    /// is reached, needs no tunnel.
    async fn location_uses_its_own_network(&self) {
        for (node, other, to_pod, to_node) in [
            ("tenant-a-1", "tenant-a-2", VXLAN, "eth0"),
            ("tenant-a-2", "tenant-a-1", VXLAN, "eth0"),
            ("tenant-a-1", "tenant-a-4", "kilo0", "kilo0"),
            ("tenant-a-3", "tenant-a-4", "kilo0", "kilo0"),
            ("tenant-a-4", "tenant-a-3", "kilo0", "eth0"),
        ] {
            let web = self.web(other);
            let addresses = [
                (web.ip, to_pod),
                (flannel_address(web), to_pod),
                (self.lab.node(other).address(), to_node),
            ];
            for (address, device) in addresses {
                let used = self.device_to(node, address).await;
                assert_eq!(used, device, "{node} -> {address} of {other}");
            }
        }
    }

    /// The device by which packets from a node to an address leave.
    async fn device_to(&self, node: &str, address: IpAddr) -> String {
        let route = self
            .lab
            .node(node)
            .exec(["ip", "-j", "route", "get", &address.to_string()])
            .await
            .unwrap();
        let route: Value = serde_json::from_str(&route.stdout).unwrap();
        route[0]["dev"].as_str().unwrap().to_owned()
    }

    async fn wait_for_device(&self, node: &str, address: IpAddr, device: &str) {
        wait_until(format!("{node} to use {device} to {address}"), PATIENCE, async || {
            let used = self.device_to(node, address).await;
            if used == device { Ok(()) } else { Err(used) }
        })
        .await
        .unwrap();
    }

    async fn hub_is_reached_from_every_location(&self) {
        for from in &self.webs {
            let node = wireguard(&self.member, &from.node).await;
            let to = &self.hub_webs[0];
            assert_answers(self.lab, &pod(from), &url(to.ip, 8080), &[expected_answer(to, node)]).await;
        }
    }

    /// Gives the node in cloud A the location label of cloud B, and later its own label again. With equal labels, the two nodes
    /// use no tunnel to each other.
    async fn node_is_followed_into_another_location(&self) {
        let (from, to) = (self.web("tenant-a-3"), self.web("tenant-a-4"));
        let probe = self.lab.probe_program().unwrap();
        let node = self.lab.node(&to.node);
        let echo = node
            .pod_spawn("echo", to.ip, [&*probe, "udp-echo", &format!(":{ECHO_PORT}")])
            .unwrap();
        let watch = self.lab.watch_udp(&pod(from), (to.ip, ECHO_PORT).into()).unwrap();
        watch.wait_for_echo_after(0).await.unwrap();
        for (location, device) in [("cloud-b", VXLAN), ("cloud-a", "kilo0")] {
            let moved = unix_millis();
            label(
                &self.member,
                &from.node,
                &format!("topology.kubernetes.io/region={location}"),
            )
            .await;
            for (node, address) in [(&from.node, to.ip), (&to.node, from.ip)] {
                self.wait_for_device(node, address, device).await;
            }
            let followed = unix_millis();
            let next = watch.wait_for_echo_after(followed + 500).await;
            next.unwrap();
            let times = watch.echo_times();
            let longest = times
                .windows(2)
                .map(|pair| (pair[1] - pair[0], pair[1]))
                .filter(|(_, at)| *at > moved)
                .max();
            println!(
                "node moved to {location}: followed after {} ms, longest gap between echoes {} ms",
                followed - moved,
                longest.map_or(0, |(gap, _)| gap)
            );
        }
        drop(echo);
        self.pods_reach_pods_with_their_own_address().await;
    }

    async fn node_without_location_is_reported(&self) {
        label(&self.member, "tenant-a-3", "topology.kubernetes.io/region-").await;
        wait_until("the mesh to report the node", PATIENCE, async || {
            let mesh = json(&self.hub, &["-n", "clustermesh", "get", "clustermesh", "demo"]).await;
            let clusters = mesh["status"]["clusters"].as_array().unwrap();
            let member = clusters.iter().find(|cluster| cluster["name"] == MEMBER).unwrap();
            let skipped = &member["skipped"][0];
            if skipped["node"] == "tenant-a-3" && skipped["reason"] == "NodeNoLocation" {
                println!("{}", skipped["message"]);
                Ok(())
            } else {
                Err(member.to_string())
            }
        })
        .await
        .unwrap();
        // The other nodes are not affected.
        let (from, to) = (self.web("tenant-a-1"), self.web("tenant-a-4"));
        assert_answers(self.lab, &pod(from), &url(to.ip, 8080), &[expected_answer(to, from.ip)]).await;
    }
}
