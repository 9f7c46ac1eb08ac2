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

/// An API server with empty lists and watches without events.
#[derive(Default)]
struct Server {
    /// The status code of `/version`; 0 = 200, 1 = no response.
    version_status: AtomicU16,
    /// List requests whose path contains this text are refused with 403.
    forbidden_path: Mutex<String>,
    /// The latency of every response.
    latency: Mutex<Duration>,
    /// Number of list requests that succeeded.
    lists: AtomicUsize,
    /// Number of list requests for `services` in namespace `team` that succeeded.
    team_lists: AtomicUsize,
    /// Number of requests for `/version`.
    probes: AtomicUsize,
}

/// The body of a response; `None` = the body sends nothing and does not end.
struct AnswerBody(Option<Bytes>);

impl http_body::Body for AnswerBody {
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
    async fn answer(&self, path: String) -> Response<AnswerBody> {
        let latency = *self.latency.lock().expect("not poisoned");
        tokio::time::sleep(latency).await;
        let answer = |status: u16, body: serde_json::Value| {
            let body = AnswerBody(Some(format!("{body}\n").into()));
            Response::builder().status(status).body(body).expect("an answer")
        };
        let refused = |code: u16| {
            answer(
                code,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "", "message": ""}),
            )
        };
        let forbidden_path = self.forbidden_path.lock().expect("not poisoned").clone();
        if path == "/version" {
            self.probes.fetch_add(1, Ordering::Relaxed);
            match self.version_status.load(Ordering::Relaxed) {
                0 => answer(200, json!({"major": "1", "minor": "36", "gitVersion": "v1.36.3"})),
                1 => std::future::pending().await,
                code => refused(code),
            }
        } else if path.contains("watch=true") {
            Response::new(AnswerBody(None))
        } else if path.ends_with("/namespaces/kube-system") {
            answer(200, json!({"metadata": {"name": "kube-system", "uid": "u"}}))
        } else if !forbidden_path.is_empty() && path.contains(&forbidden_path) {
            refused(403)
        } else {
            self.lists.fetch_add(1, Ordering::Relaxed);
            if path.contains("/namespaces/team/services") {
                self.team_lists.fetch_add(1, Ordering::Relaxed);
            }
            answer(
                200,
                json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}),
            )
        }
    }
}

/// Starts a session with the server.
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
    let (interest, interest_receiver) = watch::channel(Interest::default());
    let served = Arc::clone(&shared);
    let writer = Writer {
        client: client.clone(),
        fence: None,
        _end: Arc::new(CancellationToken::new().drop_guard()),
    };
    let task = tokio::spawn(async move { serve::serve(&served, (&client, None), writer, interest_receiver).await });
    let session = Session {
        shared,
        interest,
        cleanup_only: watch::channel(false).0,
        _end: CancellationToken::new().drop_guard(),
    };
    (session, task.abort_handle())
}

/// An interest in the Service `db` of the namespace.
fn interest_in(namespace: &str) -> Interest {
    let name = ObjectName {
        namespace: namespace.into(),
        name: "db".into(),
    };
    Interest {
        services: [name].into(),
        pod_namespaces: BTreeSet::new(),
    }
}

