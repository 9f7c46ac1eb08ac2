//! Tests a node whose agent is stopped while PeerPolicies change: the condition PolicyEnforced names the node until the
//! agent continues.

use nix::sys::signal::Signal;

use super::*;

/// A PeerPolicy in the hub that has the label of another hub. The hub's agents enforce it, too.
const FOREIGN: &str = r#"{"apiVersion": "kilo.squat.ai/v1alpha1", "kind": "PeerPolicy",
    "metadata": {"name": "of-another-hub", "labels": {"kilo-clustermesh.io/hub": "another"}},
    "spec": {"source": "elsewhere", "sources": ["203.0.113.0/24"], "networks": ["203.0.113.0/24"]}}"#;

/// Stops the agent of a node of the hub, and then writes a policy.
// threat: outdated-agent
pub(super) async fn stop_agent_and_add_policy(mesh: &Mesh<'_>) -> String {
    assert_eq!(condition(&mesh.hub, "PolicyEnforced").await.1, "Enforced");
    let node = mesh.hub_webs[1].node.clone();
    mesh.lab.node(&node).signal("wg-agent", Signal::SIGSTOP).unwrap();
    mesh.hub.apply(FOREIGN).await.unwrap();
    node
}

/// Checks that the condition names only `node`, and becomes True after the agent of `node` continues. Then deletes the policy.
// threat: outdated-agent
pub(super) async fn stopped_agent_is_named_until_it_continues(mesh: &Mesh<'_>, node: &str) {
    let until = async |want: (&str, &str)| {
        let what = format!("PolicyEnforced to be {want:?}");
        wait_until(what, PATIENCE, async || {
            match condition(&mesh.hub, "PolicyEnforced").await {
                (status, reason, message) if (&*status, &*reason) == want => Ok(message),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap()
    };
    let message = until(("False", "PolicyOutdated")).await;
    let named = format!(
        "on Node {node} of cluster {:?} wg-agent has reported an outdated revision",
        crate::setup::HUB
    );
    assert!(message.starts_with(&named) && !message.contains("; "), "{message}");
    mesh.lab.node(node).signal("wg-agent", Signal::SIGCONT).unwrap();
    until(("True", "Enforced")).await;
    mesh.hub
        .kubectl(["delete", "peerpolicy", "of-another-hub"])
        .await
        .unwrap();
}
