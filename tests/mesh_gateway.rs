//! A cluster of untrusted code that enters another through gateway pods, on whole clusters: the pods as deploy/gateway.yaml makes
//! them, with what a kubelet and a container runtime give them and no more. It reaches the Service that is named for it, from
//! the pods' own address, and nothing else, also where its administrator gives the gateways' Peers every address.

mod mesh;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{
    Asker, Attacker, Cluster, GATEWAYS, Lab, LabPlan, MESH, NAMESPACE, Product, Tunnel, Web, wait_until,
};
use mesh::{HUB, PATIENCE, host, json, pod, url};

const SANDBOX: &str = "notebooks";
const GRANT: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";

struct World<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    sandbox: Cluster<'a>,
    hub_webs: Vec<Web>,
    sandbox_webs: Vec<Web>,
}

#[tokio::test]
async fn a_sandbox_enters_through_gateway_pods_and_reaches_what_is_granted_alone() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (SANDBOX, 1)])).await.unwrap();
    let world = World::up(&lab).await;
    the_granted_service_answers_and_sees_the_gateways(&world).await;
    nothing_of_the_sandbox_is_on_the_hubs_nodes(&world).await;
    a_gateway_that_is_replaced_is_reached_again(&world).await;
    let granted = a_scan_with_ranges_of_the_attackers_own_finds_the_granted_ports_alone(&world).await;
    a_grant_that_is_taken_back_closes(&world, &granted).await;
}

