use clustermesh_core::status::Condition;
use kube::client::Body;

use super::*;
use crate::{feed::Changed, reconcile::mesh_feed};

/// A hub with ClusterMeshes. Its API server responds after a delay.
struct TestHub {
    client: Client,
    meshes: Feed<Arc<ClusterMesh>>,
    /// Method, path and body of each request.
    requests: Arc<Mutex<Vec<(String, serde_json::Value)>>>,
    readiness: Readiness,
}

fn mesh(name: &str, status: &serde_json::Value) -> serde_json::Value {
    serde_json::json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1"},
        "spec": {"clusters": []}, "status": status,
    })
}

fn id(name: &str) -> MeshId {
    MeshId {
        namespace: "ns".into(),
        name: name.into(),
    }
}

impl TestHub {
    /// Creates a hub with meshes of these names. It responds to each request after `delay` with `code`. With code 200 it also stores
    /// the status or finalizers of the request.
    fn new(names: &[&str], code: u16, delay: Duration) -> Self {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        let objects = Arc::new(Mutex::new(BTreeMap::new()));
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (log, objects) = (Arc::clone(&log), Arc::clone(&objects));
            async move {
                let path = request.uri().path().to_owned();
                let line = format!("{} {path}", request.method());
                let sent = request.into_body().collect_bytes().await.expect("a body");
                let sent: serde_json::Value = serde_json::from_slice(&sent).unwrap_or_default();
                log.lock().expect("not poisoned").push((line, sent.clone()));
                tokio::time::sleep(delay).await;
                let body = if code == 200 && path.contains("clustermeshes") {
                    let name = path.split('/').nth(7).expect("a name").to_owned();
                    let mut objects = objects.lock().expect("not poisoned");
                    let new = || mesh(&name, &serde_json::Value::Null);
                    let object: &mut serde_json::Value = objects.entry(name.clone()).or_insert_with(new);
                    if path.ends_with("/status") {
                        object["status"] = sent["status"].clone();
                    } else {
                        object["metadata"]["finalizers"] = sent["metadata"]["finalizers"].clone();
                    }
                    object["metadata"]["resourceVersion"] = "2".into();
                    object.clone()
                } else if code == 200 {
                    sent
                } else {
                    serde_json::json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "no", "reason": "no"})
                };
                let body = Body::from(serde_json::to_vec(&body).expect("JSON"));
                let answer = http::Response::builder().status(code).body(body);
                Ok::<_, std::convert::Infallible>(answer.expect("an answer"))
            }
        });
        let meshes = mesh_feed(Changed::default());
        for name in names {
            let object = serde_json::from_value(mesh(name, &serde_json::Value::Null)).expect("an object");
            meshes.put(object).expect("a feed without a budget");
        }
        Self {
            client: Client::new(service, "ns"),
            meshes,
            requests,
            readiness: Readiness::new(),
        }
    }

    fn writer(&self) -> HubWriter {
        let election = Election::of_leader(self.client.clone());
        HubWriter::start(
            self.client.clone(),
            None,
            self.meshes.clone(),
            election,
            self.readiness.clone(),
        )
    }

    fn object(&self, name: &str) -> Arc<ClusterMesh> {
        let name = ObjectName {
            namespace: "ns".into(),
            name: name.into(),
        };
        self.meshes.read(|rows| Arc::clone(&rows[&name].value))
    }

    fn desired(
        &self,
        name: &str,
        finalizer: Option<FinalizerChange>,
        ready_reason: Option<&'static str>,
    ) -> (MeshId, Desired) {
        let report = ready_reason.map(|reason| {
            let ready = Condition {
                kind: "Ready",
                status: true,
                reason,
                message: String::new(),
            };
            let notice = Notice {
                topic: "Ready".into(),
                reason: reason.into(),
                message: String::new(),
                is_warning: false,
                action: "Reconcile",
                node: None,
            };
            Report::with(vec![ready], vec![notice])
        });
        let desired = Desired {
            object: self.object(name),
            finalizer,
            report,
        };
        (id(name), desired)
    }

    /// Returns a summary of each request: the last part of its path, and the reason or the number of finalizers in its body.
    fn requests(&self) -> Vec<String> {
        let requests = self.requests.lock().expect("not poisoned");
        let summaries = requests.iter().map(|(line, sent)| {
            let reason = sent["status"]["conditions"][0]["reason"]
                .as_str()
                .or(sent["reason"].as_str());
            let finalizers = sent["metadata"]["finalizers"]
                .as_array()
                .map(|all| format!("{} finalizers", all.len()));
            let summary = reason.map(str::to_owned).or(finalizers).unwrap_or_default();
            format!("{} {summary}", line.rsplit('/').next().unwrap_or_default())
        });
        summaries.collect()
    }
}

