//! A cluster of untrusted code on whole clusters: it reaches the Service that is named for it and nothing else, also where its
//! administrator gives the Peers there every address.

mod mesh;
#[path = "sandbox/upheavals.rs"]
mod upheavals;
#[path = "sandbox/verified.rs"]
mod verified;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use clustermesh_lab::{Answer, Asker, Cluster, Lab, LabPlan, MESH, NAMESPACE, Product, Tunnel, Web};
use mesh::{
    HUB, MEMBER, answers,
    attack::{self, Attacker},
    host, pod, seen, url, wireguard,
};
use upheavals::Scene;

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
async fn a_sandbox_reaches_the_service_named_for_it_and_nothing_else_also_with_peers_of_its_own_making() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (SANDBOX, 1)]))
        .await
        .unwrap();
    let world = World::up(&lab).await;
    the_granted_service_answers_under_its_name_and_sees_a_wireguard_address(&world).await;
    nothing_of_the_hub_but_what_is_granted_stands_in_the_sandbox(&world).await;
    nothing_there_opens_a_connection_to_the_sandbox(&world).await;
    routing_there_knows_the_granted_endpoints_and_their_nodes_alone(&world).await;
    verified::verify_tells_what_is_granted_and_names_what_else_is_open(&world).await;
    let attacker = a_scan_with_ranges_of_the_attackers_own_finds_the_granted_port_alone(&world).await;
    let scene =
        upheavals::nothing_more_opens_while_agents_tables_objects_and_nodes_go_and_come(&world, &attacker).await;
    a_grant_that_is_taken_back_and_a_mesh_that_is_deleted_close(&world, &attacker, scene).await;
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
        wireguard(&self.sandbox, &self.sandbox_webs[0].node).await
    }

    fn askers(&self) -> [Asker; 2] {
        [pod(&self.sandbox_webs[0]), host(&self.sandbox_webs[0].node)]
    }
}

async fn the_granted_service_answers_under_its_name_and_sees_a_wireguard_address(world: &World<'_>) {
    let service = world.sandbox.cluster_ip("default", "hub-web").await.unwrap();
    let saw = world.wireguard().await;
    let want: Vec<Answer> = world.hub_webs.iter().map(|web| seen(web, saw)).collect();
    for from in world.askers() {
        answers(world.lab, &from, &url(service, 80), &want).await;
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

async fn routing_there_knows_the_granted_endpoints_and_their_nodes_alone(world: &World<'_>) {
    let mut expected: BTreeSet<String> = world.granted().iter().map(|socket| socket.ip().to_string()).collect();
    for web in &world.hub_webs {
        expected.insert(wireguard(&world.hub, &web.node).await.to_string());
    }
    let carried = attack::carried(world.lab, &world.sandbox_webs[0].node).await;
    assert_eq!(carried, Ok(expected));
}

async fn a_scan_with_ranges_of_the_attackers_own_finds_the_granted_port_alone<'a>(
    world: &'a World<'a>,
) -> Attacker<'a> {
    let all = attack::sockets_beyond(&world.sandbox, &[&world.hub, &world.member], &world.granted()).await;
    println!("{} sockets to scan", all.len());
    // What the underlay lets through without any mesh is for NetworkPolicies.
    for from in world.askers() {
        let open = world.lab.scan(&from, all.keys().copied()).await.unwrap();
        println!("from {from}, as its routes are: {open:?}");
        assert!(open.is_superset(&world.granted()));
    }
    let attacker = Attacker::new(world.lab, &world.sandbox, &world.sandbox_webs[0].node).await;
    assert_eq!(attacker.peers.len(), world.hub_webs.len());
    let addresses = all.keys().map(SocketAddr::ip).collect();
    for chosen in &attacker.peers {
        attacker.leads_through(chosen, &addresses).await;
        let node = chosen.rsplit_once("--").unwrap().1;
        let there = world.hub_webs.iter().filter(|web| web.node == node);
        let granted: BTreeSet<SocketAddr> = there.map(|web| SocketAddr::new(web.ip, 8080)).collect();
        for from in world.askers() {
            // Of a scan's first packets a session that is still to be made holds some and loses the others.
            world.lab.until_open(&from, &granted).await.unwrap();
            let open = world.lab.scan(&from, all.keys().copied()).await.unwrap();
            println!("from {from}, all of it through {chosen}: {open:?}");
            assert_eq!(open, granted);
        }
    }
    attacker
}

/// After everything was led through one node, and while everything is still scanned.
async fn a_grant_that_is_taken_back_and_a_mesh_that_is_deleted_close(
    world: &World<'_>,
    attacker: &Attacker<'_>,
    scene: Scene<'_>,
) {
    let granted = world.hub.webs().await.unwrap();
    let granted: BTreeSet<SocketAddr> = granted.iter().map(|web| SocketAddr::new(web.ip, 8080)).collect();
    let [from, _] = world.askers();
    world
        .hub
        .apply(&world.product.mesh_with(&[SANDBOX], &[]))
        .await
        .unwrap();
    let applied = Instant::now();
    world.lab.until_closed(&from, &granted).await.unwrap();
    println!("closed {:.2} s after kubectl apply", applied.elapsed().as_secs_f64());
    scene.round().await;

    // Whoever is not seen is granted nothing anew.
    attacker.relents().await;
    let scene = scene.with_all(&granted);
    let mesh = world.product.mesh_with(&[SANDBOX], &[(SANDBOX, GRANT)]);
    world.hub.apply(&mesh).await.unwrap();
    scene.settled("granted once more").await;
    let delete = ["-n", NAMESPACE, "delete", "cmesh", MESH, "--timeout=90s"];
    world.hub.kubectl(delete).await.unwrap();
    world.lab.until_closed(&from, &granted).await.unwrap();
    scene.round().await;
}
