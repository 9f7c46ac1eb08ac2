//! The smallest transaction from one table to the next; nothing is run here.

use std::{collections::BTreeSet, fmt::Write};

use super::{
    Firewall,
    render::{join, render, sets},
};
use crate::numbers::NFT_TABLE;

/// A transaction for `nft -f`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// Elements of sets only: rules, counters and every other set stay as they are.
    Elements {
        /// The text for `nft -f`.
        script: String,
        /// How many elements go.
        removed: usize,
        /// How many come.
        added: usize,
    },
    /// The table as a whole, in one step.
    Whole {
        /// The text for `nft -f`.
        script: String,
    },
}

impl Update {
    /// The text for `nft -f`.
    #[must_use]
    pub fn script(&self) -> &str {
        match self {
            Self::Elements { script, .. } | Self::Whole { script } => script,
        }
    }
}

/// Writes every element that fades once more, so that it stands for its whole time again; `None` = there is none. One
/// transaction takes it away and puts it back: a kernel older than 6.12 leaves the time of an element that is only added as
/// it was, and nothing is closed in between.
#[must_use]
pub fn refresh(firewall: &Firewall) -> Option<String> {
    let mut script = String::new();
    for set in sets(firewall)
        .iter()
        .filter(|set| set.fades && !set.elements.is_empty())
    {
        for verb in ["delete", "add"] {
            let _ = writeln!(
                script,
                "{verb} element inet {NFT_TABLE} {} {{ {} }}",
                set.name,
                join(&set.elements)
            );
        }
    }
    (!script.is_empty()).then_some(script)
}

/// What leads from `old`, as last written, to `new`; `None` = nothing to do. Without `old`, the whole table.
#[must_use]
pub fn update(old: Option<&Firewall>, new: &Firewall) -> Option<Update> {
    let Some(old) = old.filter(|old| old.frame == new.frame) else {
        return Some(Update::Whole { script: render(new) });
    };
    let (mut gone, mut come) = (String::new(), String::new());
    let (mut removed, mut added) = (0, 0);
    for (old, new) in sets(old).iter().zip(sets(new)) {
        let minus: BTreeSet<String> = old.elements.difference(&new.elements).cloned().collect();
        let plus: BTreeSet<String> = new.elements.difference(&old.elements).cloned().collect();
        for (script, verb, elements, count) in [
            (&mut gone, "delete", minus, &mut removed),
            (&mut come, "add", plus, &mut added),
        ] {
            if !elements.is_empty() {
                let _ = writeln!(
                    script,
                    "{verb} element inet {NFT_TABLE} {} {{ {} }}",
                    new.name,
                    join(&elements)
                );
                *count += elements.len();
            }
        }
    }
    // What goes first makes room: a wider prefix may take the place of two narrower ones in one transaction.
    (removed + added > 0).then(|| Update::Elements {
        script: gone + &come,
        removed,
        added,
    })
}
