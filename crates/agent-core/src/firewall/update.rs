//! The smallest transaction from one table to the next; nothing is run here.

use std::{collections::BTreeSet, fmt::Write};

use super::{
    Firewall,
    render::{Set, join, render, sets},
};
use crate::numbers::NFT_TABLE;

/// What leads from one table to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// Elements of sets only: rules, counters and every other set stay as they are.
    Elements {
        /// Transactions for `nft -f`, one after the other.
        scripts: Vec<String>,
        /// How many elements go.
        removed: usize,
        /// How many come.
        added: usize,
    },
    /// The table as a whole, in one step.
    Whole {
        /// The transaction for `nft -f`.
        script: String,
    },
}

impl Update {
    /// The transactions for `nft -f`, in their order.
    #[must_use]
    pub fn scripts(&self) -> &[String] {
        match self {
            Self::Elements { scripts, .. } => scripts,
            Self::Whole { script } => std::slice::from_ref(script),
        }
    }
}

/// What leads from `old`, as last written, to `new`; `None` = nothing to do. Without `old`, the whole table.
///
/// Sets do not change at one moment, though a transaction names them together ([`sets`]). So what closes comes before, and goes
/// after, whatever is open. Where both would be needed at once, the whole table is written.
#[must_use]
pub fn update(old: Option<&Firewall>, new: &Firewall) -> Option<Update> {
    let whole = || Some(Update::Whole { script: render(new) });
    let Some(old) = old.filter(|old| old.frame == new.frame) else {
        return whole();
    };
    let [mut closing, mut others] = [Changes::default(), Changes::default()];
    for (old, new) in sets(old).iter().zip(sets(new)) {
        let changes = if new.closes { &mut closing } else { &mut others };
        changes.add(&old.elements, &new);
    }
    let (removed, added) = (closing.removed + others.removed, closing.added + others.added);
    let scripts = match (closing.removed > 0, closing.added > 0) {
        (true, true) => return whole(),
        (true, false) => vec![others.script, closing.script],
        (false, _) => vec![closing.script + &others.script],
    };
    let scripts: Vec<String> = scripts.into_iter().filter(|script| !script.is_empty()).collect();
    (!scripts.is_empty()).then_some(Update::Elements {
        scripts,
        removed,
        added,
    })
}

/// What some sets lose and get.
#[derive(Default)]
struct Changes {
    script: String,
    removed: usize,
    added: usize,
}

impl Changes {
    /// What goes makes room first: a wider prefix may take the place of two narrower ones in one transaction.
    fn add(&mut self, old: &BTreeSet<String>, new: &Set) {
        let minus: BTreeSet<String> = old.difference(&new.elements).cloned().collect();
        let plus: BTreeSet<String> = new.elements.difference(old).cloned().collect();
        self.removed += minus.len();
        self.added += plus.len();
        for (verb, elements) in [("delete", minus), ("add", plus)] {
            if !elements.is_empty() {
                let list = join(&elements);
                let _ = writeln!(self.script, "{verb} element inet {NFT_TABLE} {} {{ {list} }}", new.name);
            }
        }
    }
}
