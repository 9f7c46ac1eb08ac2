use std::sync::atomic::{AtomicUsize, Ordering};

use kube::core::TypeMeta;
use serde_json::json;
use tracing::{Event, Metadata, Subscriber, span};

use super::*;

fn feed() -> Feed<i64> {
    Feed::new(Changed::default(), |object| match object.data.get("n") {
        Some(n) => n.as_i64().map(Some).ok_or_else(|| "n is not a number".to_owned()),
        None => Ok(None),
    })
}

fn object(name: &str, version: &str, data: serde_json::Value) -> DynamicObject {
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        uid: Some(format!("uid-{name}")),
        resource_version: Some(version.to_owned()),
        ..ObjectMeta::default()
    };
    DynamicObject {
        types: Some(TypeMeta::default()),
        metadata,
        data,
    }
}

fn replace(feed: &Feed<i64>, objects: Vec<DynamicObject>, version: &str) {
    feed.replace(list_of(feed, objects, version), true);
}

fn list_of(feed: &Feed<i64>, objects: Vec<DynamicObject>, version: &str) -> List<i64> {
    List {
        objects: objects.into_iter().filter_map(|object| feed.convert(object)).collect(),
        version: version.to_owned(),
        number: *feed.required_list.borrow(),
        charge: None,
    }
}

fn name(name: &str) -> ObjectName {
    ObjectName {
        namespace: String::new(),
        name: name.to_owned(),
    }
}

fn put(feed: &Feed<i64>, object: DynamicObject) {
    feed.put(object).expect("a feed without a budget");
}

fn rows(feed: &Feed<i64>) -> Vec<(String, i64)> {
    feed.read(|rows| rows.iter().map(|(name, row)| (name.name.clone(), row.value)).collect())
}

fn was_woken(feed: &Feed<i64>) -> bool {
    futures::FutureExt::now_or_never(feed.changed.notified()).is_some()
}

#[test]
fn copy_follows_each_change_of_the_rows() {
    let feed = feed();
    let mut copy = Rows::default();
    let mut assert_equal = |what: &str| {
        feed.update(&mut copy, |value| *value);
        let copied: Vec<(String, i64)> = copy.iter().map(|(name, value)| (name.to_owned(), *value)).collect();
        assert_eq!(copied, rows(&feed), "{what}");
    };
    assert_equal("never read");
    replace(
        &feed,
        vec![object("a", "1", json!({"n": 1})), object("b", "2", json!({"n": 2}))],
        "2",
    );
    assert_equal("listed");
    put(&feed, object("a", "3", json!({"n": 3})));
    put(&feed, object("c", "4", json!({"n": 4})));
    feed.put_written(object("d", "5", json!({"n": 5})));
    assert_equal("added and changed");
    feed.remove(&name("b"));
    put(&feed, object("c", "6", json!({})));
    put(&feed, object("d", "7", json!({"n": "malformed"})));
    assert_equal("deleted, ignored and malformed");
    // More changes than rows.
    for number in 0..20 {
        let added = format!("x{number}");
        put(&feed, object(&added, "8", json!({"n": number})));
        feed.remove(&name(&added));
    }
    assert_equal("added and deleted");
    replace(&feed, vec![object("b", "40", json!({"n": 40}))], "40");
    assert_equal("listed again");
    feed.set_trust(Trust::Absent);
    assert_equal("not installed");
}

#[test]
fn malformed_object_keeps_its_last_value() {
    let feed = feed();
    replace(
        &feed,
        vec![object("a", "1", json!({"n": 1})), object("b", "2", json!({"n": "x"}))],
        "3",
    );
    assert_eq!((rows(&feed), feed.trust()), (vec![("a".into(), 1)], Trust::Live));
    put(&feed, object("a", "4", json!({"n": "y"})));
    assert_eq!(rows(&feed), [("a".into(), 1)]);
    assert_eq!(feed.malformed().len(), 2);
    replace(
        &feed,
        vec![object("a", "4", json!({"n": "y"})), object("c", "5", json!({"n": 3}))],
        "6",
    );
    assert_eq!(rows(&feed), [("a".into(), 1), ("c".into(), 3)]);
}

#[test]
fn change_of_malformed_objects_alone_triggers_a_pass() {
    let feed = feed();
    let (good, malformed) = (
        || object("a", "1", json!({"n": 1})),
        |n| object("b", "2", json!({"n": n})),
    );
    replace(&feed, vec![good()], "1");
    assert!(was_woken(&feed));
    replace(&feed, vec![good(), malformed("x")], "3");
    assert!(was_woken(&feed), "a list adds a malformed object");
    replace(&feed, vec![good(), malformed("x")], "4");
    assert!(!was_woken(&feed), "a list changes nothing");
    replace(&feed, vec![good()], "5");
    assert!(was_woken(&feed), "a list does not contain the malformed object");
    put(&feed, malformed("x"));
    assert!(was_woken(&feed), "an event adds the malformed object");
    feed.remove(&ObjectName {
        namespace: String::new(),
        name: "b".into(),
    });
    assert!(was_woken(&feed), "an event deletes the malformed object");
    put(&feed, malformed("x"));
    assert!(was_woken(&feed));
    put(&feed, object("b", "6", json!({})));
    assert!(was_woken(&feed), "an event changes it to an ignored object");
}

#[test]
fn malformed_object_is_logged_once() {
    let logged = Logged::default();
    tracing::subscriber::with_default(logged.clone(), || {
        let feed = feed();
        let malformed = |version| object("b", version, json!({"n": "x"}));
        replace(&feed, vec![malformed("2")], "3");
        replace(&feed, vec![malformed("2")], "4");
        put(&feed, malformed("5"));
    });
    assert_eq!(logged.0.load(Ordering::Relaxed), 1);
}

