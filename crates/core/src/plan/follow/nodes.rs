//! Plans the Peers of changed Nodes, after checking that the changed Nodes affect nothing else.
//!
//! The changed Nodes are planned alone, twice: as they were and as they are. The first of these two plans must be part of the last plan.
//! What the planner derives from all Nodes of a member, and uses for other Nodes too, must be the same before and after.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use super::{MeshChanges, MeshFollower, NotFollowed, Patch, ReportPatch, pair::Pair};
use crate::{
    key::PublicKey,
    mesh::Profile,
    observe::{ChangedRow, Member, Node, Observation, Rows},
    plan::{
        MeshPlan, discovered,
        link::{self, Link},
        location,
        mesh::MeshPlanner,
        networks_in_use,
        nodes::{self, NodeRegistry, RegistryBuilder},
        peers::{self, PeerPlanner},
        prefix_map::PrefixMap,
        target::{MeshInputs, MeshMember},
    },
};

/// If more Nodes of a mesh changed, all meshes are planned anew.
const MAX_NODES: usize = 64;

type Members<'m> = BTreeMap<String, MeshMember<'m>>;
type Registries<'m> = BTreeMap<String, NodeRegistry<'m>>;

/// The changed Nodes of one member.
pub(super) struct Changed<'m> {
    pub(super) rows: &'m [ChangedRow<'m, Node>],
    /// Only the changed Nodes, as they were, and as they are.
    before: Member,
    after: Member,
}

/// The inputs of the planner, before or after the change.
struct Side<'m> {
    planner: &'m MeshPlanner<'m, 'm>,
    members: Members<'m>,
    /// Only the changed Nodes.
    registries: Registries<'m>,
}

impl<'a> MeshFollower<'a> {
    /// Adds to the patch what the changed Nodes change.
    ///
    /// # Errors
    /// They may change something else.
    pub(super) fn follow_nodes(&self, changes: &MeshChanges<'a>, patch: &mut Patch) -> Result<(), NotFollowed> {
        let changes = changes.iter().filter(|(_, changes)| !changes.nodes.is_empty());
        let changed: BTreeMap<&str, Changed<'_>> = changes
            .map(|(entry, changes)| (*entry, Changed::of(&changes.nodes)))
            .collect();
        if changed.is_empty() {
            return Ok(());
        }
        if changed.values().map(|changed| changed.rows.len()).sum::<usize>() > MAX_NODES {
            return Err("many Nodes changed");
        }
        for (entry, changed) in &changed {
            self.check_member(entry, changed)?;
        }
        let before = Side::of(
            &self.before,
            self,
            changed.iter().map(|(entry, changed)| (*entry, &changed.before)),
        );
        let after = Side::of(
            &self.after,
            self,
            changed.iter().map(|(entry, changed)| (*entry, &changed.after)),
        );
        for (entry, changed) in &changed {
            let (was, is) = (&before.registries[*entry], &after.registries[*entry]);
            let has_held_or_led_node =
                |registry: &NodeRegistry<'_>| !registry.held.is_empty() || !registry.segments.all_followers.is_empty();
            if has_held_or_led_node(was) || has_held_or_led_node(is) {
                return Err("a changed node is held, or is led by another node of its Kilo location");
            }
            if was.facts != is.facts || was.uncovered != is.uncovered {
                return Err("what is reported about the Nodes of a member changed");
            }
            self.check_anchored_networks(entry, changed, was, is)?;
            self.check_claims(entry, changed, was, is)?;
        }
        let in_use = |of: for<'c> fn(&'c Changed<'_>) -> &'c Member| {
            networks_in_use::facts(&after.members, |name| {
                changed.get(name).map(|changed| &of(changed).nodes)
            })
        };
        if in_use(|changed| &changed.before) != in_use(|changed| &changed.after) {
            return Err("a Node uses a network of another member");
        }
        let (old, new) = (before.inputs(self), after.inputs(self));
        for (entry, changed) in &changed {
            self.check_keepalives(entry, changed, &new)?;
        }
        // By entry: the changed nodes with a Peer in some target, before and after.
        let mut with_peers: BTreeMap<&str, [BTreeSet<&str>; 2]> = BTreeMap::new();
        for (target, target_member) in after.members.iter().filter(|(_, member)| member.can_connect) {
            for (source, changed) in &changed {
                if source == target || new.link(target, target_member, &after.members[*source]) != Some(Link::Meshed) {
                    continue;
                }
                let pair = Pair {
                    follower: self,
                    source,
                    target,
                    changed,
                    old: &old,
                    new: &new,
                };
                let [was, is] = with_peers.entry(source).or_default();
                pair.follow(patch, was, is)?;
            }
        }
        for entry in changed.keys() {
            let [was, is] = with_peers.remove(entry).unwrap_or_default();
            let skipped = [&before, &after].map(|side| &side.registries[*entry].skipped);
            let report = self.report(entry, skipped, was.len(), is.len(), &after.members)?;
            patch.reports.insert((*entry).to_owned(), report);
        }
        Ok(())
    }

