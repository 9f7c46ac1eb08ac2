//! Lists every address and port of a cluster, and scans which of these sockets a pod or node of another cluster reaches.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::{Cluster, Error, Lab, Result, Running, TrafficClient, run, wait_until};

/// Ports of the control plane, the kubelet, kube-proxy, the agent and SSH. A scan tries them at every address.
pub const ALWAYS_SCANNED_PORTS: [u16; 11] = [22, 2379, 2380, 6443, 9587, 10249, 10250, 10255, 10256, 10257, 10259];

/// Number of background probes so far, which makes the names of their logs unique.
static SPAWNED: AtomicUsize = AtomicUsize::new(0);

impl Cluster<'_> {
    /// All addresses of the cluster, each with every port of any Pod, Service or EndpointSlice, and [`ALWAYS_SCANNED_PORTS`].
    /// The value describes the owner of the address: a node (its own addresses, the default gateway of its pods, its WireGuard
    /// address), a pod, a Service, an EndpointSlice or the API server.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn sockets(&self) -> Result<BTreeMap<SocketAddr, String>> {
        let kinds = ["nodes", "pods", "services", "endpointslices"];
        let list = self
            .kubectl(["get", &kinds.join(","), "-A", "-o", "json"])
            .await?
            .stdout;
        let list: Value = serde_json::from_str(&list)
            .map_err(|error| Error::Other(format!("parse the output of kubectl: {error}")))?;
        let mut found = SocketInventory::default();
        found.add_address(&self.plan().api_address().to_string(), || "the API server".to_owned());
        found.ports.extend(ALWAYS_SCANNED_PORTS);
        for object in list["items"].as_array().into_iter().flatten() {
            found.add_object(object);
        }
        let SocketInventory { addresses, ports } = found;
        let with_ports = |(ip, what): (IpAddr, String)| {
            ports
                .iter()
                .map(move |port| (SocketAddr::new(ip, *port), what.clone()))
                .collect::<Vec<_>>()
        };
        Ok(addresses.into_iter().flat_map(with_ports).collect())
    }
}

#[derive(Debug, Default)]
struct SocketInventory {
    addresses: BTreeMap<IpAddr, String>,
    ports: BTreeSet<u16>,
}

impl SocketInventory {
    fn add_address(&mut self, text: &str, what: impl FnOnce() -> String) {
        if let Ok(ip) = text.parse() {
            self.addresses.entry(ip).or_insert_with(what);
        }
    }

    fn add_port(&mut self, value: &Value) {
        self.ports.extend(
            value
                .as_u64()
                .and_then(|port| u16::try_from(port).ok())
                .filter(|port| *port > 0),
        );
    }

    fn add_object(&mut self, object: &Value) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let items = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match object["kind"].as_str() {
            Some("Node") => {
                for address in items(&object["status"]["addresses"]) {
                    self.add_address(&text(&address["address"]), || format!("node {name}"));
                }
                let annotations = &object["metadata"]["annotations"];
                let wireguard = text(&annotations["kilo.squat.ai/wireguard-ip"]);
                let wireguard = wireguard.split('/').next().unwrap_or_default();
                self.add_address(wireguard, || format!("WireGuard address of node {name}"));
                for pods in items(&object["spec"]["podCIDRs"]) {
                    if let Some(default_gateway) = pods
                        .as_str()
                        .and_then(|net| net.parse::<IpNet>().ok())
                        .and_then(|net| net.hosts().next())
                    {
                        self.add_address(&default_gateway.to_string(), || {
                            format!("pods' default gateway on node {name}")
                        });
                    }
                }
            }
            Some("Pod") => {
                for ip in items(&object["status"]["podIPs"]) {
                    self.add_address(&text(&ip["ip"]), || format!("pod {name}"));
                }
                for container in items(&object["spec"]["containers"]) {
                    for port in items(&container["ports"]) {
                        self.add_port(&port["containerPort"]);
                        self.add_port(&port["hostPort"]);
                    }
                }
            }
            Some("Service") => {
                let addresses = items(&object["spec"]["clusterIPs"]).into_iter();
                let balancers = items(&object["status"]["loadBalancer"]["ingress"])
                    .into_iter()
                    .map(|at| at["ip"].clone());
                for ip in addresses.chain(balancers).chain(items(&object["spec"]["externalIPs"])) {
                    self.add_address(&text(&ip), || format!("Service {name}"));
                }
                for port in items(&object["spec"]["ports"]) {
                    self.add_port(&port["port"]);
                    self.add_port(&port["nodePort"]);
                }
            }
            Some("EndpointSlice") => {
                for endpoint in items(&object["endpoints"]) {
                    for ip in items(&endpoint["addresses"]) {
                        self.add_address(&text(&ip), || format!("an endpoint of EndpointSlice {name}"));
                    }
                }
                for port in items(&object["ports"]) {
                    self.add_port(&port["port"]);
                }
            }
            _ => {}
        }
    }
}

