//! Grants in every form that a Service takes, of both address families, on whole clusters: each answers under its name, and an
//! attacker finds nothing beside them. One sandbox has WireGuard addresses of IPv4, the other of IPv6; the ranges of their pods and
//! Services are the same.

#[path = "grants/live.rs"]
mod live;
mod mesh;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{Answer, Asker, Attacker, Cluster, Lab, LabPlan, Product, Tunnel, WEB, Web, wait_until};
use mesh::{HUB, PATIENCE, answers, host, json, pod, seen, state::versions, wireguard};

const OLD: &str = "notebooks";
const NEW: &str = "workflows";

/// Ports by number and by name; without ports: every one.
fn grants(hosted: bool) -> String {
    let service = |name: &str| format!("service: {{cluster: mgmt, namespace: default, name: {name}}}");
    let mut all = vec![
        format!(
            "{{{}, ports: [{{port: 80}}, {{port: echo, protocol: UDP}}]}}",
            service("store")
        ),
        format!("{{{}}}", service("store-headless")),
        format!("{{{}, ports: [{{port: http}}]}}", service("store-ports")),
        format!("{{{}}}", service("store-balanced")),
    ];
    if hosted {
        all.push(format!("{{{}}}", service("hosted")));
    }
    format!("[{}]", all.join(", "))
}

#[tokio::test]
async fn a_grant_of_every_kind_of_service_opens_its_endpoints_and_nothing_beside_them() {
    let plan = LabPlan::clusters(&[(HUB, 2), (OLD, 1), (NEW, 1)]);
    let lab = Lab::start(plan.dual_stack().with_wireguard_v6(NEW).with_ranges_of(NEW, OLD))
        .await
        .unwrap();
    let world = World::up(&lab).await;
    for side in &world.sides {
        every_service_answers_under_its_name(&world, side).await;
    }
    a_pod_that_takes_anothers_place_is_opened_and_the_old_one_is_gone(&world).await;
    let [old, new] = &world.sides;
    live::nothing_flows_beyond_what_a_quarantine_or_a_tighter_profile_leaves(&world, old).await;
    for (side, other) in [(old, new), (new, old)] {
        a_scan_with_ranges_of_the_attackers_own_finds_what_is_granted_alone(&world, side, other).await;
    }
    a_grant_that_is_taken_back_closes_and_the_others_stay(&world).await;
}

/// A sandbox.
struct Side<'a> {
    cluster: Cluster<'a>,
    web: Web,
    wireguard: IpAddr,
}

impl Side<'_> {
    fn askers(&self) -> [Asker; 2] {
        [pod(&self.web), host(&self.web.node)]
    }

    /// Its address of a pod: that of the sandbox's own family.
    fn of(&self, web: &Web) -> IpAddr {
        let all = [Some(web.ip), web.second];
        let mut all = all.into_iter().flatten();
        all.find(|ip| ip.is_ipv4() == self.wireguard.is_ipv4()).unwrap()
    }

    /// The ClusterIP of a Service there, of that family.
    async fn service(&self, name: &str, port: u16) -> SocketAddr {
        let address = if self.wireguard.is_ipv4() {
            self.cluster.cluster_ip("default", name).await
        } else {
            self.cluster.second_cluster_ip("default", name).await
        };
        SocketAddr::new(address.unwrap(), port)
    }
}

struct World<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    sides: [Side<'a>; 2],
}