    /// Checks what the planner derives from all Nodes of a member.
    fn check_member(&self, entry: &str, changed: &Changed<'_>) -> Result<(), NotFollowed> {
        let member_of = |planner: &MeshPlanner<'a, 'a>| {
            let identity = self.planned.identities.get(entry)?;
            planner.seen.members.get(identity).and_then(Observation::last)
        };
        let traits = self.kept.traits.get(entry).ok_or("a changed member has no plan")?;
        let members = member_of(&self.before).zip(member_of(&self.after));
        let (before, after) = members.ok_or("a changed member was not observed")?;
        if traits.cluster.profile != Profile::ClusterMeshed || !traits.can_connect {
            return Err("a Node changed of a member that is not cluster-meshed or has no accepted networks");
        }
        let mut entries = self.after.mesh.clusters.iter();
        let configured = entries
            .find(|cluster| cluster.name == entry)
            .ok_or("a changed member has no entry")?;
        let traits_after = self
            .after
            .member_traits(configured, Some(after), &mut MeshPlan::default());
        if traits_after != **traits {
            return Err("the IP families, the discovered endpoints or the networks of a member changed");
        }
        // The left side: the member enforces PeerPolicies now. The right side: it did not enforce them before. If both are true,
        // or both are false, the member changed.
        if link::enforces_policies(after, None) == self.kept.not_enforcing.contains(entry) {
            return Err("a member enforces PeerPolicies now, or does so no more");
        }
        let is_replaced = |row: &ChangedRow<'_, Node>| {
            let nodes = row.before.zip(row.after);
            nodes.is_some_and(|(before, after)| before.created != after.created)
        };
        if changed.rows.iter().any(is_replaced) {
            return Err("a Node was replaced by another one with its name");
        }
        let runs_kg = |member| peers::runs_kg(member, |_| false);
        if runs_kg(before) != runs_kg(after) {
            return Err("kg was installed in a member, or removed");
        }
        if location::may_have_followers(after) {
            return Err("a node may be led by another node of its Kilo location");
        }
        if before.nodes.len().max(after.nodes.len()) > traits.cluster.max_nodes {
            return Err("a member has more Nodes than it may have");
        }
        // Policies for a masqueraded member contain its WireGuard addresses, and the Peers in it leave out its own podCIDRs.
        let networks = |node: &Node| (node.wireguard_ip.clone(), node.pod_cidrs.clone());
        let has_same_networks = |row: &ChangedRow<'_, Node>| row.before.map(networks) == row.after.map(networks);
        if self.kept.has_masqueraded() && !changed.rows.iter().all(has_same_networks) {
            return Err("a WireGuard address or podCIDR changed, and a member is masqueraded");
        }
        Ok(())
    }

    /// The networks that are anchored stay the same.
    fn check_anchored_networks(
        &self,
        entry: &str,
        changed: &Changed<'_>,
        was: &NodeRegistry<'_>,
        is: &NodeRegistry<'_>,
    ) -> Result<(), NotFollowed> {
        let cluster = &self.kept.traits[entry].cluster;
        if cluster.anchored.is_some() {
            return Ok(());
        }
        let anchored = &self.kept.anchored[entry];
        let mut gained = is.owned.difference(&was.owned);
        if gained.any(|prefix| anchored.iter().any(|net| net.contains(prefix))) {
            return Err("a Node has an address in an anchored network");
        }
        let other_nodes = || self.others(entry, changed).map(|(_, node)| node);
        let is_owned_by_others = |net: &IpNet| {
            other_nodes().any(|node| nodes::owned_prefixes(cluster, node).any(|prefix| net.contains(&prefix)))
        };
        // The networks in which a changed Node lost an address. One in which no other Node has an address may become anchored.
        let lost = was.owned.difference(&is.owned);
        let not_anchored = || cluster.allowed.iter().filter(|net| !anchored.contains(net));
        let mut affected = lost.flat_map(|prefix| not_anchored().filter(move |net| net.contains(prefix)));
        if affected.any(|net| !is_owned_by_others(net)) {
            return Err("no Node has an address in a network any more");
        }
        Ok(())
    }

    /// The Nodes of a member that did not change.
    pub(super) fn others<'c>(
        &'c self,
        entry: &str,
        changed: &'c Changed<'_>,
    ) -> impl Iterator<Item = (&'a str, &'a Node)> + use<'a, 'c> {
        let identity = self.planned.identities.get(entry);
        let member = identity.and_then(|identity| self.after.seen.members.get(identity)?.last());
        let rows = member.into_iter().flat_map(|member| &member.nodes);
        rows.filter(|(name, _)| !changed.rows.iter().any(|row| row.name == *name))
    }

    /// Checks that no other Node has a key that a changed Node gained or lost, or a network that overlaps a network that a
    /// changed Node gained or lost. If the key of a changed Node or its precedence over other Nodes changed, its key and all its
    /// networks count as gained or lost.
    fn check_claims(
        &self,
        entry: &str,
        changed: &Changed<'_>,
        was: &NodeRegistry<'_>,
        is: &NodeRegistry<'_>,
    ) -> Result<(), NotFollowed> {
        let mut keys: BTreeSet<PublicKey> = BTreeSet::new();
        let mut networks: BTreeSet<IpNet> = BTreeSet::new();
        for row in changed.rows {
            let [old, new] = [row.before, row.after].map(|node| {
                let key = node.and_then(|node| node.public_key.value()).copied();
                let networks: BTreeSet<IpNet> = node.into_iter().flat_map(claimed_networks).collect();
                (key, networks)
            });
            let is_silent = |node: Option<&Node>| node.map(Node::is_silent);
            let keeps_precedence = is_silent(row.before) == is_silent(row.after)
                && is_registered(was, row.name) == is_registered(is, row.name);
            if keeps_precedence && old.0 == new.0 {
                networks.extend(old.1.symmetric_difference(&new.1));
            } else {
                keys.extend(old.0.into_iter().chain(new.0));
                networks.extend(old.1.into_iter().chain(new.1));
            }
        }
        if !keys.is_empty() {
            let members = self.after.seen.members.values().filter_map(Observation::last);
            let all = members.flat_map(|member| member.nodes.values());
            let with_key = all.filter(|node| node.public_key.value().is_some_and(|key| keys.contains(key)));
            let after = changed.rows.iter().filter_map(|row| row.after);
            let own: BTreeSet<PublicKey> = after.filter_map(|node| node.public_key.value()).copied().collect();
            // `own` is the set of the keys that changed Nodes have. `with_key.count()` is larger if an unchanged Node has one of
            // `keys`, or if several changed Nodes have the same one.
            if with_key.count() > own.intersection(&keys).count() {
                return Err("two Nodes have, or had, the same key");
            }
        }
        let networks: PrefixMap<()> = networks.into_iter().map(|network| (network, ())).collect();
        let overlaps = |node: &Node| claimed_networks(node).any(|network| networks.overlaps(network));
        if !networks.is_empty() && self.others(entry, changed).any(|(_, node)| overlaps(node)) {
            return Err("two Nodes claim, or claimed, the same network");
        }
        Ok(())
    }

    /// The keepalives of the Peers in the member itself stay the same.
    fn check_keepalives(&self, entry: &str, changed: &Changed<'_>, new: &MeshInputs<'_>) -> Result<(), NotFollowed> {
        let target = &new.mesh_members[entry];
        let none = BTreeSet::new();
        let planner = PeerPlanner::with_existing(new, entry, target, Some(&none));
        for (source, member) in new.sources(entry, target) {
            if new.link(entry, target, member) != Some(Link::Meshed) {
                continue;
            }
            let changes_with = |has_nat_keepalive| {
                let test = planner.nat_test(member, has_nat_keepalive);
                let mut rows = changed.rows.iter();
                rows.any(|row| row.before.is_some_and(&test) != row.after.is_some_and(&test))
            };
            // Only `PeerPlanner::new` knows `has_nat_keepalive`, but it reads all existing Peers. It is not called if
            // `changes_with` is false for both values.
            if !changes_with(true) && !changes_with(false) {
                continue;
            }
            if changes_with(PeerPlanner::new(new, entry, target).has_nat_keepalive(source)) {
                return Err("a node behind a NAT was added or removed");
            }
        }
        Ok(())
    }

    /// The changed report of an entry. `skipped` = the changed Nodes that are not registered, before and after.
    fn report(
        &self,
        entry: &str,
        skipped: [&Vec<crate::plan::Skipped>; 2],
        was: usize,
        is: usize,
        members: &Members<'_>,
    ) -> Result<ReportPatch, NotFollowed> {
        let report = self
            .planned
            .clusters
            .get(entry)
            .ok_or("a changed member has no report")?;
        let [old, new] = skipped;
        let mut skipped = report.skipped.clone();
        // If no member needs this member's nodes, the report lists none of them as skipped.
        if report.needs_registration {
            for gone in old {
                let position = skipped.iter().position(|skipped| skipped == gone);
                skipped.remove(position.ok_or("a changed Node was not reported as skipped")?);
            }
            skipped.extend(new.iter().cloned());
            skipped.sort();
        }
        Ok(ReportPatch {
            registered: (report.registered + is)
                .checked_sub(was)
                .ok_or("a changed node was not counted")?,
            skipped,
            behind_nat: discovered::find_node_behind_nat(members, entry),
        })
    }
}

