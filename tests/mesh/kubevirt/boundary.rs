//! Tests the member of [`super`] as a sandbox that enters the hub through gateways: which sockets its worker, a pod of the hub,
//! reaches through the tunnel and over the underlay, before and after the shipped NetworkPolicies are applied.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Instant,
};

use clustermesh_lab::{AGENT_NAMESPACE, Attacker, GATEWAYS, Granted, Lab, Product, Running, TrafficClient, wait_until};

use super::{EGRESS, HUB, MEMBER, PATIENCE, TestEnv, WORKER, host, pod, url};

/// The WireGuard port of gateway pods.
const WIREGUARD_PORT: u16 = 51820;

/// Scans from the worker and from a pod on it, before and after the NetworkPolicies are applied. The worker's agent routes only the
/// gateways' addresses into the tunnel, so the scans reach everything else over the underlay.
// threat: underlay-scan, underlay-to-kubelet
pub(super) async fn policies_close_underlay_between_sandbox_and_hub(env: &TestEnv<'_>, product: &Product<'_>) {
    let lab = env.lab;
    product
        .mesh_up(&product.mesh_with(&[MEMBER], &[(MEMBER, EGRESS)]))
        .await
        .unwrap();
    let granted = product.granted(MEMBER).await.unwrap();
    sandbox_dials_gateway_pods_and_hub_has_no_peers(env, &granted).await;
    let tcp = granted.tcp_sockets();
    let clients = [host(), pod(&env.webs[0])];
    for from in &clients {
        lab.wait_for_open_sockets(from, &tcp).await.unwrap();
    }
    let boundary = lab.boundary(MEMBER).unwrap();
    // The worker's own API server and the hub's DNS, which the policies admit.
    let admitted = boundary.admitted().await.unwrap();
    let all_sockets = boundary.sockets(&[], &granted).await.unwrap();
    let own_api = SocketAddr::new(env.api, 6443);
    let kubelets: BTreeSet<SocketAddr> = lab
        .cluster(HUB)
        .nodes()
        .iter()
        .map(|node| SocketAddr::new(node.address(), 10250))
        .collect();
    let worker_kubelet = SocketAddr::new(env.worker.address(), 10250);
    let from_hub = pod(&env.hub_webs[0]);

    let mut echoes = Echoes::start(env).await;
    for echo in &mut echoes.running {
        echo.wait_for_log("echoing on", PATIENCE).await.unwrap();
    }

    let expected_open: BTreeSet<SocketAddr> = kubelets.into_iter().chain([own_api]).chain(tcp.clone()).collect();
    let mut open = BTreeSet::new();
    for from in &clients {
        let found = boundary.open_sockets(from, &all_sockets, &expected_open).await.unwrap();
        println!("{from}, without policies: {found:?}");
        open.extend(found);
        let answered = wait_until("every echo server to answer", PATIENCE, async || {
            let found = lab.scan_udp(from, echoes.sockets.clone()).await;
            match found.map_err(|error| error.to_string())? {
                found if found == echoes.sockets => Ok(()),
                found => Err(format!("{found:?}")),
            }
        });
        answered.await.unwrap();
    }
    lab.wait_for_open_sockets(&from_hub, &[worker_kubelet].into())
        .await
        .unwrap();

    let applied = Instant::now();
    // The first call applies the policies, the second applies them again unchanged. Each call waits until they are in force for its client.
    for from in &clients {
        boundary.enforce(from, &open, &tcp).await.unwrap();
    }
    println!("closed {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());
    let want: BTreeSet<SocketAddr> = admitted.union(&tcp).copied().collect();
    for from in &clients {
        assert_eq!(
            boundary.open_sockets(from, &all_sockets, &want).await.unwrap(),
            want,
            "{from}"
        );
        // The scan uses new source ports, because established flows continue.
        let answered = lab.scan_udp(from, echoes.sockets.clone()).await.unwrap();
        assert_eq!(answered, BTreeSet::new(), "{from}");
    }
    lab.wait_for_closed_sockets(&from_hub, &[worker_kubelet].into())
        .await
        .unwrap();
    compromised_gateway_reaches_only_pods_and_api_servers(env, all_sockets.keys().copied().collect(), &from_hub).await;
    granted_service_api_server_and_kubelet_work(env, product, &clients).await;
    scan_through_tunnel_finds_only_granted_ports(env, &granted, &admitted, &clients).await;
}

/// Scans from a gateway's pod, as an attacker with a shell in it could. The pod's NetworkPolicy is in
/// `deploy/gateway.yaml`.
// threat: gateway-shell
async fn compromised_gateway_reaches_only_pods_and_api_servers(
    env: &TestEnv<'_>,
    all_sockets: BTreeSet<SocketAddr>,
    another_pod: &TrafficClient,
) {
    let hub = env.lab.cluster(HUB);
    let plan = hub.plan();
    let is_allowed = |socket: &SocketAddr| match socket.ip() {
        // ClusterIPs lead to pods. The policy does not contain the addresses of API servers: it allows their ports at every address.
        IpAddr::V4(ip) => {
            plan.pod_cidr.contains(&ip) || plan.service_cidr.contains(&ip) || [443, 6443].contains(&socket.port())
        }
        IpAddr::V6(_) => false,
    };
    let forbidden: BTreeSet<SocketAddr> = all_sockets
        .iter()
        .copied()
        .filter(|socket| !is_allowed(socket))
        .collect();
    let open = env.lab.scan(another_pod, forbidden.iter().copied()).await.unwrap();
    println!("{another_pod}, which no policy selects: {open:?}");
    assert!(open.iter().any(|socket| socket.port() == 10250), "{open:?}");
    for gateway in hub
        .pods(GATEWAYS, "app.kubernetes.io/name=clustermesh-gateway")
        .await
        .unwrap()
    {
        let from = pod(&gateway);
        let found = env.lab.scan(&from, all_sockets.iter().copied()).await.unwrap();
        println!("{from}: {found:?}");
        assert!(
            env.hub_webs
                .iter()
                .all(|web| found.contains(&SocketAddr::new(web.ip, 8080))),
            "{found:?}"
        );
        let open: BTreeSet<SocketAddr> = env.lab.scan(&from, forbidden.iter().copied()).await.unwrap();
        assert_eq!(open, BTreeSet::new(), "{from}");
    }
}

async fn sandbox_dials_gateway_pods_and_hub_has_no_peers(env: &TestEnv<'_>, granted: &Granted) {
    assert_eq!(granted.gateways.len(), 2);
    for gateway in &granted.gateways {
        assert_eq!(
            gateway.endpoint,
            SocketAddr::new(gateway.pod, WIREGUARD_PORT),
            "{gateway:?}"
        );
    }
    let kinds = "peers.kilo.squat.ai,peerpolicies.kilo.squat.ai";
    let objects = env.lab.cluster(HUB).kubectl(["get", kinds, "-o", "name"]).await;
    assert_eq!(objects.unwrap().stdout, "");
    let gateways = granted.gateways.iter().map(|gateway| gateway.wireguard.to_string());
    let gateways: BTreeSet<String> = gateways.collect();
    wait_until("the gateways' routes on the worker", PATIENCE, async || {
        let routed = env.lab.tunnel_routes(WORKER).await;
        let routed = routed.map_err(|error| error.to_string())?;
        if routed == gateways {
            Ok(())
        } else {
            Err(format!("{routed:?}"))
        }
    })
    .await
    .unwrap();
}

/// Checks the mirrored Service, the API server, and connections from the API server to the kubelet; then the mirrored Service again
/// after a restart of the worker's agent.
async fn granted_service_api_server_and_kubelet_work(
    env: &TestEnv<'_>,
    product: &Product<'_>,
    clients: &[TrafficClient],
) {
    mirrored_service_answers_through_gateways(env, product, clients).await;
    env.api_server_answers("with policies").await;
    let inside = env
        .member
        .kubectl(["exec", &env.webs[0].name, "--", "hostname"])
        .await
        .unwrap();
    assert_eq!(inside.stdout.trim(), env.webs[0].name);
    // Restart the agent: its new process has no WireGuard session, so it has to do a handshake under the policies.
    let agent = product.agent_pod(MEMBER, WORKER).await.unwrap();
    let args = ["-n", AGENT_NAMESPACE, "delete", "pod", &agent, "--grace-period=1"];
    env.member.kubectl(args).await.unwrap();
    env.member
        .wait_for_rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
        .await
        .unwrap();
    // Delete the conntrack entry of the old agent's session. The new agent's handshake has the same addresses and
    // ports, so the worker's host node would accept it as part of the old flow, regardless of the policies.
    let host_node = env.worker.host_node().unwrap();
    let (worker, port) = (env.worker.address().to_string(), WIREGUARD_PORT.to_string());
    let forget = ["conntrack", "-D", "-p", "udp", "-s", &worker, "--dport", &port];
    env.lab.node(&host_node.name).exec(forget).await.unwrap();
    mirrored_service_answers_through_gateways(env, product, clients).await;
}

/// Requests the mirrored Service. The hub's pods see a gateway pod's address as the source.
async fn mirrored_service_answers_through_gateways(
    env: &TestEnv<'_>,
    product: &Product<'_>,
    clients: &[TrafficClient],
) {
    let service = env.member.cluster_ip("default", "hub-web").await.unwrap();
    let gateways = product.granted(MEMBER).await.unwrap().gateways;
    for from in clients {
        let answer = env.wait_for_answer(from, &url(service, 80)).await;
        assert!(
            gateways.iter().any(|gateway| gateway.pod == answer.client_ip),
            "{from}: {answer:?}"
        );
    }
}

/// The sandbox's administrator routes the hub's addresses through one gateway after another, while the underlay is closed. The agent
/// keeps a few addresses on the underlay, such as the next hop.
// threat: underlay-scan
async fn scan_through_tunnel_finds_only_granted_ports(
    env: &TestEnv<'_>,
    granted: &Granted,
    admitted: &BTreeSet<SocketAddr>,
    clients: &[TrafficClient],
) {
    let hub = env.lab.cluster(HUB);
    let mut all_sockets: BTreeMap<SocketAddr, String> =
        env.member.foreign_sockets(&[&hub], &BTreeSet::new()).await.unwrap();
    granted.add_gateway_sockets(&mut all_sockets);
    let addresses: BTreeSet<IpAddr> = all_sockets.keys().map(SocketAddr::ip).collect();
    let attacker = Attacker::new(env.lab, MEMBER, WORKER).await.unwrap();
    for gateway in &granted.gateways {
        let kept_on_underlay = attacker.route_through(&gateway.peer, &addresses).await.unwrap();
        let mut want = granted.through(gateway).tcp_sockets();
        want.extend(admitted.iter().filter(|socket| kept_on_underlay.contains(&socket.ip())));
        for from in clients {
            env.lab.wait_for_open_sockets(from, &want).await.unwrap();
            let found = env.lab.scan(from, all_sockets.keys().copied()).await.unwrap();
            println!(
                "{from}, all addresses except {kept_on_underlay:?} through {}: {found:?}",
                gateway.name
            );
            assert_eq!(found, want, "{from} through {}", gateway.name);
        }
    }
}

/// UDP echo servers that the sandbox's worker must not reach under the policies: on both nodes of the hub (one of them runs the
/// worker's pod), and at the WireGuard port on a machine in the hub's underlay and in pods that are not gateways.
struct Echoes {
    running: Vec<Running>,
    sockets: BTreeSet<SocketAddr>,
}

impl Echoes {
    const PORT: u16 = 9092;

    async fn start(env: &TestEnv<'_>) -> Self {
        let lab: &Lab = env.lab;
        let probe = lab.probe_program().unwrap();
        let hub = lab.cluster(HUB);
        let (mut running, mut sockets) = (Vec::new(), BTreeSet::new());
        for node in hub.nodes() {
            // Bound to the node's address. Otherwise the node that runs the worker would reply from its address on the pods'
            // bridge.
            let socket = SocketAddr::new(node.address(), Self::PORT);
            let args = [&probe, "udp-echo", &socket.to_string()];
            running.push(node.spawn("hub-echo", args).unwrap());
            sockets.insert(socket);
        }
        let [a, b, c, _] = hub.plan().underlay.network().octets();
        let address = Ipv4Addr::new(a, b, c, 200);
        let machine = lab.add_host("hub-machine", address).await.unwrap();
        let (range, via) = (hub.plan().pod_cidr.to_string(), env.worker.host_node().unwrap().address);
        let route = ["ip", "route", "add", &range, "via", &via.to_string()];
        machine.exec(route).await.unwrap();
        let socket = SocketAddr::new(address.into(), WIREGUARD_PORT);
        let args = [&probe, "udp-echo", &socket.to_string()];
        running.push(machine.spawn("machine-echo", args).unwrap());
        sockets.insert(socket);
        for web in &env.hub_webs {
            let socket = SocketAddr::new(web.ip, WIREGUARD_PORT);
            let args = [&probe, "udp-echo", &socket.to_string()];
            let echo = lab.node(&web.node).pod_spawn("pod-echo", web.ip, args);
            running.push(echo.unwrap());
            sockets.insert(socket);
        }
        Self { running, sockets }
    }
}
