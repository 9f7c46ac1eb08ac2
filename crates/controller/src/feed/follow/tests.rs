use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use clustermesh_access::{
    bounds::BoundLayer,
    memory::{Account, Memory},
};
use clustermesh_api::peer::Peer;
use http::{Request, Response};
use http_body::Frame;
use k8s_openapi::api::core::v1::Node;
use kube::{Client, api::ApiResource, client::Body};
use serde_json::{Value, json};
use tower::{BoxError, Layer};

use super::*;
use crate::feed::{Changed, Cluster};

/// Returns the resource `nodes` of an API server that responds with `answer(is_watch)`, and the number of requests to it.
fn server(answer: impl Fn(bool) -> Value + Clone + Send + Sync + 'static) -> (WatchedResource, Arc<AtomicUsize>) {
    server_with(move |watch| (200, answer(watch).to_string()))
}

/// Like [`server`], with a status code. Code 0 = the response is 200, and its body sends nothing and never ends.
fn server_with(
    answer: impl Fn(bool) -> (u16, String) + Clone + Send + Sync + 'static,
) -> (WatchedResource, Arc<AtomicUsize>) {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (answer, requests) = (answer.clone(), Arc::clone(&counted));
        async move {
            // The paused clock advances only while all tasks wait. A client that retries without a delay would never let it
            // advance, so the server stops answering at some time. Then the test fails instead of running for ever.
            if requests.fetch_add(1, Ordering::Relaxed) > 5_000 {
                return std::future::pending().await;
            }
            let watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let (status, mut text) = answer(watch);
            text.push('\n');
            let body = if status == 0 {
                ResponseBody::Silent
            } else {
                ResponseBody::Whole(Some(text.into()))
            };
            let response = Response::builder()
                .status(if status == 0 { 200 } else { status })
                .body(body);
            Ok::<_, BoxError>(response.expect("a response"))
        }
    });
    (resource(Client::new(service, "default")), requests)
}

/// Returns the resource `nodes` of an API server that has `count` Nodes of `length` bytes each, behind the limits for members. Also
/// returns the page sizes that were requested.
fn bounded_server(count: usize, length: usize) -> (WatchedResource, Arc<Mutex<Vec<usize>>>) {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&sizes);
    let service = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let number = |name: &str| {
            let mut words = query.split('&').filter_map(|word| word.split_once('='));
            words
                .find(|(key, _)| *key == name)
                .and_then(|(_, value)| value.parse::<usize>().ok())
        };
        let (size, from) = (number("limit").expect("a limit"), number("continue").unwrap_or(0));
        recorded.lock().expect("not poisoned").push(size);
        let until = count.min(from + size);
        let node =
            |n: usize| json!({"metadata": {"name": format!("n-{n}"), "resourceVersion": "1"}, "x": "y".repeat(length)});
        let page: Value = (from..until).map(node).collect();
        let next = if until < count {
            until.to_string()
        } else {
            String::new()
        };
        let response = Response::new(ResponseBody::Whole(Some(list_of(&page, &next).to_string().into())));
        std::future::ready(Ok::<_, BoxError>(response))
    });
    let bounded = BoundLayer::new(Account::standalone(64 << 20)).layer(service);
    (resource(Client::new(bounded, "default")), sizes)
}

/// The body of a response.
enum ResponseBody {
    Whole(Option<Bytes>),
    /// The body sends nothing and never ends.
    Silent,
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Whole(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Silent => Poll::Pending,
        }
    }
}

fn resource(client: Client) -> WatchedResource {
    let kind = ApiResource::erase::<Node>(&());
    WatchedResource {
        api: Api::all_with(client, &kind),
        kind,
        description: "nodes".into(),
        cluster: "a test".into(),
        labels: String::new(),
        fields: String::new(),
    }
}

fn progress(feed: &Feed<()>) -> Progress {
    Progress {
        backoff: new_backoff(),
        has_expired: false,
        is_suspect: false,
        required_list: feed.required_list.subscribe(),
    }
}

fn feed() -> Feed<()> {
    Feed::new(Changed::default(), |_| Ok(Some(())))
}

fn list_of(items: &Value, next: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": "1", "continue": next}, "items": items})
}

