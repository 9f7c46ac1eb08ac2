//! Tests grants of every type of Service in both address families, on whole clusters whose sandboxes enter through
//! gateways: each granted Service answers under its name, and an attacker finds nothing else. One sandbox has IPv4
//! WireGuard addresses, the other IPv6; their pod and Service ranges are equal.

mod gateway;
mod live;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{
    Asker, Attacker, Cluster, Echo, GATEWAYS, Lab, LabPlan, MESH, NAMESPACE, Product, Tunnel, WEB, Web, wait_until,
};
use gateway::Gateway;
use serde_json::Value;

use crate::setup::{HUB, PATIENCE, host, json, pod, state::versions, wireguard};

/// The sandbox with IPv4 WireGuard addresses.
const OLD: &str = "notebooks";
/// The sandbox with IPv6 WireGuard addresses.
const NEW: &str = "workflows";

/// Services whose endpoints are pods.
const SERVED: [&str; 4] = ["store", "store-headless", "store-ports", "store-balanced"];

/// Grants of these Services, with ports by number, by name, or without `ports` (all of them).
fn grants(services: &[&str]) -> String {
    let one = |name: &&str| {
        let ports = match *name {
            "store" => ", ports: [{port: 80}, {port: echo, protocol: UDP}]",
            "store-ports" => ", ports: [{port: http}]",
            _ => "",
        };
        format!("{{service: {{cluster: mgmt, namespace: default, name: {name}}}{ports}}}")
    };
    let all: Vec<String> = services.iter().map(one).collect();
    format!(
        "[{}, {{service: {{cluster: mgmt, namespace: default, name: hosted}}}}]",
        all.join(", ")
    )
}

// threat: equal-pod-networks, gateway-ungranted
#[tokio::test]
async fn grant_of_each_service_type_opens_only_its_endpoints() {
    let plan = LabPlan::clusters(&[(HUB, 2), (OLD, 1), (NEW, 1)]);
    let lab = Lab::start(plan.dual_stack().with_wireguard_v6(NEW).with_ranges_of(NEW, OLD))
        .await
        .unwrap();
    let env = TestEnv::up(&lab).await;
    for side in &env.sides {
        granted_services_answer_under_their_names(&env, side).await;
    }
    host_network_service_is_refused_and_others_work(&env).await;
    replaced_pod_is_reached_without_any_write(&env).await;
    let [old, new] = &env.sides;
    live::quarantine_and_tighter_profile_stop_running_flows(&env, old).await;
    tokio::join!(
        scan_with_forged_allowed_ips_finds_only_grants(&env, old, new),
        scan_with_forged_allowed_ips_finds_only_grants(&env, new, old),
    );
    revoked_grant_closes_and_others_stay_open(&env).await;
}

/// One of the two sandboxes.
struct Side<'a> {
    cluster: Cluster<'a>,
    web: Web,
    wireguard: IpAddr,
}

impl Side<'_> {
    fn name(&self) -> &str {
        &self.cluster.plan().name
    }

    fn askers(&self) -> [Asker; 2] {
        [pod(&self.web), host(&self.web.node)]
    }

    /// Picks the address with the IP family of this sandbox's WireGuard address.
    fn of(&self, all: impl IntoIterator<Item = IpAddr>) -> IpAddr {
        let mut all = all.into_iter();
        all.find(|ip| ip.is_ipv4() == self.wireguard.is_ipv4()).unwrap()
    }

    /// The ClusterIP of a mirrored Service in that family.
    async fn service(&self, name: &str, port: u16) -> SocketAddr {
        let address = if self.wireguard.is_ipv4() {
            self.cluster.cluster_ip("default", name).await
        } else {
            self.cluster.second_cluster_ip("default", name).await
        };
        SocketAddr::new(address.unwrap(), port)
    }
}

/// Addresses of a pod.
fn addresses(web: &Web) -> impl Iterator<Item = IpAddr> + use<> {
    [Some(web.ip), web.second].into_iter().flatten()
}

/// A port of a Service that a SandboxAccess grants.
struct Granted {
    service: String,
    port: String,
    udp: bool,
    gateway_port: u16,
}

impl Granted {
    /// Whether a server answers at this port. Nothing listens at the port of the headless Service that [`live`] uses,
    /// and gateways do not forward to servers in the host network.
    fn answers(&self) -> bool {
        self.service != "hosted" && self.port != "stream"
    }
}

struct TestEnv<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    sides: [Side<'a>; 2],
    gateways: Vec<Gateway>,
}

