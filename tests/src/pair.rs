//! Sets up two nodes of two clusters on one link, each with a dual-stack pod, a real agent and an API server stub
//! ([`api`]), for machines on which no real API server can run, such as an emulated processor.

pub mod api;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::{fs::MetadataExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use clustermesh_api::names::{KILO_ENDPOINT, KILO_KEY, KILO_WIREGUARD_IP, LABEL_SOURCE_CLUSTER};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use self::api::{Api, NODES, PEERS, POLICIES};
use crate::{
    agent::{AGENT_PRIVILEGES, agent_program},
    netns::{NetNs, Running, unique_name, veth, wait_for, wait_until},
};

/// Time limit of every wait. On an emulated processor beside other tests, an agent has needed 75 s to publish its key.
pub const TIMEOUT: Duration = Duration::from_secs(300);
/// tcpdump filter for packets with an inner address that are not encrypted by WireGuard.
pub const UNENCRYPTED: &str = "(net 10.10.0.0/16 or net 10.20.0.0/16 or net 100.66.0.0/16 or net fd00:10::/32 or \
                                net fd00:20::/32) and not udp port 51820";

/// A node with its pod, the API server stub of its cluster, and the agent's files.
pub struct Site {
    /// The node's number, 1 or 2.
    number: u8,
    pub ns: NetNs,
    pub pod: NetNs,
    pub api: Api,
    pub interface: String,
    files: tempfile::TempDir,
}

/// A running agent. Dropping it kills the agent and, in a failing test, prints its log.
pub struct Agent {
    running: Running,
    log: PathBuf,
}

/// Starts both nodes, without agents.
pub fn start_nodes() -> [Site; 2] {
    let sites = [Site::new(1), Site::new(2)];
    let [a, b] = &sites;
    let addresses = |n: u8| [format!("172.30.{n}.11/16"), format!("fd00:30::{n}:11/64")];
    let (left, right) = (addresses(1), addresses(2));
    veth(
        &a.ns,
        "eth0",
        &[&left[0], &left[1]],
        &b.ns,
        "eth0",
        &[&right[0], &right[1]],
    );
    for (site, other) in [(a, 2), (b, 1)] {
        // Without these routes, the kernel would drop packets that bypass the tunnel, and no capture would show them.
        site.ns.ip(&format!("route add default via 172.30.{other}.11"));
        site.ns.ip(&format!("-6 route add default via fd00:30::{other}:11"));
        site.attach_pod();
        site.ns.run(agent_program(), &["prepare"]);
    }
    sites
}

/// Writes the Peer and PeerPolicy of each node into the other cluster, as the controller does.
pub fn exchange_peers(sites: &[Site; 2]) {
    let [a, b] = sites;
    a.write_peer_of(b);
    b.write_peer_of(a);
}

impl Drop for Site {
    /// Removes the control socket, lock and status socket of a killed agent, which are in a directory that all network namespaces share.
    fn drop(&mut self) {
        let _ = fs::remove_file(format!("/var/run/wireguard/{}.sock", self.interface));
        if let Ok(namespace) = fs::metadata(self.ns.path()) {
            for suffix in ["lock", "status"] {
                let _ = fs::remove_file(format!("/var/run/wireguard/wg-agent-{}.{suffix}", namespace.ino()));
            }
        }
    }
}

impl Site {
    fn new(number: u8) -> Self {
        let ns = NetNs::new(&format!("node {number}"));
        for which in ["all", "default"] {
            ns.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
        }
        ns.set_sysctl("net/ipv4/ip_forward", "1");
        ns.set_sysctl("net/ipv6/conf/all/forwarding", "1");
        let pod = NetNs::new(&format!("pod {number}"));
        pod.set_sysctl("net/ipv6/conf/default/accept_dad", "0");
        let api = Api::start(&ns);
        let files = tempfile::tempdir().expect("a directory");
        fs::write(files.path().join("kubeconfig"), api.kubeconfig()).expect("write a kubeconfig");
        let site = Self {
            number,
            ns,
            pod,
            api,
            interface: unique_name("kp"),
            files,
        };
        site.api.put(
            NODES,
            json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": site.node()},
                "spec": {"podCIDR": site.pod_cidrs()[0], "podCIDRs": site.pod_cidrs()},
                "status": {"addresses": [{"type": "InternalIP", "address": format!("172.30.{number}.11")}]},
            }),
        );
        println!("{}", site.ns.enter_hint());
        site
    }

    fn attach_pod(&self) {
        let n = self.number;
        let node_addresses = [format!("10.{n}0.1.1/24"), format!("fd00:{n}0:0:1::1/64")];
        let pod_addresses = [format!("10.{n}0.1.9/24"), format!("fd00:{n}0:0:1::9/64")];
        veth(
            &self.ns,
            "cni0",
            &[&node_addresses[0], &node_addresses[1]],
            &self.pod,
            "eth0",
            &[&pod_addresses[0], &pod_addresses[1]],
        );
        self.pod.ip(&format!("route add default via 10.{n}0.1.1"));
        self.pod.ip(&format!("-6 route add default via fd00:{n}0:0:1::1"));
    }

    pub fn node(&self) -> String {
        format!("node-{}", self.number)
    }

    fn pod_cidrs(&self) -> [String; 2] {
        let n = self.number;
        [format!("10.{n}0.1.0/24"), format!("fd00:{n}0:0:1::/64")]
    }

    /// The pod's addresses.
    pub fn pod_ips(&self) -> [String; 2] {
        let n = self.number;
        [format!("10.{n}0.1.9"), format!("fd00:{n}0:0:1::9")]
    }

    /// The value of `--wireguard-cidr`.
    pub fn wireguard(&self) -> String {
        format!("100.66.{}.0/24", self.number)
    }

    /// The path of a file in the agent's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// The agent's command line, with `more` directly after the program.
    pub fn command(&self, program: &Path, backend: &str, more: &[&str]) -> Vec<String> {
        let path = |name| self.file(name).display().to_string();
        let mut words = vec![program.display().to_string()];
        words.extend(more.iter().map(ToString::to_string));
        for (flag, value) in [
            ("--node-name", self.node()),
            ("--kubeconfig", path("kubeconfig")),
            ("--interface", self.interface.clone()),
            ("--backend", backend.to_owned()),
            ("--wireguard-cidr", self.wireguard()),
            ("--key-file", path("state/key")),
        ] {
            words.extend([flag.to_owned(), value]);
        }
        words
    }

    /// Starts the agent.
    pub fn agent(&self, backend: &str) -> Agent {
        self.agent_from(Path::new(agent_program()), backend)
    }

    /// Starts an agent from the program file `program`.
    pub fn agent_from(&self, program: &Path, backend: &str) -> Agent {
        let log = self.file(&format!("{}.log", unique_name("log")));
        let file = fs::File::create(&log).expect("a log");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", AGENT_PRIVILEGES, "sh"]);
        command
            .args(self.command(program, backend, &[]))
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a log"))
            .stderr(file);
        let running = self.ns.spawn_command(&mut command);
        Agent { running, log }
    }

    /// Waits until the agent has published its key, WireGuard address and endpoint, and returns the Node's annotations.
    pub fn wait_for_published(&self) -> BTreeMap<String, String> {
        wait_for(&format!("the key of {}", self.node()), TIMEOUT, || {
            let annotations = self.annotations();
            [KILO_KEY, KILO_WIREGUARD_IP, KILO_ENDPOINT]
                .iter()
                .all(|key| annotations.contains_key(*key))
                .then_some(annotations)
        })
    }

    pub fn annotations(&self) -> BTreeMap<String, String> {
        let node = self.api.get(NODES, &self.node());
        serde_json::from_value(node["metadata"]["annotations"].clone()).unwrap_or_default()
    }

    /// The Peer that the controller writes for this node into other clusters.
    pub fn as_peer(&self) -> Value {
        let annotations = self.wait_for_published();
        let (ip, port) = annotations[KILO_ENDPOINT].rsplit_once(':').expect("host:port");
        let address = annotations[KILO_WIREGUARD_IP].split('/').next().expect("an address");
        let mut allowed_ips = self.pod_cidrs().to_vec();
        allowed_ips.push(format!("{address}/32"));
        json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
            "metadata": {"name": self.node(), "labels": {LABEL_SOURCE_CLUSTER: self.node()}},
            "spec": {
                "allowedIPs": allowed_ips, "publicKey": annotations[KILO_KEY],
                "endpoint": {"dnsOrIP": {"ip": ip}, "port": port.parse::<u16>().expect("a port")},
            },
        })
    }

    /// Writes the Peer and PeerPolicy of the other node, as the controller does.
    pub fn write_peer_of(&self, other: &Self) {
        self.api.put(PEERS, other.as_peer());
        let networks = |site: &Self| {
            let n = site.number;
            vec![format!("10.{n}0.0.0/16"), format!("fd00:{n}0::/32"), site.wireguard()]
        };
        self.api.put(
            POLICIES,
            json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "PeerPolicy", "metadata": {"name": other.node()},
                "spec": {
                    "source": other.node(), "sources": networks(other), "networks": networks(other),
                    "allow": [{"to": networks(self)}],
                },
            }),
        );
    }

    /// Waits until IPv4 packets to the other node's pod are routed into the tunnel. Before, they follow the default route over
    /// the underlay.
    pub fn wait_for_route_to(&self, other: &Self) {
        wait_until("a route into the tunnel", TIMEOUT, || {
            // `ip` fails while the table does not exist yet.
            let words = ["route", "show", &other.pod_cidrs()[0], "table", "5182"];
            let routes = self.ns.output("ip", &words).stdout;
            String::from_utf8_lossy(&routes).contains(&format!("dev {}", self.interface))
        });
    }

    /// Waits until the pod reaches the other node's pod through the tunnel, in both address families.
    pub fn wait_until_reaches(&self, other: &Self) {
        self.wait_for_route_to(other);
        for to in other.pod_ips() {
            wait_until(&format!("a ping from {} to {to}", self.pod.name), TIMEOUT, || {
                self.pod.pings(&to)
            });
        }
    }

    /// A column of `wg show INTERFACE WHAT`, by public key.
    pub fn wg_show(&self, what: &str) -> BTreeMap<String, String> {
        let text = self.ns.run("wg", &["show", &self.interface, what]);
        let lines = text.lines().filter_map(|line| line.split_once('\t'));
        lines.map(|(key, rest)| (key.to_owned(), rest.to_owned())).collect()
    }

    /// Requests a page of the admin port until there is a response.
    pub fn page(&self, path: &str) -> String {
        let url = format!("http://127.0.0.1:9587{path}");
        wait_for(&format!("{path} of {}", self.node()), TIMEOUT, || {
            let output = self.ns.output("curl", &["-sS", "-m", "30", &url]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            (output.status.success() && !text.is_empty()).then_some(text)
        })
    }

    /// Waits until `/readyz` reports that the agent is ready, without remarks.
    pub fn wait_until_ready(&self) {
        wait_until(&format!("{} to be ready", self.node()), TIMEOUT, || {
            self.page("/readyz") == "ok\n"
        });
    }

    /// `wg_agent_repairs_total` by part, without zeros.
    pub fn repairs(&self) -> BTreeMap<String, u64> {
        let page = self.page("/metrics");
        let lines = page
            .lines()
            .filter_map(|line| line.strip_prefix("wg_agent_repairs_total{part=\""));
        let parts = lines.filter_map(|line| {
            let (part, count) = line.split_once("\"} ")?;
            Some((part.to_owned(), count.parse().ok()?))
        });
        parts.filter(|(_, count)| *count > 0).collect()
    }

    /// All kernel state that an agent could leave on a node, read by `ip`, `nft` and `wg`.
    pub fn kernel_state(&self) -> Vec<Value> {
        let nft = self.ns.run("nft", &["-j", "list", "ruleset"]);
        vec![
            self.ns.ip_json("link show"),
            self.ns.ip_json("address show"),
            self.ns.ip_json("rule show"),
            self.ns.ip_json("-6 rule show"),
            self.ns.ip_json("route show table all"),
            self.ns.ip_json("-6 route show table all"),
            serde_json::from_str(&nft).expect("nft -j prints JSON"),
            self.ns.run("wg", &["show"]).into(),
        ]
    }

    /// Runs `wg-agent COMMAND`, which must succeed, and returns its output.
    pub fn run_command(&self, command: &str) -> String {
        let words = self.command(Path::new(agent_program()), "auto", &[command]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = self.ns.output(words[0], &words[1..]);
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {messages}");
        messages + &String::from_utf8_lossy(&output.stdout)
    }
}

impl Agent {
    /// Sends the signal and waits until the agent is killed (SIGKILL) or exits successfully.
    pub fn end(mut self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.running.pid()).expect("a process id"));
        kill(pid, signal).expect("signal the agent");
        let status = self.running.wait(TIMEOUT);
        let is_expected = if signal == Signal::SIGKILL {
            status.signal() == Some(signal as i32)
        } else {
            status.success()
        };
        assert!(is_expected, "the agent exited with {status}\n{}", self.log());
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the log")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}:\n{}", self.log.display(), self.log());
        }
    }
}

