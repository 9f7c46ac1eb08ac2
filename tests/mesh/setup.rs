//! Sets up a mesh of two whole clusters, and contains the requests and checks that the tests share. The
//! product is installed from `deploy/` as a user does; the lab's `product.rs` lists the differences.

pub(crate) mod state;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clustermesh_lab::{
    Answer, Captured, Cluster, ClusterPlan, Lab, LabPlan, Product, RunningPod, TrafficClient, Tunnel, wait_until,
};
pub(crate) use clustermesh_tests::kubeconfig::merged_kubeconfig;
use serde_json::Value;

/// The hub's name.
pub(crate) const HUB: &str = "mgmt";
/// The member's name.
pub(crate) const MEMBER: &str = "tenant-a";
/// The longest wait on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);
/// Mirrors the hub's web servers in the member under the name `hub-web`.
const EGRESS: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";

/// Starts two clusters of two nodes each.
pub(crate) async fn two_clusters() -> Lab {
    let start = Instant::now();
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (MEMBER, 2)])).await.unwrap();
    println!("two clusters: {:.1} s", start.elapsed().as_secs_f64());
    lab
}

/// A Ready mesh of two clusters, with a web server on each node.
pub(crate) struct Mesh<'a> {
    pub(crate) lab: &'a Lab,
    pub(crate) product: Product<'a>,
    pub(crate) hub: Cluster<'a>,
    pub(crate) member: Cluster<'a>,
    pub(crate) hub_webs: Vec<RunningPod>,
    pub(crate) member_webs: Vec<RunningPod>,
    /// The WireGuard address of every node.
    pub(crate) wireguard: BTreeMap<String, IpAddr>,
}

impl<'a> Mesh<'a> {
    /// Installs the product, applies the mesh and waits until it is Ready. Adds `extra_networks` to the hub's
    /// allowedNetworks.
    pub(crate) async fn up(lab: &'a Lab, extra_networks: &[String]) -> Self {
        let start = Instant::now();
        let (hub, member) = (lab.cluster(HUB), lab.cluster(MEMBER));
        let product = Product::install(lab, &[HUB, MEMBER], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        let (hub_webs, member_webs) = (hub.run_web().await.unwrap(), member.run_web().await.unwrap());
        println!("installed: {:.1} s", start.elapsed().as_secs_f64());
        let start = Instant::now();
        let service_cidr = hub.plan().service_cidr.to_string();
        let with_extra = format!(
            "{service_cidr}{}",
            extra_networks.iter().map(|net| format!(", {net}")).collect::<String>()
        );
        // The hub's Service CIDR occurs only in its allowedNetworks.
        let mesh = product
            .mesh(&[(MEMBER, EGRESS)])
            .replacen(&service_cidr, &with_extra, 1);
        product.mesh_up(&mesh).await.unwrap();
        println!("Ready: {:.1} s after kubectl apply", start.elapsed().as_secs_f64());
        let mut wireguard = BTreeMap::new();
        for cluster in [&hub, &member] {
            for node in cluster.nodes() {
                wireguard.insert(node.name().to_owned(), self::wireguard(cluster, node.name()).await);
            }
        }
        let mesh = Self {
            lab,
            product,
            hub,
            member,
            hub_webs,
            member_webs,
            wireguard,
        };
        let start = Instant::now();
        let url = url(mesh.hub_webs[0].ip, 8080);
        mesh.wait_for_answer(&pod(&mesh.member_webs[0]), &url).await;
        println!("first reply: {:.2} s after Ready", start.elapsed().as_secs_f64());
        mesh
    }

    /// Repeats a request until it is answered.
    pub(crate) async fn wait_for_answer(&self, from: &TrafficClient, url: &str) -> Answer {
        self.lab.http_get_until_answered(from, url).await.unwrap()
    }

    /// See [`assert_answers`].
    pub(crate) async fn assert_answers(&self, from: &TrafficClient, url: &str, want: &[Answer]) {
        assert_answers(self.lab, from, url, want).await;
    }

    /// Sends one request that must fail without any HTTP answer. Returns the error of curl.
    pub(crate) async fn assert_closed(&self, from: &TrafficClient, url: &str) -> String {
        let output = self.lab.run_at(from, &["curl", "-sSk", "-m", "3", url]).await.unwrap();
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{from} reached {url}: {}",
            output.stdout
        );
        output.stderr.trim().to_owned()
    }