impl<'m> Changed<'m> {
    fn of(rows: &'m [ChangedRow<'m, Node>]) -> Self {
        let member = |node: fn(&ChangedRow<'m, Node>) -> Option<&'m Node>| {
            let nodes = rows
                .iter()
                .filter_map(|row| Some((row.name.to_owned(), node(row)?.clone())));
            Member {
                nodes: nodes.collect::<Rows<Node>>(),
                ..Member::default()
            }
        };
        Self {
            rows,
            before: member(|row| row.before),
            after: member(|row| row.after),
        }
    }
}

impl<'m> Side<'m> {
    fn of(
        planner: &'m MeshPlanner<'m, 'm>,
        follower: &MeshFollower<'_>,
        changed: impl Iterator<Item = (&'m str, &'m Member)>,
    ) -> Self {
        let members = follower.kept.traits.iter().map(|(name, traits)| {
            let member = MeshMember {
                traits: Arc::clone(traits),
                observed: planner.seen.members.get(&traits.cluster.identity),
            };
            (name.clone(), member)
        });
        let members: Members<'m> = members.collect();
        let registries = changed.map(|(entry, member)| {
            let existing = |node: &str| planner.existing_peers(&members, entry, node);
            let peer_name = |node: &str| planner.naming.peer(&planner.mesh.id, entry, node, false);
            let builder = RegistryBuilder {
                cluster: &follower.kept.traits[entry].cluster,
                member,
                existing: &existing,
                peer_name: &peer_name,
            };
            (entry.to_owned(), builder.build())
        });
        let registries = registries.collect();
        Self {
            planner,
            members,
            registries,
        }
    }

