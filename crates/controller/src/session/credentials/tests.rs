//! The clock of these tests is paused (`start_paused`), so their sleeps take no time.

use std::sync::atomic::{AtomicBool, Ordering};

use clustermesh_access::{kubeconfig::HubHosts, memory::Memory};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};
use http::{Request, Response};
use kube::client::Body;
use serde_json::json;

use super::*;
use crate::election::Election;

/// Returns a hub with a Secret that the controller may not read while `denied` is true.
fn hub(denied: &Arc<AtomicBool>) -> Arc<Hub> {
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {cluster: k, user: u}\n\
                      clusters:\n- name: k\n  cluster: {server: https://192.0.2.1:6443, certificate-authority-data: Y2E=}\n\
                      users:\n- name: u\n  user: {token: t}\n";
    let text = serde_json::to_value(k8s_openapi::ByteString(kubeconfig.into())).expect("base64");
    let list = json!({"apiVersion": "v1", "kind": "SecretList", "metadata": {"resourceVersion": "1"}, "items": [
        {"metadata": {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "1"}, "data": {"value": text}},
    ]});
    let denied = Arc::clone(denied);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (denied, list) = (Arc::clone(&denied), list.clone());
        async move {
            if request.uri().query().is_some_and(|query| query.contains("watch=true"))
                && !denied.load(Ordering::Relaxed)
            {
                // The watch lasts long enough to count as established (`ESTABLISHED_AFTER` in `feed::follow` is 20 s).
                tokio::time::sleep(Duration::from_secs(25)).await;
                return Ok::<_, std::convert::Infallible>(Response::new(Body::empty()));
            }
            let (code, body) = if denied.load(Ordering::Relaxed) {
                (
                    403,
                    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "", "message": ""}),
                )
            } else {
                (200, list)
            };
            let body = Body::from(body.to_string().into_bytes());
            Ok(Response::builder().status(code).body(body).expect("an answer"))
        }
    });
    let client = Client::new(service, "ns");
    Arc::new(Hub {
        election: Election::of_leader(client.clone()),
        client,
        id: "hub".into(),
        hosts: HubHosts::default(),
        memory: Memory::new(1 << 20, |_, _| {}),
        namespaces: HubNamespaces::new(&[], &[], &[], "ns"),
        settings: Settings::default(),
    })
}

fn are_usable(credentials: &mut watch::Receiver<Credentials>) -> bool {
    matches!(&*credentials.borrow_and_update(), Credentials::Ready(..))
}

#[tokio::test(start_paused = true)]
async fn client_is_dropped_only_if_its_secret_stays_forbidden() {
    let identity = ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: "a".into(),
        key: "value".into(),
        context: None,
    };
    let denied = Arc::new(AtomicBool::new(false));
    let (hub, mut tasks) = (hub(&denied), JoinSet::new());
    let account = hub.memory.account("a");
    let mut credentials = follow(&identity, &hub, &account, &mut tasks);
    credentials.changed().await.expect("watched");
    assert!(are_usable(&mut credentials));

    // The open watch ends after 25 s of these 60 s. In the other 35 s, less than `DENIED_AFTER` (60 s), the Secret is denied.
    denied.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(60)).await;
    denied.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!credentials.has_changed().expect("watched"), "the client stays");

    // If the Secret is denied for longer, the credentials count as missing, until the Secret can be read again.
    denied.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(180)).await;
    let Credentials::Missing(why) = credentials.borrow_and_update().clone() else {
        panic!("the client is still in use");
    };
    assert!(why.contains("Secret ns/a") && why.contains("(403)"), "{why}");
    denied.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(are_usable(&mut credentials));
}