/// Runs [`follow`] for ten minutes. Returns the number of requests.
async fn follow_ten_minutes(resource: &WatchedResource, feed: &Feed<()>, requests: &AtomicUsize) -> usize {
    let followed = tokio::time::timeout(Duration::from_secs(600), follow(resource, feed)).await;
    assert!(followed.is_err(), "follow returned");
    requests.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn watch_that_always_expires_is_retried_with_backoff() {
    let (resource, requests) = server(|watch| {
        if watch {
            json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": ""}})
        } else {
            list_of(&json!([]), "")
        }
    });
    let feed = feed();
    let requests = follow_ten_minutes(&resource, &feed, &requests).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
    // The lists succeeded, but no watch lasted long enough to count as established.
    let why = "its API server calls every version of nodes too old (410)";
    assert_eq!((feed.trust(), feed.has_answer()), (Trust::Broken(why.into()), true));
}

#[tokio::test(start_paused = true)]
async fn list_that_always_expires_leaves_the_feed_broken() {
    let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": ""});
    let (resource, requests) = server_with(move |_| (410, gone.to_string()));
    let feed = feed();
    feed.replace(
        List {
            objects: vec![],
            version: "1".into(),
            number: 0,
            charge: None,
        },
        true,
    );
    let requests = follow_ten_minutes(&resource, &feed, &requests).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
    let why = "its API server calls every version of nodes too old (410)";
    assert_eq!(feed.trust(), Trust::Broken(why.into()));
}

#[tokio::test(start_paused = true)]
async fn watch_that_expires_once_leaves_the_feed_live() {
    let times = Arc::new(AtomicUsize::new(0));
    let (resource, _) = server_with(move |watch| match (watch, times.load(Ordering::Relaxed)) {
        (true, 0) => {
            times.store(1, Ordering::Relaxed);
            (410, String::new())
        }
        (true, _) => (0, String::new()),
        (false, _) => (200, list_of(&json!([]), "").to_string()),
    });
    let feed = feed();
    let mut seen = Vec::new();
    let watched = async {
        loop {
            seen.push(feed.trust());
            seen.dedup();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = follow(&resource, &feed) => {}
        () = async { let _ = tokio::time::timeout(Duration::from_secs(20), watched).await; } => {}
    }
    assert_eq!(seen, [Trust::Pending, Trust::Live]);
}

/// An API server that answers the first `answered` lists with one Peer, and all later requests with 404. Each discovery document has
/// this status and text; status 0 = no response. Also returns the number of requests for such documents.
fn server_without_peers(answered: usize, (status, text): (u16, &'static str)) -> (WatchedResource, Arc<AtomicUsize>) {
    let (lists, discoveries) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&discoveries);
    let service = tower::service_fn(move |request: Request<Body>| {
        let is_of_peers = request.uri().path().ends_with("/peers");
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let (status, text) = if !is_of_peers {
            counted.fetch_add(1, Ordering::Relaxed);
            (status, text.to_owned())
        } else if !is_watch && lists.fetch_add(1, Ordering::Relaxed) < answered {
            let peers = json!([{"metadata": {"name": "a", "resourceVersion": "1"}}]);
            (200, list_of(&peers, "").to_string())
        } else {
            (404, "default backend - 404".to_owned())
        };
        async move {
            if status == 0 {
                std::future::pending().await
            }
            let body = ResponseBody::Whole(Some(text.into()));
            let response = Response::builder().status(status).body(body);
            Ok::<_, BoxError>(response.expect("a response"))
        }
    });
    let (client, kind) = (Client::new(service, "default"), ApiResource::erase::<Peer>(&()));
    let resource = WatchedResource {
        api: Api::all_with(client.clone(), &kind),
        kind,
        description: "peers".into(),
        ..resource(client)
    };
    (resource, discoveries)
}

/// A proxy answers every request with 404 while the API server behind it does not run.
#[tokio::test(start_paused = true)]
async fn kind_with_404_keeps_its_rows_unless_it_is_not_served() {
    const OTHER_KINDS: &str = r#"{"groupVersion": "kilo.squat.ai/v1alpha1", "resources": [{"name": "peerpolicies", "singularName": "", "namespaced": false, "kind": "PeerPolicy", "verbs": []}]}"#;
    for (document, trust, is_absent) in [
        (
            (404, ""),
            "Broken(\"its API server, or a proxy before it, does not find peers (404)\")",
            false,
        ),
        (
            (403, ""),
            "Denied(\"its API server does not find peers (404), and the account may not read",
            false,
        ),
        ((200, OTHER_KINDS), "Absent", true),
    ] {
        let (feed, (resource, discoveries)) = (feed(), server_without_peers(1, document));
        follow_ten_minutes(&resource, &feed, &discoveries).await;
        let found = format!("{:?}", feed.trust());
        assert!(found.starts_with(trust), "{found}");
        assert_eq!((feed.is_absent(), feed.is_forbidden()), (is_absent, false));
        assert_eq!(feed.read(BTreeMap::len), usize::from(!is_absent), "{found}");
        // An absent kind is requested every 3 s, without discovery.
        assert_eq!(discoveries.load(Ordering::Relaxed) == 1, is_absent, "{found}");
    }
}

#[tokio::test(start_paused = true)]
async fn kind_that_was_never_read_is_forbidden_where_discovery_is_forbidden() {
    let (feed, (resource, discoveries)) = (feed(), server_without_peers(0, (403, "")));
    follow_ten_minutes(&resource, &feed, &discoveries).await;
    assert!(matches!(feed.trust(), Trust::Denied(_)), "{:?}", feed.trust());
    assert_eq!((feed.is_forbidden(), feed.is_absent()), (true, false));
}

#[tokio::test(start_paused = true)]
async fn feed_is_not_current_while_the_cause_of_a_404_is_sought() {
    let (feed, (resource, discoveries)) = (feed(), server_without_peers(1, (0, "")));
    let _ = tokio::time::timeout(Duration::from_secs(10), follow(&resource, &feed)).await;
    assert_eq!(discoveries.load(Ordering::Relaxed), 1);
    assert!(matches!(feed.trust(), Trust::Broken(_)), "{:?}", feed.trust());
}

#[tokio::test(start_paused = true)]
async fn feed_that_is_read_again_is_current_after_the_list() {
    let listed = Arc::new(AtomicUsize::new(0));
    let lists = Arc::clone(&listed);
    let (resource, _) = server_with(move |watch| {
        if watch {
            (0, String::new())
        } else {
            listed.fetch_add(1, Ordering::Relaxed);
            (200, list_of(&json!([]), "").to_string())
        }
    });
    let feed = feed();
    let followed = tokio::spawn({
        let feed = feed.clone();
        async move { follow(&resource, &feed).await }
    });
    for expected in [1, 2, 3] {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let lists = lists.load(Ordering::Relaxed);
        assert_eq!((lists, feed.trust(), feed.needs_list()), (expected, Trust::Live, false));
        feed.read_again(Cluster::Same);
        // A watch that was open, or is opened now, does not make the feed current.
        feed.set_trust(Trust::Live);
        assert!(matches!(feed.trust(), Trust::Broken(_)) && feed.needs_list());
    }
    followed.abort();
}

#[test]
fn list_older_than_the_required_one_leaves_the_feed_broken() {
    let feed = feed();
    let list = |number| List {
        objects: vec![],
        version: "1".into(),
        number,
        charge: None,
    };
    feed.replace(list(0), true);
    assert_eq!(feed.trust(), Trust::Live);
    feed.read_again(Cluster::Same);
    feed.replace(list(0), true);
    assert!(matches!(feed.trust(), Trust::Broken(_)), "{:?}", feed.trust());
    feed.replace(list(1), true);
    assert_eq!(feed.trust(), Trust::Live);
}

#[tokio::test(start_paused = true)]
async fn answer_that_is_not_json_is_not_quoted_in_the_reason() {
    let (resource, requests) = server_with(|_| (200, "evil\nline ".repeat(100_000)));
    let feed = feed();
    follow_ten_minutes(&resource, &feed, &requests).await;
    let why = "its API server answers something that is not Kubernetes";
    assert_eq!(feed.trust(), Trust::Broken(why.into()));
}

#[tokio::test(start_paused = true)]
async fn page_over_the_response_limit_is_requested_in_smaller_pages() {
    // There are ten objects of 1 MiB each. A response may have at most 4 MiB.
    let (resource, sizes) = bounded_server(10, 1 << 20);
    let feed = feed();
    let list = list(&resource, &feed, 0).await.expect("a list");
    assert_eq!((list.objects.len(), list.version.as_str()), (10, "1"));
    let sizes = sizes.lock().expect("not poisoned").clone();
    assert_eq!(sizes, [50, 25, 12, 6, 3, 3, 3, 3]);
}

#[tokio::test(start_paused = true)]
async fn object_over_the_response_limit_leaves_the_feed_broken() {
    let (resource, sizes) = bounded_server(1, 5 << 20);
    let feed = feed();
    let followed = tokio::time::timeout(Duration::from_secs(60), follow(&resource, &feed)).await;
    assert!(followed.is_err());
    let why = "over its budget: its API server answers with more than 4 MiB at once (nodes)";
    assert_eq!((feed.trust(), feed.has_answer()), (Trust::Broken(why.into()), false));
    assert_eq!(sizes.lock().expect("not poisoned")[..6], [50, 25, 12, 6, 3, 1]);
}

// threat: endless-answer
#[tokio::test(start_paused = true)]
async fn list_is_charged_while_kept_and_refused_over_the_budget() {
    let memory = Memory::new(1 << 20, |_, _| {});
    let account = memory.account("hostile");
    let node = |n: usize| json!({"metadata": {"name": format!("n-{n}"), "resourceVersion": "1"}, "spec": {"x": "y".repeat(10_000)}});
    let page: Value = (0..100).map(node).collect();
    let (resource, _) = server(move |_| list_of(&page, ""));
    let feed = feed().charged_to(&account);
    assert!(matches!(
        list(&resource, &feed, 0).await,
        Err(FollowError::OverBudget(OverBudget::Member(_)))
    ));
    assert_eq!(account.used(), 0);
    // Unused fields are not charged.
    let feed = feed.without_fields(&["spec/x"]);
    let list = list(&resource, &feed, 0).await.expect("a list");
    feed.replace(list, true);
    assert_eq!(feed.read(BTreeMap::len), 100);
    assert!((10_000..100_000).contains(&account.used()), "{}", account.used());
    feed.set_trust(Trust::Absent);
    assert_eq!(account.used(), 0);
}

#[tokio::test(start_paused = true)]
async fn watch_that_always_closes_is_retried_with_backoff() {
    let (resource, requests) = server(|watch| {
        if watch {
            json!({"type": "BOOKMARK", "object": {"kind": "Node", "apiVersion": "v1", "metadata": {"resourceVersion": "2"}}})
        } else {
            list_of(&json!([]), "")
        }
    });
    let requests = follow_ten_minutes(&resource, &feed(), &requests).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn list_with_endless_pages_is_refused_with_the_reason() {
    let (resource, requests) = server(|_| list_of(&json!([]), "more"));
    let feed = feed();
    assert!(matches!(list(&resource, &feed, 0).await, Err(FollowError::TooMany)));
    assert_eq!(requests.load(Ordering::Relaxed), MAX_PAGES);
    report(&resource, &feed, &FollowError::TooMany, &mut progress(&feed));
    let why = "its API server lists more than 50000 nodes, more than 4000 pages of them, or sends a `continue` token of more than 16 KiB";
    assert_eq!(feed.trust(), Trust::Broken(why.into()));
    assert!(!feed.has_answer());
}

#[tokio::test(start_paused = true)]
async fn list_with_too_many_objects_is_refused() {
    let node = |n: usize| json!({"metadata": {"name": format!("n-{n}"), "resourceVersion": "1"}});
    let page: Value = (0..MAX_OBJECTS / 2).map(node).collect();
    let (resource, requests) = server(move |_| list_of(&page, "more"));
    let feed = feed();
    assert!(matches!(list(&resource, &feed, 0).await, Err(FollowError::TooMany)));
    assert_eq!((requests.load(Ordering::Relaxed), feed.has_answer()), (3, false));
}
