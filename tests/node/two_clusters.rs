//! Sets up two clusters of one node each, for tests of the agent binary: real API servers, and network namespaces as
//! nodes. The test replaces the controller: it writes Peers and PeerPolicies from the Node annotations of the agents.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use clustermesh_api::{
    names::{KILO_ENDPOINT, KILO_KEY, KILO_WIREGUARD_IP, LABEL_SOURCE_CLUSTER},
    peer::{DnsOrIp, Peer, PeerEndpoint, PeerSpec},
    policy::{Allow, PeerPolicy, PeerPolicySpec},
};
use clustermesh_lab::{Lab, LabPlan, Node as Host, Running, wait_until};
use clustermesh_tests::agent::{AGENT_PRIVILEGES, AS_AGENT, agent_program};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};

/// Time limit of a wait, unless a test has another.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A cluster and its only node.
pub(crate) struct Site {
    pub(crate) cluster: &'static str,
    pub(crate) node: &'static str,
    pub(crate) address: &'static str,
    /// The node's pod network.
    pub(crate) pods: &'static str,
    /// An address in `pods`, from which the tests ping. [`TwoClusters::start`] gives it to the node itself; a test
    /// that makes a pod moves it to the pod.
    pub(crate) pod: &'static str,
    /// The network from which the node gets its WireGuard address.
    pub(crate) wireguard: &'static str,
    pub(crate) interface: String,
}

/// The two clusters.
pub(crate) struct TwoClusters {
    pub(crate) lab: Lab,
    pub(crate) sites: [Site; 2],
    files: tempfile::TempDir,
}

pub(crate) const MGMT: usize = 0;
pub(crate) const TENANT: usize = 1;

impl Drop for TwoClusters {
    /// Removes the lock and the sockets of killed agents: all network namespaces share the directory of these files.
    fn drop(&mut self) {
        for site in &self.sites {
            let _ = std::fs::remove_file(format!("/var/run/wireguard/{}.sock", site.interface));
            if let Ok(namespace) = std::fs::metadata(self.host(site).netns()) {
                for suffix in ["lock", "status"] {
                    let _ = std::fs::remove_file(format!("/var/run/wireguard/wg-agent-{}.{suffix}", namespace.ino()));
                }
            }
        }
    }
}

impl TwoClusters {
    pub(crate) async fn start() -> Self {
        let clusters = Self::start_without_crds().await;
        for site in &clusters.sites {
            clusters.install_crds(site).await;
        }
        clusters
    }

    pub(crate) async fn install_crds(&self, site: &Site) {
        let cluster = self.lab.cluster(site.cluster);
        let crds = ["peers", "peerpolicies"];
        cluster.install_crds(&crds).await.expect("the CRDs are served");
    }

