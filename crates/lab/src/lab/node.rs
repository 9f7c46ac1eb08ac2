//! Controls nodes and API servers: runs programs, cuts and restores power or links, sends signals.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use super::underlay::uplink_port;
use super::{Cluster, Lab, UNDERLAY};
use crate::cgroup::Cgroups;
use crate::command::{self, Output, Running, argv};
use crate::image::IMPORT;
use crate::supervisor::Request;
use crate::{Error, HostNode, NodePlan, Result, Uplink, control_plane, node, run};

/// A node of a lab, or a bare host on its underlay.
#[derive(Debug)]
pub struct Node<'a> {
    lab: &'a Lab,
    plan: NodePlan,
}

impl Lab {
    /// The pid of a node's first process in the host's pid namespace. `None` for bare hosts and nodes that are powered off.
    pub(super) fn node_pid(&self, name: &str) -> Option<i32> {
        let text = std::fs::read_to_string(self.node_directory(name).join("pid")).ok()?;
        text.trim()
            .parse()
            .ok()
            .filter(|pid: &i32| Path::new(&format!("/proc/{pid}")).exists())
    }

    pub(super) fn node_directory(&self, name: &str) -> PathBuf {
        self.directory().join("nodes").join(name)
    }

    /// Connects a node to its network and boots it. Writes its settings, and at the first boot its kubeconfig.
    pub(super) async fn boot(&self, plan: &NodePlan) -> Result<()> {
        let directory = self.node_directory(&plan.name);
        std::fs::create_dir_all(&directory).map_err(Error::io(format!("create {}", directory.display())))?;
        let cluster = self.cluster(&plan.cluster);
        let kubeconfig = directory.join("kubelet.kubeconfig");
        if !kubeconfig.exists() {
            let text = control_plane::node_kubeconfig(&cluster.directory(), cluster.plan(), &plan.name)?;
            std::fs::write(&kubeconfig, text).map_err(Error::io("write the kubelet's kubeconfig"))?;
        }
        let resolver = self.resolver(cluster.plan());
        let settings = node::Settings::new(self.directory(), cluster.plan(), plan, resolver, &self.tools)?;
        let text = serde_json::to_vec_pretty(&settings).map_err(|error| Error::Other(error.to_string()))?;
        std::fs::write(directory.join("settings.json"), text).map_err(Error::io("write a node's settings"))?;
        let _ = std::fs::remove_file(directory.join("off"));
        self.connect(plan).await?;
        self.publish_worker_pod(plan).await?;
        let program = run::lab_program()?.display().to_string();
        let lab_directory = self.directory().display().to_string();
        let argv = argv([
            "nsenter",
            &format!("--net={}", self.namespace(&plan.name).display()),
            &program,
            "machine",
            &lab_directory,
            &plan.name,
            "--",
            "setsid",
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--cgroup",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            &program,
            "node",
            &directory.join("settings.json").display().to_string(),
        ]);
        let log = self.log(&plan.name);
        self.run.request(&Request::Start {
            name: plan.name.clone(),
            argv,
            env: super::go_environment(),
            log,
        })?;
        self.record(plan.clone())
    }
}

impl<'a> Node<'a> {
    pub(super) fn new(lab: &'a Lab, plan: NodePlan) -> Self {
        Self { lab, plan }
    }

    pub(super) fn plan(&self) -> &NodePlan {
        &self.plan
    }

