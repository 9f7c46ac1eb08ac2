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
use http::{Request, Response};
use http_body::Frame;
use k8s_openapi::api::core::v1::Node;
use kube::{Client, api::ApiResource, client::Body};
use serde_json::{Value, json};
use tower::{BoxError, Layer};

use super::*;
use crate::feed::Changed;

/// An API server that answers lists and watches with these; it counts the requests.
fn server(answer: impl Fn(bool) -> Value + Clone + Send + Sync + 'static) -> (Source, Arc<AtomicUsize>) {
    server_with(move |watch| (200, answer(watch).to_string()))
}

/// The same with a status; a body without end where that is 0.
fn server_with(answer: impl Fn(bool) -> (u16, String) + Clone + Send + Sync + 'static) -> (Source, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (answer, asked) = (answer.clone(), Arc::clone(&counted));
        async move {
            // On a paused clock a loop without a pause would never end.
            if asked.fetch_add(1, Ordering::Relaxed) > 5_000 {
                return std::future::pending().await;
            }
            let watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let (status, mut text) = answer(watch);
            text.push('\n');
            let body = if status == 0 {
                Answer::Silent
            } else {
                Answer::Whole(Some(text.into()))
            };
            let answer = Response::builder()
                .status(if status == 0 { 200 } else { status })
                .body(body);
            Ok::<_, BoxError>(answer.expect("an answer"))
        }
    });
    (source(Client::new(service, "default")), asked)
}

/// One of `count` objects of `length` bytes each, page by page, below the bounds of a member; it notes the sizes asked for.
fn bounded_server(count: usize, length: usize) -> (Source, Arc<Mutex<Vec<usize>>>) {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&sizes);
    let service = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let number = |name: &str| {
            let mut words = query.split('&').filter_map(|word| word.split_once('='));
            words
                .find(|(key, _)| *key == name)
                .and_then(|(_, value)| value.parse::<usize>().ok())
        };
        let (size, from) = (number("limit").expect("a limit"), number("continue").unwrap_or(0));
        noted.lock().expect("sound").push(size);
        let until = count.min(from + size);
        let node =
            |n: usize| json!({"metadata": {"name": format!("n-{n}"), "resourceVersion": "1"}, "x": "y".repeat(length)});
        let page: Value = (from..until).map(node).collect();
        let next = if until < count {
            until.to_string()
        } else {
            String::new()
        };
        let answer = Response::new(Answer::Whole(Some(list_of(&page, &next).to_string().into())));
        std::future::ready(Ok::<_, BoxError>(answer))
    });
    let bounded = BoundLayer::new(Account::alone(64 << 20)).layer(service);
    (source(Client::new(bounded, "default")), sizes)
}

/// The body of an answer.
enum Answer {
    Whole(Option<Bytes>),
    /// It never comes, nor ends.
    Silent,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Whole(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Silent => Poll::Pending,
        }
    }
}

fn source(client: Client) -> Source {
    Source {
        api: Api::all_with(client, &ApiResource::erase::<Node>(&())),
        what: "nodes".into(),
        whose: "a test".into(),
        labels: String::new(),
        fields: String::new(),
    }
}

fn course(resume: Resume) -> Course {
    Course {
        pause: pauses(),
        expired: 0,
        doubted: false,
        resume,
    }
}

fn feed() -> Feed<()> {
    Feed::new(Changed::default(), |_| Ok(Some(())))
}

fn list_of(items: &Value, next: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": "1", "continue": next}, "items": items})
}

/// Follows for ten minutes; how many requests that took.
async fn ten_minutes(source: &Source, feed: &Feed<()>, asked: &AtomicUsize) -> usize {
    let (_resume, resumed) = watch::channel(0);
    let followed = tokio::time::timeout(Duration::from_secs(600), follow(source, feed, resumed)).await;
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
    let feed = feed();
    let requests = ten_minutes(&source, &feed, &asked).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
    // Its lists were read, and none of them was true for long.
    let why = "its API server calls every version of nodes too old (410)";
    assert_eq!((feed.trust(), feed.listed()), (Trust::Broken(why.into()), true));
}

