//! Sets up tests of the controller binary: API servers (mostly without nodes), the ServiceAccounts in `deploy/` with exactly their
//! rights, and Node objects as agents annotate them.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_api::{mesh::ClusterMesh, names, peer::Peer};
use clustermesh_lab::{Cluster, Lab, LabPlan, NAMESPACE, Node as Machine, Running, wait_until};
use futures::{StreamExt, stream};
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{Node, ServiceAccount},
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

/// Time limit for reactions without delay; it is long because the machine may be loaded.
pub const SOON: Duration = Duration::from_secs(30);
/// Time limit for reactions after a backoff.
pub const LATER: Duration = Duration::from_secs(90);

/// The arguments of kubectl that list the Events of the hub's namespace.
pub const EVENTS: [&str; 6] = [
    "get",
    "events",
    "-n",
    NAMESPACE,
    "--no-headers",
    "-o=custom-columns=R:.reason,S:.series.count,M:.message",
];

/// The API servers of all clusters, the hub first, and a host for the controller.
pub struct TestEnv {
    pub lab: Lab,
    names: Vec<String>,
}

/// The id of a controller's process. The controller's user agent and its Leases in members contain this id.
pub fn process_id(controller: &Running) -> String {
    let log = controller.log();
    let line = log.lines().find(|line| line.contains("takes part in the election"));
    let words = line.into_iter().flat_map(|line| line.split(['"', ' ', '=']));
    let mut ids = words.filter_map(|word| word.rsplit_once('_')).map(|(_, id)| id);
    let id = ids.rfind(|id| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
    id.unwrap_or_else(|| panic!("no id of the process in {log}")).to_owned()
}

async fn until_ready(host: &Machine<'_>, port: u16, running: &Running) {
    let url = format!("http://127.0.0.1:{port}/readyz");
    wait_until("the controller to be ready", LATER, async || {
        match host.try_exec(["curl", "-s", "-m", "5", &url]).await.unwrap().stdout {
            answer if answer == "ok\n" => Ok(()),
            answer => Err(format!(
                "{answer:?}; {}",
                running.log().lines().last().unwrap_or_default()
            )),
        }
    })
    .await
    .unwrap();
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

impl TestEnv {
    /// Starts API servers with CRDs and ServiceAccounts. The hub has a kubeconfig Secret for each other cluster.
    pub async fn start(names: &[&str]) -> Self {
        Self::start_plan(LabPlan::control_planes(names)).await
    }

    /// Like [`Self::start`], for clusters that may have nodes.
    pub async fn start_plan(plan: LabPlan) -> Self {
        let names: Vec<String> = plan.clusters.iter().map(|cluster| cluster.name.clone()).collect();
        let lab = Lab::start(plan).await.unwrap();
        lab.add_host("controller", "172.30.1.200".parse().unwrap())
            .await
            .unwrap();
        let env = Self {
            lab,
            names: names.clone(),
        };
        let installs = names.iter().enumerate().map(async |(index, name)| {
            env.install_peer_crds(name).await;
            env.create_account(name, index == 0).await;
        });
        stream::iter(installs).buffer_unordered(4).collect::<()>().await;
        env.install_crds(env.hub_name(), &["clustermeshes"]).await;
        for name in &names[1..] {
            env.write_secret(name, &env.kubeconfig(name).await).await;
        }
        env
    }

    /// Like [`Self::start`], with one Node object in each cluster, a running controller, and a mesh of all clusters that is
    /// Ready.
    pub async fn start_meshed(names: &[&str]) -> (Self, Running) {
        let env = Self::start(names).await;
        for (m, name) in (1..).zip(names) {
            env.create_node(name, m, 1).await;
        }
        let controller = env.start_controller().await;
        env.apply_mesh(&env.mesh()).await;
        env.until_condition("Ready", "True/Meshed", SOON).await;
        (env, controller)
    }

    /// Waits until a newly started controller has read this number of members.
    pub async fn until_read(&self, members: usize) {
        wait_until("the members to be read", LATER, async || {
            let state = self.page("/debug/state").await;
            let fresh = state.matches("\"observation\": \"Fresh\"").count();
            if fresh == members { Ok(()) } else { Err(state) }
        })
        .await
        .unwrap();
    }

    pub fn hub_name(&self) -> &str {
        &self.names[0]
    }

    pub fn hub(&self) -> Cluster<'_> {
        self.lab.cluster(self.hub_name())
    }

    pub async fn install_peer_crds(&self, name: &str) {
        self.install_crds(name, &["peers", "peerpolicies"]).await;
    }

    /// Installs CRDs, and waits until their resources are served.
    pub async fn install_crds(&self, name: &str, plurals: &[&str]) {
        self.lab.cluster(name).install_crds(plurals).await.unwrap();
    }

    /// Applies the manifest in `deploy/` that contains the controller's ServiceAccount and its rights.
    async fn create_account(&self, name: &str, is_hub: bool) {
        let manifest = if is_hub {
            "deploy/controller.yaml"
        } else {
            "deploy/member-account.yaml"
        };
        self.lab
            .cluster(name)
            .apply(&std::fs::read_to_string(repository().join(manifest)).unwrap())
            .await
            .unwrap();
    }

    /// A new token of the controller's ServiceAccount.
    pub async fn token(&self, name: &str) -> String {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(name).await, NAMESPACE);
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                expiration_seconds: Some(24 * 60 * 60),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let created = accounts
            .create_token_request("clustermesh-controller", &PostParams::default(), &request)
            .await;
        created.unwrap().status.unwrap().token.unwrap()
    }

    /// A kubeconfig for the controller's ServiceAccount with a new token, for use on the underlay.
    pub async fn kubeconfig(&self, name: &str) -> String {
        let (cluster, token) = (self.lab.cluster(name), self.token(name).await);
        let inside = cluster.inside_kubeconfig().unwrap();
        let ca = inside
            .lines()
            .find(|line| line.contains("certificate-authority-data"))
            .unwrap()
            .trim();
        let server = cluster.plan().api_address();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {{cluster: k, user: u}}\n\
             clusters:\n- name: k\n  cluster:\n    server: https://{server}:6443\n    {}\nusers:\n- name: u\n  user:\n    \
             token: {token}\n",
            ca.trim_start_matches("- ").trim_start_matches("cluster: ")
        )
    }

    /// Creates or replaces the kubeconfig Secret of a member.
    pub async fn write_secret(&self, name: &str, kubeconfig: &str) {
        self.write_secret_as(&format!("{name}-kubeconfig"), kubeconfig).await;
    }

    /// Creates or replaces the kubeconfig Secret with this name.
    pub async fn write_secret_as(&self, secret: &str, kubeconfig: &str) {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": secret, "namespace": NAMESPACE},
            "data": {"value": STANDARD.encode(kubeconfig)},
        });
        self.hub().apply(&secret.to_string()).await.unwrap();
    }

    pub fn controller_host(&self) -> Machine<'_> {
        self.lab.node("controller")
    }

    /// Starts the controller with its ServiceAccount in the hub, and waits until it is ready.
    pub async fn start_controller(&self) -> Running {
        self.start_controller_for(NAMESPACE, &[]).await
    }

    /// Like [`Self::start_controller`], with this value of `--hub-namespace` and further flags.
    pub async fn start_controller_for(&self, hub_namespace: &str, more: &[&str]) -> Running {
        self.spawn_controller(&[], hub_namespace, more).await
    }

    /// Like [`Self::start_controller`], with `prefix` before its command line: a program, such as `sh`, that executes its
    /// arguments.
    pub async fn start_controller_with_prefix(&self, prefix: &[&str]) -> Running {
        self.spawn_controller(prefix, NAMESPACE, &[]).await
    }

    async fn spawn_controller(&self, prefix: &[&str], hub_namespace: &str, more: &[&str]) -> Running {
        let words = self
            .controller_command(self.hub_name(), "controller", 8081, hub_namespace)
            .await;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let host = self.controller_host();
        let running = host.spawn("controller", [prefix, &words[..], more].concat()).unwrap();
        until_ready(&host, 8081, &running).await;
        running
    }

    /// Starts a replica of the controller on `host`, and waits until it is ready. `replica` is the name of its pod, and of its log.
    pub async fn start_replica(&self, host: &Machine<'_>, replica: &str, port: u16) -> Running {
        let words = self.controller_command(self.hub_name(), replica, port, NAMESPACE).await;
        let running = host.spawn(replica, words).unwrap();
        until_ready(host, port, &running).await;
        running
    }

    /// Makes another cluster a hub, and starts a controller for it on port 8082 of the controller's host.
    pub async fn start_other_hub(&self, name: &str) -> Running {
        self.install_crds(name, &["clustermeshes"]).await;
        self.create_account(name, true).await;
        let words = self.controller_command(name, name, 8082, NAMESPACE).await;
        let host = self.controller_host();
        let running = host.spawn(name, words).unwrap();
        until_ready(&host, 8082, &running).await;
        running
    }

    /// Starts the controller with this kubeconfig of the hub, without waiting for it.
    pub fn spawn_controller_with_kubeconfig(&self, kubeconfig: &str) -> Running {
        let words = self.command_with_kubeconfig(kubeconfig, "controller", 8081, NAMESPACE);
        self.controller_host().spawn("controller", words).unwrap()
    }

    /// The command line of a controller for this hub.
    pub async fn controller_command(&self, hub: &str, replica: &str, port: u16, hub_namespace: &str) -> Vec<String> {
        self.command_with_kubeconfig(&self.kubeconfig(hub).await, replica, port, hub_namespace)
    }

    fn command_with_kubeconfig(&self, kubeconfig: &str, replica: &str, port: u16, hub_namespace: &str) -> Vec<String> {
        let file = self.lab.directory().join(format!("{replica}.kubeconfig"));
        std::fs::write(&file, kubeconfig).unwrap();
        let words = [
            "env",
            "RUST_LOG=info,clustermesh_controller=debug",
            &format!("POD_NAME={replica}"),
            &format!("POD_NAMESPACE={NAMESPACE}"),
            &crate::program("clustermesh-controller"),
            "--kubeconfig",
            &file.display().to_string(),
            "--hub-namespace",
            hub_namespace,
            "--listen",
            &format!("0.0.0.0:{port}"),
        ];
        words.map(str::to_owned).to_vec()
    }

    /// A page of the controller's admin port; empty if there is no response. The request comes from the controller's
    /// host, because `/debug/state` is only for loopback clients.
    pub async fn page(&self, path: &str) -> String {
        let url = format!("http://127.0.0.1:8081{path}");
        self.controller_host()
            .try_exec(["curl", "-s", "-m", "5", &url])
            .await
            .unwrap()
            .stdout
    }

    /// The value of a counter without labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let metrics = self.page("/metrics").await;
        let line = metrics.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("no {name} in {metrics}"))
    }

    /// The default value of `--hub-id`.
    pub async fn hub_id(&self) -> String {
        let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(self.client(self.hub_name()).await);
        namespaces.get("kube-system").await.unwrap().uid().unwrap()
    }

    pub async fn client(&self, name: &str) -> Client {
        self.lab.cluster(name).client().await.unwrap()
    }

    /// Creates a Ready Node with the annotations of wg-agent. Node `n` of member `m` has the pod CIDR 10.M.N.0/24 and the
    /// WireGuard address 100.64.M.N.
    pub async fn create_node(&self, cluster: &str, m: u8, n: u8) -> Node {
        self.create_changed_node(cluster, (m, n), |_| {}).await
    }

    /// Like [`Self::create_node`], after `change` has changed the object.
    pub async fn create_changed_node(&self, cluster: &str, (m, n): (u8, u8), change: impl FnOnce(&mut Value)) -> Node {
        let nodes: Api<Node> = Api::all(self.client(cluster).await);
        let mut node = node(cluster, m, n);
        change(&mut node);
        // The API server ignores the status of a new Node.
        let status = json!({"status": node["status"]});
        let node: Node = serde_json::from_value(node).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
        nodes
            .patch_status(&node.name_any(), &PatchParams::default(), &Patch::Merge(&status))
            .await
            .unwrap()
    }

    pub async fn annotate(&self, cluster: &str, node: &str, annotation: &str, value: Option<&str>) {
        let nodes: Api<Node> = Api::all(self.client(cluster).await);
        let patch = json!({"metadata": {"annotations": {annotation: value}}});
        nodes
            .patch(node, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .unwrap();
    }

    pub async fn remove_node(&self, cluster: &str, node: &str) {
        let nodes: Api<Node> = Api::all(self.client(cluster).await);
        nodes.delete(node, &DeleteParams::default()).await.unwrap();
    }

    /// A mesh `prod` of all clusters. Member `m` (from 1) has the networks 10.M.0.0/16, 100.64.M.0/24 and 198.51.M.0/24.
    pub fn mesh(&self) -> Value {
        let entries: Vec<Value> = self
            .names
            .iter()
            .enumerate()
            .map(|(index, name)| self.entry(name, index + 1))
            .collect();
        json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": "prod", "namespace": NAMESPACE}, "spec": {"clusters": entries},
        })
    }

    fn entry(&self, name: &str, m: usize) -> Value {
        let networks = [
            format!("10.{m}.0.0/16"),
            format!("100.64.{m}.0/24"),
            format!("198.51.{m}.0/24"),
        ];
        if name == self.hub_name() {
            json!({"name": name, "local": true, "allowedNetworks": networks})
        } else {
            let secret = format!("{name}-kubeconfig");
            json!({"name": name, "kubeconfigSecretRef": {"name": secret}, "allowedNetworks": networks})
        }
    }

    pub async fn apply_mesh(&self, mesh: &Value) {
        self.hub().apply(&mesh.to_string()).await.unwrap();
    }

    pub async fn get_mesh(&self) -> Option<ClusterMesh> {
        Api::<ClusterMesh>::namespaced(self.client(self.hub_name()).await, NAMESPACE)
            .get_opt("prod")
            .await
            .unwrap()
    }

    /// A condition of the mesh: `status/reason`, and its message.
    pub async fn condition(&self, kind: &str) -> Option<(String, String)> {
        let mesh = self.get_mesh().await?;
        let condition = mesh
            .status?
            .conditions
            .into_iter()
            .find(|condition| condition.type_ == kind)?;
        Some((format!("{}/{}", condition.status, condition.reason), condition.message))
    }

    /// Waits until the condition has this `status/reason`. Returns its message.
    pub async fn until_condition(&self, kind: &str, want: &str, at_most: Duration) -> String {
        let what = format!("condition {kind} to be {want}");
        wait_until(what, at_most, async || match self.condition(kind).await {
            Some((state, message)) if state == want => Ok(message),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap()
    }

    /// The Peers of a cluster by name.
    pub async fn peers(&self, cluster: &str) -> BTreeMap<String, Peer> {
        let peers: Api<Peer> = Api::all(self.client(cluster).await);
        let peers = peers.list(&ListParams::default()).await.unwrap();
        peers.items.into_iter().map(|peer| (peer.name_any(), peer)).collect()
    }

    /// Waits until a cluster has the Peers with exactly these names.
    pub async fn until_peers(&self, cluster: &str, want: &[&str], at_most: Duration) -> BTreeMap<String, Peer> {
        let what = format!("the Peers of {cluster} to be {want:?}");
        wait_until(what, at_most, async || {
            let peers = self.peers(cluster).await;
            let names: Vec<&String> = peers.keys().collect();
            if names == want {
                Ok(peers)
            } else {
                Err(format!("{names:?}"))
            }
        })
        .await
        .unwrap()
    }

    /// The resourceVersions of the ClusterMesh, and of all objects of the kinds that the controller writes, in all clusters.
    pub async fn versions(&self) -> BTreeMap<String, String> {
        let mut versions = BTreeMap::new();
        for name in &self.names {
            let client = self.client(name).await;
            for (group, version, kind, plural) in [
                ("kilo.squat.ai", "v1alpha1", "Peer", "peers"),
                ("kilo.squat.ai", "v1alpha1", "PeerPolicy", "peerpolicies"),
                ("kilo.squat.ai", "v1alpha1", "SandboxAccess", "sandboxaccesses"),
                ("", "v1", "Service", "services"),
                ("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"),
            ] {
                let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
                let objects: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
                let listed = match objects.list_metadata(&ListParams::default()).await {
                    // The CRD SandboxAccess exists only where gateways are installed.
                    Err(kube::Error::Api(status)) if status.code == 404 && plural == "sandboxaccesses" => continue,
                    listed => listed.unwrap(),
                };
                for object in listed {
                    let key = format!("{name} {}/{}", kind.kind, object.name_any());
                    versions.insert(key, object.resource_version().unwrap());
                }
            }
        }
        if let Some(mesh) = self.get_mesh().await {
            versions.insert("mesh".to_owned(), mesh.metadata.resource_version.unwrap());
        }
        versions
    }
}

/// A Ready Node with the annotations of wg-agent, as [`TestEnv::create_node`] creates it.
pub fn node(cluster: &str, m: u8, n: u8) -> Value {
    json!({
        "metadata": {"name": format!("{cluster}-{n}"), "annotations": {
            names::KILO_KEY: key(m, n),
            names::KILO_WIREGUARD_IP: format!("100.64.{m}.{n}/24"),
            names::KILO_ENDPOINT: format!("198.51.{m}.{n}:51820"),
            names::KILO_INTERNAL_IP: format!("198.51.{m}.{n}/32"),
            names::KILO_GRANULARITY: "full",
            names::NODE_AGENT: json!({
                "version": env!("CARGO_PKG_VERSION"), "backend": "userspace", "mode": "full", "mtu": 1420,
            }).to_string(),
        }},
        "spec": {"podCIDR": format!("10.{m}.{n}.0/24"), "podCIDRs": [format!("10.{m}.{n}.0/24")]},
        "status": {
            "addresses": [{"type": "InternalIP", "address": format!("198.51.{m}.{n}")}],
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}],
        },
    })
}

/// The public key of node `n` of member `m`.
pub fn key(m: u8, n: u8) -> String {
    let mut bytes = [7; 32];
    (bytes[0], bytes[1]) = (m, n);
    STANDARD.encode(bytes)
}
