//! Where the times are taken: two real API servers, the real controller, real agents in namespaces of their own as nodes of the
//! cluster that grants, each with a pod, and one sandbox node that asks every pod without a pause. Nothing is measured here.

use std::{collections::BTreeMap, net::Ipv4Addr, path::PathBuf, time::Duration};

use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_api::names;
use clustermesh_lab::{Cluster, Lab, LabPlan, NAMESPACE, Node, Running, wait_until};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{Size, busy};
use crate::programs;

pub(super) const HUB: &str = "mgmt";
pub(super) const SANDBOX: &str = "notebooks";
/// The Service that stays granted.
pub(super) const STANDING: &str = "standing";
const MESH: &str = "bench";
/// The port that is granted, taken back and moved; and one that stays granted, at which nobody asks.
const PORT: u16 = 5000;
const STANDING_PORT: u16 = 6000;
const PATIENCE: Duration = Duration::from_secs(120);

/// What of it stands in the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    /// The Service whose times are taken.
    pub(super) granted: bool,
    /// Another one on the same nodes.
    pub(super) standing: bool,
    pub(super) quarantine: bool,
}

/// Which addresses of each pod are endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    First,
    Second,
    Both,
}

/// API servers alone.
pub(super) fn plan(busy: bool) -> LabPlan {
    LabPlan::control_planes(names(busy))
}

/// Its clusters.
fn names(busy: bool) -> &'static [&'static str] {
    if busy {
        &[HUB, SANDBOX, busy::CLUSTER]
    } else {
        &[HUB, SANDBOX]
    }
}

/// Both clusters and everything that runs in them.
pub(super) struct World<'a> {
    pub(super) lab: &'a Lab,
    /// By endpoint: of each pod the first address, then of each the second.
    pub(super) asked: [Vec<Asked>; 2],
    pub(super) agents: u8,
    pub(super) meshes: Api<DynamicObject>,
    slices: Api<DynamicObject>,
    pub(super) mirrored: Api<DynamicObject>,
    pub(super) policies: Api<DynamicObject>,
    _running: Vec<Running>,
    _files: tempfile::TempDir,
}

/// An endpoint that is asked every 10 ms.
pub(super) struct Asked(Running);

impl Asked {
    /// When it answered last, in milliseconds since 1970.
    pub(super) fn last(&self) -> Option<u64> {
        self.0.log().lines().rev().find_map(|line| line.parse().ok())
    }

    /// When it first answered after that time.
    pub(super) fn first_after(&self, time: u64) -> Option<u64> {
        let log = self.0.log();
        let answers = log.lines().rev().filter_map(|line| line.parse().ok());
        answers.take_while(|at| *at > time).last()
    }
}

struct Programs(PathBuf);