    pub(crate) async fn start_without_crds() -> Self {
        let lab = Lab::start(LabPlan::control_planes(&["mgmt", "tenant-a"]))
            .await
            .expect("start the lab");
        // Interface names must be unique: they are names of control sockets in a directory that all namespaces share.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let interface = |letter: char| {
            format!(
                "k{letter}{}n{}",
                std::process::id(),
                NEXT.fetch_add(1, Ordering::Relaxed)
            )
        };
        let sites = [
            Site {
                cluster: "mgmt",
                node: "mgmt-1",
                address: "172.30.1.11",
                pods: "10.10.1.0/24",
                pod: "10.10.1.5",
                wireguard: "100.66.1.0/24",
                interface: interface('m'),
            },
            Site {
                cluster: "tenant-a",
                node: "tenant-a-1",
                address: "172.30.2.11",
                pods: "10.20.1.0/24",
                pod: "10.20.1.5",
                wireguard: "100.66.2.0/24",
                interface: interface('t'),
            },
        ];
        let clusters = Self {
            lab,
            sites,
            files: tempfile::tempdir().expect("a directory"),
        };
        for site in &clusters.sites {
            let cluster = clusters.lab.cluster(site.cluster);
            let inside = cluster.inside_kubeconfig().expect("a kubeconfig");
            std::fs::write(clusters.kubeconfig(site), inside).expect("write a kubeconfig");
            clusters
                .nodes(site)
                .await
                .create(&PostParams::default(), &node(site))
                .await
                .expect("create the Node");
            let host = clusters
                .lab
                .add_host(site.node, site.address.parse().expect("an address"))
                .await
                .expect("add a host");
            host.exec([agent_program(), "prepare"]).await.expect("prepare the node");
            // Most tests need the pod's address but no pod.
            host.exec(["ip", "addr", "add", &format!("{}/32", site.pod), "dev", "lo"])
                .await
                .expect("an address");
        }
        clusters
    }

    pub(crate) fn site(&self, index: usize) -> &Site {
        &self.sites[index]
    }

    pub(crate) fn host(&self, site: &Site) -> Host<'_> {
        self.lab.node(site.node)
    }

    pub(crate) fn kubeconfig(&self, site: &Site) -> PathBuf {
        self.files.path().join(format!("{}.kubeconfig", site.cluster))
    }

    /// Adds an IPv6 network to the underlay, and makes its addresses the endpoints of both Nodes.
    pub(crate) async fn use_ipv6_underlay(&self) {
        for (site, host) in self.sites.iter().zip(1..) {
            let address = format!("fd77::{host}/64");
            let words = ["ip", "addr", "add", &address, "dev", "eth0", "nodad"];
            self.host(site).exec(words).await.expect("an address");
            let endpoint = format!("kilo.squat.ai/force-endpoint=[fd77::{host}]:51820");
            let words = ["annotate", "node", site.node, &endpoint];
            let cluster = self.lab.cluster(site.cluster);
            cluster.kubectl(words).await.expect("annotate the Node");
        }
    }

    pub(crate) async fn client(&self, site: &Site) -> Client {
        self.lab.cluster(site.cluster).client().await.expect("a client")
    }

    pub(crate) async fn nodes(&self, site: &Site) -> Api<Node> {
        Api::all(self.client(site).await)
    }

    pub(crate) async fn peers(&self, site: &Site) -> Api<Peer> {
        Api::all(self.client(site).await)
    }

    pub(crate) async fn policies(&self, site: &Site) -> Api<PeerPolicy> {
        Api::all(self.client(site).await)
    }

    /// The agent's key file.
    pub(crate) fn key_file(&self, site: &Site) -> PathBuf {
        self.files.path().join(site.cluster).join("key")
    }

    /// The agent's command line, with `more` directly after the program.
    pub(crate) fn command(&self, site: &Site, more: &[&str]) -> Vec<String> {
        let mut words: Vec<String> = vec![agent_program().into()];
        words.extend(more.iter().map(ToString::to_string));
        for (flag, value) in [
            ("--node-name", site.node.to_owned()),
            ("--kubeconfig", self.kubeconfig(site).display().to_string()),
            ("--interface", site.interface.clone()),
            // Works on every machine, with or without WireGuard in its kernel.
            ("--backend", "userspace".to_owned()),
            ("--wireguard-cidr", site.wireguard.to_owned()),
            ("--key-file", self.key_file(site).display().to_string()),
        ] {
            words.extend([flag.to_owned(), value]);
        }
        words
    }

    /// Starts an agent that is restricted as in the DaemonSet: its only capability is NET_ADMIN, and `/proc/sys` is read-only.
    pub(crate) fn agent(&self, site: &Site, log: &str) -> Running {
        self.agent_with_env(site, log, &[])
    }

    /// Like [`Self::agent`], with `file` mounted as `/etc/resolv.conf`, as the kubelet does.
    pub(crate) fn agent_with_resolvers(&self, site: &Site, log: &str, file: &std::path::Path) -> Running {
        let script = format!("mount --bind '{}' /etc/resolv.conf; {AGENT_PRIVILEGES}", file.display());
        let mut words: Vec<String> = ["unshare", "--mount", "sh", "-ec", &script, "sh"]
            .map(String::from)
            .into();
        words.extend(self.command(site, &[]));
        self.host(site).spawn(log, words).expect("start the agent")
    }

    /// Like [`Self::agent`], with these environment variables.
    pub(crate) fn agent_with_env(&self, site: &Site, log: &str, variables: &[&str]) -> Running {
        self.agent_with_env_and_args(site, log, variables, &[])
    }

    /// Like [`Self::agent`], with these environment variables and arguments.
    pub(crate) fn agent_with_env_and_args(&self, site: &Site, log: &str, variables: &[&str], more: &[&str]) -> Running {
        let mut words: Vec<String> = AS_AGENT.map(String::from).into();
        words.push("env".to_owned());
        words.extend(variables.iter().map(ToString::to_string));
        words.extend(self.command(site, more));
        self.host(site).spawn(log, words).expect("start the agent")
    }

    pub(crate) async fn annotations(&self, site: &Site) -> BTreeMap<String, String> {
        let node = self.nodes(site).await.get(site.node).await.expect("the Node");
        node.metadata.annotations.unwrap_or_default()
    }

    /// Waits until the agent has published its key and WireGuard address, and returns the Node's annotations.
    pub(crate) async fn wait_for_published(&self, site: &Site) -> BTreeMap<String, String> {
        wait_until(format!("the key of {}", site.node), TIMEOUT, async || {
            let all = self.annotations(site).await;
            if all.contains_key(KILO_KEY) && all.contains_key(KILO_WIREGUARD_IP) {
                Ok(all)
            } else {
                Err(format!("{all:?}"))
            }
        })
        .await
        .expect("the agent publishes its key")
    }

    /// Writes the Peer and PeerPolicy of `source` into `target`, as the controller does.
    pub(crate) async fn write_peer_and_policy(&self, target: &Site, source: &Site) {
        let annotations = self.wait_for_published(source).await;
        let peer = peer(source, &annotations);
        let peers = self.peers(target).await;
        peers
            .create(&PostParams::default(), &peer)
            .await
            .expect("create the Peer");
        let mut policy = PeerPolicy::new(
            &format!("mesh--{}", source.cluster),
            PeerPolicySpec {
                source: source.cluster.into(),
                sources: vec![source.pods.into(), source.wireguard.into()],
                networks: vec![cluster_pods(source), source.wireguard.into()],
                allow: vec![Allow {
                    to: vec![cluster_pods(target), target.wireguard.into()],
                }],
                ..PeerPolicySpec::default()
            },
        );
        policy.metadata.labels = peer.metadata.labels.clone();
        self.policies(target)
            .await
            .create(&PostParams::default(), &policy)
            .await
            .expect("create the PeerPolicy");
    }

    /// Writes the Peer and PeerPolicy of each cluster into the other.
    pub(crate) async fn write_all_peers(&self) {
        let [mgmt, tenant] = &self.sites;
        self.write_peer_and_policy(mgmt, tenant).await;
        self.write_peer_and_policy(tenant, mgmt).await;
    }

    /// Sends one ping between pod addresses; `Err` = no reply, with the output of ping.
    pub(crate) async fn pings(&self, from: &Site, to: &Site) -> Result<(), String> {
        let words = ["ping", "-n", "-c1", "-W1", "-I", from.pod, to.pod];
        let output = self.host(from).try_exec(words).await.map_err(|e| e.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(format!("{}{}", output.stdout, output.stderr))
        }
    }

    /// Sends one ping between pod addresses, whose reply may take 30 s.
    pub(crate) async fn assert_pings(&self, from: &Site, to: &Site) {
        let words = ["ping", "-n", "-c1", "-W30", "-I", from.pod, to.pod];
        self.host(from).exec(words).await.expect("a reply");
    }

    pub(crate) async fn wait_until_reaches(&self, from: &Site, to: &Site) {
        wait_until(format!("a ping from {} to {}", from.pod, to.pod), TIMEOUT, async || {
            self.pings(from, to).await
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Requests a page of the agent's admin port until there is a response: status code and text.
    pub(crate) async fn page(&self, site: &Site, path: &str) -> (u16, String) {
        let page = async || self.try_page(site, path).await;
        wait_until(format!("a response of {} for {path}", site.node), TIMEOUT, page)
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Requests a page of the agent's admin port once. `Err` = no response.
    pub(crate) async fn try_page(&self, site: &Site, path: &str) -> Result<(u16, String), String> {
        let url = format!("http://127.0.0.1:9587{path}");
        let words = ["curl", "-sS", "-m", "30", "-w", "\n%{http_code}", &url];
        let output = self.host(site).try_exec(words).await.map_err(|e| e.to_string())?;
        if !output.status.success() {
            return Err(output.stderr);
        }
        let (text, code) = output.stdout.rsplit_once('\n').ok_or("no status code")?;
        Ok((code.parse().map_err(|_| output.stdout.clone())?, text.to_owned()))
    }

    /// Waits until the node is ready and `/readyz` reports nothing else. The line about the admission policy, which most of these
    /// clusters do not have, is ignored.
    pub(crate) async fn wait_until_nothing_is_reported(&self, site: &Site) {
        wait_until(format!("{} to report nothing", site.node), TIMEOUT, async || {
            let (code, page) = self.try_page(site, "/readyz").await?;
            let lines = page.lines().filter(|line| !line.starts_with("but: admission: "));
            if code == 200 && lines.eq(["ok"]) {
                Ok(())
            } else {
                Err(format!("{code}: {page}"))
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    pub(crate) async fn wait_until_ready(&self, site: &Site) {
        wait_until(format!("{} to be ready", site.node), TIMEOUT, async || {
            match self.try_page(site, "/readyz").await? {
                (200, _) => Ok(()),
                (code, text) => Err(format!("{code}: {text}")),
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    pub(crate) async fn delete_peer(&self, site: &Site, name: &str) {
        self.peers(site)
            .await
            .delete(name, &DeleteParams::default())
            .await
            .expect("delete the Peer");
    }

    pub(crate) async fn annotate(&self, site: &Site, key: &str, value: &str) {
        let patch = serde_json::json!({"metadata": {"annotations": {key: value}}});
        let nodes = self.nodes(site).await;
        nodes
            .patch(site.node, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .expect("annotate the Node");
    }
}

/// The cluster's pod network: the /16 around that of its node.
pub(crate) fn cluster_pods(site: &Site) -> String {
    let net: ipnet::IpNet = site.pods.parse().expect("a network");
    ipnet::IpNet::new(net.addr(), 16).expect("a length").trunc().to_string()
}

/// The Peer of a site's node, from the annotations of the Node.
pub(crate) fn peer(source: &Site, annotations: &BTreeMap<String, String>) -> Peer {
    let wireguard_address = annotations[KILO_WIREGUARD_IP]
        .split('/')
        .next()
        .expect("a host part")
        .to_owned();
    let (ip, port) = annotations[KILO_ENDPOINT].rsplit_once(':').expect("host:port");
    let mut peer = Peer::new(
        &format!("mesh--{}--{}", source.cluster, source.node),
        PeerSpec {
            allowed_ips: vec![source.pods.into(), format!("{wireguard_address}/32")],
            endpoint: Some(PeerEndpoint {
                dns_or_ip: DnsOrIp {
                    ip: Some(ip.trim_matches(['[', ']']).into()),
                    dns: None,
                },
                port: port.parse().expect("a port"),
            }),
            persistent_keepalive: None,
            preshared_key: None,
            public_key: annotations[KILO_KEY].clone(),
        },
    );
    peer.metadata.labels = Some([(LABEL_SOURCE_CLUSTER.to_owned(), source.cluster.to_owned())].into());
    peer
}

fn node(site: &Site) -> Node {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": site.node},
        "spec": {"podCIDR": site.pods, "podCIDRs": [site.pods]},
        "status": {"addresses": [{"type": "InternalIP", "address": site.address}]},
    }))
    .expect("a Node")
}
