//! Plans one mesh: prepares its members and their nodes, plans each target, and gives each public key to one node (design rules
//! 3, 7).

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{
    ClusterReport, Fact, MeshPlan, Naming, NotFollowed, Reason, Settings, Skipped, TargetPlan, anchor, claims,
    discovered, endpoint, follow::Kept, gateways, link, networks_in_use, nodes, target,
};
use crate::{
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, Locations, Mesh, MeshId, PodNetwork, Profile},
    observe::{Claim, Member, Observation, Observations, ObservedPeer, Owner},
    ownership::{self, Claimant, Ownership},
};

/// Plans one mesh. `'a` = the observed state, `'p` = the other inputs.
pub(super) struct MeshPlanner<'a, 'p> {
    pub(super) mesh: &'p Mesh,
    /// All meshes of this hub, oldest first.
    pub(super) all_meshes: &'p [&'p Mesh],
    /// The accepted networks of all meshes.
    pub(super) accepted: &'p claims::Accepted,
    pub(super) seen: &'a Observations,
    pub(super) settings: &'p Settings,
    pub(super) naming: &'p dyn Naming,
    /// All meshes of this hub, as owners of objects.
    pub(super) claimants: &'p [Claimant],
    /// Names that older meshes use in each cluster.
    pub(super) used: &'p BTreeMap<ClusterIdentity, target::UsedNames>,
}

/// The members of a mesh and their nodes: the inputs of each target's plan.
pub(super) struct PreparedMesh<'a> {
    /// The members, by entry name.
    pub(super) mesh_members: BTreeMap<String, target::MeshMember<'a>>,
    /// The nodes of each observed member that can connect (`MeshMember::can_connect`), by entry name.
    pub(super) registries: BTreeMap<String, nodes::NodeRegistry<'a>>,
    /// Observed members for which [`link::enforces_policies`] is false.
    pub(super) not_enforcing: BTreeSet<String>,
}

impl<'a, 'p> MeshPlanner<'a, 'p> {
    pub(super) fn plan(&self) -> (MeshPlan, Result<Kept, NotFollowed>) {
        let mesh = self.mesh;
        let mut planned = MeshPlan {
            paused: mesh.paused,
            deleting: mesh.deleting,
            identities: mesh
                .clusters
                .iter()
                .map(|c| (c.name.clone(), c.identity.clone()))
                .collect(),
            facts: self.accepted.facts.get(&mesh.id).cloned().unwrap_or_default(),
            ..MeshPlan::default()
        };
        if mesh.deleting {
            planned.targets = mesh
                .clusters
                .iter()
                .map(|c| (c.name.clone(), TargetPlan::default()))
                .collect();
            return (planned, Err("the mesh is being deleted"));
        }
        let prepared = self.prepare(&mut planned);
        let nodes = |name: &str| Some(&prepared.mesh_members.get(name)?.last_observed()?.nodes);
        planned
            .facts
            .extend(networks_in_use::facts(&prepared.mesh_members, nodes));
        let PreparedMesh {
            mesh_members,
            registries,
            not_enforcing,
        } = &prepared;
        for (name, mesh_member) in mesh_members {
            let registry = registries.get(name);
            let has_own_peers = mesh_member.can_connect && mesh_member.cluster.locations == Locations::Connected;
            // `Link::Grantor` needs no registered node: a sandbox has Peers for the gateways of a member that grants it a Service, and none
            // for that member's nodes.
            let needs_registration = has_own_peers
                || mesh_members
                    .values()
                    .any(|other| link::between(other, mesh_member).is_some_and(|link| link != link::Link::Grantor));
            let report = ClusterReport {
                accepted: (self.accepted.networks)
                    .get(&(mesh.id.clone(), name.clone()))
                    .cloned()
                    .unwrap_or_default(),
                // `anchor::report` adds the anchors.
                anchored: mesh_member
                    .anchored(registry)
                    .into_iter()
                    .map(|net| (net, BTreeSet::new()))
                    .collect(),
                registered: 0,
                gateways: 0,
                sandbox: mesh_member.cluster.profile == Profile::Sandbox,
                // Nodes that need no registration in another member are not reported as skipped.
                skipped: registry
                    .filter(|_| needs_registration)
                    .map(|registry| registry.skipped.clone())
                    .unwrap_or_default(),
                uncovered: registry.map(|registry| registry.uncovered.clone()).unwrap_or_default(),
                needs_registration,
                held: registry
                    .map(|r| r.held.iter().map(|(n, why)| ((*n).to_owned(), *why)).collect())
                    .unwrap_or_default(),
                behind_nat: discovered::find_node_behind_nat(mesh_members, name),
            };
            planned.clusters.insert(name.clone(), report);
            planned
                .facts
                .extend(registry.into_iter().flat_map(|registry| registry.facts.iter().cloned()));
        }
        let inputs = target::MeshInputs {
            mesh: &mesh.id,
            mesh_members,
            registries,
            not_enforcing,
            seen: self.seen,
            settings: self.settings,
            naming: self.naming,
            all_meshes: self.all_meshes,
            claimants: self.claimants,
            used: self.used,
        };
        let mut kept_targets = BTreeMap::new();
        let mut has_shared_claims = false;
        let plan_target = |cluster: &'p Cluster| (cluster, inputs.plan_target(&cluster.name));
        let outcomes: Vec<(&Cluster, target::TargetOutcome)> = mesh.clusters.par_iter().map(plan_target).collect();
        for (cluster, outcome) in outcomes {
            kept_targets.insert(cluster.name.clone(), outcome.kept);
            has_shared_claims |= outcome.has_shared_claims;
            planned.targets.insert(cluster.name.clone(), outcome.plan);
            planned.facts.extend(outcome.facts);
            planned.egress.extend(outcome.egress);
            for (source, skipped) in outcome.skipped {
                let report = planned.clusters.entry(source).or_default();
                report.skipped.extend(skipped);
                report.skipped.sort();
            }
        }
        let kept = Kept::of(self, &prepared, &planned, kept_targets, has_shared_claims);
        (planned, kept)
    }

