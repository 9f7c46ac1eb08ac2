//! Claims of the Nodes of one member against each other: the older Node keeps what two claim (rules 3, 4).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{Refusal, RegisteredNode, host};
use crate::{
    key::PublicKey,
    observe::Node,
    plan::{Reason, Uncovered},
};

/// A Node whose own claims hold, before they are held against the others'.
pub(super) struct NodeClaims<'a> {
    pub(super) node: &'a str,
    pub(super) observed: &'a Node,
    pub(super) key: PublicKey,
    pub(super) wireguard_ip: IpAddr,
    pub(super) pods: BTreeSet<IpNet>,
    pub(super) internal: BTreeSet<IpNet>,
    /// Location IPs and exported pods: no part of the node's identity.
    pub(super) extra: BTreeSet<IpNet>,
    pub(super) uncovered: Vec<Uncovered>,
}

/// Who claimed what first, inside one member. A network inside another's podCIDR would take its part of that Node's traffic, so
/// it counts as the same claim. A wider network that is routed to a location is none: the longer prefixes in it go first.
#[derive(Default)]
pub(super) struct ClaimIndex<'a> {
    /// WireGuard addresses by the first node that claims them and is not silent: kg gives the address of a node that it
    /// has not heard of for a minute to another one.
    pub(super) active_addresses: BTreeMap<IpAddr, &'a str>,
    keys: BTreeMap<PublicKey, &'a str>,
    prefixes: BTreeMap<IpNet, &'a str>,
    /// podCIDRs and WireGuard addresses among them.
    own: BTreeMap<IpNet, &'a str>,
    pub(super) shared: BTreeSet<String>,
}

impl<'a> ClaimIndex<'a> {
    /// The claim that this network is, or is a part of.
    fn around(&self, net: IpNet) -> Option<(IpNet, &'a str)> {
        let exact = self.prefixes.get_key_value(&net);
        let mut wider = std::iter::successors(net.supernet(), IpNet::supernet);
        let claims = exact.or_else(|| wider.find_map(|net| self.own.get_key_value(&net)));
        claims.map(|(net, owner)| (*net, *owner))
    }

    /// The claim that this network overlaps.
    fn overlapping(&self, net: IpNet) -> Option<(IpNet, &'a str)> {
        // In their order a network is followed by what lies in it.
        let within = || self.own.range(net..).next().filter(|(other, _)| net.contains(*other));
        self.around(net).or_else(|| within().map(|(net, owner)| (*net, *owner)))
    }

    pub(super) fn register(&mut self, claims: NodeClaims<'a>) -> Result<(RegisteredNode<'a>, Vec<Uncovered>), Refusal> {
        let name = claims.node;
        if let Some(owner) = self.keys.get(&claims.key) {
            return Err((
                Reason::PublicKeyDuplicate,
                format!("key {} is that of Node {owner}; one of the two is a copy", claims.key),
            ));
        }
        let wireguard = host(claims.wireguard_ip);
        if let Some(owner) = self
            .active_addresses
            .get(&claims.wireguard_ip)
            .filter(|_| claims.observed.is_silent())
        {
            return Err((
                Reason::WGIPDuplicate,
                format!(
                    "WireGuard address {} is that of Node {owner} now; kg has stopped checking in for this one",
                    claims.wireguard_ip
                ),
            ));
        }
        if let Some((theirs, owner)) = self.overlapping(wireguard) {
            let message = if theirs == wireguard {
                format!("WireGuard address {} is that of Node {owner}", claims.wireguard_ip)
            } else {
                format!(
                    "WireGuard address {} lies in {theirs}, which is Node {owner}'s",
                    claims.wireguard_ip
                )
            };
            return Err((Reason::WGIPDuplicate, message));
        }
        let taken = |net: &IpNet| self.overlapping(*net).map(|theirs| (*net, theirs));
        if let Some((net, (theirs, owner))) = claims.pods.iter().find_map(taken) {
            let message = if theirs == net {
                format!("podCIDR {net} is that of Node {owner}")
            } else {
                format!("podCIDR {net} overlaps {theirs}, which is Node {owner}'s")
            };
            return Err((Reason::PodCIDRDuplicate, message));
        }
        let mut own = claims.pods;
        own.insert(wireguard);
        let identity = own.clone();
        own.extend(claims.internal.iter().filter(|net| self.around(**net).is_none()));
        let mut prefixes = own.clone();
        for net in claims
            .internal
            .into_iter()
            .chain(claims.extra)
            .filter(|net| !own.contains(net))
        {
            match self.around(net) {
                Some((theirs, owner)) => {
                    self.shared.insert(if theirs == net {
                        format!("{net} of Node {name} is also that of Node {owner}, which keeps it")
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
        self.own.extend(identity.into_iter().map(|net| (net, name)));
        let registered = RegisteredNode {
            node: name,
            observed: claims.observed,
            key: claims.key,
            prefixes,
            wireguard,
        };
        Ok((registered, claims.uncovered))
    }
}
