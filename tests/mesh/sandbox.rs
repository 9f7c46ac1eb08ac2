//! Tests a sandbox that enters the hub through gateway pods, on whole clusters. The pods come from deploy/gateway.yaml
//! unchanged. Through the tunnel, the sandbox reaches the Service that is granted to it and nothing else, even if its
//! administrator adds every address to the allowed IPs of the gateways' Peers.

mod disruptions;
mod gateways;
mod race;
mod verify;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_lab::{
    Attacker, Cluster, GATEWAYS, Lab, LabPlan, MESH, NAMESPACE, Product, RunningPod, TrafficClient, Tunnel,
    gateway_cidrs, wait_until,
};
use disruptions::ScannedGateway;
use ipnet::IpNet;

use crate::setup::{HUB, MEMBER, PATIENCE, host, json, pod, url, wireguard};

const SANDBOX: &str = "notebooks";
const GRANT: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";

struct TestEnv<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    member: Cluster<'a>,
    sandbox: Cluster<'a>,
    hub_webs: Vec<RunningPod>,
    member_webs: Vec<RunningPod>,
    sandbox_webs: Vec<RunningPod>,
}

// threat: stolen-controller-token, gateway-ungranted
#[tokio::test]
async fn sandbox_reaches_only_grants_through_gateways() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (SANDBOX, 1)]))
        .await
        .unwrap();
    let env = TestEnv::up(&lab).await;
    granted_service_answers_and_sees_gateway_addresses(&env).await;
    sandbox_objects_contain_only_gateways_and_grants(&env).await;
    hub_and_member_cannot_connect_to_sandbox(&env).await;
    sandbox_routes_only_gateways_into_tunnel(&env).await;
    hub_has_no_trace_of_sandbox(&env).await;
    verify::verify_lists_grants_and_reports_other_open_sockets(&env).await;
    let attacker = scan_with_forged_allowed_ips_finds_only_granted_port(&env).await;
    let scanned = disruptions::disturbed_gateway_opens_no_other_port(&env, &attacker).await;
    race::fast_grant_changes_keep_the_ungranted_port_closed(&env, &scanned).await;
    revoked_grant_and_deleted_mesh_close_everything(&env, &scanned).await;
}

