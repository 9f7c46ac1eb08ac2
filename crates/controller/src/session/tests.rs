use std::{
    pin::Pin,
    sync::atomic::{AtomicU16, AtomicUsize, Ordering},
    task::{Context, Poll},
};

use bytes::Bytes;

use clustermesh_access::memory::Memory;
use clustermesh_core::observe::Unlisted;
use http::{Request, Response};
use http_body::Frame;
use kube::client::Body;
use serde_json::json;

use super::*;

/// An API server that lists nothing and watches in silence.
#[derive(Default)]
struct Server {
    /// What `/version` answers; 0 = 200, 1 = nothing ever.
    version: AtomicU16,
    /// Lists are refused in this namespace.
    closed: Mutex<String>,
    /// How long every answer takes.
    latency: Mutex<Duration>,
    /// Lists that were asked for.
    lists: AtomicUsize,
    /// Lists that were asked for, of `services` in namespace `team`.
    of_team: AtomicUsize,
    versions: AtomicUsize,
}

/// The body of an answer; `None` = it is silent and does not end.
struct Answer(Option<Bytes>);

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.0 {
            None => Poll::Pending,
            Some(text) if text.is_empty() => Poll::Ready(None),
            Some(text) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(text))))),
        }
    }
}

impl Server {
    async fn answer(&self, path: String) -> Response<Answer> {
        let latency = *self.latency.lock().expect("sound");
        tokio::time::sleep(latency).await;
        let answer = |status: u16, body: serde_json::Value| {
            let body = Answer(Some(format!("{body}\n").into()));
            Response::builder().status(status).body(body).expect("an answer")
        };
        let refused = |code: u16| {
            answer(
                code,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "", "message": ""}),
            )
        };
        let closed = self.closed.lock().expect("sound").clone();
        if path == "/version" {
            self.versions.fetch_add(1, Ordering::Relaxed);
            match self.version.load(Ordering::Relaxed) {
                0 => answer(200, json!({"major": "1", "minor": "36", "gitVersion": "v1.36.3"})),
                1 => std::future::pending().await,
                code => refused(code),
            }
        } else if path.contains("watch=true") {
            Response::new(Answer(None))
        } else if path.ends_with("/namespaces/kube-system") {
            answer(200, json!({"metadata": {"name": "kube-system", "uid": "u"}}))
        } else if !closed.is_empty() && path.contains(&closed) {
            refused(403)
        } else {
            self.lists.fetch_add(1, Ordering::Relaxed);
            if path.contains("/namespaces/team/services") {
                self.of_team.fetch_add(1, Ordering::Relaxed);
            }
            answer(
                200,
                json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}),
            )
        }
    }
}

/// A session with the server, served until it is dropped.
fn session(server: &Arc<Server>) -> (Session, tokio::task::AbortHandle) {
    let server = Arc::clone(server);
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&server);
        async move { Ok::<_, std::convert::Infallible>(server.answer(request.uri().to_string()).await) }
    });
    let client = Client::new(service, "default");
    let changed = Changed::default();
    let account = Memory::new(1 << 30, |_, _| {}).account("a test");
    let identity = ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: "a".into(),
        key: "value".into(),
        context: None,
    };
    let shared = Arc::new(Shared::new(identity, account, true, changed));
    let (interest, wanted) = watch::channel(Interest::default());
    let served = Arc::clone(&shared);
    let task = tokio::spawn(async move { serve::serve(&served, &client, wanted).await });
    let session = Session {
        shared,
        interest,
        cleaning_up: watch::channel(false).0,
        _end: CancellationToken::new().drop_guard(),
    };
    (session, task.abort_handle())
}

fn services_of(namespace: &str) -> Interest {
    let name = ObjectName {
        namespace: namespace.into(),
        name: "db".into(),
    };
    Interest {
        services: [name].into(),
        pods: BTreeSet::new(),
    }
}

