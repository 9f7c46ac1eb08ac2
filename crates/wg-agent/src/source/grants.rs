//! Following the EndpointSlices of the Services that sandboxes may reach: a watch for each Service, begun and ended as policies
//! come and go, so that an agent reads of no other. What they come to is `clustermesh_agent_core::grants`'s.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use clustermesh_agent_core::grants::{Endpoint, Slice};
use clustermesh_api::names::{LABEL_MANAGED_BY, LABEL_SERVICE_NAME, LABEL_SLICE_MANAGED_BY, MANAGED_BY};
use clustermesh_core::mesh::{self, ObjectName};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client, runtime::watcher};
use tokio::{sync::watch, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    objects::protocol,
    store::Store,
    watch::{Seen, Sink, follow},
};

/// For logs, and the key of the trouble.
pub(crate) const KIND: &str = "EndpointSlice of a grant";

/// A Service is followed for so long after its last grant: one that comes back by then (a quarantine that ends, a policy that
/// is made anew) opens without a new list.
const LINGER: Duration = Duration::from_secs(600);

/// One Service that is followed.
struct Watch {
    stop: CancellationToken,
    task: JoinHandle<()>,
    /// Nobody is granted it; until when it is followed nevertheless.
    until: Option<Instant>,
}

impl Watch {
    async fn end(self) {
        self.stop.cancel();
        // It has to be gone before it may be begun anew, or the old one would write into the new one's shelf.
        let _ = self.task.await;
    }
}

/// Follows the slices of the Services in `wanted`, as that changes, until the token is cancelled.
pub(crate) async fn run(
    client: Client,
    store: Store,
    mut wanted: watch::Receiver<BTreeSet<ObjectName>>,
    stop: CancellationToken,
) {
    let mut running: BTreeMap<ObjectName, Watch> = BTreeMap::new();
    loop {
        let (granted, now) = (wanted.borrow_and_update().clone(), Instant::now());
        for (service, watch) in &mut running {
            watch.until = (!granted.contains(service)).then(|| watch.until.unwrap_or(now + LINGER));
        }
        let ended = running.extract_if(.., |_, watch| watch.until.is_some_and(|until| until <= now));
        for (service, watch) in ended.collect::<Vec<_>>() {
            watch.end().await;
            store.granted(|all| all.remove(&service).is_some());
            tracing::info!(%service, "no sandbox has been granted this Service for a while: not followed any more");
        }
        if running.is_empty() {
            // Nobody is left who would take it back.
            store.grants_failed(None);
        }
        for service in granted {
            running.entry(service).or_insert_with_key(|service| {
                tracing::info!(%service, "following the endpoints of a Service that is granted to a sandbox");
                begin(&client, &store, service, stop.child_token())
            });
        }
        let next = running.values().filter_map(|watch| watch.until).min();
        tokio::select! {
            () = stop.cancelled() => break,
            changed = wanted.changed() => if changed.is_err() { break },
            () = tokio::time::sleep_until(next.unwrap_or(now)), if next.is_some() => {}
        }
    }
    for watch in running.into_values() {
        watch.end().await;
    }
}

fn begin(client: &Client, store: &Store, service: &ObjectName, stop: CancellationToken) -> Watch {
    store.granted(|all| all.insert(service.clone(), Seen::Pending).is_some());
    let shelf = Shelf {
        store: store.clone(),
        service: service.clone(),
    };
    let task = tokio::spawn(follow(
        Api::<EndpointSlice>::namespaced(client.clone(), &service.namespace),
        watcher::Config::default().labels(&format!("{LABEL_SERVICE_NAME}={}", service.name)),
        |object| slice(&object),
        shelf,
        stop.clone(),
    ));
    Watch {
        stop,
        task,
        until: None,
    }
}

/// Where one Service's slices are put.
struct Shelf {
    store: Store,
    service: ObjectName,
}

impl Sink<Slice> for Shelf {
    fn change(&self, change: impl FnOnce(&mut Seen<Slice>) -> bool + Send) {
        self.store.grants_failed(None);
        self.store.granted(|all| all.get_mut(&self.service).is_some_and(change));
    }

    fn failed(&self, error: &watcher::Error) {
        self.store.grants_failed(Some(error));
    }
}

