//! Merges the kubeconfigs of several clusters into one.

use clustermesh_lab::Cluster;
use kube::config::Kubeconfig;

/// A kubeconfig with one context for each cluster, named after the cluster. `kubeconfig_of` returns the kubeconfig of one cluster.
pub fn merged_kubeconfig<'a, 'b: 'a>(
    clusters: impl IntoIterator<Item = &'a Cluster<'b>>,
    kubeconfig_of: impl Fn(&Cluster<'b>) -> String,
) -> String {
    let mut merged = Kubeconfig::default();
    for cluster in clusters {
        let name = cluster.plan().name.clone();
        let mut one = Kubeconfig::from_yaml(&kubeconfig_of(cluster)).unwrap();
        one.clusters[0].name.clone_from(&name);
        one.auth_infos[0].name.clone_from(&name);
        one.contexts[0].name.clone_from(&name);
        let context = one.contexts[0].context.as_mut().unwrap();
        context.cluster.clone_from(&name);
        context.user = Some(name.clone());
        one.current_context = Some(name);
        merged = merged.merge(one).unwrap();
    }
    serde_json::to_string(&merged).unwrap()
}
