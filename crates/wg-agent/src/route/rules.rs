//! Encodes and decodes policy routing rules as rtnetlink(7) messages.

use clustermesh_agent_core::{
    numbers::{PROTOCOL, RULE_MESH, RULE_TUNNEL},
    prefixes::Family,
    routes::{Action, Rule},
};
use netlink_packet_route::{
    route::RouteProtocol,
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};

use super::address_family;

/// The table of this node's addresses (`RT_TABLE_LOCAL` in linux/rtnetlink.h).
const LOCAL_TABLE: u32 = 255;

/// The message that adds or deletes a rule. For [`Action::Other`] it contains only the family, the priority and the
/// agent's protocol number. Each such message deletes one rule of the agent at that priority, so the caller sends it until
/// none is left.
pub(super) fn rule_message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = address_family(rule.family);
    let attributes = &mut message.attributes;
    attributes.push(RuleAttribute::Priority(rule.priority));
    attributes.push(RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL)));
    let Action::Lookup(table) = rule.action else {
        return message;
    };
    if rule.mask != 0 {
        attributes.extend([RuleAttribute::FwMark(rule.mark), RuleAttribute::FwMask(rule.mask)]);
    }
    attributes.push(RuleAttribute::Table(table));
    message.header.action = RuleAction::ToTable;
    if rule.invert {
        message.header.flags = RuleFlags::Invert;
    }
    message
}

/// Decodes a rule of the agent. `None` = the rule does not have the agent's protocol number, or is ignored as described below.
///
/// A rule with another action than a table lookup, or with an attribute that [`rule_message`] never writes, becomes
/// [`Action::Other`]. Attributes that netlink-packet-route does not know are ignored. To delete an `Action::Other`, all rules
/// of the agent at its priority are deleted. At the priorities [`RULE_TUNNEL`] and [`RULE_MESH`] this would delete rules that
/// the agent needs, so at these priorities such a rule is ignored.
pub(super) fn parse_rule(message: &RuleMessage, family: Family) -> Option<Rule> {
    let mut rule = Rule {
        family,
        priority: 0,
        invert: message.header.flags.contains(RuleFlags::Invert),
        mark: 0,
        mask: 0,
        action: Action::Other,
    };
    let is_lookup = message.header.action == RuleAction::ToTable;
    let (mut is_ours, mut has_known_form, mut table) = (false, is_lookup, u32::from(message.header.table));
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(p) => rule.priority = *p,
            RuleAttribute::FwMark(m) => rule.mark = *m,
            RuleAttribute::FwMask(m) => rule.mask = *m,
            RuleAttribute::Table(t) => table = *t,
            RuleAttribute::Protocol(p) => is_ours = *p == RouteProtocol::from(PROTOCOL),
            // `u32::MAX` = not set.
            RuleAttribute::SuppressPrefixLen(u32::MAX) | RuleAttribute::SuppressIfGroup(u32::MAX) => {}
            RuleAttribute::Other(_) => {}
            _ => has_known_form = false,
        }
    }
    if has_known_form {
        rule.action = Action::Lookup(table);
        return is_ours.then_some(rule);
    }
    let has_our_priority = [RULE_TUNNEL, RULE_MESH].contains(&rule.priority);
    let other = Rule {
        invert: false,
        mark: 0,
        mask: 0,
        ..rule
    };
    (is_ours && !has_our_priority).then_some(other)
}

/// The priority of another program's rule that applies to packets for the mesh, as far as the rule's attributes show. `None` = the rule
/// is the agent's, selects some packets only, looks up the table of local addresses, or has an action that decides nothing (goto, nop).
pub(super) fn foreign_priority(message: &RuleMessage) -> Option<u32> {
    let header = &message.header;
    let mut is_selective = header.src_len != 0 || header.dst_len != 0 || header.tos != 0;
    let (mut priority, mut table) = (0, u32::from(header.table));
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Protocol(p) if *p == RouteProtocol::from(PROTOCOL) => return None,
            RuleAttribute::Priority(p) => priority = *p,
            RuleAttribute::Table(t) => table = *t,
            RuleAttribute::Protocol(_)
            | RuleAttribute::SuppressPrefixLen(_)
            | RuleAttribute::SuppressIfGroup(_)
            | RuleAttribute::FwMask(_)
            | RuleAttribute::Other(_) => {}
            _ => is_selective = true,
        }
    }
    let decides = matches!(
        header.action,
        RuleAction::ToTable | RuleAction::Blackhole | RuleAction::Unreachable | RuleAction::Prohibit
    );
    let is_local = header.action == RuleAction::ToTable && table == LOCAL_TABLE;
    // An inverted rule applies to all packets but the selected ones.
    let applies = !is_selective || header.flags.contains(RuleFlags::Invert);
    (decides && !is_local && applies).then_some(priority)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(attributes: &[RuleAttribute]) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.action = RuleAction::ToTable;
        message.attributes = attributes.to_vec();
        message.attributes.push(RuleAttribute::Priority(7));
        message
    }

    #[test]
    fn foreign_rule_counts_only_if_it_applies_to_most_packets() {
        let table = RuleAttribute::Table(51820);
        let fwmark = [RuleAttribute::FwMark(51820), RuleAttribute::FwMask(u32::MAX)];
        let mut not_fwmark = rule(&[&fwmark[..], std::slice::from_ref(&table)].concat());
        assert_eq!(foreign_priority(&not_fwmark), None, "fwmark 51820 lookup 51820");
        not_fwmark.header.flags = RuleFlags::Invert;
        assert_eq!(foreign_priority(&not_fwmark), Some(7), "not fwmark 51820 lookup 51820");
        let suppress = RuleAttribute::SuppressPrefixLen(0);
        assert_eq!(foreign_priority(&rule(&[RuleAttribute::Table(254), suppress])), Some(7));
        assert_eq!(foreign_priority(&rule(&[RuleAttribute::Table(255)])), None, "local");
        assert_eq!(
            foreign_priority(&rule(&[table.clone(), RuleAttribute::L3MDev(true)])),
            None
        );
        assert_eq!(
            foreign_priority(&rule(&[table.clone(), RuleAttribute::Iifname("eth1".into())])),
            None
        );
        let ours = RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL));
        assert_eq!(foreign_priority(&rule(&[table.clone(), ours])), None);
        let mut of_a_pod = rule(&[table]);
        of_a_pod.header.src_len = 32;
        assert_eq!(foreign_priority(&of_a_pod), None);
    }
}