#[tokio::test(start_paused = true)]
async fn lists_that_are_all_too_old_are_no_live_table() {
    let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": ""});
    let (source, asked) = server_with(move |_| (410, gone.to_string()));
    let feed = feed();
    feed.replace(
        List {
            drafts: vec![],
            version: "1".into(),
            charge: None,
        },
        true,
    );
    let requests = ten_minutes(&source, &feed, &asked).await;
    assert!((10..100).contains(&requests), "{requests} requests in ten minutes");
    let why = "its API server calls every version of nodes too old (410)";
    assert_eq!(feed.trust(), Trust::Broken(why.into()));
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_too_old_once_leaves_the_table_live() {
    let times = Arc::new(AtomicUsize::new(0));
    let (source, _) = server_with(move |watch| match (watch, times.load(Ordering::Relaxed)) {
        (true, 0) => {
            times.store(1, Ordering::Relaxed);
            (410, String::new())
        }
        (true, _) => (0, String::new()),
        (false, _) => (200, list_of(&json!([]), "").to_string()),
    });
    let feed = feed();
    let (_resume, resumed) = watch::channel(0);
    let mut seen = Vec::new();
    let watched = async {
        loop {
            seen.push(feed.trust());
            seen.dedup();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = follow(&source, &feed, resumed) => {}
        () = async { let _ = tokio::time::timeout(Duration::from_secs(20), watched).await; } => {}
    }
    assert_eq!(seen, [Trust::Pending, Trust::Live]);
}

#[tokio::test(start_paused = true)]
async fn a_feed_that_is_told_to_resume_watches_again_without_a_list() {
    let (source, asked) = server_with(|watch| {
        if watch {
            (0, String::new())
        } else {
            (200, list_of(&json!([]), "").to_string())
        }
    });
    let feed = feed();
    let (resume, resumed) = watch::channel(0);
    let followed = tokio::spawn({
        let feed = feed.clone();
        async move { follow(&source, &feed, resumed).await }
    });
    for requests in [2, 3, 4] {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!((asked.load(Ordering::Relaxed), feed.trust()), (requests, Trust::Live));
        feed.set_trust(Trust::Broken("a new connection".into()));
        resume.send_modify(|times| *times += 1);
    }
    followed.abort();
}

/// What an API server may say of itself is anything.
#[tokio::test(start_paused = true)]
async fn an_answer_that_is_no_json_is_told_in_our_words() {
    let (source, asked) = server_with(|_| (200, "evil\nline ".repeat(100_000)));
    let feed = feed();
    ten_minutes(&source, &feed, &asked).await;
    let why = "its API server answers something that is not Kubernetes";
    assert_eq!(feed.trust(), Trust::Broken(why.into()));
}

#[tokio::test(start_paused = true)]
async fn a_page_that_is_over_the_budget_is_asked_for_again_in_parts() {
    // Ten objects of 1 MiB: four pages of two at most.
    let (source, sizes) = bounded_server(10, 1 << 20);
    let feed = feed();
    let list = list(&source, &feed).await.expect("a list");
    assert_eq!((list.drafts.len(), list.version.as_str()), (10, "1"));
    let sizes = sizes.lock().expect("sound").clone();
    assert_eq!(sizes, [50, 25, 12, 6, 3, 3, 3, 3]);
}

#[tokio::test(start_paused = true)]
async fn an_object_that_is_over_the_budget_breaks_the_table_for_good() {
    let (source, sizes) = bounded_server(1, 5 << 20);
    let feed = feed();
    let (_resume, resumed) = watch::channel(0);
    let followed = tokio::time::timeout(Duration::from_secs(60), follow(&source, &feed, resumed)).await;
    assert!(followed.is_err());
    let why = "over its budget: its API server answers with more than 4 MiB at once (nodes)";
    assert_eq!((feed.trust(), feed.listed()), (Trust::Broken(why.into()), false));
    assert_eq!(sizes.lock().expect("sound")[..6], [50, 25, 12, 6, 3, 1]);
}

#[tokio::test(start_paused = true)]
async fn objects_beyond_the_members_memory_are_not_kept() {
    let memory = Memory::new(1 << 20, |_, _| {});
    let account = memory.account("hostile");
    let node = |n: usize| json!({"metadata": {"name": format!("n-{n}"), "resourceVersion": "1"}, "spec": {"x": "y".repeat(10_000)}});
    let page: Value = (0..100).map(node).collect();
    let (source, _) = server(move |_| list_of(&page, ""));
    let feed = feed().charged_to(&account);
    assert!(matches!(
        list(&source, &feed).await,
        Err(Failed::Over(OverBudget::Member(_)))
    ));
    assert_eq!(account.used(), 0);
    // Fields that are not used are not charged.
    let feed = feed.without(&["spec/x"]);
    let whole = list(&source, &feed).await.expect("a list");
    feed.replace(whole, true);
    assert_eq!(feed.read(BTreeMap::len), 100);
    assert!((10_000..100_000).contains(&account.used()), "{}", account.used());
    feed.set_trust(Trust::Absent);
    assert_eq!(account.used(), 0);
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
    let (_resume, resumed) = watch::channel(0);
    report(&source, &feed, &Failed::TooMany, &mut course(resumed));
    let why = "its API server lists more than 50000 nodes, or more than 4000 pages of them";
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
