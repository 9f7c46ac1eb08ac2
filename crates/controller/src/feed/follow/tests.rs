use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use http::{Request, Response};
use k8s_openapi::api::core::v1::Node;
use kube::{Client, api::ApiResource, client::Body};
use serde_json::{Value, json};

use super::*;
use crate::feed::Changed;

/// An API server that answers lists and watches with these; it counts the requests.
fn server(answer: impl Fn(bool) -> Value + Clone + Send + Sync + 'static) -> (Source, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (answer, asked) = (answer.clone(), Arc::clone(&counted));
        async move {
            // On a paused clock a loop without a pause would never end.
            if asked.fetch_add(1, Ordering::Relaxed) > 1_000 {
                return std::future::pending().await;
            }
            let watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let mut text = answer(watch).to_string();
            text.push('\n');
            Ok::<_, std::convert::Infallible>(Response::new(Body::from(text.into_bytes())))
        }
    });
    let source = Source {
        api: Api::all_with(Client::new(service, "default"), &ApiResource::erase::<Node>(&())),
        what: "nodes".into(),
        whose: "a test".into(),
        labels: String::new(),
        fields: String::new(),
    };
    (source, asked)
}

fn feed() -> Feed<()> {
    Feed::new(Changed::default(), |_| Ok(Some(())))
}

fn list_of(items: &Value, next: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": "1", "continue": next}, "items": items})
}

/// Follows for ten minutes; how many requests that took.
async fn ten_minutes(source: &Source, feed: &Feed<()>, asked: &AtomicUsize) -> usize {
    let followed = tokio::time::timeout(Duration::from_secs(600), follow(source, feed)).await;
    assert!(followed.is_err(), "it never ends");
    asked.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn a_server_for_which_every_version_is_too_old_is_asked_seldom() {
    let (source, asked) = server(|watch| {
        if watch {
            json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": ""}})
        } else {
            list_of(&json!([]), "")
        }
    });
    let requests = ten_minutes(&source, &feed(), &asked).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_closes_each_watch_after_an_event_is_asked_seldom() {
    let (source, asked) = server(|watch| {
        if watch {
            json!({"type": "BOOKMARK", "object": {"kind": "Node", "apiVersion": "v1", "metadata": {"resourceVersion": "2"}}})
        } else {
            list_of(&json!([]), "")
        }
    });
    let requests = ten_minutes(&source, &feed(), &asked).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn a_list_without_end_is_not_taken_and_says_why() {
    let (source, asked) = server(|_| list_of(&json!([]), "more"));
    let feed = feed();
    assert!(matches!(list(&source, &feed).await, Err(Failed::TooMany)));
    assert_eq!(asked.load(Ordering::Relaxed), MAX_PAGES);
    report(&source, &feed, &Failed::TooMany);
    let why = "its API server lists more than 50000 nodes, or more than 400 pages of them";
    assert_eq!(feed.trust(), Trust::Broken(why.into()));
    assert!(!feed.listed());
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_too_long_is_not_taken() {
    let node = |n: usize| json!({"metadata": {"name": format!("n-{n}"), "resourceVersion": "1"}});
    let page: Value = (0..MAX_OBJECTS / 2).map(node).collect();
    let (source, asked) = server(move |_| list_of(&page, "more"));
    let feed = feed();
    assert!(matches!(list(&source, &feed).await, Err(Failed::TooMany)));
    assert_eq!((asked.load(Ordering::Relaxed), feed.listed()), (3, false));
}
