//! Decides whether a pass may begin: every kind is listed, cached or without CRD, the Node exists, and kg does not own the tunnel.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    cache::UnixTime,
    source::{objects::ParsedNode, store::ClusterSnapshot},
    status::Trouble,
};

/// kg writes its last-seen annotation every 30 s. kg counts as alive while that annotation is younger than this.
const KG_ALIVE_SECONDS: i64 = 60;
/// How long kg must be gone before an agent that has seen kg alive sets up its tunnel. An update of kg, with its image pull,
/// takes less. For the same time the controller keeps the Peers of a node without annotations.
const KG_GONE: Duration = Duration::from_secs(300);

/// Returns an error while a kind is pending: neither listed nor cached, and its CRD does not count as missing. After this error
/// a pass must not change anything.
pub(crate) fn check_first_lists(snapshot: &ClusterSnapshot) -> Result<(), Trouble> {
    let pending: Vec<String> = snapshot
        .pending_kinds()
        .iter()
        .map(|kind| match snapshot.errors.get(kind) {
            Some(error) => format!("{kind} ({error})"),
            None => (*kind).to_owned(),
        })
        .collect();
    if pending.is_empty() {
        Ok(())
    } else {
        Err(Trouble::new(
            "source",
            format!("waiting for the first list of: {}", pending.join(", ")),
        ))
    }
}

/// Finds this node's Node.
pub(crate) fn find_own_node(snapshot: &ClusterSnapshot, name: &str) -> Result<ParsedNode, Trouble> {
    snapshot.nodes.objects().find(|(node, _)| *node == name).map(|(_, seen)| seen.clone()).ok_or_else(|| {
        Trouble::new(
            "source",
            format!("there is no Node {name} in this cluster: correct --node-name, or wait for the kubelet to register it"),
        )
    })
}

/// Seconds since kg wrote `last-seen` on this Node, if that is recent. This agent never writes that annotation.
pub(crate) fn kg_age_if_alive(own_node: &ParsedNode, now: SystemTime) -> Option<i64> {
    let seen = own_node.own.as_ref().and_then(|own| own.kg_seen)?;
    age_if_alive(seen, now)
}

/// As [`kg_age_if_alive`], for a value of `last-seen` in Unix seconds.
pub(crate) fn age_if_alive(seen: i64, now: SystemTime) -> Option<i64> {
    let now = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
    Some(now.saturating_sub(seen)).filter(|ago| *ago < KG_ALIVE_SECONDS)
}

/// Remembers when kg was last alive on this node, and how far this agent has removed its own state because of kg. kg removes `last-seen`
/// whenever it exits, even if it restarts at once, so for some time a missing annotation does not prove that kg is gone.
#[derive(Debug, Default)]
pub(super) struct KgWatch {
    /// `None` = kg was never alive since this agent started. Then a missing annotation counts as proof that kg is gone.
    last_alive: Option<SystemTime>,
    /// This agent has removed its state because kg serves the node.
    pub(super) is_withdrawn: bool,
    /// The firewall table has to be removed, because an agent in full mode wrote it. Routes and policy routing rules prove that such
    /// an agent ran here, so this agent sets the field before it removes those routes and rules.
    pub(super) must_remove_table: bool,
}

impl KgWatch {
    /// Returns an error while kg owns the node's tunnel, or may own it again soon. Two programs cannot own one tunnel.
    pub(super) fn check(&mut self, own: &ParsedNode, now: SystemTime) -> Result<(), Trouble> {
        if kg_age_if_alive(own, now).is_some() {
            self.last_alive = Some(now);
            return Err(Trouble::new(
                "kg",
                format!(
                    "kg (Kilo) serves this node: kilo.squat.ai/last-seen is less than {KG_ALIVE_SECONDS} s old. Two programs cannot \
                     own kilo0: keep wg-agent off this node (nodeSelector), run it there with --mode=policy, or take kg off it; this \
                     agent starts by itself {} minutes after kg was last seen, or earlier if wg-agent's pod is \
                     restarted after kg ended",
                    KG_GONE.as_secs() / 60
                ),
            ));
        }
        // If the clock was set back, no time counts as elapsed.
        let elapsed = self.last_alive.map(|at| now.duration_since(at).unwrap_or_default());
        match elapsed {
            Some(elapsed) if elapsed < KG_GONE => Err(Trouble::new(
                "kg",
                format!(
                    "kg (Kilo) ended on this node and may be back in a moment: this agent starts {} minutes after kg was last seen, \
                     or as soon as wg-agent's pod is restarted",
                    KG_GONE.as_secs() / 60
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// Reports kinds whose objects come from the cache. If the API server refuses to list them, tunnels stay, because
/// revoked rights prove nothing about the mesh. But the agent is not ready then, since a person must restore the rights.
pub(super) fn cache_trouble(snapshot: &ClusterSnapshot, file: &Path, confirmed: UnixTime) -> Option<Trouble> {
    let cached_kinds = snapshot.cached_kinds();
    if cached_kinds.is_empty() {
        return None;
    }
    let origin = format!(
        "their objects come from the cache, which the API server last confirmed at {confirmed} ({})",
        file.display()
    );
    let forbidden: Vec<String> = (cached_kinds.iter())
        .filter(|kind| snapshot.forbidden_kinds.contains(**kind))
        .map(|kind| format!("{kind} ({})", snapshot.errors.get(kind).map_or("", String::as_str)))
        .collect();
    Some(if forbidden.is_empty() {
        let message = format!(
            "the API server has not listed these kinds since this agent started: {}; {origin}; check the API server and --kubeconfig",
            cached_kinds.join(", ")
        );
        Trouble::harmless("cache", message)
    } else {
        let message = format!(
            "the API server answers but refuses to list: {}; {origin}, and no changes arrive; check this agent's account \
             (ClusterRole and binding in deploy/agent.yaml) or --kubeconfig",
            forbidden.join(", ")
        );
        Trouble::new("cache", message)
    })
}