impl Programs {
    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl<'a> World<'a> {
    /// Starts everything and waits until every pod's first address answers.
    pub(super) async fn start(lab: &'a Lab, size: Size) -> anyhow::Result<Self> {
        let Size { agents, nodes, .. } = size;
        let busy = size.beside.is_some();
        let programs = Programs(if size.optimised {
            programs::build_optimised()?
        } else {
            programs::build()?
        });
        let files = tempfile::tempdir()?;
        for name in names(busy) {
            install(&lab.cluster(name)).await?;
        }
        let mut running = Vec::new();
        for n in agents + 1..=nodes {
            publish(&lab.cluster(HUB), n).await?;
        }
        let place = Place {
            lab,
            files: files.path().to_owned(),
            programs: &programs,
        };
        for n in 1..=agents {
            running.extend(place.pod(n, Ipv4Addr::new(172, 30, 1, 10 + n)).await?);
        }
        for n in 1..=agents {
            running.push(place.agent(HUB, n).await?);
        }
        lab.add_host(&format!("{SANDBOX}-1"), Ipv4Addr::new(172, 30, 2, 11))
            .await?;
        running.push(place.agent(SANDBOX, 1).await?);
        services(&lab.cluster(HUB)).await?;
        lab.add_host("controller", Ipv4Addr::new(172, 30, 1, 200)).await?;
        for name in &names(busy)[1..] {
            place.kubeconfig(name).await?;
        }
        running.push(place.controller().await?);

        let mesh = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "ClusterMesh"),
            "clustermeshes",
        );
        let policy = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "PeerPolicy"),
            "peerpolicies",
        );
        let slice = ApiResource::from_gvk(&GroupVersionKind::gvk("discovery.k8s.io", "v1", "EndpointSlice"));
        let hub = lab.cluster(HUB).client().await?;
        let sandbox = lab.cluster(SANDBOX).client().await?;
        let mut world = Self {
            lab,
            asked: [Vec::new(), Vec::new()],
            agents,
            meshes: Api::namespaced_with(hub.clone(), NAMESPACE, &mesh),
            policies: Api::all_with(hub.clone(), &policy),
            slices: Api::namespaced_with(hub, "default", &slice),
            mirrored: Api::namespaced_with(sandbox, "default", &slice),
            _running: running,
            _files: files,
        };
        world.moves(Which::First).await?;
        world.endpoints(STANDING, STANDING_PORT, Which::Both).await?;
        let mesh: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": MESH, "namespace": NAMESPACE},
            "spec": spec(Wanted { granted: true, standing: true, quarantine: false }),
        }))?;
        world.meshes.create(&PostParams::default(), &mesh).await?;
        // A flow that begins before there is a tunnel keeps the source it has then for as long as it does not pause.
        let host = lab.node(&format!("{SANDBOX}-1"));
        for n in 1..=agents {
            let socket = format!("{}:{PORT}", address(n, 0));
            wait_until(format!("an answer of {socket}"), PATIENCE, async || {
                let words = [&*programs.path("lab-probe"), "udp-send", &socket, "begin"];
                host.exec(words).await.map(drop).map_err(|error| error.to_string())
            })
            .await?;
        }
        for second in [0, 1] {
            for n in 1..=agents {
                world.asked[second].push(place.asks(n, second)?);
            }
        }
        Ok(world)
    }

    /// Changes the mesh.
    pub(super) async fn want(&self, wanted: Wanted) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({"spec": spec(wanted)}));
        self.meshes.patch(MESH, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Makes these of every node's pod the granted Service's endpoints, in one write.
    pub(super) async fn moves(&self, which: Which) -> anyhow::Result<()> {
        self.endpoints("granted", PORT, which).await
    }

    async fn endpoints(&self, service: &str, port: u16, which: Which) -> anyhow::Result<()> {
        let addresses: &[usize] = match which {
            Which::First => &[0],
            Which::Second => &[1],
            Which::Both => &[0, 1],
        };
        let of_node = |n: u8| {
            let endpoint = move |second: &usize| json!({"addresses": [address(n, *second)], "nodeName": name(HUB, n), "conditions": {"ready": true}});
            addresses.iter().map(endpoint)
        };
        let endpoints: Vec<Value> = (1..=self.agents).flat_map(of_node).collect();
        let patch = Patch::Apply(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": format!("{service}-1"), "labels": {names::LABEL_SERVICE_NAME: service}},
            "ports": [{"name": "main", "port": port, "protocol": "UDP"}], "endpoints": endpoints,
        }));
        let params = PatchParams::apply("bench").force();
        self.slices.patch(&format!("{service}-1"), &params, &patch).await?;
        Ok(())
    }

    /// Writes that the hub's API server has taken so far, by verb and resource.
    pub(super) async fn writes(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let text = self
            .lab
            .cluster(HUB)
            .kubectl(["get", "--raw", "/metrics"])
            .await?
            .stdout;
        let mut all = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
            let label = |name: &str| line.split(&format!("{name}=\"")).nth(1)?.split('"').next();
            let (Some(verb), Some(resource)) = (label("verb"), label("resource")) else {
                continue;
            };
            if ["POST", "PUT", "PATCH", "APPLY", "DELETE"].contains(&verb) {
                let count = line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok());
                // A counter that is whole and small.
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "see above")]
                let count = count.unwrap_or_default() as u64;
                *all.entry(format!("{verb} {resource}")).or_default() += count;
            }
        }
        Ok(all)
    }
}