    /// Computes the inputs for the plans of all targets; adds facts to `planned`.
    pub(super) fn prepare(&self, planned: &mut MeshPlan) -> PreparedMesh<'a> {
        let mesh_members = self.prepare_members(planned);
        let registries = self.build_registries(&mesh_members);
        let not_enforcing = Self::find_not_enforcing(&mesh_members, &registries);
        self.report_quarantines(&mesh_members, &not_enforcing, planned);
        PreparedMesh {
            mesh_members,
            registries,
            not_enforcing,
        }
    }

    fn prepare_members(&self, planned: &mut MeshPlan) -> BTreeMap<String, target::MeshMember<'a>> {
        let mut mesh_members = BTreeMap::new();
        for entry in &self.mesh.clusters {
            let observed = self.seen.members.get(&entry.identity);
            planned.facts.extend(Fact::member_not_fresh(&entry.name, observed));
            let traits = self.member_traits(entry, observed.and_then(Observation::last), planned);
            let traits = Arc::new(traits);
            mesh_members.insert(entry.name.clone(), target::MeshMember { traits, observed });
        }
        mesh_members
    }

    /// Computes [`target::MemberTraits`]; adds facts to `planned`.
    pub(super) fn member_traits(
        &self,
        entry: &Cluster,
        member: Option<&Member>,
        planned: &mut MeshPlan,
    ) -> target::MemberTraits {
        let mut cluster = entry.clone();
        let key = (self.mesh.id.clone(), entry.name.clone());
        cluster.allowed = self.accepted.networks.get(&key).cloned().unwrap_or_default();
        cluster.profile = self.effective_profile(entry, planned);
        cluster.quarantine = self.quarantined_by(entry).is_some();
        let can_connect = cluster.profile != Profile::Standard && !cluster.allowed.is_empty();
        // All accepted networks, also those of gateways: `remove_gateway_networks` below removes these from `cluster.allowed`.
        let accepted = cluster.allowed.clone();
        if let Some(member) = member {
            if self.accepted.kept_former.contains(&key) && !was_routed(&cluster, member) {
                cluster.addressing = Addressing::Masqueraded;
            }
            gateways::remove_gateway_networks(&mut cluster, member);
            anchor::unanchor_node_addresses(&mut cluster, member);
        }
        target::MemberTraits {
            cluster,
            accepted,
            can_connect,
            discovered: discovered::by_member(member),
            families: endpoint::NodeFamilies::of(member),
        }
    }

    /// The profile of an entry. If meshes of this hub give its cluster different profiles, the most restrictive one applies
    /// (rule 7).
    fn effective_profile(&self, entry: &Cluster, planned: &mut MeshPlan) -> Profile {
        let mut strictest = entry.profile;
        for mesh in self.all_meshes.iter().filter(|mesh| !mesh.deleting) {
            for other in mesh
                .clusters
                .iter()
                .filter(|other| other.identity.same_cluster(&entry.identity))
            {
                if other.profile != entry.profile {
                    planned.facts.insert(Fact::ProfileConflict {
                        cluster: entry.name.clone(),
                        message: format!(
                            "cluster {:?} is {} here and {} in ClusterMesh {}; the more restrictive one applies",
                            entry.name,
                            entry.profile.as_str(),
                            other.profile.as_str(),
                            mesh.id
                        ),
                    });
                    strictest = strictest.max(other.profile);
                }
            }
        }
        strictest
    }

    /// The oldest mesh that quarantines this entry's cluster. A quarantine in one mesh applies in all meshes of the hub.
    fn quarantined_by(&self, entry: &Cluster) -> Option<&'p MeshId> {
        let meshes = self.all_meshes.iter().filter(|mesh| !mesh.deleting);
        let mut quarantining = meshes.filter(|mesh| {
            let mut entries = mesh.clusters.iter();
            entries.any(|other| other.quarantine && other.identity.same_cluster(&entry.identity))
        });
        quarantining.next().map(|mesh| &mesh.id)
    }

    /// Reports what each quarantine does. The objects of a quarantined member are kept, except its Peers in cluster-meshed targets that
    /// do not enforce PeerPolicies.
    fn report_quarantines(
        &self,
        mesh_members: &BTreeMap<String, target::MeshMember<'a>>,
        not_enforcing: &BTreeSet<String>,
        planned: &mut MeshPlan,
    ) {
        for (name, mesh_member) in mesh_members {
            let Some(by) = self.quarantined_by(&mesh_member.cluster) else {
                continue;
            };
            let meshed =
                |target: &&String| link::between(&mesh_members[*target], mesh_member) == Some(link::Link::Meshed);
            let removed = not_enforcing.iter().filter(meshed);
            let removed: Vec<String> = removed.map(|target| format!("{target:?}")).collect();
            let objects = if removed.is_empty() {
                "its objects are kept".to_owned()
            } else {
                format!(
                    "its objects are kept, except its Peers in {}, whose nodes enforce no policy: those are removed",
                    removed.join(", ")
                )
            };
            planned.facts.insert(Fact::Quarantined {
                cluster: name.clone(),
                message: format!(
                    "cluster {name:?} is quarantined by ClusterMesh {by}: all traffic from and to it is denied, and {objects}"
                ),
            });
        }
    }

    /// Observed members for which [`link::enforces_policies`] is false.
    fn find_not_enforcing(
        mesh_members: &BTreeMap<String, target::MeshMember<'a>>,
        registries: &BTreeMap<String, nodes::NodeRegistry<'a>>,
    ) -> BTreeSet<String> {
        let not_enforcing = mesh_members.iter().filter(|(name, mesh_member)| {
            let member = mesh_member.last_observed();
            member.is_some_and(|member| !link::enforces_policies(member, registries.get(*name)))
        });
        not_enforcing.map(|(name, _)| name.clone()).collect()
    }

    fn build_registries(
        &self,
        mesh_members: &BTreeMap<String, target::MeshMember<'a>>,
    ) -> BTreeMap<String, nodes::NodeRegistry<'a>> {
        let build = |(name, mesh_member): (&String, &target::MeshMember<'a>)| {
            let member = mesh_member.last_observed().filter(|_| mesh_member.can_connect)?;
            let existing = |node: &str| self.existing_peers(mesh_members, name, node);
            let peer_name = |node: &str| self.naming.peer(&self.mesh.id, name, node, false);
            let builder = nodes::RegistryBuilder {
                cluster: &mesh_member.cluster,
                member,
                existing: &existing,
                peer_name: &peer_name,
            };
            Some((name.clone(), builder.build()))
        };
        let mut registries = mesh_members.par_iter().filter_map(build).collect();
        self.resolve_duplicate_keys(mesh_members, &mut registries);
        registries
    }

    fn is_owned_by_this_mesh(&self, owner: &Owner) -> bool {
        ownership::of(owner, &self.seen.hub, self.claimants) == Ownership::Mesh(&self.mesh.id)
    }

    /// The existing Peers of this mesh for one node, in all members for which [`is_trusted`] is true. In each member the Peer
    /// has one of two names ([`Naming::peer`]).
    pub(super) fn existing_peers(
        &self,
        mesh_members: &BTreeMap<String, target::MeshMember<'a>>,
        cluster: &str,
        node: &str,
    ) -> Vec<&'a ObservedPeer> {
        let names = [false, true].map(|is_name_taken| self.naming.peer(&self.mesh.id, cluster, node, is_name_taken));
        let members = mesh_members
            .values()
            .filter(|mesh_member| is_trusted(mesh_member))
            .filter_map(target::MeshMember::last_observed);
        let peers = members.filter_map(|member| member.peers.as_ref());
        let named = peers.flat_map(|peers| names.iter().filter_map(|name| peers.get(name)));
        named.filter(|peer| self.is_owned_by_this_mesh(&peer.owner)).collect()
    }

    /// Gives each public key to one node, even if nodes of several members claim it (rule 3). The Nodes' timestamps are not
    /// compared, because each member chooses them itself. The order is: the local cluster first, then cluster-meshed members before
    /// sandboxes, then the node that already has the key in an existing Peer or SandboxAccess, then the order of the entries.
    ///
    /// An existing object that describes a sandbox wins only over other sandboxes. If it also won over cluster-meshed members, a sandbox
    /// could copy a Node's key, get an entry in a SandboxAccess while that Node briefly publishes no key, and keep the key.
    fn resolve_duplicate_keys(
        &self,
        mesh_members: &BTreeMap<String, target::MeshMember<'_>>,
        registries: &mut BTreeMap<String, nodes::NodeRegistry<'_>>,
    ) {
        let has_known_keys =
            |name: &String, member: &target::MeshMember<'_>| !member.can_connect || registries.contains_key(name);
        let mut keys = HashSet::new();
        let mut registered = registries.values().flat_map(|registry| &registry.registered);
        if mesh_members.iter().all(|(name, member)| has_known_keys(name, member))
            && registered.all(|node| keys.insert(node.key))
        {
            return;
        }
        // (is not local, profile, has no existing object, position of the entry, entry, name of the node): the smallest claim wins. If
        // the member was not observed and a Peer claims the key, the last item is the name of that Peer.
        type KeyClaim = (bool, Profile, bool, usize, String, String);
        let peers = mesh_members
            .values()
            .filter(|mesh_member| is_trusted(mesh_member))
            .filter_map(target::MeshMember::last_observed)
            .filter_map(|member| member.peers.as_ref());
        let accesses = mesh_members
            .values()
            .filter(|mesh_member| is_trusted(mesh_member))
            .filter_map(target::MeshMember::last_observed)
            .flat_map(|member| member.accesses.iter().flatten());
        let mut existing_keys: BTreeMap<&str, BTreeMap<PublicKey, &str>> = BTreeMap::new();
        let peers_of_this_mesh = peers
            .flatten()
            .filter(|(_, peer)| self.is_owned_by_this_mesh(&peer.owner));
        for (name, peer) in peers_of_this_mesh {
            if let (Some(source), Ok(spec)) = (&peer.owner.source_cluster, &peer.spec) {
                existing_keys.entry(source).or_default().insert(spec.public_key, name);
            }
        }
        for (_, access) in accesses.filter(|(_, access)| self.is_owned_by_this_mesh(&access.owner)) {
            if let (Some(source), Ok(spec)) = (&access.owner.source_cluster, &access.spec) {
                let nodes = spec.nodes.iter().map(|(key, node)| (*key, &*node.name));
                existing_keys.entry(source).or_default().extend(nodes);
            }
        }
        let mut claims_by_key: BTreeMap<PublicKey, Vec<KeyClaim>> = BTreeMap::new();
        for (position, entry) in self.mesh.clusters.iter().enumerate() {
            let Some(mesh_member) = mesh_members.get(&entry.name) else {
                continue;
            };
            let keys_of_entry = existing_keys.get(&*entry.name);
            let local = target::is_local(entry);
            let mut add_claim = |key: PublicKey, exists: bool, name: &str| {
                let claim = (
                    !local,
                    mesh_member.cluster.profile,
                    !exists,
                    position,
                    entry.name.clone(),
                    name.to_owned(),
                );
                claims_by_key.entry(key).or_default().push(claim);
            };
            match registries.get(&entry.name) {
                Some(registry) => registry.registered.iter().for_each(|node| {
                    add_claim(
                        node.key,
                        keys_of_entry.is_some_and(|keys| keys.contains_key(&node.key)),
                        node.node,
                    );
                }),
                // The member was not observed since the controller started, so the existing Peers and SandboxAccesses claim
                // its keys. Otherwise a member that copies one of these keys would get it.
                None if mesh_member.can_connect => {
                    keys_of_entry
                        .into_iter()
                        .flatten()
                        .for_each(|(key, name)| add_claim(*key, true, name));
                }
                None => {}
            }
        }
        for (key, mut key_claims) in claims_by_key {
            key_claims.sort();
            let mut key_claims = key_claims.into_iter();
            let Some((.., owner_cluster, owner)) = key_claims.next() else {
                continue;
            };
            for (.., cluster, node) in key_claims {
                let Some(registry) = registries.get_mut(&cluster) else {
                    continue;
                };
                registry.registered.retain(|registered| registered.node != node);
                let message =
                    format!("key {key} belongs to Node {owner} of cluster {owner_cluster:?}; one of the two is a copy");
                registry.skipped.push(Skipped {
                    node,
                    reason: Reason::PublicKeyDuplicate,
                    message,
                    target: None,
                });
                registry.skipped.sort();
            }
        }
    }
}

