//! Runs servers in pods and sends requests to them from pods and nodes. A web server's answer names the server and the source address
//! that the server saw.

use std::{fmt, net::IpAddr, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, ListParams},
};

use serde_json::json;

use crate::{Cluster, Error, Lab, Node, Result, wait_until};

/// Web servers on two nodes, one on each, behind the Service `web`: applied by [`Cluster::run_web`].
pub const WEB: &str = include_str!("traffic/web.yaml");

/// Services of every type except ExternalName. Their servers are pods with three ports (`store`: TCP 8080 and 8081, a UDP
/// echo at 9000) and a pod in the host network of one node (`hosted`: TCP 18080, a UDP echo at 19000). Applied by
/// [`Cluster::run_store`].
pub const STORE: &str = include_str!("traffic/store.yaml");

/// The name, node and addresses of a running pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningPod {
    /// The name of its node.
    pub node: String,
    /// The pod's name.
    pub name: String,
    /// The pod's address.
    pub ip: IpAddr,
    /// The pod's address of the second family, in a dual-stack cluster.
    pub second_ip: Option<IpAddr>,
}

/// The client of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrafficClient {
    /// A pod, in its own network namespace.
    Pod(RunningPod),
    /// A node, in its host network namespace.
    Host(String),
}

impl fmt::Display for TrafficClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {} ({} on {})", pod.name, pod.ip, pod.node),
            Self::Host(node) => write!(f, "host {node}"),
        }
    }
}

/// The response of a web server: its identity and the client's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The pod that answered.
    pub pod: String,
    /// The name of that pod's node.
    pub node: String,
    /// The source address of the connection at the server.
    pub client_ip: IpAddr,
}

impl Answer {
    /// Parses `hello from POD on NODE to ADDRESS:PORT`.
    fn parse(text: &str) -> Option<Self> {
        let (pod, rest) = text.trim().strip_prefix("hello from ")?.split_once(" on ")?;
        let (node, client) = rest.split_once(" to ")?;
        let client_ip = client.parse::<std::net::SocketAddr>().ok()?.ip();
        Some(Self {
            pod: pod.into(),
            node: node.into(),
            client_ip,
        })
    }
}

impl Cluster<'_> {
    /// Runs the servers of [`WEB`] and waits until they are ready.
    ///
    /// # Errors
    /// When they do not become ready.
    pub async fn run_web(&self) -> Result<Vec<RunningPod>> {
        self.apply(WEB).await?;
        self.wait_for_rollout("default", "deployment/web").await?;
        self.web_pods().await
    }

    /// Does the same as [`Self::run_web`], with a server on each powered-on node.
    ///
    /// # Errors
    /// When they do not become ready.
    pub async fn run_web_on_each_node(&self) -> Result<Vec<RunningPod>> {
        self.apply(WEB).await?;
        let nodes = self.nodes().into_iter().filter(Node::is_up).count();
        let replicas = format!("--replicas={nodes}");
        self.kubectl(["scale", "deployment/web", &replicas]).await?;
        self.wait_for_rollout("default", "deployment/web").await?;
        self.web_pods().await
    }

    /// Applies [`STORE`] and waits until the servers are ready. The Service `store-balanced` gets a load balancer's
    /// address, number 240 of the cluster's underlay range; in a dual-stack cluster it gets one address of each family. No load balancer
    /// exists, but kube-proxy on every node handles packets to these addresses.
    ///
    /// # Errors
    /// When they do not become ready.
    pub async fn run_store(&self) -> Result<()> {
        self.apply(STORE).await?;
        for name in ["store", "hosted"] {
            self.wait_for_rollout("default", &format!("deployment/{name}")).await?;
        }
        let ingress: Vec<_> = self
            .plan()
            .load_balancer_ips()
            .iter()
            .map(|ip| json!({"ip": ip}))
            .collect();
        let status = json!({"status": {"loadBalancer": {"ingress": ingress}}}).to_string();
        let words = [
            "patch",
            "service",
            "store-balanced",
            "--subresource=status",
            "--type=merge",
        ];
        let words = words.into_iter().chain(["-p", &status]);
        self.kubectl(words).await.map(drop)
    }

    /// The running web servers, sorted by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn web_pods(&self) -> Result<Vec<RunningPod>> {
        self.pods_of_app("web").await
    }

    /// Running pods of the namespace `default` with this value of the label `app`, sorted by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn pods_of_app(&self, app: &str) -> Result<Vec<RunningPod>> {
        self.pods("default", &format!("app={app}")).await
    }

    /// Running pods that match a label selector, sorted by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn pods(&self, namespace: &str, selector: &str) -> Result<Vec<RunningPod>> {
        let pods: Api<Pod> = Api::namespaced(self.client().await?, namespace);
        let list = pods
            .list(&ListParams::default().labels(selector))
            .await
            .map_err(Error::kube("list pods"))?;
        let mut running: Vec<RunningPod> = list.items.into_iter().filter_map(running_pod).collect();
        running.sort();
        Ok(running)
    }

    /// Waits for the ClusterIP of a Service.
    ///
    /// # Errors
    /// After half a minute.
    pub async fn cluster_ip(&self, namespace: &str, name: &str) -> Result<IpAddr> {
        self.cluster_ip_of(namespace, name, 0).await
    }

    /// Waits for the ClusterIP of a dual-stack Service in its second family.
    ///
    /// # Errors
    /// After half a minute.
    pub async fn second_cluster_ip(&self, namespace: &str, name: &str) -> Result<IpAddr> {
        self.cluster_ip_of(namespace, name, 1).await
    }

    async fn cluster_ip_of(&self, namespace: &str, name: &str, index: usize) -> Result<IpAddr> {
        let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Service>(&());
        let services: Api<DynamicObject> = Api::namespaced_with(self.client().await?, namespace, &resource);
        wait_until(
            format!("Service {namespace}/{name}"),
            Duration::from_secs(30),
            async || {
                let service = services.get(name).await.map_err(|error| error.to_string())?;
                let addresses = &service.data["spec"]["clusterIPs"];
                let address = addresses[index].as_str().unwrap_or_default();
                address.parse().map_err(|_| format!("its clusterIPs are {addresses}"))
            },
        )
        .await
    }
}

