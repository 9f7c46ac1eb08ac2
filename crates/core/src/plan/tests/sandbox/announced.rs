//! A sandbox is told of what was granted when the nodes that have it have had time to let it in.

use std::time::Duration;

use super::*;
use crate::announce::{News, due};

const EARLY: Duration = Duration::ZERO;
const LATE: Duration = Duration::from_secs(1);

/// What is written into `nb` now, and what else it would be.
fn told(mesh: &Mesh, seen: &mut Observations, waited: impl Fn(&News) -> Duration) -> (Vec<String>, Vec<String>) {
    let (plan, _) = run(mesh, seen);
    let Some(Observation::Fresh(member)) = seen.members.get_mut(&secret("nb")) else {
        panic!("nb is seen");
    };
    let steps = diff(&plan, &secret("nb"), member);
    let (due, news) = due(steps, member, waited);
    apply(member, &due);
    let written = due.iter().map(|step| step.item.name()).collect();
    let news = news.iter().map(|news| match news {
        News::Nodes(owner) => owner.source_cluster.clone().unwrap_or_default(),
        News::Endpoint(service, address) => format!("{service} {address}"),
    });
    (written, news.collect())
}

/// Addresses that the mirrored Service names, and whether they take connections.
fn named(seen: &Observations) -> Vec<(String, bool)> {
    let member = seen.members[&secret("nb")].last().expect("nb is seen");
    let endpoints = member.slices.values().flat_map(|slice| &slice.endpoints);
    endpoints
        .map(|endpoint| (endpoint.address.to_string(), endpoint.ready))
        .collect()
}

fn backends(seen: &mut Observations, endpoints: Vec<SliceEndpoint>) {
    edit(seen, &ClusterIdentity::Local, |m| {
        m.slices
            .insert(object("team-x", "postgres-1"), slice("postgres", endpoints));
    });
}

/// `three`, of which everything stands, with these backends.
fn standing(endpoints: Vec<SliceEndpoint>) -> (Mesh, Observations) {
    let (mesh, mut seen) = three();
    backends(&mut seen, endpoints);
    settle(&mesh, &mut seen);
    (mesh, seen)
}

fn is(address: &str, ready: bool) -> (String, bool) {
    (address.to_owned(), ready)
}

fn unready(endpoint: SliceEndpoint) -> SliceEndpoint {
    SliceEndpoint {
        ready: false,
        ..endpoint
    }
}

#[test]
fn of_a_new_grant_first_the_name_stands_then_the_peers_then_the_endpoints() {
    let (mesh, mut seen) = three();
    let news = ["mgmt", "default/postgres 10.1.2.9"];
    assert_eq!(
        told(&mesh, &mut seen, |_| EARLY),
        (
            vec!["m--mgmt".into(), "default/postgres".into()],
            news.map(String::from).into()
        )
    );
    let (written, _) = told(&mesh, &mut seen, |_| Duration::from_millis(500));
    assert_eq!(written, ["m--mgmt--b"]);
    let (written, news) = told(&mesh, &mut seen, |_| Duration::from_millis(999));
    assert_eq!((written, news), (vec![], vec!["default/postgres 10.1.2.9".into()]));
    let (written, _) = told(&mesh, &mut seen, |_| LATE);
    assert_eq!(written.len(), 1, "{written:?}");
    assert_eq!(named(&seen), [is("10.1.2.9", true)]);
    assert_eq!(told(&mesh, &mut seen, |_| EARLY), (vec![], vec![]));
}

#[test]
fn a_new_endpoint_waits_beside_those_that_are_named_and_what_goes_does_not() {
    let (mesh, mut seen) = standing(vec![backend("10.1.2.9", "b"), backend("10.1.2.8", "b")]);
    backends(&mut seen, vec![backend("10.1.2.9", "b"), backend("10.1.1.7", "a")]);
    let (written, news) = told(&mesh, &mut seen, |_| EARLY);
    assert_eq!(news, ["default/postgres 10.1.1.7"]);
    // Its node is let in at once: nobody sends there yet.
    assert!(written.contains(&"m--mgmt--a".into()), "{written:?}");
    assert_eq!(named(&seen), [is("10.1.2.9", true)]);
    let (written, _) = told(&mesh, &mut seen, |_| EARLY);
    assert_eq!(written, Vec::<String>::new(), "nothing is written twice");
    let _ = told(&mesh, &mut seen, |_| LATE);
    assert_eq!(named(&seen), [is("10.1.1.7", true), is("10.1.2.9", true)]);
}

#[test]
fn the_last_endpoint_is_never_taken_away_without_the_one_that_comes() {
    let (mesh, mut seen) = standing(vec![backend("10.1.2.9", "b")]);
    backends(
        &mut seen,
        vec![unready(backend("10.1.2.9", "b")), backend("10.1.1.7", "a")],
    );
    let _ = told(&mesh, &mut seen, |_| EARLY);
    assert_eq!(named(&seen), [is("10.1.1.7", true), is("10.1.2.9", false)]);

    // In another slice it is another step.
    let (mesh, mut seen) = standing(vec![backend("10.1.2.9", "b")]);
    backends(&mut seen, vec![]);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let mut other = slice("postgres", vec![backend("10.1.1.7", "a")]);
        other.ports = vec![port("pg", 25432)];
        m.slices.insert(object("team-x", "postgres-2"), other);
    });
    let _ = told(&mesh, &mut seen, |_| EARLY);
    assert_eq!(named(&seen), [is("10.1.1.7", true)]);
}

#[test]
fn one_that_takes_connections_again_is_left_as_it_stands_until_then() {
    let unready = || unready(backend("10.1.2.8", "b"));
    let (mesh, mut seen) = standing(vec![backend("10.1.2.9", "b"), unready()]);
    backends(&mut seen, vec![backend("10.1.2.9", "b"), backend("10.1.2.8", "b")]);
    let (written, _) = told(&mesh, &mut seen, |_| EARLY);
    assert_eq!(written, Vec::<String>::new());
    let _ = told(&mesh, &mut seen, |_| LATE);
    assert_eq!(named(&seen), [is("10.1.2.8", true), is("10.1.2.9", true)]);
}

#[test]
fn what_is_taken_back_goes_at_once() {
    let (mut mesh, mut seen) = standing(vec![backend("10.1.2.9", "b")]);
    mesh.clusters[2].egress.clear();
    let (_, news) = told(&mesh, &mut seen, |_| EARLY);
    assert_eq!((named(&seen), news), (vec![], vec![]));
    assert_eq!(sources(&run(&mesh, &seen).1, "nb"), Vec::<&str>::new());
}

#[test]
fn only_a_sandbox_has_to_wait() {
    let (mesh, seen) = three();
    let (plan, _) = run(&mesh, &seen);
    let of = |identity: &ClusterIdentity| crate::announce::is_sandbox(&plan, identity);
    assert_eq!(
        [of(&ClusterIdentity::Local), of(&secret("tenant")), of(&secret("nb"))],
        [false, false, true]
    );
}