    /// The HTTP status of a response: see [`curl`].
    pub(crate) async fn status(&self, from: &TrafficClient, url: &str) -> String {
        curl(self.lab, from, &["-o", "/dev/null", "-w", "%{http_code}", url]).await
    }

    /// See [`expected_answer`].
    pub(crate) fn expected_answer(&self, by: &RunningPod, client_ip: IpAddr) -> Answer {
        expected_answer(by, client_ip)
    }

    /// The node that is the anchor of a cluster's Service network in the Peers of `observer`.
    pub(crate) async fn anchor(&self, of: &Cluster<'_>, observer: &Cluster<'_>) -> String {
        self.anchor_of(&of.plan().service_cidr.to_string(), observer).await
    }

    /// The node that is the anchor of `network` in the Peers of `observer`.
    pub(crate) async fn anchor_of(&self, network: &str, observer: &Cluster<'_>) -> String {
        let anchors = anchors_of(network, observer).await;
        let [anchor] = &anchors[..] else {
            panic!("{network} must have exactly one anchor: {anchors:?}");
        };
        anchor.clone()
    }

    /// Path of the program `lab-probe`, copied to where every node finds it.
    pub(crate) fn probe(&self) -> String {
        let path: PathBuf = self.lab.directory().join("mesh-probe");
        if !path.exists() {
            std::fs::copy(clustermesh_lab::workspace_program("lab-probe").unwrap(), &path).unwrap();
        }
        path.display().to_string()
    }

    /// Captured packets that are not WireGuard packets, between the clusters or with any WireGuard address. This ignores ICMP
    /// errors from closed UDP ports, and the controller's connections to the member's API server, which use the underlay.
    pub(crate) async fn unencrypted(&self, captured: &Captured) -> Vec<String> {
        let api = self.member.plan().api_address();
        let refused = "(icmp[icmptype] == icmp-unreach and icmp[icmpcode] == 3)";
        let filter = format!(
            "not udp port 51820 and not {refused} and not (host {api} and net {underlay}) \
             and ({between} or net {hub} or net {member})",
            underlay = self.hub.plan().underlay,
            between = between(self.hub.plan(), self.member.plan()),
            hub = self.hub.plan().wireguard_cidr,
            member = self.member.plan().wireguard_cidr,
        );
        first(captured.packets(&filter).await.unwrap())
    }

    /// Captured IPv6 packets between two dual-stack clusters. All of them are unencrypted if the tunnel's outer packets are IPv4.
    pub(crate) async fn v6_between_clusters(&self, captured: &Captured) -> Vec<String> {
        first(captured.packets(&self.between_v6()).await.unwrap())
    }

    /// Captured IPv6 packets that are not WireGuard packets, for a tunnel whose outer packets are IPv6.
    pub(crate) async fn unencrypted_v6(&self, captured: &Captured) -> Vec<String> {
        let filter = format!("not udp port 51820 and {}", self.between_v6());
        first(captured.packets(&filter).await.unwrap())
    }

    fn between_v6(&self) -> String {
        let nets = |direction: &str, plan: &ClusterPlan| {
            let v6 = plan.v6.as_ref().expect("a dual-stack cluster");
            let nets = [v6.pod_cidr, v6.service_cidr, v6.underlay];
            format!("({})", nets.map(|net| format!("{direction} net {net}")).join(" or "))
        };
        let (hub, member) = (self.hub.plan(), self.member.plan());
        format!(
            "(({} and {}) or ({} and {}))",
            nets("src", hub),
            nets("dst", member),
            nets("src", member),
            nets("dst", hub)
        )
    }

