//! A map with networks as keys. For a given network, finds the smallest network that contains it, and all networks inside it.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

/// Values by network, without host bits. A lookup tries only the prefix lengths that occur: nearly all networks of a mesh have one of a
/// few lengths.
#[derive(Debug)]
pub(super) struct PrefixMap<V> {
    networks: BTreeMap<IpNet, V>,
    lengths: BTreeSet<u8>,
}

impl<V> Default for PrefixMap<V> {
    fn default() -> Self {
        Self {
            networks: BTreeMap::new(),
            lengths: BTreeSet::new(),
        }
    }
}

impl<V> PrefixMap<V> {
    pub(super) fn is_empty(&self) -> bool {
        self.networks.is_empty()
    }

    /// The network with the longest prefix that equals or contains `net`.
    pub(super) fn find_containing(&self, net: IpNet) -> Option<(IpNet, &V)> {
        let lengths = self.lengths.range(..=net.prefix_len()).rev();
        lengths.into_iter().find_map(|length| {
            let outer = IpNet::new(net.addr(), *length).ok()?.trunc();
            Some((outer, self.networks.get(&outer)?))
        })
    }

    /// The networks that equal `net` or lie inside it, in order.
    pub(super) fn find_inside(&self, net: IpNet) -> impl Iterator<Item = (IpNet, &V)> {
        // `IpNet` sorts a network directly before the networks inside it.
        let inside = self
            .networks
            .range(net..)
            .take_while(move |(inner, _)| net.contains(*inner));
        inside.map(|(inner, value)| (*inner, value))
    }

    /// Whether a network equals, contains or lies inside `net`.
    pub(super) fn overlaps(&self, net: IpNet) -> bool {
        self.find_containing(net).is_some() || self.find_inside(net).next().is_some()
    }
}

impl<V> Extend<(IpNet, V)> for PrefixMap<V> {
    fn extend<I: IntoIterator<Item = (IpNet, V)>>(&mut self, networks: I) {
        for (network, value) in networks {
            self.lengths.insert(network.prefix_len());
            self.networks.insert(network, value);
        }
    }
}

impl<V> FromIterator<(IpNet, V)> for PrefixMap<V> {
    fn from_iter<I: IntoIterator<Item = (IpNet, V)>>(networks: I) -> Self {
        let mut map = Self::default();
        map.extend(networks);
        map
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mesh::overlap;

    fn network() -> impl Strategy<Value = IpNet> {
        // Few bits, so that many of the networks overlap.
        let v4 = (0u32..64, 24u8..=32).prop_map(|(host, length)| (std::net::Ipv4Addr::from(host << 2).into(), length));
        let v6 = (0u128..64, 118u8..=128).prop_map(|(host, length)| (std::net::Ipv6Addr::from(host).into(), length));
        prop_oneof![v4, v6].prop_map(|(address, length)| IpNet::new(address, length).unwrap().trunc())
    }

    proptest! {
        #[test]
        fn lookups_find_what_a_search_of_all_networks_finds(
            networks in prop::collection::vec(network(), 0..12),
            net in network(),
        ) {
            let map: PrefixMap<()> = networks.iter().map(|network| (*network, ())).collect();
            let containing = networks.iter().filter(|outer| outer.contains(&net)).max_by_key(|outer| outer.prefix_len());
            prop_assert_eq!(map.find_containing(net).map(|(outer, ())| outer), containing.copied());
            let inside: BTreeSet<IpNet> = networks.iter().copied().filter(|inner| net.contains(inner)).collect();
            prop_assert_eq!(map.find_inside(net).map(|(inner, ())| inner).collect::<BTreeSet<_>>(), inside);
            prop_assert_eq!(map.overlaps(net), networks.iter().any(|other| overlap(*other, net)));
        }
    }
}
