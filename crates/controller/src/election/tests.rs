//! Tests elections against a server of Leases. The clock is paused.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use http::{Method, Request, Response, StatusCode};
use kube::{api::PostParams, client::Body};
use serde_json::{Value, json};

use super::{
    fence::Fence,
    guard::{Permit, guard},
    *,
};

/// An API server that stores objects.
#[derive(Default)]
struct Server {
    objects: Mutex<BTreeMap<String, Value>>,
    version: AtomicU64,
    is_down: AtomicBool,
    /// Requests are executed, but not answered.
    is_mute: AtomicBool,
    /// How long each answer takes, in milliseconds.
    delay: AtomicU64,
    /// Requests that are not for Leases.
    others: AtomicU64,
}

impl Server {
    fn client(self: &Arc<Self>) -> Client {
        self.client_unless(&Arc::default())
    }

    /// A client that gets no answer while `is_cut_off`.
    fn client_unless(self: &Arc<Self>, is_cut_off: &Arc<AtomicBool>) -> Client {
        let (server, is_cut_off) = (Arc::clone(self), Arc::clone(is_cut_off));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (server, is_cut_off) = (Arc::clone(&server), Arc::clone(&is_cut_off));
            async move {
                if is_cut_off.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                let answer = server.answer(request).await;
                if server.is_mute.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Infallible>(answer)
            }
        });
        Client::new(service, "clustermesh")
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        if self.is_down.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        sleep(Duration::from_millis(self.delay.load(Ordering::Relaxed))).await;
        let (parts, body) = request.into_parts();
        let mut path = parts.uri.path().to_owned();
        if !path.contains("/leases") {
            self.others.fetch_add(1, Ordering::Relaxed);
            std::future::pending::<()>().await;
        }
        let body = body.collect_bytes().await.expect("a body");
        let mut object: Value = serde_json::from_slice(&body).unwrap_or_default();
        if parts.method == Method::POST {
            path = format!("{path}/{}", object["metadata"]["name"].as_str().expect("a name"));
        }
        let mut objects = self.objects.lock().expect("no panic");
        let code = match (&parts.method, objects.get(&path)) {
            (&Method::GET, Some(stored)) => {
                object = stored.clone();
                200
            }
            (&Method::POST, None) => 201,
            (&Method::PUT, Some(stored))
                if stored["metadata"]["resourceVersion"] == object["metadata"]["resourceVersion"] =>
            {
                200
            }
            (&Method::POST | &Method::PUT, Some(_)) => 409,
            _ => 404,
        };
        if code >= 400 {
            object = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "", "reason": if code == 404 { "NotFound" } else { "Conflict" }});
        } else if parts.method != Method::GET {
            let version = self.version.fetch_add(1, Ordering::Relaxed);
            object["metadata"]["resourceVersion"] = version.to_string().into();
            objects.insert(path, object.clone());
        }
        let code = StatusCode::from_u16(code).expect("a code");
        let answer = Response::builder()
            .status(code)
            .body(Body::from(object.to_string().into_bytes()));
        answer.expect("an answer")
    }

    /// Changes each stored Lease by hand.
    fn edit(&self, change: impl Fn(&mut Value)) {
        for object in self.objects.lock().expect("no panic").values_mut() {
            change(object);
            object["metadata"]["resourceVersion"] = self.version.fetch_add(1, Ordering::Relaxed).to_string().into();
        }
    }
}

fn start(hub: &Arc<Server>, name: &str) -> Arc<Election> {
    start_with(hub.client(), name)
}

fn start_with(client: Client, name: &str) -> Arc<Election> {
    let election = Arc::new(Election::new(client, "clustermesh", name));
    let running = Arc::clone(&election);
    tokio::spawn(async move {
        let _ended = running.ended.clone().drop_guard();
        running.run(Readiness::new()).await;
    });
    election
}

async fn seconds(seconds: f32) {
    sleep(Duration::from_secs_f32(seconds)).await;
}

/// Sends a request that writes, which the server never answers.
fn write_with(client: Client) -> tokio::task::JoinHandle<kube::Result<()>> {
    tokio::spawn(async move {
        let objects: Api<k8s_openapi::api::core::v1::ConfigMap> = Api::namespaced(client, "ns");
        objects
            .create(&PostParams::default(), &Default::default())
            .await
            .map(|_| ())
    })
}

fn reason(result: kube::Result<()>) -> Option<NotPermitted> {
    clustermesh_access::cause::<NotPermitted>(&result.expect_err("an error"))
}