impl<'a> World<'a> {
    async fn up(lab: &'a Lab) -> Self {
        let (hub, sandbox) = (lab.cluster(HUB), lab.cluster(SANDBOX));
        let mut product = Product::install(lab, &[HUB, SANDBOX], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        product.install_gateways(&["default"]).await.unwrap();
        let hub_webs = hub.run_web().await.unwrap();
        let one = clustermesh_lab::WEB.replace("replicas: 2", "replicas: 1");
        sandbox.apply(&one).await.unwrap();
        sandbox.rollout("default", "deployment/web").await.unwrap();
        let world = Self {
            lab,
            product,
            hub,
            sandbox_webs: sandbox.webs().await.unwrap(),
            sandbox,
            hub_webs,
        };
        world.hub.apply(&world.mesh(GRANT)).await.unwrap();
        let ready = [
            "wait",
            "-n",
            NAMESPACE,
            &format!("cmesh/{MESH}"),
            "--for=condition=Ready",
            "--timeout=180s",
        ];
        world.hub.kubectl(ready).await.unwrap();
        world
    }

    fn mesh(&self, grant: &str) -> String {
        self.product.mesh_with(&[SANDBOX], &[(SANDBOX, grant)])
    }

    /// Addresses of the gateways' pods, inside the tunnel by the pods' own.
    async fn gateways(&self) -> BTreeMap<IpAddr, IpAddr> {
        let objects = json(&self.hub, &["get", "sandboxgateways", "-n", GATEWAYS]).await;
        let objects = objects["items"].as_array().unwrap();
        let each = objects.iter().map(|object| {
            let status = &object["status"];
            let endpoint: SocketAddr = status["endpoints"][0].as_str().unwrap().parse().unwrap();
            (
                endpoint.ip(),
                status["wireguardIPs"][0].as_str().unwrap().parse().unwrap(),
            )
        });
        each.collect()
    }

    fn askers(&self) -> [Asker; 2] {
        [pod(&self.sandbox_webs[0]), host(&self.sandbox_webs[0].node)]
    }

    /// Asks until every web server of the hub has answered, and the pods of these addresses have asked in its name.
    async fn answers(&self, from: &Asker, through: &BTreeSet<IpAddr>) {
        let service = self.sandbox.cluster_ip("default", "hub-web").await.unwrap();
        let webs: BTreeSet<&str> = self.hub_webs.iter().map(|web| &*web.name).collect();
        let (mut pods, mut saw) = (BTreeSet::new(), BTreeSet::new());
        wait_until(
            format!("answers to {from} through all of {through:?}"),
            PATIENCE,
            async || {
                let answer = self.lab.ask_until_answered(from, &url(service, 80)).await;
                let answer = answer.map_err(|error| error.to_string())?;
                assert!(webs.contains(&*answer.pod), "{answer:?}");
                pods.insert(answer.pod);
                saw.insert(answer.saw);
                if pods.len() == webs.len() && saw.is_superset(through) {
                    Ok(())
                } else {
                    Err(format!("{pods:?} saw {saw:?}"))
                }
            },
        )
        .await
        .unwrap();
        assert!(
            saw.is_subset(&self.gateways().await.into_keys().chain(through.clone()).collect()),
            "{saw:?}"
        );
    }
}

async fn the_granted_service_answers_and_sees_the_gateways(world: &World<'_>) {
    let pods: BTreeSet<IpAddr> = world.gateways().await.into_keys().collect();
    assert_eq!(pods.len(), 2);
    for from in world.askers() {
        world.answers(&from, &pods).await;
    }
}

async fn nothing_of_the_sandbox_is_on_the_hubs_nodes(world: &World<'_>) {
    let kinds = "peers.kilo.squat.ai,peerpolicies.kilo.squat.ai";
    let objects = world.hub.kubectl(["get", kinds, "-o", "name"]).await.unwrap().stdout;
    assert_eq!(objects, "");
    // In the sandbox the gateways' own addresses lead into the tunnel, and nothing else.
    let carried = world.lab.carried(&world.sandbox_webs[0].node).await.unwrap();
    let gateways = world.gateways().await.into_values().map(|ip| ip.to_string());
    assert_eq!(carried, gateways.collect());
}

async fn a_scan_with_ranges_of_the_attackers_own_finds_the_granted_ports_alone(
    world: &World<'_>,
) -> BTreeSet<SocketAddr> {
    let access = json(&world.hub, &["get", "sandboxaccess", &format!("{MESH}--{SANDBOX}")]).await;
    let grants = access["spec"]["grants"].as_array().unwrap();
    let ports = grants
        .iter()
        .map(|grant| u16::try_from(grant["gatewayPort"].as_u64().unwrap()).unwrap());
    let gateways = world.gateways().await;
    let granted: BTreeSet<SocketAddr> = ports
        .flat_map(|port| gateways.values().map(move |ip| SocketAddr::new(*ip, port)))
        .collect();
    let mut all = world.sandbox.sockets_beyond(&[&world.hub], &granted).await.unwrap();
    for ip in gateways.values() {
        let ports = [22, 80, 443, 5432, 6443, 8080, 9587, 10250, 51820];
        all.extend(ports.map(|port| (SocketAddr::new(*ip, port), "a gateway".to_owned())));
    }
    all.extend(granted.iter().map(|socket| (*socket, "granted".to_owned())));
    println!("{} sockets to scan", all.len());
    let attacker = Attacker::new(world.lab, SANDBOX, &world.sandbox_webs[0].node)
        .await
        .unwrap();
    assert_eq!(attacker.peers.len(), gateways.len());
    let addresses = all.keys().map(SocketAddr::ip).collect();
    let mut found = BTreeSet::new();
    for chosen in &attacker.peers {
        let left = attacker.leads_through(chosen, &addresses).await.unwrap();
        assert_eq!(left, BTreeSet::new());
        for from in world.askers() {
            let mine = wait_until("a granted port to be open", PATIENCE, async || {
                let open = world.lab.scan(&from, granted.iter().copied()).await;
                let open = open.map_err(|error| error.to_string())?;
                if open.is_empty() {
                    Err("none".to_owned())
                } else {
                    Ok(open)
                }
            });
            let mine = mine.await.unwrap();
            assert_eq!(mine.len(), 1, "one gateway's own: {mine:?}");
            let open = world.lab.scan(&from, all.keys().copied()).await.unwrap();
            println!("from {from}, all of it through {chosen}: {open:?}");
            assert_eq!(open, mine);
            found.extend(open);
        }
    }
    assert_eq!(found, granted);
    granted
}

/// Its next pod comes to the same node and is called at the same port of it, where connection entries lead to the old one.
async fn a_gateway_that_is_replaced_is_reached_again(world: &World<'_>) {
    let before: BTreeSet<IpAddr> = world.gateways().await.into_keys().collect();
    let delete = ["-n", GATEWAYS, "delete", "pod", "clustermesh-gateway-0"];
    world.hub.kubectl(delete).await.unwrap();
    let after = wait_until("the next pod's address", PATIENCE, async || {
        let after: BTreeSet<IpAddr> = world.gateways().await.into_keys().collect();
        if after.len() == 2 && after != before {
            Ok(after)
        } else {
            Err(format!("{after:?}"))
        }
    });
    let after = after.await.unwrap();
    for from in world.askers() {
        world.answers(&from, &after).await;
    }
}

async fn a_grant_that_is_taken_back_closes(world: &World<'_>, granted: &BTreeSet<SocketAddr>) {
    world.hub.apply(&world.mesh("[]")).await.unwrap();
    let access = format!("{MESH}--{SANDBOX}");
    wait_until("the SandboxAccess to go", PATIENCE, async || {
        let words = ["get", "sandboxaccess", &access, "--ignore-not-found", "-o", "name"];
        let said = world
            .hub
            .kubectl(words)
            .await
            .map_err(|error| error.to_string())?
            .stdout;
        if said.is_empty() { Ok(()) } else { Err(said) }
    })
    .await
    .unwrap();
    for from in world.askers() {
        world.lab.until_closed(&from, granted).await.unwrap();
    }
}
