//! Everything that a cluster answers at, and which of it a pod or a node of another one finds.

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

/// Ports of the control plane, the kubelet, kube-proxy, the agent and SSH, whether anything listens there or not.
pub const INFRASTRUCTURE: [u16; 11] = [22, 2379, 2380, 6443, 9587, 10249, 10250, 10255, 10256, 10257, 10259];

/// How many programs of this module were left running so far.
static SPAWNED: AtomicUsize = AtomicUsize::new(0);

impl Cluster<'_> {
    /// Every address of it with every port that is open anywhere in it, and what each address is: nodes (their own
    /// addresses, their pods' gateway, their WireGuard address), pods, Services, load balancers, the API server.
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
        let mut found = Found::default();
        found.address(&self.plan().api_address().to_string(), || "the API server".to_owned());
        found.ports.extend(INFRASTRUCTURE);
        for object in list["items"].as_array().into_iter().flatten() {
            found.take(object);
        }
        let Found { addresses, ports } = found;
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
struct Found {
    addresses: BTreeMap<IpAddr, String>,
    ports: BTreeSet<u16>,
}

impl Found {
    fn address(&mut self, text: &str, what: impl FnOnce() -> String) {
        if let Ok(ip) = text.parse() {
            self.addresses.entry(ip).or_insert_with(what);
        }
    }

    fn port(&mut self, value: &Value) {
        self.ports.extend(
            value
                .as_u64()
                .and_then(|port| u16::try_from(port).ok())
                .filter(|port| *port > 0),
        );
    }

    fn take(&mut self, object: &Value) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let all = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match object["kind"].as_str() {
            Some("Node") => {
                for address in all(&object["status"]["addresses"]) {
                    self.address(&text(&address["address"]), || format!("node {name}"));
                }
                let annotations = &object["metadata"]["annotations"];
                let wireguard = text(&annotations["kilo.squat.ai/wireguard-ip"]);
                let wireguard = wireguard.split('/').next().unwrap_or_default();
                self.address(wireguard, || format!("WireGuard of node {name}"));
                for pods in all(&object["spec"]["podCIDRs"]) {
                    if let Some(gateway) = pods
                        .as_str()
                        .and_then(|net| net.parse::<IpNet>().ok())
                        .and_then(|net| net.hosts().next())
                    {
                        self.address(&gateway.to_string(), || format!("pods' gateway on node {name}"));
                    }
                }
            }
            Some("Pod") => {
                for ip in all(&object["status"]["podIPs"]) {
                    self.address(&text(&ip["ip"]), || format!("pod {name}"));
                }
                for container in all(&object["spec"]["containers"]) {
                    for port in all(&container["ports"]) {
                        self.port(&port["containerPort"]);
                        self.port(&port["hostPort"]);
                    }
                }
            }
            Some("Service") => {
                let addresses = all(&object["spec"]["clusterIPs"]).into_iter();
                let balancers = all(&object["status"]["loadBalancer"]["ingress"])
                    .into_iter()
                    .map(|at| at["ip"].clone());
                for ip in addresses.chain(balancers).chain(all(&object["spec"]["externalIPs"])) {
                    self.address(&text(&ip), || format!("Service {name}"));
                }
                for port in all(&object["spec"]["ports"]) {
                    self.port(&port["port"]);
                    self.port(&port["nodePort"]);
                }
            }
            Some("EndpointSlice") => {
                for endpoint in all(&object["endpoints"]) {
                    for ip in all(&endpoint["addresses"]) {
                        self.address(&text(&ip), || format!("an endpoint of EndpointSlice {name}"));
                    }
                }
                for port in all(&object["ports"]) {
                    self.port(&port["port"]);
                }
            }
            _ => {}
        }
    }
}

impl Lab {
    /// Those of the sockets that take a TCP connection from there.
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

    /// Those of the sockets that answer a datagram from there.
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

    /// Scans these until none takes a TCP connection any more.
    ///
    /// # Errors
    /// When one still does after a minute and a half, naming it.
    pub async fn until_closed(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>) -> Result<()> {
        self.until(from, sockets, &BTreeSet::new()).await
    }

    /// Scans these until each of them takes a TCP connection.
    ///
    /// # Errors
    /// When one does not after a minute and a half, naming those that do.
    pub async fn until_open(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>) -> Result<()> {
        self.until(from, sockets, sockets).await
    }

