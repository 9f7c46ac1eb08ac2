//! Collects the podCIDRs of a target's own Nodes. The Peers and PeerPolicies that describe other members in this target leave them out.
//! An allowed IP in a podCIDR would take packets between the target's own pods into the tunnel, and a network of a policy would make
//! these pods unreachable.
//!
//! Needed only in two cases. If the target connects its locations, its tunnels also carry podCIDRs outside its allowedNetworks.
//! Networks of other members may overlap these podCIDRs. If the target is masqueraded, it may have the same pod network as a
//! routed source. Other targets do not need it: their allowedNetworks overlap those of no other cluster (design rule 10).

use ipnet::IpNet;

use crate::{
    mesh::{Addressing, Locations, PodNetwork, is_too_wide},
    observe::Claim,
    plan::{prefix_map::PrefixMap, target::MeshMember},
};

pub(in crate::plan) struct OwnPods(PrefixMap<()>);

impl OwnPods {
    pub(in crate::plan) fn of(target: &MeshMember<'_>) -> Self {
        let cluster = &target.cluster;
        let is_relevant =
            cluster.effective_addressing() == Addressing::Masqueraded || cluster.locations == Locations::Connected;
        let has_pod_cidrs = is_relevant && cluster.pod_network == PodNetwork::PerNode;
        let member = target.last_observed().filter(|_| has_pod_cidrs);
        let nodes = member.into_iter().flat_map(|member| member.nodes.values());
        let pod_cidrs = nodes.flat_map(|node| &node.pod_cidrs).filter_map(Claim::value);
        // A network that is too wide is no podCIDR. A hostile kubelet could claim one when it creates its Node.
        let pod_cidrs = pod_cidrs.map(IpNet::trunc).filter(|network| !is_too_wide(network));
        Self(pod_cidrs.map(|network| (network, ())).collect())
    }

    pub(in crate::plan) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a prefix overlaps a podCIDR of the target.
    pub(in crate::plan) fn overlaps(&self, prefix: IpNet) -> bool {
        !self.is_empty() && self.0.overlaps(prefix)
    }
}
