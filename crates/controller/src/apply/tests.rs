//! The clock of these tests is paused (`start_paused`): what they sleep takes no time.

use std::time::Duration;

use clustermesh_core::{
    diff::{Action, Item},
    key::PublicKey,
    lanes,
    observe::{Member, Owner, PeerSpec, PolicySpec},
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

fn step(source: &str, item: Item, action: Action) -> Step {
    let owner = Owner {
        mesh: Some("m".into()),
        mesh_namespace: Some("ns".into()),
        hub: Some("hub".into()),
        source_cluster: Some(source.into()),
    };
    Step {
        mesh: mesh(),
        action,
        item,
        owner,
        fields: vec![],
    }
}

fn peer(source: &str, n: u16, action: Action) -> Step {
    let mut key = [7; 32];
    key[..2].copy_from_slice(&n.to_be_bytes());
    key[2] = source.as_bytes()[0];
    let spec = PeerSpec {
        public_key: PublicKey::new(key),
        allowed_ips: [].into(),
        endpoint: None,
        candidates: vec![],
        persistent_keepalive: 0,
    };
    step(source, Item::Peer(format!("{source}-{n}"), Some(spec)), action)
}

fn policy(source: &str) -> Step {
    let item = Item::Policy(format!("policy-{source}"), Some(PolicySpec::default()));
    step(source, item, Action::Create)
}

fn created(source: &str, count: u16) -> Vec<Step> {
    (0..count).map(|n| peer(source, n, Action::Create)).collect()
}

/// The object that a Peer of ours is at the API server.
fn standing(path: &str) -> Value {
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

/// A member whose API server answers every request as told after 10 ms, and a loop that offers again when it is woken.
struct World {
    writer: Writer,
    target: Target,
    changed: Changed,
    tasks: TaskTracker,
    asked: Arc<Mutex<Vec<String>>>,
    passes: usize,
}

impl World {
    /// `answer` = code and body for a method and a path; without a body what was sent.
    fn new(answer: impl Fn(&str, &str) -> (u16, Option<Value>) + Send + Sync + 'static) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        let answer = Arc::new(answer);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
            async move {
                let (method, path) = (request.method().clone(), request.uri().path().to_owned());
                let sent = request.into_body().collect_bytes().await.expect("a body");
                let name = serde_json::from_slice::<Value>(&sent).unwrap_or_default()["metadata"]["name"].clone();
                let name = name.as_str().or(path.rsplit('/').next()).unwrap_or_default();
                log.lock().expect("sound").push(format!("{method} {name}"));
                tokio::time::sleep(Duration::from_millis(10)).await;
                let (code, body) = answer(method.as_str(), &path);
                let body = body.unwrap_or_else(|| {
                    let mut object: Value = serde_json::from_slice(&sent).expect("an object");
                    object["metadata"]["uid"] = "u".into();
                    object["metadata"]["resourceVersion"] = "1".into();
                    object
                });
                let body = Body::from(serde_json::to_vec(&body).expect("JSON"));
                let answer = http::Response::builder().status(code).body(body);
                Ok::<_, std::convert::Infallible>(answer.expect("an answer"))
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
            writer: Writer::new(changed.clone(), Metrics::default()),
            target: Target {
                client: Client::new(service, "default"),
                tables: Tables::new("member".into(), None, &changed),
                claims: Arc::new(claims),
            },
            changed,
            tasks: TaskTracker::new(),
            asked,
            passes: 0,
        }
    }

    fn offer(&mut self, steps: &[Step]) {
        self.passes += 1;
        let groups = lanes::by_source(steps.to_vec(), &Member::default());
        self.writer
            .offer(groups, Instant::now(), self.target.clone(), &self.tasks);
    }

    /// Runs passes for this time; each offers the same steps.
    async fn run(&mut self, steps: &[Step], time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.offer(steps);
            tokio::select! {
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(end) => {}
            }
        }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("sound").clone()
    }
}

fn failure(code: u16) -> (u16, Option<Value>) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "No", "message": "no"});
    (code, Some(status))
}

#[tokio::test(start_paused = true)]
async fn what_closes_waits_behind_no_batch() {
    let mut world = World::new(|_, _| (201, None));
    let mut steps = created("rotator", 1000);
    world.offer(&steps);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let asked = world.asked();
    let before = asked.len();
    // The next pass sees what was answered; the last eight are in flight.
    let written = |step: &Step| asked[..before - 8].contains(&format!("POST {}", step.item.name()));
    steps.retain(|step| !written(step));
    steps.insert(0, policy("other"));
    world.offer(&steps);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = world.asked().split_off(before);
    assert_eq!(after.iter().position(|line| line == "POST policy-other"), Some(0));
    assert_eq!(after.len() + before, 1001, "each once");
}

