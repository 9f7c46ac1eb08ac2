//! Set operations on address prefixes for nftables' interval sets, whose elements must not overlap.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Special-purpose prefixes (RFC 6890), which no other cluster may reach even inside an allowed network: "this network", loopback,
/// link-local (at which a cloud's metadata service hands out a node's credentials), multicast and broadcast.
pub const SPECIAL_PURPOSE: [IpNet; 8] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(0, 0, 0, 0), 8)),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8)),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16)),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4)),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::BROADCAST, 32)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 127)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8)),
];

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// The family of a prefix.
    #[must_use]
    pub const fn of(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::V4,
            IpNet::V6(_) => Self::V6,
        }
    }

    /// The prefix that contains every address of the family.
    #[must_use]
    pub fn everything(self) -> IpNet {
        match self {
            Self::V4 => IpNet::V4(Ipv4Net::default()),
            Self::V6 => IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
        }
    }
}

/// The /32 or /128 of an address.
#[must_use]
pub fn host(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

/// Whether two prefixes have an address in common.
#[must_use]
pub fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

/// The same addresses in the fewest prefixes, without overlaps.
#[must_use]
pub fn aggregate<'a>(nets: impl IntoIterator<Item = &'a IpNet>) -> BTreeSet<IpNet> {
    let nets: Vec<IpNet> = nets.into_iter().map(IpNet::trunc).collect();
    IpNet::aggregate(&nets).into_iter().collect()
}

/// Whether `within`, which must be aggregated, covers `net`.
#[must_use]
pub fn covered(net: &IpNet, within: &BTreeSet<IpNet>) -> bool {
    within.iter().any(|outer| outer.contains(net))
}

/// Splits `net` into prefixes so that each lies completely inside or completely outside every prefix of `cuts`.
fn cut(net: IpNet, cuts: &[IpNet], out: &mut Vec<IpNet>) {
    let inner: Vec<IpNet> = cuts.iter().copied().filter(|c| *c != net && net.contains(c)).collect();
    if inner.is_empty() {
        return out.push(net);
    }
    // A prefix that strictly contains another is not a host prefix, so it has two halves.
    match net.subnets(net.prefix_len() + 1) {
        Ok(halves) => halves.for_each(|half| cut(half, &inner, out)),
        Err(_) => out.push(net),
    }
}

/// Converts pairs of prefixes whose left sides may overlap into pairs without overlaps. Every left address keeps its right
/// addresses, except those of the other family. The kernel refuses partial overlaps in concatenated range sets
/// (nft_set_pipapo: ENOTEMPTY).
#[must_use]
pub fn disjoint(pairs: &BTreeMap<IpNet, BTreeSet<IpNet>>) -> BTreeSet<(IpNet, IpNet)> {
    let keys: Vec<IpNet> = pairs.keys().map(IpNet::trunc).collect();
    let mut atoms = Vec::new();
    for root in maximal(&keys) {
        cut(root, &keys, &mut atoms);
    }
    let mut out = BTreeSet::new();
    for atom in atoms {
        let right = pairs
            .iter()
            .filter(|(left, _)| left.contains(&atom))
            .flat_map(|(_, right)| right);
        out.extend(
            aggregate(right)
                .into_iter()
                .filter(|r| Family::of(r) == Family::of(&atom))
                .map(|r| (atom, r)),
        );
    }
    out
}

/// The prefixes that no other one contains. Unlike [`aggregate`], it does not join neighbours to a prefix that is not in `nets`.
pub(crate) fn maximal<'a>(nets: impl IntoIterator<Item = &'a IpNet>) -> BTreeSet<IpNet> {
    // A prefix sorts directly before those that lie in it.
    let sorted: BTreeSet<IpNet> = nets.into_iter().map(IpNet::trunc).collect();
    let mut out: BTreeSet<IpNet> = BTreeSet::new();
    for net in sorted {
        if !out.last().is_some_and(|outer| outer.contains(&net)) {
            out.insert(net);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn aggregate_joins_neighbours_and_nested_prefixes() {
        let got = aggregate(&nets(&[
            "10.0.0.0/9",
            "10.128.0.0/9",
            "10.3.0.0/16",
            "fd00::/64",
            "fd00::1/128",
        ]));
        assert_eq!(got, nets(&["10.0.0.0/8", "fd00::/64"]));
    }

    #[test]
    fn disjoint_gives_nested_prefixes_the_pairs_of_outer_ones() {
        let pairs = BTreeMap::from([
            ("10.0.0.0/30".parse().unwrap(), nets(&["1.0.0.0/8"])),
            ("10.0.0.1/32".parse().unwrap(), nets(&["2.0.0.0/8"])),
        ]);
        let want: BTreeSet<(IpNet, IpNet)> = [
            ("10.0.0.0/32", "1.0.0.0/8"),
            ("10.0.0.1/32", "1.0.0.0/8"),
            ("10.0.0.1/32", "2.0.0.0/8"),
            ("10.0.0.2/31", "1.0.0.0/8"),
        ]
        .into_iter()
        .map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap()))
        .collect();
        assert_eq!(disjoint(&pairs), want);
    }

    fn net() -> impl Strategy<Value = IpNet> {
        (0u8..8, 24u8..=32).prop_map(|(h, l)| IpNet::new(IpAddr::from([10, 0, 0, h]), l).unwrap().trunc())
    }

    proptest! {
        #[test]
        fn disjoint_keeps_every_pair_without_overlaps(
            pairs in proptest::collection::btree_map(net(), proptest::collection::btree_set(net(), 0..4), 0..5),
            left in 0u8..9, right in 0u8..9,
        ) {
            let got = disjoint(&pairs);
            for (i, a) in got.iter().enumerate() {
                for b in got.iter().skip(i + 1) {
                    prop_assert!(!(overlap(&a.0, &b.0) && overlap(&a.1, &b.1)), "{a:?} {b:?}");
                }
            }
            let (l, r) = (host(IpAddr::from([10, 0, 0, left])), host(IpAddr::from([10, 0, 0, right])));
            let before = pairs.iter().any(|(k, v)| k.contains(&l) && v.iter().any(|v| v.contains(&r)));
            prop_assert_eq!(got.iter().any(|(k, v)| k.contains(&l) && v.contains(&r)), before);
        }
    }
}
