//! Resolves duplicate claims among the Nodes of one member: the older Node keeps the key or prefix (design rules 3, 4).
//! Exception: a silent Node loses its WireGuard address to a newer one that is not silent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Mutex,
};

use ipnet::IpNet;

use super::{Refusal, RegisteredNode, host_route};
use crate::{
    key::PublicKey,
    observe::Node,
    plan::{Reason, Uncovered, prefix_map::PrefixMap},
};

/// The valid claims of a Node, before the comparison with the claims of other Nodes.
pub(super) struct NodeClaims<'a> {
    pub(super) node: &'a str,
    pub(super) observed: &'a Node,
    pub(super) key: PublicKey,
    pub(super) wireguard_ip: IpAddr,
    /// podCIDRs of the Node, and of the Nodes that it leads in a Kilo location.
    pub(super) pods: BTreeSet<IpNet>,
    /// InternalIPs of the Node, and of the Nodes that it leads in a Kilo location.
    pub(super) internal: BTreeSet<IpNet>,
    /// `kilo.squat.ai/allowed-location-ips` and exported pods. A Node with a duplicate among these or `internal` still gets a Peer,
    /// without the duplicate.
    pub(super) extra: BTreeSet<IpNet>,
    pub(super) uncovered: Vec<Uncovered>,
}

/// The registered claims of one member's Nodes. A network inside another Node's podCIDR would take a part of that Node's
/// traffic, because the longest prefix wins, so it counts as a duplicate. A network of `allowed-location-ips` that contains
/// podCIDRs of other Nodes is no duplicate.
#[derive(Default)]
pub(super) struct ClaimIndex<'a> {
    /// The first node that claims each WireGuard address and is not silent. kg reassigns the address of a node that has not
    /// checked in for a minute.
    pub(super) active_addresses: BTreeMap<IpAddr, &'a str>,
    keys: BTreeMap<PublicKey, &'a str>,
    prefixes: BTreeMap<IpNet, &'a str>,
    /// The podCIDRs and WireGuard addresses among `prefixes`.
    node_networks: PrefixMap<&'a str>,
    /// Messages about duplicates that are left out of a Node's Peer. A duplicate for which the Node gets no Peer is a [`Refusal`].
    pub(super) duplicate_messages: BTreeSet<String>,
}

impl<'a> ClaimIndex<'a> {
    /// The registered claim that equals `net`, else the registered podCIDR that contains it.
    fn containing(&self, net: IpNet) -> Option<(IpNet, &'a str)> {
        let exact = self.prefixes.get(&net).map(|owner| (net, owner));
        let claim = exact.or_else(|| self.node_networks.find_containing(net));
        claim.map(|(net, owner)| (net, *owner))
    }

    /// The result of [`Self::containing`], else a registered podCIDR or WireGuard address inside `net`.
    fn overlapping(&self, net: IpNet) -> Option<(IpNet, &'a str)> {
        let first_inside = || self.node_networks.find_inside(net).next();
        self.containing(net)
            .or_else(|| first_inside().map(|(net, owner)| (net, *owner)))
    }

    /// Registers the claims of a Node, or returns why the Node gets no Peer. The caller registers older Nodes first.
    pub(super) fn register(
        &mut self,
        claims: NodeClaims<'a>,
        peer_name: &dyn Fn(&str) -> String,
    ) -> Result<(RegisteredNode<'a>, Vec<Uncovered>), Refusal> {
        let name = claims.node;
        if let Some(owner) = self.keys.get(&claims.key) {
            return Err((
                Reason::PublicKeyDuplicate,
                format!("key {} belongs to Node {owner}; one of the two is a copy", claims.key),
            ));
        }
        let wireguard = host_route(claims.wireguard_ip);
        if let Some(owner) = self
            .active_addresses
            .get(&claims.wireguard_ip)
            .filter(|_| claims.observed.is_silent())
        {
            return Err((
                Reason::WGIPDuplicate,
                format!(
                    "WireGuard address {} belongs to Node {owner} now; kg has stopped checking in for this one",
                    claims.wireguard_ip
                ),
            ));
        }
        if let Some((theirs, owner)) = self.overlapping(wireguard) {
            let message = if theirs == wireguard {
                format!("WireGuard address {} belongs to Node {owner}", claims.wireguard_ip)
            } else {
                format!(
                    "WireGuard address {} lies in {theirs}, which belongs to Node {owner}",
                    claims.wireguard_ip
                )
            };
            return Err((Reason::WGIPDuplicate, message));
        }
        let find_owner = |net: &IpNet| self.overlapping(*net).map(|claim| (*net, claim));
        if let Some((net, (theirs, owner))) = claims.pods.iter().find_map(find_owner) {
            let message = if theirs == net {
                format!("podCIDR {net} belongs to Node {owner}")
            } else {
                format!("podCIDR {net} overlaps {theirs}, which belongs to Node {owner}")
            };
            return Err((Reason::PodCIDRDuplicate, message));
        }
        let mut node_networks = claims.pods;
        node_networks.insert(wireguard);
        let mut prefixes = node_networks.clone();
        for net in claims.internal.into_iter().chain(claims.extra) {
            match self.containing(net) {
                Some((theirs, owner)) => {
                    self.duplicate_messages.insert(if theirs == net {
                        format!("{net} of Node {name} also belongs to Node {owner}, which keeps it")
                    } else {
                        format!("{net} of Node {name} lies in {theirs} of Node {owner}, which keeps it")
                    });
                }
                None => {
                    prefixes.insert(net);
                }
            }
        }
        self.keys.insert(claims.key, name);
        self.prefixes.extend(prefixes.iter().map(|net| (*net, name)));
        self.node_networks
            .extend(node_networks.into_iter().map(|net| (net, name)));
        let registered = RegisteredNode {
            node: name,
            observed: claims.observed,
            key: claims.key,
            prefixes,
            wireguard,
            peer_name: peer_name(name),
            shared_peer: Mutex::default(),
        };
        Ok((registered, claims.uncovered))
    }
}
