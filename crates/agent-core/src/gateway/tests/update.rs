//! Tests the transactions from one table to the next.

use std::{num::NonZeroU32, time::Duration};

use super::*;

const A: SandboxId = SandboxId(0xa);
const B: SandboxId = SandboxId(0xb);

fn grant(id: u32, v4: &[&str]) -> Grant {
    Grant {
        id: GrantId(id),
        service: team("db"),
        balancer: Balancer {
            v4: sockets(v4),
            ..Balancer::default()
        },
        allowed_endpoints: sockets(v4),
    }
}

fn rate(rate: u32) -> NonZeroU32 {
    NonZeroU32::new(rate).unwrap()
}

/// The sandbox `A` with a grant at one port.
pub(super) fn table() -> Table {
    Table {
        parameters: RuleParameters {
            interface: "clustermesh0".parse().unwrap(),
            listen_port: 51820,
            admin_port: 9587,
            addresses: [ip("100.66.255.1"), ip("fd66::1")].into(),
            sandbox_connections: NonZeroU32::new(16_000),
            endpoint_connections: NonZeroU32::new(4000),
        },
        sandboxes: [(net("100.80.1.0/24"), A)].into(),
        rates: [(A, rate(1000))].into(),
        grants: [((A, Protocol::Tcp, 20001), grant(1, &["10.244.1.5:5432"]))].into(),
    }
}

fn table_with(change: impl FnOnce(&mut Table)) -> Table {
    let mut table = table();
    change(&mut table);
    table
}

/// Adds a grant of UDP with endpoints of both families.
fn add_second_grant(table: &mut Table) {
    let mut grant = grant(2, &["10.244.1.6:53"]);
    grant.balancer.v6 = sockets(&["[fd10:244::6]:53"]);
    grant.allowed_endpoints.extend(sockets::<Vec<_>>(&["[fd10:244::6]:53"]));
    table.grants.insert((A, Protocol::Udp, 20002), grant);
}

/// Asserts that the script from `old` to `new` has exactly these lines.
#[track_caller]
fn assert_update(old: &Table, new: &Table, lines: &[&str]) {
    let script = update(Some(old), new).unwrap_or_default();
    assert_eq!(script.lines().collect::<Vec<_>>(), lines);
}

/// The lines that `add_second_grant` adds to the script. The first grant also has one IPv4 endpoint, so the two share the chain
/// `choose4-1` (for grants with 1 endpoint), and only `choose6-1` is new.
const SECOND_GRANT: [&str; 13] = [
    "add chain inet clustermesh choose6-1",
    "add rule inet clustermesh choose6-1 meta mark set numgen random mod 1 comment \"number of the endpoint\"",
    "add rule inet clustermesh choose6-1 meta l4proto { tcp, udp } dnat ip6 to ct mark . meta mark map @backends6 comment \"translate to that endpoint\"",
    "add element inet clustermesh backends4 { 0x00000002 . 0x00000000 : 10.244.1.6 . 53 }",
    "add element inet clustermesh backends6 { 0x00000002 . 0x00000000 : fd10:244::6 . 53 }",
    "add element inet clustermesh services4 { 0x00000002 : goto choose4-1 }",
    "add element inet clustermesh services6 { 0x00000002 : goto choose6-1 }",
    "add element inet clustermesh endpoints4 { 0x00000002 . 10.244.1.6 . 53 }",
    "add element inet clustermesh endpoints6 { 0x00000002 . fd10:244::6 . 53 }",
    "add element inet clustermesh hosts4 { 0x00000002 . 10.244.1.6 }",
    "add element inet clustermesh hosts6 { 0x00000002 . fd10:244::6 }",
    "add element inet clustermesh open { 0x0000000a . udp . 20002 . 0x00000002 }",
    "add element inet clustermesh grants { 0x0000000a . udp . 20002 : 0x00000002 }",
];

/// Adds the sandbox `B`, with only a network and a rate.
fn add_second_sandbox(table: &mut Table) {
    table.sandboxes.insert(net("fd80:2::/64"), B);
    table.rates.insert(B, rate(7));
}

