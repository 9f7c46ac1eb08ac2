//! Enforces NetworkPolicies for this node's pods: watches NetworkPolicies, Pods and Namespaces, and applies the nftables
//! table that [`table`] renders from them.

mod table;

use std::collections::BTreeMap;
use std::fmt::Debug;

use anyhow::Result;
use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use super::{Settings, cni};
use table::ClusterObjects;

pub(super) async fn run(settings: &Settings) -> Result<()> {
    // Uses the administrator's kubeconfig, because a node's account has no right to read all Pods and NetworkPolicies.
    let kubeconfig = Kubeconfig::read_from(settings.cluster_directory().join("inside.kubeconfig"))?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    let mut policies = Watched::<NetworkPolicy>::new(&client);
    let mut pods = Watched::<Pod>::new(&client);
    let mut namespaces = Watched::<Namespace>::new(&client);
    let mut applied = String::new();
    loop {
        tokio::select! {
            event = policies.next() => event?,
            event = pods.next() => event?,
            event = namespaces.next() => event?,
        }
        // A table from incomplete lists would accept or drop the wrong packets.
        let (Some(policies), Some(pods), Some(namespaces)) = (&policies.known, &pods.known, &namespaces.known) else {
            continue;
        };
        let table = table::render(
            settings.addresses[0],
            &ClusterObjects {
                policies,
                pods,
                namespaces,
            },
        );
        if table != applied {
            cni::run_with_stdin(&["nft", "-f", "-"], &table)?;
            applied = table;
        }
    }
}

/// Objects of one kind, by namespace and name.
pub(super) type Objects<K> = BTreeMap<(String, String), K>;

struct Watched<K> {
    events: BoxStream<'static, watcher::Result<watcher::Event<K>>>,
    /// All objects. `None` until the first list is complete.
    known: Option<Objects<K>>,
    /// The objects of the list that is in progress.
    listed: Objects<K>,
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    fn new(client: &Client) -> Self {
        let events = watcher(Api::<K>::all(client.clone()), watcher::Config::default()).default_backoff();
        Self {
            events: events.boxed(),
            known: None,
            listed: Objects::new(),
        }
    }

    /// Waits for one event and processes it. Cancellation loses no event.
    async fn next(&mut self) -> Result<()> {
        let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
        match self.events.next().await {
            Some(Ok(watcher::Event::Init)) => self.listed.clear(),
            Some(Ok(watcher::Event::InitApply(object))) => drop(self.listed.insert(key(&object), object)),
            Some(Ok(watcher::Event::InitDone)) => self.known = Some(std::mem::take(&mut self.listed)),
            Some(Ok(watcher::Event::Apply(object))) => {
                self.known.get_or_insert_default().insert(key(&object), object);
            }
            Some(Ok(watcher::Event::Delete(object))) => {
                self.known.get_or_insert_default().remove(&key(&object));
            }
            // The watch continues, with a backoff.
            Some(Err(error)) => eprintln!("watch {}: {error}", K::kind(&())),
            None => anyhow::bail!("the watch of {} ended", K::kind(&())),
        }
        Ok(())
    }
}
