//! Detects datapaths in which the firewall table cannot enforce PeerPolicies: packets that Cilium forwards may bypass
//! netfilter, and kube-proxy's IPVS translates destinations only after the table. `clustermesh_agent_core::datapath`
//! interprets Cilium's settings.

use std::time::{Duration, Instant};

use clustermesh_agent_core::datapath::cilium_bypass;
use clustermesh_api::annotations::IPVS;
use clustermesh_core::enforcement::IPVS_REMEDY;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use nix::net::if_::if_nametoindex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::store::Store;
use crate::metrics::Metrics;

/// Time between two checks of the interfaces.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time between two reads of Cilium's settings, which change with a rollout of Cilium.
const SETTINGS_INTERVAL: Duration = Duration::from_secs(60);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The interface that Cilium creates on each of its nodes.
const CILIUM: &str = "cilium_host";
/// The interface to which kube-proxy in mode ipvs assigns the addresses of Services (`pkg/proxy/ipvs/proxier.go`,
/// `defaultDummyDevice`). The interface stays when kube-proxy changes to another mode. The IPVS rules may stay,
/// too; the agent cannot see them.
const KUBE_IPVS: &str = "kube-ipvs0";

/// Checks only for problems that are known without a request to the API server.
pub(crate) fn initial() -> Option<DatapathProblem> {
    most_urgent(None, interface_exists(KUBE_IPVS))
}

/// Checks repeatedly until the token is cancelled. Sends each change to `problem`, and wakes the task that waits
/// for changes of `store`.
pub(crate) async fn run(
    client: Client,
    problem: watch::Sender<Option<DatapathProblem>>,
    store: Store,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut cilium_check: Option<(Instant, Option<DatapathProblem>)> = None;
    loop {
        cilium_check = match cilium_check {
            _ if !interface_exists(CILIUM) => None,
            Some((at, found)) if at.elapsed() < SETTINGS_INTERVAL => Some((at, found)),
            Some(_) | None => Some((Instant::now(), check_cilium(&client).await)),
        };
        let found = most_urgent(
            cilium_check.as_ref().and_then(|(_, found)| found.clone()),
            interface_exists(KUBE_IPVS),
        );
        metrics.set_bypassed(matches!(
            found,
            Some(DatapathProblem::Bypassed(_) | DatapathProblem::Ipvs)
        ));
        let changed = problem.send_if_modified(|before| {
            let changed = *before != found;
            *before = found;
            changed
        });
        if changed {
            store.wake();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

/// Checks once. `client` is called only if Cilium serves the node.
pub(crate) async fn check_once(client: impl AsyncFnOnce() -> Result<Client, String>) -> Option<DatapathProblem> {
    let cilium = if interface_exists(CILIUM) {
        match client().await {
            Ok(client) => check_cilium(&client).await,
            Err(error) => Some(DatapathProblem::Unknown(error)),
        }
    } else {
        None
    };
    most_urgent(cilium, interface_exists(KUBE_IPVS))
}

/// Chooses the problem to report: a bypass by Cilium, else IPVS, else that Cilium's settings are unknown.
fn most_urgent(cilium: Option<DatapathProblem>, ipvs: bool) -> Option<DatapathProblem> {
    match cilium {
        Some(DatapathProblem::Unknown(_)) | None if ipvs => Some(DatapathProblem::Ipvs),
        found => found,
    }
}

fn interface_exists(interface: &str) -> bool {
    if_nametoindex(interface).is_ok()
}

/// A problem with this node's datapath.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DatapathProblem {
    /// Packets bypass netfilter, for this reason.
    #[error(
        "DatapathBypassed: Cilium forwards packets of pods past netfilter on this node ({0}): PeerPolicies are not enforced on \
         these packets, and pods may fail to reach the mesh. Set enable-host-legacy-routing to \"true\" and \
         datapath-mode to \"veth\" in kube-system/cilium-config (Helm: bpf.hostLegacyRouting=true) and restart Cilium"
    )]
    Bypassed(&'static str),
    /// kube-proxy's IPVS translates addresses after the firewall table.
    #[error(
        "DatapathBypassed: the interface kube-ipvs0 exists, so kube-proxy runs, or ran, in mode ipvs, which translates packets \
         for Services after the firewall table: PeerPolicies do not match their real destinations. To have them enforced: \
         {IPVS_REMEDY}"
    )]
    Ipvs,
    /// Cilium's settings cannot be read.
    #[error(
        "Cilium serves this node, and kube-system/cilium-config cannot be read ({0}), so it is not known whether packets bypass \
         netfilter: allow this account to `get` that ConfigMap (as in deploy/agent.yaml)"
    )]
    Unknown(String),
}

impl DatapathProblem {
    /// For the Node's annotation: why the table cannot enforce PeerPolicies; empty = no reason is known.
    pub(crate) fn annotation(found: Option<&Self>) -> String {
        match found {
            Some(Self::Bypassed(why)) => (*why).to_owned(),
            Some(Self::Ipvs) => IPVS.to_owned(),
            Some(Self::Unknown(_)) | None => String::new(),
        }
    }
}

/// Reads Cilium's settings; `None` = no packets bypass netfilter.
async fn check_cilium(client: &Client) -> Option<DatapathProblem> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    match tokio::time::timeout(REQUEST_TIMEOUT, api.get_opt("cilium-config")).await {
        Ok(Ok(Some(map))) => cilium_bypass(&map.data.unwrap_or_default()).map(DatapathProblem::Bypassed),
        Ok(Ok(None)) => Some(DatapathProblem::Unknown("it does not exist".to_owned())),
        Ok(Err(error)) => Some(DatapathProblem::Unknown(error.to_string())),
        Err(_) => Some(DatapathProblem::Unknown(format!(
            "no answer within {} s",
            REQUEST_TIMEOUT.as_secs()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_bypass_is_reported_before_an_unknown_state() {
        let netkit = Some(DatapathProblem::Bypassed("datapath-mode is netkit"));
        let unknown = Some(DatapathProblem::Unknown("it does not exist".to_owned()));
        let problem = [
            (None, false),
            (unknown.clone(), false),
            (netkit.clone(), false),
            (None, true),
            (unknown.clone(), true),
            (netkit.clone(), true),
        ]
        .map(|(cilium, ipvs)| most_urgent(cilium, ipvs));
        let ipvs = || Some(DatapathProblem::Ipvs);
        assert_eq!(problem, [None, unknown, netkit.clone(), ipvs(), ipvs(), netkit]);
    }

    #[test]
    fn ipvs_is_reported_with_a_remedy() {
        assert_eq!(
            DatapathProblem::Ipvs.to_string(),
            "DatapathBypassed: the interface kube-ipvs0 exists, so kube-proxy runs, or ran, in mode ipvs, which translates \
             packets for Services after the firewall table: PeerPolicies do not match their real destinations. To have them \
             enforced: set mode: nftables (or iptables) in kube-proxy's configuration and restart it, then remove the interface \
             kube-ipvs0, which it leaves behind (`ip link delete kube-ipvs0`, or a reboot)"
        );
    }
}