/// A tracing subscriber that counts log events.
#[derive(Clone, Default)]
struct Logged(Arc<AtomicUsize>);

impl Subscriber for Logged {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn change_of_an_unread_field_triggers_no_pass() {
    let feed = feed();
    replace(&feed, vec![object("a", "1", json!({"n": 1}))], "1");
    assert!(was_woken(&feed));
    put(&feed, object("a", "2", json!({"n": 1, "heartbeat": 7})));
    put(&feed, object("other", "3", json!({})));
    replace(&feed, vec![object("a", "2", json!({"n": 1}))], "3");
    assert!(!was_woken(&feed));
    put(&feed, object("a", "4", json!({"n": 2})));
    assert!(was_woken(&feed));
}

#[test]
fn older_event_or_list_does_not_undo_our_own_write() {
    let feed = feed();
    replace(&feed, vec![object("a", "1", json!({"n": 1}))], "1");
    feed.put_written(object("a", "5", json!({"n": 5})));
    feed.put_written(object("new", "6", json!({"n": 6})));
    put(&feed, object("a", "3", json!({"n": 3})));
    replace(&feed, vec![object("a", "3", json!({"n": 3}))], "4");
    assert_eq!(rows(&feed), [("a".into(), 5), ("new".into(), 6)]);
    replace(&feed, vec![object("a", "5", json!({"n": 5}))], "7");
    assert_eq!(rows(&feed), [("a".into(), 5)]);
}

#[test]
fn older_list_replaces_rows_that_came_from_a_list() {
    // Versions decrease when a cluster is restored from a backup.
    let feed = feed();
    replace(
        &feed,
        vec![object("a", "90", json!({"n": 1})), object("b", "91", json!({"n": 1}))],
        "95",
    );
    replace(&feed, vec![object("a", "7", json!({"n": 2}))], "10");
    assert_eq!(rows(&feed), [("a".into(), 2)]);
}

#[test]
fn older_list_undoes_our_own_write_when_read_again() {
    let feed = feed();
    feed.put_written(object("ours", "99", json!({"n": 9})));
    feed.read_again(Cluster::Same);
    replace(&feed, vec![object("a", "8", json!({"n": 3}))], "11");
    assert_eq!(rows(&feed), [("a".into(), 3)]);
}

#[test]
fn kind_that_was_never_read_is_forbidden_after_ten_seconds_of_403() {
    let denied = || Trust::Denied("403".into());
    let is_forbidden_before_and_after_ten_seconds = |feed: &Feed<i64>| {
        feed.set_trust(denied());
        let before = feed.is_forbidden();
        feed.lock().denied_since = tokio::time::Instant::now().checked_sub(FORBIDDEN_AFTER);
        (before, feed.is_forbidden())
    };
    let never_read = feed();
    assert_eq!(is_forbidden_before_and_after_ten_seconds(&never_read), (false, true));
    assert!(!never_read.has_answer());
    let read = feed();
    replace(&read, vec![object("a", "1", json!({"n": 1}))], "1");
    assert_eq!(is_forbidden_before_and_after_ten_seconds(&read), (false, false));
    assert_eq!((rows(&read), read.has_answer()), (vec![("a".into(), 1)], true));
}

#[tokio::test(start_paused = true)]
async fn kind_stays_forbidden_while_only_the_reason_changes() {
    let feed = feed();
    feed.set_trust(Trust::Denied("no right to list it".into()));
    tokio::time::advance(FORBIDDEN_AFTER).await;
    feed.set_trust(Trust::Denied("no right to read whether it exists".into()));
    assert!(feed.is_forbidden());
}

#[test]
fn kind_that_was_read_and_then_absent_can_become_forbidden() {
    let feed = feed();
    replace(&feed, vec![object("a", "1", json!({"n": 1}))], "1");
    feed.set_trust(Trust::Absent);
    feed.set_trust(Trust::Denied("403".into()));
    feed.lock().denied_since = tokio::time::Instant::now().checked_sub(FORBIDDEN_AFTER);
    assert!(feed.is_forbidden());
}

#[test]
fn absent_kind_is_empty_and_counts_as_an_answer() {
    let feed = feed();
    put(&feed, object("a", "1", json!({"n": 1})));
    feed.set_trust(Trust::Absent);
    assert_eq!((rows(&feed), feed.has_answer()), (vec![], true));
}

#[test]
fn absent_kind_stays_absent_while_requests_fail() {
    let feed = feed();
    let become_absent_and_fail = || {
        feed.set_trust(Trust::Absent);
        feed.set_trust(Trust::Broken("no answer".into()));
    };
    assert!(!feed.is_absent());
    become_absent_and_fail();
    assert!(feed.is_absent());
    feed.read_again(Cluster::Same);
    assert!(feed.is_absent(), "it is being read again");
    feed.read_again(Cluster::MayDiffer);
    assert!(!feed.is_absent(), "the connection may reach another cluster");
    become_absent_and_fail();
    assert!(feed.is_absent());
    replace(&feed, vec![], "1");
    assert!(!feed.is_absent(), "it was listed");
}

/// If an API server answers every watch with 410, its lists do not make the feed current.
#[test]
fn absent_kind_exists_again_once_its_feed_is_live() {
    let feed = feed();
    feed.set_trust(Trust::Absent);
    let is_current = false;
    feed.replace(list_of(&feed, vec![object("a", "1", json!({"n": 1}))], "1"), is_current);
    assert!(matches!(feed.trust(), Trust::Broken(_)), "{:?}", feed.trust());
    assert!(feed.is_absent());
    // A watch was open long enough.
    feed.set_trust(Trust::Live);
    assert!(!feed.is_absent());
    assert_eq!(rows(&feed), [("a".into(), 1)]);
}
