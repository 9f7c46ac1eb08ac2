//! Chooses this node's WireGuard address from the claims of all Nodes of its cluster.
//!
//! Nodes choose without a coordinator. A node keeps its published address across restarts and when other nodes join, while the address
//! is usable in the range ([`Range::is_usable`]). If two nodes choose the same address at the same time, both see the other's claim, and
//! the later one by (creationTimestamp, name) chooses another address.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

/// The number of addresses that are tried by hash before the range is searched in order.
const ATTEMPTS: u32 = 256;

/// The range from which a cluster's nodes take their addresses. It has at least two usable addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range(IpNet);

/// Why a range cannot be used, or has no free address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// The range has no usable address: it is a /31, /32, /127 or /128.
    #[error("{0} has no room for nodes: its first and last address are not used; take a larger range, such as a /16")]
    TooSmall(IpNet),
    /// Every usable address is claimed.
    #[error(
        "the Nodes of this cluster claim all {1} usable addresses of {0}: give the nodes a larger \
         --wireguard-cidr, or remove `kilo.squat.ai/wireguard-ip` from Nodes that are gone for good"
    )]
    Full(IpNet, usize),
}

/// The published address of one Node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// The Node's name.
    pub node: String,
    /// The address in its `kilo.squat.ai/wireguard-ip`, without the prefix length.
    pub address: IpAddr,
}

/// This node, and the address that it claims, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnClaim<'a> {
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// The Node's name.
    pub node: &'a str,
    /// The address that this node has published, if any.
    pub published: Option<IpAddr>,
}

impl Range {
    /// Makes a range; host bits are dropped.
    pub fn new(net: IpNet) -> Result<Self, RangeError> {
        let net = net.trunc();
        if net.max_prefix_len() - net.prefix_len() < 2 {
            Err(RangeError::TooSmall(net))
        } else {
            Ok(Self(net))
        }
    }

    /// The prefix.
    #[must_use]
    pub const fn net(self) -> IpNet {
        self.0
    }

    /// The address as published: with the range's prefix length, as Kilo does.
    #[must_use]
    pub fn with_prefix(self, address: IpAddr) -> IpNet {
        IpNet::new_assert(address, self.0.prefix_len())
    }

    /// Whether the address is in the range, but not the range's first or last address. These two are the network and broadcast
    /// addresses, or for IPv6 the subnet-router anycast address (RFC 4291 §2.6.1) and a reserved anycast address (RFC 2526).
    #[must_use]
    pub fn is_usable(self, address: IpAddr) -> bool {
        self.0.contains(&address) && address != self.0.network() && address != self.0.broadcast()
    }

    /// The number of usable addresses, capped at a number that no cluster reaches.
    fn size(self) -> u64 {
        let bits = u32::from(self.0.max_prefix_len() - self.0.prefix_len());
        1u64.checked_shl(bits).unwrap_or(u64::MAX).saturating_sub(2)
    }

    /// The usable address with the number `n`, counted from 0.
    fn nth(self, n: u64) -> IpAddr {
        match self.0.network() {
            IpAddr::V4(base) => IpAddr::V4(Ipv4Addr::from_bits(base.to_bits() + n as u32 + 1)),
            IpAddr::V6(base) => IpAddr::V6(Ipv6Addr::from_bits(base.to_bits() + u128::from(n) + 1)),
        }
    }
}

/// Chooses the address of this node. `claims` are those of all Nodes; a claim with this node's own name is ignored.
pub fn choose(range: Range, me: &OwnClaim<'_>, claims: &[Claim]) -> Result<IpAddr, RangeError> {
    let others = || {
        claims
            .iter()
            .filter(|claim| claim.node != me.node && range.is_usable(claim.address))
    };
    if let Some(mine) = me.published.filter(|address| range.is_usable(*address)) {
        let is_earlier = |claim: &Claim| (claim.created, claim.node.as_str()) < (me.created, me.node);
        if !others().any(|claim| claim.address == mine && is_earlier(claim)) {
            return Ok(mine);
        }
    }
    let claimed: BTreeSet<IpAddr> = others().map(|claim| claim.address).collect();
    let size = range.size();
    if claimed.len() as u64 >= size {
        return Err(RangeError::Full(range.net(), claimed.len()));
    }
    let by_hash = (0..ATTEMPTS).map(|attempt| hash(me.node, attempt) % size);
    let start = hash(me.node, 0) % size;
    let in_order = (0..size)
        .map(|step| (u128::from(start) + u128::from(step)) % u128::from(size))
        .map(|n| n as u64);
    by_hash
        .chain(in_order)
        .map(|n| range.nth(n))
        .find(|address| !claimed.contains(address))
        .ok_or(RangeError::Full(range.net(), claimed.len()))
}