#[tokio::test(start_paused = true)]
async fn standby_leads_when_the_leader_exits_but_not_when_the_hub_is_away() {
    let hub = Arc::new(Server::default());
    let first = start(&hub, "a");
    seconds(0.1).await;
    assert_eq!(first.leadership(), Leadership::Leader);
    let second = start(&hub, "b");
    seconds(100.0).await;
    assert_eq!(
        (first.leadership(), second.leadership()),
        (Leadership::Leader, Leadership::Standby)
    );
    first.resign().await;
    seconds(0.6).await;
    assert_eq!(
        (first.leadership(), second.leadership()),
        (Leadership::Standby, Leadership::Leader)
    );
    assert!(second.has_ended_earlier_writes());

    // The hub does not answer for longer than the Lease lasts. When it answers again, the same replica is the leader.
    let third = start(&hub, "c");
    seconds(1.0).await;
    hub.is_down.store(true, Ordering::Relaxed);
    seconds(60.0).await;
    assert_eq!(
        (second.leadership(), third.leadership()),
        (Leadership::Lapsed, Leadership::Standby)
    );
    assert!(!second.hub_answers());
    hub.is_down.store(false, Ordering::Relaxed);
    seconds(8.0).await;
    assert_eq!(
        (second.leadership(), third.leadership()),
        (Leadership::Leader, Leadership::Standby)
    );
}

#[tokio::test(start_paused = true)]
async fn slow_hub_gets_a_longer_lease_that_does_not_lapse() {
    let hub = Arc::new(Server::default());
    hub.delay.store(4_500, Ordering::Relaxed);
    let first = start(&hub, "a");
    seconds(10.0).await;
    for _ in 0..600 {
        assert_eq!(first.leadership(), Leadership::Leader);
        seconds(0.1).await;
    }
    // The Lease is long now, but a request gets permission only for the time that the shortest Lease would give, because the next
    // renewal may shorten the Lease.
    let term = first.held_term().expect("it leads");
    assert!(term.valid_until - Instant::now() > validity(DURATION));
    assert!(term.permission().until <= Instant::now() + validity(DURATION));

    // The hub is fast again. The first fast renewal still writes the longer Lease, which permits writes for 15 s. The next
    // renewal is sent 1 s later and shortens the Lease: it is executed, but its answer is lost. So the replica may write for only
    // 3 s after it has sent this renewal.
    hub.delay.store(0, Ordering::Relaxed);
    let rest = || first.held_term().expect("it leads").valid_until - Instant::now();
    while rest() < Duration::from_millis(14_900) {
        seconds(0.05).await;
    }
    hub.is_mute.store(true, Ordering::Relaxed);
    seconds(1.0 + 3.1).await;
    assert_eq!(first.leadership(), Leadership::Lapsed);
}

#[tokio::test(start_paused = true)]
async fn lease_that_was_deleted_or_emptied_by_hand_is_not_taken_at_once() {
    let hub = Arc::new(Server::default());
    let first = start(&hub, "a");
    seconds(0.1).await;
    let second = start(&hub, "b");
    seconds(1.0).await;
    for delete in [true, false] {
        let leader = if first.leadership() == Leadership::Leader {
            &first
        } else {
            &second
        };
        if delete {
            hub.objects.lock().expect("no panic").clear();
        } else {
            hub.edit(|lease| lease["spec"]["holderIdentity"] = Value::Null);
        }
        // Longer than the pause between two renewals, shorter than the Lease lasts.
        seconds(1.5).await;
        assert_eq!(leader.leadership(), Leadership::Standby, "it has seen the change");
        assert_eq!(
            [&first, &second].map(|election| election.leadership()),
            [Leadership::Standby; 2]
        );
        seconds(4.0).await;
        let leaders = [&first, &second].map(|election| election.leadership() == Leadership::Leader);
        assert!(leaders[0] != leaders[1], "{leaders:?}");
        let leader = if leaders[0] { &first } else { &second };
        assert!(!leader.has_ended_earlier_writes());
    }
}

