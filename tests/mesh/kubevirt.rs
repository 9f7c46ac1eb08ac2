//! Tests a member whose two workers are pods of the hub, as with KubeVirt, on two nodes of the hub whose pod network is a VXLAN. A worker's
//! eth0 has the address of a hub pod, and the member's API server has a ClusterIP of the hub; both are inside the mesh's
//! networks. Outer packets and packets to the API server, the resolver and the other worker use eth0, and clients that connect to
//! eth0 get replies from it. All other packets to the hub use the tunnel or are dropped. A worker may move to another node of the
//! hub. At the end the member becomes a sandbox and enters the hub through gateways. The sandbox also reaches the hub over the
//! underlay, until NetworkPolicies close this path.

mod address;
mod boundary;
mod masquerade;
mod migration;
mod mtu;
mod siblings;

use std::{net::IpAddr, time::Instant};

use clustermesh_lab::{
    AGENT_NAMESPACE, Answer, Captured, Cluster, Lab, LabPlan, Node, NodeNetwork, Product, Running, RunningPod,
    TrafficClient, Tunnel, wait_until,
};
use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::setup::{PATIENCE, as_v4, curl, json, pod, url};

const HUB: &str = "mgmt";
const MEMBER: &str = "kv";
const WORKER: &str = "kv-1";
const SIBLING: &str = "kv-2";
/// Mirrors the hub's web servers in the member under the name `hub-web`.
const EGRESS: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";
/// Ports at which servers in each worker's host network serve HTTP and echo datagrams. The sockets are bound to no address, so the
/// kernel chooses the source address of replies.
const HTTP_PORT: u16 = 9090;
const ECHO_PORT: u16 = 9091;

#[tokio::test]
async fn worker_in_hub_pod_uses_eth0_only_for_its_underlay() {
    let start = Instant::now();
    let plan = LabPlan::clusters(&[(HUB, 2), (MEMBER, 2)])
        .with_vxlan(HUB)
        .with_workers_in_pods(MEMBER, HUB, &[1, 2])
        .with_policies(HUB);
    let lab = Lab::start(plan).await.unwrap();
    println!("two clusters: {:.1} s", start.elapsed().as_secs_f64());
    let hub = lab.cluster(HUB);
    let mut product = Product::install(&lab, &[HUB, MEMBER], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let mut env = TestEnv::new(&lab).await;
    // The agent becomes ready before there is a mesh, because it reaches the API server without the tunnel.
    env.member
        .wait_for_rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
        .await
        .unwrap();
    env.api_server_answers("before the mesh").await;
    env.hub_pods_get_replies_on_eth0("before the mesh").await;

    let start = Instant::now();
    product.mesh_up(&product.mesh(&[(MEMBER, EGRESS)])).await.unwrap();
    println!("Ready: {:.1} s after kubectl apply", start.elapsed().as_secs_f64());
    env.wireguard = env.wireguard_address().await;
    env.wait_for_answer(&pod(&env.webs[0]), &url(env.hub_webs[0].ip, 8080))
        .await;

    let capture = env.worker.capture("tunnel-up", "ip").await.unwrap();
    env.underlay_addresses_have_throw_routes().await;
    env.pods_reach_pods_with_own_address().await;
    env.worker_sends_from_its_wireguard_address().await;
    env.hub_pods_get_replies_on_eth0("tunnel up").await;
    env.node_port_on_eth0_reaches_hub_pods_through_tunnel().await;
    env.resolver_answers().await;
    siblings::workers_and_their_pods_reach_each_other(&env).await;
    migration::flows_continue_on_another_node(&mut env).await;
    env.api_server_answers("tunnel up").await;
    env.kubelet_renews_its_lease().await;
    let captured = capture.stop().await.unwrap();
    assert_eq!(env.unencrypted(&captured).await, Vec::<String>::new());
    assert_ne!(captured.packets("udp port 51820").await.unwrap().len(), 0);
    siblings::uses_no_tunnel(&env, &captured).await;
    // Each of the two hub pods has sent three datagrams.
    let (tcp, udp) = env.count_replies_on_eth0(&captured).await;
    assert!(tcp > 0 && udp >= 6, "{tcp} TCP and {udp} UDP replies on eth0");

    masquerade::flow_continues_on_the_workers_new_node(&mut env).await;
    mtu::tunnel_follows_mtu_of_pod_network(&env).await;
    address::worker_with_another_address_is_found(&mut env, &product).await;
    env.dead_agent_keeps_underlay_open_and_mesh_closed(&hub).await;
    env.worker_recovers_from_power_cut_through_eth0(&product).await;
    product.install_gateways(&["default"]).await.unwrap();
    boundary::policies_close_underlay_between_sandbox_and_hub(&env, &product).await;
}

/// The clusters and servers of this test.
struct TestEnv<'a> {
    lab: &'a Lab,
    member: Cluster<'a>,
    worker: Node<'a>,
    /// The other worker.
    sibling: Node<'a>,
    /// The web servers in the hub.
    hub_webs: Vec<RunningPod>,
    /// The web servers in the member, one on each worker.
    webs: Vec<RunningPod>,
    /// The hub's ClusterIP at which the member reaches its API server.
    api: IpAddr,
    /// The worker's WireGuard address; unset before the mesh.
    wireguard: IpAddr,
    servers: Vec<Running>,
}

