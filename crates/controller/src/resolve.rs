//! Addresses of the host names that Nodes give as their endpoints, looked up in the background and kept current. Which
//! names may be asked for is bounded here; which address is used is the planner's business.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use clustermesh_core::{
    mesh::{Mesh, Profile},
    observe::{Endpoint, Observations},
};
use tokio::sync::watch;

use crate::feed::Changed;

/// More names than this are not asked for: a hostile member must not make the hub a resolver's flood.
const MAX_NAMES: usize = 1_000;
/// How often every name is asked for again.
const REFRESH: Duration = Duration::from_secs(60);
/// For one name.
const LOOKUP: Duration = Duration::from_secs(5);

type Table = Arc<Mutex<BTreeMap<String, IpAddr>>>;

/// The resolver; dropping it ends the task.
#[derive(Debug)]
pub(crate) struct Resolver {
    names: watch::Sender<BTreeSet<String>>,
    table: Table,
}

impl Resolver {
    /// Starts with no names.
    pub(crate) fn start(changed: Changed) -> Self {
        let (names, wanted) = watch::channel(BTreeSet::new());
        let table = Table::default();
        tokio::spawn(run(wanted, Arc::clone(&table), changed));
        Self { names, table }
    }

    /// Asks for these names from now on, and for no others.
    pub(crate) fn want(&self, names: BTreeSet<String>) {
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
pub(crate) fn names(meshes: &[Mesh], seen: &Observations) -> BTreeSet<String> {
    let entries = meshes
        .iter()
        .flat_map(|mesh| &mesh.clusters)
        .filter(|c| c.profile == Profile::ClusterMeshed);
    let identities: BTreeSet<_> = entries.map(|cluster| &cluster.identity).collect();
    let members = identities
        .into_iter()
        .filter_map(|identity| seen.members.get(identity)?.last());
    members
        .flat_map(|member| member.nodes.values())
        .flat_map(|node| [&node.clustermesh_endpoint, &node.force_endpoint, &node.kilo_endpoint])
        .filter_map(|claim| match claim.value() {
            Some(Endpoint::Dns(name, _)) => Some(name.clone()),
            _ => None,
        })
        .take(MAX_NAMES)
        .collect()
}

async fn run(mut wanted: watch::Receiver<BTreeSet<String>>, table: Table, changed: Changed) {
    loop {
        let names = wanted.borrow_and_update().clone();
        for name in &names {
            let found = match tokio::time::timeout(LOOKUP, tokio::net::lookup_host((name.as_str(), 0))).await {
                Ok(Ok(addresses)) => addresses.map(|address| address.ip()).collect(),
                _ => BTreeSet::new(),
            };
            let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
            let before = table.get(name).copied();
            let after = choose(before, &found);
            match after {
                Some(address) => table.insert(name.clone(), address),
                None => table.remove(name),
            };
            drop(table);
            if before != after {
                changed.notify_one();
            }
        }
        table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|name, _| names.contains(name));
        tokio::select! {
            () = tokio::time::sleep(REFRESH) => {}
            news = wanted.changed() => if news.is_err() { return },
        }
    }
}

/// The address in use while the name still has it, else the first: names with several addresses must not flap.
fn choose(before: Option<IpAddr>, found: &BTreeSet<IpAddr>) -> Option<IpAddr> {
    before
        .filter(|address| found.contains(address))
        .or_else(|| found.first().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_several_addresses_keeps_the_one_in_use() {
        let set = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| text.parse().expect("an address"))
                .collect::<BTreeSet<IpAddr>>()
        };
        let (two, three) = ("192.0.2.2".parse().ok(), "192.0.2.3".parse().ok());
        assert_eq!(choose(None, &set(&["192.0.2.3", "192.0.2.2"])), two);
        assert_eq!(choose(three, &set(&["192.0.2.3", "192.0.2.2"])), three);
        assert_eq!(choose(three, &set(&["192.0.2.2"])), two);
        assert_eq!(choose(three, &set(&[])), None);
    }
}
