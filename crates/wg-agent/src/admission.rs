//! Finds out whether an admission policy holds this agent's account to the annotations of its own Node, and says so. RBAC
//! cannot: the account may patch every Node.
//!
//! The question is a dry run of a change that no agent makes, a label of its own Node: refused by admission, the account is
//! held. This needs no right that the agent does not have already, and writes nothing.

use std::time::Duration;

use clustermesh_daemon::{CancellationToken, Pending, Readiness};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::status::Dump;

/// The label that is never written.
const PROBE: &str = "kilo-clustermesh.io/admission-probe";
/// Between two questions: policies change seldom, and there may be thousands of nodes.
const EVERY: Duration = Duration::from_secs(30 * 60);
/// After a question that was not answered.
const RETRY: Duration = Duration::from_secs(60);
/// For one answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// For people: what is missing, what it means, what to do.
const OPEN: &str = "no admission policy holds this agent's account to the annotations of its own Node, so whoever takes over one \
                    node may change labels and taints of every Node: apply deploy/agent.yaml, whose ValidatingAdmissionPolicy \
                    needs Kubernetes 1.30, and run agents outside its DaemonSet with the account of docs/operations/install.md";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// Refused by admission.
    Held,
    /// It would have been written.
    Open,
    /// Nothing that says either.
    Unknown,
}

/// Asks now and then, until the token is cancelled.
pub(crate) async fn run(client: Client, node: String, readiness: Readiness, dump: Dump, stop: CancellationToken) {
    let mut remark: Option<Pending> = None;
    loop {
        let answer = tokio::time::timeout(PATIENCE, ask(&client, &node)).await;
        let answer = answer.unwrap_or(Answer::Unknown);
        match answer {
            Answer::Held => {
                if remark.take().is_some() {
                    tracing::info!("an admission policy holds this agent's account to its own Node now");
                }
                dump.set("admission", json!("held"));
            }
            Answer::Open if remark.is_none() => {
                tracing::warn!("{OPEN}");
                remark = Some(readiness.remark(format!("admission: {OPEN}")));
                dump.set("admission", json!(OPEN));
            }
            Answer::Open | Answer::Unknown => {}
        }
        let pause = if answer == Answer::Unknown { RETRY } else { EVERY };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

async fn ask(client: &Client, node: &str) -> Answer {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = Patch::Merge(json!({"metadata": {"labels": {PROBE: "true"}}}));
    let answer = nodes
        .patch_metadata(node, &PatchParams::default().dry_run(), &patch)
        .await;
    read(answer.map(drop))
}

/// RBAC refuses with 403 as well, and says something else. A webhook of another policy engine serves as well as ours.
fn read(answer: Result<(), kube::Error>) -> Answer {
    match answer {
        Ok(()) => Answer::Open,
        Err(kube::Error::Api(status))
            if status.message.contains("ValidatingAdmissionPolicy") || status.message.contains("admission webhook") =>
        {
            Answer::Held
        }
        Err(error) => {
            tracing::debug!(%error, "cannot tell whether an admission policy holds this agent's account");
            Answer::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn refusal_by_admission_is_told_from_other_refusals() {
        let refused = |code, message: &str| {
            Err(kube::Error::Api(Box::new(
                Status::failure(message, "Forbidden").with_code(code),
            )))
        };
        let cases = [
            (Ok(()), Answer::Open),
            (
                refused(
                    403,
                    "nodes \"a\" is forbidden: ValidatingAdmissionPolicy 'clustermesh-agents' with binding 'clustermesh-agents' \
                     denied request: an agent writes annotations of its Node and nothing else",
                ),
                Answer::Held,
            ),
            (
                refused(
                    403,
                    "admission webhook \"nodes.example.org\" denied the request: labels are the operator's",
                ),
                Answer::Held,
            ),
            (
                refused(
                    403,
                    "nodes \"a\" is forbidden: User \"system:serviceaccount:clustermesh-agent:wg-agent\" cannot patch resource \
                     \"nodes\" in API group \"\" at the cluster scope",
                ),
                Answer::Unknown,
            ),
            (refused(404, "nodes \"a\" not found"), Answer::Unknown),
            (refused(500, "etcdserver: request timed out"), Answer::Unknown),
        ];
        for (answer, want) in cases {
            let text = format!("{answer:?}");
            assert_eq!(read(answer), want, "{text}");
        }
    }
}