impl<'a> TestEnv<'a> {
    async fn up(lab: &'a Lab) -> Self {
        let (hub, member, sandbox) = (lab.cluster(HUB), lab.cluster(MEMBER), lab.cluster(SANDBOX));
        let mut product = Product::install(lab, &[HUB, MEMBER, SANDBOX], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        product.install_gateways(&["default"]).await.unwrap();
        // Set both lists of networks in deploy/admission.yaml, so that the controller has to work within them.
        let admission =
            std::fs::read_to_string(format!("{}/../deploy/admission.yaml", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let networks = |cluster: &Cluster<'_>| {
            let plan = cluster.plan();
            let mut networks = vec![plan.pod_cidr.into(), plan.service_cidr.into(), plan.wireguard_cidr];
            networks.extend(cluster.nodes().iter().map(|node| IpNet::from(node.address())));
            let mut networks: Vec<String> = networks.iter().map(IpNet::to_string).collect();
            if plan.name == HUB {
                networks.extend(gateway_cidrs(plan));
            }
            networks.join(", ")
        };
        for (cluster, other) in [(&hub, &member), (&member, &hub)] {
            let incoming = format!("{}, {}", networks(other), sandbox.plan().wireguard_cidr);
            let lists = [
                (
                    "  # networks: 10.20.0.0/16, 172.16.2.0/24\n",
                    format!("  networks: {incoming}\n"),
                ),
                (
                    "  # reachable: 10.10.0.0/16, 172.16.1.0/24\n",
                    format!("  reachable: {}\n", networks(cluster)),
                ),
            ];
            let admission = lists.into_iter().fold(admission.clone(), |text, (example, list)| {
                assert!(text.contains(example), "{example}");
                text.replace(example, &list)
            });
            cluster.apply(&admission).await.unwrap();
        }
        let hub_webs = hub.run_web().await.unwrap();
        // Web servers must run on different nodes. These clusters have one node each, so a second server would stay pending.
        let mut webs = Vec::new();
        for cluster in [&member, &sandbox] {
            cluster
                .apply(&clustermesh_lab::WEB.replace("replicas: 2", "replicas: 1"))
                .await
                .unwrap();
            cluster.wait_for_rollout("default", "deployment/web").await.unwrap();
            webs.push(cluster.web_pods().await.unwrap());
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

    /// The WireGuard address of the sandbox's node.
    async fn wireguard(&self) -> IpAddr {
        wireguard(&self.sandbox, &self.sandbox_webs[0].node).await
    }

    fn clients(&self) -> [TrafficClient; 2] {
        [pod(&self.sandbox_webs[0]), host(&self.sandbox_webs[0].node)]
    }

    /// The sockets that the sandbox's pod reaches, and those that its node reaches.
    async fn scan_from_sandbox(
        &self,
        sockets: impl IntoIterator<Item = SocketAddr> + Clone,
    ) -> [BTreeSet<SocketAddr>; 2] {
        let [pod, host] = self.clients();
        let (pod, host) = tokio::join!(self.lab.scan(&pod, sockets.clone()), self.lab.scan(&host, sockets));
        [pod.unwrap(), host.unwrap()]
    }
}

async fn granted_service_answers_and_sees_gateway_addresses(env: &TestEnv<'_>) {
    let service = env.sandbox.cluster_ip("default", "hub-web").await.unwrap();
    let gateways: BTreeSet<IpAddr> = env.gateways().await.iter().map(|gateway| gateway.pod.ip).collect();
    assert_eq!(gateways.len(), 2);
    let webs: BTreeSet<&str> = env.hub_webs.iter().map(|web| &*web.name).collect();
    for from in env.clients() {
        let (mut answered, mut sources) = (BTreeSet::new(), BTreeSet::new());
        let request_once = async || {
            let answer = env.lab.http_get_until_answered(&from, &url(service, 80)).await;
            let answer = answer.map_err(|error| error.to_string())?;
            assert!(
                webs.contains(&*answer.pod) && gateways.contains(&answer.client_ip),
                "{answer:?}"
            );
            answered.insert(answer.pod);
            sources.insert(answer.client_ip);
            if answered.len() == webs.len() && sources == gateways {
                Ok(())
            } else {
                Err(format!("{answered:?} from {sources:?}"))
            }
        };
        let what = format!("every web server to answer {from} through every gateway");
        wait_until(what, PATIENCE, request_once).await.unwrap();
    }
}

// threat: sandbox-reads-target
async fn sandbox_objects_contain_only_gateways_and_grants(env: &TestEnv<'_>) {
    let text = env.sandbox.dump_objects().await.unwrap();
    for gateway in env.gateways().await {
        assert!(text.contains(&gateway.address.to_string()), "{gateway:?}");
    }
    for (cluster, has_gateways) in [(&env.hub, true), (&env.member, false)] {
        for (socket, what) in cluster.sockets().await.unwrap() {
            let ip = socket.ip().to_string();
            // The sandbox's Peers contain the addresses of the hub's nodes, because their host ports lead to the gateways. The
            // two Services are ignored, because every cluster has them.
            let may_appear =
                has_gateways && what.starts_with("node ") || what == "Service kubernetes" || what == "Service kube-dns";
            assert!(
                may_appear || !text.contains(&format!("{ip}\"")) && !text.contains(&format!("{ip}/")),
                "{ip} ({what}) is known in the sandbox"
            );
        }
    }
    assert!(
        !text.contains(MEMBER),
        "the other member's name is known in the sandbox"
    );
    for cluster in [&env.hub, &env.member] {
        let theirs = names_and_credentials(cluster).await;
        assert!(theirs.len() > 50, "{theirs:?}");
        let known: Vec<&String> = theirs.iter().filter(|word| text.contains(&***word)).collect();
        assert_eq!(known, Vec::<&String>::new(), "of {}", cluster.plan().name);
    }
}

/// Words that only this cluster contains: names of pods, UIDs of objects, and long words of its CA certificate and of Secrets
/// other than the sandbox's own kubeconfig. The names of gateway pods are left out, because the sandbox's Peers contain them.
async fn names_and_credentials(cluster: &Cluster<'_>) -> BTreeSet<String> {
    let kinds = "nodes,pods,services,endpointslices,configmaps,secrets,serviceaccounts";
    let objects = json(cluster, &["get", kinds, "-A"]).await;
    let mut all = BTreeSet::new();
    let words = |text: &str| {
        let long = text
            .split_whitespace()
            .filter(|word| word.len() > 24 && !word.ends_with(':'));
        long.map(str::to_owned).collect::<Vec<_>>()
    };
    for object in objects["items"].as_array().unwrap() {
        let text = |at: &str| object.pointer(at).unwrap().as_str().unwrap();
        let (kind, name) = (text("/kind"), text("/metadata/name"));
        all.insert(text("/metadata/uid").to_owned());
        let data = object["data"].as_object().into_iter().flatten();
        let data = data.map(|(_, value)| value.as_str().unwrap());
        match kind {
            "Pod" if object["metadata"]["namespace"] != GATEWAYS => all.extend([name.to_owned()]),
            "ConfigMap" if name == "kube-root-ca.crt" => all.extend(data.flat_map(words)),
            "Secret" if name != format!("{SANDBOX}-kubeconfig") => {
                for value in data {
                    all.extend(words(value));
                    all.extend(words(&String::from_utf8_lossy(&STANDARD.decode(value).unwrap())));
                }
            }
            _ => {}
        }
    }
    all
}

// threat: gateway-inbound
async fn hub_and_member_cannot_connect_to_sandbox(env: &TestEnv<'_>) {
    let wireguard = env.wireguard().await;
    let targets = [8080, 9587].map(|port| SocketAddr::new(wireguard, port));
    let node = &env.sandbox_webs[0].node;
    let probe = env.lab.probe_program().unwrap();
    let words = [&*probe, "stream-serve", ":8080"];
    let _listener = env.lab.node(node).spawn("listener", words).unwrap();
    // The sandbox's node listens on both ports.
    env.lab
        .wait_for_open_sockets(&host(node), &targets.into())
        .await
        .unwrap();
    let gateways = env.gateways().await;
    let pods = gateways.iter().map(|gateway| &gateway.pod);
    for web in pods.chain(&env.hub_webs).chain(&env.member_webs) {
        for from in [pod(web), host(&web.node)] {
            let open = env.lab.scan(&from, targets).await.unwrap();
            assert_eq!(open, BTreeSet::new(), "{from} reached the sandbox");
        }
    }
}

async fn sandbox_routes_only_gateways_into_tunnel(env: &TestEnv<'_>) {
    let gateways = env.gateways().await;
    let expected = gateways.iter().map(|gateway| gateway.address.to_string()).collect();
    let routed = env.lab.tunnel_routes(&env.sandbox_webs[0].node).await.unwrap();
    assert_eq!(routed, expected);
}

async fn hub_has_no_trace_of_sandbox(env: &TestEnv<'_>) {
    let objects = ["get", "peers,peerpolicies", "-o", "yaml"];
    let objects = env.hub.kubectl(objects).await.unwrap().stdout;
    let sandbox_address = env.wireguard().await.to_string();
    assert!(
        !objects.contains(SANDBOX) && !objects.contains(&sandbox_address),
        "{objects}"
    );
    // Positive control: the same output contains the member, which has Peers in the hub.
    assert!(objects.contains(MEMBER));
    let member_address = wireguard(&env.member, &env.member_webs[0].node).await.to_string();
    let kernel: [&[&str]; 5] = [
        &["ip", "address"],
        &["ip", "rule"],
        &["ip", "route", "show", "table", "all"],
        &["nft", "list", "ruleset"],
        &["ip", "neighbour"],
    ];
    for node in env.hub.nodes() {
        let mut text = String::new();
        for words in kernel {
            text += &node.exec(words).await.unwrap().stdout;
        }
        assert!(text.contains(&member_address), "{text}");
        for word in [SANDBOX, &sandbox_address] {
            assert!(!text.contains(word), "{word} is on {}: {text}", node.name());
        }
    }
}

// threat: gateway-ungranted
async fn scan_with_forged_allowed_ips_finds_only_granted_port<'a>(env: &'a TestEnv<'a>) -> Attacker<'a> {
    let granted = env.granted().await;
    let all = env.all_sockets().await;
    println!("{} sockets to scan", all.len());
    // With its original routes, the sandbox also reaches sockets over the underlay. Only NetworkPolicies could close these.
    for from in env.clients() {
        let open = env.lab.scan(&from, all.keys().copied()).await.unwrap();
        println!("from {from}, with its original routes: {open:?}");
        assert!(open.is_superset(&granted));
    }
    let attacker = Attacker::new(env.lab, SANDBOX, &env.sandbox_webs[0].node)
        .await
        .unwrap();
    assert_eq!(attacker.peers.len(), 2);
    let addresses = all.keys().map(SocketAddr::ip).collect();
    let mut found = BTreeSet::new();
    for chosen in &attacker.peers {
        let kept_on_underlay = attacker.route_through(chosen, &addresses).await.unwrap();
        assert_eq!(kept_on_underlay, BTreeSet::new());
        let gateway = env.gateway_of(chosen).await.address;
        let granted: BTreeSet<SocketAddr> = granted
            .iter()
            .filter(|socket| socket.ip() == gateway)
            .copied()
            .collect();
        for from in env.clients() {
            // Establish the session first: until then, WireGuard stages only some of a scan's packets and drops the
            // others.
            env.lab.wait_for_open_sockets(&from, &granted).await.unwrap();
            let open = env.lab.scan(&from, all.keys().copied()).await.unwrap();
            println!("from {from}, all addresses through {chosen}: {open:?}");
            assert_eq!(open, granted);
        }
        found.extend(granted);
    }
    assert_eq!(found, granted);
    attacker
}

/// The attacker still routes everything through one gateway, and the scans still run.
// threat: gateway-revoked-connection
async fn revoked_grant_and_deleted_mesh_close_everything(env: &TestEnv<'_>, scanned: &ScannedGateway<'_>) {
    let granted = env.granted().await;
    let assert_closed = async |how: &str, called: Instant| {
        for from in env.clients() {
            env.lab.wait_for_closed_sockets(&from, &granted).await.unwrap();
        }
        println!(
            "{how}: closed {:.2} s after kubectl was called",
            called.elapsed().as_secs_f64()
        );
        scanned.assert_nothing_answers(how).await;
        scanned.scan_once_more().await;
    };
    let mesh_with_grants = |grants: &[(&str, &str)]| env.product.mesh_with(&[SANDBOX], grants);
    let called = Instant::now();
    env.hub.apply(&mesh_with_grants(&[])).await.unwrap();
    assert_closed("grant revoked", called).await;
    env.wait_for_no_access().await;

    env.hub.apply(&mesh_with_grants(&[(SANDBOX, GRANT)])).await.unwrap();
    scanned.wait_until_settled("after the grant was added again").await;
    let delete = ["-n", NAMESPACE, "delete", "cmesh", MESH, "--wait=false"];
    let called = Instant::now();
    env.hub.kubectl(delete).await.unwrap();
    assert_closed("mesh deleted", called).await;
    env.wait_for_no_access().await;
    // Everything stays closed after every object of the mesh is deleted.
    scanned.assert_nothing_answers("no object of the mesh left").await;
    scanned.scan_once_more().await;
}
