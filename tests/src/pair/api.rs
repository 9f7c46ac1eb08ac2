//! A minimal API server inside a network namespace: lists, watches and merge patches of a few kinds, and the Nodes as a `Table`,
//! without any validation. Selectors are ignored. It is for machines on which no real API server can run, such as an emulated
//! processor.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::{Value, json};

use crate::netns::NetNs;

pub const NODES: &str = "/api/v1/nodes";
pub const PEERS: &str = "/apis/kilo.squat.ai/v1alpha1/peers";
pub const POLICIES: &str = "/apis/kilo.squat.ai/v1alpha1/peerpolicies";
pub const KUBERNETES_SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
/// EndpointSlices of granted Services. This server ignores label selectors, so these need another namespace than the
/// EndpointSlice of the API server.
pub const GRANTED_SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices";
/// Collections that a gateway reads: SandboxAccesses, its own SandboxGateway, and granted Services.
pub const ACCESSES: &str = "/apis/kilo.squat.ai/v1alpha1/sandboxaccesses";
pub const GATEWAYS: &str = "/apis/kilo.squat.ai/v1alpha1/namespaces/clustermesh-gateway/sandboxgateways";
pub const SERVICES: &str = "/api/v1/namespaces/team/services";
/// Collections that kube-proxy watches.
pub const ALL_SERVICES: &str = "/api/v1/services";
pub const ALL_SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const SERVICE_CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";
const CSI_NODES: &str = "/apis/storage.k8s.io/v1/csinodes";
const COLLECTIONS: [&str; 12] = [
    NODES,
    CSI_NODES,
    PEERS,
    POLICIES,
    KUBERNETES_SLICES,
    GRANTED_SLICES,
    ACCESSES,
    GATEWAYS,
    SERVICES,
    ALL_SERVICES,
    ALL_SLICES,
    SERVICE_CIDRS,
];
/// The duration of a watch. After it, clients start another watch.
const WATCH_DURATION: Duration = Duration::from_secs(60);

/// The server. Its threads run until the test process ends.
#[derive(Clone)]
pub struct Api {
    shared: Arc<Shared>,
    port: u16,
}

struct Shared {
    store: Mutex<Store>,
    changed: Condvar,
    /// While set, new connections are closed without a response.
    is_unresponsive: AtomicBool,
}

struct Store {
    revision: u64,
    /// Objects by the path of their collection, then by name.
    objects: BTreeMap<String, BTreeMap<String, Value>>,
    /// Collection and watch event. The resourceVersion of an event is its position, counted from 1.
    events: Vec<(String, Value)>,
}

impl Api {
    /// Starts the server on the namespace's loopback.
    pub fn start(ns: &NetNs) -> Self {
        let listener = ns.enter(|| TcpListener::bind("127.0.0.1:0")).expect("listen");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared::new());
        let served = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = served.clone();
                // `None` = no complete response was sent. The client sees the closed connection.
                thread::spawn(move || answer(&served, &stream));
            }
        });
        Self { shared, port }
    }

    /// A kubeconfig for this server.
    pub fn kubeconfig(&self) -> String {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://127.0.0.1:{}", self.port)}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        config.to_string()
    }

    /// While this is set, the server closes new connections without a response. Open watches continue.
    pub fn set_unresponsive(&self, unresponsive: bool) {
        self.shared.is_unresponsive.store(unresponsive, Ordering::Release);
    }

    /// Creates or replaces an object. `collection` is the path of its collection, such as [`NODES`].
    pub fn put(&self, collection: &str, object: Value) {
        self.shared.put(collection, object);
    }

    pub fn delete(&self, collection: &str, name: &str) {
        let mut store = self.shared.store();
        let gone = store.objects.get_mut(collection).and_then(|all| all.remove(name));
        store.apply_event(collection, "DELETED", gone.expect("an object of this name"));
        self.shared.changed.notify_all();
    }

    pub fn get(&self, collection: &str, name: &str) -> Value {
        self.shared.store().objects[collection][name].clone()
    }
}

impl Store {
    fn read(&self, path: &str) -> Option<Value> {
        if let Some(all) = self.objects.get(path) {
            let items: Vec<&Value> = all.values().collect();
            let (api_version, kind) = list_type(path);
            return Some(json!({"apiVersion": api_version, "kind": kind, "items": items,
                               "metadata": {"resourceVersion": self.revision.to_string()}}));
        }
        let (collection, name) = path.rsplit_once('/')?;
        self.objects.get(collection)?.get(name).cloned()
    }

    /// The Nodes as a `Table`, as for `kubectl get`, with the columns that the agent reads.
    fn table_of_nodes(&self) -> Value {
        let columns = ["Name", "Internal-IP", "External-IP"].map(|name| json!({"name": name}));
        let rows = self.objects[NODES].values().map(|node| {
            let addresses = node["status"]["addresses"].as_array().into_iter().flatten();
            let mut internal = addresses.filter(|address| address["type"] == "InternalIP");
            let internal = internal
                .next()
                .map_or(json!("<none>"), |address| address["address"].clone());
            json!({"cells": [node["metadata"]["name"], internal, "<none>"]})
        });
        json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": columns, "rows": rows.collect::<Vec<_>>()})
    }