/// Whether the planner trusts the existing Peers and SandboxAccesses in this member as a record of earlier plans. It does not trust a
/// sandbox, because its administrator can write any Peer there. In a member with the profile standard the planner writes no objects.
fn is_trusted(mesh_member: &target::MeshMember<'_>) -> bool {
    mesh_member.cluster.profile == Profile::ClusterMeshed
}

/// Guesses whether an entry was routed before a change of its networks that is now refused. An entry with a shared pod network
/// was routed. Another entry was routed if its former networks, which it keeps, contain a podCIDR of the oldest Node that has a
/// podCIDR. Newer Nodes are ignored: a Node that joins must not change the guess. The guess is needed, because the Nodes of a
/// masqueraded entry would lose their Peers if the entry were planned as routed.
fn was_routed(cluster: &Cluster, member: &Member) -> bool {
    let with_pods = member
        .nodes
        .values()
        .filter(|node| node.pod_cidrs.iter().any(|claim| claim.value().is_some()));
    let oldest = with_pods.min_by_key(|node| node.created);
    let mut pod_cidrs = oldest
        .into_iter()
        .flat_map(|node| &node.pod_cidrs)
        .filter_map(Claim::value);
    cluster.pod_network == PodNetwork::Shared || pod_cidrs.any(|network| cluster.allows(network.trunc()))
}
