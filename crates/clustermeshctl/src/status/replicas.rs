//! Reads the pods of the controller, for `status --live`.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};

use super::report::Share;
use crate::live::with_timeout;

/// The pods of the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Replicas {
    /// Pods that are ready, of all that are not being deleted.
    pub(super) ready: Share,
    /// The first pod that is not ready, and why.
    pub(super) problem: Option<String>,
}

impl Replicas {
    /// Reads the pods in a namespace. `None` = they cannot be listed, for example because this account may not.
    pub(super) async fn read(client: &Client, namespace: &str) -> Option<Self> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let selector = ListParams::default().labels("app.kubernetes.io/name=clustermesh-controller");
        let listed = with_timeout(pods.list(&selector)).await.ok()?;
        Some(Self::new(&listed.items))
    }

    pub(super) fn new(pods: &[Pod]) -> Self {
        let pods = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let problems: Vec<Option<String>> = pods.map(pod_problem).collect();
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        Self {
            ready: Share {
                working: count(problems.iter().filter(|problem| problem.is_none()).count()),
                total: count(problems.len()),
            },
            problem: problems.into_iter().flatten().next(),
        }
    }

    /// Describes for a message how many pods are ready, or that there is none.
    pub(super) fn describe(&self) -> String {
        let Share { working, total } = self.ready;
        let problem = self.problem.iter().map(|problem| format!(" ({problem})"));
        match total {
            0 => "the controller has no pod".to_owned(),
            _ => format!(
                "{working} of {total} pods of the controller are ready{}",
                problem.collect::<String>()
            ),
        }
    }
}

/// Why a pod is not ready; `None` = it is.
fn pod_problem(pod: &Pod) -> Option<String> {
    let name = pod.metadata.name.as_deref().unwrap_or("?");
    let status = pod.status.as_ref();
    let conditions = || status.iter().flat_map(|status| status.conditions.iter().flatten());
    if conditions().any(|condition| condition.type_ == "Ready" && condition.status == "True") {
        return None;
    }
    let containers = status
        .iter()
        .flat_map(|status| status.container_statuses.iter().flatten());
    let mut waiting = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref()?.reason.clone());
    let unscheduled = conditions().find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    let reason = waiting.next().or_else(|| unscheduled?.reason.clone());
    Some(format!("{name}: {}", reason.as_deref().unwrap_or("not ready")))
}
