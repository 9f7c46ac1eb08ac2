//! The clock of these tests is paused (`start_paused`), so their sleeps take no time.

use std::time::Duration;

use clustermesh_core::{
    diff::{Action, Item},
    key::PublicKey,
    lanes,
    observe::{Member, Owner, PeerRole, PeerSpec},
    ownership::Claimant,
};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;

fn mesh() -> MeshId {
    MeshId {
        namespace: "ns".into(),
        name: "m".into(),
    }
}

fn step(source: &str, item: Item, action: Action) -> Arc<Step> {
    let owner = Owner {
        mesh: Some("m".into()),
        mesh_namespace: Some("ns".into()),
        hub: Some("hub".into()),
        source_cluster: Some(source.into()),
    };
    Arc::new(Step {
        mesh: mesh(),
        action,
        item,
        owner: owner.into(),
        fields: vec![],
    })
}

fn peer_step(source: &str, n: u16, action: Action) -> Arc<Step> {
    let mut key = [7; 32];
    key[..2].copy_from_slice(&n.to_be_bytes());
    key[2] = source.as_bytes()[0];
    let spec = PeerSpec {
        public_key: PublicKey::new(key),
        allowed_ips: [].into(),
        endpoint: None,
        candidates: vec![],
        persistent_keepalive: 0,
        role: PeerRole::Node,
    };
    step(source, Item::Peer(format!("{source}-{n}"), Some(spec.into())), action)
}

fn policy_step(source: &str) -> Arc<Step> {
    let item = Item::Policy(format!("policy-{source}"), Some(Box::default()));
    step(source, item, Action::Create)
}

fn create_steps(source: &str, count: u16) -> Vec<Arc<Step>> {
    (0..count).map(|n| peer_step(source, n, Action::Create)).collect()
}

/// A Peer of ours, as the API server returns it.
fn existing_peer(path: &str) -> Value {
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
        "metadata": {
            "name": path.rsplit('/').next(), "uid": "u", "resourceVersion": "1",
            "labels": {
                "kilo-clustermesh.io/mesh": "m", "kilo-clustermesh.io/mesh-namespace": "ns",
                "kilo-clustermesh.io/hub": "hub", "kilo-clustermesh.io/source-cluster": "a",
            },
            "managedFields": [
                {"manager": "clustermesh-controller", "operation": "Update", "time": "2026-01-03T00:00:00Z"},
                {"manager": "old", "operation": "Update", "time": "2026-01-01T00:00:00Z"},
                {"manager": "kubectl-edit", "operation": "Update", "time": "2026-01-02T00:00:00Z"},
            ],
        },
        "spec": {"publicKey": "", "allowedIPs": []},
    })
}

/// A member whose API server responds to each request after 10 ms, and the writer for this member. [`Self::run_passes`] plays the
/// reconcile loop.
struct Fixture {
    writer: MemberWriter,
    connection: Connection,
    changed: Changed,
    tasks: TaskTracker,
    requests: Arc<Mutex<Vec<String>>>,
    passes: usize,
}

impl Fixture {
    /// `answer` returns status code and body for a method and a path. Without a body, the server returns the object that was sent.
    fn new(answer: impl Fn(&str, &str) -> (u16, Option<Value>) + Send + Sync + 'static) -> Self {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        let answer = Arc::new(answer);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
            async move {
                let (method, path) = (request.method().clone(), request.uri().path().to_owned());
                let sent = request.into_body().collect_bytes().await.expect("a body");
                let name = serde_json::from_slice::<Value>(&sent).unwrap_or_default()["metadata"]["name"].clone();
                let name = name.as_str().or(path.rsplit('/').next()).unwrap_or_default();
                log.lock().expect("not poisoned").push(format!("{method} {name}"));
                tokio::time::sleep(Duration::from_millis(10)).await;
                let (code, body) = answer(method.as_str(), &path);
                let body = body.unwrap_or_else(|| {
                    let mut object: Value = serde_json::from_slice(&sent).expect("an object");
                    object["metadata"]["uid"] = "u".into();
                    object["metadata"]["resourceVersion"] = "1".into();
                    object
                });
                let body = Body::from(serde_json::to_vec(&body).expect("JSON"));
                let response = http::Response::builder().status(code).body(body);
                Ok::<_, std::convert::Infallible>(response.expect("an answer"))
            }
        });
        let changed = Changed::default();
        let claims = Claims {
            hub: "hub".into(),
            claimants: vec![Claimant {
                mesh: mesh(),
                adopt_hub: None,
            }],
        };
        Self {
            writer: MemberWriter::new(changed.clone(), Metrics::default()),
            connection: Connection {
                client: Client::new(service, "default"),
                feeds: MemberFeeds::new("member".into(), None, &changed),
                claims: Arc::new(claims),
            },
            changed,
            tasks: TaskTracker::new(),
            requests,
            passes: 0,
        }
    }

    fn set_steps(&mut self, steps: &[Arc<Step>]) {
        self.passes += 1;
        let groups = lanes::split_by_source(steps.to_vec(), &Member::default());
        self.writer
            .set_steps(groups, Instant::now(), self.connection.clone(), &self.tasks);
    }

    /// Runs passes for `time`: one at the start, and one each time the writer notifies `changed`. Each pass sets the same steps.
    async fn run_passes(&mut self, steps: &[Arc<Step>], time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.set_steps(steps);
            tokio::select! {
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(end) => {}
            }
        }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().expect("not poisoned").clone()
    }
}

