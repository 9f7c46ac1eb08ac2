//! Derives the nftables transactions that turn one table into the next, and change only set elements if possible.

use std::{collections::BTreeSet, fmt::Write};

use super::{
    Firewall,
    render::{join, render},
    sets::{Set, sets},
};
use crate::numbers::NFT_TABLE;

/// The change from one table to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// Changes only set elements. Rules, counters and other sets stay as they are.
    Elements {
        /// Transactions for `nft -f`, in this order.
        scripts: Vec<String>,
        /// Number of elements that are removed.
        removed: usize,
        /// Number of elements that are added.
        added: usize,
    },
    /// Replaces the whole table in one transaction.
    Whole {
        /// The transaction for `nft -f`.
        script: String,
    },
}

impl Update {
    /// The transactions for `nft -f`, in order.
    #[must_use]
    pub fn scripts(&self) -> &[String] {
        match self {
            Self::Elements { scripts, .. } => scripts,
            Self::Whole { script } => std::slice::from_ref(script),
        }
    }
}

/// Derives the change from `old`, the table that was written last, to `new`. `None` = they are equal. The change replaces the whole
/// table if there is no `old`, if the parameters differ, or if it would both add and remove deny elements.
///
/// The rules match a packet against the allow set first and the deny set later, and a transaction may take effect in between. So:
///
/// - New deny elements come first in the transaction. The kernel activates new elements in this order (see `sets`), so a packet that
///   matches a new allow element also meets the new deny elements.
/// - Old deny elements are removed in a second transaction. If one transaction removed the old elements of all sets, a packet could match
///   an old allow element before the change and no deny element after it.
/// - If deny elements are both added and removed, the two rules above contradict each other: a new element may overlap an old one, and
///   then it cannot be added before the old one is removed. So the whole table is replaced.
#[must_use]
pub fn update(old: Option<&Firewall>, new: &Firewall) -> Option<Update> {
    let whole = || Some(Update::Whole { script: render(new) });
    let Some(old) = old.filter(|old| old.parameters == new.parameters) else {
        return whole();
    };
    let [mut deny, mut others] = [Changes::default(), Changes::default()];
    for (old, new) in sets(old).iter().zip(sets(new)) {
        let changes = if new.is_deny { &mut deny } else { &mut others };
        changes.add(&old.elements, &new);
    }
    let (removed, added) = (deny.removed + others.removed, deny.added + others.added);
    let scripts = match (deny.removed > 0, deny.added > 0) {
        (true, true) => return whole(),
        (true, false) => vec![others.script, deny.script],
        (false, _) => vec![deny.script + &others.script],
    };
    let scripts: Vec<String> = scripts.into_iter().filter(|script| !script.is_empty()).collect();
    (!scripts.is_empty()).then_some(Update::Elements {
        scripts,
        removed,
        added,
    })
}

/// Removed and added elements of some sets.
#[derive(Default)]
struct Changes {
    script: String,
    removed: usize,
    added: usize,
}

impl Changes {
    /// Adds the commands that turn the elements `old` into those of `new`. Removals come first, because a wider prefix may replace two
    /// narrower ones, and the kernel refuses overlapping elements.
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
