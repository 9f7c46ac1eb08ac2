//! Whether packets pass by the firewall table on this node, looked at now and then: Cilium may lead them past netfilter, kube-proxy's
//! IPVS translates behind it. What Cilium's settings mean is `clustermesh_agent_core::datapath`'s.

use std::time::{Duration, Instant};

use clustermesh_agent_core::datapath::cilium_bypass;
use clustermesh_api::annotations::IPVS;
use clustermesh_core::enforcement::WITHOUT_IPVS;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use nix::net::if_::if_nametoindex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::store::Store;
use crate::metrics::Metrics;

/// Between two looks at the interfaces.
const EVERY: Duration = Duration::from_secs(2);
/// Between two looks at Cilium's settings, which change with a rollout of it.
const SETTINGS_EVERY: Duration = Duration::from_secs(60);
/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interface that Cilium makes on every node it serves.
const CILIUM: &str = "cilium_host";
/// The interface that kube-proxy in mode ipvs gives the addresses of Services to (`pkg/proxy/ipvs/proxier.go`, `defaultDummyDevice`).
/// Another mode leaves it there, and with it, as far as can be seen from here, its rules.
const KUBE_IPVS: &str = "kube-ipvs0";

/// What is known before anybody was asked.
pub(crate) fn at_first() -> Option<Found> {
    worst(None, there(KUBE_IPVS))
}

/// Says what is wrong whenever that changes, and rings, until the token is cancelled.
pub(crate) async fn run(
    client: Client,
    said: watch::Sender<Option<Found>>,
    store: Store,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut settings: Option<(Instant, Option<Found>)> = None;
    loop {
        settings = match settings {
            _ if !there(CILIUM) => None,
            Some((at, found)) if at.elapsed() < SETTINGS_EVERY => Some((at, found)),
            Some(_) | None => Some((Instant::now(), cilium(&client).await)),
        };
        let found = worst(settings.as_ref().and_then(|(_, found)| found.clone()), there(KUBE_IPVS));
        metrics.bypassed(matches!(found, Some(Found::Bypassed(_) | Found::Ipvs)));
        let changed = said.send_if_modified(|before| {
            let changed = *before != found;
            *before = found;
            changed
        });
        if changed {
            store.ring();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Looks once. Cilium's settings are read by this client, which is asked for where Cilium serves the node.
pub(crate) async fn look(client: impl AsyncFnOnce() -> Result<Client, String>) -> Option<Found> {
    let cilium = if there(CILIUM) {
        match client().await {
            Ok(client) => cilium(&client).await,
            Err(error) => Some(Found::Unknown(error)),
        }
    } else {
        None
    };
    worst(cilium, there(KUBE_IPVS))
}

/// Of two things the one to mend first; the other is heard of when that is done.
fn worst(cilium: Option<Found>, ipvs: bool) -> Option<Found> {
    match cilium {
        Some(Found::Unknown(_)) | None if ipvs => Some(Found::Ipvs),
        found => found,
    }
}

fn there(interface: &str) -> bool {
    if_nametoindex(interface).is_ok()
}

/// What a look came to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Found {
    /// Packets pass by netfilter; why.
    #[error(
        "DatapathBypassed: Cilium leads packets of pods past netfilter here ({0}): PeerPolicies are not enforced on what it \
         takes past the host's network stack, and pods may not reach the mesh. Set enable-host-legacy-routing to \"true\" and \
         datapath-mode to \"veth\" in kube-system/cilium-config (Helm: bpf.hostLegacyRouting=true) and restart Cilium"
    )]
    Bypassed(&'static str),
    /// kube-proxy's IPVS stands behind the table.
    #[error(
        "DatapathBypassed: the interface kube-ipvs0 is here, so kube-proxy runs, or ran, in mode ipvs, which translates packets \
         for Services after the firewall table looked at them: PeerPolicies do not see where those go. To be enforced here: \
         {WITHOUT_IPVS}"
    )]
    Ipvs,
    /// Cilium's settings cannot be read.
    #[error(
        "Cilium serves this node, and kube-system/cilium-config cannot be read ({0}), so it is not known whether packets pass \
         netfilter: let this account `get` that ConfigMap (deploy/agent.yaml does)"
    )]
    Unknown(String),
}

impl Found {
    /// For the Node's annotation: why packets pass by the table; empty = they are not known to.
    pub(crate) fn annotation(found: Option<&Self>) -> String {
        match found {
            Some(Self::Bypassed(why)) => (*why).to_owned(),
            Some(Self::Ipvs) => IPVS.to_owned(),
            Some(Self::Unknown(_)) | None => String::new(),
        }
    }
}

/// What Cilium's settings come to; `None` = packets pass netfilter.
async fn cilium(client: &Client) -> Option<Found> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    match tokio::time::timeout(PATIENCE, api.get_opt("cilium-config")).await {
        Ok(Ok(Some(map))) => cilium_bypass(&map.data.unwrap_or_default()).map(Found::Bypassed),
        Ok(Ok(None)) => Some(Found::Unknown("there is none".to_owned())),
        Ok(Err(error)) => Some(Found::Unknown(error.to_string())),
        Err(_) => Some(Found::Unknown(format!("no answer within {} s", PATIENCE.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leads_past_the_table_is_told_before_what_is_not_known() {
        let netkit = Some(Found::Bypassed("datapath-mode is netkit"));
        let unknown = Some(Found::Unknown("there is none".to_owned()));
        let said = [
            (None, false),
            (unknown.clone(), false),
            (netkit.clone(), false),
            (None, true),
            (unknown.clone(), true),
            (netkit.clone(), true),
        ]
        .map(|(cilium, ipvs)| worst(cilium, ipvs));
        let ipvs = || Some(Found::Ipvs);
        assert_eq!(said, [None, unknown, netkit.clone(), ipvs(), ipvs(), netkit]);
    }

    #[test]
    fn kube_proxys_ipvs_is_told_with_what_to_do_about_it() {
        assert_eq!(
            Found::Ipvs.to_string(),
            "DatapathBypassed: the interface kube-ipvs0 is here, so kube-proxy runs, or ran, in mode ipvs, which translates \
             packets for Services after the firewall table looked at them: PeerPolicies do not see where those go. To be enforced \
             here: set mode: nftables (or iptables) in kube-proxy's configuration and restart it, then remove the interface \
             kube-ipvs0, which it leaves behind (`ip link delete kube-ipvs0`, or a reboot)"
        );
    }
}