impl<'a> TestEnv<'a> {
    async fn new(lab: &'a Lab) -> Self {
        let (hub, member) = (lab.cluster(HUB), lab.cluster(MEMBER));
        let (worker, sibling) = (lab.node(WORKER), lab.node(SIBLING));
        let NodeNetwork::Pods { api, .. } = member.plan().node_network else {
            panic!("{:?}", member.plan().node_network)
        };
        assert!(hub.plan().pod_cidr.contains(&as_v4(worker.address())), "{worker:?}");
        assert!(hub.plan().service_cidr.contains(&api), "{api}");
        let endpoints = json(&member, &["get", "endpointslices", "kubernetes"]).await;
        let endpoint = &endpoints["endpoints"][0]["addresses"][0];
        assert_eq!(endpoint, &Value::from(api.to_string()), "{endpoints:#}");
        let (hub_webs, webs) = (hub.run_web().await.unwrap(), member.run_web().await.unwrap());
        let mut env = Self {
            lab,
            member,
            worker,
            sibling,
            hub_webs,
            webs,
            api: api.into(),
            wireguard: IpAddr::from([0, 0, 0, 0]),
            servers: vec![],
        };
        env.serve().await;
        env
    }

    /// Starts the servers in the host networks of both workers.
    async fn serve(&mut self) {
        for worker in [WORKER, SIBLING] {
            self.serve_on(worker).await;
        }
    }

    async fn serve_on(&mut self, worker: &str) {
        let node = self.lab.node(worker);
        let probe = self.lab.probe_program().unwrap();
        let (http, echo, name) = (
            format!(":{HTTP_PORT}"),
            format!(":{ECHO_PORT}"),
            format!("NODE={worker}"),
        );
        let args = ["env", &name, &probe, "serve", &http];
        let mut serving = node.spawn("host-service", args).unwrap();
        serving.wait_for_log("serving on", PATIENCE).await.unwrap();
        let mut echoing = node.spawn("host-echo", [&probe, "udp-echo", &echo]).unwrap();
        echoing.wait_for_log("echoing on", PATIENCE).await.unwrap();
        self.servers.extend([serving, echoing]);
    }

    async fn wait_for_answer(&self, from: &TrafficClient, url: &str) -> Answer {
        self.lab.http_get_until_answered(from, url).await.unwrap()
    }

    /// Sends one request that must not be answered.
    async fn assert_closed(&self, from: &TrafficClient, url: &str) {
        let answer = self.lab.http_get(from, url).await.unwrap();
        println!("{from} -> {url}: {}", answer.expect_err("a closed path gets no answer"));
    }

    async fn wireguard_address(&self) -> IpAddr {
        let node = json(&self.member, &["get", "node", WORKER]).await;
        let address = &node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"];
        address.as_str().unwrap().split_once('/').unwrap().0.parse().unwrap()
    }

    /// Requests the API server from the worker's host network and from a pod: at the hub's ClusterIP, which kubelet and kube-proxy use,
    /// and at the ClusterIP of the member's Service `kubernetes`, which pods use.
    async fn api_server_answers(&self, when: &str) {
        let service_ip = self.member.plan().api_service_ip();
        for client in [host(), pod(&self.webs[0])] {
            for target in [
                format!("https://{}:6443/readyz", self.api),
                format!("https://{service_ip}/readyz"),
            ] {
                let answer = curl(self.lab, &client, &[&target]).await;
                assert_eq!(answer, "ok", "{when}: {client} -> {target}");
            }
        }
    }