fn failure(code: u16) -> (u16, Option<Value>) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "No", "message": "no"});
    (code, Some(status))
}

// threat: restless-nodes
#[tokio::test(start_paused = true)]
async fn revoking_step_does_not_wait_for_a_large_batch() {
    let mut fixture = Fixture::new(|_, _| (201, None));
    let mut steps = create_steps("busy", 1000);
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let requests = fixture.requests();
    let before = requests.len();
    // The next pass observes all writes except those in flight, which are the last eight (`REST_REQUESTS`).
    let written = |step: &Step| requests[..before - 8].contains(&format!("POST {}", step.item.name()));
    steps.retain(|step| !written(step));
    // The create of a PeerPolicy may revoke something, so it is a revoking step (`Lanes::revoking`).
    steps.insert(0, policy_step("other"));
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = fixture.requests().split_off(before);
    assert_eq!(after.iter().position(|line| line == "POST policy-other"), Some(0));
    assert_eq!(after.len() + before, 1001, "each step is sent once");
}

#[tokio::test(start_paused = true)]
async fn sources_take_turns() {
    let mut fixture = Fixture::new(|_, _| (201, None));
    let steps: Vec<Arc<Step>> = ["a", "b", "c"]
        .iter()
        .flat_map(|source| create_steps(source, 100))
        .collect();
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let requests = fixture.requests();
    assert_eq!(requests.len(), 300);
    // Each source has sent a third of the first 90 requests.
    let count_of = |source: &str| {
        requests[..90]
            .iter()
            .filter(|line| line.contains(&format!("{source}-")))
            .count()
    };
    assert_eq!((count_of("a"), count_of("b"), count_of("c")), (30, 30, 30));
}

// threat: restless-nodes
#[tokio::test(start_paused = true)]
async fn source_with_many_steps_delays_no_other_source() {
    let mut fixture = Fixture::new(|_, _| (201, None));
    let steps: Vec<Arc<Step>> = create_steps("busy", 3000)
        .into_iter()
        .chain(create_steps("other", 900))
        .collect();
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let requests = fixture.requests();
    let count_of = |source: &str| requests.iter().filter(|line| line.contains(source)).count();
    assert_eq!(count_of("other"), 900);
    // The token bucket of the source: a burst of a thousand requests, then fifty per second for 20 s.
    assert!((1980..=2010).contains(&count_of("busy")), "{}", count_of("busy"));
}

// threat: restless-nodes
#[tokio::test(start_paused = true)]
async fn throttled_source_does_not_delay_the_others() {
    let mut fixture = Fixture::new(|_, _| failure(429));
    let mut steps = create_steps("busy", 100);
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let requests = fixture.requests().len();
    // The first eight requests are concurrent. After them, there is one request at a time, with growing pauses.
    assert!((10..=20).contains(&requests), "{requests}");
    let problem = fixture.writer.problem(&mesh());
    assert_eq!(problem.as_deref(), Some("its API server asks to slow down (429)"));
    steps.extend([policy_step("other"), peer_step("another", 1, Action::Create)]);
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let others = fixture.requests().split_off(requests);
    let is_sent = |name: &str| others.iter().any(|line| line.ends_with(name));
    assert!(is_sent("policy-other") && is_sent("another-1"), "{others:?}");
}

