//! The Peers of a source's changed Nodes in one target.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::{Anew, MeshFollower, Patch, nodes::Changed};
use crate::{
    diff::Item,
    key::PublicKey,
    observe::{ChangedRow, Endpoint, Node, PeerSpec},
    plan::{
        PlannedPeer, anchor, endpoint,
        nodes::RegisteredNode,
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
    /// Adds to `was` and `is` the changed nodes that have a Peer in the target, before and after.
    pub(super) fn follow(
        &self,
        patch: &mut Patch,
        was: &mut BTreeSet<&'p str>,
        is: &mut BTreeSet<&'p str>,
    ) -> Result<(), Anew> {
        let registered = |inputs: &'p MeshInputs<'p>| &inputs.registries[self.source].registered;
        let (old, new) = (registered(self.old), registered(self.new));
        if old.is_empty() && new.is_empty() {
            return Ok(());
        }
        let id = self.new.mesh;
        let rows = self.changed.rows.iter();
        let names = rows
            .flat_map(|row| [false, true].map(|is_taken| self.new.naming.peer(id, self.source, row.name, is_taken)));
        let names: BTreeSet<String> = names.collect();
        let mut only = names.clone();
        let claims = |nodes: &'p [RegisteredNode<'p>]| nodes.iter().map(|node| (node.node, node.key, &node.prefixes));
        if !claims(old).eq(claims(new)) {
            only.extend(self.peers_that_may_have_claims());
        }
        let keepalive = self.keepalive()?;
        let plan = |inputs: &'p MeshInputs<'p>, only: &BTreeSet<String>| {
            let planner =
                PeerPlanner::with_existing(inputs, self.target, &inputs.mesh_members[self.target], Some(only));
            planner.plan_registered(self.source, keepalive)
        };
        for row in self.changed.rows {
            self.check_own_name(row)?;
        }
        let (planned_before, planned_after) = (plan(self.old, &names), plan(self.new, &only));
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
            if !names.contains(name) {
                return Err("the Peer of a changed Node keeps a name of its own");
            }
            let mut peer = Arc::clone(peer);
            if !parts.is_empty() {
                Arc::make_mut(&mut peer).spec.allowed_ips.extend(parts);
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

    /// The existing Peers of the target that may have a key or prefix which no Node but a changed one publishes: those of other owners, and
    /// those that differ from the last plan.
    fn peers_that_may_have_claims(&self) -> impl Iterator<Item = String> {
        let foreign = self.follower.kept.targets.get(self.target);
        let foreign = foreign.into_iter().flat_map(|target| target.foreign.iter().cloned());
        let identity = &self.new.mesh_members[self.target].cluster.identity;
        let steps = self.follower.steps.get(identity).into_iter().flatten();
        let differing = steps.filter_map(|step| match &step.item {
            Item::Peer(name, _) => Some(name.clone()),
            _ => None,
        });
        foreign.chain(differing)
    }

    /// The last plan of the target.
    fn planned(&self) -> &'p BTreeMap<String, Arc<PlannedPeer>> {
        &self.follower.planned.targets[self.target].peers
    }

    /// If a node is registered now, or is not any more, other nodes must not keep, or begin to keep, the name that the rule gives to it.
    fn check_own_name(&self, row: &ChangedRow<'_, Node>) -> Result<(), Anew> {
        let key = |inputs: &'p MeshInputs<'p>| {
            let mut nodes = inputs.registries[self.source].registered.iter();
            nodes.find(|node| node.node == row.name).map(|node| node.key)
        };
        let (old, new) = (key(self.old), key(self.new));
        if old.is_some() == new.is_some() {
            return Ok(());
        }
        let name = self.new.naming.peer(self.new.mesh, self.source, row.name, false);
        let is_of_other = |peer: &Arc<PlannedPeer>| peer.source != self.source || peer.node != row.name;
        let has_other_key = self
            .existing(&name)
            .is_some_and(|spec| ![old, new].contains(&Some(spec.public_key)));
        if has_other_key || self.planned().get(&name).is_some_and(is_of_other) {
            return Err("another Node may keep the name of a changed Node's Peer");
        }
        Ok(())
    }

    /// The spec of the existing Peer with this name.
    fn existing(&self, name: &str) -> Option<&'p PeerSpec> {
        let member = self.new.mesh_members[self.target].last_observed()?;
        member.peers.as_ref()?.get(name)?.spec.as_ref().ok()
    }

    /// The keepalive of the source's Peers with an endpoint in this target, as the last plan has it.
    fn keepalive(&self) -> Result<u16, Anew> {
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

    /// Checks that the last plan has this Peer of a changed Node. Returns the parts of anchored networks that the Peer contains there.
    fn parts_of(&self, row: &ChangedRow<'_, Node>, old: Option<&Named>) -> Result<Vec<IpNet>, Anew> {
        let Some((name, peer)) = old else {
            let id = self.new.mesh;
            let names = [false, true].map(|is_taken| self.new.naming.peer(id, self.source, row.name, is_taken));
            let is_of_node = |peer: &Arc<PlannedPeer>| peer.source == self.source && peer.node == row.name;
            if names.iter().filter_map(|name| self.planned().get(name)).any(is_of_node) {
                return Err("the Peer of a changed Node depends on other Nodes");
            }
            return Ok(Vec::new());
        };
        let planned = self
            .planned()
            .get(name)
            .ok_or("the Peer of a changed Node has another name")?;
        let prefixes = &peer.spec.allowed_ips;
        let parts: Vec<IpNet> = planned.spec.allowed_ips.difference(prefixes).copied().collect();
        let mut expected = PlannedPeer::clone(peer);
        expected.spec.allowed_ips.extend(&parts);
        let anchored = &self.follower.kept.anchored[self.source];
        let is_anchored = |part: &IpNet| anchored.iter().any(|net| net.contains(part));
        if expected != **planned || !parts.iter().all(is_anchored) {
            return Err("the Peer of a changed Node depends on other Nodes");
        }
        Ok(parts)
    }

    /// The anchors stay the same. `is_anchor` = the last plan of this Peer contains a part of an anchored network.
    fn check_anchors(
        &self,
        row: &ChangedRow<'_, Node>,
        old: Option<&Named>,
        new: Option<&Named>,
        is_anchor: bool,
        planned_after: &RegisteredPeers<'_, '_>,
    ) -> Result<(), Anew> {
        let kept = self.follower.kept;
        let anchored = &kept.anchored[self.source];
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
        let [old_name, new_name] = [old, new].map(|planned| planned.map(|(name, _)| name));
        let existing = new_name
            .filter(|_| old_name != new_name)
            .and_then(|name| self.existing(name));
        let is_anchored = |part: &IpNet| anchored.iter().any(|net| net.contains(part));
        if existing.is_some_and(|spec| spec.allowed_ips.iter().any(is_anchored)) {
            return Err("the existing Peer of a changed Node contains an anchored network");
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
        let is_unsettled = kept.targets[self.target].unsettled.contains(self.source);
        if is_anchor || is_unsettled {
            return Err("an anchor changed");
        }
        // The anchors are among the most suitable nodes. They stay, unless the changed node is more suitable.
        let report = &self.follower.planned.clusters[self.source];
        let anchors: BTreeSet<&String> = report.anchored.values().flatten().collect();
        let member = self.new.mesh_members[self.source].last_observed();
        let rank_of = |name: &String| member.and_then(|member| member.nodes.get(name)).map(anchor::rank);
        let worst = anchors.iter().map(|name| rank_of(name)).max();
        match worst {
            Some(Some(worst)) if is.is_none_or(|(_, rank)| rank >= worst) => Ok(()),
            _ => Err("an anchor may change"),
        }
    }

    /// No other node of the source has the first endpoint that the node gained or lost.
    fn check_endpoints(
        &self,
        old: Option<&Named>,
        new: Option<&Named>,
        planned_after: &RegisteredPeers<'_, '_>,
    ) -> Result<(), Anew> {
        let first = |planned: Option<&Named>| match planned?.1.spec.endpoint {
            Some(Endpoint::Ip(address)) => Some(address),
            _ => None,
        };
        let keys: Vec<PublicKey> = [old, new]
            .into_iter()
            .flatten()
            .map(|(_, peer)| peer.spec.public_key)
            .collect();
        let (old, new) = (first(old), first(new));
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
