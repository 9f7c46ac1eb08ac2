//! Builds the status of this pod's SandboxGateway, and writes it when it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use clustermesh_agent_core::gateway::{Compiled, Refused};
use clustermesh_api::sandbox::{AppliedAccess, RefusedAccess, SandboxGateway, SandboxGatewayStatus};
use clustermesh_core::key::PublicKey;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    args::{GatewayConfig, GatewayName},
    metrics::Metrics,
    status::Trouble,
};

/// Pause between two writes.
const WRITE_INTERVAL: Duration = Duration::from_millis(500);
/// Pause after a failed write.
const RETRY: Duration = Duration::from_secs(3);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The CRD's limit of entries in `status.refused`.
const MAX_REFUSED: usize = 20;
/// The limit of characters in the message of an entry in `status.refused`; `status.message` may have four times as many.
const MAX_MESSAGE: usize = 1000;
/// The CRD's limit of entries in `status.applied`.
const MAX_APPLIED: usize = 1024;

/// The parts of the status that do not depend on objects.
pub(super) struct Identity<'a> {
    pub(super) config: &'a GatewayConfig,
    pub(super) public_key: PublicKey,
    pub(super) backend: &'a str,
}

impl Identity<'_> {
    /// Builds the status of a gateway that applies `compiled`. `accesses` = all SandboxAccesses from which it was compiled.
    pub(super) fn status(
        &self,
        accesses: impl Iterator<Item = AppliedAccess>,
        compiled: &Compiled,
        endpoints: &[SocketAddr],
        troubles: &[Trouble],
    ) -> SandboxGatewayStatus {
        let applied = accesses.filter(|access| compiled.served.contains(&access.name));
        let shown = round_robin(&compiled.refused).into_iter().take(MAX_REFUSED);
        let mut messages: Vec<String> = troubles.iter().map(|trouble| trouble.message.clone()).collect();
        if let Some(first) = compiled.refused.first() {
            let count = compiled.refused.len();
            messages.push(format!("{count} left out, see status.refused; for example: {first}"));
        }
        SandboxGatewayStatus {
            public_key: self.public_key.to_string(),
            wireguard_ips: self.config.addresses.iter().map(ToString::to_string).collect(),
            endpoints: endpoints.iter().map(ToString::to_string).collect(),
            serves: self.config.serves.iter().cloned().collect(),
            pod_uid: self.config.pod_uid.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: self.backend.to_owned(),
            sandboxes: u32::try_from(compiled.served.len()).unwrap_or(u32::MAX),
            grants: u32::try_from(compiled.table.count_open_grants()).unwrap_or(u32::MAX),
            applied: applied.take(MAX_APPLIED).collect(),
            refused: shown.map(refused_access).collect(),
            message: messages.join("; ").chars().take(4 * MAX_MESSAGE).collect(),
        }
    }
}

/// Orders the list: grants first, because the controller reports them; within the grants, and within the rest, the first
/// entry of each SandboxAccess, then the second of each, and so on. So, in the limited list, neither wrong values from the
/// nodes of a sandbox nor many wrong grants of one sandbox displace the grants of other sandboxes.
fn round_robin(refused: &BTreeSet<Refused>) -> Vec<&Refused> {
    let mut seen: BTreeMap<(bool, &str), usize> = BTreeMap::new();
    let has_no_grant = |refused: &Refused| refused.grant.is_none();
    let mut out: Vec<_> = refused
        .iter()
        .map(|one| {
            let count = seen.entry((has_no_grant(one), &one.access)).or_default();
            *count += 1;
            ((has_no_grant(one), *count), one)
        })
        .collect();
    out.sort();
    out.into_iter().map(|(_, one)| one).collect()
}

fn refused_access(refused: &Refused) -> RefusedAccess {
    let grant = refused
        .grant
        .map(|(protocol, port)| format!("{}/{port}", protocol.as_str()));
    RefusedAccess {
        name: refused.access.clone(),
        field: refused.field.clone(),
        grant: grant.unwrap_or_default(),
        reason: refused.reason.as_str().to_owned(),
        message: refused.message.chars().take(MAX_MESSAGE).collect(),
    }
}

/// Writes the status when it changes, until the token is cancelled.
pub(super) async fn run(
    client: Client,
    gateway: GatewayName,
    mut wanted: watch::Receiver<SandboxGatewayStatus>,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let objects: Api<SandboxGateway> = Api::namespaced(client, &gateway.namespace);
    let mut last_error = String::new();
    let mut due = false;
    loop {
        if due {
            let status = wanted.borrow_and_update().clone();
            let wait = match write(&objects, &gateway, &status).await {
                Ok(()) => {
                    metrics.count_changes("publish", 1);
                    last_error.clear();
                    due = false;
                    WRITE_INTERVAL
                }
                Err(error) => {
                    metrics.count_error("publish");
                    if last_error != error {
                        tracing::warn!("cannot write the status of this gateway: {error}");
                        last_error = error;
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

/// Writes the status with a merge patch, in which empty lists and texts must be null so that old values are removed.
async fn write(
    objects: &Api<SandboxGateway>,
    gateway: &GatewayName,
    status: &SandboxGatewayStatus,
) -> Result<(), String> {
    let mut body = json!(status);
    for field in ["wireguardIPs", "endpoints", "serves", "applied", "refused", "message"] {
        if body.get(field).is_none() {
            body[field] = serde_json::Value::Null;
        }
    }
    let (patch, params) = (Patch::Merge(json!({"status": body})), PatchParams::default());
    let answer = objects.patch_status(&gateway.name, &params, &patch);
    match tokio::time::timeout(REQUEST_TIMEOUT, answer).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(format!(
            "there is no SandboxGateway {gateway}: make one for each pod of the StatefulSet, as deploy/gateway.yaml does"
        )),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(format!(
            "{}; deploy/gateway.yaml has the Role, which names each gateway",
            status.message
        )),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "no answer from the API server within {} s",
            REQUEST_TIMEOUT.as_secs()
        )),
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::gateway::Reason;
    use clustermesh_core::mesh::Protocol;

    use super::*;

    // threat: refusals-hidden
    #[test]
    fn refused_grants_alternate_and_precede_other_refusals() {
        let refused = |access: &str, field: u16, grant: bool| Refused {
            access: access.to_owned(),
            field: format!("spec.x[{field}]"),
            grant: grant.then_some((Protocol::Tcp, field)),
            reason: Reason::ServiceMissing,
            message: String::new(),
        };
        let many = (0..3).map(|field| refused("a", field, true));
        let all: BTreeSet<Refused> = many
            .chain([refused("a", 7, false), refused("b", 0, true), refused("c", 0, false)])
            .collect();
        let shown: Vec<(&str, &str)> = round_robin(&all)
            .into_iter()
            .map(|one| (&*one.access, &*one.field))
            .collect();
        let expected = [
            ("a", "spec.x[0]"),
            ("b", "spec.x[0]"),
            ("a", "spec.x[1]"),
            ("a", "spec.x[2]"),
            ("a", "spec.x[7]"),
            ("c", "spec.x[0]"),
        ];
        assert_eq!(shown, expected);
    }
}
