//! Keeps the cluster's Nodes up to date without a watch of all of them.
//!
//! A kubelet writes the status of its Node at least every five minutes. A watch of all Nodes receives the whole Node each time:
//! with 1,000 Nodes of 30 kB, this is 100 kB/s for each agent. What the agent needs of another Node seldom changes
//! ([`ParsedNode`]). So it watches only its own Node, and reads another Node when it is new, changed or incomplete, which it learns
//! from:
//!
//! - CSINodes, which it watches. Each kubelet creates one next to its Node; it is deleted with the Node, so that a new one with the same
//!   name has another UID. Otherwise it changes only with the node's storage drivers.
//! - the table of Nodes that `kubectl get nodes` shows, which takes about 250 bytes for each Node. The agent requests it at an interval
//!   that grows with the number of Nodes. It shows Nodes without a kubelet, and changed addresses.
//! - its own last read of a new Node, which may lack the pod CIDRs and the WireGuard address. A Node gets them only after some
//!   seconds, so the agent reads it again while they are missing.
//!
//! The table does not show the WireGuard addresses of Nodes. Therefore all Nodes are listed again after long intervals, and after this node
//! has taken a new WireGuard address, because another node may have taken the same one at the same time.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clustermesh_daemon::random;
use k8s_openapi::api::{core::v1::Node, storage::v1::CSINode};
use kube::{Api, Client, ResourceExt, api::ListParams, runtime::watcher};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    objects::ParsedNode,
    store::{StoreSink, is_refusal},
    watch::{WatchSink, WatchedKind, backoff, watch_kind},
};

mod table;

/// The number of Nodes in one page of a list.
const PAGE: u32 = 100;
/// The shortest time between two requests for the table.
const TABLE_AT_LEAST: Duration = Duration::from_secs(10);
/// The time between two requests for the table is this time multiplied by the number of Nodes: 500 bytes a second.
const TABLE_PER_NODE: Duration = Duration::from_millis(500);
/// The time between two lists of all Nodes is this time multiplied by the number of Nodes: 250 bytes/s for Nodes of 30 kB.
const LIST_PER_NODE: Duration = Duration::from_secs(120);
/// Each agent reads a new Node after a random delay of at most this time multiplied by the number of Nodes.
const READ_SPREAD_PER_NODE: Duration = Duration::from_millis(2);
/// The time until a Node that still lacks values is read again. It doubles each time.
const READ_AGAIN: Duration = Duration::from_secs(5);
/// A Node that is older than this is not expected to get further values.
const YOUNG_SECONDS: i64 = 600;
/// How often such a Node is read again. kg removes its annotations for a moment when it restarts.
const REREADS_OF_OLD: u32 = 3;

/// Keeps the Nodes in the store up to date until the token is cancelled. `own_annotations` are those that this agent writes on its own Node
/// `me`.
pub(super) async fn run(
    client: Client,
    me: String,
    own_annotations: &'static [&'static str],
    sink: StoreSink<ParsedNode>,
    stop: CancellationToken,
) {
    let (csi_nodes, hints) = watch::channel(BTreeMap::new());
    let (own_address, own_addresses) = watch::channel(None);
    let own_sink = OwnNodeSink {
        me: me.clone(),
        own: Mutex::default(),
        address: own_address,
        nodes: sink.clone(),
    };
    let mut directory = Directory {
        client: client.clone(),
        me: me.clone(),
        own_annotations,
        sink,
        plan: ReadPlan::default(),
        has_failed: false,
    };
    // The first list comes before the watches, because a change that a watch finds is only applied to a complete list.
    tokio::select! {
        () = stop.cancelled() => return,
        () = directory.list_until_success() => {}
    }
    let own_watch = watch_kind(
        Api::<Node>::all(client.clone()),
        watcher::Config::default().fields(&format!("metadata.name={me}")),
        move |node| ParsedNode::new(&node, &me, own_annotations),
        own_sink,
        stop.clone(),
    );
    let csi_watch = watch_kind(
        Api::<CSINode>::all(client),
        watcher::Config::default(),
        |csi_node| csi_node.metadata.uid.unwrap_or_default(),
        HintSink {
            seen: Mutex::default(),
            uids: csi_nodes,
            has_logged_refusal: AtomicBool::new(false),
        },
        stop.clone(),
    );
    tokio::join!(own_watch, csi_watch, directory.follow(hints, own_addresses, stop));
}

