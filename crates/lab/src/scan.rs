//! Lists every address and port of a cluster, and scans which of them a pod or node of another cluster reaches.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::{Asker, Cluster, Error, Lab, Result, Running, run, wait_until};

/// Ports of the control plane, the kubelet, kube-proxy, the agent and SSH. A scan tries them also where nothing
/// listens.
pub const INFRASTRUCTURE: [u16; 11] = [22, 2379, 2380, 6443, 9587, 10249, 10250, 10255, 10256, 10257, 10259];

/// Number of background probes started so far; makes the names of their logs unique.
static SPAWNED: AtomicUsize = AtomicUsize::new(0);

impl Cluster<'_> {
    /// All addresses of the cluster, each with every port that is open anywhere in the cluster, and what each address
    /// belongs to: nodes (their own addresses, the gateway of their pods, their WireGuard address), pods, Services,
    /// load balancers, the API server.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn sockets(&self) -> Result<BTreeMap<SocketAddr, String>> {
        let kinds = ["nodes", "pods", "services", "endpointslices"];
        let list = self
            .kubectl(["get", &kinds.join(","), "-A", "-o", "json"])
            .await?
            .stdout;
        let list: Value =
            serde_json::from_str(&list).map_err(|error| Error::Plan(format!("what kubectl get printed: {error}")))?;
        let mut found = SocketInventory::default();
        found.add_address(&self.plan().api_address().to_string(), || "the API server".to_owned());
        found.ports.extend(INFRASTRUCTURE);
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
        let all = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match object["kind"].as_str() {
            Some("Node") => {
                for address in all(&object["status"]["addresses"]) {
                    self.add_address(&text(&address["address"]), || format!("node {name}"));
                }
                let annotations = &object["metadata"]["annotations"];
                let wireguard = text(&annotations["kilo.squat.ai/wireguard-ip"]);
                let wireguard = wireguard.split('/').next().unwrap_or_default();
                self.add_address(wireguard, || format!("WireGuard of node {name}"));
                for pods in all(&object["spec"]["podCIDRs"]) {
                    if let Some(gateway) = pods
                        .as_str()
                        .and_then(|net| net.parse::<IpNet>().ok())
                        .and_then(|net| net.hosts().next())
                    {
                        self.add_address(&gateway.to_string(), || format!("pods' gateway on node {name}"));
                    }
                }
            }
            Some("Pod") => {
                for ip in all(&object["status"]["podIPs"]) {
                    self.add_address(&text(&ip["ip"]), || format!("pod {name}"));
                }
                for container in all(&object["spec"]["containers"]) {
                    for port in all(&container["ports"]) {
                        self.add_port(&port["containerPort"]);
                        self.add_port(&port["hostPort"]);
                    }
                }
            }
            Some("Service") => {
                let addresses = all(&object["spec"]["clusterIPs"]).into_iter();
                let balancers = all(&object["status"]["loadBalancer"]["ingress"])
                    .into_iter()
                    .map(|at| at["ip"].clone());
                for ip in addresses.chain(balancers).chain(all(&object["spec"]["externalIPs"])) {
                    self.add_address(&text(&ip), || format!("Service {name}"));
                }
                for port in all(&object["spec"]["ports"]) {
                    self.add_port(&port["port"]);
                    self.add_port(&port["nodePort"]);
                }
            }
            Some("EndpointSlice") => {
                for endpoint in all(&object["endpoints"]) {
                    for ip in all(&endpoint["addresses"]) {
                        self.add_address(&text(&ip), || format!("an endpoint of EndpointSlice {name}"));
                    }
                }
                for port in all(&object["ports"]) {
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
    /// When the scanner cannot be run.
    pub async fn scan(
        &self,
        from: &Asker,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        self.scan_with("scan", from, sockets).await
    }

    /// The sockets that answer a UDP datagram from `from`.
    ///
    /// # Errors
    /// When the scanner cannot be run.
    pub async fn scan_udp(
        &self,
        from: &Asker,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        self.scan_with("scan-udp", from, sockets).await
    }

    /// Scans these sockets until none accepts a TCP connection.
    ///
    /// # Errors
    /// When one still does after 90 s; the error names it.
    pub async fn until_closed(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>) -> Result<()> {
        self.wait_for_open(from, sockets, &BTreeSet::new()).await
    }

    /// Scans these sockets until each accepts a TCP connection.
    ///
    /// # Errors
    /// When one does not after 90 s; the error names those that do.
    pub async fn until_open(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>) -> Result<()> {
        self.wait_for_open(from, sockets, sockets).await
    }

    async fn wait_for_open(
        &self,
        from: &Asker,
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
        how: &str,
        from: &Asker,
        sockets: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        let (program, list) = self.prepare_scan(sockets)?;
        let output = self
            .run_at(from, &[&program, how, &list.path().display().to_string()])
            .await?;
        if !output.status.success() {
            return Err(Error::Plan(format!("the scan from {from}: {}", output.stderr)));
        }
        let parsed = output
            .stdout
            .lines()
            .map(str::parse)
            .collect::<std::result::Result<_, _>>();
        parsed.map_err(|error| Error::Plan(format!("the scan from {from} printed {}: {error}", output.stdout)))
    }

    /// Starts a scan of these sockets over TCP that repeats until the returned value is dropped.
    ///
    /// # Errors
    /// When the scanner cannot be started.
    pub fn scan_on(&self, from: &Asker, sockets: impl IntoIterator<Item = SocketAddr>) -> Result<Watch> {
        let (program, list) = self.prepare_scan(sockets)?;
        let file = list.path().display().to_string();
        let running = self.spawn_at(from, "scan", [&program, "scan-on", &file])?;
        Ok(Watch { running, _list: list })
    }

    /// Sends a datagram to a UDP echo server every 10 ms, until the returned value is dropped.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn watch_udp(&self, from: &Asker, socket: SocketAddr) -> Result<Echo> {
        self.watch("udp-watch", from, socket)
    }

    /// Sends lines to a TCP echo server over one connection, until the returned value is dropped. It waits for an echo as long
    /// as the kernel keeps the connection.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn watch_stream(&self, from: &Asker, socket: SocketAddr) -> Result<Echo> {
        self.watch("stream-watch", from, socket)
    }

    /// Opens a new TCP connection every 20 ms, until the returned value is dropped.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn watch_connections(&self, from: &Asker, socket: SocketAddr) -> Result<Connections> {
        self.watch("connect-watch", from, socket)
            .map(|Echo(running)| Connections(running))
    }

    fn watch(&self, how: &str, from: &Asker, socket: SocketAddr) -> Result<Echo> {
        let program = self.prober()?;
        let log = format!("{how}-{}", socket.port());
        let words = [&*program, how, &socket.to_string()];
        self.spawn_at(from, &log, words).map(Echo)
    }

    fn spawn_at(&self, from: &Asker, log: &str, words: [&str; 3]) -> Result<Running> {
        // Two probes of one kind may run at once; each needs its own log.
        let log = format!("{log}-{}", SPAWNED.fetch_add(1, Ordering::Relaxed));
        match from {
            Asker::Pod(web) => self.node(&web.node).pod_spawn(&format!("{log}-pod"), web.ip, words),
            Asker::Host(node) => self.node(node).spawn(&format!("{log}-host"), words),
        }
    }

    /// The probe program, and a file with these sockets, at paths that exist on every node.
    fn prepare_scan(&self, sockets: impl IntoIterator<Item = SocketAddr>) -> Result<(String, NamedTempFile)> {
        let list = NamedTempFile::new_in(self.directory()).map_err(Error::io("make a list to scan"))?;
        let text: String = sockets.into_iter().map(|socket| format!("{socket}\n")).collect();
        std::fs::write(list.path(), text).map_err(Error::io("write a list to scan"))?;
        Ok((self.prober()?, list))
    }

    /// Path of `lab-probe`, copied to where every node sees it.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn prober(&self) -> Result<String> {
        let program = self.directory().join("scanner");
        if !program.exists() {
            std::fs::copy(run::our_program("lab-probe")?, &program).map_err(Error::io("copy the scanner"))?;
        }
        Ok(program.display().to_string())
    }
}

