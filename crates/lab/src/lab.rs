//! Starts a lab, attaches to a running one, and returns handles for its clusters and nodes.

mod apply;
mod base;
mod cluster;
mod nat;
mod node;
mod pods;
mod underlay;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::control_plane::{self, Commands};
use crate::run::{self, Run};
use crate::supervisor::{Request, Response};
use crate::{ArtefactSet, ClusterPlan, Error, LabPlan, NodeNetwork, NodePlan, PodNetwork, Result, Tools};

pub use cluster::{AuditedWrite, Cluster};
pub use node::Node;
pub(crate) use pods::worker_namespace;

/// Timeout for an API server or a node to become ready, long enough for a loaded machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);
/// Name of the network namespace with the bridge, the API servers and etcd.
const UNDERLAY: &str = "underlay";

/// The environment of etcd, Kubernetes' programs and the nodes. Less frequent garbage collection saves a sixth of the CPU time of an API
/// server's start, and costs 50 % more memory. One processor for each program saves another tenth, and a quarter of etcd's: the lab runs
/// many of them on few processors, where a second thread of one mostly waits for work.
fn go_environment() -> BTreeMap<String, String> {
    [("GOGC", "400"), ("GOMAXPROCS", "1")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

/// A running lab. Dropping it takes everything down, unless [`Lab::keep`] was called or the value came from [`Lab::attach`].
///
/// A drop during a panic first prints commands to inspect the lab. If `CLUSTERMESH_LAB_KEEP` is set, it then calls [`Lab::keep`].
/// Otherwise it copies the logs into the lab's cache directory.
#[derive(Debug)]
pub struct Lab {
    /// Its drop takes the lab down, unless the lab is kept or was attached to.
    run: Run,
    tools: Tools,
    state: Mutex<LabState>,
}

/// The data that another process needs to attach, stored as `lab.json` in the run directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct LabState {
    plan: LabPlan,
    tools: Tools,
    /// Nodes and bare hosts in the order in which they joined, including nodes that are powered off.
    nodes: Vec<NodePlan>,
}

/// Linux allows a user 128 inotify instances by default. The programs of each node need about ten, and without them kube-proxy does not
/// start ("too many open files"): the nodes of three labs need more than 128.
fn raise_inotify_limit(progress: &dyn Fn(&str)) {
    const FILE: &str = "/proc/sys/fs/inotify/max_user_instances";
    const WANTED: u32 = 1024;
    let current = std::fs::read_to_string(FILE)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    if current.is_some_and(|current: u32| current < WANTED)
        && let Err(error) = std::fs::write(FILE, WANTED.to_string())
    {
        progress(&format!(
            "cannot set {FILE} to {WANTED} ({error}): several labs at once may fail"
        ));
    }
}

/// Checks for the kernel module br_netfilter, without which flanneld exits, and tries to load it.
fn require_bridge_filter() -> Result<()> {
    let is_loaded = || Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists();
    if !is_loaded() {
        let _ = std::process::Command::new("modprobe").arg("br_netfilter").output();
    }
    if is_loaded() {
        return Ok(());
    }
    Err(Error::Missing {
        what: "the kernel module br_netfilter, which flanneld needs".into(),
        remedy: "run `modprobe br_netfilter`".into(),
    })
}

impl Lab {
    /// Builds missing programs into the cache (with progress on standard error), starts the lab and waits until all API
    /// servers answer. In a cluster with [`ClusterPlan::controllers`] it also waits until every node is Ready and has pod
    /// routes, and, if the cluster has nodes, until DNS answers.
    ///
    /// # Errors
    /// When a program or permission is missing, or a component does not start or is not ready within three minutes.
    pub async fn start(plan: LabPlan) -> Result<Self> {
        Self::start_with(plan, &|line| eprintln!("lab: {line}")).await
    }

    /// As [`Lab::start`]; `progress` gets one line for each step of building and starting.
    ///
    /// # Errors
    /// As [`Lab::start`].
    pub async fn start_with(plan: LabPlan, progress: &dyn Fn(&str)) -> Result<Self> {
        plan.validate()?;
        let mut sets = vec![];
        if !plan.clusters.is_empty() {
            sets.push(ArtefactSet::ControlPlane);
        }
        if plan.clusters.iter().any(|cluster| cluster.controllers) {
            sets.extend([ArtefactSet::Nodes, ArtefactSet::Runtime, ArtefactSet::Dns]);
        }
        if plan
            .clusters
            .iter()
            .any(|cluster| cluster.pod_network == PodNetwork::Flannel)
        {
            require_bridge_filter()?;
            sets.extend([ArtefactSet::Flannel, ArtefactSet::FlannelPlugin]);
        }
        let tools = Tools::ensure(&sets, progress)?;
        raise_inotify_limit(progress);
        let run = Run::start()?;
        let state = LabState {
            plan,
            tools: tools.clone(),
            nodes: vec![],
        };
        let lab = Self {
            run,
            tools,
            state: Mutex::new(state),
        };
        lab.bring_up(progress).await?;
        Ok(lab)
    }

    /// Attaches to a running lab (see [`crate::running_labs`]). Dropping the handle does not take it down.
    ///
    /// # Errors
    /// When no lab runs at `directory`.
    pub fn attach(directory: &Path) -> Result<Self> {
        let run = Run::attach(directory)?;
        let path = directory.join("lab.json");
        let text = std::fs::read(&path).map_err(Error::io(format!("read {}", path.display())))?;
        let state: LabState = serde_json::from_slice(&text)
            .map_err(|error| Error::Other(format!("{} was written by another version: {error}", path.display())))?;
        Ok(Self {
            run,
            tools: state.tools.clone(),
            state: Mutex::new(state),
        })
    }

    async fn bring_up(&self, progress: &dyn Fn(&str)) -> Result<()> {
        let plan = self.plan();
        self.make_underlay().await?;
        for cluster in &plan.clusters {
            let to = SocketAddr::new(cluster.api_address(), 6443);
            let Response::Port(port) = self.run.request(&Request::Forward {
                namespace: UNDERLAY.into(),
                to,
            })?
            else {
                return Err(Error::Other("the supervisor did not return a forwarded port".into()));
            };
            control_plane::write_files(&self.directory().join(&cluster.name), cluster, port)?;
        }
        self.save()?;
        let commands = Commands {
            tools: &self.tools,
            run: self.directory(),
        };
        if !plan.clusters.is_empty() {
            self.start_on_underlay("etcd", commands.etcd()?)?;
        }
        for cluster in &plan.clusters {
            self.start_on_underlay(&format!("{}-apiserver", cluster.name), commands.api_server(cluster)?)?;
        }
        if plan.clusters.iter().any(|cluster| cluster.controllers) {
            self.write_base_images()?;
        }
        // A cluster whose nodes run in pods of another cluster starts after that other cluster.
        let (first, then): (Vec<_>, Vec<_>) = plan
            .clusters
            .iter()
            .partition(|cluster| !matches!(cluster.node_network, NodeNetwork::Pods { .. }));
        for clusters in [first, then] {
            let clusters = clusters
                .into_iter()
                .map(|cluster| self.bring_up_cluster(cluster, &commands, progress));
            futures::future::try_join_all(clusters).await?;
        }
        Ok(())
    }

    async fn bring_up_cluster(
        &self,
        plan: &ClusterPlan,
        commands: &Commands<'_>,
        progress: &dyn Fn(&str),
    ) -> Result<()> {
        let cluster = self.cluster(&plan.name);
        self.publish_api_to_pods(plan).await?;
        self.make_nat_router(plan).await?;
        // Nodes boot while the API server starts, but start the kubelet only after `release_nodes`.
        for n in 1..=plan.nodes {
            self.boot(&self.plan_node(plan, n)).await?;
        }
        cluster.wait_for_api().await?;
        progress(&format!("{}: API server answers", plan.name));
        if !plan.controllers {
            return Ok(());
        }
        self.start_on_underlay(
            &format!("{}-controller-manager", plan.name),
            commands.controller_manager(plan)?,
        )?;
        self.start_on_underlay(&format!("{}-scheduler", plan.name), commands.scheduler(plan)?)?;
        if plan.pod_network == PodNetwork::Flannel {
            cluster.apply(include_str!("lab/flannel.yaml")).await?;
        }
        cluster.release_nodes()?;
        cluster.install_dns().await?;
        cluster.wait_for_nodes().await?;
        progress(&format!("{}: {} nodes Ready", plan.name, plan.nodes));
        if plan.nodes > 0 {
            cluster.wait_for_rollout("kube-system", "deployment/coredns").await?;
            progress(&format!("{}: DNS up", plan.name));
        }
        Ok(())
    }

    /// Starts a program in the underlay's network namespace. `name` is also the name of its log.
    fn start_on_underlay(&self, name: &str, argv: Vec<String>) -> Result<()> {
        let inside = [
            vec![
                "nsenter".into(),
                format!("--net={}", self.namespace(UNDERLAY).display()),
            ],
            argv,
        ]
        .concat();
        self.run.request(&Request::Start {
            name: name.into(),
            argv: inside,
            env: go_environment(),
            log: self.log(name),
        })?;
        Ok(())
    }

    /// The plan with which the lab was started.
    pub fn plan(&self) -> LabPlan {
        self.state().plan.clone()
    }

    /// The run directory, with sockets, kubeconfigs and logs.
    pub fn directory(&self) -> &Path {
        &self.run.directory
    }

    /// The programs that the lab runs. [`Tools::ensure`] builds further sets of programs.
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// The log file of one component (`etcd`, `mgmt-apiserver`, `mgmt-1`, ...).
    pub fn log(&self, name: &str) -> PathBuf {
        self.directory().join("log").join(format!("{name}.log"))
    }

    /// A path to a network namespace of the lab, to open or for `nsenter --net=`.
    pub(crate) fn namespace(&self, name: &str) -> PathBuf {
        self.directory().join("ns").join(name)
    }

    /// The handle of a cluster.
    ///
    /// # Panics
    /// When the plan has no such cluster.
    pub fn cluster(&self, name: &str) -> Cluster<'_> {
        let plan = self
            .state()
            .plan
            .clusters
            .iter()
            .find(|cluster| cluster.name == name)
            .cloned();
        Cluster::new(
            self,
            plan.unwrap_or_else(|| panic!("the lab's plan has no cluster {name:?}")),
        )
    }

    /// The handle of a node (`mgmt-1`) or of a host that [`Lab::add_host`] added.
    ///
    /// # Panics
    /// When the lab has no such node.
    pub fn node(&self, name: &str) -> Node<'_> {
        let plan = self.state().nodes.iter().find(|node| node.name == name).cloned();
        Node::new(self, plan.unwrap_or_else(|| panic!("the lab has no node {name:?}")))
    }

    /// Makes the lab continue when this process exits. [`crate::down_all`] or `clustermesh-lab down` takes it down.
    ///
    /// # Errors
    /// When the supervisor is not running.
    pub fn keep(&mut self) -> Result<()> {
        self.run.keep()
    }

    /// Takes the lab down, even if it is kept or attached, and waits until its processes and files are gone.
    ///
    /// # Errors
    /// When the supervisor does not exit within half a minute.
    pub fn down(self) -> Result<()> {
        run::down(self.directory())
    }

    /// Commands with which a user accesses the clusters and nodes from a terminal.
    pub fn access_hint(&self) -> String {
        let state = self.state();
        let run = self.directory().display();
        let mut text = format!("lab: {run} (logs in {run}/log)\n");
        let kubectl = self
            .tools
            .path("kubectl")
            .map(|path| path.display().to_string())
            .unwrap_or("kubectl".into());
        for cluster in &state.plan.clusters {
            text += &format!(
                "  {kubectl} --kubeconfig {run}/{}/admin.kubeconfig get nodes,pods -A\n",
                cluster.name
            );
        }
        for node in &state.nodes {
            text += &match self.node_pid(&node.name) {
                Some(pid) => format!("  {}: nsenter -t {pid} -m -u -i -n -p -C -- bash\n", node.name),
                None => format!("  {}: nsenter --net={run}/ns/{} bash\n", node.name, node.name),
            };
        }
        text + &format!("  underlay: nsenter --net={run}/ns/{UNDERLAY} bash\n")
    }

    fn state(&self) -> MutexGuard<'_, LabState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the plan of a node, in place of an earlier one of the same name.
    fn record(&self, plan: NodePlan) -> Result<()> {
        let mut state = self.state();
        match state.nodes.iter_mut().find(|node| node.name == plan.name) {
            Some(known) => *known = plan,
            None => state.nodes.push(plan),
        }
        drop(state);
        self.save()
    }

    /// Writes `lab.json`.
    fn save(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(&*self.state()).map_err(|error| Error::Other(error.to_string()))?;
        std::fs::write(self.directory().join("lab.json"), text).map_err(Error::io("write lab.json"))
    }
}

impl Drop for Lab {
    // Only handles a panic. The drop of the field `run`, which follows, takes the lab down, unless the lab is kept.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        eprintln!("{}", self.access_hint());
        if std::env::var_os("CLUSTERMESH_LAB_KEEP").is_some() && self.keep().is_ok() {
            eprintln!("lab: CLUSTERMESH_LAB_KEEP is set: the lab continues; `clustermesh-lab down` takes it down");
            return;
        }
        let Ok(home) = run::logs_home() else { return };
        let target = home.join(self.directory().file_name().unwrap_or_default());
        let kept = run::copy_logs(&self.directory().join("log"), &target).and_then(|()| {
            let names: Vec<String> = self.state().nodes.iter().map(|node| node.name.clone()).collect();
            let mut running = names.iter().filter_map(|name| Some((name, self.node_pid(name)?)));
            running.try_for_each(|(name, pid)| run::copy_node_state(pid, &target, name))
        });
        match kept {
            Ok(()) => eprintln!(
                "lab: logs kept in {}; CLUSTERMESH_LAB_KEEP=1 keeps the lab itself",
                target.display()
            ),
            Err(error) => eprintln!("lab: cannot keep the logs: {error}"),
        }
    }
}
