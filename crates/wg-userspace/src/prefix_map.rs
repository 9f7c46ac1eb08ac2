//! Looks up the longest prefix that contains an address.

use std::net::IpAddr;

use ipnet::IpNet;

/// A map from prefixes to values. It is built once, as a sorted list of intervals that do not overlap; a lookup is one binary search.
#[derive(Debug)]
pub(crate) struct PrefixMap<T> {
    /// The first address and the value of each interval; `None` = no prefix contains it. An interval ends before the next one.
    v4: Vec<(u128, Option<T>)>,
    v6: Vec<(u128, Option<T>)>,
}

impl<T: Clone> PrefixMap<T> {
    /// Builds the map. If a prefix occurs twice, its later value wins.
    pub(crate) fn new(prefixes: impl IntoIterator<Item = (IpNet, T)>) -> Self {
        let (v4, v6): (Vec<_>, Vec<_>) = prefixes
            .into_iter()
            .partition(|(prefix, _)| matches!(prefix, IpNet::V4(_)));
        Self {
            v4: flatten(v4),
            v6: flatten(v6),
        }
    }

    /// The value of the longest prefix that contains the address.
    pub(crate) fn get(&self, address: IpAddr) -> Option<&T> {
        let intervals = if address.is_ipv4() { &self.v4 } else { &self.v6 };
        let after = intervals.partition_point(|(begin, _)| *begin <= number(address));
        intervals.get(after.checked_sub(1)?)?.1.as_ref()
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

fn flatten<T: Clone>(mut prefixes: Vec<(IpNet, T)>) -> Vec<(u128, Option<T>)> {
    prefixes.sort_by_key(|(prefix, _)| (number(prefix.network()), prefix.prefix_len()));
    let mut intervals: Vec<(u128, Option<T>)> = Vec::with_capacity(prefixes.len() * 2);
    // Last address and value of the prefixes that have begun and are not closed yet. Each prefix lies inside the one before it.
    let mut open: Vec<(u128, T)> = Vec::new();
    for (prefix, value) in prefixes {
        let (begin, end) = (number(prefix.network()), number(prefix.broadcast()));
        close(&mut open, &mut intervals, Some(begin));
        begin_interval(&mut intervals, begin, Some(value.clone()));
        open.push((end, value));
    }
    close(&mut open, &mut intervals, None);
    intervals
}

/// Removes the open prefixes that end before `until` (`None` = all). After each of them, the interval of the enclosing prefix continues.
fn close<T: Clone>(open: &mut Vec<(u128, T)>, intervals: &mut Vec<(u128, Option<T>)>, until: Option<u128>) {
    while let Some((end, _)) = open.pop_if(|(end, _)| until.is_none_or(|until| *end < until)) {
        if let Some(next) = end.checked_add(1) {
            begin_interval(intervals, next, open.last().map(|(_, enclosing)| enclosing.clone()));
        }
    }
}

fn begin_interval<T>(intervals: &mut Vec<(u128, Option<T>)>, begin: u128, value: Option<T>) {
    match intervals.last_mut() {
        Some(last) if last.0 == begin => last.1 = value,
        _ => intervals.push((begin, value)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prefix(text: &str) -> IpNet {
        text.parse().expect("a prefix")
    }

    #[test]
    fn longest_prefix_wins_and_the_outer_one_continues() {
        let prefixes = PrefixMap::new([
            (prefix("10.0.0.0/8"), 1),
            (prefix("10.1.0.0/16"), 2),
            (prefix("10.1.255.255/32"), 3),
            (prefix("255.255.255.255/32"), 4),
            (prefix("::/0"), 5),
            (prefix("fd00::/64"), 6),
        ]);
        let get = |address: &str| prefixes.get(address.parse().expect("an address")).copied();
        assert_eq!(
            [
                "9.255.255.255",
                "10.0.0.0",
                "10.1.0.0",
                "10.1.255.255",
                "10.2.0.0",
                "11.0.0.0",
                "255.255.255.255",
                "::",
                "fd00::1",
                "fd00:0:0:1::",
                "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
            ]
            .map(get),
            [
                None,
                Some(1),
                Some(2),
                Some(3),
                Some(1),
                None,
                Some(4),
                Some(5),
                Some(6),
                Some(5),
                Some(5)
            ]
        );
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_linear_search(
            nets in prop::collection::vec((0u32..64, 26u8..=32), 0..20),
            address in 0u32..80,
        ) {
            let nets: Vec<(IpNet, usize)> = nets
                .into_iter()
                .map(|(address, length)| {
                    ipnet::Ipv4Net::new(address.into(), length).expect("a length").trunc()
                })
                .map(IpNet::V4)
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .zip(0..)
                .collect();
            let address = IpAddr::V4(address.into());
            let naive = nets
                .iter()
                .filter(|(net, _)| net.contains(&address))
                .max_by_key(|(net, _)| net.prefix_len())
                .map(|(_, value)| *value);
            prop_assert_eq!(PrefixMap::new(nets.clone()).get(address).copied(), naive);
        }
    }
}
