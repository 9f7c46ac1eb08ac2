//! Tests every kind of flow between Routed members on two whole clusters: which server answers, which source address it
//! sees, and which destinations cannot be reached. No packet of a tunnel may pass unencrypted, not even when an agent dies
//! or the mesh is deleted.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use clustermesh_lab::{Answer, Lab, LabPlan, NAMESPACE, RunningPod, TrafficClient, wait_until};
use nix::sys::signal::Signal;

use crate::setup::{
    HUB, MEMBER, Mesh, PATIENCE, anchors_of, as_v4, assert_pings, curl, fetch_mebibyte, host, json, pod, url,
};

#[tokio::test]
async fn flows_between_routed_members_work_and_are_encrypted() {
    let plan = LabPlan::clusters(&[(HUB, 2), (MEMBER, 2)]).with_policies(HUB);
    let lab = Lab::start(plan).await.unwrap();
    // Add the hub's API server to allowedNetworks, so that only the firewall closes it to the member.
    let api = format!("{}/32", lab.cluster(HUB).plan().api_address());
    let mesh = Mesh::up(&lab, &[api]).await;

    let capture = lab.capture("flows", "ip").await.unwrap();
    pods_reach_remote_pods_with_own_address(&mesh).await;
    mirrored_service_has_local_cluster_ip_and_keeps_source(&mesh).await;
    node_port_of_mirrored_service_reaches_remote_pods(&mesh).await;
    remote_cluster_ip_is_reached_through_anchor(&mesh).await;
    anchor_moves_off_a_cordoned_node(&mesh).await;
    host_networks_use_wireguard_address_only_as_source(&mesh).await;
    infrastructure_ports_are_open_only_in_own_cluster(&mesh).await;
    packet_above_mtu_gets_icmp_error_and_tcp_is_clamped(&mesh).await;
    let captured = capture.stop().await.unwrap();
    println!(
        "{} WireGuard packets passed",
        mesh.count_wireguard_packets(&captured).await
    );
    assert_eq!(mesh.unencrypted(&captured).await, Vec::<String>::new());

    member_pods_cannot_read_controller_metrics(&mesh).await;
    controller_policy_opens_only_required_sockets(&mesh).await;
    dead_agent_closes_tunnel_and_leaks_nothing(&mesh).await;
    deletion_of_mesh_leaks_no_tunnelled_flow(&mesh).await;
}

async fn pods_reach_remote_pods_with_own_address(mesh: &Mesh<'_>) {
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for from in clients {
            for to in servers {
                let answer = mesh.wait_for_answer(&pod(from), &url(to.ip, 8080)).await;
                assert_eq!(answer, mesh.expected_answer(to, from.ip));
                assert_pings(mesh.lab, &pod(from), to.ip).await;
            }
        }
    }
}

async fn mirrored_service_has_local_cluster_ip_and_keeps_source(mesh: &Mesh<'_>) {
    let service = mesh.member.cluster_ip("default", "hub-web").await.unwrap();
    assert!(mesh.member.plan().service_cidr.contains(&as_v4(service)));
    for from in &mesh.member_webs {
        let want: Vec<Answer> = mesh
            .hub_webs
            .iter()
            .map(|to| mesh.expected_answer(to, from.ip))
            .collect();
        mesh.assert_answers(&pod(from), &url(service, 80), &want).await;
    }
}

async fn node_port_of_mirrored_service_reaches_remote_pods(mesh: &Mesh<'_>) {
    let node_port = r#"{"spec":{"type":"NodePort"}}"#;
    let patch = ["patch", "service", "hub-web", "--type=merge", "-p", node_port];
    mesh.member.kubectl(patch).await.unwrap();
    let service = json(&mesh.member, &["get", "service", "hub-web"]).await;
    let port = service["spec"]["ports"][0]["nodePort"].as_u64().unwrap();
    let outside = mesh
        .lab
        .add_host("outside", "172.30.9.9".parse().unwrap())
        .await
        .unwrap();
    for node in mesh.member.nodes() {
        let source = mesh.wireguard[node.name()];
        let want: Vec<Answer> = mesh
            .hub_webs
            .iter()
            .map(|to| mesh.expected_answer(to, source))
            .collect();
        let url = url(node.address(), u16::try_from(port).unwrap());
        mesh.assert_answers(&host(outside.name()), &url, &want).await;
    }
    let back = r#"{"spec":{"type":"ClusterIP"}}"#;
    let patch = ["patch", "service", "hub-web", "--type=merge", "-p", back];
    mesh.member.kubectl(patch).await.unwrap();
}