#[test]
fn without_an_old_table_the_whole_table_is_written() {
    let table = table();
    let script = update(None, &table).unwrap();
    let lines = script.strip_prefix(&render::base_table(&table.parameters)).unwrap();
    let want = [
        "add limit inet clustermesh sandbox-0000000a rate over 1000/second burst 2000 packets",
        "add element inet clustermesh limits { 0x0000000a : \"sandbox-0000000a\" }",
        "add chain inet clustermesh choose4-1",
        "add rule inet clustermesh choose4-1 meta mark set numgen random mod 1 comment \"number of the endpoint\"",
        "add rule inet clustermesh choose4-1 meta l4proto { tcp, udp } dnat ip to ct mark . meta mark map @backends4 comment \"translate to that endpoint\"",
        "add element inet clustermesh backends4 { 0x00000001 . 0x00000000 : 10.244.1.5 . 5432 }",
        "add element inet clustermesh services4 { 0x00000001 : goto choose4-1 }",
        "add element inet clustermesh endpoints4 { 0x00000001 . 10.244.1.5 . 5432 }",
        "add element inet clustermesh hosts4 { 0x00000001 . 10.244.1.5 }",
        "add element inet clustermesh sandboxes4 { 100.80.1.0/24 : 0x0000000a }",
        "add element inet clustermesh open { 0x0000000a . tcp . 20001 . 0x00000001 }",
        "add element inet clustermesh grants { 0x0000000a . tcp . 20001 : 0x00000001 }",
    ];
    assert_eq!(lines.lines().collect::<Vec<_>>(), want);
}

#[test]
fn table_with_changed_parameters_is_written_whole() {
    let new = table_with(|table| table.parameters.admin_port = 9588);
    assert_eq!(update(Some(&table()), &new), update(None, &new));
}

#[test]
fn equal_table_needs_no_transaction() {
    assert_eq!(update(Some(&table()), &table()), None);
}

#[test]
fn added_endpoint_gives_its_grant_another_chain() {
    let new = table_with(|table| {
        let with_two_endpoints = grant(1, &["10.244.1.5:5432", "10.244.1.6:5432"]);
        table.grants.insert((A, Protocol::Tcp, 20001), with_two_endpoints);
    });
    let lines = [
        "delete element inet clustermesh services4 { 0x00000001 }",
        "flush chain inet clustermesh choose4-1",
        "delete chain inet clustermesh choose4-1",
        "add chain inet clustermesh choose4-2",
        "add rule inet clustermesh choose4-2 meta mark set numgen random mod 2 comment \"number of the endpoint\"",
        "add rule inet clustermesh choose4-2 meta l4proto { tcp, udp } dnat ip to ct mark . meta mark map @backends4 comment \"translate to that endpoint\"",
        "add element inet clustermesh backends4 { 0x00000001 . 0x00000001 : 10.244.1.6 . 5432 }",
        "add element inet clustermesh services4 { 0x00000001 : goto choose4-2 }",
        "add element inet clustermesh endpoints4 { 0x00000001 . 10.244.1.6 . 5432 }",
        "add element inet clustermesh hosts4 { 0x00000001 . 10.244.1.6 }",
    ];
    assert_update(&table(), &new, &lines);
}

#[test]
fn removing_the_last_endpoint_removes_its_chain() {
    let new = table_with(|table| {
        table.grants.insert((A, Protocol::Tcp, 20001), grant(1, &[]));
    });
    let lines = [
        "delete element inet clustermesh hosts4 { 0x00000001 . 10.244.1.5 }",
        "delete element inet clustermesh endpoints4 { 0x00000001 . 10.244.1.5 . 5432 }",
        "delete element inet clustermesh services4 { 0x00000001 }",
        "delete element inet clustermesh backends4 { 0x00000001 . 0x00000000 }",
        "flush chain inet clustermesh choose4-1",
        "delete chain inet clustermesh choose4-1",
    ];
    assert_update(&table(), &new, &lines);
}

