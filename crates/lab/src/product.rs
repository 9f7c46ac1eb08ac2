//! Installs the product on a lab with the steps of README.md: builds the images with `cargo xtask images`, then applies
//! `crds/` and `deploy/`. Three things differ from a user's clusters: there is no registry, tests choose the WireGuard implementation, and
//! manifests are applied with the client of kube instead of kubectl.

mod gateways;
mod granted;
mod images;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};

pub use gateways::{GATEWAYS, gateway_cidrs};
pub use granted::{Gateway, Granted};
pub use images::ProductImages;

use crate::control_plane::api_url;
use crate::{Cluster, ClusterPlan, Error, Lab, NodeNetwork, NodePlan, Result, RunningPod, command, wait_until};

/// Namespace of the controller, its meshes and their Secrets.
pub const NAMESPACE: &str = "clustermesh";
/// Namespace of the agent.
pub const AGENT_NAMESPACE: &str = "clustermesh-agent";
/// Name of the ClusterMesh that [`Product::mesh`] returns.
pub const MESH: &str = "demo";

/// Timeout for a mesh to become ready, long enough for a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(180);

/// The WireGuard implementation of the installed agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tunnel {
    /// The agent's choice: `deploy/` is unchanged.
    Shipped,
    /// Always userspace, so that a test that inspects the device has the same result on every machine.
    Userspace,
}

/// The product, installed on clusters of one lab. The first cluster is the hub.
#[derive(Debug)]
pub struct Product<'a> {
    lab: &'a Lab,
    tunnel: Tunnel,
    clusters: Vec<String>,
    /// The clusters whose nodes run the agent.
    agents: Vec<String>,
    /// The clusters with gateways.
    gateways: BTreeSet<String>,
}

/// The root directory of the repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Reads a file of the repository.
pub(crate) fn repository_file(path: &str) -> Result<String> {
    let path = repository().join(path);
    std::fs::read_to_string(&path).map_err(Error::io(format!("read {}", path.display())))
}

impl Cluster<'_> {
    /// Installs CRDs of this repository, such as `peers`, and waits until the API server serves their resources.
    ///
    /// # Errors
    /// When the API server refuses a CRD, or does not serve its resource in time.
    pub async fn install_crds(&self, plurals: &[&str]) -> Result<()> {
        for plural in plurals {
            self.apply(&repository_file(&format!("crds/{plural}.kilo.squat.ai.yaml"))?)
                .await?;
        }
        for plural in plurals {
            self.wait_for_crd(&format!("{plural}.kilo.squat.ai")).await?;
        }
        Ok(())
    }
}

impl<'a> Product<'a> {
    /// Builds the images, installs agents in all clusters, and installs the controller in the first cluster, the hub.
    /// For each other cluster, creates a Secret with its kubeconfig in the hub. Creates no ClusterMesh.
    ///
    /// # Errors
    /// When an image cannot be built, or a cluster refuses a manifest.
    pub async fn install(lab: &'a Lab, clusters: &[&str], tunnel: Tunnel, progress: &dyn Fn(&str)) -> Result<Self> {
        Self::install_with_agents_in(lab, clusters, clusters, tunnel, progress).await
    }

    /// Does the same as [`Product::install`], but installs agents in some of the clusters only. The others have the
    /// agent's image, which gateways run, but no object of the agent and none of its CRDs.
    ///
    /// # Errors
    /// As [`Product::install`].
    pub async fn install_with_agents_in(
        lab: &'a Lab,
        clusters: &[&str],
        agents: &[&str],
        tunnel: Tunnel,
        progress: &dyn Fn(&str),
    ) -> Result<Self> {
        let (product, images) = Self::with_agents(lab, clusters, agents, tunnel, progress).await?;
        let Some((hub, members)) = product.clusters.split_first() else {
            return Ok(product);
        };
        let hub = lab.cluster(hub);
        progress(&format!("{}: clustermesh-controller", hub.plan().name));
        hub.load_image(&images.controller).await?;
        hub.install_crds(&["clustermeshes"]).await?;
        hub.apply(&repository_file("deploy/controller.yaml")?).await?;
        for name in members {
            progress(&format!(
                "{name}: the controller's ServiceAccount; its kubeconfig becomes a Secret in the hub"
            ));
            product.create_kubeconfig_secret(&hub, &lab.cluster(name)).await?;
        }
        Ok(product)
    }

