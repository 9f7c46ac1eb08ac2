//! Whether Cilium on this node leads packets past netfilter, looked at now and then; what its settings mean is
//! `clustermesh_agent_core::datapath`'s.

use std::time::Duration;

use clustermesh_agent_core::datapath::cilium_bypass;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Between two looks: settings of a CNI change with a rollout of it.
const EVERY: Duration = Duration::from_secs(60);
/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interface that Cilium makes on every node it serves.
const INTERFACE: &str = "cilium_host";

/// Says what is wrong whenever that changes, until the token is cancelled.
pub(crate) async fn run(client: Client, said: watch::Sender<Option<Found>>, metrics: Metrics, stop: CancellationToken) {
    loop {
        let found = if serves() { look(&client).await } else { None };
        metrics.bypassed(matches!(found, Some(Found::Bypassed(_))));
        said.send_if_modified(|before| {
            let changed = *before != found;
            *before = found;
            changed
        });
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Whether Cilium serves this node.
pub(crate) fn serves() -> bool {
    nix::net::if_::if_nametoindex(INTERFACE).is_ok()
}

/// What a look came to where Cilium serves the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Found {
    /// Packets pass by netfilter; why.
    #[error(
        "DatapathBypassed: Cilium leads packets of pods past netfilter here ({0}): PeerPolicies are not enforced on what it \
         takes past the host's network stack, and pods may not reach the mesh. Set enable-host-legacy-routing to \"true\" and \
         datapath-mode to \"veth\" in kube-system/cilium-config (Helm: bpf.hostLegacyRouting=true) and restart Cilium"
    )]
    Bypassed(&'static str),
    /// Its settings cannot be read.
    #[error(
        "Cilium serves this node, and kube-system/cilium-config cannot be read ({0}), so it is not known whether packets pass \
         netfilter: let this account `get` that ConfigMap (deploy/agent.yaml does)"
    )]
    Unknown(String),
}

impl Found {
    /// For the Node's annotation: why packets pass by netfilter; empty = they are not known to.
    pub(crate) fn annotation(found: Option<&Self>) -> String {
        match found {
            Some(Self::Bypassed(why)) => (*why).to_owned(),
            Some(Self::Unknown(_)) | None => String::new(),
        }
    }
}

/// Looks once; `None` = packets pass netfilter. Only where Cilium [`serves`].
pub(crate) async fn look(client: &Client) -> Option<Found> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    match tokio::time::timeout(PATIENCE, api.get_opt("cilium-config")).await {
        Ok(Ok(Some(map))) => cilium_bypass(&map.data.unwrap_or_default()).map(Found::Bypassed),
        Ok(Ok(None)) => Some(Found::Unknown("there is none".to_owned())),
        Ok(Err(error)) => Some(Found::Unknown(error.to_string())),
        Err(_) => Some(Found::Unknown(format!("no answer within {} s", PATIENCE.as_secs()))),
    }
}
