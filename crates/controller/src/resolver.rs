//! Resolves the host names that Nodes publish as their endpoints, in the background, and refreshes the addresses. It limits
//! which names and how many names are looked up for each member.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use clustermesh_core::{
    mesh::{Cluster, ClusterIdentity, Mesh, Profile},
    observe::{Endpoint, Observations},
};
use futures::{StreamExt, stream::FuturesUnordered};
use tokio::{sync::watch, time::Instant};

use crate::feed::Changed;

mod lookup_queue;

use lookup_queue::LookupQueue;

/// The maximum number of names of one member that are looked up. A hostile member must not cause the controller to flood a DNS server.
const MAX_NAMES: usize = 200;
/// The maximum number of lookups at the same time.
const MAX_LOOKUPS: usize = 16;
/// Time from the end of a lookup to the next lookup of the same name.
const REFRESH: Duration = Duration::from_secs(60);
/// Timeout of one lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

type Addresses = Arc<Mutex<BTreeMap<String, IpAddr>>>;

/// Host names, by the member whose Nodes publish them.
pub(crate) type NamesByMember = BTreeMap<ClusterIdentity, BTreeSet<String>>;

/// The handle of the task that resolves names. Dropping it stops the task.
#[derive(Debug)]
pub(crate) struct Resolver {
    names: watch::Sender<NamesByMember>,
    addresses: Addresses,
}

impl Resolver {
    /// Starts the task without names.
    pub(crate) fn start(changed: Changed) -> Self {
        let (names, wanted) = watch::channel(NamesByMember::new());
        let addresses = Addresses::default();
        tokio::spawn(run(wanted, Arc::clone(&addresses), changed, lookup));
        Self { names, addresses }
    }

    /// Replaces the names to resolve.
    pub(crate) fn set_names(&self, names: NamesByMember) {
        self.names.send_if_modified(|current| {
            let has_changed = *current != names;
            *current = names;
            has_changed
        });
    }

    /// Returns the resolved names with their addresses.
    pub(crate) fn addresses(&self) -> BTreeMap<String, IpAddr> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Collects the host names that Nodes publish, only for clusters that are cluster-meshed in all their meshes. A cluster that is a sandbox
/// in any mesh must not choose which names are looked up.
pub(crate) fn collect_names(meshes: &[Mesh], seen: &Observations) -> NamesByMember {
    let entries = || meshes.iter().flat_map(|mesh| &mesh.clusters);
    let is_meshed_everywhere = |cluster: &&Cluster| {
        entries()
            .all(|other| other.profile == Profile::ClusterMeshed || !other.identity.same_cluster(&cluster.identity))
    };
    let identities: BTreeSet<_> = entries()
        .filter(is_meshed_everywhere)
        .map(|cluster| &cluster.identity)
        .collect();
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

/// Looks up a name with `getaddrinfo`. `None` = the DNS server did not answer, or the name has no address; `getaddrinfo` does not
/// distinguish the two.
async fn lookup(name: String) -> Option<BTreeSet<IpAddr>> {
    let found = tokio::time::timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host((name.as_str(), 0))).await;
    Some(found.ok()?.ok()?.map(|address| address.ip()).collect())
}

async fn run<F>(
    mut wanted: watch::Receiver<NamesByMember>,
    addresses: Addresses,
    changed: Changed,
    lookup: impl Fn(String) -> F,
) where
    F: Future<Output = Option<BTreeSet<IpAddr>>>,
{
    let mut queue = LookupQueue::default();
    let mut lookups = FuturesUnordered::new();
    wanted.mark_changed();
    loop {
        while lookups.len() < MAX_LOOKUPS
            && let Some((member, name)) = queue.next(Instant::now())
        {
            let found = lookup(name.clone());
            lookups.push(async move { (member, name, found.await) });
        }
        let due = queue.due().filter(|_| lookups.len() < MAX_LOOKUPS);
        tokio::select! {
            Some((member, name, found)) = lookups.next() => {
                let is_still_wanted = wanted.borrow().values().any(|names| names.contains(&name));
                if is_still_wanted && store(&addresses, &name, found.as_ref()) {
                    changed.notify_one();
                }
                queue.finish(&member, name, Instant::now() + REFRESH);
            }
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            result = wanted.changed() => {
                if result.is_err() {
                    return;
                }
                let names = wanted.borrow_and_update().clone();
                queue.set_names(&names, Instant::now());
                addresses
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .retain(|name, _| names.values().any(|names| names.contains(name)));
            }
        }
    }
}

/// Stores the result of a lookup. Returns whether the address of the name changed.
fn store(addresses: &Addresses, name: &str, found: Option<&BTreeSet<IpAddr>>) -> bool {
    let mut addresses = addresses.lock().unwrap_or_else(PoisonError::into_inner);
    let before = addresses.get(name).copied();
    let after = choose(before, found);
    if let Some(address) = after {
        addresses.insert(name.to_owned(), address);
    }
    before != after
}

/// Chooses the address of a name. The last address stays as long as the name has it, so that an endpoint does not flap between several
/// addresses. It also stays after a failed lookup, so that an outage of the DNS server removes no endpoint.
fn choose(before: Option<IpAddr>, found: Option<&BTreeSet<IpAddr>>) -> Option<IpAddr> {
    before
        .filter(|address| found.is_none_or(|found| found.contains(address)))
        .or_else(|| found.and_then(BTreeSet::first).copied())
        .or(before)
}

#[cfg(test)]
mod tests;
