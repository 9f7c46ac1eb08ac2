//! Accesses one cluster: clients, kubectl, images, joining nodes.

use std::path::Path;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};

use super::{Lab, Node, TIMEOUT};
use crate::command::{self, Output, argv};
use crate::control_plane::AUDIT_LOG;
use crate::{ClusterPlan, Error, Result, wait_until};

/// A request that an API server has logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditedWrite {
    /// `VERB RESOURCE/SUBRESOURCE NAMESPACE/NAME STATUS`.
    pub request: String,
    /// When the API server received the request, in RFC 3339 format with microseconds, so that texts can be compared.
    pub received: String,
    /// When the API server has sent its response, in the same format.
    pub answered: String,
    /// The header `User-Agent`.
    pub user_agent: String,
}

impl AuditedWrite {
    fn from_event(event: &serde_json::Value) -> Self {
        let text = |pointer: &str| {
            event
                .pointer(pointer)
                .and_then(|value| value.as_str())
                .unwrap_or_default()
        };
        let code = event.pointer("/responseStatus/code").cloned().unwrap_or_default();
        let [verb, resource, subresource] = ["/verb", "/objectRef/resource", "/objectRef/subresource"].map(text);
        let [namespace, name] = ["/objectRef/namespace", "/objectRef/name"].map(text);
        Self {
            request: format!("{verb} {resource}/{subresource} {namespace}/{name} {code}"),
            received: text("/requestReceivedTimestamp").to_owned(),
            answered: text("/stageTimestamp").to_owned(),
            user_agent: text("/userAgent").to_owned(),
        }
    }

    /// Whether the request writes a Lease.
    pub fn is_of_lease(&self) -> bool {
        self.request.contains(" leases/")
    }
}

