//! Tests most flows of the module `flows` over IPv6, between two dual-stack clusters. The tunnel's outer packets are
//! IPv4, and IPv6 in the last step.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Instant,
};

use clustermesh_lab::{Answer, Lab, LabPlan, MESH, NAMESPACE, RunningPod, wait_until};

use crate::setup::{HUB, MEMBER, Mesh, PATIENCE, assert_pings, host, pod};

#[tokio::test]
async fn ipv6_flows_between_members_work_and_are_encrypted() {
    let start = Instant::now();
    let plan = LabPlan::clusters(&[(HUB, 2), (MEMBER, 2)]).dual_stack();
    let lab = Lab::start(plan).await.unwrap();
    println!("two clusters of both families: {:.1} s", start.elapsed().as_secs_f64());
    let mesh = Mesh::up(&lab, &[]).await;

    let capture = lab.capture("flows6", "ip or ip6").await.unwrap();
    pods_reach_pods_with_own_address_in_both_families(&mesh).await;
    mirrored_service_has_ipv6_address_and_keeps_source(&mesh).await;
    remote_cluster_ip_is_reached_through_anchor(&mesh).await;
    hosts_send_from_a_published_address(&mesh).await;
    packet_above_mtu_gets_icmp_error_and_tcp_is_clamped(&mesh).await;
    kubelet_port_is_closed_to_other_cluster(&mesh).await;
    let captured = capture.stop().await.unwrap();
    assert!(
        mesh.count_wireguard_packets(&captured).await > 0,
        "the capture contains WireGuard packets"
    );
    assert_eq!(mesh.unencrypted(&captured).await, Vec::<String>::new());
    // The tunnel's outer packets are IPv4, so an IPv6 packet between the clusters would be an unencrypted one.
    assert_eq!(mesh.v6_between_clusters(&captured).await, Vec::<String>::new());

    annotated_ipv6_endpoints_carry_the_tunnel(&mesh).await;
}

/// Sets IPv6 endpoints by annotation (docs/operations/nat.md). The mesh is created anew, because an established tunnel
/// keeps its endpoint.
async fn annotated_ipv6_endpoints_carry_the_tunnel(mesh: &Mesh<'_>) {
    let delete = ["-n", NAMESPACE, "delete", "clustermesh", MESH, "--timeout=60s"];
    mesh.hub.kubectl(delete).await.unwrap();
    for cluster in [&mesh.hub, &mesh.member] {
        for node in cluster.nodes() {
            let address = std::net::SocketAddr::new(node_v6(mesh, node.name()), 51820);
            let endpoint = format!("kilo.squat.ai/clustermesh-endpoint={address}");
            cluster
                .kubectl(["annotate", "node", node.name(), &endpoint])
                .await
                .unwrap();
        }
    }
    mesh.product.mesh_up(&mesh.product.mesh(&[])).await.unwrap();
    for cluster in [&mesh.hub, &mesh.member] {
        for node in cluster.nodes() {
            wait_until(format!("{} to use IPv6 endpoints", node.name()), PATIENCE, async || {
                let args = ["wg", "show", "kilo0", "endpoints"];
                let shown = node.exec(args).await.map_err(|error| error.to_string())?.stdout;
                match shown.lines().all(|line| line.contains("\t[")) && shown.lines().count() == 2 {
                    true => Ok(()),
                    false => Err(shown),
                }
            })
            .await
            .unwrap();
        }
    }
    let capture = mesh.lab.capture("outside6", "ip or ip6").await.unwrap();
    pods_reach_pods_with_own_address_in_both_families(mesh).await;
    let captured = capture.stop().await.unwrap();
    assert!(!captured.packets("ip6 and udp port 51820").await.unwrap().is_empty());
    assert_eq!(
        captured.packets("ip and udp port 51820").await.unwrap(),
        Vec::<String>::new()
    );
    assert_eq!(mesh.unencrypted(&captured).await, Vec::<String>::new());
    assert_eq!(mesh.unencrypted_v6(&captured).await, Vec::<String>::new());
}

