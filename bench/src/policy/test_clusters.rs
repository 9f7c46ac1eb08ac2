//! Sets up the measured clusters: a hub with gateways and one server pod, a sandbox, and a cluster-meshed member.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use clustermesh_lab::{
    Cluster, GATEWAYS, Gateway, Lab, LabPlan, MESH, NAMESPACE, Product, Running, RunningPod, TrafficClient, Tunnel,
    WEB, wait_until,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

const HUB: &str = "mgmt";
const MEMBER: &str = "tenant-a";
pub(super) const SANDBOX: &str = "notebooks";
/// How long to wait for a state of the clusters.
pub(super) const TIMEOUT: Duration = Duration::from_secs(120);
/// The listen ports of iperf3 and the echo server in the server pod.
pub(super) const LOAD_PORT: u16 = 5201;
pub(super) const ECHO_PORT: u16 = 9000;
/// Services of the server pod.
const SERVICES: &str = "apiVersion: v1
kind: Service
metadata: {name: load, namespace: default}
spec: {selector: {app: web}, ports: [{port: 5201}]}
---
apiVersion: v1
kind: Service
metadata: {name: echo, namespace: default}
spec: {selector: {app: web}, ports: [{port: 9000, protocol: UDP}]}
";
/// The benchmark removes the last grant and adds it again.
const EGRESS: &str = "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}, \
                      {service: {cluster: mgmt, namespace: default, name: load}}, \
                      {service: {cluster: mgmt, namespace: default, name: echo}}]";
/// The number of grants in [`EGRESS`]: one for each Service, because each has one port.
pub(super) const EGRESS_GRANTS: usize = 3;

pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (SANDBOX, 1)])
}

/// The connected clusters.
pub(super) struct TestClusters<'a> {
    pub(super) lab: &'a Lab,
    product: Product<'a>,
    pub(super) hub: Cluster<'a>,
    sandbox: Cluster<'a>,
    /// The sandbox's client pod.
    pub(super) sandbox_pod: TrafficClient,
    /// The cluster-meshed member's client pod.
    pub(super) member_pod: TrafficClient,
    /// The hub's server pod.
    pub(super) server: RunningPod,
    /// `spec.clusters` of the ClusterMesh with every grant.
    pub(super) members: Vec<Value>,
    _servers: Vec<Running>,
}

/// Milliseconds since 1970, as the lab's probe prints them.
pub(super) fn now() -> u128 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_millis())
}

/// The API of one of this project's kinds.
pub(super) fn objects(client: Client, kind: &str, plural: &str, namespace: Option<&str>) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    }
}

impl<'a> TestClusters<'a> {
    /// Installs everything, and waits until the sandbox and the member get replies.
    pub(super) async fn up(lab: &'a Lab, print_progress: &dyn Fn(&str)) -> anyhow::Result<Self> {
        let [hub, member, sandbox] = [HUB, MEMBER, SANDBOX].map(|name| lab.cluster(name));
        let mut product = Product::install(lab, &[HUB, MEMBER, SANDBOX], Tunnel::Userspace, print_progress).await?;
        product.install_gateways(&["default"]).await?;
        let mut pods = Vec::new();
        for cluster in [&hub, &member, &sandbox] {
            cluster.apply(&WEB.replace("replicas: 2", "replicas: 1")).await?;
            cluster.wait_for_rollout("default", "deployment/web").await?;
            pods.push(
                cluster
                    .web_pods()
                    .await?
                    .into_iter()
                    .next()
                    .context("a pod that runs")?,
            );
        }
        let [server, member_pod, sandbox_pod] = <[RunningPod; 3]>::try_from(pods).ok().context("three pods")?;
        hub.apply(SERVICES).await?;
        let probe = lab.probe_program()?;
        let echo = format!(":{ECHO_PORT}");
        let (node, load) = (lab.node(&server.node), LOAD_PORT.to_string());
        let servers = vec![
            node.pod_spawn("echo", server.ip, [&*probe, "udp-echo", &echo])?,
            node.pod_spawn("iperf", server.ip, ["iperf3", "-s", "-p", &load])?,
        ];
        print_progress("the mesh");
        let mesh = product.mesh_with(&[SANDBOX], &[(SANDBOX, EGRESS)]);
        product.mesh_up(&mesh).await?;
        let meshes = objects(hub.client().await?, "ClusterMesh", "clustermeshes", Some(NAMESPACE));
        let mesh = meshes.get(MESH).await?;
        let members = mesh.data["spec"]["clusters"].as_array().context("spec.clusters")?;
        let clusters = Self {
            lab,
            product,
            hub,
            sandbox,
            sandbox_pod: TrafficClient::Pod(sandbox_pod),
            member_pod: TrafficClient::Pod(member_pod),
            server,
            members: members.clone(),
            _servers: servers,
        };
        clusters.wait_until_answered().await?;
        Ok(clusters)
    }

