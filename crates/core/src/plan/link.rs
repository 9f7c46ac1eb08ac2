//! Which members are connected and how (rule 7). What is written then stands in [`super::target`] and [`super::peers`].

use std::collections::BTreeSet;

use super::{nodes::NodeRegistry, target::MeshMember};
use crate::{
    mesh::Profile,
    observe::{Claim, Member, Node, Server},
};

/// How a source is written into a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    /// Both are cluster-meshed.
    Meshed,
    /// The source is a sandbox with a grant toward the target.
    Sandbox,
    /// The target is a sandbox to which Services of the source are granted.
    Grantor,
}

/// Why one member is not written into another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NotConnected {
    /// Two entries of one cluster.
    SameCluster,
    /// This entry is connected to nothing.
    Standard(String),
    /// This entry holds no network that was accepted.
    NoNetworks(String),
    /// Both are sandboxes.
    Sandboxes,
    /// This sandbox has no grant toward the other.
    NoGrant(String),
}

/// How `source` is written into `target`. Two sandboxes never meet.
///
/// # Errors
/// It is not, and why.
pub(super) fn connectivity(target: &MeshMember<'_>, source: &MeshMember<'_>) -> Result<Link, NotConnected> {
    if target.cluster.identity.same_cluster(&source.cluster.identity) {
        return Err(NotConnected::SameCluster);
    }
    let both = [source, target];
    let of = |profile| {
        both.iter()
            .filter(move |mesh_member| mesh_member.cluster.profile == profile)
    };
    if let Some(mesh_member) = of(Profile::Standard).next() {
        return Err(NotConnected::Standard(mesh_member.cluster.name.clone()));
    }
    if of(Profile::Sandbox).count() == 2 {
        return Err(NotConnected::Sandboxes);
    }
    if let Some(mesh_member) = both.iter().find(|mesh_member| !mesh_member.connected) {
        return Err(NotConnected::NoNetworks(mesh_member.cluster.name.clone()));
    }
    let (link, sandbox, other) = if source.cluster.profile == Profile::Sandbox {
        (Link::Sandbox, source, target)
    } else if target.cluster.profile == Profile::Sandbox {
        (Link::Grantor, target, source)
    } else {
        return Ok(Link::Meshed);
    };
    let mut egress = sandbox.cluster.egress.iter();
    if egress.any(|grant| grant.cluster == other.cluster.name) {
        Ok(link)
    } else {
        Err(NotConnected::NoGrant(sandbox.cluster.name.clone()))
    }
}

/// How `source` is written into `target`; `None` = not at all.
pub(super) fn between(target: &MeshMember<'_>, source: &MeshMember<'_>) -> Option<Link> {
    connectivity(target, source).ok()
}

/// Nodes of a member that others have a Peer for.
fn hosting<'r>(registry: Option<&'r NodeRegistry<'_>>) -> BTreeSet<&'r str> {
    let registered = registry.into_iter().flat_map(|registry| &registry.registered);
    let held = registry.into_iter().flat_map(|registry| registry.held.keys());
    registered.map(|node| node.node).chain(held.copied()).collect()
}

/// Whether the nodes of a member hold another to a policy. A Peer in a cluster is read by every node there, so one that enforces
/// nothing is one too many. A Node that has just joined and published nothing has no tunnel.
pub(super) fn enforces_policies(member: &Member, registry: Option<&NodeRegistry<'_>>) -> bool {
    let hosting = hosting(registry);
    let serving = |(name, node): &(&String, &Node)| node.public_key != Claim::Absent || hosting.contains(&***name);
    let mut serving = member.nodes.iter().filter(serving).peekable();
    let enforced = |(_, node): (&String, &Node)| node.server == Server::Agent && node.bypassed.is_none();
    member.policies.is_some() && serving.peek().is_some() && serving.all(enforced)
}

/// Why the entry a grant names has nothing to give to `importer`.
pub(super) fn refusal(importer: &MeshMember<'_>, exporter: Option<&MeshMember<'_>>, name: &str) -> String {
    let words = |mesh_member: &MeshMember<'_>| match mesh_member.cluster.profile {
        Profile::Sandbox if mesh_member.cluster.name == name => Some(format!(
            "cluster {name:?} has isolationProfile sandbox: its pods have no address in the mesh, so it has no Service to give"
        )),
        Profile::Standard => Some(format!(
            "cluster {:?} has isolationProfile standard: it is connected to nothing",
            mesh_member.cluster.name
        )),
        _ => None,
    };
    exporter
        .and_then(words)
        .or_else(|| words(importer))
        .unwrap_or_else(|| format!("cluster {name:?} is not connected to this one"))
}

/// Whether packets of this entry are held to its grants, or to nothing: a sandbox, one that is quarantined, or one that is
/// listed alone and on its way out.
pub(super) const fn is_closed(mesh_member: &MeshMember<'_>) -> bool {
    !matches!(mesh_member.cluster.profile, Profile::ClusterMeshed) || mesh_member.cluster.quarantine
}
