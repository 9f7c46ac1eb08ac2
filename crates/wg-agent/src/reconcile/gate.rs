//! Whether a pass may begin: everything was read once, the node has its object, no kg owns its tunnel. Values only.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    cache::Stamp,
    source::{objects::NodeSeen, store::World},
    status::Trouble,
};

/// A check-in of kg that is not older than this is one of a kg that lives: it writes every 30 s (KILO.md §2).
const KG_ALIVE_SECONDS: i64 = 60;

/// Nothing is touched before everything was read once.
pub(crate) fn waiting(world: &World) -> Result<(), Trouble> {
    let pending: Vec<String> = world
        .pending()
        .iter()
        .map(|kind| match world.errors.get(kind) {
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

/// This node's object.
pub(crate) fn own_node(world: &World, name: &str) -> Result<NodeSeen, Trouble> {
    world.nodes.known().find(|(node, _)| *node == name).map(|(_, seen)| seen.clone()).ok_or_else(|| {
        Trouble::new(
            "source",
            format!("there is no Node {name} in this cluster: correct --node-name, or wait for the kubelet to register it"),
        )
    })
}

/// How many seconds ago kg checked in for this node, if it lives. This agent never writes `last-seen`, so a fresh one is
/// kg's.
pub(crate) fn kg_lives(own: &NodeSeen, now: SystemTime) -> Option<i64> {
    let now = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
    let seen = own.own.as_ref().and_then(|own| own.kg_seen)?;
    Some(now.saturating_sub(seen)).filter(|ago| *ago < KG_ALIVE_SECONDS)
}

/// Two programs cannot own one node's tunnel.
pub(super) fn beside_kg(own: &NodeSeen, now: SystemTime) -> Result<(), Trouble> {
    match kg_lives(own, now) {
        Some(ago) => Err(Trouble::new(
            "kg",
            format!(
                "kg (Kilo) serves this node: it wrote kilo.squat.ai/last-seen {ago} s ago. Two programs cannot own kilo0: keep \
                 wg-agent off this node (nodeSelector), run it there with --mode=policy, or take kg off it; this agent starts \
                 by itself a minute later"
            ),
        )),
        None => Ok(()),
    }
}

/// Says that the node works from what an earlier process kept. Tunnels are kept also where the API server refuses, as a
/// running agent keeps them: rights that are lost say nothing of the mesh. But such a node is not ready, since it is for
/// somebody to mend.
pub(super) fn from_cache(world: &World, file: &Path, confirmed: Stamp) -> Option<Trouble> {
    let remembered = world.remembered();
    if remembered.is_empty() {
        return None;
    }
    let taken = format!(
        "these are taken as the API server confirmed them last, at {confirmed} ({}), without Peers that require a policy",
        file.display()
    );
    let refused: Vec<String> = (remembered.iter())
        .filter(|kind| world.refused.contains(**kind))
        .map(|kind| format!("{kind} ({})", world.errors.get(kind).map_or("", String::as_str)))
        .collect();
    // A server that is away comes back; one that refuses wants somebody to look.
    Some(if refused.is_empty() {
        let message = format!(
            "the API server has not told yet, since this agent's start: {}; {taken}; see to the API server, or to --kubeconfig",
            remembered.join(", ")
        );
        Trouble::harmless("cache", message)
    } else {
        let message = format!(
            "the API server answers and refuses to show: {}; {taken}, and nothing new is learnt; see to this agent's account \
             (ClusterRole and binding in deploy/agent.yaml) or to --kubeconfig",
            refused.join(", ")
        );
        Trouble::new("cache", message)
    })
}
