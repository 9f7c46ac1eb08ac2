use clustermesh_core::{diff::Item, observe::Owner};

use super::*;

fn step(kind: fn(String) -> Item, name: &str, action: Action, fields: Vec<&'static str>) -> Step {
    let mesh = MeshId {
        namespace: "ns".into(),
        name: "m".into(),
    };
    Step {
        mesh,
        action,
        item: kind(name.into()),
        owner: Owner::default(),
        fields,
    }
}

fn peer(name: String) -> Item {
    Item::Peer(name, None)
}

fn policy(name: String) -> Item {
    Item::Policy(name, None)
}

#[test]
fn what_moves_prefixes_is_written_one_by_one_and_in_order() {
    let moves = [
        step(peer, "gains", Action::Update, vec!["spec.allowedIPs"]),
        step(peer, "loses", Action::Update, vec!["spec.allowedIPs"]),
    ];
    let plain = [
        step(peer, "a", Action::Update, vec!["spec.endpoint"]),
        step(peer, "b", Action::Create, vec![]),
    ];
    assert!(!concurrent(&moves) && concurrent(&plain[..1]) && concurrent(&plain[1..]));
}

#[test]
fn a_policy_is_never_written_beside_a_peer() {
    let steps = [
        step(policy, "p", Action::Create, vec![]),
        step(peer, "a", Action::Create, vec![]),
        step(peer, "b", Action::Create, vec![]),
        step(peer, "c", Action::Delete, vec![]),
    ];
    let lengths: Vec<usize> = runs(&steps).map(<[Step]>::len).collect();
    assert_eq!(lengths, [1, 2, 1]);
}

#[test]
fn a_refused_object_waits_alone_and_a_member_in_trouble_waits_as_a_whole() {
    let writer = Writer::new(Changed::default(), Metrics::default());
    let refused = step(peer, "bad", Action::Create, vec![]);
    assert!(writer.note(&refused, Outcome::Refused("no".into())));
    assert_eq!(writer.trouble(&refused.mesh), Some("Peer bad: no".into()));
    assert!(writer.lock().cluster.is_none());
    assert!(!writer.note(&refused, Outcome::Trouble("away".into())));
    assert_eq!(writer.trouble(&refused.mesh), Some("away".into()));
}

#[test]
fn an_object_on_which_the_api_server_fails_is_refused_alone() {
    let one = step(peer, "a", Action::Update, vec![]);
    let answer = |code| {
        kube::Error::Api(Box::new(kube::core::Status {
            code,
            ..Default::default()
        }))
    };
    let unreadable = serde_json::from_str::<u8>("x").expect_err("no number");
    for error in [answer(500), answer(422), kube::Error::SerdeError(unreadable)] {
        assert!(matches!(refusal(&error, &one), Outcome::Refused(_)), "{error:?}");
    }
    for error in [answer(401), answer(429), answer(503)] {
        assert!(matches!(refusal(&error, &one), Outcome::Trouble(_)), "{error:?}");
    }
}
