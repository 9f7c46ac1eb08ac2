//! Moves objects from one cluster to another with clusterctl of Cluster API.

use serde_json::json;

use crate::{ArtefactSet, Cluster, Error, NAMESPACE, Output, Result, Tools, command};

/// The label of objects that `clusterctl move` moves.
pub const MOVE_LABEL: &str = "clusterctl.cluster.x-k8s.io/move";

/// The CRD of Cluster API's Cluster, without its schema. clusterctl requires it in both clusters, with a label for the version
/// of the contract between clusterctl and its providers.
fn cluster_crd() -> String {
    let version = json!({
        "name": "v1beta2", "served": true, "storage": true,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
    });
    let labels = json!({"cluster.x-k8s.io/v1beta2": "v1beta2", "clusterctl.cluster.x-k8s.io": ""});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "clusters.cluster.x-k8s.io", "labels": labels},
        "spec": {
            "group": "cluster.x-k8s.io", "scope": "Namespaced", "versions": [version],
            "names": {"kind": "Cluster", "plural": "clusters", "singular": "cluster"},
        },
    })
    .to_string()
}

/// Runs `clusterctl move` for the controller's namespace. Builds clusterctl if it is not cached.
///
/// # Errors
/// clusterctl cannot be built, or fails; the error quotes its output.
pub async fn clusterctl_move(from: &Cluster<'_>, to: &Cluster<'_>, progress: &dyn Fn(&str)) -> Result<Output> {
    let tools = Tools::ensure(&[ArtefactSet::Clusterctl], progress)?;
    let mut files = Vec::new();
    for cluster in [from, to] {
        cluster.apply(&cluster_crd()).await?;
        cluster.wait_for_crd("clusters.cluster.x-k8s.io").await?;
        let file = cluster
            .lab
            .directory()
            .join(format!("{}-admin.kubeconfig", cluster.plan().name));
        std::fs::write(&file, cluster.kubeconfig()?).map_err(Error::io(format!("write {}", file.display())))?;
        files.push(file.display().to_string());
    }
    let [from, to] = &files[..] else {
        return Err(Error::Other("two kubeconfigs".to_owned()));
    };
    // Without this variable, clusterctl would look for a later version on the internet.
    let words = ["env", "CLUSTERCTL_DISABLE_VERSIONCHECK=true"].map(str::to_owned);
    let program = tools.path("clusterctl")?.display().to_string();
    let config = format!("XDG_CONFIG_HOME={}", files[0].trim_end_matches(|c| c != '/'));
    let arguments = [
        "move",
        "--namespace",
        NAMESPACE,
        "--kubeconfig",
        from,
        "--to-kubeconfig",
        to,
    ]
    .map(str::to_owned);
    let argv = [&words[..], &[config, program], &arguments].concat();
    command::run(&argv, None).await
}
