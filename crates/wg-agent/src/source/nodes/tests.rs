use super::*;

const NOW: i64 = 1_790_000_000;

fn node(created: i64) -> ParsedNode {
    ParsedNode {
        created,
        ..ParsedNode::default()
    }
}

fn complete() -> ParsedNode {
    ParsedNode {
        wireguard_ip: Some("100.66.0.2".parse().unwrap()),
        internal_ips: vec!["192.0.2.2".parse().unwrap()],
        pod_cidrs: ["10.5.2.0/24".parse().unwrap()].into(),
        ..node(NOW)
    }
}

fn rows(nodes: &[(&str, &str)]) -> BTreeMap<String, String> {
    nodes
        .iter()
        .map(|(name, row)| ((*name).to_owned(), (*row).to_owned()))
        .collect()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// CSINodes, whose UIDs are their names.
fn hints(names: &[&str]) -> BTreeMap<String, String> {
    names
        .iter()
        .map(|name| ((*name).to_owned(), (*name).to_owned()))
        .collect()
}

/// A plan that has read the complete Nodes `a` and `b` of a cluster with this node, `me`.
fn plan(now: Instant) -> ReadPlan {
    let mut plan = ReadPlan::default();
    plan.set_rows(rows(&[("a", "1"), ("b", "2"), ("me", "3")]), "me", now);
    let complete = complete();
    let all = ["a", "b", "me"].map(|name| (name, &complete));
    plan.set_list(all.into_iter(), "me", now, NOW);
    plan
}

fn to_read(plan: &ReadPlan) -> Vec<&str> {
    plan.to_read.keys().map(String::as_str).collect()
}

#[test]
fn complete_nodes_are_not_read_again() {
    let now = Instant::now();
    let mut plan = plan(now);
    assert_eq!(to_read(&plan), Vec::<&str>::new());
    plan.set_rows(rows(&[("a", "1"), ("b", "2"), ("me", "changed")]), "me", now);
    plan.set_hints(hints(&["a", "b", "me"]), "me", now);
    assert_eq!(to_read(&plan), Vec::<&str>::new());
}

#[test]
fn new_changed_and_missing_nodes_are_read() {
    let now = Instant::now();
    let mut plan = plan(now);
    plan.set_rows(rows(&[("a", "changed"), ("c", "4"), ("me", "3")]), "me", now);
    assert_eq!(to_read(&plan), ["a", "b", "c"]);
    plan.set_read("a", Some(&complete()), now, NOW);
    plan.set_read("b", None, now, NOW);
    plan.set_read("c", Some(&complete()), now, NOW);
    assert_eq!(to_read(&plan), Vec::<&str>::new());
    assert_eq!(plan.known, names(&["a", "c"]));
}

#[test]
fn nodes_of_new_and_deleted_csinodes_are_read() {
    let now = Instant::now();
    let mut plan = plan(now);
    plan.set_hints(hints(&["a", "b", "me"]), "me", now);
    plan.set_hints(hints(&["a", "me", "new"]), "me", now);
    assert_eq!(to_read(&plan), ["b", "new"]);
    // A Node of the same name replaced `a`.
    let mut replaced = hints(&["me", "new"]);
    replaced.insert("a".to_owned(), "other".to_owned());
    plan.set_hints(replaced, "me", now);
    assert_eq!(to_read(&plan), ["a", "b", "new"]);
}

#[test]
fn young_node_is_read_until_it_is_complete() {
    let now = Instant::now();
    let mut plan = plan(now);
    plan.set_read("new", Some(&node(NOW - 3)), now, NOW);
    assert_eq!(plan.to_read["new"], now + READ_AGAIN);
    // Its CSINode is deleted meanwhile.
    plan.set_hints(hints(&["new"]), "me", now);
    plan.set_hints(hints(&[]), "me", now);
    assert!(plan.to_read["new"] < now + Duration::from_secs(1));
    plan.set_read("new", Some(&complete()), now, NOW);
    assert_eq!(to_read(&plan), Vec::<&str>::new());
}

#[test]
fn incomplete_node_is_read_again_at_growing_intervals() {
    let now = Instant::now();
    let mut plan = plan(now);
    for pause in [5, 10, 20, 40] {
        plan.set_read("young", Some(&node(NOW)), now, NOW);
        assert_eq!(plan.to_read["young"], now + Duration::from_secs(pause));
    }
    plan.set_read("young", Some(&complete()), now, NOW);
    for pause in [5, 10, 20] {
        plan.set_read("old", Some(&node(NOW - YOUNG_SECONDS)), now, NOW);
        assert_eq!(plan.to_read["old"], now + Duration::from_secs(pause));
    }
    plan.set_read("old", Some(&node(NOW - YOUNG_SECONDS)), now, NOW);
    assert_eq!(to_read(&plan), Vec::<&str>::new(), "it stays incomplete");
}

#[test]
fn node_that_cannot_be_read_does_not_delay_others() {
    let now = Instant::now();
    let mut plan = plan(now);
    plan.set_rows(rows(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]), "me", now);
    let later = now + Duration::from_secs(1);
    let Step::Read(first) = plan.next(later).1 else {
        panic!("{plan:?}")
    };
    plan.set_failed(&first, later);
    let second = if first == "c" { "d" } else { "c" };
    assert_eq!(plan.next(later).1, Step::Read(second.to_owned()));
}

#[test]
fn list_precedes_table_and_is_hastened_by_new_own_address() {
    let now = Instant::now();
    let mut plan = plan(now);
    let after = |seconds| now + Duration::from_secs(seconds);
    // Three Nodes: the table after 5 to 10 s, a list after 3 to 6 minutes.
    let (table, list) = (plan.next_table.unwrap(), plan.next_list.unwrap());
    assert!((after(5)..=after(10)).contains(&table));
    assert!((after(180)..=after(360)).contains(&list));
    assert_eq!(plan.next(now), (table, Step::Table));
    // Both are overdue, and then the list takes precedence.
    assert_eq!(plan.next(after(400)).1, Step::List);
    plan.set_own_address(now);
    let list = plan.next_list.unwrap();
    assert!((after(5)..=after(15)).contains(&list));
}

#[test]
fn requests_become_rarer_with_the_number_of_nodes() {
    let now = Instant::now();
    let mut plan = ReadPlan::default();
    let all: BTreeMap<String, ParsedNode> = (0..1000).map(|n| (format!("n{n}"), complete())).collect();
    plan.set_list(all.iter().map(|(name, node)| (name.as_str(), node)), "n0", now, NOW);
    assert!(plan.next_table.unwrap() >= now + Duration::from_secs(250));
    assert!(plan.next_table.unwrap() <= now + Duration::from_secs(500));
    assert!(plan.next_list.unwrap() >= now + Duration::from_secs(60_000));
}