#[test]
fn draining_endpoint_stays_allowed_and_is_not_chosen() {
    let old = table_with(|table| {
        let with_two_endpoints = grant(1, &["10.244.1.5:5432", "10.244.1.6:5432"]);
        table.grants.insert((A, Protocol::Tcp, 20001), with_two_endpoints);
    });
    let mut new = old.clone();
    let grant = new.grants.get_mut(&(A, Protocol::Tcp, 20001)).unwrap();
    grant.balancer.v4 = sockets(&["10.244.1.6:5432"]);
    let lines = [
        "delete element inet clustermesh services4 { 0x00000001 }",
        "delete element inet clustermesh backends4 { 0x00000001 . 0x00000001, 0x00000001 . 0x00000000 }",
        "flush chain inet clustermesh choose4-2",
        "delete chain inet clustermesh choose4-2",
        "add chain inet clustermesh choose4-1",
        "add rule inet clustermesh choose4-1 meta mark set numgen random mod 1 comment \"number of the endpoint\"",
        "add rule inet clustermesh choose4-1 meta l4proto { tcp, udp } dnat ip to ct mark . meta mark map @backends4 comment \"translate to that endpoint\"",
        "add element inet clustermesh backends4 { 0x00000001 . 0x00000000 : 10.244.1.6 . 5432 }",
        "add element inet clustermesh services4 { 0x00000001 : goto choose4-1 }",
    ];
    assert_update(&old, &new, &lines);
}

#[test]
fn added_grant_gets_its_chain_before_its_elements() {
    assert_update(&table(), &table_with(add_second_grant), &SECOND_GRANT);
}

#[test]
fn removed_grant_loses_its_elements_before_its_chain() {
    let lines = [
        "delete element inet clustermesh grants { 0x0000000a . udp . 20002 }",
        "delete element inet clustermesh open { 0x0000000a . udp . 20002 . 0x00000002 }",
        "delete element inet clustermesh hosts6 { 0x00000002 . fd10:244::6 }",
        "delete element inet clustermesh hosts4 { 0x00000002 . 10.244.1.6 }",
        "delete element inet clustermesh endpoints6 { 0x00000002 . fd10:244::6 . 53 }",
        "delete element inet clustermesh endpoints4 { 0x00000002 . 10.244.1.6 . 53 }",
        "delete element inet clustermesh services6 { 0x00000002 }",
        "delete element inet clustermesh services4 { 0x00000002 }",
        "delete element inet clustermesh backends6 { 0x00000002 . 0x00000000 }",
        "delete element inet clustermesh backends4 { 0x00000002 . 0x00000000 }",
        "flush chain inet clustermesh choose6-1",
        "delete chain inet clustermesh choose6-1",
    ];
    assert_update(&table_with(add_second_grant), &table(), &lines);
}

#[test]
fn replaced_grant_of_a_port_is_one_transaction() {
    let new = table_with(|table| {
        table.grants = [((A, Protocol::Tcp, 20001), grant(3, &["10.244.1.5:5432"]))].into();
    });
    let lines = [
        "delete element inet clustermesh grants { 0x0000000a . tcp . 20001 }",
        "delete element inet clustermesh open { 0x0000000a . tcp . 20001 . 0x00000001 }",
        "delete element inet clustermesh hosts4 { 0x00000001 . 10.244.1.5 }",
        "delete element inet clustermesh endpoints4 { 0x00000001 . 10.244.1.5 . 5432 }",
        "delete element inet clustermesh services4 { 0x00000001 }",
        "delete element inet clustermesh backends4 { 0x00000001 . 0x00000000 }",
        "add element inet clustermesh backends4 { 0x00000003 . 0x00000000 : 10.244.1.5 . 5432 }",
        "add element inet clustermesh services4 { 0x00000003 : goto choose4-1 }",
        "add element inet clustermesh endpoints4 { 0x00000003 . 10.244.1.5 . 5432 }",
        "add element inet clustermesh hosts4 { 0x00000003 . 10.244.1.5 }",
        "add element inet clustermesh open { 0x0000000a . tcp . 20001 . 0x00000003 }",
        "add element inet clustermesh grants { 0x0000000a . tcp . 20001 : 0x00000003 }",
    ];
    assert_update(&table(), &new, &lines);
}

#[test]
fn changed_rate_replaces_the_limit_and_its_element() {
    let new = table_with(|table| {
        table.rates.insert(A, rate(5));
    });
    let lines = [
        "delete element inet clustermesh limits { 0x0000000a }",
        "delete limit inet clustermesh sandbox-0000000a",
        "add limit inet clustermesh sandbox-0000000a rate over 5/second burst 10 packets",
        "add element inet clustermesh limits { 0x0000000a : \"sandbox-0000000a\" }",
    ];
    assert_update(&table(), &new, &lines);
}

