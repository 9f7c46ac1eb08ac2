//! Tests a member without IPv4: its nodes, pods and Services, its API server, DNS and WireGuard addresses have IPv6 only. The hub has
//! both families, and its API server and WireGuard addresses have IPv4 only.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use clustermesh_lab::{Cluster, Lab, LabPlan, Product, RunningPod, Tunnel, wait_until};
use serde_json::Value;

use crate::setup::{HUB, MEMBER, PATIENCE, assert_answers, expected_answer, host, json, pod, wireguard};

/// The `egress` of a member that mirrors the web servers of `exporter`, the other member, under the name `other-web`.
fn egress(exporter: &str) -> String {
    format!(
        "[{{service: {{cluster: {exporter}, namespace: default, name: web}}, as: {{namespace: default, name: other-web}}}}]"
    )
}

#[tokio::test]
async fn ipv6_only_member_and_dual_stack_hub_are_meshed() {
    let start = Instant::now();
    let plan = LabPlan::clusters(&[(HUB, 1), (MEMBER, 1)]);
    let lab = Lab::start(plan.dual_stack().ipv6_only(MEMBER)).await.unwrap();
    println!("clusters: {:.1} s", start.elapsed().as_secs_f64());
    let (hub, member) = (lab.cluster(HUB), lab.cluster(MEMBER));
    for node in member.nodes() {
        let v4 = node
            .exec(["ip", "-4", "addr", "show", "scope", "global"])
            .await
            .unwrap();
        assert_eq!(v4.stdout, "", "IPv4 addresses of {}", node.name());
    }
    let product = Product::install(&lab, &[HUB, MEMBER], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let (hub_webs, member_webs) = (hub.run_web().await.unwrap(), member.run_web().await.unwrap());
    let capture = lab.capture("ipv6-only", "ip or ip6").await.unwrap();
    product
        .mesh_up(&product.mesh(&[(HUB, &egress(MEMBER)), (MEMBER, &egress(HUB))]))
        .await
        .unwrap();
    println!("Ready: {:.1} s", start.elapsed().as_secs_f64());

    pods_and_hosts_reach_pods_with_own_address(&lab, &hub_webs, &member_webs).await;
    mirrored_services_answer_by_name(&lab, &hub_webs, &member_webs).await;
    endpoints_are_ipv6(&[&hub, &member]).await;
    println!("flows: {:.1} s", start.elapsed().as_secs_f64());

    let captured = capture.stop().await.unwrap();
    let unencrypted = format!("not udp port 51820 and {}", between_pods(&hub, &member));
    assert_eq!(captured.packets(&unencrypted).await.unwrap(), Vec::<String>::new());
    let encrypted = captured.packets("ip6 and udp port 51820").await.unwrap();
    assert!(!encrypted.is_empty(), "the capture contains WireGuard packets");
}

/// Pods and hosts reach the pods of the other member in both directions. A host of the IPv6-only member uses its WireGuard address. The
/// hub has IPv4 WireGuard addresses, so its host uses the IPv6 address of its pods' bridge, which lies in allowedNetworks.
async fn pods_and_hosts_reach_pods_with_own_address(lab: &Lab, hub_webs: &[RunningPod], member_webs: &[RunningPod]) {
    for (clients, servers) in [(hub_webs, member_webs), (member_webs, hub_webs)] {
        for from in clients {
            let node = lab.node(&from.node);
            let host_source = match wireguard(&node.cluster(), node.name()).await {
                IpAddr::V4(_) => first_address_of_range(v6(from)),
                address => address,
            };
            for to in servers {
                let url = url(v6(to), 8080);
                for (client, source) in [(pod(from), v6(from)), (host(&from.node), host_source)] {
                    let answer = lab.http_get_until_answered(&client, &url).await.unwrap();
                    assert_eq!(answer, expected_answer(to, source), "{client} -> {url}");
                }
            }
        }
    }
}

/// Each member resolves the mirrored Service at its own DNS and reaches it. The mirrored Service has only IPv6 endpoints. In the hub it
/// also has an IPv4 address, which refuses connections.
async fn mirrored_services_answer_by_name(lab: &Lab, hub_webs: &[RunningPod], member_webs: &[RunningPod]) {
    for (importer, clients, servers) in [(HUB, hub_webs, member_webs), (MEMBER, member_webs, hub_webs)] {
        let cluster = lab.cluster(importer);
        let slices = ["get", "endpointslices", "-l", "kubernetes.io/service-name=other-web"];
        let slices = json(&cluster, &slices).await;
        let items = slices["items"].as_array().unwrap();
        let types: Vec<&Value> = items.iter().map(|slice| &slice["addressType"]).collect();
        assert_eq!(types, ["IPv6"]);
        let service = json(&cluster, &["get", "service", "other-web"]).await;
        let name = "http://other-web.default.svc.cluster.local";
        for from in clients {
            let get = ["exec", &from.name, "--", "/bin/probe", "get", name];
            wait_until(format!("{name} to answer {}", from.name), PATIENCE, async || {
                let got = cluster.kubectl(get).await.map_err(|error| error.to_string())?.stdout;
                let is_server = |to: &RunningPod| got.contains(&format!(" hello from {} on {} ", to.name, to.node));
                if servers.iter().any(is_server) {
                    Ok(())
                } else {
                    Err(got)
                }
            })
            .await
            .unwrap();
        }
        let addresses: Vec<IpAddr> = service["spec"]["clusterIPs"]
            .as_array()
            .unwrap()
            .iter()
            .map(ip)
            .collect();
        let (v6_addresses, v4_addresses): (Vec<_>, Vec<_>) = addresses.into_iter().partition(IpAddr::is_ipv6);
        let [address] = v6_addresses[..] else {
            panic!("{importer}: {v6_addresses:?}")
        };
        assert_eq!(v4_addresses.len(), usize::from(importer == HUB), "{v4_addresses:?}");
        for from in clients {
            let want: Vec<_> = servers.iter().map(|to| expected_answer(to, v6(from))).collect();
            assert_answers(lab, &pod(from), &url(address, 80), &want).await;
            for address in &v4_addresses {
                let error = lab.http_get(&pod(from), &url(*address, 80)).await.unwrap().unwrap_err();
                // Exit code 7: the connection was refused, without a timeout.
                assert!(error.starts_with("curl: (7)"), "{error}");
            }
        }
    }
}

/// Every Peer has an IPv6 endpoint, and the agents use it.
async fn endpoints_are_ipv6(clusters: &[&Cluster<'_>]) {
    for cluster in clusters {
        let peers = json(cluster, &["get", "peers"]).await;
        let endpoint = |peer: &Value| {
            let endpoint = &peer["spec"]["endpoint"];
            SocketAddr::new(
                ip(&endpoint["dnsOrIP"]["ip"]),
                u16::try_from(endpoint["port"].as_u64().unwrap()).unwrap(),
            )
        };
        let published: BTreeSet<String> = peers["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|peer| endpoint(peer).to_string())
            .collect();
        assert!(
            !published.is_empty() && published.iter().all(|endpoint| endpoint.starts_with('[')),
            "{published:?}"
        );
        for node in cluster.nodes() {
            let shown = node.exec(["wg", "show", "kilo0", "endpoints"]).await.unwrap().stdout;
            let used: BTreeSet<String> = shown
                .lines()
                .map(|line| line.split_once('\t').unwrap().1.to_owned())
                .collect();
            assert_eq!(used, published, "endpoints of {}", node.name());
        }
    }
}

/// A filter for packets between the pods of two clusters in both directions.
fn between_pods(one: &Cluster<'_>, other: &Cluster<'_>) -> String {
    let pods = |direction: &str, cluster: &Cluster<'_>| {
        let nets = cluster.plan().pod_cidrs();
        format!(
            "({})",
            nets.iter()
                .map(|net| format!("{direction} net {net}"))
                .collect::<Vec<_>>()
                .join(" or ")
        )
    };
    format!(
        "(({} and {}) or ({} and {}))",
        pods("src", one),
        pods("dst", other),
        pods("src", other),
        pods("dst", one)
    )
}

fn v6(pod: &RunningPod) -> IpAddr {
    let mut all = [Some(pod.ip), pod.second_ip].into_iter().flatten();
    all.find(IpAddr::is_ipv6)
        .unwrap_or_else(|| panic!("{pod:?} has no IPv6 address"))
}

/// The first address of the pod range of a node, a /64.
fn first_address_of_range(pod: IpAddr) -> IpAddr {
    let IpAddr::V6(pod) = pod else {
        panic!("{pod} is not an IPv6 address")
    };
    std::net::Ipv6Addr::from(u128::from(pod) >> 64 << 64 | 1).into()
}

fn ip(value: &Value) -> IpAddr {
    value.as_str().unwrap().parse().unwrap()
}

fn url(address: IpAddr, port: u16) -> String {
    format!("http://{}", SocketAddr::new(address, port))
}