/// Puts this node's own Node among the others.
struct OwnNodeSink {
    me: String,
    own: Mutex<WatchedKind<ParsedNode>>,
    /// The WireGuard address that this node has published.
    address: watch::Sender<Option<IpAddr>>,
    nodes: StoreSink<ParsedNode>,
}

impl WatchSink<ParsedNode> for OwnNodeSink {
    fn change(&self, change: impl FnOnce(&mut WatchedKind<ParsedNode>) -> bool + Send) {
        let node = {
            let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut own);
            let own_node = own.objects().find(|(name, _)| *name == self.me);
            own_node.map(|(_, node)| node.clone())
        };
        let address = node.as_ref().and_then(|node| node.wireguard_ip);
        self.nodes.change(|nodes| set_node(nodes, &self.me, node));
        self.address.send_if_modified(|before| {
            let changed = *before != address;
            *before = address;
            changed
        });
    }

    fn failed(&self, error: &watcher::Error) {
        self.nodes.failed(error);
    }
}

/// Sets or removes one Node. Returns whether that is a change.
fn set_node(nodes: &mut WatchedKind<ParsedNode>, name: &str, node: Option<ParsedNode>) -> bool {
    let WatchedKind::Listed(nodes) = nodes else {
        return false;
    };
    match node {
        Some(node) if nodes.get(name) == Some(&node) => false,
        Some(node) => {
            nodes.insert(name.to_owned(), node);
            true
        }
        None => nodes.remove(name).is_some(),
    }
}

/// Forwards the UIDs of the CSINodes by name.
struct HintSink {
    seen: Mutex<WatchedKind<String>>,
    uids: watch::Sender<BTreeMap<String, String>>,
    has_logged_refusal: AtomicBool,
}

impl WatchSink<String> for HintSink {
    fn change(&self, change: impl FnOnce(&mut WatchedKind<String>) -> bool + Send) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if change(&mut seen) {
            let uids = seen.objects().map(|(name, uid)| (name.to_owned(), uid.clone()));
            self.uids.send_replace(uids.collect());
        }
    }

    fn failed(&self, error: &watcher::Error) {
        // An API server that does not answer is reported by the other watches.
        if is_refusal(error) && !self.has_logged_refusal.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                %error,
                "this agent's account may not watch CSINodes, so the agent notices new Nodes late: apply deploy/agent.yaml"
            );
        }
    }
}

/// Which Nodes to read next, and when.
#[derive(Debug, Default)]
struct ReadPlan {
    /// The other Nodes that the agent knows.
    known: BTreeSet<String>,
    /// The Nodes to read, each not before this time.
    to_read: BTreeMap<String, Instant>,
    /// The last table.
    rows: BTreeMap<String, String>,
    /// How often each Node that lacked values was read.
    attempts: BTreeMap<String, u32>,
    /// The last UIDs of the CSINodes, by name.
    hinted: BTreeMap<String, String>,
    next_table: Option<Instant>,
    next_list: Option<Instant>,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    List,
    Table,
    Read(String),
}

impl ReadPlan {
    fn nodes(&self) -> u32 {
        u32::try_from(self.known.len() + 1).unwrap_or(u32::MAX)
    }

    fn table_interval(&self) -> Duration {
        (TABLE_PER_NODE * self.nodes()).max(TABLE_AT_LEAST)
    }

    /// Plans to read a Node at a time after `now`, so that not all agents of the cluster read it at the same moment.
    fn read_soon(&mut self, name: &str, now: Instant) {
        let due = now + random::up_to(READ_SPREAD_PER_NODE * self.nodes());
        let planned = self.to_read.entry(name.to_owned()).or_insert(due);
        *planned = due.min(*planned);
    }

    /// Compares the table with the last one. A Node that is missing in the table is read, too, because the table may come from a cache that
    /// is behind; the answer to the read is current.
    fn set_rows(&mut self, rows: BTreeMap<String, String>, me: &str, now: Instant) {
        let shown = rows.iter().filter(|(name, _)| *name != me);
        let differs = |(name, row): &(&String, &String)| {
            !self.known.contains(*name) || self.rows.get(*name).is_some_and(|before| before != *row)
        };
        let changed = shown.filter(differs).map(|(name, _)| name);
        let missing = self.known.iter().filter(|name| !rows.contains_key(*name));
        let names: Vec<String> = changed.chain(missing).cloned().collect();
        for name in names {
            self.read_soon(&name, now);
        }
        self.rows = rows;
        self.plan_table(now);
    }