#[test]
fn added_and_removed_sandbox_touches_no_other() {
    let added = [
        "add limit inet clustermesh sandbox-0000000b rate over 7/second burst 14 packets",
        "add element inet clustermesh limits { 0x0000000b : \"sandbox-0000000b\" }",
        "add element inet clustermesh sandboxes6 { fd80:2::/64 : 0x0000000b }",
    ];
    assert_update(&table(), &table_with(add_second_sandbox), &added);
    let removed = [
        "delete element inet clustermesh sandboxes6 { fd80:2::/64 }",
        "delete element inet clustermesh limits { 0x0000000b }",
        "delete limit inet clustermesh sandbox-0000000b",
    ];
    assert_update(&table_with(add_second_sandbox), &table(), &removed);
}

#[test]
fn network_is_removed_before_an_overlapping_one_is_added() {
    let new = table_with(|table| table.sandboxes = [(net("100.80.0.0/16"), B)].into());
    let lines = [
        "delete element inet clustermesh sandboxes4 { 100.80.1.0/24 }",
        "add element inet clustermesh sandboxes4 { 100.80.0.0/16 : 0x0000000b }",
    ];
    assert_update(&table(), &new, &lines);
}

#[test]
fn network_that_moves_to_another_sandbox_is_replaced() {
    let new = table_with(|table| table.sandboxes = [(net("100.80.1.0/24"), B)].into());
    let lines = [
        "delete element inet clustermesh sandboxes4 { 100.80.1.0/24 }",
        "add element inet clustermesh sandboxes4 { 100.80.1.0/24 : 0x0000000b }",
    ];
    assert_update(&table(), &new, &lines);
}

/// `table()`, the sandbox `B`, and `count` grants of `B` with one endpoint each.
fn many(count: u16) -> Table {
    table_with(|table| {
        add_second_sandbox(table);
        for number in 1..=count {
            let endpoint = format!("10.244.{}.{}:5432", number >> 8, number & 255);
            let grant = grant(0x1000 + u32::from(number), &[&endpoint]);
            table.grants.insert((B, Protocol::Tcp, 20000 + number), grant);
        }
    })
}

/// The intermediate tables from `old` to `new`, including `new`.
fn steps(old: Option<&Table>, new: &Table) -> Vec<Table> {
    let mut out: Vec<Table> = Vec::new();
    while out.last().or(old) != Some(new) {
        let next = Table::step(out.last().or(old), new);
        assert_ne!(out.last().or(old), Some(&next), "a step that changes nothing");
        out.push(next);
    }
    out
}

#[test]
fn small_change_is_one_step() {
    assert_eq!(
        steps(Some(&table()), &table_with(add_second_grant)),
        [table_with(add_second_grant)]
    );
    assert_eq!(steps(None, &table()), [table()]);
}

/// Counts the parts that a script adds and removes: elements, chains, rules and limits. A rule with `{ tcp, udp }` counts twice.
fn count_parts(script: &str) -> usize {
    script.lines().map(|line| line.split(", ").count()).sum()
}

/// The limit of a step, plus the parts that do not belong to a grant: a network, a rate, a chain with its rules.
const MAX_SCRIPT_PARTS: usize = table::MAX_STEP_WEIGHT + 10;

#[test]
fn many_grants_are_added_in_bounded_steps() {
    for old in [None, Some(table())] {
        let steps = steps(old.as_ref(), &many(5000));
        assert_eq!(steps.len(), 4);
        for pair in steps.windows(2) {
            let size = count_parts(&update(Some(&pair[0]), &pair[1]).unwrap());
            assert!(size <= MAX_SCRIPT_PARTS, "{size}");
        }
        let first = update(old.as_ref(), &steps[0]).unwrap();
        let size = count_parts(first.trim_start_matches(&render::base_table(&table().parameters)));
        assert!(size <= MAX_SCRIPT_PARTS, "{size}");
    }
}

#[test]
fn many_grants_are_removed_in_bounded_steps() {
    let steps = steps(Some(&many(5000)), &table());
    assert_eq!(steps.len(), 4);
    let mut old = &many(5000);
    for new in &steps {
        let size = count_parts(&update(Some(old), new).unwrap());
        assert!(size <= MAX_SCRIPT_PARTS, "{size}");
        old = new;
    }
    // The network of `B` is removed in the first step.
    assert_eq!(steps[0].sandboxes, table().sandboxes);
}