fn url(address: IpAddr, port: u16) -> String {
    format!("http://{}", std::net::SocketAddr::new(address, port))
}

fn second_ip(web: &RunningPod) -> IpAddr {
    web.second_ip
        .unwrap_or_else(|| panic!("{web:?} has only one IP family"))
}

fn node_v6(mesh: &Mesh<'_>, node: &str) -> IpAddr {
    mesh.lab.node(node).address_v6().unwrap().into()
}

async fn pods_reach_pods_with_own_address_in_both_families(mesh: &Mesh<'_>) {
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for from in clients {
            for to in servers {
                for (to_ip, from_ip) in [(second_ip(to), second_ip(from)), (to.ip, from.ip)] {
                    let answer = mesh.wait_for_answer(&pod(from), &url(to_ip, 8080)).await;
                    assert_eq!(answer, mesh.expected_answer(to, from_ip));
                    assert_pings(mesh.lab, &pod(from), to_ip).await;
                }
            }
        }
    }
}

async fn mirrored_service_has_ipv6_address_and_keeps_source(mesh: &Mesh<'_>) {
    let service = mesh.member.second_cluster_ip("default", "hub-web").await.unwrap();
    for from in &mesh.member_webs {
        let want: Vec<Answer> = mesh
            .hub_webs
            .iter()
            .map(|to| mesh.expected_answer(to, second_ip(from)))
            .collect();
        mesh.assert_answers(&pod(from), &url(service, 80), &want).await;
    }
}

async fn remote_cluster_ip_is_reached_through_anchor(mesh: &Mesh<'_>) {
    for (importer, exporter, clients, servers) in [
        (&mesh.member, &mesh.hub, &mesh.member_webs, &mesh.hub_webs),
        (&mesh.hub, &mesh.member, &mesh.hub_webs, &mesh.member_webs),
    ] {
        let services = exporter.plan().v6.as_ref().unwrap().service_cidr;
        let anchor = mesh.anchor_of(&services.to_string(), importer).await;
        // The anchor masquerades, as in IPv4: a pod on the anchor sees the anchor's bridge address, and a pod on
        // another node sees the anchor's own address.
        let source = |to: &RunningPod| {
            if to.node == anchor {
                bridge_address(to)
            } else {
                node_v6(mesh, &anchor)
            }
        };
        let want: Vec<Answer> = servers.iter().map(|to| mesh.expected_answer(to, source(to))).collect();
        let service = exporter.second_cluster_ip("default", "web").await.unwrap();
        for from in clients {
            mesh.assert_answers(&pod(from), &url(service, 80), &want).await;
            mesh.assert_answers(&host(&from.node), &url(service, 80), &want).await;
        }
    }
}

/// The address of the pod's node on the pods' bridge.
fn bridge_address(web: &RunningPod) -> IpAddr {
    match second_ip(web) {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 1).into()
        }
        IpAddr::V4(address) => panic!("{address} is not an IPv6 address"),
    }
}

/// WireGuard addresses are IPv4 here, so a host sends IPv6 packets from another address in allowedNetworks, which contains
/// the IPv6 addresses of nodes and pods. The kernel chooses the host's address that has the longest common prefix with the
/// destination (RFC 6724, rule 8): to a remote pod the address on the host's pod bridge, to a remote node the address on
/// the host's underlay.
async fn hosts_send_from_a_published_address(mesh: &Mesh<'_>) {
    for (clients, servers) in [(&mesh.member_webs, &mesh.hub_webs), (&mesh.hub_webs, &mesh.member_webs)] {
        for server in servers {
            let name = format!("NODE={}", server.node);
            let args = ["env", &name, &mesh.probe(), "serve", ":9090"];
            let mut serving = mesh.lab.node(&server.node).spawn("host-service", args).unwrap();
            serving.wait_for_log("serving on", PATIENCE).await.unwrap();
            let address = node_v6(mesh, &server.node);
            for from in clients {
                let answer = mesh
                    .wait_for_answer(&host(&from.node), &url(second_ip(server), 8080))
                    .await;
                assert_eq!(answer, mesh.expected_answer(server, bridge_address(from)));
                for (client, source) in [
                    (pod(from), second_ip(from)),
                    (host(&from.node), node_v6(mesh, &from.node)),
                ] {
                    let answer = mesh.wait_for_answer(&client, &url(address, 9090)).await;
                    let want = Answer {
                        pod: server.node.clone(),
                        node: server.node.clone(),
                        client_ip: source,
                    };
                    assert_eq!(answer, want, "{client} -> {address}");
                }
            }
        }
    }
}

