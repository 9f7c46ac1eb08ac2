//! The Peers of a source's changed Nodes in one target.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::{MeshFollower, NotFollowed, Patch, nodes::Changed};
use crate::{
    key::PublicKey,
    observe::{ChangedRow, Endpoint, Node},
    plan::{
        PlannedPeer, anchor, endpoint,
        peers::{PeerPlanner, RegisteredPeers},
        target::MeshInputs,
    },
};

/// A Peer, with its name.
type Named = (String, Arc<PlannedPeer>);

/// A target, and a source with changed Nodes.
pub(super) struct Pair<'p, 'a> {
    pub(super) follower: &'p MeshFollower<'a>,
    pub(super) source: &'p str,
    pub(super) target: &'p str,
    pub(super) changed: &'p Changed<'p>,
    pub(super) old: &'p MeshInputs<'p>,
    pub(super) new: &'p MeshInputs<'p>,
}

impl<'p> Pair<'p, '_> {
    /// Adds the changed Peers to the patch. Adds to `was` and `is` the changed nodes that have a Peer in the target, before and after.
    pub(super) fn follow(
        &self,
        patch: &mut Patch,
        was: &mut BTreeSet<&'p str>,
        is: &mut BTreeSet<&'p str>,
    ) -> Result<(), NotFollowed> {
        let registered = |inputs: &'p MeshInputs<'p>| &inputs.registries[self.source].registered;
        let (old, new) = (registered(self.old), registered(self.new));
        if old.is_empty() && new.is_empty() {
            return Ok(());
        }
        let id = self.new.mesh;
        let rows = self.changed.rows.iter();
        let names = rows.flat_map(|row| {
            [false, true].map(|is_name_taken| self.new.naming.peer(id, self.source, row.name, is_name_taken))
        });
        let target = &self.follower.kept.targets[self.target];
        if !target.irregular.is_empty() {
            return Err("an existing Peer has another name, source or key than the planned one");
        }
        // The existing Peers that can influence the Peers of the changed Nodes. As no Peer is irregular, each other existing Peer
        // matches the planned Peer of another Node in name, source and key.
        let relevant_peers: BTreeSet<String> = names.chain(target.foreign.iter().cloned()).collect();
        let keepalive = self.keepalive()?;
        let plan = |inputs: &'p MeshInputs<'p>| {
            let target = &inputs.mesh_members[self.target];
            let planner = PeerPlanner::with_existing(inputs, self.target, target, Some(&relevant_peers));
            planner.plan_registered(self.source, keepalive)
        };
        let (planned_before, planned_after) = (plan(self.old), plan(self.new));
        if planned_before.reports != planned_after.reports {
            return Err("what is reported about the Peers of a changed Node is different");
        }
        for row in self.changed.rows {
            let old = planned_before.peers.get(row.name);
            let new = planned_after.peers.get(row.name);
            was.extend(old.map(|_| row.name));
            is.extend(new.map(|_| row.name));
            let parts = self.parts_of(row, old)?;
            self.check_anchors(row, old, new, !parts.is_empty(), &planned_after)?;
            self.check_endpoints(old, new, &planned_after)?;
            let target_plan = patch.peers.entry(self.target.to_owned()).or_default();
            let old_name = old.map(|(name, _)| name);
            let Some((name, peer)) = new else {
                target_plan.extend(old_name.map(|name| (name.clone(), None)));
                continue;
            };
            let mut peer = Arc::clone(peer);
            if !parts.is_empty() {
                peer.spec_mut().allowed_ips.extend(parts);
            }
            let existing = self.planned().get(name);
            if old_name != Some(name) && (existing.is_some() || target_plan.contains_key(name)) {
                return Err("the name of a Peer is planned already");
            }
            if existing == Some(&peer) {
                continue;
            }
            target_plan.extend(old_name.filter(|old| *old != name).map(|name| (name.clone(), None)));
            target_plan.insert(name.clone(), Some(peer));
        }
        Ok(())
    }

    /// The last plan of the target.
    fn planned(&self) -> &'p BTreeMap<String, Arc<PlannedPeer>> {
        &self.follower.planned.targets[self.target].peers
    }

    /// The keepalive that the last plan of this target has in the source's Peers. Only Peers with an endpoint show it.
    fn keepalive(&self) -> Result<u16, NotFollowed> {
        let id = self.new.mesh;
        let names = self
            .changed
            .rows
            .iter()
            .map(|row| self.new.naming.peer(id, self.source, row.name, false));
        let first: Vec<_> = names.filter_map(|name| self.planned().get(&name)).collect();
        let mut peers = first.into_iter().chain(self.planned().values());
        let peer = peers.find(|peer| peer.source == self.source && peer.spec.endpoint.is_some());
        let peer = peer.ok_or("the source has no Peer with an endpoint in a target")?;
        Ok(peer.spec.persistent_keepalive)
    }

    /// Checks that the last plan has the Peer `old` of a changed Node, or no Peer of it if `old` is `None`. The Peer in the last
    /// plan may also contain parts of anchored networks. Returns these parts.
    fn parts_of(&self, row: &ChangedRow<'_, Node>, old: Option<&Named>) -> Result<Vec<IpNet>, NotFollowed> {
        let Some((name, peer)) = old else {
            let id = self.new.mesh;
            let names =
                [false, true].map(|is_name_taken| self.new.naming.peer(id, self.source, row.name, is_name_taken));
            let is_of_node = |peer: &Arc<PlannedPeer>| peer.source == self.source && peer.node == row.name;
            if names.iter().filter_map(|name| self.planned().get(name)).any(is_of_node) {
                return Err("the Peer of a changed Node depends on other Nodes");
            }
            return Ok(Vec::new());
        };
        let planned = self
            .planned()
            .get(name)
            .ok_or("the last plan has no Peer of a changed Node with its name")?;
        let prefixes = &peer.spec.allowed_ips;
        let parts: Vec<IpNet> = planned.spec.allowed_ips.difference(prefixes).copied().collect();
        let mut expected = Arc::clone(peer);
        expected.spec_mut().allowed_ips.extend(&parts);
        let anchored = self.follower.kept.anchored_in_peers(self.source);
        let is_anchored = |part: &IpNet| anchored.iter().any(|net| net.contains(part));
        if expected != *planned || !parts.iter().all(is_anchored) {
            return Err("the Peer of a changed Node depends on other Nodes");
        }
        Ok(parts)
    }

    /// Checks that the anchors stay the same. `is_anchor` = in the last plan, the node's Peer has a part of an anchored network.
    fn check_anchors(
        &self,
        row: &ChangedRow<'_, Node>,
        old: Option<&Named>,
        new: Option<&Named>,
        is_anchor: bool,
        planned_after: &RegisteredPeers<'_, '_>,
    ) -> Result<(), NotFollowed> {
        let kept = self.follower.kept;
        let anchored = kept.anchored_in_peers(self.source);
        if anchored.is_empty() {
            return Ok(());
        }
        let endpoints = [old, new]
            .into_iter()
            .flatten()
            .flat_map(|(_, peer)| endpoint::peer_endpoint_ips(&peer.spec));
        let mut anchored_endpoints = endpoints.filter(|ip| anchored.iter().any(|net| net.contains(ip)));
        if planned_after.runs_kg && anchored_endpoints.next().is_some() {
            return Err("an endpoint lies in an anchored network");
        }
        let suitability = |node: Option<&Node>, planned: Option<&Named>| {
            let (node, (_, peer)) = node.zip(planned)?;
            let usable = node.ready && !node.deleting && peer.spec.endpoint.is_some();
            Some((usable, anchor::rank(node)))
        };
        let (was, is) = (suitability(row.before, old), suitability(row.after, new));
        if was == is {
            return Ok(());
        }
        // If the existing Peer of a node has an anchored network, the node stays its anchor as long as it is usable and no usable
        // node has a better rank. While no existing Peer of a suitable node has the network (`KeptTarget::unsettled`), a change of
        // any node's suitability can change the choice.
        let has_unsettled_anchors = kept.targets[self.target].unsettled.contains(self.source);
        if is_anchor || has_unsettled_anchors {
            return Err("an anchor changed");
        }
        // The smallest rank is best. The anchors stay if the changed node's rank is not better than theirs.
        let report = &self.follower.planned.clusters[self.source];
        let anchors: BTreeSet<&String> = report.anchored.values().flatten().collect();
        let member = self.new.mesh_members[self.source].last_observed();
        let rank_of = |name: &String| member.and_then(|member| member.nodes.get(name)).map(anchor::rank);
        let worst = anchors.into_iter().filter_map(rank_of).max();
        match worst {
            Some(worst) if is.is_none_or(|(_, rank)| rank >= worst) => Ok(()),
            _ => Err("an anchor may change"),
        }
    }

    /// Checks that no other node of the source has the address of the endpoint (`spec.endpoint`) that this node gained or lost.
    fn check_endpoints(
        &self,
        old: Option<&Named>,
        new: Option<&Named>,
        planned_after: &RegisteredPeers<'_, '_>,
    ) -> Result<(), NotFollowed> {
        let endpoint_of = |planned: Option<&Named>| match planned?.1.spec.endpoint {
            Some(Endpoint::Ip(address)) => Some(address),
            _ => None,
        };
        let keys: Vec<PublicKey> = [old, new]
            .into_iter()
            .flatten()
            .map(|(_, peer)| peer.spec.public_key)
            .collect();
        let (old, new) = (endpoint_of(old), endpoint_of(new));
        if old == new {
            return Ok(());
        }
        let endpoints: Vec<SocketAddr> = old.into_iter().chain(new).collect();
        let has = |ip: IpAddr| endpoints.iter().any(|endpoint| endpoint.ip() == ip);
        let seen = self.follower.after.seen;
        let mut others = self.follower.others(self.source, self.changed);
        let mut discovered = planned_after.discovered().filter(|(key, _)| !keys.contains(key));
        if others.any(|(_, node)| endpoint::node_addresses(node).any(has))
            || seen.resolved.values().any(|ip| has(ip.to_canonical()))
            || discovered.any(|(_, endpoints)| endpoints.iter().any(|endpoint| has(endpoint.ip().to_canonical())))
        {
            return Err("two Nodes have, or had, the same endpoint");
        }
        Ok(())
    }
}