impl<'a> TestEnv<'a> {
    async fn up(lab: &'a Lab) -> Self {
        let mut product = Product::install(lab, &[HUB, OLD, NEW], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        product.install_gateways(&["default"]).await.unwrap();
        let hub = lab.cluster(HUB);
        hub.run_store().await.unwrap();
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
        let env = Self {
            lab,
            gateways: gateway::all(&hub).await,
            product,
            hub,
            sides,
        };
        env.apply(&SERVED).await;
        let mesh = format!("cmesh/{MESH}");
        let ready = [
            "wait",
            "-n",
            NAMESPACE,
            &mesh,
            "--for=condition=Ready",
            "--timeout=180s",
        ];
        env.hub.kubectl(ready).await.unwrap();
        env
    }

    /// Grants these Services and `hosted` to both sandboxes. Returns the time at which kubectl was called.
    async fn apply(&self, services: &[&str]) -> u128 {
        let grants = grants(services);
        let mesh = self.product.mesh_with(&[OLD, NEW], &[(OLD, &grants), (NEW, &grants)]);
        let called = now();
        self.hub.apply(&mesh).await.unwrap();
        called
    }

    /// The running pods of the store.
    async fn pods(&self) -> Vec<Web> {
        self.hub.labelled("store").await.unwrap()
    }

    /// Which of these sockets answer over TCP, and which over UDP.
    async fn open(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>) -> [BTreeSet<SocketAddr>; 2] {
        let tcp = self.lab.scan(from, sockets.iter().copied()).await.unwrap();
        [tcp, self.lab.scan_udp(from, sockets.iter().copied()).await.unwrap()]
    }

    /// The grants in a sandbox's SandboxAccess, in their order.
    async fn access(&self, side: &Side<'_>) -> Vec<Granted> {
        let name = format!("{MESH}--{}", side.name());
        let access = json(&self.hub, &["get", "sandboxaccess", &name]).await;
        let grants = access["spec"]["grants"].as_array().cloned().unwrap_or_default();
        let one = |grant: &Value| Granted {
            service: text(&grant["service"]["name"]),
            port: text(&grant["port"]),
            udp: grant["protocol"] == "UDP",
            gateway_port: grant["gatewayPort"].as_u64().unwrap().try_into().unwrap(),
        };
        grants.iter().map(one).collect()
    }

    /// The sockets at the gateways for this port of a Service.
    async fn gateway_sockets(&self, side: &Side<'_>, service: &str, port: &str) -> Vec<SocketAddr> {
        let access = self.access(side).await;
        let granted = access.iter().find(|one| one.service == service && one.port == port);
        let port = granted.unwrap().gateway_port;
        let ips = self.gateways.iter().map(|gateway| gateway.of(side));
        ips.map(|ip| SocketAddr::new(ip, port)).collect()
    }

    /// The sockets of a gateway that answer a sandbox over TCP, and over UDP.
    async fn granted(&self, side: &Side<'_>, gateway: &Gateway) -> [BTreeSet<SocketAddr>; 2] {
        let access = self.access(side).await;
        [false, true].map(|udp| {
            let ports = access.iter().filter(|granted| granted.udp == udp && granted.answers());
            ports
                .map(|granted| SocketAddr::new(gateway.of(side), granted.gateway_port))
                .collect()
        })
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Every pod of the store answers and sees each gateway's pod address as the source.
async fn granted_services_answer_under_their_names(env: &TestEnv<'_>, side: &Side<'_>) {
    let names: BTreeSet<String> = env.pods().await.into_iter().map(|web| web.name).collect();
    let gateways: BTreeSet<IpAddr> = env.gateways.iter().map(|g| side.of(addresses(&g.pod))).collect();
    assert_eq!((names.len(), gateways.len()), (2, 2));
    for (service, port) in SERVED.into_iter().zip([80, 8080, 80, 80]) {
        let url = format!("http://{}", side.service(service, port).await);
        for from in side.askers() {
            let (mut pods, mut saw) = (BTreeSet::new(), BTreeSet::new());
            let all = async || {
                let answer = env.lab.ask_until_answered(&from, &url).await;
                let answer = answer.map_err(|error| error.to_string())?;
                let expected = names.contains(&answer.pod) && gateways.contains(&answer.saw);
                assert!(expected, "{service}, from {from}: {answer:?}");
                pods.insert(answer.pod);
                saw.insert(answer.saw);
                if pods == names && saw == gateways {
                    Ok(())
                } else {
                    Err(format!("{pods:?} saw {saw:?}"))
                }
            };
            wait_until(format!("{service} to give {from} every answer"), PATIENCE, all)
                .await
                .unwrap();
        }
    }
    let udp = side.service("store", 9000).await;
    // A port of the same Service that is not granted does not exist in the mirrored Service.
    let admin = side.service("store", 81).await;
    for from in side.askers() {
        let open = env.open(&from, &[udp, admin].into()).await;
        assert_eq!(open, [BTreeSet::new(), [udp].into()], "store, from {from}");
    }
}

/// The other Services work: they have answered in the steps before.
async fn host_network_service_is_refused_and_others_work(env: &TestEnv<'_>) {
    let hosted = env.hub.labelled("hosted").await.unwrap().remove(0);
    let hosts: Vec<String> = addresses(&hosted).map(|ip| ip.to_string()).collect();
    // Both of its ports, by their index in the object.
    let mut refused = BTreeSet::new();
    for side in &env.sides {
        let access = env.access(side).await;
        let places = access.iter().enumerate().filter(|(_, one)| one.service == "hosted");
        let fields: Vec<String> = places.map(|(at, _)| format!("spec.grants[{at}].service")).collect();
        assert_eq!(fields.len(), 2);
        refused.extend(
            fields
                .into_iter()
                .map(|field| (format!("{MESH}--{}", side.name()), field)),
        );
    }
    let objects = json(&env.hub, &["get", "sandboxgateways", "-n", GATEWAYS]).await;
    for object in objects["items"].as_array().unwrap() {
        let refusals = object["status"]["refused"].as_array().cloned().unwrap_or_default();
        let parts = refusals.iter().map(|one| (text(&one["name"]), text(&one["field"])));
        assert_eq!(parts.collect::<BTreeSet<_>>(), refused, "{refusals:#?}");
        for one in refusals {
            let message = text(&one["message"]);
            let named = hosts.iter().any(|ip| message.contains(&format!("{ip} ")));
            assert_eq!(one["reason"], "EndpointForbidden");
            assert!(
                named && message.contains("--endpoint-network"),
                "{message}, of {hosts:?}"
            );
        }
    }
    for side in &env.sides {
        let mut sockets: BTreeSet<SocketAddr> = env.gateway_sockets(side, "hosted", "http").await.into_iter().collect();
        sockets.extend(env.gateway_sockets(side, "hosted", "echo").await);
        // The hub nodes' own addresses are not scanned: only a firewall on the underlay could close them.
        for port in [80, 9000] {
            sockets.insert(side.service("hosted", port).await);
        }
        for from in side.askers() {
            let open = env.open(&from, &sockets).await;
            assert_eq!(open, [BTreeSet::new(), BTreeSet::new()], "from {from}");
        }
    }
}

/// This holds for flows that began before the change, too.
async fn replaced_pod_is_reached_without_any_write(env: &TestEnv<'_>) {
    let before = written(env).await;
    let gone = env.pods().await.remove(0);
    let mut flows: Vec<Echo> = Vec::new();
    for side in &env.sides {
        for at in env.gateway_sockets(side, "store", "echo").await {
            flows.extend(side.askers().map(|from| env.lab.watch_udp(&from, at).unwrap()));
        }
    }
    all_answer(&flows).await;
    env.hub.kubectl(["delete", "pod", &gone.name]).await.unwrap();
    env.hub.rollout("default", "deployment/store").await.unwrap();
    let pods = wait_until("another pod", PATIENCE, async || {
        let pods = env.pods().await;
        if pods.len() == 2 && !pods.contains(&gone) {
            Ok(pods)
        } else {
            Err(format!("{pods:?}"))
        }
    })
    .await
    .unwrap();
    for gateway in &env.gateways {
        wait_until(format!("{} to follow", gateway.pod.name), PATIENCE, async || {
            // The set of endpoints to which established connections may continue.
            let mut words = BTreeSet::new();
            for set in ["endpoints4", "endpoints6"] {
                let list = ["nft", "list", "set", "inet", "clustermesh", set];
                let list = env.lab.run_at(&pod(&gateway.pod), &list).await;
                let list = list.map_err(|error| error.to_string())?.stdout;
                words.extend(list.split_whitespace().map(str::to_owned));
            }
            let knows = |web: &Web| addresses(web).all(|ip| words.contains(&ip.to_string()));
            let still = addresses(&gone).any(|ip| words.contains(&ip.to_string()));
            if pods.iter().all(knows) && !still {
                Ok(())
            } else {
                Err(format!("{pods:?} for {gone:?}: {words:?}"))
            }
        })
        .await
        .unwrap();
    }
    all_answer(&flows).await;
    for side in &env.sides {
        granted_services_answer_under_their_names(env, side).await;
    }
    assert_eq!(written(env).await, before, "a pod that moves costs no write");
}

async fn all_answer(flows: &[Echo]) {
    let from = now();
    for flow in flows {
        flow.answered_after(from).await.unwrap();
    }
}

/// The resourceVersions of all objects for the sandboxes, in every cluster.
async fn written(env: &TestEnv<'_>) -> Vec<BTreeMap<String, String>> {
    let mut all = Vec::new();
    for kind in ["sandboxaccesses", "sandboxgateways", "peers", "peerpolicies"] {
        all.push(versions(&env.hub, kind).await);
    }
    for side in &env.sides {
        for kind in ["peers", "peerpolicies", "services", "endpointslices"] {
            all.push(versions(&side.cluster, kind).await);
        }
    }
    all
}

/// Leaves the forged allowed IPs in place: afterwards the sandbox routes all addresses through the last gateway.
// threat: gateway-ungranted
async fn scan_with_forged_allowed_ips_finds_only_grants(env: &TestEnv<'_>, side: &Side<'_>, other: &Side<'_>) {
    let mut granted = BTreeSet::new();
    for gateway in &env.gateways {
        granted.extend(env.granted(side, gateway).await.into_iter().flatten());
    }
    let all = side.cluster.sockets_beyond(&[&env.hub, &other.cluster], &granted).await;
    let all: Vec<SocketAddr> = all.unwrap().into_keys().chain(granted).collect();
    let mut addresses: BTreeSet<IpAddr> = all.iter().map(SocketAddr::ip).collect();
    addresses.extend(env.gateways.iter().flat_map(|gateway| &gateway.wireguard));
    let ports: BTreeSet<u16> = all.iter().map(SocketAddr::port).chain([51820]).collect();
    let at = |ip: &IpAddr| ports.iter().map(|port| SocketAddr::new(*ip, *port)).collect::<Vec<_>>();
    let sockets: BTreeSet<SocketAddr> = addresses.iter().flat_map(at).collect();
    let peers = json(&side.cluster, &["get", "peers"]).await;
    let attacker = Attacker::new(env.lab, side.name(), &side.web.node).await.unwrap();
    assert_eq!(attacker.peers.len(), env.gateways.len());
    for gateway in &env.gateways {
        let peers = peers["items"].as_array().unwrap();
        let chosen = peers
            .iter()
            .find(|peer| peer["spec"]["publicKey"] == *gateway.key)
            .unwrap();
        let chosen = text(&chosen["metadata"]["name"]);
        let left = attacker.leads_through(&chosen, &addresses).await.unwrap();
        assert_eq!(left, BTreeSet::new());
        let granted = env.granted(side, gateway).await;
        assert_eq!(granted.each_ref().map(BTreeSet::len), [4, 1]);
        for from in side.askers() {
            // Establish the session first: until then, WireGuard stages only some of a scan's packets and drops the
            // others.
            env.lab.until_open(&from, &granted[0]).await.unwrap();
            let open = env.open(&from, &sockets).await;
            println!("{from}, {} sockets through {chosen}: {open:?}", sockets.len());
            assert_eq!(open, granted);
        }
    }
}

/// Uses the gateway through which the scan has routed everything.
// threat: gateway-revoked-connection
async fn revoked_grant_closes_and_others_stay_open(env: &TestEnv<'_>) {
    let [old, _] = &env.sides;
    let [from, _] = old.askers();
    let last = env.gateways.last().unwrap();
    let udp = *env.gateway_sockets(old, "store", "echo").await.last().unwrap();
    let watch = env.lab.watch_udp(&from, udp).unwrap();
    watch.answered_after(now()).await.unwrap();
    let mut before = Vec::new();
    for side in &env.sides {
        before.push(env.granted(side, last).await);
    }

    let taken = env.apply(&SERVED[1..]).await;
    for (side, before) in env.sides.iter().zip(&before) {
        let stays = wait_until(
            "the SandboxAccess to be without the grant",
            PATIENCE,
            async || match env.granted(side, last).await {
                [tcp, udp] if tcp.len() == 3 && udp.is_empty() => Ok([tcp, udp]),
                other => Err(format!("{other:?}")),
            },
        );
        let stays = stays.await.unwrap();
        let [from, _] = side.askers();
        let goes = before[0].difference(&stays[0]).copied().collect();
        env.lab.until_closed(&from, &goes).await.unwrap();
        let open = env.open(&from, &before.iter().flatten().copied().collect()).await;
        assert_eq!(open, stays, "from {from}");
    }
    let end = watch.answers().last().copied().unwrap_or_default();
    println!(
        "last answer {} ms after kubectl apply was called",
        end.saturating_sub(taken)
    );

    let given = env.apply(&SERVED).await;
    // At the same gateway port as before.
    let first = watch.answered_after(given).await.unwrap();
    println!("first answer {} ms after kubectl apply was called", first - given);
    for (side, before) in env.sides.iter().zip(&before) {
        let [from, _] = side.askers();
        env.lab.until_open(&from, &before[0]).await.unwrap();
    }
}

/// Milliseconds since 1970.
fn now() -> u128 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_millis()
}