async fn remote_cluster_ip_is_reached_through_anchor(mesh: &Mesh<'_>) {
    for (importer, exporter, clients, servers) in [
        (&mesh.member, &mesh.hub, &mesh.member_webs, &mesh.hub_webs),
        (&mesh.hub, &mesh.member, &mesh.hub_webs, &mesh.member_webs),
    ] {
        let anchor = mesh.anchor(exporter, importer).await;
        // The anchor masquerades: a pod on the anchor sees the anchor's bridge address, and a pod on another node sees
        // the anchor's own address.
        let want: Vec<Answer> = servers
            .iter()
            .map(|to| {
                mesh.expected_answer(
                    to,
                    if to.node == anchor {
                        bridge_address(to)
                    } else {
                        mesh.lab.node(&anchor).address()
                    },
                )
            })
            .collect();
        let service = exporter.cluster_ip("default", "web").await.unwrap();
        for from in clients {
            mesh.assert_answers(&pod(from), &url(service, 80), &want).await;
            mesh.assert_answers(&host(&from.node), &url(service, 80), &want).await;
        }
    }
}

/// A cordoned node will probably be removed soon, so it gives up its anchored networks while it still forwards packets.
async fn anchor_moves_off_a_cordoned_node(mesh: &Mesh<'_>) {
    let cordoned = mesh.anchor(&mesh.hub, &mesh.member).await;
    mesh.hub.kubectl(["cordon", &cordoned]).await.unwrap();
    wait_until("the other node to become the anchor", PATIENCE, async || {
        let anchors = anchors_of(&mesh.hub.plan().service_cidr.to_string(), &mesh.member).await;
        match &anchors[..] {
            [anchor] if *anchor != cordoned => Ok(()),
            _ => Err(format!("{anchors:?}")),
        }
    })
    .await
    .unwrap();
    let service = mesh.hub.cluster_ip("default", "web").await.unwrap();
    for from in &mesh.member_webs {
        mesh.wait_for_answer(&pod(from), &url(service, 80)).await;
    }
    mesh.hub.kubectl(["uncordon", &cordoned]).await.unwrap();
}

/// The address of the pod's node on the pods' bridge.
fn bridge_address(web: &RunningPod) -> IpAddr {
    let [a, b, c, _] = as_v4(web.ip).octets();
    IpAddr::from([a, b, c, 1])
}

async fn host_networks_use_wireguard_address_only_as_source(mesh: &Mesh<'_>) {
    let mirrored = mesh.member.cluster_ip("default", "hub-web").await.unwrap();
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for node in clients.iter().map(|web| &web.node) {
            for to in servers {
                let answer = mesh.wait_for_answer(&host(node), &url(to.ip, 8080)).await;
                assert_eq!(answer, mesh.expected_answer(to, mesh.wireguard[node]));
            }
        }
    }
    for node in mesh.member_webs.iter().map(|web| &web.node) {
        let want: Vec<Answer> = mesh
            .hub_webs
            .iter()
            .map(|to| mesh.expected_answer(to, mesh.wireguard[node]))
            .collect();
        mesh.assert_answers(&host(node), &url(mirrored, 80), &want).await;
    }
    // The other member reaches a server in a node's host network at the node's own address if allowedNetworks contains it, but
    // never at the node's WireGuard address. A client in a pod keeps its source address.
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for server in servers.iter().map(|web| &web.node) {
            let node = mesh.lab.node(server);
            let name = format!("NODE={server}");
            let args = ["env", &name, &mesh.probe(), "serve", ":9090"];
            let mut serving = node.spawn("host-service", args).unwrap();
            serving.wait_for_log("serving on", PATIENCE).await.unwrap();
            let server_url = url(mesh.wireguard[server], 9090);
            assert_eq!(
                mesh.status(&host(server), &server_url).await,
                "200",
                "from its own node"
            );
            for from in clients {
                for (client, source) in [(pod(from), from.ip), (host(&from.node), mesh.wireguard[&from.node])] {
                    // Only the hub's nodes have their own addresses in allowedNetworks.
                    if server.starts_with(HUB) {
                        let to = node.address();
                        let answer = mesh.wait_for_answer(&client, &url(to, 9090)).await;
                        let want = Answer {
                            pod: server.clone(),
                            node: server.clone(),
                            client_ip: source,
                        };
                        assert_eq!(answer, want, "{client} -> {to}");
                    }
                    let why = mesh.assert_closed(&client, &server_url).await;
                    println!("{client} -> {server_url}: {why}");
                }
            }
        }
    }
}