    /// Sends over TCP and UDP from pods of both hub nodes. The worker sees each pod's own address, and each pod gets
    /// replies from the address of eth0.
    async fn hub_pods_get_replies_on_eth0(&self, when: &str) {
        self.connections_get_replies_on_eth0(when).await;
        let eth0 = self.worker.address();
        let probe = self.lab.probe_program().unwrap();
        for from in &self.hub_webs {
            let to = format!("{eth0}:{ECHO_PORT}");
            let args = [&probe, "udp-send", &to, "datagram", "3"];
            let output = self.lab.run_at(&pod(from), &args).await.unwrap();
            let lines: Vec<&str> = output.stdout.lines().collect();
            let has_pod_source =
                |line: &&str| line.starts_with(&format!("{}:", from.ip)) && line.ends_with(" datagram");
            assert!(
                lines.len() == 3 && lines.iter().all(has_pod_source),
                "{when}: {from:?}: {output:?}"
            );
        }
    }

    async fn connections_get_replies_on_eth0(&self, when: &str) {
        for from in &self.hub_webs {
            let answer = self
                .wait_for_answer(&pod(from), &url(self.worker.address(), HTTP_PORT))
                .await;
            assert_eq!(answer, expected_answer(WORKER, WORKER, from.ip), "{when}: {from:?}");
        }
    }

    async fn underlay_addresses_have_throw_routes(&self) {
        let args = ["ip", "-j", "route", "show", "table", "5182", "type", "throw"];
        let routes: Value = serde_json::from_str(&self.worker.exec(args).await.unwrap().stdout).unwrap();
        let thrown: Vec<&str> = routes
            .as_array()
            .unwrap()
            .iter()
            .map(|route| route["dst"].as_str().unwrap())
            .collect();
        println!("thrown: {thrown:?}");
        for needed in [self.api, self.next_hop()] {
            assert!(thrown.contains(&needed.to_string().as_str()), "{needed}: {routes:#}");
        }
    }

    async fn pods_reach_pods_with_own_address(&self) {
        for web in &self.webs {
            for hub_web in &self.hub_webs {
                for (from, to) in [(web, hub_web), (hub_web, web)] {
                    let answer = self.wait_for_answer(&pod(from), &url(to.ip, 8080)).await;
                    assert_eq!(answer, expected_answer(&to.name, &to.node, from.ip));
                }
            }
        }
    }

    async fn worker_sends_from_its_wireguard_address(&self) {
        for to in &self.hub_webs {
            let answer = self.wait_for_answer(&host(), &url(to.ip, 8080)).await;
            assert_eq!(answer, expected_answer(&to.name, &to.node, self.wireguard));
        }
    }