/// A scan that repeats until it is dropped.
#[derive(Debug)]
pub struct Watch {
    running: Running,
    _list: NamedTempFile,
}

impl Watch {
    /// Every socket that accepted a connection since the scan began.
    #[must_use]
    pub fn opened(&self) -> BTreeSet<SocketAddr> {
        let log = self.running.log();
        let opened = log.lines().filter_map(|line| line.strip_prefix("open "));
        opened.filter_map(|socket| socket.parse().ok()).collect()
    }

    /// Waits until the scan has tried every socket once more.
    ///
    /// # Errors
    /// When that takes more than 90 s.
    pub async fn another_round(&self) -> Result<()> {
        let rounds = || {
            self.running
                .log()
                .lines()
                .filter(|line| line.starts_with("round "))
                .count()
        };
        let before = rounds();
        // Wait for two rounds: the current one has already tried some of the sockets.
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

/// An echo server that is probed continuously.
#[derive(Debug)]
pub struct Echo(Running);

impl Echo {
    /// Times of its echoes, in milliseconds since 1970.
    #[must_use]
    pub fn answers(&self) -> Vec<u128> {
        self.0.log().lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Waits for the first echo after `time`, and returns when it came.
    ///
    /// # Errors
    /// When there is none within 90 s.
    pub async fn answered_after(&self, time: u128) -> Result<u128> {
        wait_until("an answer", Duration::from_secs(90), async || {
            let later = self.answers().into_iter().find(|at| *at > time);
            later.ok_or_else(|| "silence".to_owned())
        })
        .await
    }

    /// Waits until no echo has come for `silence`. Returns when the last one came, in milliseconds since 1970, if any
    /// did.
    ///
    /// # Errors
    /// When echoes still come after 90 s.
    pub async fn silent_for(&self, silence: Duration) -> Result<Option<u128>> {
        let (mut last, mut since) = (None, Instant::now());
        wait_until("silence", Duration::from_secs(90), async || {
            let now = self.answers().pop();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() >= silence {
                Ok(last)
            } else {
                Err(format!("an answer at {last:?}"))
            }
        })
        .await
    }
}

/// TCP connections that are opened one after another.
#[derive(Debug)]
pub struct Connections(Running);

impl Connections {
    /// When each attempt began and when its connection was established, in milliseconds since 1970, as far as known.
    /// `None` = not within three seconds.
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