/// A cluster of a lab.
#[derive(Debug)]
pub struct Cluster<'a> {
    pub(crate) lab: &'a Lab,
    plan: ClusterPlan,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(lab: &'a Lab, plan: ClusterPlan) -> Self {
        Self { lab, plan }
    }

    /// The cluster's address plan.
    pub fn plan(&self) -> &ClusterPlan {
        &self.plan
    }

    /// The administrator's kubeconfig for use on the host, with inline credentials. The server is a port on 127.0.0.1.
    ///
    /// # Errors
    /// When the lab is not running.
    pub fn kubeconfig(&self) -> Result<String> {
        self.read("admin.kubeconfig")
    }

    /// The administrator's kubeconfig for use on nodes, in pods and on the underlay. The server is the API server's
    /// address on the underlay.
    ///
    /// # Errors
    /// When the lab is not running.
    pub fn inside_kubeconfig(&self) -> Result<String> {
        self.read("inside.kubeconfig")
    }

    /// The writes of the controller's ServiceAccount in the order of their responses, including writes that the API server refused. Each
    /// line is `VERB RESOURCE/SUBRESOURCE NAMESPACE/NAME STATUS`. Leases are left out.
    ///
    /// # Errors
    /// When a line of the audit log is not JSON.
    pub fn audit(&self) -> Result<Vec<String>> {
        let writes = self.audited_writes()?.into_iter();
        Ok(writes
            .filter(|write| !write.is_of_lease())
            .map(|write| write.request)
            .collect())
    }

    /// The writes of the controller's ServiceAccount, like [`Self::audit`], with Leases, times and clients.
    ///
    /// # Errors
    /// When a line of the audit log is not JSON.
    pub fn audited_writes(&self) -> Result<Vec<AuditedWrite>> {
        // The file does not exist before the first write.
        let text = self.read(AUDIT_LOG).unwrap_or_default();
        let not_json = |error| Error::Other(format!("read {AUDIT_LOG}: {error}"));
        text.lines()
            .map(|line| {
                serde_json::from_str(line)
                    .map(|event| AuditedWrite::from_event(&event))
                    .map_err(not_json)
            })
            .collect()
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.directory().join(file);
        std::fs::read_to_string(&path).map_err(Error::io(format!("read {}", path.display())))
    }

    pub(super) fn directory(&self) -> std::path::PathBuf {
        self.lab.directory().join(&self.plan.name)
    }

    /// A client with the administrator's rights.
    ///
    /// # Errors
    /// When the lab is not running.
    pub async fn client(&self) -> Result<kube::Client> {
        let doing = format!("make a client for {}", self.plan.name);
        let config = Kubeconfig::from_yaml(&self.kubeconfig()?).map_err(|e| Error::Other(format!("{doing}: {e}")))?;
        let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
            .await
            .map_err(|error| Error::Other(format!("{doing}: {error}")))?;
        kube::Client::try_from(config).map_err(Error::kube(doing))
    }

    /// Runs kubectl as administrator.
    ///
    /// # Errors
    /// When kubectl fails. The error quotes its output.
    pub async fn kubectl<S: AsRef<std::ffi::OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::run(&self.kubectl_argv(argv(words))?, None).await
    }

    /// Runs kubectl as administrator. A failure of kubectl is no error.
    ///
    /// # Errors
    /// When kubectl cannot be started.
    pub async fn try_kubectl<S: AsRef<std::ffi::OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::output(&self.kubectl_argv(argv(words))?, None).await
    }

    /// Runs `kubectl apply -f -` as administrator. For tests of what kubectl prints; [`Self::apply`] is faster.
    ///
    /// # Errors
    /// When kubectl fails. The error quotes its output.
    pub async fn kubectl_apply(&self, manifest: &str) -> Result<Output> {
        command::run(
            &self.kubectl_argv(argv(["apply", "-f", "-"]))?,
            Some(manifest.as_bytes()),
        )
        .await
    }

    /// Every object of every kind that the API server lists, with managed fields, as one text.
    ///
    /// Excluded are IPAddress objects, which the API server deletes with a delay after their Service, and the Events of
    /// its `ipallocator-repair-controller`, which exist for an hour.
    ///
    /// # Errors
    /// When the API server refuses a kind.
    pub async fn dump_objects(&self) -> Result<String> {
        let kinds = ["api-resources", "--verbs=list", "-o", "name"];
        let kinds = self.kubectl(kinds).await?.stdout;
        let is_address_or_event =
            |kind: &&str| kind.starts_with("ipaddresses.") || *kind == "events" || kind.starts_with("events.");
        let kinds = kinds
            .lines()
            .filter(|kind| !is_address_or_event(kind))
            .collect::<Vec<_>>()
            .join(",");
        let without_repairs = "--field-selector=reportingComponent!=ipallocator-repair-controller";
        let mut all = String::new();
        for what in [&[&*kinds][..], &["events", without_repairs]] {
            let words = [&["get"], what, &["-A", "-o", "json", "--show-managed-fields"]].concat();
            all.push_str(&self.kubectl(words).await?.stdout);
        }
        Ok(all)
    }

    pub(crate) fn kubectl_argv(&self, words: Vec<String>) -> Result<Vec<String>> {
        let kubectl = self.lab.tools.path("kubectl")?.display().to_string();
        let directory = self.directory();
        let mut all = vec![
            kubectl,
            format!("--kubeconfig={}", directory.join("admin.kubeconfig").display()),
        ];
        // Without this option kubectl writes its cache to the user's home directory.
        all.push(format!("--cache-dir={}", directory.join("kubectl-cache").display()));
        all.extend(words);
        Ok(all)
    }

    /// Waits until the API server's `/readyz` succeeds.
    ///
    /// # Errors
    /// After three minutes. The error quotes the last response.
    pub async fn wait_for_api(&self) -> Result<()> {
        let client = self.client().await?;
        let what = format!(
            "the API server of {} (log: {})",
            self.plan.name,
            self.api_log().display()
        );
        wait_until(what, TIMEOUT, async || {
            let request = get_request("/readyz");
            // A starting API server may accept a connection and not answer.
            match tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await {
                Ok(answer) => answer.map(drop).map_err(|error| error.to_string()),
                Err(_) => Err("no answer within 5 s".into()),
            }
        })
        .await
    }

    fn api_log(&self) -> std::path::PathBuf {
        self.lab.log(&format!("{}-apiserver", self.plan.name))
    }

    /// Writes the file for which booting nodes wait before they start kubelet.
    pub(super) fn release_nodes(&self) -> Result<()> {
        std::fs::write(self.directory().join("api-ready"), "").map_err(Error::io("write api-ready"))
    }

    /// Waits until the rollout of a Deployment, DaemonSet or StatefulSet (`deployment/web`) is complete.
    ///
    /// # Errors
    /// After three minutes, with the output of kubectl.
    pub async fn wait_for_rollout(&self, namespace: &str, object: &str) -> Result<()> {
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        self.kubectl(["rollout", "status", "-n", namespace, object, &timeout])
            .await
            .map(drop)
    }

    /// The nodes of this cluster, powered on or off.
    pub fn nodes(&self) -> Vec<Node<'a>> {
        let plans = self.lab.state().nodes.clone();
        plans
            .into_iter()
            .filter(|node| node.cluster == self.plan.name)
            .map(|plan| Node::new(self.lab, plan))
            .collect()
    }

    /// Adds a node with the next number; returns when all powered-on nodes are Ready.
    ///
    /// # Errors
    /// When the node cannot be started, or a powered-on node is not Ready within three minutes.
    pub async fn join_node(&self) -> Result<Node<'a>> {
        let count = self.nodes().len();
        let n = u8::try_from(count + 1).map_err(|_| Error::Other(format!("{} has too many nodes", self.plan.name)))?;
        let plan = self.lab.plan_node(&self.plan, n);
        self.lab.boot(&plan).await?;
        self.wait_for_nodes().await?;
        Ok(Node::new(self.lab, plan))
    }

    /// Loads an image (a docker archive, see [`crate::ImageSpec`]) on all powered-on nodes. Other nodes, and nodes that
    /// join later, load it when they boot. Pods that use it need `imagePullPolicy: IfNotPresent`.
    ///
    /// # Errors
    /// When a node cannot import the image.
    pub async fn load_image(&self, archive: &Path) -> Result<()> {
        let name = archive
            .file_name()
            .ok_or_else(|| Error::Other(format!("{} is not a file", archive.display())))?;
        let target = self.directory().join("images").join(name);
        if target != archive {
            std::fs::create_dir_all(self.directory().join("images"))
                .map_err(Error::io("create the image directory"))?;
            // The copy is renamed when it is complete, so that a booting node does not import a partial file.
            let partial = target.with_extension("partial");
            std::fs::copy(archive, &partial).map_err(Error::io(format!("copy {}", archive.display())))?;
            std::fs::rename(&partial, &target).map_err(Error::io(format!("rename to {}", target.display())))?;
        }
        let nodes = self.nodes();
        let imports = nodes
            .iter()
            .filter(|node| node.is_up())
            .map(|node| node.import_image(&target));
        futures::future::try_join_all(imports).await.map(drop)
    }
}

pub(super) fn get_request(path: &str) -> http::Request<Vec<u8>> {
    http::Request::get(path)
        .body(vec![])
        .expect("a constant path makes a valid request")
}
