//! What the agent works from: objects of its own cluster, and the node's network as it is without us. Nothing is written
//! here.

use clustermesh_api::{peer::Peer, policy::PeerPolicy};
use k8s_openapi::api::{core::v1::Node, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    runtime::watcher,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use objects::{NodeSeen, PeerSeen, PolicySeen, sockets};
use store::{Shelf, Store};

pub mod client;
pub(crate) mod datapath;
pub mod lookup;
pub mod objects;
pub mod resolv;
pub mod store;
pub mod underlay;
pub mod watch;

const PEER_POLICY: &str = "PeerPolicy";

/// Follows everything in the cluster that concerns this node, into `store`, until the token is cancelled. `keys` are the
/// annotations that this agent writes on its own Node.
pub fn follow(
    tasks: &mut JoinSet<()>,
    client: &Client,
    me: &str,
    keys: &'static [&'static str],
    store: &Store,
    stop: &CancellationToken,
) {
    let all = watcher::Config::default;
    let peers = ApiResource::erase::<Peer>(&());
    tasks.spawn(watch::follow(
        Api::<DynamicObject>::all_with(client.clone(), &peers),
        all(),
        PeerSeen::new,
        Shelf {
            store: store.clone(),
            kind: "Peer",
            part: |world| &mut world.peers,
        },
        stop.clone(),
    ));
    let policies = ApiResource::erase::<PeerPolicy>(&());
    tasks.spawn(watch::follow(
        Api::<DynamicObject>::all_with(client.clone(), &policies),
        all(),
        PolicySeen::new,
        Shelf {
            store: store.clone(),
            kind: PEER_POLICY,
            part: |world| &mut world.policies,
        },
        stop.clone(),
    ));
    let me = me.to_owned();
    tasks.spawn(watch::follow(
        Api::<Node>::all(client.clone()),
        all(),
        move |node| NodeSeen::new(&node, &me, keys),
        Shelf {
            store: store.clone(),
            kind: "Node",
            part: |world| &mut world.nodes,
        },
        stop.clone(),
    ));
    tasks.spawn(watch::follow(
        Api::<EndpointSlice>::namespaced(client.clone(), "default"),
        all().labels("kubernetes.io/service-name=kubernetes"),
        |slice| sockets(&slice),
        Shelf {
            store: store.clone(),
            kind: "EndpointSlice",
            part: |world| &mut world.api_servers,
        },
        stop.clone(),
    ));
}