    /// Installs only the agent, in all of these clusters.
    ///
    /// # Errors
    /// When an image cannot be built, or a cluster refuses a manifest.
    pub async fn install_agents(
        lab: &'a Lab,
        clusters: &[&str],
        tunnel: Tunnel,
        progress: &dyn Fn(&str),
    ) -> Result<()> {
        Self::with_agents(lab, clusters, clusters, tunnel, progress)
            .await
            .map(drop)
    }

    /// Builds the images, loads the agent's image in all clusters and installs the agent in some of them.
    async fn with_agents(
        lab: &'a Lab,
        clusters: &[&str],
        agents: &[&str],
        tunnel: Tunnel,
        progress: &dyn Fn(&str),
    ) -> Result<(Self, ProductImages)> {
        let names = |clusters: &[&str]| clusters.iter().map(|name| (*name).to_owned()).collect();
        let product = Self {
            lab,
            tunnel,
            clusters: names(clusters),
            agents: names(agents),
            gateways: BTreeSet::new(),
        };
        let images = ProductImages::ensure(progress)?;
        for name in &product.clusters {
            let cluster = lab.cluster(name);
            cluster.load_image(&images.agent).await?;
            if product.agents.contains(name) {
                progress(&format!("{name}: CRDs and wg-agent"));
                product.install_agent(&cluster).await?;
            }
        }
        Ok((product, images))
    }

    async fn install_agent(&self, cluster: &Cluster<'_>) -> Result<()> {
        cluster.install_crds(&["peers", "peerpolicies"]).await?;
        cluster.apply(&self.agent_manifest()?).await?;
        let range = format!("--from-literal=wireguard-cidr={}", cluster.plan().wireguard_cidr);
        cluster
            .kubectl(["-n", AGENT_NAMESPACE, "create", "configmap", "wg-agent", &range])
            .await
            .map(drop)
    }

    /// `deploy/agent.yaml` with the chosen WireGuard implementation.
    fn agent_manifest(&self) -> Result<String> {
        let shipped = repository_file("deploy/agent.yaml")?;
        match self.tunnel {
            Tunnel::Shipped => Ok(shipped),
            Tunnel::Userspace => {
                let first = "- --wireguard-cidr=$(WIREGUARD_CIDR)\n";
                let (before, after) = shipped
                    .split_once(first)
                    .ok_or_else(|| Error::Other(format!("deploy/agent.yaml has no {first:?}")))?;
                Ok(format!("{before}{first}        - --backend=userspace\n{after}"))
            }
        }
    }

    /// Installs wg-agent in policy mode on nodes that kg serves, with the manifests and the patch of docs/operations/kilo.md.
    ///
    /// # Errors
    /// When the page has no patch, or the cluster refuses a manifest.
    pub async fn install_policy_agent(&self, cluster: &Cluster<'_>) -> Result<()> {
        let page = repository_file("docs/operations/kilo.md")?;
        let patch = page
            .split_once("patch daemonset wg-agent --type=json -p='")
            .and_then(|(_, rest)| Some(rest.split_once('\'')?.0))
            .ok_or_else(|| Error::Other("docs/operations/kilo.md has no patch of the DaemonSet".into()))?;
        cluster.install_crds(&["peerpolicies"]).await?;
        cluster.apply(&repository_file("deploy/agent.yaml")?).await?;
        let words = [
            "-n",
            AGENT_NAMESPACE,
            "patch",
            "daemonset",
            "wg-agent",
            "--type=json",
            "-p",
            patch,
        ];
        cluster.kubectl(words).await.map(drop)
    }