async fn packet_above_mtu_gets_icmp_error_and_tcp_is_clamped(mesh: &Mesh<'_>) {
    for (from, to) in [
        (&mesh.member_webs[0], &mesh.hub_webs[0]),
        (&mesh.hub_webs[0], &mesh.member_webs[1]),
    ] {
        let to_ip = second_ip(to).to_string();
        // The MTU is 1440 bytes, because the outer packets are IPv4. The headers of IPv6 and ICMPv6 take 48 bytes.
        for (size, fits) in [("1392", true), ("1393", false)] {
            let args = ["ping", "-n", "-c", "1", "-W", "30", "-M", "do", "-s", size, &to_ip];
            let output = mesh.lab.run_at(&pod(from), &args).await.unwrap();
            let printed = format!("{}{}", output.stdout, output.stderr);
            assert_eq!(
                output.status.success(),
                fits,
                "{size} bytes {from:?} -> {to_ip}: {printed}"
            );
            assert!(fits || printed.contains("1440"), "the error names the MTU: {printed}");
        }
        // Delete the path MTU that the kernel learned from the pings, so that only MSS clamping limits TCP segments.
        for web in [from, to] {
            let forget = ["ip", "-6", "route", "flush", "cache"];
            mesh.lab.run_at(&pod(web), &forget).await.unwrap();
        }
        let node = mesh.lab.node(&to.node);
        let make = "mkdir -p /run/mib && head -c 1048576 /dev/urandom > /run/mib/f && md5sum < /run/mib/f";
        let sum = node.exec(["sh", "-c", make]).await.unwrap().stdout;
        let args = ["busybox", "httpd", "-f", "-p", "5202", "-h", "/run/mib"];
        let _serving = node.pod_spawn("mib6", to.ip, args).unwrap();
        let fetch = format!("curl -sS -m 20 {}/f | md5sum", url(second_ip(to), 5202));
        wait_until("all of 1 MiB to arrive", PATIENCE, async || {
            let got = mesh.lab.run_at(&pod(from), &["sh", "-c", &fetch]).await.unwrap();
            if got.stdout == sum {
                Ok(())
            } else {
                Err(format!("{}{}", got.stdout, got.stderr))
            }
        })
        .await
        .unwrap();
    }
}

async fn kubelet_port_is_closed_to_other_cluster(mesh: &Mesh<'_>) {
    let node = mesh.hub_webs[0].node.clone();
    let address = node_v6(mesh, &node);
    // The lab's kubelet listens on the node's IPv4 address only, so another server has to listen on this port.
    let server_address = std::net::SocketAddr::new(address, 10250).to_string();
    let serve = [&mesh.probe(), "serve", &server_address];
    let mut serving = mesh.lab.node(&node).spawn("kubelet-port", serve).unwrap();
    serving.wait_for_log("serving on", PATIENCE).await.unwrap();
    let target = url(address, 10250);
    let own_pod = pod(&mesh.hub_webs[1]);
    assert_eq!(mesh.status(&own_pod, &target).await, "200", "{own_pod} -> {target}");
    for web in &mesh.member_webs {
        for client in [pod(web), host(&web.node)] {
            mesh.assert_closed(&client, &target).await;
        }
    }
}
