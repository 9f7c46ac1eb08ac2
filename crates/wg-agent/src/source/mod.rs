//! Reads the agent's inputs: objects of the node's own cluster, addresses of host names, and the node's underlay, resolvers and datapath.

use clustermesh_api::{peer::Peer, policy::PeerPolicy};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    runtime::watcher,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use objects::{ParsedPeer, ParsedPolicy, sockets};
use store::{Store, StoreSink};

pub mod client;
pub(crate) mod datapath;
pub mod lookup;
mod nodes;
pub mod objects;
pub mod resolv;
pub mod store;
pub mod underlay;
pub mod watch;

/// The kind whose changes [`store`] also reports separately ([`Store::policies_changed`]).
const PEER_POLICY: &str = "PeerPolicy";

/// Starts the watches of all Peers and PeerPolicies and of the API server's endpoints, and follows the Nodes. They update `store` until
/// the token is cancelled. `own_annotations` are those that this agent writes on its own Node `me`.
pub fn start_watches(
    tasks: &mut JoinSet<()>,
    client: &Client,
    me: &str,
    own_annotations: &'static [&'static str],
    store: &Store,
    stop: &CancellationToken,
) {
    let default_config = watcher::Config::default;
    let peers = ApiResource::erase::<Peer>(&());
    tasks.spawn(watch::watch_kind(
        Api::<DynamicObject>::all_with(client.clone(), &peers),
        default_config(),
        ParsedPeer::new,
        StoreSink {
            store: store.clone(),
            kind: "Peer",
            part: |snapshot| &mut snapshot.peers,
        },
        stop.clone(),
    ));
    let policies = ApiResource::erase::<PeerPolicy>(&());
    tasks.spawn(watch::watch_kind(
        Api::<DynamicObject>::all_with(client.clone(), &policies),
        default_config(),
        ParsedPolicy::new,
        StoreSink {
            store: store.clone(),
            kind: PEER_POLICY,
            part: |snapshot| &mut snapshot.policies,
        },
        stop.clone(),
    ));
    tasks.spawn(nodes::run(
        client.clone(),
        me.to_owned(),
        own_annotations,
        StoreSink {
            store: store.clone(),
            kind: "Node",
            part: |snapshot| &mut snapshot.nodes,
        },
        stop.clone(),
    ));
    tasks.spawn(watch::watch_kind(
        Api::<EndpointSlice>::namespaced(client.clone(), "default"),
        default_config().labels("kubernetes.io/service-name=kubernetes"),
        |slice| sockets(&slice),
        StoreSink {
            store: store.clone(),
            kind: "EndpointSlice",
            part: |snapshot| &mut snapshot.api_servers,
        },
        stop.clone(),
    ));
}
