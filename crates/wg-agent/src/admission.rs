//! Checks whether an admission policy restricts this agent's ServiceAccount to the annotations of its own Node, and
//! warns if none does. RBAC cannot do that: the account may patch every Node.
//!
//! The check is a dry run of a patch that no agent makes: a label on its own Node. If admission refuses the patch, the
//! account counts as restricted. The check needs no other permission and writes nothing.

use std::time::Duration;

use clustermesh_daemon::{CancellationToken, Readiness, ReadinessItem};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::status::Dump;

/// The label of the dry run; it is never written.
const PROBE_LABEL: &str = "kilo-clustermesh.io/admission-probe";
/// The time between two checks. It is long because policies rarely change and there may be thousands of nodes.
const INTERVAL: Duration = Duration::from_secs(30 * 60);
/// The time from a check without a result to the next one.
const RETRY: Duration = Duration::from_secs(60);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The message says what is missing, what that means and what to do.
const UNRESTRICTED_MESSAGE: &str = "no admission policy restricts this agent's account to the annotations of its own Node, so an attacker on one \
                    node can change labels and taints of every Node: apply deploy/agent.yaml, whose ValidatingAdmissionPolicy \
                    needs Kubernetes 1.30, and give agents that run outside its DaemonSet the account of docs/operations/install.md";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Admission refused the dry run.
    Restricted,
    /// Admission allowed the dry run.
    Unrestricted,
    /// The dry run failed for another reason, or was not answered in time.
    Unknown,
}

/// Checks every [`INTERVAL`], or [`RETRY`] after a check without a result, until the token is cancelled. While the account is
/// unrestricted, readiness has a remark.
pub(crate) async fn run(client: Client, node: String, readiness: Readiness, dump: Dump, stop: CancellationToken) {
    let mut remark: Option<ReadinessItem> = None;
    loop {
        let verdict = tokio::time::timeout(REQUEST_TIMEOUT, probe(&client, &node)).await;
        let verdict = verdict.unwrap_or(Verdict::Unknown);
        match verdict {
            Verdict::Restricted => {
                if remark.take().is_some() {
                    tracing::info!("an admission policy restricts this agent's account to its own Node now");
                }
                dump.set("admission", json!("restricted"));
            }
            Verdict::Unrestricted if remark.is_none() => {
                tracing::warn!("{UNRESTRICTED_MESSAGE}");
                remark = Some(readiness.remark(format!("admission: {UNRESTRICTED_MESSAGE}")));
                dump.set("admission", json!(UNRESTRICTED_MESSAGE));
            }
            Verdict::Unrestricted | Verdict::Unknown => {}
        }
        let pause = if verdict == Verdict::Unknown { RETRY } else { INTERVAL };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

async fn probe(client: &Client, node: &str) -> Verdict {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = Patch::Merge(json!({"metadata": {"labels": {PROBE_LABEL: "true"}}}));
    let answer = nodes
        .patch_metadata(node, &PatchParams::default().dry_run(), &patch)
        .await;
    interpret(answer.map(drop))
}

/// Reads from the error message whether admission refused the patch, because RBAC also refuses with 403. A webhook of another
/// policy engine counts like the project's own ValidatingAdmissionPolicy.
fn interpret(answer: Result<(), kube::Error>) -> Verdict {
    match answer {
        Ok(()) => Verdict::Unrestricted,
        Err(kube::Error::Api(status))
            if status.message.contains("ValidatingAdmissionPolicy") || status.message.contains("admission webhook") =>
        {
            Verdict::Restricted
        }
        Err(error) => {
            tracing::debug!(%error, "cannot tell whether an admission policy restricts this agent's account");
            Verdict::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn admission_refusal_is_distinguished_from_other_errors() {
        let refused = |code, message: &str| {
            Err(kube::Error::Api(Box::new(
                Status::failure(message, "Forbidden").with_code(code),
            )))
        };
        let cases = [
            (Ok(()), Verdict::Unrestricted),
            (
                refused(
                    403,
                    "nodes \"a\" is forbidden: ValidatingAdmissionPolicy 'clustermesh-agents' with binding 'clustermesh-agents' \
                     denied request: an agent writes annotations of its Node and nothing else",
                ),
                Verdict::Restricted,
            ),
            (
                refused(
                    403,
                    "admission webhook \"nodes.example.org\" denied the request: labels are the operator's",
                ),
                Verdict::Restricted,
            ),
            (
                refused(
                    403,
                    "nodes \"a\" is forbidden: User \"system:serviceaccount:clustermesh-agent:wg-agent\" cannot patch resource \
                     \"nodes\" in API group \"\" at the cluster scope",
                ),
                Verdict::Unknown,
            ),
            (refused(404, "nodes \"a\" not found"), Verdict::Unknown),
            (refused(500, "etcdserver: request timed out"), Verdict::Unknown),
        ];
        for (answer, want) in cases {
            let text = format!("{answer:?}");
            assert_eq!(interpret(answer), want, "{text}");
        }
    }
}
