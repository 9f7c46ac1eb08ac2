//! What a reader should find of a table that was written: the elements of every set and the number of rules in every chain.
//! How a reader spells them is its own business.

use std::collections::{BTreeMap, BTreeSet};

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
        let part = |part: &str| part.trim_end_matches("/32").trim_end_matches("/128").to_owned();
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
