//! Addresses of the host names that Nodes give as their endpoints, looked up in the background and kept current. Which
//! names may be asked for is bounded here; which address is used is the planner's business.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use clustermesh_core::{
    mesh::{ClusterIdentity, Mesh, Profile},
    observe::{Endpoint, Observations},
};
use futures::{StreamExt, stream::FuturesUnordered};
use tokio::{sync::watch, time::Instant};

use crate::feed::Changed;

mod turns;

use turns::Turns;

/// More names than this of one member are not asked for: a hostile one must not make the hub a resolver's flood.
const MAX_NAMES: usize = 200;
/// Lookups at the same time.
const CONCURRENT: usize = 16;
/// How often every name is asked for again.
const REFRESH: Duration = Duration::from_secs(60);
/// For one name.
const LOOKUP: Duration = Duration::from_secs(5);

type Table = Arc<Mutex<BTreeMap<String, IpAddr>>>;

/// Names by the member whose Nodes give them.
pub(crate) type Wanted = BTreeMap<ClusterIdentity, BTreeSet<String>>;

/// The resolver; dropping it ends the task.
#[derive(Debug)]
pub(crate) struct Resolver {
    names: watch::Sender<Wanted>,
    table: Table,
}

impl Resolver {
    /// Starts with no names.
    pub(crate) fn start(changed: Changed) -> Self {
        let (names, wanted) = watch::channel(Wanted::new());
        let table = Table::default();
        tokio::spawn(run(wanted, Arc::clone(&table), changed, lookup));
        Self { names, table }
    }

    /// Asks for these names from now on, and for no others.
    pub(crate) fn want(&self, names: Wanted) {
        self.names.send_if_modified(|current| {
            let news = *current != names;
            *current = names;
            news
        });
    }

    /// What is known.
    pub(crate) fn known(&self) -> BTreeMap<String, IpAddr> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The names that Nodes of members give, sandboxes left out: they must not choose what the hub asks for.
pub(crate) fn names(meshes: &[Mesh], seen: &Observations) -> Wanted {
    let entries = meshes
        .iter()
        .flat_map(|mesh| &mesh.clusters)
        .filter(|c| c.profile == Profile::ClusterMeshed);
    let identities: BTreeSet<_> = entries.map(|cluster| &cluster.identity).collect();
    identities
        .into_iter()
        .filter_map(|identity| {
            let nodes = seen.members.get(identity)?.last()?.nodes.values();
            let names: BTreeSet<String> = nodes
                .flat_map(|node| [&node.clustermesh_endpoint, &node.force_endpoint, &node.kilo_endpoint])
                .filter_map(|claim| match claim.value() {
                    Some(Endpoint::Dns(name, _)) => Some(name.clone()),
                    _ => None,
                })
                .collect();
            (!names.is_empty()).then(|| (identity.clone(), names.into_iter().take(MAX_NAMES).collect()))
        })
        .collect()
}

/// What the node's resolver says; `None` = it did not answer, or has no address (it does not tell the two apart).
async fn lookup(name: String) -> Option<BTreeSet<IpAddr>> {
    let found = tokio::time::timeout(LOOKUP, tokio::net::lookup_host((name.as_str(), 0))).await;
    Some(found.ok()?.ok()?.map(|address| address.ip()).collect())
}

async fn run<F>(mut wanted: watch::Receiver<Wanted>, table: Table, changed: Changed, ask: impl Fn(String) -> F)
where
    F: Future<Output = Option<BTreeSet<IpAddr>>>,
{
    let mut turns = Turns::default();
    let mut asking = FuturesUnordered::new();
    wanted.mark_changed();
    loop {
        while asking.len() < CONCURRENT
            && let Some((member, name)) = turns.next(Instant::now())
        {
            let found = ask(name.clone());
            asking.push(async move { (member, name, found.await) });
        }
        let due = turns.due().filter(|_| asking.len() < CONCURRENT);
        tokio::select! {
            Some((member, name, found)) = asking.next() => {
                let still = wanted.borrow().values().any(|names| names.contains(&name));
                if still && note(&table, &name, found.as_ref()) {
                    changed.notify_one();
                }
                turns.done(&member, name, Instant::now() + REFRESH);
            }
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            news = wanted.changed() => {
                if news.is_err() {
                    return;
                }
                let names = wanted.borrow_and_update().clone();
                turns.want(&names, Instant::now());
                table
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .retain(|name, _| names.values().any(|names| names.contains(name)));
            }
        }
    }
}

/// Takes an answer; whether it is news.
fn note(table: &Table, name: &str, found: Option<&BTreeSet<IpAddr>>) -> bool {
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    let before = table.get(name).copied();
    let after = choose(before, found);
    if let Some(address) = after {
        table.insert(name.to_owned(), address);
    }
    before != after
}

/// The address in use while the name still has it, else the first: names with several addresses must not flap. A lookup that
/// fails changes nothing: a resolver that is down must not take an endpoint away.
fn choose(before: Option<IpAddr>, found: Option<&BTreeSet<IpAddr>>) -> Option<IpAddr> {
    before
        .filter(|address| found.is_none_or(|found| found.contains(address)))
        .or_else(|| found.and_then(BTreeSet::first).copied())
        .or(before)
}

#[cfg(test)]
mod tests;
