//! Whether a pass may begin: everything was read once, the node has its object, no kg owns its tunnel. Values only.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    cache::Stamp,
    source::{objects::NodeSeen, store::World},
    status::Trouble,
};

/// A check-in of kg that is not older than this is one of a kg that lives: it writes every 30 s (KILO.md §2).
const KG_ALIVE_SECONDS: i64 = 60;
/// How long kg may be away before it counts as gone: a new image is pulled in less. The controller holds the Peers of such a
/// node for as long.
const KG_GONE: Duration = Duration::from_secs(300);

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
    let seen = own.own.as_ref().and_then(|own| own.kg_seen)?;
    is_alive(seen, now)
}

/// The same of a value of `last-seen`, Unix seconds.
pub(crate) fn is_alive(seen: i64, now: SystemTime) -> Option<i64> {
    let now = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
    Some(now.saturating_sub(seen)).filter(|ago| *ago < KG_ALIVE_SECONDS)
}

/// When kg was last seen at work on this node. kg removes `last-seen` whenever it ends, also where it is back a moment later,
/// so that an annotation that is missing does not yet say that kg is gone.
#[derive(Debug, Default)]
pub(super) struct KgWatch {
    last_alive: Option<SystemTime>,
}

impl KgWatch {
    /// Whether the node's tunnel is free: two programs cannot own it.
    pub(super) fn check(&mut self, own: &NodeSeen, now: SystemTime) -> Result<(), Trouble> {
        if kg_lives(own, now).is_some() {
            self.last_alive = Some(now);
            return Err(Trouble::new(
                "kg",
                format!(
                    "kg (Kilo) serves this node: kilo.squat.ai/last-seen is less than {KG_ALIVE_SECONDS} s old. Two programs cannot \
                     own kilo0: keep wg-agent off this node (nodeSelector), run it there with --mode=policy, or take kg off it; this \
                     agent starts by itself {} minutes after kg has ended, or as soon as its pod is restarted then",
                    KG_GONE.as_secs() / 60
                ),
            ));
        }
        // A clock that was set back counts as no time.
        let since = self.last_alive.map(|at| now.duration_since(at).unwrap_or_default());
        match since {
            Some(since) if since < KG_GONE => Err(Trouble::new(
                "kg",
                format!(
                    "kg (Kilo) ended on this node and may be back in a moment: this agent starts {} minutes after kg was last seen, \
                     or as soon as its pod is restarted",
                    KG_GONE.as_secs() / 60
                ),
            )),
            _ => Ok(()),
        }
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
        "these are taken as the API server confirmed them last, at {confirmed} ({})",
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
