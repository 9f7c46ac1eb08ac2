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
            script: "delete element inet clustermesh mesh4 { 10.243.0.0/16 }\n\
                     add element inet clustermesh mesh4 { 10.242.0.0/15 }\n\
                     add element inet clustermesh throw6 { fd00::1/128 }\n"
                .to_owned(),
            removed: 1,
            added: 2,
        })
    );
}