async fn sleep_seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn slow_hub_does_not_get_outdated_reports() {
    let hub = TestHub::new(&["m"], 200, Duration::from_secs(3));
    let writer = hub.writer();
    for reason in ["First", "Second", "Third"] {
        writer.publish([hub.desired("m", None, Some(reason))].into());
        sleep_seconds(1).await;
    }
    sleep_seconds(60).await;
    // During the first request the report changes twice. A changed status is written before the Events of the previous one, so only the
    // last report gets an Event.
    assert_eq!(hub.requests(), ["status First", "status Third", "events Third"]);
    // An unchanged report is not written again.
    writer.publish([hub.desired("m", None, Some("Third"))].into());
    sleep_seconds(60).await;
    assert_eq!(hub.requests().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn finalizer_is_added_before_the_first_report() {
    let hub = TestHub::new(&["m"], 200, Duration::ZERO);
    let writer = hub.writer();
    writer.publish([hub.desired("m", Some(FinalizerChange::Add), Some("Converging"))].into());
    sleep_seconds(1).await;
    assert_eq!(
        hub.requests(),
        ["m 1 finalizers", "status Converging", "events Converging"]
    );
    assert!(has_finalizer(&hub.object("m")), "the feed has the finalizer");
}

#[tokio::test(start_paused = true)]
async fn finalizer_removal_after_conflict_waits_for_the_next_pass() {
    let hub = TestHub::new(&["m"], 409, Duration::ZERO);
    let mut with_finalizer = mesh("m", &serde_json::Value::Null);
    with_finalizer["metadata"]["finalizers"] = serde_json::json!([FINALIZER]);
    let with_finalizer = serde_json::from_value(with_finalizer).expect("an object");
    hub.meshes.put(with_finalizer).expect("a feed without a budget");
    let writer = hub.writer();
    let removal = || {
        [hub.desired(
            "m",
            Some(FinalizerChange::Remove { left_behind: vec![] }),
            Some("Deleting"),
        )]
        .into()
    };
    writer.publish(removal());
    sleep_seconds(60).await;
    assert_eq!(hub.requests(), ["m 0 finalizers"]);
    writer.publish(removal());
    sleep_seconds(60).await;
    assert_eq!(hub.requests(), ["m 0 finalizers"; 2]);
}

#[tokio::test(start_paused = true)]
async fn failed_writes_of_all_meshes_share_one_backoff() {
    let names: Vec<String> = (0..20).map(|n| format!("m-{n:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // The shared backoff ends at most ten times within the minute. Each time, the writer sends requests again. Code 403 may
    // concern one object only, so the writer tries each of the twenty meshes. Code 503 means an outage of the hub, so it tries
    // only `MAX_IN_FLIGHT` (4) of them.
    for (code, max_requests) in [(403, 20 * 10), (503, 4 * 10)] {
        let hub = TestHub::new(&names, code, Duration::ZERO);
        let writer = hub.writer();
        // Passes publish the same values ten times a second for a minute.
        for _ in 0..600 {
            writer.publish(
                names
                    .iter()
                    .map(|name| hub.desired(name, None, Some("Meshed")))
                    .collect(),
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let requests = hub.requests().len();
        assert!((4..=max_requests).contains(&requests), "{code}: {requests} requests");
    }
}

#[tokio::test(start_paused = true)]
async fn status_that_always_changes_is_written_at_a_limited_rate() {
    let hub = TestHub::new(&["m"], 200, Duration::ZERO);
    let writer = hub.writer();
    for n in 0..1000 {
        let reason = if n % 2 == 0 { "Meshed" } else { "Converging" };
        writer.publish([hub.desired("m", None, Some(reason))].into());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let requests = hub.requests.lock().expect("not poisoned");
    let count = |part: &str| requests.iter().filter(|(line, _)| line.contains(part)).count();
    let (statuses, events) = (count("/status"), count("/events"));
    // A burst of ten writes, then one write every 5 s for 100 s.
    assert!((25..=31).contains(&statuses), "{statuses}");
    assert!((10..=31).contains(&events), "{events}");
}

#[tokio::test(start_paused = true)]
async fn refused_write_is_a_remark_of_readyz() {
    let hub = TestHub::new(&["m"], 403, Duration::ZERO);
    let writer = hub.writer();
    writer.publish([hub.desired("m", None, Some("Meshed"))].into());
    sleep_seconds(1).await;
    let refused = "status: the hub refuses the status of a ClusterMesh (403): apply deploy/controller.yaml";
    assert_eq!(hub.readiness.remarks(), [refused]);
    // The Events of the ClusterMesh are published although its status is not written.
    assert!(
        hub.requests().contains(&"events Meshed".to_owned()),
        "{:?}",
        hub.requests()
    );
}

#[tokio::test(start_paused = true)]
async fn conflict_at_each_write_counts_as_refusal() {
    let hub = TestHub::new(&["m"], 409, Duration::ZERO);
    let writer = hub.writer();
    for turn in 0..MAX_CONFLICTS {
        assert_eq!(hub.readiness.remarks(), Vec::<String>::new(), "{turn}");
        writer.publish([hub.desired("m", None, Some("Meshed"))].into());
        sleep_seconds(1).await;
    }
    let [remark] = &*hub.readiness.remarks() else {
        panic!("{:?}", hub.readiness.remarks())
    };
    assert!(
        remark.contains("(409): another client changes it all the time"),
        "{remark}"
    );
}

#[tokio::test(start_paused = true)]
async fn clusters_with_objects_left_are_in_the_last_event() {
    let hub = TestHub::new(&["m"], 200, Duration::ZERO);
    let mut with_finalizer = mesh("m", &serde_json::Value::Null);
    with_finalizer["metadata"]["finalizers"] = serde_json::json!([FINALIZER]);
    let with_finalizer = serde_json::from_value(with_finalizer).expect("an object");
    hub.meshes.put(with_finalizer).expect("a feed without a budget");
    let left_behind = vec!["\"a\" (Secret ns/a key value)".to_owned()];
    let writer = hub.writer();
    writer.publish([hub.desired("m", Some(FinalizerChange::Remove { left_behind }), Some("Deleting"))].into());
    sleep_seconds(1).await;
    assert_eq!(hub.requests()[..2], ["events ObjectsLeft", "m 0 finalizers"]);
    let requests = hub.requests.lock().expect("not poisoned");
    let note = requests[0].1["note"].as_str().expect("a note");
    assert!(
        note.contains("left in cluster \"a\" (Secret ns/a key value)") && note.contains("kilo-clustermesh.io/mesh=m"),
        "{note}"
    );
}
