//! Measures the planner, for `cargo xtask bench plan`: conversion, snapshot, plan and diff of meshed clusters, for a first plan, for a
//! member that becomes stale and fresh, and for one changed Node. Arguments: clusters, Nodes of each cluster, rounds.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};

use clustermesh_api::{convert, names::Names};
use clustermesh_core::{
    diff::Item,
    mesh::{Addressing, Cluster, ClusterIdentity, Locations, Mesh, MeshId, PodNetwork, Profile},
    observe::{Member, Observation, Observations, ObservedPeer, ObservedPolicy, Rows},
    plan::{NotFollowed, Plan, Settings},
    planner::{Planner, Steps},
};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

/// The times of one pass.
#[derive(Default, Clone, Copy)]
struct Times {
    snapshot: Duration,
    plan: Duration,
    steps: usize,
    not_followed: Option<NotFollowed>,
}

struct World {
    mesh: Mesh,
    seen: Observations,
    names: Names,
    settings: Settings,
    planner: Planner,
}

fn identity(cluster: usize) -> ClusterIdentity {
    if cluster == 0 {
        return ClusterIdentity::Local;
    }
    ClusterIdentity::Secret {
        namespace: "meshes".into(),
        name: format!("tenant-{cluster:02}-kubeconfig"),
        key: "value".into(),
        context: None,
    }
}

fn entry(cluster: usize) -> Cluster {
    let allowed = [
        format!("10.{}.0.0/14", cluster * 4),
        format!("100.{}.0.0/16", 64 + cluster),
        // A Service network. The planner anchors it, because no Node has an address in it.
        format!("10.{}.0.0/16", 128 + cluster),
    ];
    Cluster {
        name: if cluster == 0 {
            "mgmt".into()
        } else {
            format!("tenant-{cluster:02}")
        },
        identity: identity(cluster),
        profile: Profile::ClusterMeshed,
        addressing: Addressing::Routed,
        allowed: allowed.iter().map(|net| net.parse().unwrap()).collect(),
        anchored: None,
        previous_anchors: BTreeMap::new(),
        anchors: 1,
        pod_network: PodNetwork::PerNode,
        exports: vec![],
        wireguard_port: 51820,
        persistent_keepalive: 0,
        locations: Locations::Ignored,
        endpoint_networks: vec![],
        egress: vec![],
        quarantine: false,
        confined_to: None,
        max_nodes: 5000,
    }
}

