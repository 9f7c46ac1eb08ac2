//! Tells the cluster what this gateway is: the status of the SandboxGateway of its name, written when it changes.

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

/// Between two writes.
const PACE: Duration = Duration::from_millis(500);
/// After one that failed.
const RETRY: Duration = Duration::from_secs(3);
/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the status shows of what is left out.
const SHOWN: usize = 20;
const MESSAGE: usize = 1000;
/// What the CRD takes of SandboxAccesses in force.
const APPLIED: usize = 1024;

/// What of the status does not follow from objects.
pub(super) struct Identity<'a> {
    pub(super) config: &'a GatewayConfig,
    pub(super) public_key: PublicKey,
    pub(super) backend: &'a str,
}

impl Identity<'_> {
    /// The status of a gateway that applies `compiled`. `accesses` = the SandboxAccesses that `compiled` follows from.
    pub(super) fn status(
        &self,
        accesses: impl Iterator<Item = AppliedAccess>,
        compiled: &Compiled,
        endpoints: &[SocketAddr],
        troubles: &[Trouble],
    ) -> SandboxGatewayStatus {
        let applied = accesses.filter(|access| compiled.served.contains(&access.name));
        let first = in_turns(&compiled.refused).into_iter().take(SHOWN);
        let mut messages: Vec<String> = troubles.iter().map(|trouble| trouble.message.clone()).collect();
        if let Some(first) = compiled.refused.first() {
            let count = compiled.refused.len();
            messages.push(format!("{count} left out, see status.refused; the first: {first}"));
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
            grants: u32::try_from(compiled.table.open()).unwrap_or(u32::MAX),
            applied: applied.take(APPLIED).collect(),
            refused: first.map(refused_access).collect(),
            message: messages.join("; ").chars().take(4 * MESSAGE).collect(),
        }
    }
}

/// The controller reports grants that are not served, so these come first; then one of each SandboxAccess, a second of each, and so on.
/// Neither what a sandbox's nodes claim nor many wrong grants of one sandbox push those of others out of the list.
fn in_turns(refused: &BTreeSet<Refused>) -> Vec<&Refused> {
    let mut seen: BTreeMap<(bool, &str), usize> = BTreeMap::new();
    let turn = |refused: &Refused| refused.grant.is_none();
    let mut out: Vec<_> = refused
        .iter()
        .map(|one| {
            let before = seen.entry((turn(one), &one.access)).or_default();
            *before += 1;
            ((turn(one), *before), one)
        })
        .collect();
    out.sort();
    out.into_iter().map(|(_, one)| one).collect()
}

fn refused_access(refused: &Refused) -> RefusedAccess {
    let grant = refused
        .grant
        .map(|(protocol, port)| format!("{}/{port}", protocol.to_string().to_uppercase()));
    RefusedAccess {
        name: refused.access.clone(),
        field: refused.field.clone(),
        grant: grant.unwrap_or_default(),
        reason: refused.reason.as_str().to_owned(),
        message: refused.message.chars().take(MESSAGE).collect(),
    }
}

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

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::{gateway::Reason, policy::Protocol};

    use super::*;

    #[test]
    fn refused_parts_of_every_sandbox_are_shown_in_turns() {
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
        let shown: Vec<(&str, &str)> = in_turns(&all)
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
