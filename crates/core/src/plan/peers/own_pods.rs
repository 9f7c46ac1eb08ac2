//! Keeps the podCIDRs of a masqueraded target's own Nodes out of the Peers in it. A masqueraded target may have the pod network of a
//! routed source. An allowed IP in that network would take packets between the target's own pods into the tunnel. (The networks of a
//! routed target overlap no other member's: design rule 10.)

use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::{
    mesh::{Addressing, PodNetwork},
    observe::Claim,
    plan::target::MeshMember,
};

pub(super) struct OwnPods(BTreeSet<IpNet>);

impl OwnPods {
    pub(super) fn of(target: &MeshMember<'_>) -> Self {
        let cluster = &target.cluster;
        let is_masqueraded = cluster.effective_addressing() == Addressing::Masqueraded;
        let has_pod_cidrs = is_masqueraded && cluster.pod_network == PodNetwork::PerNode;
        let member = target.last_observed().filter(|_| has_pod_cidrs);
        let nodes = member.into_iter().flat_map(|member| member.nodes.values());
        let pod_cidrs = nodes.flat_map(|node| &node.pod_cidrs).filter_map(Claim::value);
        Self(pod_cidrs.map(IpNet::trunc).collect())
    }

    /// Whether a prefix overlaps a podCIDR of the target.
    pub(super) fn overlaps(&self, prefix: IpNet) -> bool {
        let mut wider = std::iter::successors(Some(prefix), IpNet::supernet);
        // `IpNet` sorts a network directly before the networks inside it.
        let first_inside = || self.0.range(prefix..).next();
        wider.any(|network| self.0.contains(&network)) || first_inside().is_some_and(|inside| prefix.contains(inside))
    }
}