// threat: denied-address
async fn infrastructure_ports_are_open_only_in_own_cluster(mesh: &Mesh<'_>) {
    let plan = mesh.hub.plan();
    let node = mesh.lab.node("mgmt-1");
    let wireguard = mesh.wireguard["mgmt-1"];
    // The lab's kubelet listens on the node's address only, so another server has to listen at the WireGuard address.
    let server_address = format!("{wireguard}:10250");
    let mut serving = node
        .spawn("kubelet-port", [&mesh.probe(), "serve", &server_address])
        .unwrap();
    serving.wait_for_log("serving on", PATIENCE).await.unwrap();
    let targets = [
        format!("https://{}:10250/pods", node.address()),
        format!("http://{server_address}"),
        format!("https://{}/version", plan.api_service_ip()),
        format!("https://{}:6443/version", plan.api_address()),
    ];
    for target in &targets {
        let own_pod = pod(&mesh.hub_webs[0]);
        assert_eq!(mesh.status(&own_pod, target).await, "200", "{own_pod} -> {target}");
        for web in &mesh.member_webs {
            for client in [pod(web), host(&web.node)] {
                let why = mesh.assert_closed(&client, target).await;
                println!("{client} -> {target}: {why}");
            }
        }
    }
}

// threat: controller-port
async fn member_pods_cannot_read_controller_metrics(mesh: &Mesh<'_>) {
    let controller = mesh.product.controller_pod().await.unwrap();
    let page = async |from: TrafficClient, path: &str| {
        let address = if from == pod(&controller) {
            IpAddr::from([127, 0, 0, 1])
        } else {
            controller.ip
        };
        let url = format!("{}{path}", url(address, 8080));
        curl(mesh.lab, &from, &["-w", "%{http_code}", &url]).await
    };
    // The port itself is open to the member's pods.
    assert_eq!(page(pod(&mesh.member_webs[0]), "/readyz").await, "ok\n200");
    for path in ["/metrics", "/debug/state"] {
        let inside = page(pod(&controller), path).await;
        assert!(inside.ends_with("200") && inside.contains(MEMBER), "{path}: {inside}");
        for web in &mesh.member_webs {
            let outside = page(pod(web), path).await;
            let refused = "served only to 127.0.0.1 and ::1: use kubectl port-forward";
            assert!(
                outside.starts_with(refused) && outside.ends_with("403"),
                "{path}: {outside}"
            );
        }
    }
}

