//! Plans the PeerPolicies of one target (design rule 7).

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{
    PlannedPolicy, TargetPlan, anchor,
    link::{self, Link},
    peers::own_pods::OwnPods,
    target::{MeshInputs, MeshMember},
};
use crate::{
    mesh::{Addressing, Profile},
    observe::{ObservedPolicy, PolicySpec},
    ownership::{self, Ownership},
};

impl<'a> MeshInputs<'a> {
    /// Plans the PeerPolicies that limit each source in this target, if the target is cluster-meshed and its PeerPolicies can be read.
    pub(super) fn plan_policies(&self, name: &'a str, target: &'a MeshMember<'a>, plan: &mut TargetPlan) {
        let Some((member, existing)) = target
            .last_observed()
            .and_then(|member| Some((member, member.policies.as_ref()?)))
        else {
            return;
        };
        if target.cluster.profile != Profile::ClusterMeshed {
            return;
        }
        let own_pods = OwnPods::of(target);
        for (source, mesh_member) in self.sources(name, target) {
            let is_linked = link::between(target, mesh_member) == Some(Link::Meshed);
            // A source that is no longer cluster-meshed keeps a closed policy until its last Peer is deleted. Peers are deleted
            // one by one, and without a policy the remaining ones would still admit its traffic.
            let has_existing_peers = || {
                let peers = member.peers.iter().flat_map(|peers| peers.values());
                let mut ours = peers.filter(|peer| peer.owner.source_cluster.as_deref() == Some(source));
                ours.any(|peer| self.is_ours(&peer.owner))
            };
            let keeps_closed_policy = || mesh_member.cluster.profile != Profile::ClusterMeshed && has_existing_peers();
            if !is_linked && !keeps_closed_policy() {
                continue;
            }
            let mut networks = mesh_member.networks();
            let mut sources = networks.clone();
            let has_held_nodes = || {
                self.registries
                    .get(source)
                    .is_some_and(|registry| !registry.held.is_empty())
            };
            if mesh_member.cluster.profile != Profile::Sandbox
                && (mesh_member.last_observed().is_none() || has_held_nodes())
            {
                // `networks` may lack a node that was not observed yet, or that publishes no address for a moment. If its existing network
                // were removed from the policy, the node would be disconnected, and the network would lose its `unreachable` route.
                let ours = existing.values().filter(|policy| {
                    policy.owner.source_cluster.as_deref() == Some(source) && self.is_ours(&policy.owner)
                });
                let is_allowed = |net: &&IpNet| mesh_member.cluster.allows(**net);
                for known in ours.filter_map(|policy| policy.spec.as_ref().ok()) {
                    networks.extend(known.networks.iter().filter(is_allowed));
                    sources.extend(known.sources.iter().filter(is_allowed));
                }
            }
            // The networks of a routed source include its pod networks, which may overlap the target's own podCIDRs. Leave out
            // each network that does, unless it contains a WireGuard address of the source. Other sources list no pod networks.
            if mesh_member.cluster.effective_addressing() == Addressing::Routed {
                let is_kept = |net: &IpNet| !own_pods.overlaps(*net) || mesh_member.has_wireguard_address_in(*net);
                networks.retain(is_kept);
                sources.retain(is_kept);
            }
            if networks.is_empty() {
                continue;
            }
            let closed = link::is_closed(mesh_member);
            // The gateways of the source only reply to this target's connections. Unlike the source's nodes they may reach nothing in
            // `allow`, so `sources` lacks them.
            if self.uses_gateways(mesh_member, target) {
                networks.extend(mesh_member.gateway_prefixes());
            }
            let spec = PolicySpec {
                sources,
                networks,
                allow: if closed { BTreeSet::new() } else { target.networks() },
                deny: member.api_endpoints.clone(),
                infrastructure_ports: self.settings.infrastructure_ports.clone(),
                anchored: if closed {
                    BTreeSet::new()
                } else {
                    let registry = self.registries.get(name);
                    registry
                        .map_or_else(
                            || anchor::anchored_networks(&target.cluster, None),
                            |registry| registry.anchored.clone(),
                        )
                        .into_iter()
                        .collect()
                },
                closed,
            };
            let planned = PlannedPolicy {
                source: source.to_owned(),
                spec,
            };
            plan.policies
                .insert(self.policy_name(target, existing, source), planned);
        }
    }

    /// Plans the policies in a sandbox for the members that grant it Services: their gateways may send only replies.
    pub(super) fn plan_grantor_policies(&self, name: &'a str, target: &'a MeshMember<'a>, plan: &mut TargetPlan) {
        let member = target
            .last_observed()
            .filter(|_| target.cluster.profile == Profile::Sandbox);
        let Some((member, existing)) = member.and_then(|member| Some((member, member.policies.as_ref()?))) else {
            return;
        };
        for (source, mesh_member) in self.sources(name, target) {
            if self.link(name, target, mesh_member) != Some(Link::Grantor) {
                continue;
            }
            let peers = plan.peers.values().filter(|peer| peer.source == source);
            let networks: BTreeSet<IpNet> = peers.flat_map(|peer| &peer.spec.allowed_ips).copied().collect();
            if networks.is_empty() {
                continue;
            }
            let spec = PolicySpec {
                // The policy applies to the gateways. Because it allows nothing, they can only reply.
                sources: networks.clone(),
                networks,
                allow: BTreeSet::new(),
                deny: member.api_endpoints.clone(),
                infrastructure_ports: self.settings.infrastructure_ports.clone(),
                anchored: BTreeSet::new(),
                closed: false,
            };
            let planned = PlannedPolicy {
                source: source.to_owned(),
                spec,
            };
            plan.policies
                .insert(self.policy_name(target, existing, source), planned);
        }
    }

    /// The name of the PeerPolicy that limits `source` in this target, with a hash if the name without it is taken.
    fn policy_name(
        &self,
        target: &MeshMember<'_>,
        existing: &BTreeMap<String, ObservedPolicy>,
        source: &str,
    ) -> String {
        let readable = self.naming.policy(self.mesh, source, false);
        let ours = |owner| {
            let ownership = ownership::of(owner, &self.seen.hub, self.claimants);
            ownership == Ownership::Mesh(self.mesh)
                || ownership == Ownership::Unlabelled && ownership::can_readopt(owner, self.mesh, source)
        };
        let is_name_taken = existing.get(&readable).is_some_and(|policy| !ours(&policy.owner))
            || self.used_names(target).policies.contains(&readable);
        if is_name_taken {
            self.naming.policy(self.mesh, source, true)
        } else {
            readable
        }
    }
}
