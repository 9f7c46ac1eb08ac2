//! A cluster of untrusted code on whole clusters: it reaches the Service that is named for it and nothing else, also where its
//! administrator does what an attacker would.

mod mesh;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use clustermesh_lab::{Asker, Cluster, Lab, LabPlan, Product, Tunnel, Web, wait_until};
use mesh::{HUB, MEMBER, PATIENCE, host, json, pod, url};

const SANDBOX: &str = "notebooks";
const GRANT: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";

struct World<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    member: Cluster<'a>,
    sandbox: Cluster<'a>,
    hub_webs: Vec<Web>,
    member_webs: Vec<Web>,
    sandbox_webs: Vec<Web>,
}

#[tokio::test]
async fn a_sandbox_reaches_the_service_named_for_it_and_nothing_else_whatever_its_administrator_does() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (SANDBOX, 1)]))
        .await
        .unwrap();
    let world = World::up(&lab).await;
    the_granted_service_answers_under_its_name_and_sees_a_wireguard_address(&world).await;
    nothing_of_the_hub_but_what_is_granted_stands_in_the_sandbox(&world).await;
    nothing_there_opens_a_connection_to_the_sandbox(&world).await;
    a_scan_with_ranges_of_the_attackers_own_finds_the_granted_port_alone(&world).await;
    a_grant_that_is_taken_back_closes(&world).await;
}