/// Checks which sockets the controller reaches, and whether another pod reaches the controller, before and after the
/// controller's NetworkPolicy is applied. Each scan runs in the network namespace of a pod.
async fn controller_policy_opens_only_required_sockets(mesh: &Mesh<'_>) {
    let (hub, member) = (mesh.hub.plan(), mesh.member.plan());
    let controller = mesh.product.controller_pod().await.unwrap();
    let mut admitted: BTreeSet<SocketAddr> = [
        (hub.api_address(), 6443),
        (hub.api_service_ip(), 443),
        (member.api_address(), 6443),
        (hub.dns_ip(), 53),
    ]
    .map(SocketAddr::from)
    .into();
    let resolvers = mesh.hub.pods("kube-system", "k8s-app=kube-dns").await.unwrap();
    admitted.extend(resolvers.iter().map(|pod| SocketAddr::new(pod.ip, 53)));
    let mut all = mesh.hub.sockets().await.unwrap();
    all.extend(mesh.member.sockets().await.unwrap());
    all.retain(|socket, _| socket.ip() != controller.ip);
    all.extend(admitted.iter().map(|socket| (*socket, String::new())));
    let kubelets = mesh.hub.nodes().into_iter().map(|node| (node.address(), 10250));
    let webs = mesh.hub_webs.iter().chain(&mesh.member_webs).map(|web| (web.ip, 8080));
    let open: BTreeSet<SocketAddr> = kubelets
        .chain(webs)
        .map(SocketAddr::from)
        .chain(admitted.clone())
        .collect();
    mesh.lab.wait_for_open_sockets(&pod(&controller), &open).await.unwrap();
    let controller_socket = BTreeSet::from([SocketAddr::new(controller.ip, 8080)]);
    let neighbour = pod(&mesh.hub_webs[0]);
    mesh.lab
        .wait_for_open_sockets(&neighbour, &controller_socket)
        .await
        .unwrap();

    mesh.hub
        .apply(&mesh.product.controller_policy().unwrap())
        .await
        .unwrap();
    let others = open.difference(&admitted).copied().collect();
    mesh.lab
        .wait_for_closed_sockets(&pod(&controller), &others)
        .await
        .unwrap();
    mesh.lab
        .wait_for_open_sockets(&pod(&controller), &admitted)
        .await
        .unwrap();
    let found = mesh.lab.scan(&pod(&controller), all.into_keys()).await.unwrap();
    assert_eq!(found, admitted);
    mesh.lab
        .wait_for_closed_sockets(&neighbour, &controller_socket)
        .await
        .unwrap();

    // Replace the controller's pod: the policy applies to the new pod from its first packet. Check that the pod still becomes Ready
    // and restores a deleted Peer in the member.
    let args = ["-n", NAMESPACE, "delete", "pod", &controller.name, "--grace-period=1"];
    mesh.hub.kubectl(args).await.unwrap();
    mesh.hub
        .wait_for_rollout(NAMESPACE, "deployment/clustermesh-controller")
        .await
        .unwrap();
    let peers = json(&mesh.member, &["get", "peers"]).await;
    let peer = peers["items"][0]["metadata"]["name"].as_str().unwrap().to_owned();
    mesh.member.kubectl(["delete", "peer", &peer]).await.unwrap();
    wait_until(format!("Peer {peer} to be written again"), PATIENCE, async || {
        let found = mesh.member.try_kubectl(["get", "peer", &peer]).await;
        let found = found.map_err(|error| error.to_string())?;
        if found.status.success() {
            Ok(())
        } else {
            Err(found.stderr)
        }
    })
    .await
    .unwrap();
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for from in clients {
            for to in servers {
                mesh.wait_for_answer(&pod(from), &url(to.ip, 8080)).await;
            }
        }
    }
}

async fn packet_above_mtu_gets_icmp_error_and_tcp_is_clamped(mesh: &Mesh<'_>) {
    let pairs = [
        (&mesh.member_webs[0], &mesh.hub_webs[0]),
        (&mesh.member_webs[1], &mesh.hub_webs[0]),
        (&mesh.hub_webs[0], &mesh.member_webs[0]),
    ];
    for (from, to) in pairs {
        // The MTU is 1440 bytes: 1500, less 60 for the outer headers over IPv4. The inner headers of IP and ICMP take 28 bytes.
        for (size, fits) in [("1412", true), ("1413", false)] {
            let to = to.ip.to_string();
            let args = ["ping", "-n", "-c", "1", "-W", "30", "-M", "do", "-s", size, &to];
            let output = mesh.lab.run_at(&pod(from), &args).await.unwrap();
            let printed = format!("{}{}", output.stdout, output.stderr);
            assert_eq!(
                output.status.success(),
                fits,
                "{size} bytes {from:?} -> {to}: {printed}"
            );
            assert!(fits || printed.contains("1440"), "the error names the MTU: {printed}");
        }
    }
    for (from, to) in [pairs[0], pairs[2]] {
        fetch_mebibyte(mesh.lab, from, to).await;
    }
}