fn hash(node: &str, attempt: u32) -> u64 {
    let digest = Sha256::new()
        .chain_update(node)
        .chain_update([0])
        .chain_update(attempt.to_be_bytes())
        .finalize();
    digest.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(text: &str) -> Range {
        Range::new(text.parse().unwrap()).unwrap()
    }

    fn claim(created: i64, node: &str, address: &str) -> Claim {
        Claim {
            created,
            node: node.into(),
            address: address.parse().unwrap(),
        }
    }

    #[test]
    fn claim_without_an_earlier_rival_is_kept() {
        let me = OwnClaim {
            created: 5,
            node: "b",
            published: Some("100.66.7.7".parse().unwrap()),
        };
        let others = [
            claim(1, "a", "100.66.7.8"),
            claim(9, "c", "100.66.7.7"),
            claim(1, "b", "100.66.7.7"),
        ];
        assert_eq!(
            choose(range("100.66.0.0/16"), &me, &others),
            Ok("100.66.7.7".parse().unwrap())
        );
    }

    #[test]
    fn later_of_two_equal_claims_chooses_another_address() {
        let others = [claim(5, "a", "100.66.7.7")];
        let me = OwnClaim {
            created: 5,
            node: "b",
            published: Some("100.66.7.7".parse().unwrap()),
        };
        assert_ne!(
            choose(range("100.66.0.0/16"), &me, &others),
            Ok("100.66.7.7".parse().unwrap())
        );
    }

    #[test]
    fn choice_for_a_name_is_the_same_in_all_versions() {
        let fresh = |node| {
            choose(
                range("100.66.0.0/16"),
                &OwnClaim {
                    created: 0,
                    node,
                    published: None,
                },
                &[],
            )
            .unwrap()
        };
        assert_eq!(
            ["mgmt-1", "mgmt-2", "tenant-a-1"].map(|n| fresh(n).to_string()),
            ["100.66.199.175", "100.66.113.153", "100.66.102.123"]
        );
    }

    #[test]
    fn full_range_is_an_error_with_a_remedy() {
        let others = [claim(0, "a", "10.0.0.1"), claim(0, "b", "10.0.0.2")];
        let error = choose(
            range("10.0.0.0/30"),
            &OwnClaim {
                created: 0,
                node: "c",
                published: None,
            },
            &others,
        )
        .unwrap_err();
        assert_eq!(error, RangeError::Full("10.0.0.0/30".parse().unwrap(), 2));
        assert!(error.to_string().contains("larger --wireguard-cidr"), "{error}");
    }

    #[test]
    fn last_free_address_is_found() {
        let others: Vec<_> = (1..=253)
            .map(|n| claim(0, &format!("n{n}"), &format!("10.0.0.{n}")))
            .collect();
        let me = OwnClaim {
            created: 0,
            node: "late",
            published: None,
        };
        assert_eq!(
            choose(range("10.0.0.0/24"), &me, &others),
            Ok("10.0.0.254".parse().unwrap())
        );
    }

    fn net() -> impl Strategy<Value = IpNet> {
        prop_oneof![
            (any::<u32>(), 0u8..=30).prop_map(|(a, l)| IpNet::new_assert(IpAddr::V4(Ipv4Addr::from_bits(a)), l)),
            (any::<u128>(), 0u8..=126).prop_map(|(a, l)| IpNet::new_assert(IpAddr::V6(Ipv6Addr::from_bits(a)), l)),
        ]
    }

    proptest! {
        #[test]
        fn chosen_address_is_usable_and_has_no_earlier_claim(
            net in net(), node in "[a-z]{1,8}", created in 0i64..4,
            claims in proptest::collection::vec((0i64..4, "[a-z]{1,2}", any::<u64>()), 0..12),
            published in proptest::option::of(any::<u64>()),
        ) {
            let range = Range::new(net).unwrap();
            let at = |n: u64| range.nth(n % range.size());
            let others: Vec<_> =
                claims.into_iter().map(|(created, node, n)| Claim { created, node, address: at(n) }).collect();
            let me = OwnClaim { created, node: &node, published: published.map(at) };
            match choose(range, &me, &others) {
                Ok(address) => {
                    prop_assert!(range.is_usable(address));
                    let rivals = others.iter().filter(|c| c.node != node && c.address == address);
                    // Only a later rival, which must choose another address, may have the same one.
                    for rival in rivals {
                        prop_assert!(me.published == Some(address));
                        prop_assert!((rival.created, rival.node.as_str()) > (created, node.as_str()));
                    }
                    prop_assert_eq!(choose(range, &OwnClaim { published: Some(address), ..me }, &others), Ok(address));
                }
                Err(error) => prop_assert!(matches!(error, RangeError::Full(..)) && range.size() <= 12, "{error}"),
            }
        }

        #[test]
        fn nodes_that_start_together_get_distinct_addresses(nodes in proptest::collection::btree_set("[a-z]{1,3}", 1..14)) {
            let range = range("10.0.0.0/28");
            let mut claims: Vec<Claim> = Vec::new();
            for _round in 0..=nodes.len() {
                let seen = claims.clone();
                claims = nodes.iter().map(|node| {
                    let published = seen.iter().find(|c| c.node == *node).map(|c| c.address);
                    let me = OwnClaim { created: 0, node, published };
                    Claim { created: 0, node: node.clone(), address: choose(range, &me, &seen).unwrap() }
                }).collect();
            }
            let distinct: BTreeSet<_> = claims.iter().map(|c| c.address).collect();
            prop_assert_eq!(distinct.len(), nodes.len());
        }
    }
}
