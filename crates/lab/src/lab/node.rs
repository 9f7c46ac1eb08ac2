//! Handles of nodes and of the underlay's API servers: run programs, cut and restore power or links, send signals.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use super::underlay::uplink_port;
use super::{Cluster, Lab, UNDERLAY};
use crate::cgroup::Cgroups;
use crate::command::{self, Output, Running, argv};
use crate::supervisor::Request;
use crate::{Error, NodePlan, Result, control_plane, node, run};

/// A node of a lab, or a bare host on its underlay.
#[derive(Debug)]
pub struct Node<'a> {
    lab: &'a Lab,
    plan: NodePlan,
}

impl Lab {
    /// The pid of a node's first process, as the host sees it; `None` for bare hosts and nodes without power.
    pub(super) fn machine_pid(&self, name: &str) -> Option<i32> {
        let text = std::fs::read_to_string(self.node_directory(name).join("pid")).ok()?;
        text.trim()
            .parse()
            .ok()
            .filter(|pid: &i32| Path::new(&format!("/proc/{pid}")).exists())
    }

    pub(super) fn node_directory(&self, name: &str) -> PathBuf {
        self.directory().join("nodes").join(name)
    }

    /// Connects a node to its network and boots it. Its files are made at the first boot.
    pub(super) async fn boot(&self, plan: &NodePlan) -> Result<()> {
        let directory = self.node_directory(&plan.name);
        std::fs::create_dir_all(&directory).map_err(Error::io(format!("create {}", directory.display())))?;
        let cluster = self.cluster(&plan.cluster);
        let kubeconfig = directory.join("kubelet.kubeconfig");
        if !kubeconfig.exists() {
            let text = control_plane::node_kubeconfig(&cluster.directory(), cluster.plan(), &plan.name)?;
            std::fs::write(&kubeconfig, text).map_err(Error::io("write the kubelet's kubeconfig"))?;
            let settings = node::Settings::new(self.directory(), cluster.plan(), plan, &self.tools)?;
            let text = serde_json::to_vec_pretty(&settings).map_err(|error| Error::Plan(error.to_string()))?;
            std::fs::write(directory.join("settings.json"), text).map_err(Error::io("write a node's settings"))?;
        }
        let _ = std::fs::remove_file(directory.join("off"));
        self.connect(plan).await?;
        self.publish_worker(plan).await?;
        let program = run::lab_program()?.display().to_string();
        let run = self.directory().display().to_string();
        let argv = argv([
            "nsenter",
            &format!("--net={}", self.namespace(&plan.name).display()),
            &program,
            "machine",
            &run,
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
        self.run.ask(&Request::Start {
            name: plan.name.clone(),
            argv,
            env: super::go_environment(),
            log,
        })?;
        let mut state = self.state();
        if !state.nodes.contains(plan) {
            state.nodes.push(plan.clone());
        }
        drop(state);
        self.save()
    }
}

impl<'a> Node<'a> {
    pub(super) fn new(lab: &'a Lab, plan: NodePlan) -> Self {
        Self { lab, plan }
    }

    pub(crate) fn lab(&self) -> &'a Lab {
        self.lab
    }

    /// Its name: that of the Node object and of the machine.
    pub fn name(&self) -> &str {
        &self.plan.name
    }

    /// Its InternalIP: on the underlay, or in another cluster's pod range.
    pub fn address(&self) -> std::net::Ipv4Addr {
        self.plan.address
    }

    /// Its second InternalIP, in a dual-stack cluster.
    pub fn address_v6(&self) -> Option<std::net::Ipv6Addr> {
        self.plan.address_v6
    }

    /// A path to its network namespace.
    pub fn netns(&self) -> PathBuf {
        self.lab.namespace(&self.plan.name)
    }

    /// Its cluster.
    ///
    /// # Panics
    /// For a bare host.
    pub fn cluster(&self) -> Cluster<'a> {
        self.lab.cluster(&self.plan.cluster)
    }