/// The address of a pod, its first or its second.
pub(super) fn address(n: u8, second: usize) -> String {
    format!("10.10.{n}.{}", 5 + second)
}

fn name(cluster: &str, n: u8) -> String {
    format!("{cluster}-{n}")
}

fn spec(wanted: Wanted) -> Value {
    let Wanted {
        granted,
        standing,
        quarantine,
    } = wanted;
    let egress: Vec<Value> = [("granted", granted), (STANDING, standing)]
        .into_iter()
        .filter(|(_, wanted)| *wanted)
        .map(|(name, _)| json!({"service": {"cluster": HUB, "namespace": "default", "name": name}}))
        .collect();
    json!({"clusters": [
        {"name": HUB, "local": true, "allowedNetworks": ["10.10.0.0/16", "100.66.1.0/24"]},
        {"name": SANDBOX, "kubeconfigSecretRef": {"name": "notebooks-kubeconfig"}, "isolationProfile": "sandbox",
         "quarantine": quarantine, "allowedNetworks": ["100.66.2.0/24"], "egress": egress},
    ]})
}

async fn install(cluster: &Cluster<'_>) -> anyhow::Result<()> {
    let hub = cluster.plan().name == HUB;
    let mut kinds = vec!["peers", "peerpolicies"];
    if hub {
        kinds.push("clustermeshes");
    }
    for kind in &kinds {
        let file = programs::root().join(format!("crds/{kind}.kilo.squat.ai.yaml"));
        cluster.apply(&std::fs::read_to_string(&file)?).await?;
    }
    for kind in kinds {
        wait_until(format!("{kind} to be served"), PATIENCE, async || {
            let words = ["get", &format!("{kind}.kilo.squat.ai"), "-A"];
            let served = cluster.kubectl(words).await;
            served.map(drop).map_err(|error| error.to_string())
        })
        .await?;
    }
    if hub {
        cluster.kubectl(["create", "namespace", NAMESPACE]).await?;
    }
    Ok(())
}

async fn create(cluster: &Cluster<'_>, n: u8, annotations: &Value) -> anyhow::Result<()> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Node"));
    let nodes: Api<DynamicObject> = Api::all_with(cluster.client().await?, &resource);
    let node = name(&cluster.plan().name, n);
    let [_, second, ..] = cluster.plan().pod_cidr.network().octets();
    let pods = format!("10.{second}.{n}.0/24");
    let object = serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "annotations": annotations},
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
    }))?;
    nodes.create(&PostParams::default(), &object).await?;
    let [a, b, c, _] = cluster.plan().underlay.network().octets();
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": Ipv4Addr::new(a, b, c, 10 + n)}],
        "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}],
    }});
    nodes
        .patch_status(&node, &PatchParams::default(), &Patch::Merge(&status))
        .await?;
    Ok(())
}

/// A Node as an agent publishes it, without one.
async fn publish(cluster: &Cluster<'_>, n: u8) -> anyhow::Result<()> {
    let mut key = [7; 32];
    key[0] = n;
    let agent = json!({"version": env!("CARGO_PKG_VERSION"), "backend": "userspace", "mode": "full", "mtu": 1420});
    let annotations = json!({
        names::KILO_KEY: STANDARD.encode(key),
        names::KILO_WIREGUARD_IP: format!("100.66.1.{}/24", 100 + n),
        names::KILO_ENDPOINT: format!("172.30.1.{}:51820", 10 + n),
        names::KILO_INTERNAL_IP: format!("172.30.1.{}/32", 10 + n),
        names::KILO_GRANULARITY: "full",
        names::NODE_AGENT: agent.to_string(),
    });
    create(cluster, n, &annotations).await
}

async fn services(cluster: &Cluster<'_>) -> anyhow::Result<()> {
    for (name, port) in [("granted", PORT), (STANDING, STANDING_PORT)] {
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {"selector": {"app": name}, "ports": [{"name": "main", "port": port, "protocol": "UDP"}]},
        });
        cluster.apply(&service.to_string()).await?;
    }
    Ok(())
}

/// Where programs run.
struct Place<'a> {
    lab: &'a Lab,
    files: PathBuf,
    programs: &'a Programs,
}

