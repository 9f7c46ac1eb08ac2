//! Tells the cluster what this gateway is: the status of the SandboxGateway of its name, written when it changes.

use std::time::Duration;

use clustermesh_api::sandbox::{SandboxGateway, SandboxGatewayStatus};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{args::GatewayName, metrics::Metrics};

/// Between two writes.
const PACE: Duration = Duration::from_millis(500);
/// After one that failed.
const RETRY: Duration = Duration::from_secs(3);
/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Writes whatever `wanted` comes to say, until the token is cancelled.
pub(super) async fn run(
    client: Client,
    gateway: GatewayName,
    mut wanted: watch::Receiver<SandboxGatewayStatus>,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let objects: Api<SandboxGateway> = Api::namespaced(client, &gateway.namespace);
    let mut said = String::new();
    let mut due = false;
    loop {
        if due {
            let status = wanted.borrow_and_update().clone();
            let wait = match write(&objects, &gateway, &status).await {
                Ok(()) => {
                    metrics.applied("publish", 1);
                    said.clear();
                    due = false;
                    PACE
                }
                Err(error) => {
                    metrics.failed("publish");
                    if said != error {
                        tracing::warn!("cannot publish what this gateway is: {error}");
                        said = error;
                    }
                    RETRY
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = wanted.changed() => if changed.is_err() { return } else { due = true },
        }
    }
}

/// A list that is empty, and a number that is 0, have to be said as well: the patch is merged.
async fn write(
    objects: &Api<SandboxGateway>,
    gateway: &GatewayName,
    status: &SandboxGatewayStatus,
) -> Result<(), String> {
    let mut body = json!(status);
    for list in ["wireguardIPs", "endpoints", "serves", "applied", "refused", "message"] {
        if body.get(list).is_none() {
            body[list] = serde_json::Value::Null;
        }
    }
    let (patch, params) = (Patch::Merge(json!({"status": body})), PatchParams::default());
    let answer = objects.patch_status(&gateway.name, &params, &patch);
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(format!(
            "there is no SandboxGateway {gateway}: make one for each pod of the StatefulSet, as deploy/gateway.yaml does"
        )),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(format!(
            "{}; deploy/gateway.yaml has the Role, which names each gateway",
            status.message
        )),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer from the API server within {} s", PATIENCE.as_secs())),
    }
}