impl Lab {
    /// The sockets that accept a TCP connection from `from`.
    ///
    /// # Errors
    /// When `lab-probe` cannot be run.
    pub async fn scan(
        &self,
        from: &TrafficClient,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        self.scan_with("scan", from, sockets).await
    }

    /// The sockets that answer a UDP datagram from `from`.
    ///
    /// # Errors
    /// When `lab-probe` cannot be run.
    pub async fn scan_udp(
        &self,
        from: &TrafficClient,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        self.scan_with("scan-udp", from, sockets).await
    }

    /// Scans these sockets until none accepts a TCP connection.
    ///
    /// # Errors
    /// When a socket still accepts connections after 90 s. The error names it.
    pub async fn wait_for_closed_sockets(&self, from: &TrafficClient, sockets: &BTreeSet<SocketAddr>) -> Result<()> {
        self.wait_for_scan_result(from, sockets, &BTreeSet::new()).await
    }

    /// Scans these sockets until each accepts a TCP connection.
    ///
    /// # Errors
    /// When a socket accepts no connection within 90 s. The error names the sockets that accept one.
    pub async fn wait_for_open_sockets(&self, from: &TrafficClient, sockets: &BTreeSet<SocketAddr>) -> Result<()> {
        self.wait_for_scan_result(from, sockets, sockets).await
    }

    async fn wait_for_scan_result(
        &self,
        from: &TrafficClient,
        sockets: &BTreeSet<SocketAddr>,
        want: &BTreeSet<SocketAddr>,
    ) -> Result<()> {
        let what = format!("{} of {sockets:?} to answer {from}", want.len());
        wait_until(what, Duration::from_secs(90), async || {
            let open = self.scan(from, sockets.iter().copied()).await;
            match open.map_err(|error| error.to_string())? {
                open if open == *want => Ok(()),
                open => Err(format!("{open:?} answers")),
            }
        })
        .await
    }

    async fn scan_with(
        &self,
        subcommand: &str,
        from: &TrafficClient,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        let (program, list) = self.prepare_scan(sockets)?;
        let output = self
            .run_at(from, &[&program, subcommand, &list.path().display().to_string()])
            .await?;
        if !output.status.success() {
            return Err(Error::Other(format!("the scan from {from}: {}", output.stderr)));
        }
        let parsed = output
            .stdout
            .lines()
            .map(str::parse)
            .collect::<std::result::Result<_, _>>();
        parsed.map_err(|error| Error::Other(format!("the scan from {from} printed {}: {error}", output.stdout)))
    }

    /// Starts a scan of these sockets over TCP that repeats until the returned value is dropped.
    ///
    /// # Errors
    /// When `lab-probe` cannot be started.
    pub fn scan_repeatedly(
        &self,
        from: &TrafficClient,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<RepeatedScan> {
        let (program, list) = self.prepare_scan(sockets)?;
        let file = list.path().display().to_string();
        let running = self.spawn_at(from, "scan", [&program, "scan-on", &file])?;
        Ok(RepeatedScan { running, _list: list })
    }

    /// Sends a datagram to a UDP echo server every 10 ms, until the returned value is dropped.
    ///
    /// # Errors
    /// When `lab-probe` cannot be started.
    pub fn watch_udp(&self, from: &TrafficClient, socket: SocketAddr) -> Result<EchoWatch> {
        self.watch("udp-watch", from, socket)
    }

    /// Sends lines to a TCP echo server over one connection, until the returned value is dropped. The probe ends if this
    /// connection cannot be opened. There is no timeout for an echo: the probe waits as long as the connection exists.
    ///
    /// # Errors
    /// When `lab-probe` cannot be started.
    pub fn watch_stream(&self, from: &TrafficClient, socket: SocketAddr) -> Result<EchoWatch> {
        self.watch("stream-watch", from, socket)
    }

    /// Opens a new TCP connection every 20 ms, until the returned value is dropped.
    ///
    /// # Errors
    /// When `lab-probe` cannot be started.
    pub fn watch_connections(&self, from: &TrafficClient, socket: SocketAddr) -> Result<ConnectionWatch> {
        self.watch("connect-watch", from, socket)
            .map(|EchoWatch(running)| ConnectionWatch(running))
    }

    fn watch(&self, subcommand: &str, from: &TrafficClient, socket: SocketAddr) -> Result<EchoWatch> {
        let program = self.probe_program()?;
        let log = format!("{subcommand}-{}", socket.port());
        let words = [&*program, subcommand, &socket.to_string()];
        self.spawn_at(from, &log, words).map(EchoWatch)
    }

    fn spawn_at(&self, from: &TrafficClient, log: &str, words: [&str; 3]) -> Result<Running> {
        // Two probes of one kind may run at the same time, and each needs its own log.
        let log = format!("{log}-{}", SPAWNED.fetch_add(1, Ordering::Relaxed));
        match from {
            TrafficClient::Pod(pod) => self.node(&pod.node).pod_spawn(&format!("{log}-pod"), pod.ip, words),
            TrafficClient::Host(node) => self.node(node).spawn(&format!("{log}-host"), words),
        }
    }

    /// Writes these sockets to a file. Returns the paths of `lab-probe` and of the file, both valid on every node.
    fn prepare_scan(&self, sockets: impl IntoIterator<Item = SocketAddr>) -> Result<(String, NamedTempFile)> {
        let list = NamedTempFile::new_in(self.directory()).map_err(Error::io("make a list to scan"))?;
        let text: String = sockets.into_iter().map(|socket| format!("{socket}\n")).collect();
        std::fs::write(list.path(), text).map_err(Error::io("write a list to scan"))?;
        Ok((self.probe_program()?, list))
    }

    /// Copies `lab-probe` to a path that is valid on every node, and returns the path.
    ///
    /// # Errors
    /// When `lab-probe` cannot be copied.
    pub fn probe_program(&self) -> Result<String> {
        let program = self.directory().join("scanner");
        if !program.exists() {
            std::fs::copy(run::workspace_program("lab-probe")?, &program).map_err(Error::io("copy lab-probe"))?;
        }
        Ok(program.display().to_string())
    }
}

/// A scan that repeats until it is dropped.
#[derive(Debug)]
pub struct RepeatedScan {
    running: Running,
    _list: NamedTempFile,
}

impl RepeatedScan {
    /// Every socket that has accepted a connection since the scan began.
    #[must_use]
    pub fn opened(&self) -> BTreeSet<SocketAddr> {
        let log = self.running.log();
        let opened = log.lines().filter_map(|line| line.strip_prefix("open "));
        opened.filter_map(|socket| socket.parse().ok()).collect()
    }