impl Place<'_> {
    /// A node with a pod of two addresses that echoes at both.
    async fn pod(&self, n: u8, node: Ipv4Addr) -> anyhow::Result<Option<Running>> {
        let host = self.lab.add_host(&name(HUB, n), node).await?;
        let script = format!(
            "echo waits; until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
             ip link set lo up; ip link set eth0 up; ip addr add {first}/24 dev eth0; ip addr add {second}/24 dev eth0
             ip route add default via 10.10.{n}.1; exec '{probe}' udp-echo-at {PORT} {first},{second}",
            first = address(n, 0),
            second = address(n, 1),
            probe = self.programs.path("lab-probe"),
        );
        let mut pod = host.spawn("pod", ["unshare", "--net", "sh", "-ec", &script])?;
        pod.says("waits", PATIENCE).await?;
        let pid = pod.pid().context("a pod that has ended")?.to_string();
        let words = "ip link add pod0 type veth peer name eth0 netns";
        host.exec(words.split(' ').chain([&*pid])).await?;
        host.exec(["ip", "addr", "add", &format!("10.10.{n}.1/24"), "dev", "pod0"])
            .await?;
        host.exec(["ip", "link", "set", "pod0", "up"]).await?;
        Ok(Some(pod))
    }

    async fn agent(&self, cluster: &str, n: u8) -> anyhow::Result<Running> {
        let (name, program) = (name(cluster, n), self.programs.path("wg-agent"));
        let cluster = self.lab.cluster(cluster);
        create(&cluster, n, &json!({})).await?;
        let host = self.lab.node(&name);
        host.exec([&*program, "prepare"]).await?;
        let directory = self.files.join(&name);
        std::fs::create_dir_all(&directory)?;
        let (kubeconfig, key) = (directory.join("kubeconfig"), directory.join("state").join("key"));
        std::fs::write(&kubeconfig, cluster.inside_kubeconfig()?)?;
        let flags = [
            ("--node-name", name.clone()),
            ("--kubeconfig", kubeconfig.display().to_string()),
            // Sockets of devices lie in the file system, which all of them share.
            ("--interface", interface(&host, n)),
            ("--backend", "userspace".to_owned()),
            ("--wireguard-cidr", cluster.plan().wireguard_cidr.to_string()),
            ("--key-file", key.display().to_string()),
        ];
        let mut words = vec![program];
        words.extend(flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]));
        Ok(host.spawn("agent", words)?)
    }

    /// Gives the controller a member's kubeconfig.
    async fn kubeconfig(&self, member: &str) -> anyhow::Result<()> {
        let secret = self.files.join(format!("{member}.kubeconfig"));
        std::fs::write(&secret, self.lab.cluster(member).inside_kubeconfig()?)?;
        let from = format!("--from-file=value={}", secret.display());
        let name = format!("{member}-kubeconfig");
        let words = ["-n", NAMESPACE, "create", "secret", "generic", &name, &from];
        self.lab.cluster(HUB).kubectl(words).await?;
        Ok(())
    }

    async fn controller(&self) -> anyhow::Result<Running> {
        let hub = self.lab.cluster(HUB);
        let own = self.files.join("controller.kubeconfig");
        std::fs::write(&own, hub.inside_kubeconfig()?)?;
        let words = [
            &*self.programs.path("clustermesh-controller"),
            "--kubeconfig",
            &own.display().to_string(),
            "--hub-namespace",
            NAMESPACE,
        ]
        .map(str::to_owned);
        Ok(self.lab.node("controller").spawn("controller", words)?)
    }

    fn asks(&self, n: u8, second: usize) -> anyhow::Result<Asked> {
        let socket = format!("{}:{PORT}", address(n, second));
        let words = [self.programs.path("lab-probe"), "udp-watch".to_owned(), socket];
        let host = self.lab.node(&format!("{SANDBOX}-1"));
        Ok(Asked(host.spawn(&format!("asks-{n}-{second}"), words)?))
    }
}

fn interface(host: &Node<'_>, n: u8) -> String {
    let letter = &host.name()[..1];
    format!("b{letter}{n}p{}", std::process::id())
}