impl<'a> World<'a> {
    async fn up(lab: &'a Lab) -> Self {
        let product = Product::install(lab, &[HUB, OLD, NEW], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        let hub = lab.cluster(HUB);
        hub.run_store().await.unwrap();
        let grants = grants(true);
        let mesh = product.mesh_with(&[OLD, NEW], &[(OLD, &grants), (NEW, &grants)]);
        product.mesh_up(&mesh).await.unwrap();
        let mut sides = Vec::new();
        for name in [OLD, NEW] {
            let cluster = lab.cluster(name);
            cluster.apply(&WEB.replace("replicas: 2", "replicas: 1")).await.unwrap();
            cluster.rollout("default", "deployment/web").await.unwrap();
            let web = cluster.webs().await.unwrap().remove(0);
            let wireguard = wireguard(&cluster, &web.node).await;
            sides.push(Side {
                cluster,
                web,
                wireguard,
            });
        }
        let Ok(sides) = sides.try_into() else {
            panic!("two sandboxes")
        };
        Self {
            lab,
            product,
            hub,
            sides,
        }
    }

    /// Those of the hub's pods that run, by label.
    async fn pods(&self, app: &str) -> Vec<Web> {
        self.hub.labelled(app).await.unwrap()
    }

    /// The server in the host network.
    async fn hosted(&self) -> Web {
        self.pods("hosted").await.remove(0)
    }

    /// Which of these answer, by TCP and by UDP.
    async fn open(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>) -> [BTreeSet<SocketAddr>; 2] {
        let tcp = self.lab.scan(from, sockets.iter().copied()).await.unwrap();
        [tcp, self.lab.scan_udp(from, sockets.iter().copied()).await.unwrap()]
    }

    /// What a sandbox may reach: by TCP, and by UDP; on one node or on all.
    async fn granted(&self, side: &Side<'_>, hosted: bool, node: Option<&str>) -> [BTreeSet<SocketAddr>; 2] {
        let mut all = [BTreeSet::new(), BTreeSet::new()];
        for (app, ports) in [("store", [8080, 9000]), ("hosted", [18080, 19000])] {
            if app == "hosted" && !hosted {
                continue;
            }
            for web in self
                .pods(app)
                .await
                .iter()
                .filter(|web| node.is_none_or(|node| web.node == node))
            {
                for (sockets, port) in all.iter_mut().zip(ports) {
                    sockets.insert(SocketAddr::new(side.of(web), port));
                }
            }
        }
        all
    }
}

async fn every_service_answers_under_its_name(world: &World<'_>, side: &Side<'_>) {
    for (app, names) in [
        (
            "store",
            vec![
                ("store", 80),
                ("store-headless", 8080),
                ("store-ports", 80),
                ("store-balanced", 80),
            ],
        ),
        ("hosted", vec![("hosted", 80)]),
    ] {
        let pods = world.pods(app).await;
        let want: Vec<Answer> = pods
            .iter()
            .map(|web| match app {
                // Its name is its node's.
                "hosted" => Answer {
                    pod: web.node.clone(),
                    ..seen(web, side.wireguard)
                },
                _ => seen(web, side.wireguard),
            })
            .collect();
        for (name, port) in names {
            let at = side.service(name, port).await;
            for from in side.askers() {
                answers(world.lab, &from, &format!("http://{at}"), &want).await;
            }
        }
    }
    for name in ["store", "hosted"] {
        let at = side.service(name, 9000).await;
        for from in side.askers() {
            assert_eq!(
                world.lab.scan_udp(&from, [at]).await.unwrap(),
                [at].into(),
                "{name}, from {from}"
            );
        }
    }
    // A port of the same Service that is not granted has no place in it.
    let at = side.service("store", 81).await;
    let [from, _] = side.askers();
    assert_eq!(world.lab.scan(&from, [at]).await.unwrap(), BTreeSet::new());
}

async fn a_pod_that_takes_anothers_place_is_opened_and_the_old_one_is_gone(world: &World<'_>) {
    let written = async || {
        let peers = versions(&world.hub, "peers").await;
        (peers, versions(&world.hub, "peerpolicies").await)
    };
    let before = written().await;
    let gone = world.pods("store").await.remove(0);
    world.hub.kubectl(["delete", "pod", &gone.name]).await.unwrap();
    world.hub.rollout("default", "deployment/store").await.unwrap();
    let pods = wait_until("another pod", PATIENCE, async || {
        let pods = world.pods("store").await;
        if pods.len() == 2 && !pods.contains(&gone) {
            Ok(pods)
        } else {
            Err(format!("{pods:?}"))
        }
    })
    .await
    .unwrap();
    let new = pods.iter().find(|web| web.node == gone.node).unwrap_or(&pods[0]);
    for side in &world.sides {
        let at = side.service("store", 80).await;
        let [from, _] = side.askers();
        wait_until(format!("{} to answer {from}", new.name), PATIENCE, async || match world
            .lab
            .ask(&from, &format!("http://{at}"))
            .await
            .map_err(|error| error.to_string())?
        {
            Ok(answer) if answer.pod == new.name => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap();
        let old = side.of(&gone).to_string();
        wait_until(format!("{old} to go from the sandbox"), PATIENCE, async || {
            let peers = json(&side.cluster, &["get", "peers"]).await.to_string();
            if peers.contains(&format!("\"{old}/")) {
                Err(peers)
            } else {
                Ok(())
            }
        })
        .await
        .unwrap();
    }
    assert_eq!(
        written().await,
        before,
        "an endpoint that moves writes nothing where it is"
    );
}

/// Leaves everything led through the node that has the server in its host network.
async fn a_scan_with_ranges_of_the_attackers_own_finds_what_is_granted_alone(
    world: &World<'_>,
    side: &Side<'_>,
    other: &Side<'_>,
) {
    let [tcp, udp] = world.granted(side, true, None).await;
    let all = side
        .cluster
        .sockets_beyond(&[&world.hub, &other.cluster], &tcp)
        .await
        .unwrap();
    let addresses: BTreeSet<IpAddr> = all.keys().map(SocketAddr::ip).collect();
    let ports: BTreeSet<u16> = all.keys().map(SocketAddr::port).collect();
    let at = |ip: &IpAddr| ports.iter().map(|port| SocketAddr::new(*ip, *port)).collect::<Vec<_>>();
    let sockets: BTreeSet<SocketAddr> = addresses.iter().flat_map(at).collect();
    assert!(sockets.is_superset(&tcp) && sockets.is_superset(&udp), "{ports:?}");
    let mut attacker = Attacker::new(world.lab, &side.cluster.plan().name, &side.web.node)
        .await
        .unwrap();
    let hosted = world.hosted().await.node;
    attacker.peers.sort_by_key(|peer| Attacker::node_of(peer) == hosted);
    assert_eq!(attacker.peers.len(), 2);
    for chosen in &attacker.peers {
        let left = attacker.leads_through(chosen, &addresses).await.unwrap();
        assert_eq!(left, BTreeSet::new());
        let granted = world.granted(side, true, Some(Attacker::node_of(chosen))).await;
        for from in side.askers() {
            // Of a scan's first packets a session that is still to be made holds some and loses the others.
            world.lab.until_open(&from, &granted[0]).await.unwrap();
            let open = world.open(&from, &sockets).await;
            println!("{from}, {} sockets through {chosen}: {open:?}", sockets.len());
            assert_eq!(open, granted);
        }
    }
}

async fn a_grant_that_is_taken_back_closes_and_the_others_stay(world: &World<'_>) {
    let hosted = world.hosted().await;
    let [old, _] = &world.sides;
    let [from, _] = old.askers();
    let udp = SocketAddr::new(old.of(&hosted), 19000);
    let watch = world.lab.watch_udp(&from, udp).unwrap();
    watch.answered_after(now()).await.unwrap();
    let apply = async |hosted| {
        let grants = grants(hosted);
        let mesh = world.product.mesh_with(&[OLD, NEW], &[(OLD, &grants), (NEW, &grants)]);
        let before = now();
        world.hub.apply(&mesh).await.unwrap();
        before
    };

    let taken = apply(false).await;
    for side in &world.sides {
        let [from, _] = side.askers();
        let goes = SocketAddr::new(side.of(&hosted), 18080);
        world.lab.until_closed(&from, &[goes].into()).await.unwrap();
        let before = world.granted(side, true, Some(&hosted.node)).await;
        let open = world.open(&from, &before.into_iter().flatten().collect()).await;
        assert_eq!(open, world.granted(side, false, Some(&hosted.node)).await);
    }
    let last = watch.answers().last().copied().unwrap_or_default();
    println!(
        "last answer {} ms after kubectl apply was called",
        last.saturating_sub(taken)
    );

    let given = apply(true).await;
    let first = watch.answered_after(given).await.unwrap();
    println!("first answer {} ms after kubectl apply was called", first - given);
}

/// Milliseconds since 1970.
fn now() -> u128 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_millis()
}