    /// Whether its machine has power. A bare host always has.
    pub fn is_up(&self) -> bool {
        self.plan.cluster.is_empty() || self.lab.machine_pid(&self.plan.name).is_some()
    }

    /// Whether it has power: it runs, or is just starting.
    pub(super) fn has_power(&self) -> bool {
        !self.lab.node_directory(&self.plan.name).join("off").exists()
    }

    /// Runs a program in all of the node's namespaces (for a bare host: in its network namespace); a failure is an
    /// error.
    ///
    /// # Errors
    /// With the end of the output.
    pub async fn exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::run(&self.inside(argv(words))?, None).await
    }

    /// As [`Node::exec`], whatever the exit status.
    ///
    /// # Errors
    /// Only when the program cannot be started or the node is down.
    pub async fn try_exec<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::output(&self.inside(argv(words))?, None).await
    }

    /// As [`Node::exec`], with something on standard input.
    ///
    /// # Errors
    /// As [`Node::exec`].
    pub async fn feed<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>, stdin: &str) -> Result<Output> {
        command::run(&self.inside(argv(words))?, Some(stdin.as_bytes())).await
    }

    /// Starts a program in the background; `log` names its log file. It is killed when the handle is dropped.
    ///
    /// # Errors
    /// When the node is down.
    pub fn spawn<S: AsRef<OsStr>>(&self, log: &str, words: impl IntoIterator<Item = S>) -> Result<Running> {
        let log = self.lab.log(&format!("{}-{log}", self.plan.name));
        Running::start(&self.inside(argv(words))?, &log, !self.plan.cluster.is_empty())
    }

    /// Runs a host program that the pod's image lacks (`ip`, `ping`, `curl`) in the network namespace of the pod with
    /// this address, whatever its exit status.
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

    /// As [`Node::spawn`], in the network namespace of the pod with this address.
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
            let pid = self.lab.machine_pid(&self.plan.name);
            let pid = pid.ok_or_else(|| Error::Plan(format!("{} has no power", self.plan.name)))?;
            let target = pid.to_string();
            all.extend(argv(["-t", &target, "-m", "-u", "-i", "-n", "-p", "-C"]));
            // Without this, a program in another pid namespace outlives the nsenter that waits for it.
            all.extend(argv(["setpriv", "--pdeathsig", "KILL"]));
        }
        all.push("--".into());
        all.extend(words);
        Ok(all)
    }

    pub(super) async fn import_image(&self, archive: &Path) -> Result<()> {
        let ctr = self.lab.tools.path("ctr")?.display().to_string();
        self.exec([&ctr, "-n", "k8s.io", "images", "import", &archive.display().to_string()])
            .await
            .map(drop)
    }

    /// Cuts the power: every process, every mount and all kernel state (links, routes, tables) of the node is gone at
    /// once. The API server gets no notice; the Node object remains.
    ///
    /// # Errors
    /// When it has no power.
    pub async fn power_cut(&self) -> Result<()> {
        self.lab.run.ask(&Request::Kill {
            name: self.plan.name.clone(),
        })?;
        let directory = self.lab.node_directory(&self.plan.name);
        std::fs::write(directory.join("off"), "").map_err(Error::io("note the power cut"))?;
        for file in ["pid", "routes"] {
            let _ = std::fs::remove_file(directory.join(file));
        }
        self.lab.disconnect(&self.plan).await
    }

    /// Restores the power: same name, address and identity, an empty disk. Returns when the node is Ready again.
    ///
    /// # Errors
    /// When it has power, or is not Ready within three minutes.
    pub async fn power_on(&self) -> Result<()> {
        self.lab.boot(&self.plan).await?;
        self.cluster().wait_for_nodes().await
    }

    /// Drops every packet on its link while both ends stay up: a disabled bridge port, not a link that is down.
    ///
    /// # Errors
    /// When it has no power.
    pub async fn cut_link(&self) -> Result<()> {
        self.port_state("0").await
    }

    /// Lets packets pass on its link again.
    ///
    /// # Errors
    /// When it has no power.
    pub async fn mend_link(&self) -> Result<()> {
        self.port_state("3").await
    }

    async fn port_state(&self, state: &str) -> Result<()> {
        let (namespace, port) = uplink_port(&self.plan);
        let namespace = format!("--net={}", self.lab.namespace(namespace).display());
        let words = [
            "nsenter", &namespace, "bridge", "link", "set", "dev", &port, "state", state,
        ];
        command::run(&argv(words), None).await.map(drop)
    }

    /// The pids (as the host sees them) of the node's processes, pods' included, with this name
    /// (`/proc/PID/comm`, cut at 15 letters).
    ///
    /// # Errors
    /// When cgroups cannot be read.
    pub fn pids_of(&self, name: &str) -> Result<Vec<i32>> {
        let cgroups = Cgroups::detect().map_err(|error| Error::Plan(format!("{error:#}")))?;
        let name = &name[..name.len().min(15)];
        let is_it =
            |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
        Ok(cgroups
            .of(self.lab.directory(), Some(&self.plan.name))
            .pids()
            .into_iter()
            .filter(is_it)
            .collect())
    }

    /// Sends a signal (such as SIGSTOP, SIGCONT, SIGKILL) to all processes with that name. The node's service manager
    /// restarts a killed service such as kubelet.
    ///
    /// # Errors
    /// When there is none.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let pids = self.pids_of(name)?;
        if pids.is_empty() {
            return Err(Error::Plan(format!("{} runs no process {name:?}", self.plan.name)));
        }
        for pid in pids {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal)
                .map_err(Error::errno(format!("send {signal} to {name} ({pid})")))?;
        }
        Ok(())
    }

    /// When it last booted, in seconds since 1970. `None` = it has not yet.
    pub(super) fn booted_at(&self) -> Option<i64> {
        let file = std::fs::metadata(self.lab.node_directory(&self.plan.name).join("pid")).ok()?;
        let since = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        i64::try_from(since.as_secs()).ok()
    }

    /// Names of the nodes for which it has pod routes, from the file that the CNI's daemon writes.
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
    /// Suspends the API server (SIGSTOP): connections stay open and get no answer.
    ///
    /// # Errors
    /// When it is not running.
    pub fn freeze_api(&self) -> Result<()> {
        self.signal_api(Signal::SIGSTOP)
    }

    /// Resumes the API server (SIGCONT).
    ///
    /// # Errors
    /// When it is not running.
    pub fn thaw_api(&self) -> Result<()> {
        self.signal_api(Signal::SIGCONT)
    }

    fn api_name(&self) -> String {
        format!("{}-apiserver", self.plan().name)
    }

    fn signal_api(&self, signal: Signal) -> Result<()> {
        self.lab
            .run
            .ask(&Request::Signal {
                name: self.api_name(),
                signal: signal as i32,
            })
            .map(drop)
    }

    /// Kills the API server. The underlay then refuses connections; the host's forwarded port closes them at once.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill_api(&self) -> Result<()> {
        self.lab.run.ask(&Request::Kill { name: self.api_name() }).map(drop)
    }

    /// Starts a killed API server again with the data in etcd; returns when it answers.
    ///
    /// # Errors
    /// When it runs already or does not answer within three minutes.
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
    /// A path to the underlay's network namespace (bridge `br0`, API servers), to open or for `nsenter --net=`.
    pub fn underlay_netns(&self) -> PathBuf {
        self.namespace(UNDERLAY)
    }
}

/// A shell command that finds the network namespace with this address and execs the program in it.
fn in_pod(pod: std::net::IpAddr, words: Vec<String>) -> Vec<String> {
    let script = "ip=$1; shift; for x in /run/netns/*; do \
         nsenter --net=$x ip -o addr show | grep -q \"inet6\\? $ip/\" && exec nsenter --net=$x -- \"$@\"; \
         done; echo \"no pod here has the address $ip\" >&2; exit 125";
    [argv(["sh", "-c", script, "sh", &pod.to_string()]), words].concat()
}