    /// Creates a kubeconfig for the controller's ServiceAccount in a member with the shipped script, and stores it in a
    /// Secret in the hub.
    async fn create_kubeconfig_secret(&self, hub: &Cluster<'_>, member: &Cluster<'_>) -> Result<()> {
        member.apply(&repository_file("deploy/member-account.yaml")?).await?;
        let script = repository().join("deploy/member-kubeconfig.sh").display().to_string();
        let server = api_url(member.plan().api_address());
        let argv = [vec![script, server], member.kubectl_argv(vec![])?].concat();
        let kubeconfig = command::run(&argv, None).await?.stdout;
        let file = self
            .lab
            .directory()
            .join(format!("{}.member.kubeconfig", member.plan().name));
        std::fs::write(&file, kubeconfig).map_err(Error::io("write a kubeconfig"))?;
        let secret = format!("{}-kubeconfig", member.plan().name);
        let from = format!("--from-file=value={}", file.display());
        hub.kubectl(["-n", NAMESPACE, "create", "secret", "generic", &secret, &from])
            .await
            .map(drop)
    }

    /// The hub.
    #[must_use]
    pub fn hub(&self) -> Cluster<'a> {
        self.lab.cluster(&self.clusters[0])
    }

    /// The pod of the controller's leader.
    ///
    /// # Errors
    /// When no running pod holds the Lease.
    pub async fn controller_pod(&self) -> Result<RunningPod> {
        let holder = "jsonpath={.spec.holderIdentity}";
        let words = ["-n", NAMESPACE, "get", "lease", "clustermesh-controller", "-o", holder];
        let holder = self.hub().kubectl(words).await?.stdout;
        let label = "app.kubernetes.io/name=clustermesh-controller";
        let pods = self.hub().pods(NAMESPACE, label).await?;
        let leader = |pod: &RunningPod| holder.rsplit_once('_').is_some_and(|(name, _)| name == pod.name);
        let names: Vec<String> = pods.iter().map(|pod| pod.name.clone()).collect();
        let pod = pods.into_iter().find(leader);
        pod.ok_or_else(|| {
            Error::Other(format!(
                "the Lease has the holder {holder:?}, and these pods run: {names:?}"
            ))
        })
    }

    /// The controller's NetworkPolicy from `deploy/`, with the addresses of this lab's API servers instead of the example
    /// addresses. The ports are unchanged.
    ///
    /// # Errors
    /// When the file does not exist, or does not contain an example address.
    pub fn controller_policy(&self) -> Result<String> {
        let path = "deploy/controller-networkpolicy.yaml";
        let (hub, members) = self.clusters.split_at(1);
        [("192.0.2.1", hub), ("198.51.100.1", members)].into_iter().try_fold(
            repository_file(path)?,
            |text, (example, clusters)| {
                let line = text.lines().find(|line| line.contains(example));
                let line = line.ok_or_else(|| Error::Other(format!("{path} has no {example} to replace")))?;
                let api = |name: &String| self.lab.cluster(name).plan().api_address().to_string();
                let lines: Vec<String> = clusters.iter().map(|name| line.replace(example, &api(name))).collect();
                Ok(text.replace(line, &lines.join("\n")))
            },
        )
    }

    /// The YAML of a ClusterMesh of all clusters. If a cluster's nodes are pods, its `endpointNetworks` is the pod range
    /// of the host cluster. `egress` contains pairs of a member's name and the YAML of its `egress`.
    #[must_use]
    pub fn mesh(&self, egress: &[(&str, &str)]) -> String {
        self.mesh_with(&[], egress)
    }

    /// Does the same as [`Product::mesh`], with some members as sandboxes. A sandbox's `allowedNetworks` is only its
    /// WireGuard range.
    #[must_use]
    pub fn mesh_with(&self, sandboxes: &[&str], egress: &[(&str, &str)]) -> String {
        let mut text = format!(
            "apiVersion: kilo.squat.ai/v1alpha1\nkind: ClusterMesh\nmetadata: {{name: {MESH}, namespace: {NAMESPACE}}}\nspec:\n  clusters:\n"
        );
        for (position, name) in self.clusters.iter().enumerate() {
            let cluster = self.lab.cluster(name);
            text.push_str(&format!("  - name: {name}\n"));
            if position == 0 {
                text.push_str("    local: true\n");
            } else {
                text.push_str(&format!("    kubeconfigSecretRef: {{name: {name}-kubeconfig}}\n"));
            }
            let mut networks = if sandboxes.contains(&name.as_str()) {
                text.push_str("    isolationProfile: sandbox\n");
                vec![cluster.plan().wireguard_cidr.to_string()]
            } else {
                allowed_networks(cluster.plan(), position == 0)
            };
            if self.gateways.contains(name) {
                networks.extend(gateway_cidrs(cluster.plan()));
            }
            text.push_str(&format!("    allowedNetworks: [{}]\n", networks.join(", ")));
            if let NodeNetwork::Pods { of, .. } = &cluster.plan().node_network {
                let host_pods = self.lab.cluster(of).plan().pod_cidr;
                text.push_str(&format!("    endpointNetworks: [{host_pods}]\n"));
            }
            for (_, grants) in egress.iter().filter(|(of, _)| of == name) {
                text.push_str(&format!("    egress: {grants}\n"));
            }
        }
        text
    }

    /// Does the same as [`Product::mesh`], with some `cluster-meshed` members as masqueraded ones. The `allowedNetworks` of such a
    /// member are only its WireGuard range and, if it has gateways, their ranges.
    #[must_use]
    pub fn mesh_masqueraded(&self, masqueraded: &[&str], egress: &[(&str, &str)]) -> String {
        let sandboxed = self.mesh_with(masqueraded, egress);
        sandboxed.replace("isolationProfile: sandbox", "addressing: Masqueraded")
    }

    /// Does the same as [`Product::mesh`]. Kilo serves the clusters `kilo`: their `allowedNetworks` also contain the addresses of
    /// their nodes, because packets from a node's host network have the node's address as their source.
    #[must_use]
    pub fn mesh_with_kilo(&self, kilo: &[&str], egress: &[(&str, &str)]) -> String {
        let mut mesh = self.mesh(egress);
        for name in kilo {
            let cluster = self.lab.cluster(name);
            let services = cluster.plan().service_cidr.to_string();
            let addresses = cluster
                .nodes()
                .into_iter()
                .map(|node| format!(", {}/32", node.address()));
            mesh = mesh.replacen(&services, &format!("{services}{}", addresses.collect::<String>()), 1);
        }
        mesh
    }

    /// Applies the mesh. Waits until agents and controller are rolled out and the mesh is ready ([`Self::wait_until_ready`]).
    ///
    /// # Errors
    /// When the hub refuses the mesh, a rollout does not end in time, or as [`Self::wait_until_ready`].
    pub async fn mesh_up(&self, mesh: &str) -> Result<()> {
        let hub = self.hub();
        hub.apply(mesh).await?;
        for name in &self.agents {
            let cluster = self.lab.cluster(name);
            cluster.wait_for_rollout(AGENT_NAMESPACE, "daemonset/wg-agent").await?;
        }
        hub.wait_for_rollout(NAMESPACE, "deployment/clustermesh-controller")
            .await?;
        self.wait_until_ready().await
    }

    /// Waits until the mesh is Ready and every running node of every cluster is registered. In a cluster whose Nodes need no
    /// Peers, one gateway with a Peer suffices.
    ///
    /// # Errors
    /// After three minutes. The error quotes the mesh's conditions.
    pub async fn wait_until_ready(&self) -> Result<()> {
        let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "ClusterMesh");
        let resource = ApiResource::from_gvk_with_plural(&kind, "clustermeshes");
        let meshes: Api<DynamicObject> = Api::namespaced_with(self.hub().client().await?, NAMESPACE, &resource);
        let nodes: Vec<usize> = self
            .clusters
            .iter()
            .map(|name| {
                self.lab
                    .cluster(name)
                    .nodes()
                    .iter()
                    .filter(|node| node.is_up())
                    .count()
            })
            .collect();
        wait_until(format!("ClusterMesh {MESH} to be Ready"), TIMEOUT, async || {
            let mesh = meshes.get(MESH).await.map_err(|error| error.to_string())?;
            let status = &mesh.data["status"];
            let ready = status["conditions"]
                .as_array()
                .into_iter()
                .flatten()
                .find(|c| c["type"] == "Ready");
            let number = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap_or(0)).unwrap_or(0);
            let rows = status["clusters"].as_array().into_iter().flatten();
            let registered: Vec<usize> = rows
                .zip(&nodes)
                .map(
                    |(row, nodes)| match (number(&row["registeredPeers"]), number(&row["gateways"])) {
                        // In a hub that is connected only to sandboxes, gateways have Peers, and Nodes have none.
                        (0, 1..) => *nodes,
                        (registered, _) => registered,
                    },
                )
                .collect();
            // A status of the mesh before the last change may be Ready, too.
            let is_current =
                |ready: &serde_json::Value| ready["observedGeneration"].as_i64() == mesh.metadata.generation;
            match ready {
                Some(ready) if ready["status"] == "True" && is_current(ready) && registered == nodes => Ok(()),
                _ => Err(format!(
                    "registered {registered:?} of {nodes:?} nodes; conditions: {}",
                    status["conditions"]
                )),
            }
        })
        .await
    }

    /// The name of the agent's pod on a node.
    ///
    /// # Errors
    /// When there is no such pod.
    pub async fn agent_pod(&self, cluster: &str, node: &str) -> Result<String> {
        let pods: Api<Pod> = Api::namespaced(self.lab.cluster(cluster).client().await?, AGENT_NAMESPACE);
        let list = pods
            .list(&ListParams::default().fields(&format!("spec.nodeName={node}")))
            .await;
        let list = list.map_err(Error::kube("list the agents' pods"))?;
        let live = list
            .items
            .into_iter()
            .find(|pod| pod.metadata.deletion_timestamp.is_none());
        live.map(|pod| pod.name_any())
            .ok_or_else(|| Error::Other(format!("no agent runs on {node}")))
    }
}

/// The `allowedNetworks` of a cluster: Pod, WireGuard and Service ranges. In the hub also the addresses of its nodes, so that
/// servers in their host network are reachable. In another cluster with IPv6 also the IPv6 addresses of its nodes, if its WireGuard
/// range is IPv4.
fn allowed_networks(plan: &ClusterPlan, is_hub: bool) -> Vec<String> {
    let mut networks = plan.pod_cidrs();
    networks.push(plan.wireguard_cidr);
    networks.extend(plan.service_cidrs());
    let nodes: Vec<_> = (1..=plan.nodes).map(|n| plan.node(n)).collect();
    if is_hub {
        let v4 = nodes.iter().filter_map(NodePlan::address_v4);
        networks.extend(v4.map(|address| IpNet::from(IpAddr::from(address))));
    }
    // With an IPv4 WireGuard range, the source of IPv6 packets from a node is its underlay address.
    if is_hub || plan.wireguard_cidr.addr().is_ipv4() {
        let v6 = nodes.iter().filter_map(|node| node.address_v6);
        networks.extend(v6.map(|address| IpNet::from(IpAddr::from(address))));
    }
    networks.iter().map(ToString::to_string).collect()
}
