use super::*;
use crate::compile::{
    beside, compile,
    tests::{hub_node, nets, worker},
};

#[test]
fn the_table_of_a_hub_node() {
    insta::assert_snapshot!(render(&compile(&hub_node()).firewall));
}

#[test]
fn the_table_of_a_worker_inside_the_hubs_network() {
    insta::assert_snapshot!(render(&compile(&worker()).firewall));
}

#[test]
fn the_table_beside_a_tunnel_that_kg_owns() {
    insta::assert_snapshot!(render(&beside(&hub_node(), &BTreeSet::new()).firewall));
}

#[test]
fn nothing_to_do_is_no_transaction() {
    let table = compile(&hub_node()).firewall;
    assert_eq!(update(Some(&table), &table), None);
}

#[test]
fn a_table_that_was_never_written_or_has_other_chains_is_written_whole() {
    let table = compile(&hub_node()).firewall;
    let whole = Some(Update::Whole { script: render(&table) });
    assert_eq!(update(None, &table), whole);
    let mut other = table.clone();
    other.frame.mtu = 1370;
    assert_eq!(update(Some(&other), &table), whole);
}

#[test]
fn churn_is_a_transaction_of_elements_and_room_is_made_first() {
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

#[test]
fn what_closes_comes_before_and_goes_after_what_opens() {
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
    assert_eq!(
        scripts(&without, &with),
        [step("add", deny) + &step("add", allow)],
        "the kernel follows the order inside one transaction"
    );
    assert_eq!(scripts(&with, &without), [step("delete", allow), step("delete", deny)]);
    let mut other = with.clone();
    other.v4.deny = [pair("10.9.0.0/16", "10.2.0.0/16")].into();
    assert_eq!(scripts(&with, &other), [render(&other)]);
    let whole = render(&with);
    assert!(whole.find("set deny4") < whole.find("set allow4"));
}

#[test]
fn a_node_that_joins_beside_another_is_one_element_more() {
    let table = |pods: &[&str]| {
        let mut inputs = hub_node();
        inputs.pods_elsewhere = nets(pods);
        compile(&inputs).firewall
    };
    let (old, new) = (table(&["10.101.2.0/24"]), table(&["10.101.2.0/24", "10.101.3.0/24"]));
    let step = update(Some(&old), &new).unwrap();
    assert_eq!(
        step.scripts(),
        ["add element inet clustermesh pods_elsewhere4 { 10.101.3.0/24 }\n"]
    );
}

#[test]
fn closed_member_is_one_element_that_comes_first_and_nothing_is_allowed_to_it() {
    let mut inputs = hub_node();
    let old = compile(&inputs).firewall;
    inputs.policies[0].closed = true;
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
        "its Peers are the controller's to take away"
    );
}
