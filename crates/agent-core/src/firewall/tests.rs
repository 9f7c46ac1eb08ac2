use super::*;
use crate::compile::{
    compile, compile_policy_mode,
    tests::{hub_node, nets, policy_of, worker},
};

#[test]
fn table_of_a_hub_node() {
    insta::assert_snapshot!(render(&compile(&hub_node()).firewall));
}

#[test]
fn table_of_a_worker_inside_the_hubs_network() {
    insta::assert_snapshot!(render(&compile(&worker()).firewall));
}

#[test]
fn table_of_policy_mode() {
    insta::assert_snapshot!(render(&compile_policy_mode(&hub_node(), &BTreeSet::new()).firewall));
}

#[test]
fn equal_table_needs_no_transaction() {
    let table = compile(&hub_node()).firewall;
    assert_eq!(update(Some(&table), &table), None);
}

#[test]
fn missing_table_or_changed_parameter_writes_the_whole_table() {
    let table = compile(&hub_node()).firewall;
    let whole = Some(Update::Whole { script: render(&table) });
    assert_eq!(update(None, &table), whole);
    let mut other = table.clone();
    other.parameters.mtu = 1370;
    assert_eq!(update(Some(&other), &table), whole);
}

#[test]
fn old_prefixes_are_deleted_before_new_ones_are_added() {
    let old = compile(&hub_node()).firewall;
    let mut new = old.clone();
    new.v4.mesh = nets(&["10.242.0.0/15", "100.66.2.0/24"]);
    new.v6.throw = nets(&["fd00::1/128"]);
    assert_eq!(
        update(Some(&old), &new),
        Some(Update::Elements {
            scripts: vec![
                "delete element inet clustermesh mesh4 { 10.243.0.0/16 }\n\
                 add element inet clustermesh mesh4 { 10.242.0.0/15 }\n\
                 add element inet clustermesh throw6 { fd00::1/128 }\n"
                    .to_owned()
            ],
            removed: 1,
            added: 2,
        })
    );
}

// threat: table-update-window
#[test]
fn deny_elements_are_added_first_and_removed_last() {
    let without = compile(&hub_node()).firewall;
    let pair = |from: &str, to: &str| (from.parse().unwrap(), to.parse().unwrap());
    let mut with = without.clone();
    with.v4.allow.insert(pair("10.9.0.0/16", "10.0.0.0/8"));
    with.v4.deny.insert(pair("10.9.0.0/16", "10.1.0.0/16"));
    let [deny, allow] = [
        "deny4 { 10.9.0.0/16 . 10.1.0.0/16 }",
        "allow4 { 10.9.0.0/16 . 10.0.0.0/8 }",
    ];
    let scripts = |from, to| update(Some(from), to).unwrap().scripts().to_vec();
    let step = |verb, what| format!("{verb} element inet clustermesh {what}\n");
    // The reasons are in docs/decisions/0020-deny-elements-first.md.
    assert_eq!(
        scripts(&without, &with),
        [step("add", deny) + &step("add", allow)],
        "one transaction: the kernel adds the elements in the order of the script"
    );
    assert_eq!(
        scripts(&with, &without),
        [step("delete", allow), step("delete", deny)],
        "two transactions: within one, a packet could match the old allow element and no deny element"
    );
    let mut other = with.clone();
    other.v4.deny = [pair("10.9.0.0/16", "10.2.0.0/16")].into();
    assert_eq!(
        scripts(&with, &other),
        [render(&other)],
        "a change that adds and removes deny elements replaces the whole table"
    );
    let whole = render(&with);
    assert!(whole.find("set deny4") < whole.find("set allow4"));
}

#[test]
fn adjacent_pod_cidrs_are_separate_elements() {
    let table = |pods: &[&str]| {
        let mut inputs = hub_node();
        inputs.pod_cidrs_of_other_nodes = nets(pods);
        compile(&inputs).firewall
    };
    let (old, new) = (table(&["10.101.2.0/24"]), table(&["10.101.2.0/24", "10.101.3.0/24"]));
    let step = update(Some(&old), &new).unwrap();
    assert_eq!(
        step.scripts(),
        ["add element inet clustermesh pod_cidrs_of_other_nodes4 { 10.101.3.0/24 }\n"]
    );
}

#[test]
fn closed_member_enters_closed_set_first_and_no_allow_set() {
    let mut inputs = hub_node();
    let old = compile(&inputs).firewall;
    policy_of(&mut inputs).closed = true;
    let new = compile(&inputs).firewall;
    assert_eq!(new.v4.closed, nets(&["10.243.0.0/16", "100.66.2.0/24"]));
    assert_eq!((new.v4.allow.len(), new.v6.allow.len()), (0, 0));
    let step = update(Some(&old), &new).unwrap();
    let first = step.scripts()[0].lines().next().unwrap();
    assert_eq!(
        first,
        "add element inet clustermesh closed4 { 10.243.0.0/16, 100.66.2.0/24 }"
    );
    assert!(
        !compile(&inputs).peers.is_empty(),
        "the agent keeps the Peers of a closed member; only the controller removes them"
    );
}

#[test]
fn every_rule_has_a_comment_that_nft_accepts() {
    let tables = [
        compile(&hub_node()).firewall,
        compile_policy_mode(&hub_node(), &BTreeSet::new()).firewall,
    ];
    for table in tables {
        let text = render(&table);
        let (_, chains) = text.split_once("  chain ").unwrap();
        let rules = chains.lines().filter(|line| line.starts_with("    "));
        let rules: Vec<&str> = rules
            .map(str::trim)
            .filter(|line| !line.starts_with("type ") && !line.starts_with('#'))
            .collect();
        assert!(rules.len() > 20, "{text}");
        for rule in rules {
            let comment = rule
                .split_once(" comment \"")
                .and_then(|(_, rest)| rest.strip_suffix('"'));
            // NFTNL_UDATA_COMMENT_MAXLEN
            assert!(comment.is_some_and(|text| text.len() <= 128), "{rule}");
        }
    }
}
