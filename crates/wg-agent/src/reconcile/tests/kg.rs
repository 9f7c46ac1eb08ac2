//! The pass on a node that kg serves, served, or may serve again; over backends in memory.

use std::time::UNIX_EPOCH;

use clustermesh_agent_core::routes::{self, Routes};
use clustermesh_api::names::NODE_AGENT;
use clustermesh_daemon::Readiness;

use super::*;
use crate::firewall::Backend as _;
use crate::{
    args::Mtu,
    cache::{Kept, Saved},
    device::{Backend, Memory as MemoryDevice},
    firewall, identity,
    publish::Wanted,
    route::Memory as Routing,
    source::objects::OwnNode,
};

type Agent = Reconciler<Routing, firewall::Memory>;

/// An agent, and what it publishes.
fn agent(open: Opener) -> (Agent, watch::Receiver<Wanted>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let (publish, published) = watch::channel(Wanted::default());
    let agent = Reconciler::new(Parts {
        key: identity::key::load_or_create(&file("key")).unwrap(),
        server: Server {
            host: Ok("192.0.2.1".parse().unwrap()),
            port: 6443,
        },
        store: Store::default(),
        routing: Routing::default(),
        firewall: Keeper::new(firewall::Memory::default()),
        open,
        names: watch::channel(BTreeSet::new()).0,
        publish,
        bypassed: watch::channel(None).1,
        kept: watch::channel(Kept {
            saved: None,
            confirmed: Stamp::default(),
            live: Live::default(),
        })
        .0,
        cache: Cache {
            confirmed: Stamp::default(),
            step: Duration::from_secs(60),
        },
        live: Live::default(),
        metrics: Metrics::default(),
        troubles: Troubles::new(Readiness::new(), Metrics::default()),
        dump: Dump::default(),
        config: Config {
            node_name: "a".to_owned(),
            kubeconfig: None,
            backend: Backend::Auto,
            interface: "kilo0".parse().unwrap(),
            port: 51820,
            range: identity::address::Range::new("100.66.0.0/16".parse().unwrap()).unwrap(),
            key_file: file("key"),
            cache_file: file("cache"),
            cache_max_age: Duration::from_secs(3600),
            mtu: Mtu::Fixed(1380),
            offload: true,
            bypass: Vec::new(),
            listen: "127.0.0.1:0".parse().unwrap(),
            metrics_per_peer: false,
        },
    });
    (agent, published, directory)
}

/// The cluster as it is read, where kg wrote `last-seen` so many seconds ago, or removed it.
fn cluster(kg: Option<u64>) -> Store {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let own = NodeSeen {
        own: Some(OwnNode {
            kg_seen: kg.map(|ago| i64::try_from(now - ago).unwrap()),
            ..OwnNode::default()
        }),
        ..NodeSeen::default()
    };
    let saved = Saved {
        nodes: [("a".to_owned(), own)].into(),
        ..Saved::default()
    };
    let store = Store::new(Metrics::default(), Some(saved));
    store.remember();
    store
}

/// What an agent leaves in the kernel, with kg's own address on the interface.
fn standing() -> Routes {
    routes::desired(&routes::Plan {
        addresses: ["100.66.0.9".parse().unwrap()].into(),
        peers: ["10.1.0.0/24".parse().unwrap()].into(),
        mesh: ["10.1.0.0/16".parse().unwrap()].into(),
        ..routes::Plan::default()
    })
}

async fn table_stands(agent: &mut Agent) -> bool {
    agent.parts.firewall.backend().observe().await.unwrap().is_some()
}

#[tokio::test]
async fn agent_withdraws_what_it_wrote_where_kg_is_back() {
    let device = MemoryDevice::new();
    let (mut agent, published, _directory) = agent(Box::new(|_| unreachable!("the tunnel is kg's")));
    agent.device = Some((Box::new(device.clone()), 1380, agent.parts.key.public()));
    agent.parts.routing.routes = standing();
    agent.parts.firewall.backend().run("table").await.unwrap();
    agent.parts.store = cluster(Some(5));
    assert!(!agent.pass().await);
    let kgs = Routes {
        addresses: standing().addresses,
        ..Routes::default()
    };
    assert_eq!(agent.parts.routing.routes, kgs);
    assert!(!table_stands(&mut agent).await);
    assert!(agent.device.is_none() && agent.current.is_none());
    // kg took a device of the kernel over.
    assert!(!device.is_closed());
    let withdrawn = Wanted {
        status: [(NODE_AGENT, None)].into(),
        ..Wanted::default()
    };
    assert_eq!(*published.borrow(), withdrawn);
    // kg ends and removes the annotation, to be back in a moment.
    agent.parts.store = cluster(None);
    assert!(!agent.pass().await);
    assert_eq!(agent.parts.routing.routes, kgs);
    assert!(!table_stands(&mut agent).await);
}

#[tokio::test]
async fn table_of_policy_mode_is_not_withdrawn() {
    let (mut agent, ..) = agent(Box::new(|_| unreachable!("the tunnel is kg's")));
    agent.parts.firewall.backend().run("table").await.unwrap();
    agent.parts.store = cluster(Some(5));
    assert!(!agent.pass().await);
    assert!(table_stands(&mut agent).await);
}

#[tokio::test]
async fn nothing_is_written_while_another_program_has_the_device() {
    let (mut agent, published, _directory) = agent(Box::new(|_| Err(DeviceError::Exists("kilo0".to_owned()))));
    // kg was killed long ago, or is about to start; its interface stands.
    agent.parts.store = cluster(None);
    agent.drift.saw(BTreeSet::new(), underlay(), Instant::now());
    assert!(!agent.pass().await);
    assert_eq!(agent.parts.routing.log, []);
    assert!(!table_stands(&mut agent).await);
    assert_eq!(*published.borrow(), Wanted::default());
}