    /// Waits until the server answers the sandbox through every gateway, and answers the member directly.
    async fn wait_until_answered(&self) -> anyhow::Result<()> {
        let mut sockets = vec![(&self.member_pod, SocketAddr::new(self.server.ip, ECHO_PORT))];
        let port = self.port("echo").await?;
        let gateways = self.gateways().await?;
        sockets.extend(
            gateways
                .iter()
                .map(|g| (&self.sandbox_pod, SocketAddr::new(g.wireguard, port))),
        );
        for (from, socket) in sockets {
            self.lab.watch_udp(from, socket)?.wait_for_echo_after(now()).await?;
        }
        Ok(())
    }

    /// Waits until the sandbox has a Peer for each gateway, and returns the gateways.
    pub(super) async fn gateways(&self) -> anyhow::Result<Vec<Gateway>> {
        let granted = wait_until("a Peer of every gateway", TIMEOUT, async || {
            self.product.granted(SANDBOX).await.map_err(|error| error.to_string())
        });
        Ok(granted.await?.gateways)
    }

    /// The gateway port of a Service.
    pub(super) async fn port(&self, service: &str) -> anyhow::Result<u16> {
        let accesses = objects(self.hub.client().await?, "SandboxAccess", "sandboxaccesses", None);
        let access = accesses.get(&format!("{MESH}--{SANDBOX}")).await?;
        let mut grants = access.data["spec"]["grants"].as_array().into_iter().flatten();
        let grant = grants.find(|grant| grant["service"]["name"] == service);
        let port = grant.and_then(|grant| u16::try_from(grant["gatewayPort"].as_u64()?).ok());
        port.with_context(|| format!("{service} is not granted"))
    }

    /// The address of the mirrored web Service.
    pub(super) async fn mirrored_service(&self) -> anyhow::Result<SocketAddr> {
        Ok(SocketAddr::new(
            self.sandbox.cluster_ip("default", "hub-web").await?,
            80,
        ))
    }

    pub(super) async fn status(&self, gateway: &str) -> anyhow::Result<Value> {
        let gateways = objects(
            self.hub.client().await?,
            "SandboxGateway",
            "sandboxgateways",
            Some(GATEWAYS),
        );
        let gateway = gateways.get(gateway).await?;
        Ok(gateway.data["status"].clone())
    }

    /// The WireGuard backend that the first gateway reports.
    pub(super) async fn backend(&self) -> anyhow::Result<String> {
        let status = self.status(&format!("{GATEWAYS}-0")).await?;
        Ok(status["backend"].as_str().unwrap_or("unknown").to_owned())
    }

    /// A gateway's pod.
    pub(super) async fn gateway_pod(&self, gateway: &str) -> anyhow::Result<RunningPod> {
        let pods = self
            .hub
            .pods(GATEWAYS, &format!("app.kubernetes.io/name={GATEWAYS}"))
            .await?;
        let pod = pods.into_iter().find(|pod| pod.name == gateway);
        pod.with_context(|| format!("no pod {gateway} runs"))
    }

    /// The pid of a gateway. The node's agent and the gateway's init container run the same program, the agent without
    /// `--mode=gateway` and the init container with `prepare`.
    pub(super) fn gateway_pid(&self, pod: &RunningPod) -> anyhow::Result<i32> {
        let is_gateway = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let args: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            args.contains(&&b"--mode=gateway"[..]) && !args.contains(&&b"prepare"[..])
        };
        let pids = self.lab.node(&pod.node).pids_of("wg-agent")?;
        let mut pids = pids.into_iter().filter(is_gateway);
        pids.next().with_context(|| format!("no gateway runs on {}", pod.node))
    }

    /// The resourceVersion of every Peer in the sandbox, by name.
    pub(super) async fn peer_versions(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let peers = objects(self.sandbox.client().await?, "Peer", "peers", None);
        let list = peers.list_metadata(&ListParams::default()).await?;
        let version = |meta: kube::core::ObjectMeta| Some((meta.name?, meta.resource_version?));
        Ok(list
            .items
            .into_iter()
            .filter_map(|peer| version(peer.metadata))
            .collect())
    }

    /// `spec.clusters` with a changed entry of the sandbox.
    pub(super) fn members_with_change(&self, change: impl Fn(&mut Value)) -> Vec<Value> {
        let mut members = self.members.clone();
        members
            .iter_mut()
            .filter(|member| member["name"] == SANDBOX)
            .for_each(change);
        members
    }

    /// Writes `members` into `spec.clusters`; returns the time just before the write.
    pub(super) async fn apply(&self, members: &[Value]) -> anyhow::Result<u128> {
        let client = self.hub.client().await?;
        let meshes = objects(client, "ClusterMesh", "clustermeshes", Some(NAMESPACE));
        // Open the connection to the API server before the clock starts.
        meshes.get(MESH).await?;
        let changed_at = now();
        let patch = Patch::Merge(json!({"spec": {"clusters": members}}));
        meshes.patch(MESH, &PatchParams::default(), &patch).await?;
        Ok(changed_at)
    }
}
