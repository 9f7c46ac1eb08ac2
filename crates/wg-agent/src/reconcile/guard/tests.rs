//! The order in which the table and the device are touched, told by two backends in memory that write into one list.

use std::sync::{Arc, Mutex};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer, compile},
    device::{ObservedPeers, diff},
    firewall::Firewall,
    policy::{Policy, Port, Protocol},
};

use super::*;
use crate::{
    device::{Altered, Configuration, DeviceError, Memory as DeviceMemory, Observed},
    firewall::{self, Listing},
};

type Calls = Arc<Mutex<Vec<String>>>;

/// Remembers, and tells what it was told.
struct Table {
    memory: firewall::Memory,
    calls: Calls,
}

impl Backend for Table {
    async fn observe(&mut self) -> Result<Option<Listing>, firewall::Error> {
        self.memory.observe().await
    }

    async fn run(&mut self, script: &str) -> Result<(), firewall::Error> {
        let what = if script.contains("delete table") {
            "table"
        } else {
            "elements"
        };
        self.calls.lock().unwrap().push(what.to_owned());
        self.memory.run(script).await
    }

    fn confirms(&self, listing: &Listing, firewall: &Firewall) -> Result<(), String> {
        self.calls.lock().unwrap().push("read back".to_owned());
        self.memory.confirms(listing, firewall)
    }

    async fn destroy(&mut self) -> Result<(), firewall::Error> {
        self.memory.destroy().await
    }
}

struct Told {
    memory: DeviceMemory,
    calls: Calls,
}

impl Device for Told {
    fn backend(&self) -> &'static str {
        "memory"
    }

    fn interface(&self) -> &str {
        "kilo0"
    }

    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        self.memory.configure(configuration)
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let mut calls = self.calls.lock().unwrap();
        calls.extend(changes.iter().map(|change| {
            let verb = if matches!(change, PeerChange::Remove(_)) {
                "out"
            } else {
                "in"
            };
            format!("{verb} {}", change.key().as_bytes()[0])
        }));
        self.memory.apply(changes)
    }

    fn observe(&self) -> Result<Observed, DeviceError> {
        self.memory.observe()
    }

    fn mend(&mut self, altered: &std::collections::BTreeSet<Altered>) -> Result<(), DeviceError> {
        self.memory.mend(altered)
    }

    fn close(self: Box<Self>) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// A node's table and device, and the guard between them.
struct World {
    guard: Guard,
    table: Keeper<Table>,
    device: Box<dyn Device>,
    calls: Calls,
    /// Routing could be made to keep sandboxes closed.
    locked: bool,
}

impl World {
    fn new() -> Self {
        let calls = Calls::default();
        let table = Table {
            memory: firewall::Memory::default(),
            calls: calls.clone(),
        };
        Self {
            guard: Guard::default(),
            table: Keeper::new(table),
            device: Box::new(Told {
                memory: DeviceMemory::new(),
                calls: calls.clone(),
            }),
            calls,
            locked: true,
        }
    }

    /// What a pass does with the two of them. Returns the calls, and whether it succeeded.
    async fn pass(&mut self, inputs: &Inputs) -> (Vec<String>, bool) {
        let compiled = compile(inputs);
        assert_eq!(compiled.refused, []);
        let done = self.steps(&compiled).await;
        (std::mem::take(&mut self.calls.lock().unwrap()), done.is_ok())
    }

    async fn steps(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        self.guard.look(&mut self.table, Some(&mut self.device)).await?;
        let now = Instant::now();
        self.guard
            .enforce(&mut self.table, Some(&mut self.device), compiled, now)
            .await?;
        if !self.locked {
            self.guard.refuse();
        }
        let mut wanted = compiled.peers.clone();
        wanted.retain(|key, _| self.guard.admits() || !compiled.gated.contains_key(key));
        let changes = diff(&self.device.observe().unwrap().peers, &wanted).unwrap_or_default();
        self.guard.entered(&compiled.gated);
        self.device.apply(&changes).unwrap();
        Ok(())
    }

    fn there(&self) -> ObservedPeers {
        self.device.observe().unwrap().peers
    }
}

fn key(n: u8) -> PublicKey {
    PublicKey::new([n; 32])
}

fn peer(n: u8, requires: Option<&str>) -> Peer {
    Peer {
        name: format!("peer-{n}"),
        revision: 1,
        public_key: key(n),
        preshared_key: None,
        endpoint: None,
        candidates: Vec::new(),
        keepalive: None,
        allowed_ips: vec![format!("100.80.0.{n}/32").parse().unwrap()],
        requires_policy: requires.map(str::to_owned),
    }
}