impl<'a> World<'a> {
    async fn up(lab: &'a Lab) -> Self {
        let (hub, member, sandbox) = (lab.cluster(HUB), lab.cluster(MEMBER), lab.cluster(SANDBOX));
        let product = Product::install(lab, &[HUB, MEMBER, SANDBOX], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        // With what an API server of a trusting cluster can refuse by itself, in which agents and controller still do their work.
        let admission =
            std::fs::read_to_string(format!("{}/../../deploy/admission.yaml", env!("CARGO_MANIFEST_DIR"))).unwrap();
        for cluster in [&hub, &member] {
            cluster.apply(&admission).await.unwrap();
        }
        let hub_webs = hub.run_web().await.unwrap();
        // One node each: their second server has no place.
        let mut webs = Vec::new();
        for cluster in [&member, &sandbox] {
            cluster
                .apply(&clustermesh_lab::WEB.replace("replicas: 2", "replicas: 1"))
                .await
                .unwrap();
            cluster.rollout("default", "deployment/web").await.unwrap();
            webs.push(cluster.webs().await.unwrap());
        }
        let applied = Instant::now();
        product
            .mesh_up(&product.mesh_with(&[SANDBOX], &[(SANDBOX, GRANT)]))
            .await
            .unwrap();
        println!("Ready: {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());
        let [member_webs, sandbox_webs] = webs.try_into().unwrap();
        Self {
            lab,
            product,
            hub,
            member,
            sandbox,
            hub_webs,
            member_webs,
            sandbox_webs,
        }
    }

    fn granted(&self) -> BTreeSet<SocketAddr> {
        self.hub_webs.iter().map(|web| SocketAddr::new(web.ip, 8080)).collect()
    }

    /// The WireGuard address of the sandbox's node.
    async fn wireguard(&self) -> IpAddr {
        let node = json(&self.sandbox, &["get", "node", &self.sandbox_webs[0].node]).await;
        let address = node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"]
            .as_str()
            .unwrap();
        address.split_once('/').unwrap().0.parse().unwrap()
    }

    fn askers(&self) -> [Asker; 2] {
        [pod(&self.sandbox_webs[0]), host(&self.sandbox_webs[0].node)]
    }
}

async fn the_granted_service_answers_under_its_name_and_sees_a_wireguard_address(world: &World<'_>) {
    let service = world.sandbox.cluster_ip("default", "hub-web").await.unwrap();
    let saw = world.wireguard().await;
    for from in world.askers() {
        let mut missing: BTreeSet<&str> = world.hub_webs.iter().map(|web| web.name.as_str()).collect();
        wait_until(format!("both servers to answer {from}"), PATIENCE, async || {
            let answer = world
                .lab
                .ask_until_answered(&from, &url(service, 80))
                .await
                .map_err(|error| error.to_string())?;
            assert_eq!(answer.saw, saw);
            missing.remove(answer.pod.as_str());
            if missing.is_empty() {
                Ok(())
            } else {
                Err(format!("without {missing:?}"))
            }
        })
        .await
        .unwrap();
    }
}

async fn nothing_of_the_hub_but_what_is_granted_stands_in_the_sandbox(world: &World<'_>) {
    let kinds = "peers,peerpolicies,services,endpointslices,configmaps,secrets,events";
    let text = world
        .sandbox
        .kubectl(["get", kinds, "-A", "-o", "json"])
        .await
        .unwrap()
        .stdout;
    let granted: BTreeSet<String> = world.granted().iter().map(|socket| socket.ip().to_string()).collect();
    for (cluster, pods) in [(&world.hub, true), (&world.member, false)] {
        for (socket, what) in cluster.sockets().await.unwrap() {
            let ip = socket.ip().to_string();
            let known = granted.contains(&ip)
                // Where its own nodes send UDP, and whose ICMP errors they believe; every cluster has such an API Service.
                || pods && (what.starts_with("node ") || what.starts_with("WireGuard of node"))
                || what == "Service kubernetes" || what == "Service kube-dns";
            assert!(
                known || !text.contains(&format!("{ip}\"")) && !text.contains(&format!("{ip}/")),
                "{ip} ({what}) is known there"
            );
        }
    }
    assert!(!text.contains(MEMBER), "the other member's name is known there");
}

async fn nothing_there_opens_a_connection_to_the_sandbox(world: &World<'_>) {
    let wireguard = world.wireguard().await;
    for web in world.hub_webs.iter().chain(&world.member_webs) {
        for from in [pod(web), host(&web.node)] {
            let targets = [8080, 10250, 9587].map(|port| SocketAddr::new(wireguard, port));
            let open = world.lab.scan(&from, targets).await.unwrap();
            assert_eq!(open, BTreeSet::new(), "{from} reached the sandbox");
        }
    }
}

async fn a_scan_with_ranges_of_the_attackers_own_finds_the_granted_port_alone(world: &World<'_>) {
    let mut all: BTreeMap<SocketAddr, String> = world.hub.sockets().await.unwrap();
    all.extend(world.member.sockets().await.unwrap());
    let own: BTreeSet<IpAddr> = world
        .sandbox
        .sockets()
        .await
        .unwrap()
        .into_keys()
        .map(|socket| socket.ip())
        .collect();
    // Mirrored endpoints stand in the sandbox, too.
    let granted: BTreeSet<IpAddr> = world.granted().iter().map(SocketAddr::ip).collect();
    all.retain(|socket, _| !own.contains(&socket.ip()) || granted.contains(&socket.ip()));
    println!("{} sockets to scan", all.len());
    // What the underlay lets through without any mesh is for NetworkPolicies.
    for from in world.askers() {
        let open = world.lab.scan(&from, all.keys().copied()).await.unwrap();
        println!("from {from}, as its routes are: {open:?}");
        assert!(open.is_superset(&world.granted()));
    }
    // The sandbox's administrator takes the controller's rights away and gives its own Peers every address there is.
    world
        .sandbox
        .kubectl(["delete", "clusterrolebinding", "clustermesh-member"])
        .await
        .unwrap();
    let peers = json(&world.sandbox, &["get", "peers"]).await;
    let names: Vec<String> = peers["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|peer| peer["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names.len(), world.hub_webs.len());
    let ranges: BTreeSet<String> = all.keys().map(|socket| format!("{}/32", socket.ip())).collect();
    for chosen in &names {
        for name in &names {
            let mine = if name == chosen {
                ranges.clone()
            } else {
                BTreeSet::new()
            };
            let patch = serde_json::json!({"spec": {"allowedIPs": mine}}).to_string();
            world
                .sandbox
                .kubectl(["patch", "peer", name, "--type=merge", "-p", &patch])
                .await
                .unwrap();
        }
        let device = "device kilo0 to carry every address";
        wait_until(device, PATIENCE, async || {
            let words = ["ip", "-4", "route", "show", "table", "all", "dev", "kilo0"];
            let routes = world
                .lab
                .run_at(&host(&world.sandbox_webs[0].node), &words)
                .await
                .map_err(|error| error.to_string())?
                .stdout;
            let missing: Vec<&String> = ranges
                .iter()
                .filter(|range| !routes.contains(range.trim_end_matches("/32")))
                .collect();
            if missing.is_empty() {
                Ok(())
            } else {
                Err(format!("without {missing:?}"))
            }
        })
        .await
        .unwrap();
        for from in world.askers() {
            let open = world.lab.scan(&from, all.keys().copied()).await.unwrap();
            println!("from {from}, all of it through {chosen}: {open:?}");
            let node = chosen.rsplit_once("--").unwrap().1;
            let granted: BTreeSet<SocketAddr> = world
                .hub_webs
                .iter()
                .filter(|web| web.node == node)
                .map(|web| SocketAddr::new(web.ip, 8080))
                .collect();
            assert_eq!(open, granted);
        }
    }
}

async fn a_grant_that_is_taken_back_closes(world: &World<'_>) {
    world
        .hub
        .apply(&world.product.mesh_with(&[SANDBOX], &[]))
        .await
        .unwrap();
    let applied = Instant::now();
    let [from, _] = world.askers();
    wait_until("the last answer", PATIENCE, async || {
        let open = world
            .lab
            .scan(&from, world.granted())
            .await
            .map_err(|error| error.to_string())?;
        if open.is_empty() {
            Ok(())
        } else {
            Err(format!("{open:?} still answers"))
        }
    })
    .await
    .unwrap();
    println!("closed {:.2} s after kubectl apply", applied.elapsed().as_secs_f64());
}