/// What counts of an EndpointSlice. Of one that we wrote, nothing: those mirror another member's Service here, and what a
/// sandbox is granted of this cluster is never somebody else's. The first address of an endpoint counts, as for kube-proxy.
pub(crate) fn slice(object: &EndpointSlice) -> Slice {
    let ours = |label: &&str| {
        let labels = object.metadata.labels.as_ref();
        labels
            .and_then(|all| all.get(*label))
            .is_some_and(|value| value == MANAGED_BY)
    };
    if [LABEL_MANAGED_BY, LABEL_SLICE_MANAGED_BY].iter().any(ours) {
        return Slice::default();
    }
    let ports = object.ports.iter().flatten().filter_map(|port| {
        let kind = match port.protocol.as_deref() {
            None | Some("TCP") => mesh::Protocol::Tcp,
            Some("UDP") => mesh::Protocol::Udp,
            Some("SCTP") => mesh::Protocol::Sctp,
            Some(_) => return None,
        };
        let number = u16::try_from(port.port?).ok().filter(|number| *number > 0)?;
        Some((protocol(kind), port.name.clone().unwrap_or_default(), number))
    });
    let endpoints = object.endpoints.iter().flatten().map(|endpoint| {
        let conditions = endpoint.conditions.clone().unwrap_or_default();
        Endpoint {
            addresses: endpoint
                .addresses
                .first()
                .and_then(|text| text.parse().ok())
                .into_iter()
                .collect(),
            node: endpoint.node_name.clone(),
            serving: conditions.serving.or(conditions.ready).unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
        }
    });
    Slice {
        ports: ports.collect(),
        endpoints: endpoints.collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use clustermesh_agent_core::policy::Protocol;
    use http::{Request, Response};
    use kube::client::Body;

    use super::*;

    /// An API server that has no EndpointSlice, or refuses to say so, and how often it was asked for a list.
    fn server(status: u16) -> (Client, Arc<AtomicUsize>) {
        let lists = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&lists);
        let service = tower::service_fn(move |request: Request<Body>| {
            let watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let counted = Arc::clone(&counted);
            async move {
                if watch {
                    return std::future::pending().await;
                }
                counted.fetch_add(1, Ordering::Relaxed);
                let none = r#"{"kind": "EndpointSliceList", "metadata": {"resourceVersion": "1"}, "items": []}"#;
                let response = Response::builder().status(status);
                response.body(Body::from(none.as_bytes().to_vec()))
            }
        });
        (Client::new(service, "default"), lists)
    }

    fn granted() -> BTreeSet<ObjectName> {
        let (namespace, name) = ("db".into(), "sql".into());
        BTreeSet::from([ObjectName { namespace, name }])
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_followed_is_no_trouble_when_it_is_not_followed_any_more() {
        let ((client, _), store, stop) = (server(403), Store::default(), CancellationToken::new());
        let (want, wanted) = watch::channel(granted());
        let _task = tokio::spawn(run(client, store.clone(), wanted, stop));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(store.world().errors.contains_key(KIND));
        want.send_replace(BTreeSet::new());
        tokio::time::sleep(LINGER + Duration::from_secs(1)).await;
        assert_eq!(store.world().errors, BTreeMap::new());
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_is_followed_for_a_while_after_its_last_grant_and_then_no_longer() {
        let (granted, none) = (granted(), BTreeSet::new());
        let ((client, lists), store, stop) = (server(200), Store::default(), CancellationToken::new());
        let (want, wanted) = watch::channel(granted.clone());
        let task = tokio::spawn(run(client, store.clone(), wanted, stop.clone()));
        let after = async |pause| {
            tokio::time::sleep(pause).await;
            (store.world().granted.len(), lists.load(Ordering::Relaxed))
        };
        let (moment, long) = (Duration::from_secs(1), LINGER - Duration::from_secs(1));
        assert_eq!(after(moment).await, (1, 1));
        for _ in 0..3 {
            want.send_replace(none.clone());
            assert_eq!(after(long).await, (1, 1), "still followed");
            want.send_replace(granted.clone());
            assert_eq!(after(moment).await, (1, 1), "granted again, and listed already");
        }
        assert_eq!(after(10 * LINGER).await, (1, 1), "granted");
        want.send_replace(none.clone());
        assert_eq!(after(long).await, (1, 1));
        want.send_replace(none);
        assert_eq!(after(2 * moment).await, (0, 1), "another change is no new grant");
        want.send_replace(granted);
        assert_eq!(after(moment).await, (1, 2));
        stop.cancel();
        task.await.expect("it ends");
    }

    fn object(labels: serde_json::Value) -> EndpointSlice {
        serde_json::from_value(serde_json::json!({
            "addressType": "IPv4", "metadata": {"name": "db-1", "labels": labels},
            "ports": [
                {"name": "sql", "port": 5432, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}, {"name": "any"},
                {"name": "odd", "port": 1, "protocol": "QUIC"}, {"name": "far", "port": 70000},
            ],
            "endpoints": [
                {"addresses": ["10.1.0.5", "10.1.0.6"], "nodeName": "n"},
                {"addresses": ["10.1.0.7"], "nodeName": "n", "conditions": {"ready": false, "serving": true, "terminating": true}},
                {"addresses": ["10.1.0.8"], "conditions": {"ready": false}},
                {"addresses": ["db.example.org"], "nodeName": "n"},
            ],
        }))
        .unwrap()
    }

    #[test]
    fn a_slice_is_read_as_kube_proxy_reads_it() {
        let at = |address: &str, node: Option<&str>, serving, terminating| Endpoint {
            addresses: address.parse().into_iter().collect(),
            node: node.map(str::to_owned),
            serving,
            terminating,
        };
        let want = Slice {
            ports: [
                (Protocol::Tcp, "sql".to_owned(), 5432),
                (Protocol::Udp, String::new(), 53),
            ]
            .into(),
            endpoints: vec![
                at("10.1.0.5", Some("n"), true, false),
                at("10.1.0.7", Some("n"), true, true),
                at("10.1.0.8", None, false, false),
                at("a name", Some("n"), true, false),
            ],
        };
        assert_eq!(slice(&object(serde_json::json!({LABEL_SERVICE_NAME: "db"}))), want);
    }

    #[test]
    fn a_slice_that_we_wrote_counts_for_nothing() {
        for label in [LABEL_MANAGED_BY, LABEL_SLICE_MANAGED_BY] {
            let ours = serde_json::json!({LABEL_SERVICE_NAME: "db", label: MANAGED_BY});
            assert_eq!(slice(&object(ours)), Slice::default(), "{label}");
        }
    }
}
