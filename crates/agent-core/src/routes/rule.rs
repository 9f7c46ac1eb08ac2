//! The policy routing rules of each address family. [`super`] computes the routes in the tables that these rules look up.

use std::{collections::BTreeMap, fmt};

use super::Routes;
use crate::{
    numbers::{MARK_MASK, MARK_TUNNEL, MARK_UNDERLAY, RULE_MESH, RULE_TUNNEL, TABLE, TABLE_TUNNEL},
    prefixes::Family,
};

/// A policy routing rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// Address family.
    pub family: Family,
    /// Priority: the lowest is evaluated first.
    pub priority: u32,
    /// Whether the rule applies to packets that do *not* match (`not` of ip-rule(8)).
    pub invert: bool,
    /// Firewall mark of the packet.
    pub mark: u32,
    /// Bits of the mark that are compared; 0 = any mark.
    pub mask: u32,
    /// What the rule does.
    pub action: Action,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Looks up the destination in this routing table.
    Lookup(u32),
    /// An observed rule with our protocol number, in a form that the agent never writes. Several such rules of one priority are
    /// observed as one.
    Other,
}

/// The two rules of a family: first for replies that must use the tunnel, then for all packets without the underlay mark.
#[must_use]
pub const fn rules(family: Family) -> [Rule; 2] {
    [
        Rule {
            family,
            priority: RULE_TUNNEL,
            invert: false,
            mark: MARK_TUNNEL,
            mask: MARK_MASK,
            action: Action::Lookup(TABLE_TUNNEL),
        },
        Rule {
            family,
            priority: RULE_MESH,
            invert: true,
            mark: MARK_UNDERLAY,
            mask: MARK_MASK,
            action: Action::Lookup(TABLE),
        },
    ]
}

impl Routes {
    /// Moves the two rules of each family directly before another program's rule that would hide them. `foreign` has, for each family, the
    /// lowest priority of such a rule. The two rules stay where they are if that priority is higher than [`RULE_MESH`]. They also
    /// stay if it is lower than 3, because they need two priorities between it and 0, the kernel's rule for local addresses.
    #[must_use]
    pub fn before_foreign_rules(mut self, foreign: &BTreeMap<Family, u32>) -> Self {
        let move_rule = |rule: Rule| match foreign.get(&rule.family) {
            Some(&first @ 3..=RULE_MESH) => Rule {
                priority: (first + rule.priority).saturating_sub(RULE_MESH + 1),
                ..rule
            },
            _ => rule,
        };
        self.rules = self.rules.into_iter().map(move_rule).collect();
        self
    }
}

impl fmt::Display for Rule {
    /// The syntax of ip-rule(8), except for [`Action::Other`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            priority,
            invert,
            mark,
            mask,
            action,
        } = self;
        let family = if *family == Family::V6 { "-6 " } else { "" };
        write!(f, "{family}pref {priority}")?;
        if *invert {
            f.write_str(" not")?;
        }
        if (*mark, *mask) != (0, 0) {
            write!(f, " fwmark {mark:#x}/{mask:#x}")?;
        }
        match action {
            Action::Lookup(table) => write!(f, " lookup {table}"),
            Action::Other => f.write_str(" (other)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn priorities(first_foreign: u32) -> Vec<u32> {
        let routes = Routes {
            rules: Family::BOTH.into_iter().flat_map(rules).collect(),
            ..Routes::default()
        };
        let moved = routes.before_foreign_rules(&[(Family::V4, first_foreign)].into());
        let of = |family| moved.rules.iter().filter(move |rule| rule.family == family);
        assert_eq!(
            of(Family::V6).map(|rule| rule.priority).collect::<Vec<_>>(),
            [RULE_TUNNEL, RULE_MESH],
            "the other family"
        );
        of(Family::V4).map(|rule| rule.priority).collect()
    }

    #[test]
    fn rules_move_before_an_earlier_foreign_rule() {
        assert_eq!(priorities(998), [996, 997]);
        assert_eq!(priorities(1001), [999, 1000]);
        assert_eq!(priorities(3), [1, 2]);
        for nothing_to_do in [0, 2, 1002, 32766] {
            assert_eq!(priorities(nothing_to_do), [1000, 1001], "{nothing_to_do}");
        }
    }
}
