//! Tests the base table: the rules that depend only on [`RuleParameters`], not on sandboxes and grants.

use std::num::NonZeroU32;

use super::{update::table, *};

// threat: gateway-forged-underlay
#[test]
fn rules_of_a_gateway_with_both_families() {
    insta::assert_snapshot!(render::base_table(&table().parameters));
}

/// Asserts that the rules, rendered after `change` to the parameters, contain each of `lines` and none of the texts in `without`.
#[track_caller]
fn assert_rules(change: impl FnOnce(&mut RuleParameters), lines: &[&str], without: &[&str]) {
    let mut parameters = table().parameters;
    change(&mut parameters);
    let text = render::base_table(&parameters);
    for line in lines {
        assert!(text.lines().any(|other| other.trim() == *line), "{line} in {text}");
    }
    for part in without {
        assert!(!text.contains(part), "{part} in {text}");
    }
}

#[test]
fn packets_of_family_without_an_address_are_dropped() {
    let drop_rule =
        |family: u8| format!("meta nfproto ipv{family} counter drop comment \"a family without an address here\"");
    assert_rules(
        |parameters| parameters.addresses = [ip("fd66::1")].into(),
        &[&drop_rule(4)],
        &[&drop_rule(6), "ip daddr !="],
    );
    assert_rules(
        |parameters| parameters.addresses = [ip("100.66.255.1")].into(),
        &[&drop_rule(6)],
        &[&drop_rule(4), "ip6 daddr !="],
    );
}

/// If only one limit is set, only its rules exist. The limits of `table()` are large, so each is spread over several connection
/// lists of the kernel, with a share of 64 connections each. Lists fill unevenly, so each has a limit 50 % above its share: 96.
#[test]
fn without_a_limit_connections_are_not_counted() {
    assert_rules(
        |parameters| parameters.endpoint_connections = None,
        &[
            "add @totals { meta mark . meta priority ct count over 96 } counter drop comment \"too many connections of a sandbox\"",
        ],
        &["connections4", "connections6"],
    );
    assert_rules(
        |parameters| parameters.sandbox_connections = None,
        &[
            "add @connections4 { ct mark . ip daddr . th dport . meta mark ct count over 96 } counter drop comment \"too many connections to one endpoint\"",
        ],
        &["totals"],
    );
    assert_rules(
        |parameters| (parameters.sandbox_connections, parameters.endpoint_connections) = (None, None),
        &[],
        &["jump count", "chain count", "ct count"],
    );
}

#[test]
fn small_limit_of_connections_is_exact() {
    assert_rules(
        |parameters| parameters.endpoint_connections = NonZeroU32::new(100),
        &[
            "add @connections6 { ct mark . ip6 daddr . th dport . meta mark ct count over 100 } counter drop comment \"too many connections to one endpoint\"",
        ],
        &[],
    );
}

#[test]
fn source_ports_are_the_largest_free_range_above_1023() {
    for (own, ports) in [
        ([51820, 9587], "9588-51819"),
        ([9587, 51820], "9588-51819"),
        ([53, 1023], "1024-65535"),
        ([1023, 1024], "1025-65535"),
        ([65535, 2000], "2001-65534"),
        ([40000, 50000], "1024-39999"),
        ([40000, 40000], "1024-39999"),
    ] {
        let line = format!(
            "oifname != \"clustermesh0\" ct mark != 0 ct status dnat meta l4proto {{ tcp, udp }} masquerade to :{ports} comment \"endpoints see this pod as the source\""
        );
        assert_rules(
            |parameters| [parameters.listen_port, parameters.admin_port] = own,
            &[&line],
            &[],
        );
    }
}

#[test]
fn every_rule_has_a_comment_that_nft_accepts() {
    let text = render::base_table(&table().parameters);
    let (_, chains) = text.split_once("  chain ").unwrap();
    let rules = chains.lines().filter(|line| line.starts_with("    "));
    let rules: Vec<&str> = rules.map(str::trim).filter(|line| !line.starts_with("type ")).collect();
    assert!(rules.len() > 40, "{text}");
    for rule in rules {
        let comment = rule
            .split_once(" comment \"")
            .and_then(|(_, rest)| rest.strip_suffix('"'));
        // NFTNL_UDATA_COMMENT_MAXLEN
        assert!(comment.is_some_and(|text| text.len() <= 128), "{rule}");
    }
}