    async fn until(&self, from: &Asker, sockets: &BTreeSet<SocketAddr>, want: &BTreeSet<SocketAddr>) -> Result<()> {
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
        let (program, list) = self.scanner(sockets)?;
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

    /// Scans these from there, TCP, again and again, until what is returned is dropped.
    ///
    /// # Errors
    /// When the scanner cannot be started.
    pub fn scan_on(&self, from: &Asker, sockets: impl IntoIterator<Item = SocketAddr>) -> Result<Watch> {
        let (program, list) = self.scanner(sockets)?;
        let file = list.path().display().to_string();
        let running = self.spawn_at(from, "scan", [&program, "scan-on", &file])?;
        Ok(Watch { running, _list: list })
    }

    /// Asks a UDP echo from there every 10 ms, until what is returned is dropped.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn watch_udp(&self, from: &Asker, socket: SocketAddr) -> Result<Echo> {
        self.watch("udp-watch", from, socket)
    }

    /// Asks a TCP echo from there over one connection, which is waited for as long as the kernel does, until what is returned is
    /// dropped.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn watch_stream(&self, from: &Asker, socket: SocketAddr) -> Result<Echo> {
        self.watch("stream-watch", from, socket)
    }

    /// Opens a new TCP connection from there every 20 ms, until what is returned is dropped.
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
        // Two of a kind at once have a log each.
        let log = format!("{log}-{}", SPAWNED.fetch_add(1, Ordering::Relaxed));
        match from {
            Asker::Pod(web) => self.node(&web.node).pod_spawn(&format!("{log}-pod"), web.ip, words),
            Asker::Host(node) => self.node(node).spawn(&format!("{log}-host"), words),
        }
    }

    /// The scanner, and a list for it, where every node finds them.
    fn scanner(&self, sockets: impl IntoIterator<Item = SocketAddr>) -> Result<(String, NamedTempFile)> {
        let list = NamedTempFile::new_in(self.directory()).map_err(Error::io("make a list to scan"))?;
        let text: String = sockets.into_iter().map(|socket| format!("{socket}\n")).collect();
        std::fs::write(list.path(), text).map_err(Error::io("write a list to scan"))?;
        Ok((self.prober()?, list))
    }

    /// The lab's own servers and clients as one program, where every node finds it.
    ///
    /// # Errors
    /// When it cannot be put there.
    pub fn prober(&self) -> Result<String> {
        let program = self.directory().join("scanner");
        if !program.exists() {
            std::fs::copy(run::our_program("lab-probe")?, &program).map_err(Error::io("copy the scanner"))?;
        }
        Ok(program.display().to_string())
    }
}

/// A scan that goes on.
#[derive(Debug)]
pub struct Watch {
    running: Running,
    _list: NamedTempFile,
}

impl Watch {
    /// Whatever took a connection since it began.
    #[must_use]
    pub fn opened(&self) -> BTreeSet<SocketAddr> {
        let log = self.running.log();
        let opened = log.lines().filter_map(|line| line.strip_prefix("open "));
        opened.filter_map(|socket| socket.parse().ok()).collect()
    }

    /// Waits until every socket was asked once more from now on.
    ///
    /// # Errors
    /// When that takes more than a minute and a half.
    pub async fn another_round(&self) -> Result<()> {
        let rounds = || {
            self.running
                .log()
                .lines()
                .filter(|line| line.starts_with("round "))
                .count()
        };
        let before = rounds();
        // The one that is under way has asked some of them before.
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

/// An echo that is asked without a pause.
#[derive(Debug)]
pub struct Echo(Running);

impl Echo {
    /// When it answered, in milliseconds since 1970.
    #[must_use]
    pub fn answers(&self) -> Vec<u128> {
        self.0.log().lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Waits for the first answer after that time, and returns when it came.
    ///
    /// # Errors
    /// When there is none within a minute and a half.
    pub async fn answered_after(&self, time: u128) -> Result<u128> {
        wait_until("an answer", Duration::from_secs(90), async || {
            let later = self.answers().into_iter().find(|at| *at > time);
            later.ok_or_else(|| "silence".to_owned())
        })
        .await
    }

    /// Waits until nothing has come for so long, and returns when the last answer came, if there was any, in milliseconds since
    /// 1970.
    ///
    /// # Errors
    /// When it goes on answering for a minute and a half.
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

/// TCP connections that are opened one after the other.
#[derive(Debug)]
pub struct Connections(Running);

impl Connections {
    /// When each began and when it was open, in milliseconds since 1970, as far as that is known; `None` = not within three seconds.
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