    fn put(&mut self, collection: &str, object: Value) {
        let name = object["metadata"]["name"].as_str().expect("a name");
        let known = self.objects[collection].contains_key(name);
        self.apply_event(collection, if known { "MODIFIED" } else { "ADDED" }, object);
    }

    /// A merge patch (RFC 7386), limited to annotations and to a whole status.
    fn merge(&mut self, path: &str, patch: &Value) -> Option<Value> {
        let object_path = path.strip_suffix("/status");
        let mut object = self.read(object_path.unwrap_or(path))?;
        if object_path.is_some() {
            let mut status = patch["status"].as_object()?.clone();
            status.retain(|_, value| !value.is_null());
            object["status"] = status.into();
        } else {
            for (key, value) in patch["metadata"]["annotations"].as_object()? {
                if !object["metadata"]["annotations"].is_object() {
                    object["metadata"]["annotations"] = json!({});
                }
                let annotations = object["metadata"]["annotations"].as_object_mut()?;
                if value.is_null() {
                    annotations.remove(key);
                } else {
                    annotations.insert(key.clone(), value.clone());
                }
            }
        }
        let path = object_path.unwrap_or(path);
        self.put(path.rsplit_once('/')?.0, object);
        self.read(path)
    }

    /// Gives the object the next resourceVersion, stores it unless `what` is `DELETED`, and records the watch event.
    fn apply_event(&mut self, collection: &str, what: &str, mut object: Value) {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        if what != "DELETED" {
            let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
            let all = self.objects.get_mut(collection).expect("a served collection");
            all.insert(name, object.clone());
        }
        self.events
            .push((collection.to_owned(), json!({"type": what, "object": object})));
    }
}

impl Shared {
    fn new() -> Self {
        let store = Store {
            revision: 0,
            objects: COLLECTIONS
                .map(|collection| (collection.to_owned(), BTreeMap::new()))
                .into(),
            events: Vec::new(),
        };
        Self {
            store: Mutex::new(store),
            changed: Condvar::new(),
            is_unresponsive: AtomicBool::new(false),
        }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().expect("the store")
    }

    fn put(&self, collection: &str, object: Value) {
        self.store().put(collection, object);
        self.changed.notify_all();
    }

    fn read(&self, path: &str) -> Option<Value> {
        self.store().read(path)
    }

    /// Holds the lock while it reads and writes the object, so that no other write is lost.
    fn merge(&self, path: &str, patch: &Value) -> Option<Value> {
        let merged = self.store().merge(path, patch);
        self.changed.notify_all();
        merged
    }
}

/// Answers one request and closes the connection.
fn answer(shared: &Shared, stream: &TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (mut length, mut wants_table) = (0, false);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        if header.trim().is_empty() {
            break;
        }
        let (name, value) = header.split_once(':')?;
        wants_table |= name.eq_ignore_ascii_case("accept") && value.contains("as=Table");
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    if shared.is_unresponsive.load(Ordering::Acquire) {
        return None;
    }
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let parameter = |key: &str| {
        query
            .split('&')
            .find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
    };
    if parameter("watch").is_some() {
        let from = parameter("resourceVersion").and_then(|at| at.parse().ok()).unwrap_or(0);
        return watch(shared, stream, path, from);
    }
    let (code, body) = match method.as_str() {
        "GET" if wants_table && path == NODES => Some(shared.store().table_of_nodes()),
        "GET" => shared.read(path),
        "PATCH" => shared.merge(path, &serde_json::from_slice(&body).ok()?),
        _ => None,
    }
    .map_or_else(
        || {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
                                "message": format!("{method} {path} is not served"), "code": 404});
            ("404 Not Found", status)
        },
        |found| ("200 OK", found),
    );
    let text = body.to_string();
    write!(
        &mut &*stream,
        "HTTP/1.1 {code}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )
    .ok()
}

/// `apiVersion` and `kind` of a list. Go clients compare them with the kind they requested.
fn list_type(path: &str) -> (String, &'static str) {
    let words: Vec<&str> = path.split('/').collect();
    let api_version = match words[..] {
        ["", "api", version, ..] => version.to_owned(),
        ["", "apis", group, version, ..] => format!("{group}/{version}"),
        _ => panic!("{path} is no collection"),
    };
    let kind = match words.last().copied() {
        Some("nodes") => "NodeList",
        Some("services") => "ServiceList",
        Some("endpointslices") => "EndpointSliceList",
        Some("servicecidrs") => "ServiceCIDRList",
        _ => "List",
    };
    (api_version, kind)
}

/// Sends the collection's events after `from` for [`WATCH_DURATION`], one per line, with chunked encoding.
fn watch(shared: &Shared, mut stream: &TcpStream, collection: &str, mut from: usize) -> Option<()> {
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).ok()?;
    let until = std::time::Instant::now() + WATCH_DURATION;
    while let Some(left) = until.checked_duration_since(std::time::Instant::now()) {
        let store = shared.store();
        let (store, _) = shared
            .changed
            .wait_timeout_while(store, left, |store| store.events.len() <= from)
            .expect("the store");
        let new_events = store.events[from..].iter().filter(|(of, _)| of == collection);
        let text: String = new_events.map(|(_, event)| format!("{event}\n")).collect();
        from = store.events.len();
        drop(store);
        if !text.is_empty() {
            write!(stream, "{:x}\r\n{text}\r\n", text.len()).ok()?;
        }
    }
    stream.write_all(b"0\r\n\r\n").ok()
}
