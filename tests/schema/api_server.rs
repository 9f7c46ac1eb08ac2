//! Starts a real API server with the CRDs of this repository, and sends requests to it.

use clustermesh_lab::{Lab, LabPlan};
use serde_json::Value;

/// An API server. Dropping it stops the server.
pub(crate) struct ApiServer {
    lab: Lab,
    client: kube::Client,
}

impl ApiServer {
    /// Starts the server and installs `crds/` with kubectl, as a user does.
    pub(crate) async fn start() -> Self {
        let lab = Lab::start(LabPlan::control_planes(&["mgmt"])).await.unwrap();
        let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/../crds");
        let cluster = lab.cluster("mgmt");
        cluster.kubectl(["apply", "--server-side", "-f", crds]).await.unwrap();
        let established = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
        cluster.kubectl(established).await.unwrap();
        let client = cluster.client().await.unwrap();
        Self { lab, client }
    }

    /// Runs kubectl and returns its output.
    pub(crate) async fn kubectl(&self, words: &[&str]) -> String {
        self.lab.cluster("mgmt").kubectl(words).await.unwrap().stdout
    }

    /// Runs `kubectl apply` with a manifest and returns its output.
    pub(crate) async fn apply(&self, yaml: &str) -> String {
        self.lab.cluster("mgmt").kubectl_apply(yaml).await.unwrap().stdout
    }

    /// Sends a POST as a strict dry run. Returns the object that would be stored.
    pub(crate) async fn dry_run(&self, path: &str, object: &Value) -> Response {
        self.post(&format!("{path}?dryRun=All&fieldValidation=Strict"), object)
            .await
    }

    /// Sends a POST.
    pub(crate) async fn post(&self, path: &str, object: &Value) -> Response {
        self.client_as("", &[]).post(path, object).await
    }

    /// Sends a merge patch.
    pub(crate) async fn patch(&self, path: &str, change: &Value) -> Response {
        self.client_as("", &[]).patch(path, change).await
    }

    /// A client that impersonates a user with these extra attributes (`Impersonate-Extra-*`); `""` = the administrator
    /// itself.
    pub(crate) fn client_as(&self, user: &str, extra: &[(&str, &str)]) -> ApiClient {
        let mut headers = Vec::new();
        if !user.is_empty() {
            headers.push(("Impersonate-User".to_owned(), user.to_owned()));
        }
        // A header name must not contain a slash.
        headers.extend(extra.iter().map(|(key, value)| {
            (
                format!("Impersonate-Extra-{}", key.replace('/', "%2F")),
                (*value).to_owned(),
            )
        }));
        ApiClient {
            client: self.client.clone(),
            headers,
        }
    }
}

/// The returned object, or the error: status code and message.
pub(crate) type Response = Result<Value, (u16, String)>;

/// A client of the API server, with its impersonation headers.
pub(crate) struct ApiClient {
    client: kube::Client,
    headers: Vec<(String, String)>,
}

impl ApiClient {
    pub(crate) async fn post(&self, path: &str, object: &Value) -> Response {
        self.request("POST", path, "application/json", object).await
    }

    /// Replaces the stored object, whatever its resourceVersion.
    pub(crate) async fn put(&self, path: &str, object: &Value) -> Response {
        let object_path = path.split('?').next().unwrap();
        let stored = self
            .request("GET", object_path, "application/json", &Value::Null)
            .await?;
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"].clone();
        self.request("PUT", path, "application/json", &object).await
    }

    pub(crate) async fn patch(&self, path: &str, change: &Value) -> Response {
        self.request("PATCH", path, "application/merge-patch+json", change)
            .await
    }

    pub(crate) async fn delete(&self, path: &str) -> Response {
        self.request("DELETE", path, "application/json", &serde_json::json!({}))
            .await
    }

    async fn request(&self, method: &str, path: &str, content_type: &str, body: &Value) -> Response {
        let mut request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", content_type);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(serde_json::to_vec(body).unwrap()).unwrap();
        match self.client.request::<Value>(request).await {
            Ok(stored) => Ok(stored),
            Err(kube::Error::Api(status)) => Err((status.code, status.message)),
            Err(error) => panic!("no response from the API server: {error}"),
        }
    }
}
