use super::*;
use crate::compile::{
    Inputs, beside, compile,
    tests::{hub_node, hub_node_of_a_sandbox, nets, worker},
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
fn what_a_policy_denies_is_no_grant() {
    let mut inputs = hub_node_of_a_sandbox();
    let table = |inputs: &Inputs| compile(inputs).firewall;
    let (at, port) = *inputs.policies[1].granted.first().unwrap();
    let among = |table: &Firewall| table.v4.grants.iter().any(|(_, to, on)| (*to, *on) == (at, port));
    assert!(among(&table(&inputs)));
    inputs.policies[1].deny.push(Rule {
        to: [at.into()].into(),
        ports: [port].into(),
    });
    assert!(!among(&table(&inputs)));
}

#[test]
fn the_table_of_a_node_that_a_sandbox_reaches() {
    insta::assert_snapshot!(render(&compile(&hub_node_of_a_sandbox()).firewall));
}

#[test]
fn a_grant_that_comes_or_goes_is_a_transaction_of_elements() {
    let old = compile(&hub_node_of_a_sandbox()).firewall;
    let mut inputs = hub_node_of_a_sandbox();
    let granted = &mut inputs.policies[1].granted;
    granted.remove(&(
        "172.29.0.111".parse().unwrap(),
        Port {
            protocol: crate::policy::Protocol::Udp,
            port: 53,
        },
    ));
    assert_eq!(
        update(Some(&old), &compile(&inputs).firewall),
        Some(Update::Elements {
            scripts: vec![
                "delete element inet clustermesh grants4 { 100.80.16.1 . 172.29.0.111 . udp . 53 }\n\
                 delete element inet clustermesh reach4 { 100.80.16.1 . 172.29.0.111 }\n"
                    .to_owned()
            ],
            removed: 2,
            added: 0,
        })
    );
}

#[test]
fn what_fades_is_written_again_as_a_whole_and_nothing_else() {
    assert_eq!(refresh(&compile(&hub_node()).firewall), None);
    let mut firewall = compile(&hub_node_of_a_sandbox()).firewall;
    firewall.v6 = Sets::default();
    firewall.v4.draining.clear();
    firewall.v4.reach.clear();
    let elements = "element inet clustermesh grants4 { 100.80.16.1 . 10.101.0.5 . tcp . 5432, \
                    100.80.16.1 . 172.29.0.111 . udp . 53 }\n";
    assert_eq!(refresh(&firewall), Some(format!("delete {elements}add {elements}")));
}

#[test]
fn beside_another_programs_tunnel_a_sandbox_is_a_member_to_whom_nothing_is_allowed() {
    let firewall = beside(&hub_node_of_a_sandbox(), &BTreeSet::new()).firewall;
    assert_eq!(firewall.frame.sandboxes, None);
    let hub = beside(&hub_node(), &BTreeSet::new()).firewall;
    assert_eq!((firewall.v4.allow, firewall.v4.grants), (hub.v4.allow, BTreeSet::new()));
    assert!(firewall.v4.mesh.contains(&"100.80.16.0/20".parse().unwrap()));
}

#[test]
fn a_single_address_reads_back_without_its_length_and_a_network_of_the_same_length_with_it() {
    let mut firewall = compile(&hub_node()).firewall;
    firewall.v4.mesh = nets(&["10.0.0.0/8", "100.66.2.1/32"]);
    firewall.v6.mesh = nets(&["2001:db8::/32", "fd00::1/128"]);
    firewall.v6.allow = [("fd00::1/128".parse().unwrap(), "2001:db8::/32".parse().unwrap())].into();
    let sets = expected(&firewall).sets;
    let read = |name: &str| sets[name].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(read("mesh4"), ["10.0.0.0/8", "100.66.2.1"]);
    assert_eq!(read("mesh6"), ["2001:db8::/32", "fd00::1"]);
    assert_eq!(read("allow6"), ["fd00::1 . 2001:db8::/32"]);
}