    pub(crate) fn lab(&self) -> &'a Lab {
        self.lab
    }

    /// The name of the node, which is also its host name.
    pub fn name(&self) -> &str {
        &self.plan.name
    }

    /// The node's first InternalIP: on the underlay, or, if the node is a pod of another cluster ([`crate::NodeNetwork::Pods`]), in
    /// the pod range there.
    pub fn address(&self) -> std::net::IpAddr {
        self.plan.address
    }

    /// The node of the host cluster on which this node is a pod. `None` = it is not a pod.
    pub fn host_node(&self) -> Option<&HostNode> {
        match &self.plan.uplink {
            Uplink::Pods { of, .. } => Some(of),
            _ => None,
        }
    }

    /// The node's IPv6 InternalIP. In a cluster without IPv4 it is also the first.
    pub fn address_v6(&self) -> Option<std::net::Ipv6Addr> {
        self.plan.address_v6
    }

    /// The path of the node's network namespace.
    pub fn netns(&self) -> PathBuf {
        self.lab.namespace(&self.plan.name)
    }

    /// The node's cluster.
    ///
    /// # Panics
    /// For a bare host.
    pub fn cluster(&self) -> Cluster<'a> {
        self.lab.cluster(&self.plan.cluster)
    }

    /// Whether the node runs. A bare host always runs.
    pub fn is_up(&self) -> bool {
        self.plan.cluster.is_empty() || self.lab.node_pid(&self.plan.name).is_some()
    }

    /// Whether the node runs or is starting: its power was not cut.
    pub(super) fn has_power(&self) -> bool {
        !self.lab.node_directory(&self.plan.name).join("off").exists()
    }

    /// Runs a program in all of the node's namespaces (for a bare host: in its network namespace).
    ///
    /// # Errors
    /// When the node is down or the program fails. The error quotes the last lines of the program's output.
    pub async fn exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::run(&self.inside(argv(words))?, None).await
    }

    /// Does the same as [`Node::exec`], but a failure of the program is no error.
    ///
    /// # Errors
    /// When the program cannot be started or the node is down.
    pub async fn try_exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::output(&self.inside(argv(words))?, None).await
    }

    /// Does the same as [`Node::exec`], with `stdin` as standard input.
    ///
    /// # Errors
    /// As [`Node::exec`].
    pub async fn exec_with_stdin<S: AsRef<OsStr>>(
        &self,
        words: impl IntoIterator<Item = S>,
        stdin: &str,
    ) -> Result<Output> {
        command::run(&self.inside(argv(words))?, Some(stdin.as_bytes())).await
    }

    /// Starts a program in the background. `log` is a part of the name of its log file. The program is killed when the
    /// returned handle is dropped.
    ///
    /// # Errors
    /// When the node is down.
    pub fn spawn<S: AsRef<OsStr>>(&self, log: &str, words: impl IntoIterator<Item = S>) -> Result<Running> {
        let log = self.lab.log(&format!("{}-{log}", self.plan.name));
        Running::start(&self.inside(argv(words))?, &log, !self.plan.cluster.is_empty())
    }

    /// Runs a host program that the pod's image lacks (`ip`, `ping`, `curl`) in the network namespace of the pod with
    /// this address. As for [`Node::try_exec`], a failure of the program is no error.
    ///
    /// # Errors
    /// When the node is down.
    pub async fn pod_exec<S: AsRef<OsStr>>(
        &self,
        pod: std::net::IpAddr,
        words: impl IntoIterator<Item = S>,
    ) -> Result<Output> {
        command::output(&self.inside(in_pod(pod, argv(words)))?, None).await
    }

    /// Does the same as [`Node::spawn`], in the network namespace of the pod with this address.
    ///
    /// # Errors
    /// When the node is down.
    pub fn pod_spawn<S: AsRef<OsStr>>(
        &self,
        log: &str,
        pod: std::net::IpAddr,
        words: impl IntoIterator<Item = S>,
    ) -> Result<Running> {
        self.spawn(log, in_pod(pod, argv(words)))
    }

    fn inside(&self, words: Vec<String>) -> Result<Vec<String>> {
        let mut all = vec!["nsenter".to_owned()];
        if self.plan.cluster.is_empty() {
            all.push(format!("--net={}", self.netns().display()));
        } else {
            let pid = self.lab.node_pid(&self.plan.name);
            let pid = pid.ok_or_else(|| Error::Other(format!("{} has no power", self.plan.name)))?;
            let target = pid.to_string();
            all.extend(argv(["-t", &target, "-m", "-u", "-i", "-n", "-p", "-C"]));
            // The program is a child of nsenter, which forks to enter the pid namespace. It must not outlive a killed nsenter.
            all.extend(argv(["setpriv", "--pdeathsig", "KILL"]));
        }
        all.push("--".into());
        all.extend(words);
        Ok(all)
    }

    pub(super) async fn import_image(&self, archive: &Path) -> Result<()> {
        let ctr = self.lab.tools.path("ctr")?.display().to_string();
        let archive = archive.display().to_string();
        self.exec([&[&*ctr][..], &IMPORT, &[&archive]].concat()).await.map(drop)
    }

    /// Cuts the power: all processes, mounts and kernel state (links, routes, nftables) of the node disappear at
    /// once. The Node object remains.
    ///
    /// # Errors
    /// When the node has no power.
    pub async fn power_cut(&self) -> Result<()> {
        self.lab.run.request(&Request::Kill {
            name: self.plan.name.clone(),
        })?;
        let directory = self.lab.node_directory(&self.plan.name);
        std::fs::write(directory.join("off"), "").map_err(Error::io("record the power cut"))?;
        for file in ["pid", "routes"] {
            let _ = std::fs::remove_file(directory.join(file));
        }
        self.lab.disconnect(&self.plan).await
    }

    /// Restores the power. The node boots with the same name, address and credentials and an empty disk. Returns when
    /// all powered-on nodes of the cluster are Ready.
    ///
    /// # Errors
    /// When the node has power, or one of these nodes is not Ready within three minutes.
    pub async fn power_on(&self) -> Result<()> {
        self.lab.boot(&self.plan).await?;
        self.cluster().wait_for_nodes().await
    }

    /// Drops every packet on the node's link by disabling its bridge port. Both ends of the link stay up.
    ///
    /// # Errors
    /// When the node has no power.
    pub async fn cut_link(&self) -> Result<()> {
        // BR_STATE_DISABLED
        self.set_port_state("0").await
    }

    /// Enables the bridge port of the node's link again.
    ///
    /// # Errors
    /// When the node has no power.
    pub async fn restore_link(&self) -> Result<()> {
        // BR_STATE_FORWARDING
        self.set_port_state("3").await
    }

    async fn set_port_state(&self, state: &str) -> Result<()> {
        let (namespace, port) = uplink_port(&self.plan);
        let namespace = format!("--net={}", self.lab.namespace(namespace).display());
        let words = [
            "nsenter", &namespace, "bridge", "link", "set", "dev", &port, "state", state,
        ];
        command::run(&argv(words), None).await.map(drop)
    }

    /// The pids, in the host's pid namespace, of the processes with this name on the node and in its pods. The name is
    /// compared with `/proc/PID/comm`, which has at most 15 bytes.
    ///
    /// # Errors
    /// When cgroups cannot be read.
    pub fn pids_of(&self, name: &str) -> Result<Vec<i32>> {
        let cgroups = Cgroups::detect().map_err(|error| Error::Other(format!("{error:#}")))?;
        let name = &name[..name.len().min(15)];
        let has_name =
            |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
        Ok(cgroups
            .of(self.lab.directory(), Some(&self.plan.name))
            .pids()
            .into_iter()
            .filter(has_name)
            .collect())
    }

    /// Sends a signal to all processes with this name (see [`Node::pids_of`]). The node's service manager restarts a
    /// killed service such as kubelet.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let pids = self.pids_of(name)?;
        if pids.is_empty() {
            return Err(Error::Other(format!("{} runs no process {name:?}", self.plan.name)));
        }
        for pid in pids {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal)
                .map_err(Error::errno(format!("send {signal} to {name} ({pid})")))?;
        }
        Ok(())
    }

    /// The time of the last boot, in seconds since 1970. `None` = the node has not booted, or has no power.
    pub(super) fn booted_at(&self) -> Option<i64> {
        let file = std::fs::metadata(self.lab.node_directory(&self.plan.name).join("pid")).ok()?;
        let since = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        i64::try_from(since.as_secs()).ok()
    }

    /// Names of the nodes to whose pods this node has routes, from the file that the lab's CNI daemon writes.
    pub(super) fn routes(&self) -> Vec<String> {
        let path = self.lab.node_directory(&self.plan.name).join("routes");
        std::fs::read_to_string(path)
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

impl Cluster<'_> {
    /// Suspends the API server (SIGSTOP): connections stay open, and requests get no response.
    ///
    /// # Errors
    /// When the API server is not running.
    pub fn freeze_api(&self) -> Result<()> {
        self.signal_api(Signal::SIGSTOP)
    }

    /// Resumes the API server (SIGCONT).
    ///
    /// # Errors
    /// When the API server is not running.
    pub fn thaw_api(&self) -> Result<()> {
        self.signal_api(Signal::SIGCONT)
    }

    fn api_name(&self) -> String {
        format!("{}-apiserver", self.plan().name)
    }

    fn signal_api(&self, signal: Signal) -> Result<()> {
        self.lab
            .run
            .request(&Request::Signal {
                name: self.api_name(),
                signal: signal as i32,
            })
            .map(drop)
    }

    /// Kills the API server. Then connections to its address on the underlay are refused. The forwarded port on the host accepts
    /// connections and closes them.
    ///
    /// # Errors
    /// When the API server is not running.
    pub fn kill_api(&self) -> Result<()> {
        self.lab.run.request(&Request::Kill { name: self.api_name() }).map(drop)
    }

    /// Restarts a killed API server with the data in etcd. Returns when it answers.
    ///
    /// # Errors
    /// When the API server is already running or does not answer within three minutes.
    pub async fn start_api(&self) -> Result<()> {
        let commands = control_plane::Commands {
            tools: &self.lab.tools,
            run: self.lab.directory(),
        };
        self.lab
            .start_on_underlay(&self.api_name(), commands.api_server(self.plan())?)?;
        self.wait_for_api().await
    }
}

impl Lab {
    /// The path of the underlay's network namespace, which contains the bridge `br0` and the API servers.
    pub fn underlay_netns(&self) -> PathBuf {
        self.namespace(UNDERLAY)
    }
}

/// A shell command that finds the pod's network namespace by the address and execs the program in it.
fn in_pod(pod: std::net::IpAddr, words: Vec<String>) -> Vec<String> {
    let script = "ip=$1; shift; for x in /run/netns/*; do \
         nsenter --net=$x ip -o addr show | grep -q \"inet6\\? $ip/\" && exec nsenter --net=$x -- \"$@\"; \
         done; echo \"no pod here has the address $ip\" >&2; exit 125";
    [argv(["sh", "-c", script, "sh", &pod.to_string()]), words].concat()
}