    /// Plans the next table after half to all of the interval.
    fn plan_table(&mut self, now: Instant) {
        let interval = self.table_interval();
        self.next_table = Some(now + interval - random::up_to(interval / 2));
    }

    /// Plans to read the Nodes of new, of replaced and of deleted CSINodes.
    fn set_hints(&mut self, uids: BTreeMap<String, String>, me: &str, now: Instant) {
        let is_new = |(name, uid): &(&String, &String)| {
            !self.known.contains(*name) || self.hinted.get(*name).is_some_and(|before| before != *uid)
        };
        let new = uids.iter().filter(|(name, _)| *name != me).filter(is_new);
        let new = new.map(|(name, _)| name);
        let removed = self.hinted.keys();
        let removed = removed.filter(|name| !uids.contains_key(*name) && self.known.contains(*name));
        let names: Vec<String> = new.chain(removed).cloned().collect();
        for name in names {
            self.read_soon(&name, now);
        }
        self.hinted = uids;
    }

    /// Records that a Node was read at the time `now`, which is `unix` in seconds since 1970.
    fn set_read(&mut self, name: &str, node: Option<&ParsedNode>, now: Instant, unix: i64) {
        self.to_read.remove(name);
        match node {
            Some(node) => {
                self.known.insert(name.to_owned());
                self.read_again_if_incomplete(name, node, now, unix);
            }
            None => {
                self.known.remove(name);
                self.attempts.remove(name);
            }
        }
    }

    /// Records that a Node could not be read. It is read again after [`READ_AGAIN`]; other Nodes are read in the meantime.
    fn set_failed(&mut self, name: &str, now: Instant) {
        self.to_read.insert(name.to_owned(), now + READ_AGAIN);
    }

    fn read_again_if_incomplete(&mut self, name: &str, node: &ParsedNode, now: Instant, unix: i64) {
        let is_incomplete = node.wireguard_ip.is_none() || node.pod_cidrs.is_empty() || node.internal_ips.is_empty();
        if !is_incomplete {
            self.attempts.remove(name);
            return;
        }
        let attempts = self.attempts.entry(name.to_owned()).or_default();
        if unix - node.created < YOUNG_SECONDS || *attempts < REREADS_OF_OLD {
            // Many incomplete Nodes are read again at a rate of at most about one a second.
            let waiting = u32::try_from(self.to_read.len()).unwrap_or(u32::MAX);
            let pause = (READ_AGAIN * (1 << (*attempts).min(10))).max(Duration::from_secs(1) * waiting);
            *attempts += 1;
            self.to_read.insert(name.to_owned(), now + pause);
        }
    }

    /// Records a list of all Nodes.
    fn set_list<'a>(
        &mut self,
        nodes: impl Iterator<Item = (&'a str, &'a ParsedNode)>,
        me: &str,
        now: Instant,
        unix: i64,
    ) {
        self.known.clear();
        self.to_read.clear();
        self.attempts.clear();
        for (name, node) in nodes.filter(|(name, _)| *name != me) {
            self.known.insert(name.to_owned());
            self.read_again_if_incomplete(name, node, now, unix);
        }
        // The number of Nodes is known only now.
        self.plan_table(now);
        let interval = LIST_PER_NODE * self.nodes();
        self.next_list = Some(now + interval - random::up_to(interval / 2));
    }

    /// Plans a list because this node has taken another WireGuard address. Another agent may have taken the same address at the
    /// same time. The list is delayed until that agent has probably published its address.
    fn set_own_address(&mut self, now: Instant) {
        let due = now + TABLE_AT_LEAST / 2 + random::up_to(self.table_interval());
        self.next_list = Some(self.next_list.map_or(due, |next| next.min(due)));
    }

    /// The next step and its time. A list takes precedence, because it also reads the Nodes.
    fn next(&self, now: Instant) -> (Instant, Step) {
        let list = (self.next_list.unwrap_or(now), Step::List);
        let table = (self.next_table.unwrap_or(now), Step::Table);
        let read = self.to_read.iter().min_by_key(|(_, due)| **due);
        let read = read.map(|(name, due)| (*due, Step::Read(name.clone())));
        let steps = [list, table].into_iter().chain(read);
        // All overdue steps count as due `now`. Of equal times, `min_by_key` returns the first: list, then table, then Node.
        steps
            .min_by_key(|(due, _)| (*due).max(now))
            .unwrap_or((now, Step::Table))
    }
}

/// Reads Nodes as [`ReadPlan`] says.
struct Directory {
    client: Client,
    me: String,
    own_annotations: &'static [&'static str],
    sink: StoreSink<ParsedNode>,
    plan: ReadPlan,
    /// The last request failed.
    has_failed: bool,
}

