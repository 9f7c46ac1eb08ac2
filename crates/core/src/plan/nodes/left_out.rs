//! Reports what registered nodes publish and their Peers leave out: addresses that can never be an endpoint, and location IPs outside
//! the member's networks.

use ipnet::IpNet;

use super::{NodeRegistry, RegisteredNode, RegistryBuilder};
use crate::{
    mesh::{Addressing, Profile},
    plan::{Fact, endpoint},
};

impl<'a> RegistryBuilder<'a, '_> {
    /// Adds at most one fact about endpoints and one about location IPs. Each names the first node, because a condition has no room for
    /// all. An explicit endpoint annotation is not reported here: a Node with an invalid one is skipped. Nothing is reported
    /// for a sandbox, because the endpoints and location IPs of its Nodes are not used.
    pub(super) fn report_left_out(&self, registry: &mut NodeRegistry<'a>) {
        if self.cluster.profile == Profile::Sandbox {
            return;
        }
        let endpoint = registry.registered.iter().find_map(unusable_endpoint_message);
        let location_ip = registry
            .registered
            .iter()
            .find_map(|node| self.location_ip_message(node));
        let messages = endpoint.into_iter().chain(location_ip);
        registry.facts.extend(messages.map(|message| Fact::AddressLeftOut {
            cluster: self.cluster.name.clone(),
            message: format!("{message}. Other Nodes may have the same problem"),
        }));
    }

    fn location_ip_message(&self, node: &RegisteredNode<'a>) -> Option<String> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded {
            return None;
        }
        let mut location_ips = node.observed.allowed_location_ips.iter().map(IpNet::trunc);
        let uncovered = location_ips.find(|net| !self.is_claimable(*net))?;
        let claim = format!("{uncovered} of annotation allowed-location-ips of Node {}", node.node);
        Some(format!(
            "{}, and its Peer leaves it out",
            self.refusal_message(&claim, uncovered)
        ))
    }
}

fn unusable_endpoint_message(node: &RegisteredNode<'_>) -> Option<String> {
    let mut addresses = endpoint::implicit_addresses(node.observed);
    let (kind, address, what) =
        addresses.find_map(|(kind, address)| Some((kind, address, endpoint::unusable_reason(address)?)))?;
    Some(format!(
        "{kind} {address} of Node {} is no endpoint of its Peer: it is {what}",
        node.node
    ))
}
