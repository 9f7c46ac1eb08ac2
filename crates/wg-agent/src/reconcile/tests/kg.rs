//! Tests the passes of an agent on a node that kg serves, served, or may serve again. The backends are in memory.

use std::time::UNIX_EPOCH;

use clustermesh_agent_core::routes::{self, Routes};
use clustermesh_api::names::NODE_AGENT;

use super::{super::device::OpenDevice, *};
use crate::device::Memory as MemoryDevice;

/// A store with one Node, the agent's own. Its annotation `last-seen` of kg is this many seconds old; `None` = kg removed the annotation.
fn cluster(last_seen_ago: Option<u64>) -> Store {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let own = ParsedNode {
        own: Some(OwnNode {
            kg_seen: last_seen_ago.map(|ago| i64::try_from(now - ago).unwrap()),
            ..OwnNode::default()
        }),
        ..ParsedNode::default()
    };
    let saved = SavedObjects {
        nodes: [("a".to_owned(), own)].into(),
        ..SavedObjects::default()
    };
    let store = Store::new(Metrics::default(), Some(saved));
    store.use_cache();
    store
}

/// The agent's routes in the kernel, and the interface's address. kg uses the same address.
fn agent_routes() -> Routes {
    routes::desired(&routes::Plan {
        addresses: ["100.66.0.9".parse().unwrap()].into(),
        peers: ["10.1.0.0/24".parse().unwrap()].into(),
        mesh: ["10.1.0.0/16".parse().unwrap()].into(),
        ..routes::Plan::default()
    })
}

async fn table_exists(agent: &mut Agent) -> bool {
    agent.deps.kernel.firewall.backend().observe().await.unwrap().is_some()
}

#[tokio::test]
async fn agent_removes_its_state_when_kg_is_back() {
    let device = MemoryDevice::new();
    let (mut agent, published, _directory) = agent(Box::new(|_| unreachable!("kg owns the tunnel")));
    agent.device.open = Some(OpenDevice {
        device: Box::new(device.clone()),
        mtu: 1380,
        key: agent.deps.key.public(),
        backend_reason: "",
    });
    agent.deps.kernel.routing.routes = agent_routes();
    agent.deps.kernel.firewall.backend().run("table").await.unwrap();
    agent.deps.cluster.store = cluster(Some(5));
    assert!(!agent.pass().await);
    let kg_routes = Routes {
        addresses: agent_routes().addresses,
        ..Routes::default()
    };
    assert_eq!(agent.deps.kernel.routing.routes, kg_routes);
    assert!(!table_exists(&mut agent).await);
    assert!(agent.device.open.is_none() && agent.applied.is_none());
    // kg takes the kernel device over, so the agent must not close it.
    assert!(!device.is_closed());
    let withdrawn = DesiredAnnotations {
        status: [(NODE_AGENT, None)].into(),
        ..DesiredAnnotations::default()
    };
    assert_eq!(*published.borrow(), withdrawn);
    // kg exits and removes the annotation; it may restart at once.
    agent.deps.cluster.store = cluster(None);
    assert!(!agent.pass().await);
    assert_eq!(agent.deps.kernel.routing.routes, kg_routes);
    assert!(!table_exists(&mut agent).await);
}

#[tokio::test]
async fn table_that_could_not_be_removed_is_removed_by_the_next_pass() {
    let (mut agent, ..) = agent(Box::new(|_| unreachable!("kg owns the tunnel")));
    // An earlier process wrote routes and table.
    agent.deps.kernel.routing.routes = agent_routes();
    let table = agent.deps.kernel.firewall.backend();
    table.run("table").await.unwrap();
    table.refuse = vec!["destroy".to_owned()];
    agent.deps.cluster.store = cluster(Some(5));
    assert!(!agent.pass().await);
    assert!(table_exists(&mut agent).await);
    agent.deps.kernel.firewall.backend().refuse.clear();
    assert!(!agent.pass().await);
    assert!(!table_exists(&mut agent).await);
}

#[tokio::test]
async fn table_of_policy_mode_is_not_removed() {
    let (mut agent, ..) = agent(Box::new(|_| unreachable!("kg owns the tunnel")));
    // An agent in policy mode writes a firewall table, but no routes and no policy routing rules.
    agent.deps.kernel.firewall.backend().run("table").await.unwrap();
    agent.deps.cluster.store = cluster(Some(5));
    assert!(!agent.pass().await);
    assert!(table_exists(&mut agent).await);
}

#[tokio::test]
async fn pass_writes_nothing_while_another_program_has_the_device() {
    let (mut agent, published, _directory) = agent(Box::new(|_| Err(DeviceError::Exists("kilo0".to_owned()))));
    // kg does not check in, but its interface exists: kg left it behind, or is about to start.
    agent.deps.cluster.store = cluster(None);
    agent.underlay.set(BTreeSet::new(), underlay(), Instant::now());
    assert!(!agent.pass().await);
    assert_eq!(agent.deps.kernel.routing.log, []);
    assert!(!table_exists(&mut agent).await);
    assert_eq!(*published.borrow(), DesiredAnnotations::default());
}