#[tokio::test(start_paused = true)]
async fn request_in_flight_ends_with_the_permission() {
    let hub = Arc::new(Server::default());
    let election = start(&hub, "a");
    let client = guard(hub.client(), Permit::Hub(Arc::clone(&election)));
    assert_eq!(
        reason(write_with(client.clone()).await.expect("no panic")),
        Some(NotPermitted::Standby)
    );
    assert_eq!(hub.others.load(Ordering::Relaxed), 0);
    seconds(0.1).await;

    let request = write_with(client.clone());
    seconds(30.0).await;
    assert!(!request.is_finished(), "the Lease is renewed");
    hub.is_down.store(true, Ordering::Relaxed);
    seconds(3.5).await;
    assert!(request.is_finished());
    assert_eq!(reason(request.await.expect("no panic")), Some(NotPermitted::Lapsed));
    assert_eq!(
        reason(write_with(client).await.expect("no panic")),
        Some(NotPermitted::Lapsed)
    );
    assert_eq!(hub.others.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn members_lease_decides_while_the_hub_is_away() {
    let (hub, member) = (Arc::new(Server::default()), Arc::new(Server::default()));
    let fence = |election: &Arc<Election>| {
        Fence::new(
            Arc::clone(election),
            "m".to_owned(),
            "hub",
            member.client(),
            CancellationToken::new(),
        )
    };
    let is_permitted = async |fence: &Fence| fence.permission().await.is_ok();

    let is_cut_off = Arc::new(AtomicBool::new(false));
    let first = start_with(hub.client_unless(&is_cut_off), "a");
    seconds(0.1).await;
    let first_fence = fence(&first);
    assert_eq!(first_fence.permission().await.err(), Some(NotPermitted::NotTaken));
    assert!(first_fence.is_awaited());
    first_fence.take().await;
    assert!(!first_fence.is_awaited() && is_permitted(&first_fence).await);

    // The hub answers no replica: the first one may write as long as it renews the Lease in the member.
    hub.is_down.store(true, Ordering::Relaxed);
    seconds(60.0).await;
    assert!(first.leadership() == Leadership::Lapsed && is_permitted(&first_fence).await);
    hub.is_down.store(false, Ordering::Relaxed);
    seconds(8.0).await;
    assert!(first.leadership() == Leadership::Leader && is_permitted(&first_fence).await);

    // Only the first replica is cut off from the hub: it goes on until the second one takes the member's Lease. The second
    // replica then waits for the end of the first one's last permission.
    let second = start(&hub, "b");
    seconds(1.0).await;
    is_cut_off.store(true, Ordering::Relaxed);
    seconds(6.0).await;
    assert_eq!(
        (first.leadership(), second.leadership()),
        (Leadership::Lapsed, Leadership::Leader)
    );
    let last = first_fence.permission().await.expect("it was not taken yet");
    let second_fence = fence(&second);
    second_fence.take().await;
    assert!(Instant::now() > last.until && is_permitted(&second_fence).await);
    assert_eq!(first_fence.permission().await.err(), Some(NotPermitted::Taken));
    assert_eq!(first_fence.permission().await.err(), Some(NotPermitted::Taken));

    // The second replica has never renewed the member's Lease, so its permission to write ends with the hub's Lease, which it
    // releases. So the third replica does not wait: it may write as soon as it has taken the member's Lease.
    let third = start(&hub, "c");
    seconds(1.0).await;
    second.resign().await;
    seconds(1.0).await;
    let (third_fence, began) = (fence(&third), Instant::now());
    third_fence.take().await;
    assert!(is_permitted(&third_fence).await && began.elapsed() < Duration::from_millis(10));
}

#[tokio::test(start_paused = true)]
async fn lease_in_unreachable_member_is_a_problem_until_taken() {
    let (hub, member) = (Arc::new(Server::default()), Arc::new(Server::default()));
    let election = start(&hub, "a");
    seconds(0.1).await;
    let is_cut_off = Arc::new(AtomicBool::new(true));
    let client = member.client_unless(&is_cut_off);
    let fence = Fence::new(election, "m".to_owned(), "hub", client, CancellationToken::new());
    let fence = Arc::new(fence);
    assert!(fence.start_taking() && fence.is_awaited());
    assert!(!fence.start_taking(), "a task is taking it");
    let taking = tokio::spawn({
        let fence = Arc::clone(&fence);
        async move { fence.take().await }
    });
    seconds(10.0).await;
    let problem = fence.problem().expect("a problem");
    assert!(
        problem.contains("clustermesh-controller-") && problem.contains("does not answer"),
        "{problem}"
    );
    is_cut_off.store(false, Ordering::Relaxed);
    taking.await.expect("no panic");
    assert_eq!(
        (fence.problem(), fence.is_awaited(), fence.start_taking()),
        (None, false, false)
    );
}