/// A sandbox of one node, whose policy is of this revision, and a plain peer.
fn inputs(revision: &str, port: u16) -> Inputs {
    let at = "10.1.0.5".parse().unwrap();
    let port = Port {
        protocol: Protocol::Tcp,
        port,
    };
    let sandbox = Policy {
        name: "s".to_owned(),
        sources: ["100.80.0.0/28".parse().unwrap()].into(),
        networks: ["100.80.0.0/28".parse().unwrap()].into(),
        sandbox: true,
        granted: [(at, port)].into(),
        revision: revision.to_owned(),
        ..Policy::default()
    };
    Inputs {
        node: Node {
            name: "n".to_owned(),
            public_key: key(99),
            wireguard_ips: ["100.66.0.1".parse().unwrap()].into(),
            device: "kilo0".parse().unwrap(),
            listen_port: 51820,
            mtu: 1420,
            underlay: "eth0".parse().unwrap(),
            underlay_addresses: [].into(),
            addresses: [].into(),
            pod_cidrs: ["10.1.0.0/24".parse().unwrap()].into(),
        },
        throw: [].into(),
        api_servers: [].into(),
        nodes: [].into(),
        pods_elsewhere: [].into(),
        peers: vec![peer(1, Some(&format!("s@{revision}"))), peer(200, None)],
        policies: vec![sandbox],
        earlier: [].into(),
        narrow: [].into(),
        grant_timeout: std::time::Duration::from_secs(900),
        new_flows: 1000,
    }
}

#[tokio::test]
async fn a_sandboxs_peer_comes_in_when_the_table_was_read_back() {
    let mut world = World::new();
    let (calls, well) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["table", "read back", "in 1", "in 200"]);
    assert!(well);
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["read back"], "the next pass finds it done");
}

#[tokio::test]
async fn a_sandboxs_peer_stays_while_its_policy_is_changed_and_leaves_before_it_is_forgotten() {
    let mut world = World::new();
    world.pass(&inputs("a", 5432)).await;
    let (calls, _) = world.pass(&inputs("b", 5433)).await;
    assert_eq!(calls, ["elements", "read back"]);
    // An endpoint that moves is no change of the policy: its elements are all there is to it.
    let (calls, _) = world.pass(&inputs("b", 5434)).await;
    assert_eq!(calls, ["elements", "read back"]);
    let mut other = inputs("b", 5434);
    other.policies[0].name = "t".to_owned();
    other.peers[0].requires_policy = Some("t@b".to_owned());
    let (calls, _) = world.pass(&other).await;
    assert_eq!(calls, ["out 1", "read back", "in 1"], "another policy altogether");
    let mut gone = other;
    gone.policies.clear();
    gone.peers.remove(0);
    let (calls, _) = world.pass(&gone).await;
    assert_eq!(
        calls,
        ["out 1", "table"],
        "before the table forgets that it is a sandbox"
    );
}

#[tokio::test]
async fn a_table_that_is_lost_costs_a_sandbox_its_peer_before_anything_else() {
    let mut world = World::new();
    world.pass(&inputs("a", 5432)).await;
    world.table.backend().memory.scripts.clear();
    let looked = world.guard.look(&mut world.table, Some(&mut world.device)).await;
    assert_eq!((looked, world.guard.left()), (Ok(()), vec![key(1)]));
    assert_eq!(world.there().into_keys().collect::<Vec<_>>(), [key(200)]);
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["out 1", "table", "read back", "in 1"]);
    // Another hand wrote something.
    world.table.backend().memory.scripts.push("add rule".to_owned());
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["out 1", "table", "read back", "in 1"]);
}

#[tokio::test]
async fn a_table_that_cannot_be_written_or_reads_otherwise_keeps_a_sandboxs_peer_out() {
    let mut world = World::new();
    world.pass(&inputs("a", 5432)).await;
    world.table.backend().memory.refuse = vec!["element".to_owned(), "table".to_owned()];
    let (calls, well) = world.pass(&inputs("a", 5433)).await;
    assert_eq!(calls, ["elements", "table", "out 1"]);
    assert!(!well);
    let left = [world.guard.left(), world.guard.left()];
    assert_eq!(left, [vec![key(1)], vec![]], "told once, although the pass failed");
    world.table.backend().memory.refuse.clear();
    world.table.backend().memory.lies = true;
    let (calls, _) = world.pass(&inputs("a", 5433)).await;
    assert_eq!(calls, ["elements", "read back"]);
    assert_eq!(world.there().into_keys().collect::<Vec<_>>(), [key(200)]);
    world.table.backend().memory.lies = false;
    let (calls, _) = world.pass(&inputs("a", 5433)).await;
    assert_eq!(calls, ["read back", "in 1"]);
}

#[tokio::test]
async fn routing_that_does_not_close_a_sandbox_keeps_its_peer_out() {
    let mut world = World::new();
    world.locked = false;
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["table", "read back", "in 200"]);
    world.locked = true;
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["read back", "in 1"]);
    world.locked = false;
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["read back", "out 1"]);
}

#[tokio::test]
async fn whom_an_earlier_process_left_in_the_device_is_let_out_unless_the_table_stands() {
    let mut world = World::new();
    world.pass(&inputs("a", 5432)).await;
    world
        .device
        .apply(&[PeerChange::Add(key(77), Default::default())])
        .unwrap();
    world.calls.lock().unwrap().clear();
    // The next process knows neither whom it may have let in, nor the table.
    world.guard = Guard::default();
    world.table.backend().memory.scripts.clear();
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(calls, ["out 1", "out 77", "table", "read back", "in 1"]);
    world.guard = Guard::default();
    let (calls, _) = world.pass(&inputs("a", 5432)).await;
    assert_eq!(
        calls,
        ["read back", "read back"],
        "it stands as it is wanted: nobody is disturbed"
    );
}
