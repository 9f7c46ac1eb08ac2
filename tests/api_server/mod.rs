//! A real API server with the CRDs of this repository, asked what it would make of an object. Only for `schema_*` tests.

use clustermesh_lab::{Lab, LabPlan};
use serde_json::Value;

/// One API server; everything goes when it is dropped.
pub(crate) struct ApiServer {
    lab: Lab,
    client: kube::Client,
}

impl ApiServer {
    /// Starts it and installs `crds/` with kubectl, as a user does.
    pub(crate) async fn start() -> Self {
        let lab = Lab::start(LabPlan::control_planes(&["mgmt"])).await.unwrap();
        let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crds");
        let cluster = lab.cluster("mgmt");
        cluster.kubectl(["apply", "--server-side", "-f", crds]).await.unwrap();
        let established = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
        cluster.kubectl(established).await.unwrap();
        let client = cluster.client().await.unwrap();
        Self { lab, client }
    }

    /// What kubectl prints.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub(crate) async fn kubectl(&self, words: &[&str]) -> String {
        self.lab.cluster("mgmt").kubectl(words).await.unwrap().stdout
    }

    /// `kubectl apply` of a manifest; what it prints.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub(crate) async fn apply(&self, yaml: &str) -> String {
        self.lab.cluster("mgmt").apply(yaml).await.unwrap().stdout
    }

    /// The object as it would be stored, or the server's refusal: status code and message.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub(crate) async fn dry_run(&self, path: &str, object: &Value) -> Result<Value, (u16, String)> {
        self.post(&format!("{path}?dryRun=All&fieldValidation=Strict"), object)
            .await
    }

    /// The answer to a POST.
    pub(crate) async fn post(&self, path: &str, object: &Value) -> Result<Value, (u16, String)> {
        let body = serde_json::to_vec(object).unwrap();
        let request = http::Request::post(path)
            .header("content-type", "application/json")
            .body(body)
            .unwrap();
        match self.client.request::<Value>(request).await {
            Ok(stored) => Ok(stored),
            Err(kube::Error::Api(status)) => Err((status.code, status.message)),
            Err(error) => panic!("no answer from the API server: {error}"),
        }
    }
}