impl Directory {
    async fn list_until_success(&mut self) {
        let mut pause = backoff();
        // The table is read first. So a later table, which is compared with it, shows each change since the list.
        while self.step(Step::Table).await.is_err() || self.step(Step::List).await.is_err() {
            tokio::time::sleep(pause.next().unwrap_or(READ_AGAIN)).await;
        }
    }

    async fn follow(
        mut self,
        mut hints: watch::Receiver<BTreeMap<String, String>>,
        mut own_address: watch::Receiver<Option<IpAddr>>,
        stop: CancellationToken,
    ) {
        // An own address that the first list has shown already is not new.
        let mut before = self.own_address();
        let mut pause = backoff();
        loop {
            let (due, step) = self.plan.next(Instant::now());
            tokio::select! {
                () = stop.cancelled() => return,
                Ok(()) = hints.changed() => {
                    let uids = hints.borrow_and_update().clone();
                    self.plan.set_hints(uids, &self.me, Instant::now());
                    continue;
                }
                Ok(()) = own_address.changed() => {
                    let address = *own_address.borrow_and_update();
                    if address.is_some() && address != before {
                        before = address;
                        self.plan.set_own_address(Instant::now());
                    }
                    continue;
                }
                () = tokio::time::sleep_until(due.into()) => {}
            }
            let wait = tokio::select! {
                () = stop.cancelled() => return,
                done = self.step(step) => match done {
                    Ok(()) => {
                        pause = backoff();
                        continue;
                    }
                    Err(()) => pause.next().unwrap_or(READ_AGAIN),
                },
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn parse(&self, node: &Node) -> ParsedNode {
        ParsedNode::new(node, &self.me, self.own_annotations)
    }

    fn own_address(&self) -> Option<IpAddr> {
        let snapshot = self.sink.store.snapshot();
        let mut nodes = snapshot.nodes.objects();
        nodes
            .find(|(name, _)| *name == self.me)
            .and_then(|(_, node)| node.wireguard_ip)
    }

    /// Takes one step. Reports an error to the store.
    async fn step(&mut self, step: Step) -> Result<(), ()> {
        let done = match step {
            Step::List => self.list().await,
            Step::Table => self.read_table().await,
            Step::Read(name) => {
                let done = self.read_node(&name).await;
                if done.is_err() {
                    self.plan.set_failed(&name, Instant::now());
                }
                done
            }
        };
        match done {
            Ok(()) => {
                if std::mem::take(&mut self.has_failed) {
                    // Changes no Node, but removes the error from the store.
                    self.sink.change(|_| false);
                }
                Ok(())
            }
            Err(error) => {
                self.has_failed = true;
                self.sink.failed(&watcher::Error::InitialListFailed(error));
                Err(())
            }
        }
    }

    async fn read_table(&mut self) -> Result<(), kube::Error> {
        let rows = table::read(&self.client).await?;
        self.plan.set_rows(rows, &self.me, Instant::now());
        Ok(())
    }

    async fn list(&mut self) -> Result<(), kube::Error> {
        let nodes_api: Api<Node> = Api::all(self.client.clone());
        let mut nodes = BTreeMap::new();
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let page = nodes_api.list(&params).await?;
            for node in page.items {
                nodes.insert(node.name_any(), self.parse(&node));
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => break,
            }
        }
        let all = nodes.iter().map(|(name, node)| (name.as_str(), node));
        self.plan.set_list(all, &self.me, Instant::now(), unix_seconds());
        self.sink.change(|seen| {
            if let WatchedKind::Listed(before) = &*seen {
                // The watch of the own Node is newer than the list.
                match before.get(&self.me) {
                    Some(own) => drop(nodes.insert(self.me.clone(), own.clone())),
                    None => drop(nodes.remove(&self.me)),
                }
            }
            let listed = WatchedKind::Listed(nodes);
            let changed = *seen != listed;
            *seen = listed;
            changed
        });
        Ok(())
    }

    async fn read_node(&mut self, name: &str) -> Result<(), kube::Error> {
        let node = Api::<Node>::all(self.client.clone()).get_opt(name).await?;
        let node = node.map(|node| self.parse(&node));
        self.plan.set_read(name, node.as_ref(), Instant::now(), unix_seconds());
        self.sink.change(|nodes| set_node(nodes, name, node));
        Ok(())
    }
}

fn unix_seconds() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