    fn inputs<'s>(&'s self, follower: &'s MeshFollower<'_>) -> MeshInputs<'s> {
        let planner = self.planner;
        MeshInputs {
            mesh: &planner.mesh.id,
            mesh_members: &self.members,
            registries: &self.registries,
            not_enforcing: &follower.kept.not_enforcing,
            seen: planner.seen,
            settings: planner.settings,
            naming: planner.naming,
            all_meshes: planner.all_meshes,
            claimants: planner.claimants,
            used: planner.used,
        }
    }
}

/// The networks of a Node that the registry compares with those of other Nodes.
fn claimed_networks(node: &Node) -> impl Iterator<Item = IpNet> {
    let wireguard = node.wireguard_ip.value().map(|claim| nodes::host_route(claim.addr()));
    let pods = node
        .pod_cidrs
        .iter()
        .filter_map(|claim| claim.value())
        .map(IpNet::trunc);
    let internal = node
        .internal_ips
        .iter()
        .map(|address| nodes::host_route(address.to_canonical()));
    let location = node.allowed_location_ips.iter().map(IpNet::trunc);
    wireguard.into_iter().chain(pods).chain(internal).chain(location)
}

fn is_registered(registry: &NodeRegistry<'_>, name: &str) -> bool {
    registry.registered.iter().any(|node| node.node == name)
}
