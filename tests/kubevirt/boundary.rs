//! The same worker as a sandbox: what its node finds beside the mesh, with and without the NetworkPolicies that are shipped.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use clustermesh_lab::{AGENT_NAMESPACE, Asker, Lab, Product, Running, wait_until};

use super::{EGRESS, HUB, MEMBER, PATIENCE, WORKER, World, host, pod, url};

/// Its agent leads nothing into the tunnel but what is granted: what else answers is the underlay's.
pub(super) async fn a_sandboxs_worker_finds_the_hub_beside_the_mesh_until_the_policies_are_applied(
    world: &World<'_>,
    product: &Product<'_>,
) {
    let lab = world.lab;
    product
        .mesh_up(&product.mesh_with(&[MEMBER], &[(MEMBER, EGRESS)]))
        .await
        .unwrap();
    let granted: BTreeSet<SocketAddr> = world.hub_webs.iter().map(|web| SocketAddr::new(web.ip, 8080)).collect();
    let askers = [host(), pod(&world.webs[0])];
    for from in &askers {
        lab.until_open(from, &granted).await.unwrap();
    }
    let boundary = lab.boundary(MEMBER).unwrap();
    let admitted = boundary.admitted().await.unwrap();
    let all = boundary.sockets(&[], &granted).await.unwrap();
    let own_api = SocketAddr::new(world.api, 6443);
    let kubelets: BTreeSet<SocketAddr> = lab
        .cluster(HUB)
        .nodes()
        .iter()
        .map(|node| SocketAddr::new(node.address().into(), 10250))
        .collect();
    let worker = SocketAddr::new(world.worker.address().into(), 10250);
    let from_hub = pod(&world.hub_webs[0]);

    let mut echoes = Echoes::on(lab);
    for echo in &mut echoes.running {
        echo.says("echoing on", PATIENCE).await.unwrap();
    }

    let beside: BTreeSet<SocketAddr> = kubelets.into_iter().chain([own_api]).chain(granted.clone()).collect();
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
        boundary.close(from, &open, &granted).await.unwrap();
    }
    println!("closed {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());
    let want: BTreeSet<SocketAddr> = admitted.union(&granted).copied().collect();
    for from in &askers {
        assert_eq!(boundary.found(from, &all, &want).await.unwrap(), want, "{from}");
        // From a port that nothing was asked from before: what is established goes on.
        let answered = lab.scan_udp(from, echoes.sockets.clone()).await.unwrap();
        assert_eq!(answered, BTreeSet::new(), "{from}");
    }
    lab.until_closed(&from_hub, &[worker].into()).await.unwrap();
    what_the_worker_needs_still_works(world, product, &askers).await;
}

/// The mesh's name for the Service, the API server, and what the API server asks of the kubelet.
async fn what_the_worker_needs_still_works(world: &World<'_>, product: &Product<'_>, askers: &[Asker]) {
    let service = world.member.cluster_ip("default", "hub-web").await.unwrap();
    for from in askers {
        world.answered(from, &url(service, 80)).await;
    }
    world.the_api_server_answers("with policies").await;
    let inside = world
        .member
        .kubectl(["exec", &world.webs[0].name, "--", "hostname"])
        .await
        .unwrap();
    assert_eq!(inside.stdout.trim(), world.webs[0].name);
    // A new process has no session: its handshake goes by what is admitted.
    let agent = product.agent_pod(MEMBER, WORKER).await.unwrap();
    let words = ["-n", AGENT_NAMESPACE, "delete", "pod", &agent, "--grace-period=1"];
    world.member.kubectl(words).await.unwrap();
    world
        .member
        .rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
        .await
        .unwrap();
    for from in askers {
        world.answered(from, &url(service, 80)).await;
    }
}

/// What answers datagrams on the hub's nodes, on the one that carries the worker and on the other.
struct Echoes {
    running: Vec<Running>,
    sockets: BTreeSet<SocketAddr>,
}

impl Echoes {
    const PORT: u16 = 9092;

    fn on(lab: &Lab) -> Self {
        let probe = lab.directory().join("mesh-probe").display().to_string();
        let (mut running, mut sockets) = (Vec::new(), BTreeSet::new());
        for node in lab.cluster(HUB).nodes() {
            // At its address: the node that carries the worker would answer it with the pods' gateway's.
            let socket = SocketAddr::new(node.address().into(), Self::PORT);
            let words = [&probe, "udp-echo", &socket.to_string()];
            running.push(node.spawn("hub-echo", words).unwrap());
            sockets.insert(socket);
        }
        Self { running, sockets }
    }
}
