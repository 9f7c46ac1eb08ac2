//! Sends requests from one pod or node to another, and reports which server answered and which source address it saw.

use std::{fmt, net::IpAddr, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, ListParams},
};

use serde_json::json;

use crate::{Cluster, Error, Lab, Result, wait_until};

/// Two web servers, one on each node, behind the Service `web`: applied by [`Cluster::run_web`].
pub const WEB: &str = include_str!("traffic/web.yaml");

/// Services of every type, in front of pods with three ports (`store`: TCP 8080 and 8081, a UDP echo at 9000) and of a
/// server in the host network of one node (`hosted`: TCP 18080, a UDP echo at 19000). Applied by
/// [`Cluster::run_store`].
pub const STORE: &str = include_str!("traffic/store.yaml");

/// A running pod, such as one of the web Deployment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Web {
    /// Its node.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Its address.
    pub ip: IpAddr,
    /// Its address of the second family, in a dual-stack cluster.
    pub second: Option<IpAddr>,
}

/// The client of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asker {
    /// A pod, in its own network namespace.
    Pod(Web),
    /// A node, in its host network namespace.
    Host(String),
}

impl fmt::Display for Asker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(web) => write!(f, "pod {} ({} on {})", web.name, web.ip, web.node),
            Self::Host(node) => write!(f, "host {node}"),
        }
    }
}

/// The answer of a web server: its identity and the client's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The pod that answered.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// The source address it saw.
    pub saw: IpAddr,
}

impl Answer {
    /// Parses `hello from POD on NODE to ADDRESS:PORT`.
    fn parse(text: &str) -> Option<Self> {
        let (pod, rest) = text.trim().strip_prefix("hello from ")?.split_once(" on ")?;
        let (node, peer) = rest.split_once(" to ")?;
        let saw = peer.parse::<std::net::SocketAddr>().ok()?.ip();
        Some(Self {
            pod: pod.into(),
            node: node.into(),
            saw,
        })
    }
}

impl Cluster<'_> {
    /// Runs the web servers and waits for them.
    ///
    /// # Errors
    /// When they do not become ready.
    pub async fn run_web(&self) -> Result<Vec<Web>> {
        self.apply(WEB).await?;
        self.rollout("default", "deployment/web").await?;
        self.webs().await
    }

    /// Runs the Services of every type and waits for their servers. `store-balanced` has a load balancer's address:
    /// number 240 of the underlay's range, in a dual-stack cluster one of each family. No load balancer exists, but
    /// kube-proxy on every node accepts these addresses for the Service.
    ///
    /// # Errors
    /// When they do not become ready.
    pub async fn run_store(&self) -> Result<()> {
        self.apply(STORE).await?;
        for name in ["store", "hosted"] {
            self.rollout("default", &format!("deployment/{name}")).await?;
        }
        let ingress: Vec<_> = self.plan().balanced().iter().map(|ip| json!({"ip": ip})).collect();
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
    pub async fn webs(&self) -> Result<Vec<Web>> {
        self.labelled("web").await
    }

    /// Running pods of namespace `default` with this value of the label `app`, sorted by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn labelled(&self, app: &str) -> Result<Vec<Web>> {
        self.pods("default", &format!("app={app}")).await
    }

    /// Running pods that match a label selector, sorted by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn pods(&self, namespace: &str, selector: &str) -> Result<Vec<Web>> {
        let pods: Api<Pod> = Api::namespaced(self.client().await?, namespace);
        let list = pods
            .list(&ListParams::default().labels(selector))
            .await
            .map_err(Error::kube("list pods"))?;
        let mut webs: Vec<Web> = list.items.into_iter().filter_map(web).collect();
        webs.sort();
        Ok(webs)
    }

    /// Waits for the ClusterIP of a Service.
    ///
    /// # Errors
    /// When there is none within half a minute.
    pub async fn cluster_ip(&self, namespace: &str, name: &str) -> Result<IpAddr> {
        self.cluster_ip_of(namespace, name, 0).await
    }

    /// Waits for the ClusterIP of a dual-stack Service in its second family.
    ///
    /// # Errors
    /// When there is none within half a minute.
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

fn web(pod: Pod) -> Option<Web> {
    let status = pod.status?;
    (status.phase.as_deref() == Some("Running") && pod.metadata.deletion_timestamp.is_none()).then_some(())?;
    let ip: IpAddr = status.pod_ip?.parse().ok()?;
    let mut all = status
        .pod_ips
        .iter()
        .flatten()
        .filter_map(|one| one.ip.parse::<IpAddr>().ok());
    Some(Web {
        node: pod.spec?.node_name?,
        name: pod.metadata.name?,
        ip,
        second: all.find(|other| other.is_ipv4() != ip.is_ipv4()),
    })
}

impl Lab {
    /// Runs a host program in the client's network namespace. A failure of the program is no error.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn run_at(&self, from: &Asker, argv: &[&str]) -> Result<crate::Output> {
        match from {
            Asker::Pod(web) => self.node(&web.node).pod_exec(web.ip, argv.iter().copied()).await,
            Asker::Host(node) => self.node(node).try_exec(argv.iter().copied()).await,
        }
    }

    /// Sends one HTTP request with a timeout of three seconds. `Err` = the error of curl.
    ///
    /// # Errors
    /// When curl cannot be started.
    pub async fn ask(&self, from: &Asker, url: &str) -> Result<std::result::Result<Answer, String>> {
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
    pub async fn ping(&self, from: &Asker, to: IpAddr) -> Result<bool> {
        let output = self
            .run_at(from, &["ping", "-n", "-c", "1", "-W", "2", &to.to_string()])
            .await?;
        Ok(output.status.success())
    }

    /// Repeats a request until it is answered.
    ///
    /// # Errors
    /// After a minute, with the error of curl.
    pub async fn ask_until_answered(&self, from: &Asker, url: &str) -> Result<Answer> {
        wait_until(
            format!("an answer of {url} to {from}"),
            Duration::from_secs(60),
            async || self.ask(from, url).await.map_err(|error| error.to_string())?,
        )
        .await
    }
}