#[test]
fn grant_is_removed_before_many_are_added() {
    let first = Table::step(Some(&table_with(add_second_grant)), &many(5000));
    assert!(!first.grants.contains_key(&(A, Protocol::Udp, 20002)));
    assert_ne!(first, many(5000));
}

#[test]
fn grant_heavier_than_a_step_has_a_step_of_its_own() {
    let texts: Vec<String> = (0..4000u16)
        .map(|n| format!("10.244.{}.{}:80", n >> 8, n & 255))
        .collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let new = table_with(|table| {
        table.grants.insert((A, Protocol::Tcp, 20002), grant(2, &texts));
        table
            .grants
            .insert((A, Protocol::Tcp, 20003), grant(3, &["10.244.1.6:53"]));
    });
    let grants: Vec<usize> = steps(Some(&table()), &new)
        .iter()
        .map(|step| step.grants.len())
        .collect();
    assert_eq!(grants, [2, 3]);
}

#[test]
fn network_moves_after_obsolete_grants_are_removed() {
    let new = table_with(|table| table.sandboxes = [(net("100.80.1.0/24"), B)].into());
    let steps = steps(Some(&many(5000)), &new);
    let (last, others) = steps.split_last().unwrap();
    assert_eq!(last.sandboxes, new.sandboxes);
    for step in others {
        assert_eq!(step.sandboxes, BTreeMap::new());
    }
}

#[test]
fn renamed_service_of_a_grant_needs_no_transaction() {
    let new = table_with(|table| {
        table.grants.get_mut(&(A, Protocol::Tcp, 20001)).unwrap().service = team("renamed");
    });
    assert_eq!(update(Some(&table()), &new), None);
}

#[test]
fn allowed_endpoints_pairs_each_grant_with_its_endpoints() {
    let socket = |text: &str| text.parse::<SocketAddr>().unwrap();
    let want = [
        (GrantId(1), socket("10.244.1.5:5432")),
        (GrantId(2), socket("10.244.1.6:53")),
        (GrantId(2), socket("[fd10:244::6]:53")),
    ];
    assert_eq!(table_with(add_second_grant).allowed_endpoints(), want.into());
}

#[test]
fn renewal_sets_a_timeout_in_whole_seconds() {
    let parameters = table().parameters;
    let lines = |seconds: u32| {
        ["add", "delete", "add"]
            .map(|verb| format!("{verb} element inet clustermesh alive {{ \"clustermesh0\" timeout {seconds}s }}\n"))
            .concat()
    };
    assert_eq!(render_renewal(&parameters, Duration::from_millis(20_900)), lines(20));
    // 0 would mean no timeout.
    assert_eq!(render_renewal(&parameters, Duration::from_millis(900)), lines(1));
}

#[test]
fn sticky_grant_chooses_by_address_with_a_fixed_seed() {
    let new = table_with(|table| {
        let grant = table.grants.get_mut(&(A, Protocol::Tcp, 20001)).unwrap();
        grant.balancer.v6 = sockets(&["[fd10:244::6]:5432", "[fd10:244::7]:5432"]);
        grant.balancer.sticky = true;
    });
    let script = update(Some(&table()), &new).unwrap();
    let rules = [
        "choose4-1-by-address meta mark set jhash ip saddr mod 1 seed 0x1 comment \"number of the endpoint\"",
        "choose6-2-by-address meta mark set jhash ip6 saddr mod 2 seed 0x1 comment \"number of the endpoint\"",
    ];
    for rule in rules {
        assert!(
            script.contains(&format!("add rule inet clustermesh {rule}\n")),
            "{script}"
        );
    }
}

#[test]
fn elements_of_a_set_share_statements() {
    let new = table_with(|table| {
        for port in 0..250 {
            let grant = grant(100 + u32::from(port), &["10.244.1.6:53"]);
            table.grants.insert((A, Protocol::Tcp, 20100 + port), grant);
        }
    });
    let added = update(Some(&table()), &new).unwrap();
    // Three statements, of at most 100 elements each, for each of six sets.
    assert_eq!(added.lines().count(), 6 * 3);
    assert_eq!(update(Some(&new), &table()).unwrap().lines().count(), 6 * 3);
}