    /// The connection arrives at eth0 and is translated (DNAT) to an address in the mesh.
    async fn node_port_on_eth0_reaches_hub_pods_through_tunnel(&self) {
        let patch = ["patch", "service", "hub-web", "--type=merge", "-p"];
        let args = [&patch[..], &[r#"{"spec":{"type":"NodePort"}}"#]].concat();
        self.member.kubectl(args).await.unwrap();
        let service = json(&self.member, &["get", "service", "hub-web"]).await;
        let port = service["spec"]["ports"][0]["nodePort"].as_u64().unwrap();
        let url = url(self.worker.address(), u16::try_from(port).unwrap());
        for from in &self.hub_webs {
            let answer = self.wait_for_answer(&pod(from), &url).await;
            let want = self
                .hub_webs
                .iter()
                .map(|to| expected_answer(&to.name, &to.node, self.wireguard));
            assert!(want.clone().any(|one| one == answer), "{from:?}: {answer:?}");
        }
        let args = [&patch[..], &[r#"{"spec":{"type":"ClusterIP"}}"#]].concat();
        self.member.kubectl(args).await.unwrap();
    }

    /// Waits until the lease is renewed twice, and checks that the Node is Ready.
    async fn kubelet_renews_its_lease(&self) {
        let args = ["get", "lease", "-n", "kube-node-lease", WORKER];
        let renewed = async || json(&self.member, &args).await["spec"]["renewTime"].to_string();
        for _ in 0..2 {
            let before = renewed().await;
            wait_until("the kubelet to renew its lease", PATIENCE, async || {
                let now = renewed().await;
                if now > before { Ok(()) } else { Err(now) }
            })
            .await
            .unwrap();
        }
        let node = json(&self.member, &["get", "node", WORKER]).await;
        let conditions = node["status"]["conditions"].as_array().unwrap();
        let ready = conditions
            .iter()
            .find(|condition| condition["type"] == "Ready")
            .unwrap();
        assert_eq!(ready["status"], "True", "{node:#}");
    }

    /// The worker resolves names with the hub's DNS, whose ClusterIP is inside the mesh's networks.
    async fn resolver_answers(&self) {
        let name = "web.default.svc.cluster.local";
        let address = self.lab.cluster(HUB).cluster_ip("default", "web").await.unwrap();
        let output = self.lab.run_at(&host(), &["busybox", "nslookup", name]).await.unwrap();
        let answer = format!("Name:\t{name}\nAddress: {address}\n");
        assert!(output.stdout.contains(&answer), "{output:?}");
    }

    /// Captured packets that the worker sent through eth0 into the hub's networks or to the hub's nodes. Ignored are WireGuard packets,
    /// packets to the API server, the resolver, the other worker and the next hop, replies of the servers in the host network and of
    /// NodePorts, and ICMP errors about closed ports, such as the WireGuard port while no agent runs.
    async fn unencrypted(&self, captured: &Captured) -> Vec<String> {
        let hub = self.lab.cluster(HUB);
        let plan = hub.plan();
        let nodes: String = hub
            .nodes()
            .iter()
            .map(|node| format!(" or dst host {}", node.address()))
            .collect();
        let next_hop = self.next_hop();
        let filter = format!(
            "ether src {mac} and not udp port 51820 and (dst net {pods} or dst net {services} or dst net {wireguard}{nodes}) \
             and not (icmp[icmptype] == icmp-unreach and icmp[icmpcode] == 3) and not dst host {api} and not dst host {next_hop} \
             and not dst host {sibling} and not (dst host {dns} and udp dst port 53) \
             and not (src host {eth0} and (tcp src port {HTTP_PORT} or udp src port {ECHO_PORT} or tcp src portrange 30000-32767))",
            mac = self.mac().await,
            pods = plan.pod_cidr,
            services = plan.service_cidr,
            wireguard = plan.wireguard_cidr,
            api = self.api,
            sibling = self.sibling.address(),
            dns = plan.dns_ip(),
            eth0 = self.worker.address(),
        );
        captured.packets(&filter).await.unwrap()
    }

    /// The worker's default gateway: its host node.
    fn next_hop(&self) -> IpAddr {
        let [a, b, c, _] = as_v4(self.worker.address()).octets();
        IpAddr::from([a, b, c, 1])
    }

    /// Number of replies over TCP and over UDP that left through eth0 with its address.
    async fn count_replies_on_eth0(&self, captured: &Captured) -> (usize, usize) {
        let (mac, eth0) = (self.mac().await, self.worker.address());
        let mut counts = [0; 2];
        for (count, port) in counts
            .iter_mut()
            .zip([format!("tcp src port {HTTP_PORT}"), format!("udp src port {ECHO_PORT}")])
        {
            let filter = format!("ether src {mac} and src host {eth0} and {port}");
            *count = captured.packets(&filter).await.unwrap().len();
        }
        (counts[0], counts[1])
    }

    async fn mac(&self) -> String {
        let output = self.worker.exec(["cat", "/sys/class/net/eth0/address"]).await.unwrap();
        output.stdout.trim().to_owned()
    }

    /// When the agent dies, its userspace device loses the carrier. The kernel keeps the routes and rules.
    async fn dead_agent_keeps_underlay_open_and_mesh_closed(&self, hub: &Cluster<'_>) {
        // A stopped kubelet cannot restart the agent.
        self.worker.signal("kubelet", Signal::SIGSTOP).unwrap();
        let capture = self.worker.capture("tunnel-down", "ip").await.unwrap();
        self.worker.signal("wg-agent", Signal::SIGKILL).unwrap();
        wait_until("kilo0 to lose its carrier", PATIENCE, async || {
            let shown = self.worker.try_exec(["ip", "link", "show", "kilo0"]).await.unwrap();
            if shown.stdout.contains("NO-CARRIER") {
                Ok(())
            } else {
                Err(shown.stdout)
            }
        })
        .await
        .unwrap();
        self.mesh_is_closed(hub).await;
        self.api_server_answers("agent dead").await;
        self.resolver_answers().await;
        // Checks TCP only: the socket of an accepted TCP connection has the underlay mark (`tcp_fwmark_accept`). A UDP
        // server's socket has none, so the kernel looks up the route of the reply before any nftables hook can set the
        // mark. While kilo0 has no carrier, that route is `unreachable`.
        self.connections_get_replies_on_eth0("agent dead").await;
        // Delete our policy routing rules, as another program could, so that only the firewall drops the packets.
        for preference in ["1000", "1001"] {
            self.worker
                .exec(["ip", "rule", "del", "pref", preference])
                .await
                .unwrap();
        }
        self.mesh_is_closed(hub).await;
        self.worker.signal("kubelet", Signal::SIGCONT).unwrap();
        let continued = Instant::now();
        self.pods_reach_pods_with_own_address().await;
        println!(
            "the agent forwards again {:.1} s after the kubelet continued",
            continued.elapsed().as_secs_f64()
        );
        let captured = capture.stop().await.unwrap();
        assert_eq!(self.unencrypted(&captured).await, Vec::<String>::new());
        let (tcp, _) = self.count_replies_on_eth0(&captured).await;
        assert_ne!(tcp, 0, "no connection was answered on eth0");
    }

    /// Checks that no request crosses the mesh in either direction, and that no ping reaches the hub's pods.
    async fn mesh_is_closed(&self, hub: &Cluster<'_>) {
        let cluster_ip = hub.cluster_ip("default", "web").await.unwrap();
        let mut requests = Vec::new();
        for from in [pod(&self.webs[0]), host()] {
            for to in &self.hub_webs {
                requests.push((from.clone(), url(to.ip, 8080)));
                requests.push((from.clone(), url(self.lab.node(&to.node).address(), 8080)));
            }
            requests.push((from, url(cluster_ip, 80)));
        }
        let from_hub = self.hub_webs.iter().map(pod);
        requests.extend(from_hub.map(|from| (from, url(self.webs[0].ip, 8080))));
        // Sent concurrently, because most requests wait for their timeout.
        join_all(requests.iter().map(|(from, url)| self.assert_closed(from, url))).await;
        let pings = self.hub_webs.iter().map(|to| to.ip);
        let pings = pings.flat_map(|to| [pod(&self.webs[0]), host()].map(|from| (from, to)));
        let checks = pings.map(async |(from, to)| {
            let answered = self.lab.ping(&from, to).await.unwrap();
            assert!(!answered, "ping {from} -> {to}");
        });
        join_all(checks).await;
    }

    /// The worker loses its key, tunnel and routes. Everything that it needs to restore them is reachable without the
    /// tunnel.
    async fn worker_recovers_from_power_cut_through_eth0(&mut self, product: &Product<'_>) {
        self.servers.clear();
        self.worker.power_cut().await.unwrap();
        let on = Instant::now();
        self.worker.power_on().await.unwrap();
        println!("Ready again: {:.1} s", on.elapsed().as_secs_f64());
        self.member.wait_for_rollout("default", "deployment/web").await.unwrap();
        product.wait_until_ready().await.unwrap();
        self.serve().await;
        self.webs = wait_until("the web servers to run again", PATIENCE, async || {
            let webs = self.member.web_pods().await.map_err(|error| error.to_string())?;
            let output = self.worker.pod_exec(webs.first().ok_or("none")?.ip, ["true"]).await;
            match output {
                Ok(output) if output.status.success() => Ok(webs),
                other => Err(format!("{webs:?}: {other:?}")),
            }
        })
        .await
        .unwrap();
        self.wireguard = self.wireguard_address().await;
        // Until its agent has read the Peers and PeerPolicies, the restarted worker uses its default route, as without
        // a mesh.
        let (from, to) = (&self.webs[0], &self.hub_webs[0]);
        wait_until("the restarted worker to use the tunnel", PATIENCE, async || match self
            .lab
            .http_get(&pod(from), &url(to.ip, 8080))
            .await
            .map_err(|error| error.to_string())?
        {
            Ok(answer) if answer.client_ip == from.ip => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap();
        self.pods_reach_pods_with_own_address().await;
        println!("meshed again {:.1} s after power on", on.elapsed().as_secs_f64());
        self.worker_sends_from_its_wireguard_address().await;
        self.api_server_answers("after the power cut").await;
        self.hub_pods_get_replies_on_eth0("after the power cut").await;
    }
}

fn host() -> TrafficClient {
    TrafficClient::Host(WORKER.to_owned())
}

fn expected_answer(pod: &str, node: &str, client_ip: IpAddr) -> Answer {
    Answer {
        pod: pod.into(),
        node: node.into(),
        client_ip,
    }
}
