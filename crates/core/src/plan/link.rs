//! Decides from the profiles and grants of two members whether and how they are connected (design rule 7).

use std::collections::BTreeSet;

use super::{nodes::NodeRegistry, target::MeshMember};
use crate::{
    mesh::{Addressing, Cluster, Profile},
    observe::{Claim, Member, Node, Server},
};

/// How a source is connected to a target. `Sandbox` and `Grantor` are roles of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Both are cluster-meshed.
    Meshed,
    /// The source is a sandbox with a grant for a Service of the target.
    Sandbox,
    /// The target is a sandbox that has a grant for a Service of the source.
    Grantor,
}

/// Why two members are not connected. The name in a variant is that of the entry that causes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotConnected {
    /// Both entries identify the same cluster.
    SameCluster,
    /// This entry has the profile standard.
    Standard(String),
    /// This entry has no accepted network.
    NoNetworks(String),
    /// Both are sandboxes.
    Sandboxes,
    /// This sandbox has no grant for a Service of the other member.
    NoGrant(String),
}

/// Decides from the profiles and grants of two members how `source` is connected to `target`. Ignores accepted networks.
///
/// # Errors
/// Why the two members are not connected.
pub fn decide_by_entries(target: &Cluster, source: &Cluster) -> Result<Link, NotConnected> {
    if target.identity.same_cluster(&source.identity) {
        return Err(NotConnected::SameCluster);
    }
    let both = [source, target];
    if let Some(standard) = both.iter().find(|cluster| cluster.profile == Profile::Standard) {
        return Err(NotConnected::Standard(standard.name.clone()));
    }
    let (link, sandbox, other) = match (source.profile, target.profile) {
        (Profile::Sandbox, Profile::Sandbox) => return Err(NotConnected::Sandboxes),
        (Profile::Sandbox, _) => (Link::Sandbox, source, target),
        (_, Profile::Sandbox) => (Link::Grantor, target, source),
        _ => return Ok(Link::Meshed),
    };
    let mut egress = sandbox.egress.iter();
    if egress.any(|grant| grant.cluster == other.name) {
        Ok(link)
    } else {
        Err(NotConnected::NoGrant(sandbox.name.clone()))
    }
}

/// Decides how `source` is connected to `target`.
///
/// # Errors
/// Why the two members are not connected.
pub(super) fn decide(target: &MeshMember<'_>, source: &MeshMember<'_>) -> Result<Link, NotConnected> {
    let decided = decide_by_entries(&target.cluster, &source.cluster);
    // Only in these two cases do the networks matter. `can_connect` is false for a standard member and for a member without
    // accepted networks. Neither member is standard here.
    if matches!(decided, Ok(_) | Err(NotConnected::NoGrant(_))) {
        let cannot_connect = [source, target].into_iter().find(|member| !member.can_connect);
        if let Some(member) = cannot_connect {
            return Err(NotConnected::NoNetworks(member.cluster.name.clone()));
        }
    }
    decided
}

/// Whether `importer` uses gateways to reach the Services of `exporter` that are in the importer's egress: the importer is a sandbox, or
/// the exporter is masqueraded, so that the exporter's pods have no addresses in the mesh.
pub(super) fn uses_gateways(exporter: &MeshMember<'_>, importer: &MeshMember<'_>) -> bool {
    let mut egress = importer.cluster.egress.iter();
    match between(exporter, importer) {
        Some(Link::Sandbox) => true,
        Some(Link::Meshed) => {
            exporter.cluster.effective_addressing() == Addressing::Masqueraded
                && egress.any(|grant| grant.cluster == exporter.cluster.name)
        }
        Some(Link::Grantor) | None => false,
    }
}

/// The result of [`decide`] without the reason; `None` = they are not connected.
pub(super) fn between(target: &MeshMember<'_>, source: &MeshMember<'_>) -> Option<Link> {
    decide(target, source).ok()
}

/// The result of [`between`]; `None` also if both are cluster-meshed, `source` is quarantined and some node of the target does not
/// enforce PeerPolicies (`is_not_enforcing`): on such a node, only deleting the Peers of `source` stops its traffic.
pub(super) fn between_enforced(
    target: &MeshMember<'_>,
    source: &MeshMember<'_>,
    is_not_enforcing: bool,
) -> Option<Link> {
    let link = between(target, source)?;
    let is_unenforced = link == Link::Meshed && source.cluster.quarantine && is_not_enforcing;
    (!is_unenforced).then_some(link)
}

/// Names of a member's registered and held nodes.
fn registered_and_held<'r>(registry: Option<&'r NodeRegistry<'_>>) -> BTreeSet<&'r str> {
    let registered = registry.into_iter().flat_map(|registry| &registry.registered);
    let held_names = registry.into_iter().flat_map(|registry| registry.held.keys());
    registered.map(|node| node.node).chain(held_names.copied()).collect()
}

/// Whether all nodes of a member that have a tunnel enforce PeerPolicies in both directions. Each node of a
/// cluster configures all Peers of the cluster, so one node that does not enforce policies is enough to admit the traffic of these
/// Peers. A node in policy mode does not count as enforcing, because it filters only packets from the tunnel; nor does a node whose
/// agent reports that packets bypass the PeerPolicies. A Node without a key has no tunnel, unless it is registered or
/// held. False if no node has a tunnel, or if the PeerPolicies of the member are not known.
pub(super) fn enforces_policies(member: &Member, registry: Option<&NodeRegistry<'_>>) -> bool {
    let registered_or_held = registered_and_held(registry);
    let has_tunnel =
        |(name, node): &(&str, &Node)| node.public_key != Claim::Absent || registered_or_held.contains(name);
    let mut with_tunnel = member.nodes.iter().filter(has_tunnel).peekable();
    let enforced = |(_, node): (&str, &Node)| node.server == Server::Agent && node.bypassed.is_none();
    member.policies.is_some() && with_tunnel.peek().is_some() && with_tunnel.all(enforced)
}

/// Why `importer` cannot use a Service of the cluster `name`, which its grant names. `exporter` is that cluster's entry; `None` = the mesh
/// has no such entry.
pub(super) fn refusal(importer: &MeshMember<'_>, exporter: Option<&MeshMember<'_>>, name: &str) -> String {
    let explain = |mesh_member: &MeshMember<'_>| match mesh_member.cluster.profile {
        Profile::Sandbox if mesh_member.cluster.name == name => Some(format!(
            "cluster {name:?} has isolationProfile sandbox: its pods have no address in the mesh, so its Services cannot be granted"
        )),
        Profile::Standard => Some(format!(
            "cluster {:?} has isolationProfile standard: it is not connected to any cluster",
            mesh_member.cluster.name
        )),
        _ => None,
    };
    exporter
        .and_then(explain)
        .or_else(|| explain(importer))
        .unwrap_or_else(|| format!("cluster {name:?} is not connected to this one"))
}

/// Whether policies for `source` must be closed: the source is quarantined or not cluster-meshed.
pub(super) fn is_closed(source: &MeshMember<'_>) -> bool {
    !matches!(source.cluster.profile, Profile::ClusterMeshed) || source.cluster.quarantine
}
