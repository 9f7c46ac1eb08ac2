//! Rules of policy routing as values, and which of them a family needs; the routes they lead to are in [`super`].

use std::fmt;

use crate::{
    numbers::{MARK_MASK, MARK_TUNNEL, MARK_UNDERLAY, RULE_MESH, RULE_TUNNEL, TABLE, TABLE_TUNNEL},
    prefixes::Family,
};

/// One rule: what a packet must have, and what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// Address family.
    pub family: Family,
    /// Priority: less is asked first.
    pub priority: u32,
    /// Whether it is for whatever does *not* match.
    pub invert: bool,
    /// Mark.
    pub mark: u32,
    /// Bits of the mark that count; 0 = any mark.
    pub mask: u32,
    /// What follows.
    pub action: Action,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Looks into this routing table.
    Lookup(u32),
    /// Of ours by its numbers, but nothing that we write; several of one priority are one. Only ever observed.
    Other,
}

/// The two rules of a family: answers that must use the tunnel, then everything that is not the tunnel's outer packets.
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
    /// As ip-rule(8) takes it.
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
