//! Gateways of sandboxes, installed as README.md says.

use super::{Product, manifest};
use crate::{Cluster, ClusterPlan, Result};

/// Namespace and name of what `deploy/gateway.yaml` installs.
pub const GATEWAYS: &str = "clustermesh-gateway";

/// Where the gateways of a cluster have their WireGuard addresses: of the families of its pods.
pub(super) fn ranges(plan: &ClusterPlan) -> Vec<String> {
    let mut ranges = vec!["100.127.255.0/28".to_owned()];
    if plan.v6.is_some() {
        ranges.push("fd00:127:255::/124".to_owned());
    }
    ranges
}

impl Product<'_> {
    /// Installs gateways in the hub, which serve Services of these namespaces, and waits until they run. Meshes made from now on
    /// let sandboxes in through them.
    ///
    /// # Errors
    /// When the hub refuses a manifest, or a gateway does not become ready.
    pub async fn install_gateways(&mut self, namespaces: &[&str]) -> Result<()> {
        let hub = self.hub();
        for crd in ["sandboxaccesses", "sandboxgateways"] {
            hub.apply(&manifest(&format!("crds/{crd}.kilo.squat.ai.yaml"))?).await?;
        }
        let established = "crd/sandboxgateways.kilo.squat.ai";
        hub.kubectl(["wait", "--for=condition=Established", established])
            .await?;
        hub.apply(&manifest("deploy/gateway.yaml")?).await?;
        let plan = hub.plan();
        let mut endpoints = vec![plan.pod_cidr.to_string()];
        endpoints.extend(plan.v6.iter().map(|v6| v6.pod_cidr.to_string()));
        let literals = [
            format!("--from-literal=gateway-cidr={}", ranges(plan).join(",")),
            format!("--from-literal=endpoint-network={}", endpoints.join(",")),
        ];
        let configure = ["-n", GATEWAYS, "create", "configmap", GATEWAYS];
        hub.kubectl(configure.into_iter().chain(literals.each_ref().map(String::as_str)))
            .await?;
        for namespace in namespaces {
            lets_gateways_read(&hub, namespace).await?;
        }
        self.gateways = true;
        hub.rollout(GATEWAYS, &format!("statefulset/{GATEWAYS}")).await
    }
}

async fn lets_gateways_read(cluster: &Cluster<'_>, namespace: &str) -> Result<()> {
    let account = format!("--serviceaccount={GATEWAYS}:{GATEWAYS}");
    let role = "--clusterrole=clustermesh-gateway-reads";
    cluster
        .kubectl(["-n", namespace, "create", "rolebinding", GATEWAYS, role, &account])
        .await
        .map(drop)
}