    /// Waits until the scan has tried every socket again.
    ///
    /// # Errors
    /// After 90 s.
    pub async fn wait_for_another_round(&self) -> Result<()> {
        let rounds = || {
            self.running
                .log()
                .lines()
                .filter(|line| line.starts_with("round "))
                .count()
        };
        let before = rounds();
        // Wait for two rounds, because the current round has already tried some of the sockets.
        wait_until(
            "another round of the scan",
            Duration::from_secs(90),
            async || match rounds() {
                now if now >= before + 2 => Ok(()),
                now => Err(format!("round {now}, from {before}")),
            },
        )
        .await
    }
}

/// A background probe of an echo server.
#[derive(Debug)]
pub struct EchoWatch(Running);

impl EchoWatch {
    /// The times of the echoes, in milliseconds since 1970.
    #[must_use]
    pub fn echo_times(&self) -> Vec<u128> {
        self.0.log().lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Waits for the first echo after `time`, and returns its time.
    ///
    /// # Errors
    /// When there is no echo within 90 s. The error quotes the last line that the probe printed.
    pub async fn wait_for_echo_after(&self, time: u128) -> Result<u128> {
        wait_until("an echo", Duration::from_secs(90), async || {
            let log = self.0.log();
            let later = log.lines().filter_map(|line| line.parse().ok()).find(|at| *at > time);
            later.ok_or_else(|| format!("no echo; the probe's last line: {:?}", log.lines().last()))
        })
        .await
    }

    /// Waits until there was no echo for `silence`. Returns the time of the last echo, if any, in milliseconds since
    /// 1970.
    ///
    /// # Errors
    /// When echoes still arrive after 90 s.
    pub async fn wait_for_silence(&self, silence: Duration) -> Result<Option<u128>> {
        let (mut last, mut since) = (None, Instant::now());
        wait_until("the echoes to stop", Duration::from_secs(90), async || {
            let now = self.echo_times().pop();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() >= silence {
                Ok(last)
            } else {
                Err(format!("last echo at {last:?}"))
            }
        })
        .await
    }
}

/// A background probe that opens a new TCP connection every 20 ms, also while earlier attempts wait.
#[derive(Debug)]
pub struct ConnectionWatch(Running);

impl ConnectionWatch {
    /// For each finished attempt, the time when it began and the time when the connection was established, in
    /// milliseconds since 1970. `None` = failed, or not established within three seconds.
    #[must_use]
    pub fn attempts(&self) -> Vec<(u128, Option<u128>)> {
        let log = self.0.log();
        let parsed = log.lines().filter_map(|line| {
            let (began, opened) = line.split_once(' ')?;
            Some((began.parse().ok()?, opened.parse().ok()))
        });
        let mut attempts: Vec<_> = parsed.collect();
        attempts.sort_unstable();
        attempts
    }
}