/// Pings twenty times a second until [`Flow::end`].
pub struct Flow {
    running: Running,
    output: tempfile::NamedTempFile,
}

impl Flow {
    pub fn start(from: &NetNs, to: &str) -> Self {
        let output = tempfile::NamedTempFile::new().expect("a file");
        let mut command = Command::new("ping");
        command
            .args(["-n", "-i", "0.05", to])
            .stdin(Stdio::null())
            .stdout(output.reopen().expect("a file"))
            .stderr(Stdio::null());
        let running = from.spawn_command(&mut command);
        Self { running, output }
    }

    /// The sequence numbers of the packets answered so far, in order.
    pub fn answered(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.output.path()).expect("the output of ping");
        let number = |line: &str| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok();
        text.lines()
            .filter(|line| line.contains("time="))
            .filter_map(number)
            .collect()
    }

    /// Waits for this many further replies.
    pub fn wait_for_replies(&self, more: usize) {
        let before = self.answered().len();
        wait_until("further replies to the ping", TIMEOUT, || {
            self.answered().len() >= before + more
        });
    }

    /// Stops the pings. Returns the largest number of packets lost in a row, and the number of answered packets. Packets before the first
    /// reply count as lost, packets after the last reply do not.
    pub fn end(mut self) -> (u32, usize) {
        // The file contains the whole output only after the process has exited.
        let _ = self.running.child().kill();
        let _ = self.running.child().wait();
        let numbers = self.answered();
        let first = numbers.first().copied().unwrap_or(0);
        let gaps = numbers.windows(2).map(|pair| pair[1].saturating_sub(pair[0] + 1));
        let most = gaps.max().unwrap_or(0).max(first.saturating_sub(1));
        (most, numbers.len())
    }
}
