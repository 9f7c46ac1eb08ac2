//! What a reader should find of a table that was written: the elements of every set and the number of rules in every chain.
//! How a reader spells them is its own business.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Firewall, render::render, render::sets};

/// A table as it should read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Expected {
    /// By set: its elements, parts joined by " . ", a single address without its prefix length.
    pub sets: BTreeMap<String, BTreeSet<String>>,
    /// By chain: how many rules it has.
    pub rules: BTreeMap<String, usize>,
}

/// How `firewall` should read.
#[must_use]
pub fn expected(firewall: &Firewall) -> Expected {
    let plain = |element: &String| {
        // By its family: /32 is an address of IPv4 and a network of IPv6.
        let part = |part: &str| match part.parse::<IpNet>() {
            Ok(net) if net.prefix_len() == net.max_prefix_len() => net.addr().to_string(),
            _ => part.to_owned(),
        };
        element.split(" . ").map(part).collect::<Vec<_>>().join(" . ")
    };
    let sets = sets(firewall)
        .iter()
        .map(|set| (set.name.to_owned(), set.elements.iter().map(plain).collect()))
        .collect();
    let mut rules = BTreeMap::new();
    let mut chain = None;
    // The text is ours: a rule a line.
    for line in render(firewall).lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("chain ") {
            chain = rest.strip_suffix(" {").map(str::to_owned);
            rules.extend(chain.clone().map(|name| (name, 0)));
        } else if line == "}" {
            chain = None;
        } else if !(line.is_empty() || line.starts_with('#') || line.starts_with("type ")) {
            *chain.as_ref().and_then(|name| rules.get_mut(name)).unwrap_or(&mut 0) += 1;
        }
    }
    Expected { sets, rules }
}