    /// Captured packets from a pod address or a WireGuard address to the other cluster that are not WireGuard packets.
    pub(crate) async fn unencrypted_from_published(&self, captured: &Captured) -> Vec<String> {
        let (hub, member) = (self.hub.plan(), self.member.plan());
        let published =
            [hub, member].map(|plan| format!("src net {} or src net {}", plan.pod_cidr, plan.wireguard_cidr));
        let filter = format!(
            "not udp port 51820 and ({}) and {}",
            published.join(" or "),
            between(hub, member)
        );
        first(captured.packets(&filter).await.unwrap())
    }

    /// Number of captured WireGuard packets between the clusters.
    pub(crate) async fn count_wireguard_packets(&self, captured: &Captured) -> usize {
        let between = between(self.hub.plan(), self.member.plan());
        let filter = format!("udp port 51820 and {between}");
        captured.packets(&filter).await.unwrap().len()
    }
}

/// A tcpdump filter for packets between any network of one cluster and any network of the other, in both directions.
fn between(one: &ClusterPlan, other: &ClusterPlan) -> String {
    let nets = |direction: &str, plan: &ClusterPlan| {
        let nets = [
            plan.pod_cidr.into(),
            plan.service_cidr.into(),
            plan.wireguard_cidr,
            plan.underlay.into(),
        ];
        format!("({})", nets.map(|net| format!("{direction} net {net}")).join(" or "))
    };
    format!(
        "(({} and {}) or ({} and {}))",
        nets("src", one),
        nets("dst", other),
        nets("src", other),
        nets("dst", one)
    )
}

/// The first 20 packets, which are enough for a failure message.
fn first(mut packets: Vec<String>) -> Vec<String> {
    packets.truncate(20);
    packets
}

/// A pod as a client.
pub(crate) fn pod(web: &RunningPod) -> TrafficClient {
    TrafficClient::Pod(web.clone())
}

/// A node as a client.
pub(crate) fn host(node: &str) -> TrafficClient {
    TrafficClient::Host(node.to_owned())
}

/// `http://ADDRESS:PORT`.
pub(crate) fn url(address: impl std::fmt::Display, port: u16) -> String {
    format!("http://{address}:{port}")
}

/// The output of curl with these arguments, which is repeated until there is a response. Certificates are not verified.
pub(crate) async fn curl(lab: &Lab, from: &TrafficClient, args: &[&str]) -> String {
    let words = [&["curl", "-sSk", "-m", "30"], args].concat();
    wait_until(format!("a response to {from}: {words:?}"), PATIENCE, async || {
        let output = lab.run_at(from, &words).await.map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(output.stderr)
        }
    })
    .await
    .unwrap()
}

/// Sends one ping, whose reply may take 30 s.
pub(crate) async fn assert_pings(lab: &Lab, from: &TrafficClient, to: IpAddr) {
    let words = ["ping", "-n", "-c", "1", "-W", "30", &to.to_string()];
    let output = lab.run_at(from, &words).await.unwrap();
    assert!(output.status.success(), "ping {from} -> {to}: {output:?}");
}

/// The output of `kubectl ... -o json`.
pub(crate) async fn json(cluster: &Cluster<'_>, args: &[&str]) -> Value {
    let args = [args, &["-o", "json"]].concat();
    serde_json::from_str(&cluster.kubectl(args).await.unwrap().stdout).unwrap()
}