/// When the agent dies, its userspace device loses the carrier. The kernel keeps the routes and rules.
// threat: unencrypted-packet
async fn dead_agent_closes_tunnel_and_leaks_nothing(mesh: &Mesh<'_>) {
    let capture = mesh.lab.capture("dead-agent", "ip").await.unwrap();
    let (near, far) = (&mesh.hub_webs[0], &mesh.member_webs[0]);
    let node = mesh.lab.node(&near.node);
    // A stopped kubelet cannot restart the agent.
    node.signal("kubelet", Signal::SIGSTOP).unwrap();
    node.signal("wg-agent", Signal::SIGKILL).unwrap();
    wait_until("kilo0 to lose its carrier", PATIENCE, async || {
        let shown = node.exec(["ip", "link", "show", "kilo0"]).await.unwrap().stdout;
        if shown.contains("NO-CARRIER") {
            Ok(())
        } else {
            Err(shown)
        }
    })
    .await
    .unwrap();
    let all_are_closed = async |when: &str| {
        for (from, to) in [
            (pod(near), url(far.ip, 8080)),
            (host(&near.node), url(far.ip, 8080)),
            (pod(far), url(near.ip, 8080)),
            (host(&far.node), url(near.ip, 8080)),
        ] {
            let why = mesh.assert_closed(&from, &to).await;
            println!("{when}: {from} -> {to}: {why}");
        }
    };
    all_are_closed("agent dead").await;
    // Delete our policy routing rules, as another program could, so that only the firewall drops the packets.
    let rules = node.exec(["ip", "-j", "rule"]).await.unwrap().stdout;
    let rules: serde_json::Value = serde_json::from_str(&rules).unwrap();
    let is_ours = |rule: &&serde_json::Value| !["local", "main", "default"].iter().any(|table| rule["table"] == *table);
    let our_rules: Vec<_> = rules.as_array().unwrap().iter().filter(is_ours).collect();
    assert!(!our_rules.is_empty(), "the rules outlive the agent: {rules}");
    for rule in our_rules {
        let preference = rule["priority"].to_string();
        node.exec(["ip", "rule", "del", "pref", &preference]).await.unwrap();
    }
    all_are_closed("agent dead, rules deleted").await;
    node.signal("kubelet", Signal::SIGCONT).unwrap();
    let continued = Instant::now();
    let answer = mesh.wait_for_answer(&pod(far), &url(near.ip, 8080)).await;
    println!(
        "the agent forwards again {:.1} s after the kubelet continued",
        continued.elapsed().as_secs_f64()
    );
    assert_eq!(answer, mesh.expected_answer(near, far.ip));
    let answer = mesh.wait_for_answer(&pod(near), &url(far.ip, 8080)).await;
    assert_eq!(answer, mesh.expected_answer(far, near.ip));
    let captured = capture.stop().await.unwrap();
    assert_eq!(mesh.unencrypted(&captured).await, Vec::<String>::new());
}

/// When a PeerPolicy is deleted, its networks stop being mesh networks, and new connections to them use the node's
/// ordinary routes. Connections that used the tunnel before must break instead of continuing unencrypted.
// threat: unencrypted-packet
async fn deletion_of_mesh_leaks_no_tunnelled_flow(mesh: &Mesh<'_>) {
    let capture = mesh.lab.capture("deleted", "ip").await.unwrap();
    let mut flows = vec![];
    for (from, to) in [
        (&mesh.member_webs[0], &mesh.hub_webs[0]),
        (&mesh.hub_webs[1], &mesh.member_webs[1]),
    ] {
        let (node, server) = (mesh.lab.node(&from.node), mesh.lab.node(&to.node));
        let serve = [&mesh.probe(), "stream-serve", ":5201"];
        let mut serving = server.pod_spawn("stream-serve", to.ip, serve).unwrap();
        serving.wait_for_log("streaming on", PATIENCE).await.unwrap();
        flows.push((serving, "streaming on"));
        let (ping, stream) = (to.ip.to_string(), format!("{}:5201", to.ip));
        let ping = ["ping", "-n", "-i", "0.02", &ping];
        flows.push((node.pod_spawn("pod-ping", from.ip, ping).unwrap(), "bytes from"));
        let probe = mesh.probe();
        let stream = [&probe, "stream-get", &stream, "600", "20"];
        flows.push((node.pod_spawn("pod-stream", from.ip, stream).unwrap(), "3 after"));
        flows.push((node.spawn("host-stream", stream).unwrap(), "3 after"));
    }
    // `stream-get` prints "3 after ... ms" for the round trip number 3.
    for (flow, marker) in &mut flows {
        flow.wait_for_log(marker, PATIENCE).await.unwrap();
    }
    let delete = [
        "delete",
        "clustermesh",
        "-n",
        NAMESPACE,
        clustermesh_lab::MESH,
        "--timeout=60s",
    ];
    let start = Instant::now();
    mesh.hub.kubectl(delete).await.unwrap();
    println!("deleted in {:.2} s", start.elapsed().as_secs_f64());
    // A stream fails after 20 s without an answer; by then it has retransmitted several times.
    for (flow, marker) in &mut flows {
        if *marker == "3 after" {
            let status = flow.wait_for_exit(PATIENCE).await.unwrap();
            assert!(!status.success(), "{}", flow.log());
        }
    }
    drop(flows);
    let captured = capture.stop().await.unwrap();
    assert!(
        mesh.count_wireguard_packets(&captured).await > 0,
        "the capture contains WireGuard packets"
    );
    // Not `unencrypted`: new connections may now leave unencrypted from the nodes' own addresses.
    assert_eq!(mesh.unencrypted_from_published(&captured).await, Vec::<String>::new());
}