/// `None` = the pod does not run, is being deleted, or has no node or address.
fn running_pod(pod: Pod) -> Option<RunningPod> {
    let status = pod.status?;
    (status.phase.as_deref() == Some("Running") && pod.metadata.deletion_timestamp.is_none()).then_some(())?;
    let ip: IpAddr = status.pod_ip?.parse().ok()?;
    let mut all = status
        .pod_ips
        .iter()
        .flatten()
        .filter_map(|one| one.ip.parse::<IpAddr>().ok());
    Some(RunningPod {
        node: pod.spec?.node_name?,
        name: pod.metadata.name?,
        ip,
        second_ip: all.find(|other| other.is_ipv4() != ip.is_ipv4()),
    })
}

impl Lab {
    /// Runs a program of the host in the client's network namespace; the pod's image need not contain it. A failure of the
    /// program is no error.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub async fn run_at(&self, from: &TrafficClient, argv: &[&str]) -> Result<crate::Output> {
        match from {
            TrafficClient::Pod(pod) => self.node(&pod.node).pod_exec(pod.ip, argv.iter().copied()).await,
            TrafficClient::Host(node) => self.node(node).try_exec(argv.iter().copied()).await,
        }
    }

    /// Sends one HTTP request with a timeout of three seconds. The inner `Err` is the output of curl, if it contains no
    /// [`Answer`].
    ///
    /// # Errors
    /// When curl cannot be started.
    pub async fn http_get(&self, from: &TrafficClient, url: &str) -> Result<std::result::Result<Answer, String>> {
        let output = self.run_at(from, &["curl", "-sS", "-m", "3", url]).await?;
        Ok(
            Answer::parse(&output.stdout)
                .ok_or_else(|| format!("{}{}", output.stdout, output.stderr).trim().to_owned()),
        )
    }

    /// Whether a ping is answered within two seconds.
    ///
    /// # Errors
    /// When ping cannot be started.
    pub async fn ping(&self, from: &TrafficClient, to: IpAddr) -> Result<bool> {
        let output = self
            .run_at(from, &["ping", "-n", "-c", "1", "-W", "2", &to.to_string()])
            .await?;
        Ok(output.status.success())
    }

    /// Repeats [`Self::http_get`] until the server answers.
    ///
    /// # Errors
    /// After a minute. The error quotes the output of curl.
    pub async fn http_get_until_answered(&self, from: &TrafficClient, url: &str) -> Result<Answer> {
        wait_until(
            format!("a response of {url} to {from}"),
            Duration::from_secs(60),
            async || self.http_get(from, url).await.map_err(|error| error.to_string())?,
        )
        .await
    }
}