/// The nodes whose Peers in `observer` have `network` as an allowed IP. While the anchor moves, these can be two nodes.
pub(crate) async fn anchors_of(network: &str, observer: &Cluster<'_>) -> Vec<String> {
    let peers = json(observer, &["get", "peers"]).await;
    let has_network = |peer: &&Value| {
        let allowed_ips = peer["spec"]["allowedIPs"].as_array().unwrap();
        allowed_ips.iter().any(|net| net == network)
    };
    let node = |peer: &Value| {
        let name = peer["metadata"]["name"].as_str().unwrap();
        name.rsplit_once("--").unwrap().1.to_owned()
    };
    peers["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(has_network)
        .map(node)
        .collect()
}

/// Milliseconds since 1970.
pub(crate) fn unix_millis() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

/// The WireGuard address of a node.
pub(crate) async fn wireguard(cluster: &Cluster<'_>, node: &str) -> IpAddr {
    let node = json(cluster, &["get", "node", node]).await;
    let address = &node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"];
    let (address, _) = address.as_str().unwrap().split_once('/').unwrap();
    address.parse().unwrap()
}

/// The answer of this pod to a client with this source address.
pub(crate) fn expected_answer(by: &RunningPod, client_ip: IpAddr) -> Answer {
    Answer {
        pod: by.name.clone(),
        node: by.node.clone(),
        client_ip,
    }
}

/// Repeats a request until it has got each of these answers. Any other answer fails the test.
pub(crate) async fn assert_answers(lab: &Lab, from: &TrafficClient, url: &str, want: &[Answer]) {
    assert_answers_or(lab, from, url, want, |_| false).await;
}

/// Does the same as [`assert_answers`], but ignores answers for which `is_ignored` is true.
pub(crate) async fn assert_answers_or(
    lab: &Lab,
    from: &TrafficClient,
    url: &str,
    want: &[Answer],
    is_ignored: impl Fn(&Answer) -> bool,
) {
    let mut missing: BTreeSet<String> = want.iter().map(|answer| format!("{answer:?}")).collect();
    wait_until(format!("{url} to give {from} every answer"), PATIENCE, async || {
        let answer = lab
            .http_get_until_answered(from, url)
            .await
            .map_err(|error| error.to_string())?;
        assert!(
            want.contains(&answer) || is_ignored(&answer),
            "{from} -> {url}: {answer:?} is none of {want:#?}"
        );
        missing.remove(&format!("{answer:?}"));
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!("without {missing:?}"))
        }
    })
    .await
    .unwrap();
}

/// An address of an IPv4 lab.
pub(crate) fn as_v4(address: IpAddr) -> std::net::Ipv4Addr {
    match address {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => panic!("{address} in an IPv4 lab"),
    }
}

/// Pod `from` fetches a MiB of random bytes over TCP from pod `to`, and the checksums are compared. First deletes the path MTUs that the
/// kernel learned from earlier packets of the pods, so that only MSS clamping limits TCP segments.
pub(crate) async fn fetch_mebibyte(lab: &Lab, from: &RunningPod, to: &RunningPod) {
    for web in [from, to] {
        lab.run_at(&pod(web), &["ip", "route", "flush", "cache"]).await.unwrap();
    }
    let node = lab.node(&to.node);
    let make = "mkdir -p /run/mib && head -c 1048576 /dev/urandom > /run/mib/f && md5sum < /run/mib/f";
    let sum = node.exec(["sh", "-c", make]).await.unwrap().stdout;
    let args = ["busybox", "httpd", "-f", "-p", "5202", "-h", "/run/mib"];
    let _serving = node.pod_spawn("mib", to.ip, args).unwrap();
    let fetch = format!(
        "curl -sS -m 20 --retry 20 --retry-connrefused --retry-delay 1 {}/f | md5sum",
        url(to.ip, 5202)
    );
    let start = Instant::now();
    let got = lab.run_at(&pod(from), &["sh", "-c", &fetch]).await.unwrap();
    assert_eq!(got.stdout, sum, "{}", got.stderr);
    println!(
        "1 MiB {} -> {}: {:.2} s",
        to.node,
        from.node,
        start.elapsed().as_secs_f64()
    );
}