/// A Node of a cloud, as its agent annotates it.
fn node(cluster: usize, number: usize, port: u16) -> Node {
    let mut key = [0x5a; 32];
    key[..4].copy_from_slice(&u32::try_from(cluster * 100_000 + number).unwrap().to_be_bytes());
    let pods = Ipv4Addr::from(0x0a00_0000 + u32::try_from((cluster << 18) + (number << 8)).unwrap());
    let (high, low) = (number >> 8, number & 255);
    serde_json::from_value(json!({
        "metadata": {
            "name": format!("worker-{number:04}.tenant-{cluster:02}.example.net"),
            "creationTimestamp": k8s_openapi::jiff::Timestamp::from_second(1_790_000_000 + i64::try_from(number % 7).unwrap()).unwrap().to_string(),
            "labels": { "kubernetes.io/os": "linux", "topology.kubernetes.io/region": "eu-1" },
            "annotations": {
                "kilo.squat.ai/key": clustermesh_core::key::PublicKey::new(key).to_string(),
                "kilo.squat.ai/wireguard-ip": format!("100.{}.{high}.{low}/16", 64 + cluster),
                "kilo.squat.ai/endpoint": format!("20.{cluster}.{high}.{low}:{port}"),
                "kilo-clustermesh.io/agent": r#"{"version":"0.1.0","mode":"full"}"#,
            },
        },
        "spec": { "podCIDRs": [format!("{pods}/24")] },
        "status": {
            "addresses": [
                { "type": "InternalIP", "address": format!("172.{}.{high}.{low}", 16 + cluster) },
                { "type": "ExternalIP", "address": format!("20.{cluster}.{high}.{low}") },
                { "type": "Hostname", "address": format!("worker-{number:04}") },
            ],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    }))
    .unwrap()
}

impl World {
    fn new(clusters: usize, nodes: usize) -> (Self, Duration) {
        let mut converting = Duration::ZERO;
        let mut members = BTreeMap::new();
        for cluster in 0..clusters {
            let objects: Vec<Node> = (0..nodes).map(|number| node(cluster, number, 51820)).collect();
            let began = Instant::now();
            let nodes = objects
                .iter()
                .map(|node| (node.metadata.name.clone().unwrap(), convert::node::to_core(node)))
                .collect();
            converting += began.elapsed();
            let member = Member {
                uid: Some(format!("uid-{cluster}")),
                nodes,
                peers: Some(Rows::default()),
                policies: Some(BTreeMap::new()),
                accesses: Some(BTreeMap::new()),
                api_endpoints: [format!("172.{}.255.1:6443", 16 + cluster).parse().unwrap()].into(),
                ..Member::default()
            };
            members.insert(identity(cluster), Observation::Fresh(member));
        }
        let mesh = Mesh {
            id: MeshId {
                namespace: "meshes".into(),
                name: "prod".into(),
            },
            clusters: (0..clusters).map(entry).collect(),
            created: 1,
            paused: false,
            deleting: false,
            adopt_hub: None,
            accepted: BTreeMap::new(),
        };
        let seen = Observations {
            members,
            hub: "5f0e6c1a-hub".into(),
            resolved: BTreeMap::new(),
        };
        let names = Names { hub: seen.hub.clone() };
        (
            Self {
                mesh,
                seen,
                names,
                settings: Settings::default(),
                planner: Planner::default(),
            },
            converting,
        )
    }

    /// Makes a fresh member stale, and a stale one fresh.
    fn toggle_freshness(&mut self, cluster: usize) {
        let observation = self.seen.members.get_mut(&identity(cluster)).expect("a member");
        *observation = match observation.clone() {
            Observation::Fresh(member) => Observation::Stale(member, "its API server does not answer".into()),
            Observation::Stale(member, _) => Observation::Fresh(member),
            _ => unreachable!("every member was observed"),
        };
    }

    fn member(&mut self, cluster: usize) -> &mut Member {
        match self.seen.members.get_mut(&identity(cluster)) {
            Some(Observation::Fresh(member)) => member,
            _ => unreachable!("every member is fresh"),
        }
    }

    /// Runs one pass, as the controller does.
    fn pass(&mut self) -> (Times, Arc<Plan>, Steps) {
        let began = Instant::now();
        let seen = Arc::new(self.seen.clone());
        let snapshot = began.elapsed();
        let began = Instant::now();
        let meshes = std::slice::from_ref(&self.mesh);
        let planned = self.planner.plan(meshes, &seen, &self.settings, &self.names);
        let times = Times {
            snapshot,
            plan: began.elapsed(),
            steps: planned.steps.values().map(Vec::len).sum(),
            not_followed: planned.not_followed,
        };
        let (plan, steps) = (planned.plan, planned.steps.clone());
        (times, plan, steps)
    }

    /// Runs one pass that plans all meshes anew.
    fn full_pass(&mut self) -> (Times, Arc<Plan>, Steps) {
        self.planner.forget();
        self.pass()
    }

    /// Changes the observed state as the API servers do after the writes.
    fn write(&mut self, plan: &Plan, steps: Steps) {
        for (identity, steps) in steps {
            let Some(Observation::Fresh(member)) = self.seen.members.get_mut(&identity) else {
                continue;
            };
            for step in steps.into_iter().map(Arc::unwrap_or_clone) {
                match step.item {
                    Item::Peer(name, None) => drop(member.peers.as_mut().unwrap().remove(&name)),
                    Item::Peer(name, Some(spec)) => {
                        let peer = ObservedPeer {
                            owner: Arc::unwrap_or_clone(step.owner),
                            spec: Ok(Arc::unwrap_or_clone(spec)),
                        };
                        member.peers.as_mut().unwrap().insert(name, peer);
                    }
                    Item::Policy(name, Some(spec)) => {
                        let policy = ObservedPolicy {
                            owner: Arc::unwrap_or_clone(step.owner),
                            spec: Ok(*spec),
                        };
                        member.policies.as_mut().unwrap().insert(name, policy);
                    }
                    other => unreachable!("no such step in this mesh: {other:?}"),
                }
            }
        }
        // The controller stores the anchors and the accepted networks in the status, and the next plan starts from them.
        let planned = &plan.meshes[&self.mesh.id];
        for cluster in &mut self.mesh.clusters {
            cluster.previous_anchors = planned.clusters[&cluster.name].anchored.clone();
            self.mesh
                .accepted
                .insert(cluster.name.clone(), planned.clusters[&cluster.name].accepted.clone());
        }
    }
}

/// Prints the least time of each part: other load of the machine only adds time.
fn print(what: &str, times: &[Times]) {
    let least = |of: fn(&Times) -> Duration| times.iter().map(of).min().unwrap_or_default().as_secs_f64() * 1e3;
    let total = least(|t| t.snapshot + t.plan);
    let (snapshot, plan) = (least(|t| t.snapshot), least(|t| t.plan));
    let outcome = times.iter().find_map(|times| times.not_followed).unwrap_or("followed");
    println!(
        "{what:44} {snapshot:9.2} {plan:9.2} {total:9.2} {:7}  {outcome}",
        times[0].steps
    );
}

/// Makes the changed Node from the round and the number of Nodes; `None` = a Node is removed.
type Change = fn(usize, usize) -> Option<Node>;

fn main() {
    let arguments: Vec<usize> = std::env::args()
        .skip(1)
        .map(|text| text.parse().expect("a number"))
        .collect();
    let &[clusters, nodes, rounds] = &arguments[..] else {
        panic!("arguments: clusters, nodes, rounds")
    };
    let (mut world, converting) = World::new(clusters, nodes);
    println!("{clusters} clusters x {nodes} Nodes; least time of {rounds} rounds, ms");
    println!("conversion of all Node objects: {:.1}", converting.as_secs_f64() * 1e3);
    println!(
        "{:44} {:>9} {:>9} {:>9} {:>7}",
        "", "snapshot", "plan+diff", "total", "writes"
    );
    let (_, plan, steps) = world.pass();
    let first: Vec<Times> = (0..rounds).map(|_| world.full_pass().0).collect();
    print("first pass", &first);
    world.write(&plan, steps);
    let (_, plan, steps) = world.pass();
    world.write(&plan, steps);
    let quiet: Vec<Times> = (0..rounds).map(|_| world.full_pass().0).collect();
    print("nothing changed, planned anew", &quiet);
    let quiet: Vec<Times> = (0..rounds).map(|_| world.pass().0).collect();
    print("nothing changed", &quiet);
    // An even number of changes, so that the member is fresh at the end.
    let toggled = (0..2 * rounds).map(|_| {
        world.toggle_freshness(1);
        world.pass().0
    });
    print("one member stale, or fresh again", &toggled.collect::<Vec<_>>());
    let changes: [(&str, Change); 5] = [
        ("endpoint of one Node changed", |round, _| {
            Some(node(1, 7, 20_000 + u16::try_from(round).unwrap()))
        }),
        ("key of one Node changed", |round, nodes| {
            let mut changed = node(1, 8, 51820);
            let other = node(1, 2 * nodes + round, 51820);
            let key = "kilo.squat.ai/key";
            let annotations = changed.metadata.annotations.as_mut().unwrap();
            annotations.insert(key.into(), other.metadata.annotations.unwrap()[key].clone());
            Some(changed)
        }),
        ("one Node not Ready, or Ready again", |round, _| {
            let mut changed = node(1, 9, 51820);
            let status = if round % 2 == 0 { "False" } else { "True" };
            changed.status.as_mut().unwrap().conditions.as_mut().unwrap()[0].status = status.into();
            Some(changed)
        }),
        ("one Node added", |round, nodes| Some(node(1, nodes + 1 + round, 51820))),
        ("one Node gone", |_, _| None),
    ];
    for (what, change) in changes {
        let (mut changed, mut written) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let member = world.member(1);
            match change(round, nodes) {
                Some(node) => {
                    let name = node.metadata.name.clone().unwrap();
                    member.nodes.insert(name, convert::node::to_core(&node));
                }
                None => {
                    let last = member.nodes.keys().last().map(str::to_owned);
                    member.nodes.remove(&last.unwrap());
                }
            }
            let (times, plan, steps) = world.pass();
            world.write(&plan, steps);
            // The next pass would copy the plan if this reference to it still existed.
            drop(plan);
            changed.push(times);
            written.push(world.pass().0);
        }
        print(what, &changed);
        print("  after its writes", &written);
    }
}
