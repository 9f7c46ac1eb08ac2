//! Chooses the keepalives of Peers. Nodes behind NATs must keep their NAT bindings alive (design rule 8).

use std::num::NonZeroU16;

use super::{PeerPlanner, discovered, endpoint};
use crate::{
    observe::Node,
    plan::target::{MeshInputs, MeshMember},
};

/// Keepalive interval in seconds if there is a NAT between two nodes: many NATs drop the state of a UDP flow after 30 s.
pub(super) const NAT_KEEPALIVE: NonZeroU16 = NonZeroU16::new(25).unwrap();

impl MeshInputs<'_> {
    /// The highest `persistentKeepalive` of all entries, as in the predecessor.
    pub(in crate::plan) fn configured_keepalive(&self) -> u16 {
        let members = self.mesh_members.values();
        let keepalives = members.map(|mesh_member| mesh_member.cluster.persistent_keepalive);
        keepalives.max().unwrap_or(0)
    }
}

impl<'a, 'p> PeerPlanner<'a, 'p> {
    /// The keepalive of a source's Peers that have an endpoint: the highest `persistentKeepalive` of all entries (as in the
    /// predecessor). If a node of this target is behind a NAT, [`nat_keepalive`] of that value. [`Self::add_node`]
    /// always uses [`nat_keepalive`] for Peers without an endpoint.
    ///
    /// A node counts as behind a NAT in each of these cases:
    /// - It publishes a keepalive.
    /// - Other members see it at an address that it does not publish, and `kg` does not serve the target. If the source is the target
    ///   itself (it connects its locations), it also counts if other nodes of the target see the node so.
    /// - It has only private addresses, and existing Peers of the source have a keepalive for NATs ([`Self::has_nat_keepalive`]).
    /// - It has addresses, but none that can be an endpoint in the source.
    pub(super) fn keepalive(&self, source: &MeshMember<'a>) -> u16 {
        let configured = self.inputs.configured_keepalive();
        let has_nat_keepalive = self.has_nat_keepalive(&source.cluster.name);
        let is_behind_nat = self.nat_test(source, has_nat_keepalive);
        let member = self.target.last_observed();
        if member.is_some_and(|member| member.nodes.values().any(is_behind_nat)) {
            nat_keepalive(configured)
        } else {
            configured
        }
    }

    /// Returns a function that decides whether a node of the target counts as behind a NAT for Peers of this source.
    pub(in crate::plan) fn nat_test<'s>(
        &'s self,
        source: &'s MeshMember<'a>,
        has_nat_keepalive: bool,
    ) -> impl Fn(&Node) -> bool + use<'s, 'a, 'p> {
        // Source and target change places here: the context is for the Peers of the target's nodes in the source.
        let context = endpoint::EndpointContext {
            source: &self.target.cluster,
            target_networks: if source.cluster.name == self.name {
                &[]
            } else {
                &source.accepted
            },
            target_families: source.families,
            discovered: &source.discovered,
            discovered_by_others: None,
            resolved: &self.inputs.seen.resolved,
        };
        let is_own = source.cluster.name == self.name;
        move |node| {
            // kg restarts all its sessions when a keepalive changes, so reports of other nodes must not change its keepalives.
            // Users can set `persistentKeepalive` instead.
            let is_seen = |by| discovered::is_behind_nat(node, by);
            let is_reported =
                !self.runs_kg && (is_seen(&self.discovered_by_others) || is_own && is_seen(&self.target.discovered));
            node.persistent_keepalive > 0
                || is_reported
                || has_nat_keepalive && endpoint::is_private_only(node)
                || endpoint::has_any_address(node)
                    && !endpoint::has_public_candidate(node, &context)
                    && endpoint::choose(node, &context).is_ok_and(|candidates| candidates.addresses.is_empty())
        }
    }

    /// Whether existing Peers of the source have a keepalive for NATs. Such a keepalive must outlast the reports of other members
    /// that caused it: these reports end when the reporting nodes lose their sessions, and without keepalives the node behind the
    /// NAT would not start a session again.
    pub(in crate::plan) fn has_nat_keepalive(&self, source: &str) -> bool {
        let configured = self.inputs.configured_keepalive();
        nat_keepalive(configured) != configured && self.existing.with_nat_keepalive.contains(source)
    }
}

/// The keepalive that keeps a NAT binding alive: the configured one, if that is short enough.
pub(in crate::plan) fn nat_keepalive(configured: u16) -> u16 {
    match configured {
        0 => NAT_KEEPALIVE.get(),
        configured => configured.min(NAT_KEEPALIVE.get()),
    }
}
