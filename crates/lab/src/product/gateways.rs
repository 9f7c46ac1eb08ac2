//! Installs gateways for sandboxes as docs/operations/sandboxes.md describes.

use ipnet::IpNet;

use super::{Product, repository_file};
use crate::plan::comma_separated;
use crate::{ClusterPlan, Result, command::argv};

/// Namespace and name of the objects in `deploy/gateway.yaml`.
pub const GATEWAYS: &str = "clustermesh-gateway";

/// The CIDRs for the WireGuard addresses of the gateways of a cluster, in the families of its pods.
#[must_use]
pub fn gateway_cidrs(plan: &ClusterPlan) -> Vec<String> {
    let of_family = |pods: &IpNet| match pods {
        IpNet::V4(_) => "100.127.255.0/28".to_owned(),
        IpNet::V6(_) => "fd00:127:255::/124".to_owned(),
    };
    plan.pod_cidrs().iter().map(of_family).collect()
}

impl Product<'_> {
    /// Installs gateways in the hub for Services of these namespaces, and waits until they run. Call it before
    /// [`Product::mesh`], which lists the gateways' range in `allowedNetworks` only if the gateways are installed.
    ///
    /// # Errors
    /// When the hub refuses a manifest, or a gateway does not become ready.
    pub async fn install_gateways(&mut self, namespaces: &[&str]) -> Result<()> {
        let hub = self.hub().plan().name.clone();
        self.install_gateways_in(&hub, namespaces).await
    }

    /// Does the same as [`Self::install_gateways`] in any cluster that has the agents' image.
    ///
    /// # Errors
    /// As [`Self::install_gateways`].
    pub async fn install_gateways_in(&mut self, cluster: &str, namespaces: &[&str]) -> Result<()> {
        let target = self.lab.cluster(cluster);
        target.install_crds(&["sandboxaccesses", "sandboxgateways"]).await?;
        target.apply(&repository_file("deploy/gateway.yaml")?).await?;
        for words in configuration(target.plan(), namespaces) {
            target.kubectl(words).await?;
        }
        self.gateways.insert(cluster.to_owned());
        target
            .wait_for_rollout(GATEWAYS, &format!("statefulset/{GATEWAYS}"))
            .await
    }

    /// The commands that [`Product::install_gateways`] runs, without the waits, as docs/operations/sandboxes.md has
    /// them. They are shown to users.
    #[must_use]
    pub fn gateway_commands(&self, namespaces: &[&str]) -> Vec<String> {
        let hub = self.hub();
        let crds = "apply -f crds/sandboxaccesses.kilo.squat.ai.yaml -f crds/sandboxgateways.kilo.squat.ai.yaml";
        let applied = [crds, "apply -f deploy/gateway.yaml"].map(str::to_owned);
        let configured = configuration(hub.plan(), namespaces).into_iter();
        let commands = applied.into_iter().chain(configured.map(|words| words.join(" ")));
        commands
            .map(|words| format!("kubectl --context {} {words}", hub.plan().name))
            .collect()
    }
}

/// Arguments of the kubectl commands that create the gateways' ConfigMap and a RoleBinding in each namespace.
fn configuration(plan: &ClusterPlan, namespaces: &[&str]) -> Vec<Vec<String>> {
    let endpoint_networks = plan.pod_cidrs();
    let mut config_map = argv(["-n", GATEWAYS, "create", "configmap", GATEWAYS]);
    config_map.push(format!("--from-literal=gateway-cidr={}", gateway_cidrs(plan).join(",")));
    config_map.push(format!(
        "--from-literal=endpoint-network={}",
        comma_separated(&endpoint_networks)
    ));
    let bindings = namespaces.iter().map(|namespace| {
        let mut words = argv(["-n", namespace, "create", "rolebinding", GATEWAYS]);
        words.push("--clusterrole=clustermesh-gateway-reads".to_owned());
        words.push(format!("--serviceaccount={GATEWAYS}:{GATEWAYS}"));
        words
    });
    [config_map].into_iter().chain(bindings).collect()
}