#[tokio::test(start_paused = true)]
async fn sources_take_turns() {
    let mut world = World::new(|_, _| (201, None));
    let steps: Vec<Step> = ["a", "b", "c"].iter().flat_map(|source| created(source, 100)).collect();
    world.offer(&steps);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let asked = world.asked();
    assert_eq!(asked.len(), 300);
    let of = |source: &str| {
        asked[..90]
            .iter()
            .filter(|line| line.contains(&format!("{source}-")))
            .count()
    };
    assert_eq!((of("a"), of("b"), of("c")), (30, 30, 30));
}

#[tokio::test(start_paused = true)]
async fn source_that_never_rests_is_paced_alone() {
    let mut world = World::new(|_, _| (201, None));
    let steps: Vec<Step> = created("rotator", 3000)
        .into_iter()
        .chain(created("other", 900))
        .collect();
    world.offer(&steps);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let asked = world.asked();
    let of = |source: &str| asked.iter().filter(|line| line.contains(source)).count();
    assert_eq!(of("other"), 900);
    // A thousand at once and fifty each of twenty seconds.
    assert!((1980..=2010).contains(&of("rotator")), "{}", of("rotator"));
}

#[tokio::test(start_paused = true)]
async fn member_that_asks_one_source_to_slow_down_takes_the_others() {
    let mut world = World::new(|_, _| failure(429));
    let mut steps = created("rotator", 100);
    world.offer(&steps);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let asked = world.asked().len();
    // Eight in the first moment, then one at a time with a growing pause.
    assert!((10..=20).contains(&asked), "{asked}");
    let words = world.writer.trouble(&mesh());
    assert_eq!(words.as_deref(), Some("its API server asks to slow down (429)"));
    steps.extend([policy("other"), peer("another", 1, Action::Create)]);
    world.offer(&steps);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let others = world.asked().split_off(asked);
    let is_asked = |name: &str| others.iter().any(|line| line.ends_with(name));
    assert!(is_asked("policy-other") && is_asked("another-1"), "{others:?}");
}

#[tokio::test(start_paused = true)]
async fn refused_objects_wake_no_pass_and_share_one_backoff() {
    let mut world = World::new(|_, _| failure(403));
    let steps = created("a", 1000);
    world.run(&steps, Duration::from_secs(60)).await;
    // The first, one for the report of the refusal, and what that one's own end may add.
    assert!(world.passes <= 3, "{} passes", world.passes);
    let asked = world.asked().len();
    // A thousand at once, and fifty in each of sixty seconds.
    assert!((2_000..=4_000).contains(&asked), "{asked} requests");
    let words = "Peer a-0: the account may not create it (403): apply the member's RBAC manifests; and 999 more";
    assert_eq!(world.writer.trouble(&mesh()).as_deref(), Some(words));
    world.offer(&[]);
    assert_eq!(world.writer.trouble(&mesh()), None);
}

#[tokio::test(start_paused = true)]
async fn refusal_by_an_admission_policy_names_the_policys_lists() {
    let message =
        "peers.kilo.squat.ai \"a-1\" is forbidden: ValidatingAdmissionPolicy 'clustermesh' denied request: secret";
    let mut world = World::new(move |_, _| {
        let status =
            json!({"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden", "message": message});
        (403, Some(status))
    });
    world.run(&[peer("a", 1, Action::Create)], Duration::from_secs(1)).await;
    let words = "Peer a-1: an admission policy of the cluster refuses it (403): see the lists in the ConfigMap of deploy/admission.yaml there";
    assert_eq!(world.writer.trouble(&mesh()).as_deref(), Some(words));
}

#[tokio::test(start_paused = true)]
async fn conflicts_back_off_and_name_the_other_field_manager() {
    let mut world = World::new(|method, path| match method {
        "GET" => (200, Some(standing(path))),
        _ => failure(409),
    });
    let steps = [peer("a", 1, Action::Update)];
    world.run(&steps, Duration::from_secs(60)).await;
    assert!(world.passes <= 3, "{} passes", world.passes);
    let puts = world.asked().iter().filter(|line| line.starts_with("PUT")).count();
    assert!((4..=12).contains(&puts), "{puts}");
    let trouble = world.writer.trouble(&mesh()).expect("the conflict");
    assert!(
        trouble.starts_with("Peer a-1: field manager \"kubectl-edit\" changed it "),
        "{trouble}"
    );
    world.offer(&[]);
    assert_eq!(world.writer.trouble(&mesh()), None);
}