#[tokio::test(start_paused = true)]
async fn retries_of_refused_objects_cause_no_passes() {
    let mut fixture = Fixture::new(|_, _| failure(403));
    let steps = create_steps("a", 1000);
    fixture.run_passes(&steps, Duration::from_secs(60)).await;
    // The first pass, one pass that reports the refusal, and perhaps one pass when the task ends.
    assert!(fixture.passes <= 3, "{} passes", fixture.passes);
    let requests = fixture.requests().len();
    // At least two attempts for each object. At most what the token bucket admits: a thousand, then fifty per second for 60 s.
    assert!((2_000..=4_000).contains(&requests), "{requests} requests");
    let problem = "Peer a-0: the account may not create it (403): apply the member's RBAC manifests; and 999 more";
    assert_eq!(fixture.writer.problem(&mesh()).as_deref(), Some(problem));
    fixture.set_steps(&[]);
    assert_eq!(fixture.writer.problem(&mesh()), None);
}

#[tokio::test(start_paused = true)]
async fn refusal_by_admission_policy_names_its_config_map() {
    let message =
        "peers.kilo.squat.ai \"a-1\" is forbidden: ValidatingAdmissionPolicy 'clustermesh' denied request: secret";
    let mut fixture = Fixture::new(move |_, _| {
        let status =
            json!({"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden", "message": message});
        (403, Some(status))
    });
    fixture
        .run_passes(&[peer_step("a", 1, Action::Create)], Duration::from_secs(1))
        .await;
    let problem = "Peer a-1: an admission policy of the cluster refuses it (403): see the lists in its \
                   ConfigMap clustermesh-admission (deploy/admission.yaml)";
    assert_eq!(fixture.writer.problem(&mesh()).as_deref(), Some(problem));
}

#[tokio::test(start_paused = true)]
async fn retries_after_409_back_off_and_name_other_field_manager() {
    let mut fixture = Fixture::new(|method, path| match method {
        "GET" => (200, Some(existing_peer(path))),
        _ => failure(409),
    });
    let steps = [peer_step("a", 1, Action::Update)];
    fixture.run_passes(&steps, Duration::from_secs(60)).await;
    assert!(fixture.passes <= 3, "{} passes", fixture.passes);
    let puts = fixture.requests().iter().filter(|line| line.starts_with("PUT")).count();
    assert!((4..=12).contains(&puts), "{puts}");
    let problem = fixture.writer.problem(&mesh()).expect("a conflict is reported");
    assert!(
        problem.starts_with("Peer a-1: field manager \"kubectl-edit\" changed it "),
        "{problem}"
    );
    fixture.set_steps(&[]);
    assert_eq!(fixture.writer.problem(&mesh()), None);
}

