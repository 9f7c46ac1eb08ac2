//! Chooses the keepalives of Peers. Nodes behind NATs must keep their NAT bindings alive (design rule 8).

use std::num::NonZeroU16;

use super::{PeerPlanner, PeerSpec, discovered, endpoint};
use crate::plan::target::MeshMember;

/// Keepalive interval in seconds if there is a NAT between two nodes: many NATs drop the state of a UDP flow after 30 s.
pub(super) const NAT_KEEPALIVE: NonZeroU16 = NonZeroU16::new(25).unwrap();

impl<'a> PeerPlanner<'a, '_> {
    /// The keepalive of a source's Peers that have an endpoint: the highest `persistentKeepalive` of all entries (as in the
    /// predecessor), and [`NAT_KEEPALIVE`] or less if nodes of this target are behind a NAT, because they must keep their NAT binding
    /// alive. A node is considered behind a NAT if it publishes a keepalive, if other members see it at an address that it does not
    /// publish, or if it has addresses but none that can be an endpoint in the source. For Peers without an endpoint,
    /// [`Self::add_source`] uses [`NAT_KEEPALIVE`] or less.
    pub(super) fn keepalive(&self, source: &MeshMember<'a>) -> u16 {
        let floor = self
            .inputs
            .mesh_members
            .values()
            .map(|mesh_member| mesh_member.cluster.persistent_keepalive)
            .max()
            .unwrap_or(0);
        // The other direction: the endpoints of the target's nodes in the source.
        let context = endpoint::EndpointContext {
            source: &self.target.cluster,
            target_networks: &source.accepted,
            target_families: source.families,
            discovered: &source.discovered,
            discovered_by_others: None,
            resolved: &self.inputs.seen.resolved,
        };
        let has_nat_keepalive = self.has_nat_keepalive(&source.cluster.name, floor);
        let behind_nat = self.target.last_observed().is_some_and(|member| {
            member.nodes.values().any(|node| {
                // kg restarts all its sessions when a keepalive changes, so there a person decides.
                let is_reported = !self.runs_kg && discovered::is_behind_nat(node, &self.discovered_by_others);
                node.persistent_keepalive > 0
                    || is_reported
                    || has_nat_keepalive && endpoint::is_private_only(node)
                    || endpoint::has_any_address(node)
                        && endpoint::choose(node, &context).is_ok_and(|candidates| candidates.addresses.is_empty())
            })
        });
        if behind_nat { nat_keepalive(floor) } else { floor }
    }

    /// Whether existing Peers of the source have a keepalive for nodes behind NATs. It stays while a node of the target publishes only
    /// private addresses: the reports that caused it end when the reporting nodes lose their sessions, and without keepalives the node
    /// behind the NAT would not start a session again.
    fn has_nat_keepalive(&self, source: &str, floor: u16) -> bool {
        let keepalive = nat_keepalive(floor);
        let is_from_nat = |spec: &PeerSpec| spec.endpoint.is_some() && spec.persistent_keepalive == keepalive;
        let mut existing = self.existing.values();
        keepalive != floor
            && existing.any(|peer| self.is_our_peer_of(source, peer) && peer.spec.as_ref().is_ok_and(is_from_nat))
    }
}

/// The keepalive that keeps a NAT binding alive: the configured one, if that is short enough.
pub(super) fn nat_keepalive(configured: u16) -> u16 {
    match configured {
        0 => NAT_KEEPALIVE.get(),
        configured => configured.min(NAT_KEEPALIVE.get()),
    }
}
