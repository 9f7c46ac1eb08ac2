//! Questions from one pod or node to another, and what was seen of them on the other side.

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

/// Services of every type, before pods with three ports (`store`: 8080 and 8081 of TCP, an echo at 9000 of UDP) and a server in the
/// host network of one node (`hosted`: 18080 of TCP, an echo at 19000 of UDP): applied by [`Cluster::run_store`].
pub const STORE: &str = include_str!("traffic/store.yaml");

/// A running pod of the web Deployment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Web {
    /// Its node.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Its address.
    pub ip: IpAddr,
    /// Its address of the other family, in a dual-stack cluster.
    pub second: Option<IpAddr>,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asker {
    /// A pod, in its own network.
    Pod(Web),
    /// A node, in its host network.
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

/// What a web server answered: who it is and whom it saw.
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
    /// When they do not come up.
    pub async fn run_web(&self) -> Result<Vec<Web>> {
        self.apply(WEB).await?;
        self.rollout("default", "deployment/web").await?;
        self.webs().await
    }

    /// Runs the Services of every type and waits for their servers. Number 240 of the underlay's range, and in a dual-stack
    /// cluster of the second family's too, is what a load balancer serves at `store-balanced`: there is none, but kube-proxy takes
    /// its addresses for the Service's on every node.
    ///
    /// # Errors
    /// When they do not come up.
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

    /// The web servers that run now, by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn webs(&self) -> Result<Vec<Web>> {
        self.labelled("web").await
    }

    /// Running pods of namespace `default` with this label `app`, by node.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn labelled(&self, app: &str) -> Result<Vec<Web>> {
        self.pods("default", &format!("app={app}")).await
    }

    /// Running pods that a label selector matches, by node.
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

    /// The ClusterIP of a Service, once it has one.
    ///
    /// # Errors
    /// When it does not come within half a minute.
    pub async fn cluster_ip(&self, namespace: &str, name: &str) -> Result<IpAddr> {
        self.cluster_ip_of(namespace, name, 0).await
    }

    /// The ClusterIP of a dual-stack Service in its second family, once it has one.
    ///
    /// # Errors
    /// When it does not come within half a minute.
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
    /// Runs a host program where the asker is, whatever its exit status.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn run_at(&self, from: &Asker, argv: &[&str]) -> Result<crate::Output> {
        match from {
            Asker::Pod(web) => self.node(&web.node).pod_exec(web.ip, argv.iter().copied()).await,
            Asker::Host(node) => self.node(node).try_exec(argv.iter().copied()).await,
        }
    }

    /// One HTTP request, answered within three seconds or not at all. `Err` = what curl says.
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

    /// Asks until there is an answer.
    ///
    /// # Errors
    /// After a minute, with what curl says.
    pub async fn ask_until_answered(&self, from: &Asker, url: &str) -> Result<Answer> {
        wait_until(
            format!("an answer of {url} to {from}"),
            Duration::from_secs(60),
            async || self.ask(from, url).await.map_err(|error| error.to_string())?,
        )
        .await
    }
}
