//! The policy routing rules of each address family. [`super`] computes the routes in the tables that these rules look up.

use std::fmt;

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
