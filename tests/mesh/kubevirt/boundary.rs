//! Tests the same worker as a sandbox that enters the hub through gateways: what its node reaches through the tunnel
//! and over the underlay, before and after the shipped NetworkPolicies are applied.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Instant,
};

use clustermesh_lab::{
    AGENT_NAMESPACE, Asker, Attacker, GATEWAYS, Granted, Lab, Product, Running, Workers, wait_until,
};

use super::{EGRESS, HUB, MEMBER, PATIENCE, TestEnv, WORKER, host, pod, url};

/// The WireGuard port of gateway pods and of the hub's nodes.
const WIREGUARD: u16 = 51820;

/// The worker's agent routes only the gateways' addresses into the tunnel. Everything else that answers is reached over
/// the underlay.
// threat: underlay-scan, underlay-to-kubelet
pub(super) async fn policies_close_underlay_between_sandbox_and_hub(env: &TestEnv<'_>, product: &Product<'_>) {
    let lab = env.lab;
    product
        .mesh_up(&product.mesh_with(&[MEMBER], &[(MEMBER, EGRESS)]))
        .await
        .unwrap();
    let granted = product.granted(MEMBER).await.unwrap();
    sandbox_dials_gateway_pods_and_hub_nodes_know_nothing(env, &granted).await;
    let tcp = granted.tcp();
    let askers = [host(), pod(&env.webs[0])];
    for from in &askers {
        lab.until_open(from, &tcp).await.unwrap();
    }
    let boundary = lab.boundary(MEMBER).unwrap();
    let admitted = boundary.admitted().await.unwrap();
    let all = boundary.sockets(&[], &granted).await.unwrap();
    let own_api = SocketAddr::new(env.api, 6443);
    let kubelets: BTreeSet<SocketAddr> = lab
        .cluster(HUB)
        .nodes()
        .iter()
        .map(|node| SocketAddr::new(node.address().into(), 10250))
        .collect();
    let worker = SocketAddr::new(env.worker.address().into(), 10250);
    let from_hub = pod(&env.hub_webs[0]);

    let mut echoes = Echoes::on(env).await;
    for echo in &mut echoes.running {
        echo.says("echoing on", PATIENCE).await.unwrap();
    }

    let beside: BTreeSet<SocketAddr> = kubelets.into_iter().chain([own_api]).chain(tcp.clone()).collect();
    let mut open = BTreeSet::new();
    for from in &askers {
        let found = boundary.found(from, &all, &beside).await.unwrap();
        println!("{from}, without policies: {found:?}");
        open.extend(found);
        let answered = wait_until("every echo", PATIENCE, async || {
            let found = lab.scan_udp(from, echoes.sockets.clone()).await;
            match found.map_err(|error| error.to_string())? {
                found if found == echoes.sockets => Ok(()),
                found => Err(format!("{found:?}")),
            }
        });
        answered.await.unwrap();
    }
    lab.until_open(&from_hub, &[worker].into()).await.unwrap();

    let applied = Instant::now();
    for from in &askers {
        boundary.close(from, &open, &tcp).await.unwrap();
    }
    println!("closed {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());
    let want: BTreeSet<SocketAddr> = admitted.union(&tcp).copied().collect();
    for from in &askers {
        assert_eq!(boundary.found(from, &all, &want).await.unwrap(), want, "{from}");
        // From a new source port, because established flows continue.
        let answered = lab.scan_udp(from, echoes.sockets.clone()).await.unwrap();
        assert_eq!(answered, BTreeSet::new(), "{from}");
    }
    lab.until_closed(&from_hub, &[worker].into()).await.unwrap();
    compromised_gateway_reaches_only_pods_and_api_servers(env, all.keys().copied().collect(), &from_hub).await;
    needs_of_worker_still_work(env, product, &askers).await;
    scan_through_tunnel_finds_only_granted_ports(env, &granted, &admitted, &askers).await;
}

/// Scans from a gateway's pod, as a program of an attacker could. `deploy/gateway.yaml` contains the pod's
/// NetworkPolicy.
// threat: gateway-shell
async fn compromised_gateway_reaches_only_pods_and_api_servers(
    env: &TestEnv<'_>,
    all: BTreeSet<SocketAddr>,
    another_pod: &Asker,
) {
    let hub = env.lab.cluster(HUB);
    let plan = hub.plan();
    let is_allowed = |socket: &SocketAddr| match socket.ip() {
        // ClusterIPs lead to pods.
        IpAddr::V4(ip) => {
            plan.pod_cidr.contains(&ip) || plan.service_cidr.contains(&ip) || [443, 6443].contains(&socket.port())
        }
        IpAddr::V6(_) => false,
    };
    let others: BTreeSet<SocketAddr> = all.iter().copied().filter(|socket| !is_allowed(socket)).collect();
    let open = env.lab.scan(another_pod, others.iter().copied()).await.unwrap();
    println!("{another_pod}, which no policy selects: {open:?}");
    assert!(open.iter().any(|socket| socket.port() == 10250), "{open:?}");
    for gateway in hub
        .pods(GATEWAYS, "app.kubernetes.io/name=clustermesh-gateway")
        .await
        .unwrap()
    {
        let from = pod(&gateway);
        let found = env.lab.scan(&from, all.iter().copied()).await.unwrap();
        println!("{from}: {found:?}");
        assert!(
            env.hub_webs
                .iter()
                .all(|web| found.contains(&SocketAddr::new(web.ip, 8080))),
            "{found:?}"
        );
        let open: BTreeSet<SocketAddr> = env.lab.scan(&from, others.iter().copied()).await.unwrap();
        assert_eq!(open, BTreeSet::new(), "{from}");
    }
}

async fn sandbox_dials_gateway_pods_and_hub_nodes_know_nothing(env: &TestEnv<'_>, granted: &Granted) {
    assert_eq!(granted.gateways.len(), 2);
    for gateway in &granted.gateways {
        assert_eq!(gateway.endpoint, SocketAddr::new(gateway.pod, WIREGUARD), "{gateway:?}");
    }
    let kinds = "peers.kilo.squat.ai,peerpolicies.kilo.squat.ai";
    let objects = env.lab.cluster(HUB).kubectl(["get", kinds, "-o", "name"]).await;
    assert_eq!(objects.unwrap().stdout, "");
    let routed = env.lab.tunnel_routes(WORKER).await.unwrap();
    let gateways = granted.gateways.iter().map(|gateway| gateway.wireguard.to_string());
    assert_eq!(routed, gateways.collect());
}

/// Checks the mirrored Service, the API server, and connections from the API server to the kubelet.
async fn needs_of_worker_still_work(env: &TestEnv<'_>, product: &Product<'_>, askers: &[Asker]) {
    granted_service_answers_by_name(env, product, askers).await;
    env.api_server_answers("with policies").await;
    let inside = env
        .member
        .kubectl(["exec", &env.webs[0].name, "--", "hostname"])
        .await
        .unwrap();
    assert_eq!(inside.stdout.trim(), env.webs[0].name);
    // The new process has no WireGuard session.
    let agent = product.agent_pod(MEMBER, WORKER).await.unwrap();
    let words = ["-n", AGENT_NAMESPACE, "delete", "pod", &agent, "--grace-period=1"];
    env.member.kubectl(words).await.unwrap();
    env.member.rollout(AGENT_NAMESPACE, "daemonset/wg-agent").await.unwrap();
    // Its handshake has the same ports as the sessions before, so their conntrack entry would let it pass whatever the
    // policy admits.
    let Workers::Pods { node, .. } = env.member.plan().workers else {
        panic!("{:?}", env.member.plan())
    };
    let carrier = env.lab.cluster(HUB).plan().node(node).name;
    let (worker, port) = (env.worker.address().to_string(), WIREGUARD.to_string());
    let forget = ["conntrack", "-D", "-p", "udp", "-s", &worker, "--dport", &port];
    env.lab.node(&carrier).exec(forget).await.unwrap();
    granted_service_answers_by_name(env, product, askers).await;
}

/// Requests the mirrored Service. The hub's pods see a gateway pod's address.
async fn granted_service_answers_by_name(env: &TestEnv<'_>, product: &Product<'_>, askers: &[Asker]) {
    let service = env.member.cluster_ip("default", "hub-web").await.unwrap();
    let gateways = product.granted(MEMBER).await.unwrap().gateways;
    for from in askers {
        let answer = env.wait_for_answer(from, &url(service, 80)).await;
        assert!(
            gateways.iter().any(|gateway| gateway.pod == answer.saw),
            "{from}: {answer:?}"
        );
    }
}

/// The sandbox's administrator routes all of the hub's addresses through one gateway after another, while the underlay
/// is closed.
// threat: underlay-scan
async fn scan_through_tunnel_finds_only_granted_ports(
    env: &TestEnv<'_>,
    granted: &Granted,
    admitted: &BTreeSet<SocketAddr>,
    askers: &[Asker],
) {
    let hub = env.lab.cluster(HUB);
    let mut all: BTreeMap<SocketAddr, String> = env.member.sockets_beyond(&[&hub], &BTreeSet::new()).await.unwrap();
    granted.add_to(&mut all);
    let addresses: BTreeSet<IpAddr> = all.keys().map(SocketAddr::ip).collect();
    let attacker = Attacker::new(env.lab, MEMBER, WORKER).await.unwrap();
    for gateway in &granted.gateways {
        let left = attacker.leads_through(&gateway.peer, &addresses).await.unwrap();
        let mut want = granted.through(gateway).tcp();
        want.extend(admitted.iter().filter(|socket| left.contains(&socket.ip())));
        for from in askers {
            env.lab.until_open(from, &want).await.unwrap();
            let found = env.lab.scan(from, all.keys().copied()).await.unwrap();
            println!("{from}, all but {left:?} of it through {}: {found:?}", gateway.name);
            assert_eq!(found, want, "{from} through {}", gateway.name);
        }
    }
}

/// UDP echo servers for the sandbox's worker: on both of the hub's nodes (the carrying one and the other), and at
/// WireGuard's port, on a machine among the hub's nodes and in pods that are no gateways.
struct Echoes {
    running: Vec<Running>,
    sockets: BTreeSet<SocketAddr>,
}

impl Echoes {
    const PORT: u16 = 9092;

    async fn on(env: &TestEnv<'_>) -> Self {
        let lab: &Lab = env.lab;
        let probe = lab.directory().join("mesh-probe").display().to_string();
        let hub = lab.cluster(HUB);
        let (mut running, mut sockets) = (Vec::new(), BTreeSet::new());
        for node in hub.nodes() {
            // Bound to its address. Otherwise the carrying node would reply from the address of the pods' gateway.
            let socket = SocketAddr::new(node.address().into(), Self::PORT);
            let words = [&probe, "udp-echo", &socket.to_string()];
            running.push(node.spawn("hub-echo", words).unwrap());
            sockets.insert(socket);
        }
        let [a, b, c, _] = hub.plan().underlay.network().octets();
        let address = Ipv4Addr::new(a, b, c, 200);
        let machine = lab.add_host("hub-machine", address).await.unwrap();
        let socket = SocketAddr::new(address.into(), WIREGUARD);
        let words = [&probe, "udp-echo", &socket.to_string()];
        running.push(machine.spawn("machine-echo", words).unwrap());
        sockets.insert(socket);
        for web in &env.hub_webs {
            let socket = SocketAddr::new(web.ip, WIREGUARD);
            let words = [&probe, "udp-echo", &socket.to_string()];
            let echo = lab.node(&web.node).pod_spawn("pod-echo", web.ip, words);
            running.push(echo.unwrap());
            sockets.insert(socket);
        }
        Self { running, sockets }
    }
}
