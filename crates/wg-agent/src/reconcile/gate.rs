//! Whether a pass may begin: everything was read once, the node has its object, no kg owns its tunnel. Values only.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
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

/// Says that the node works from what an earlier process kept.
pub(super) fn from_cache(world: &World, file: &Path) -> Option<Trouble> {
    let remembered = world.remembered();
    (!remembered.is_empty()).then(|| {
        let message = format!(
            "the API server has not told yet, since this agent's start: {}; these are taken as an earlier process applied \
             them ({}), without Peers that require a policy; see to the API server, or to --kubeconfig",
            remembered.join(", "),
            file.display()
        );
        // A server that is away comes back; one that refuses wants somebody to look.
        match remembered.iter().any(|kind| world.refused.contains(kind)) {
            true => Trouble::new("cache", format!("{message} (it refuses to show them: see the agent's ClusterRole)")),
            false => Trouble::harmless("cache", message),
        }
    })
}