/// Returns the state of the observation, and whether the API server is unresponsive.
fn state(session: &Session) -> (&'static str, bool) {
    (session.observe().state_name(), session.is_unresponsive())
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

const FRESH: (&str, bool) = ("Fresh", false);

#[tokio::test(start_paused = true)]
async fn refused_probes_and_a_single_failed_probe_have_no_effect() {
    let server = Arc::new(Server::default());
    let (session, _task) = session(&server);
    seconds(1).await;
    assert_eq!(state(&session), FRESH);
    let lists = server.lists.load(Ordering::Relaxed);
    for code in [429, 403, 401, 404, 500] {
        server.version_status.store(code, Ordering::Relaxed);
        let probes = server.probes.load(Ordering::Relaxed);
        for _ in 0..60 {
            seconds(1).await;
            assert_eq!(state(&session), FRESH, "{code}");
        }
        assert!(server.probes.load(Ordering::Relaxed) >= probes + 5);
    }
    // A single probe gets no response, or 503.
    for code in [1, 503] {
        server.version_status.store(0, Ordering::Relaxed);
        seconds(11).await;
        server.version_status.store(code, Ordering::Relaxed);
        let probes = server.probes.load(Ordering::Relaxed);
        while server.probes.load(Ordering::Relaxed) == probes {
            seconds(1).await;
        }
        server.version_status.store(0, Ordering::Relaxed);
        for _ in 0..60 {
            seconds(1).await;
            assert_eq!(state(&session), FRESH, "{code}");
        }
    }
    assert_eq!(server.lists.load(Ordering::Relaxed), lists);
}

#[tokio::test(start_paused = true)]
async fn recovered_server_is_listed_again() {
    let server = Arc::new(Server::default());
    let (session, _task) = session(&server);
    seconds(1).await;
    let lists = server.lists.load(Ordering::Relaxed);
    server.version_status.store(1, Ordering::Relaxed);
    seconds(30).await;
    assert_eq!(state(&session), ("Stale", true));
    server.version_status.store(0, Ordering::Relaxed);
    seconds(20).await;
    let again = server.lists.load(Ordering::Relaxed);
    assert_eq!(state(&session), FRESH);
    assert!(again >= 2 * lists, "{lists} and {again}");
}

/// Each response takes two seconds, so in some rounds the interest changes twice while a probe waits.
#[tokio::test(start_paused = true)]
async fn objects_of_a_restored_interest_are_listed_again() {
    let server = Arc::new(Server::default());
    *server.latency.lock().expect("not poisoned") = Duration::from_secs(2);
    let (session, _task) = session(&server);
    session.set_interest(&interest_in("team"));
    seconds(13).await;
    assert_eq!(state(&session), FRESH);
    let listed = server.team_lists.load(Ordering::Relaxed);
    let unlisted = |session: &Session| session.observe().last().expect("seen").unlisted.clone();
    assert_eq!((listed, unlisted(&session)), (1, Unlisted::default()));
    for round in 1..=12 {
        session.set_interest(&Interest::default());
        session.set_interest(&interest_in("team"));
        let why = "it is being read for the first time".to_owned();
        let services = [("team".to_owned(), why)].into();
        let pods = Default::default();
        assert_eq!(unlisted(&session), Unlisted { services, pods });
        seconds(5).await;
        assert_eq!(
            (state(&session), unlisted(&session)),
            (FRESH, Unlisted::default()),
            "{round}"
        );
        assert_eq!(server.team_lists.load(Ordering::Relaxed), listed + round);
    }
}

#[tokio::test(start_paused = true)]
async fn forbidden_namespace_leaves_the_member_fresh() {
    let server = Arc::new(Server::default());
    *server.forbidden_path.lock().expect("not poisoned") = "/namespaces/team/".into();
    let (session, _task) = session(&server);
    let mut interest = interest_in("team");
    interest.services.extend(interest_in("open").services);
    interest.pod_namespaces.insert("team".into());
    session.set_interest(&interest);
    seconds(15).await;
    let Observation::Fresh(member) = session.observe() else {
        panic!("{:?}", session.observe().not_fresh_reason());
    };
    let why = |what: &str| format!("the account may not list and watch {what} in namespace team (403)");
    let unlisted = |what: &str| [("team".to_owned(), why(what))].into();
    assert_eq!(
        member.unlisted,
        Unlisted {
            services: unlisted("services"),
            pods: unlisted("pods"),
        }
    );
}

#[test]
fn reconnect_delays_of_many_members_are_spread() {
    let delay = |n: usize| {
        reconnect_delay(&ClusterIdentity::Secret {
            namespace: "ns".into(),
            name: format!("tenant-{n}"),
            key: "value".into(),
            context: None,
        })
    };
    let mut buckets = [0; 10];
    for n in 0..1_000 {
        assert_eq!(delay(n), delay(n));
        buckets[usize::try_from(delay(n).as_millis()).expect("small") * buckets.len() / 5_000] += 1;
    }
    assert!(buckets.iter().all(|count| (60..140).contains(count)), "{buckets:?}");
}