fn word(session: &Session) -> (&'static str, bool) {
    (session.observe().word(), session.silent())
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

const FRESH: (&str, bool) = ("Fresh", false);

#[tokio::test(start_paused = true)]
async fn version_that_is_refused_or_late_once_costs_nothing() {
    let server = Arc::new(Server::default());
    let (session, _task) = session(&server);
    seconds(1).await;
    assert_eq!(word(&session), FRESH);
    let lists = server.lists.load(Ordering::Relaxed);
    for code in [429, 403, 401, 404, 500] {
        server.version.store(code, Ordering::Relaxed);
        let asked = server.versions.load(Ordering::Relaxed);
        for _ in 0..60 {
            seconds(1).await;
            assert_eq!(word(&session), FRESH, "{code}");
        }
        assert!(server.versions.load(Ordering::Relaxed) >= asked + 5);
    }
    // One probe is not answered.
    for code in [1, 503] {
        server.version.store(0, Ordering::Relaxed);
        seconds(11).await;
        server.version.store(code, Ordering::Relaxed);
        let asked = server.versions.load(Ordering::Relaxed);
        while server.versions.load(Ordering::Relaxed) == asked {
            seconds(1).await;
        }
        server.version.store(0, Ordering::Relaxed);
        for _ in 0..60 {
            seconds(1).await;
            assert_eq!(word(&session), FRESH, "{code}");
        }
    }
    assert_eq!(server.lists.load(Ordering::Relaxed), lists);
}

#[tokio::test(start_paused = true)]
async fn server_that_was_silent_is_watched_again_and_not_listed() {
    let server = Arc::new(Server::default());
    let (session, _task) = session(&server);
    seconds(1).await;
    let lists = server.lists.load(Ordering::Relaxed);
    server.version.store(1, Ordering::Relaxed);
    seconds(30).await;
    assert_eq!(word(&session), ("Stale", true));
    server.version.store(0, Ordering::Relaxed);
    seconds(20).await;
    assert_eq!((word(&session), server.lists.load(Ordering::Relaxed)), (FRESH, lists));
}

/// With two seconds to every answer, the next pass and the next change of a mesh both fall into one probe.
#[tokio::test(start_paused = true)]
async fn interest_that_is_dropped_and_taken_up_again_is_followed() {
    let server = Arc::new(Server::default());
    *server.latency.lock().expect("sound") = Duration::from_secs(2);
    let (session, _task) = session(&server);
    session.want(&services_of("team"));
    seconds(13).await;
    assert_eq!(word(&session), FRESH);
    let listed = server.of_team.load(Ordering::Relaxed);
    let unlisted = |session: &Session| session.observe().last().expect("seen").unlisted.clone();
    assert_eq!((listed, unlisted(&session)), (1, Unlisted::default()));
    // Many times, so that some fall into the probe, which is every twelve seconds for two.
    for round in 1..=12 {
        session.want(&Interest::default());
        session.want(&services_of("team"));
        let why = "it is being read for the first time".to_owned();
        let services = [("team".to_owned(), why)].into();
        let pods = Default::default();
        assert_eq!(unlisted(&session), Unlisted { services, pods });
        seconds(5).await;
        assert_eq!(
            (word(&session), unlisted(&session)),
            (FRESH, Unlisted::default()),
            "{round}"
        );
        assert_eq!(server.of_team.load(Ordering::Relaxed), listed + round);
    }
}

#[tokio::test(start_paused = true)]
async fn namespace_that_is_refused_leaves_the_member_fresh() {
    let server = Arc::new(Server::default());
    *server.closed.lock().expect("sound") = "/namespaces/team/".into();
    let (session, _task) = session(&server);
    let mut interest = services_of("team");
    interest.services.extend(services_of("open").services);
    interest.pods.insert("team".into());
    session.want(&interest);
    seconds(15).await;
    let Observation::Fresh(member) = session.observe() else {
        panic!("{:?}", session.observe().trouble());
    };
    let why = |what: &str| format!("the account may not list and watch {what} in namespace team (403)");
    let of = |what: &str| [("team".to_owned(), why(what))].into();
    assert_eq!(
        member.unlisted,
        Unlisted {
            services: of("services"),
            pods: of("pods"),
        }
    );
}

#[test]
fn members_that_connect_again_together_are_spread() {
    let of = |n: usize| {
        spread(&ClusterIdentity::Secret {
            namespace: "ns".into(),
            name: format!("tenant-{n}"),
            key: "value".into(),
            context: None,
        })
    };
    let mut buckets = [0; 10];
    for n in 0..1_000 {
        assert_eq!(of(n), of(n));
        buckets[usize::try_from(of(n).as_millis()).expect("small") * buckets.len() / 5_000] += 1;
    }
    assert!(buckets.iter().all(|count| (60..140).contains(count)), "{buckets:?}");
}