/// No 409 occurs between two writers that each wait for the other's write.
#[tokio::test(start_paused = true)]
async fn object_that_is_undone_again_and_again_backs_off_and_is_reported() {
    let mut world = World::new(|method, path| match method {
        "GET" => (200, Some(standing(path))),
        _ => (200, None),
    });
    let steps = [peer("a", 1, Action::Update)];
    // The watch shows the other's write 20 ms after ours.
    for _ in 0..3000 {
        world.offer(&steps);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let puts = world.asked().iter().filter(|line| line.starts_with("PUT")).count();
    assert!((5..=14).contains(&puts), "{puts} writes in a minute");
    let trouble = world.writer.trouble(&mesh()).expect("the contest");
    assert!(
        trouble.starts_with("Peer a-1: field manager \"kubectl-edit\" changed it "),
        "{trouble}"
    );
    world.offer(&[]);
    tokio::time::sleep(Duration::from_secs(200)).await;
    world.offer(&[]);
    assert_eq!(world.writer.trouble(&mesh()), None, "it rests");
}

#[tokio::test(start_paused = true)]
async fn member_in_trouble_is_asked_once_in_a_while() {
    let mut world = World::new(|_, _| failure(503));
    let mut steps = created("a", 100);
    steps.insert(0, policy("b"));
    world.run(&steps, Duration::from_secs(60)).await;
    assert!(world.passes <= 3, "{} passes", world.passes);
    let asked = world.asked();
    assert!((10..=40).contains(&asked.len()), "{}", asked.len());
    assert_eq!(
        asked
            .last()
            .map(|line| line.contains("policy-b") || line.contains("a-0")),
        Some(true)
    );
    assert_eq!(
        world.writer.trouble(&mesh()).as_deref(),
        Some("its API server fails (503)")
    );
}

#[tokio::test(start_paused = true)]
async fn policy_is_written_before_the_peers_of_its_source() {
    let mut world = World::new(|_, _| (201, None));
    let mut steps = created("a", 20);
    steps.insert(0, policy("a"));
    world.offer(&steps);
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(world.asked(), ["POST policy-a"]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.asked().len(), 21);
    assert!(!world.writer.busy());
}

#[tokio::test(start_paused = true)]
async fn peers_between_which_a_network_moves_are_written_one_by_one() {
    let mut world = World::new(|method, path| match method {
        "GET" => (200, Some(standing(path))),
        _ => (200, None),
    });
    let mut steps = [peer("a", 1, Action::Update), peer("a", 2, Action::Update)];
    steps.iter_mut().for_each(|step| step.fields = vec!["spec.allowedIPs"]);
    world.offer(&steps);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.asked(), ["GET a-1", "PUT a-1", "GET a-2", "PUT a-2"]);
}

#[tokio::test(start_paused = true)]
async fn refused_objects_do_not_use_up_the_pace_of_others() {
    let mut world = World::new(|_, _| failure(403));
    world.offer(&created("a", 2000));
    tokio::time::sleep(Duration::from_secs(45)).await;
    let asked = world.asked();
    let tried: std::collections::BTreeSet<&String> = asked.iter().collect();
    assert_eq!(tried.len(), 2000, "of {} requests", asked.len());
}

#[tokio::test(start_paused = true)]
async fn step_that_is_withdrawn_in_flight_is_not_sent_again() {
    for code in [403, 409, 429, 503] {
        let mut world = World::new(move |method, path| match method {
            "GET" => (200, Some(standing(path))),
            _ => failure(code),
        });
        world.offer(&[peer("a", 1, Action::Update)]);
        tokio::time::sleep(Duration::from_millis(15)).await;
        world.offer(&[peer("a", 2, Action::Update)]);
        tokio::time::sleep(Duration::from_secs(60)).await;
        let asked = world.asked();
        let puts = asked.iter().filter(|line| *line == "PUT a-1").count();
        assert_eq!(puts, 1, "{code}: {asked:?}");
        world.offer(&[]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(world.writer.trouble(&mesh()), None, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn cleared_writer_sends_nothing_more_and_ends() {
    let mut world = World::new(|_, _| failure(403));
    world.offer(&created("a", 10));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = world.asked().len();
    world.writer.clear();
    world.tasks.close();
    world.tasks.wait().await;
    assert_eq!((world.asked().len(), world.writer.busy()), (before, false));
}

#[test]
fn object_on_which_the_api_server_fails_is_refused_alone() {
    let one = peer("a", 1, Action::Update);
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
    for error in [answer(401), answer(503)] {
        assert!(matches!(refusal(&error, &one), Outcome::Unavailable(_)), "{error:?}");
    }
    assert!(matches!(refusal(&answer(429), &one), Outcome::Throttled(_)));
}