/// The writer must detect the reverts without a 409, because two clients that overwrite an object in turn never cause one.
#[tokio::test(start_paused = true)]
async fn object_that_another_client_reverts_is_written_ever_less_often() {
    let mut fixture = Fixture::new(|method, path| match method {
        "GET" => (200, Some(existing_peer(path))),
        _ => (200, None),
    });
    let steps = [peer_step("a", 1, Action::Update)];
    // Every 20 ms a pass plans the update again, because the other client has reverted it.
    for _ in 0..3000 {
        fixture.set_steps(&steps);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let puts = fixture.requests().iter().filter(|line| line.starts_with("PUT")).count();
    assert!((5..=14).contains(&puts), "{puts} writes in a minute");
    let problem = fixture.writer.problem(&mesh()).expect("the object is contested");
    assert!(
        problem.starts_with("Peer a-1: field manager \"kubectl-edit\" changed it "),
        "{problem}"
    );
    fixture.set_steps(&[]);
    tokio::time::sleep(Duration::from_secs(200)).await;
    fixture.set_steps(&[]);
    assert_eq!(
        fixture.writer.problem(&mesh()),
        None,
        "contested objects are forgotten after 200 s without a change"
    );
}

#[tokio::test(start_paused = true)]
async fn unavailable_member_is_probed_with_backoff() {
    let mut fixture = Fixture::new(|_, _| failure(503));
    let mut steps = create_steps("a", 100);
    steps.insert(0, policy_step("b"));
    fixture.run_passes(&steps, Duration::from_secs(60)).await;
    assert!(fixture.passes <= 3, "{} passes", fixture.passes);
    let requests = fixture.requests();
    assert!((10..=40).contains(&requests.len()), "{}", requests.len());
    // A probe sends the first step of a lane again: `policy-b` of `revoking`, or `a-0` of `rest`.
    assert_eq!(
        requests
            .last()
            .map(|line| line.contains("policy-b") || line.contains("a-0")),
        Some(true)
    );
    assert_eq!(
        fixture.writer.problem(&mesh()).as_deref(),
        Some("its API server fails (503)")
    );
}

#[tokio::test(start_paused = true)]
async fn policy_is_written_before_the_peers_of_its_source() {
    let mut fixture = Fixture::new(|_, _| (201, None));
    let mut steps = create_steps("a", 20);
    steps.insert(0, policy_step("a"));
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(fixture.requests(), ["POST policy-a"]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.requests().len(), 21);
    assert!(!fixture.writer.is_busy());
}

#[tokio::test(start_paused = true)]
async fn peers_with_changed_allowed_ips_are_written_sequentially() {
    let mut fixture = Fixture::new(|method, path| match method {
        "GET" => (200, Some(existing_peer(path))),
        _ => (200, None),
    });
    let mut steps = [peer_step("a", 1, Action::Update), peer_step("a", 2, Action::Update)];
    for step in &mut steps {
        Arc::make_mut(step).fields = vec!["spec.allowedIPs"];
    }
    fixture.set_steps(&steps);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.requests(), ["GET a-1", "PUT a-1", "GET a-2", "PUT a-2"]);
}

#[tokio::test(start_paused = true)]
async fn retries_of_refused_objects_do_not_delay_first_attempts() {
    let mut fixture = Fixture::new(|_, _| failure(403));
    fixture.set_steps(&create_steps("a", 2000));
    tokio::time::sleep(Duration::from_secs(45)).await;
    let requests = fixture.requests();
    let tried: std::collections::BTreeSet<&String> = requests.iter().collect();
    assert_eq!(tried.len(), 2000, "distinct objects in {} requests", requests.len());
}

#[tokio::test(start_paused = true)]
async fn failed_step_that_is_no_longer_planned_is_not_sent_again() {
    for code in [403, 409, 429, 503] {
        let mut fixture = Fixture::new(move |method, path| match method {
            "GET" => (200, Some(existing_peer(path))),
            _ => failure(code),
        });
        fixture.set_steps(&[peer_step("a", 1, Action::Update)]);
        tokio::time::sleep(Duration::from_millis(15)).await;
        // The PUT of a-1 is in flight. The next pass does not plan it again.
        fixture.set_steps(&[peer_step("a", 2, Action::Update)]);
        tokio::time::sleep(Duration::from_secs(60)).await;
        let requests = fixture.requests();
        let puts = requests.iter().filter(|line| *line == "PUT a-1").count();
        assert_eq!(puts, 1, "{code}: {requests:?}");
        fixture.set_steps(&[]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(fixture.writer.problem(&mesh()), None, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn cleared_writer_sends_no_further_request() {
    let mut fixture = Fixture::new(|_, _| failure(403));
    fixture.set_steps(&create_steps("a", 10));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = fixture.requests().len();
    fixture.writer.clear();
    fixture.tasks.close();
    fixture.tasks.wait().await;
    assert_eq!((fixture.requests().len(), fixture.writer.is_busy()), (before, false));
}

#[test]
fn error_classes_tell_refused_object_from_unavailable_member() {
    let one = peer_step("a", 1, Action::Update);
    let answer = |code| {
        kube::Error::Api(Box::new(kube::core::Status {
            code,
            ..Default::default()
        }))
    };
    let unreadable = serde_json::from_str::<u8>("x").expect_err("no number");
    // 500 is the answer if an admission webhook fails on the object. An API server that is down or overloaded answers 503.
    for error in [answer(500), answer(422), kube::Error::SerdeError(unreadable)] {
        assert!(matches!(classify_error(&error, &one), Outcome::Refused(_)), "{error:?}");
    }
    for error in [answer(401), answer(503)] {
        assert!(
            matches!(classify_error(&error, &one), Outcome::Unavailable(_)),
            "{error:?}"
        );
    }
    assert!(matches!(classify_error(&answer(429), &one), Outcome::Throttled(_)));
}
