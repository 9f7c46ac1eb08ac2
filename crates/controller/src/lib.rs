//! `clustermesh-controller`: reads ClusterMeshes and the kubeconfig Secrets that they reference, watches every member, and
//! reconciles the Peers, PeerPolicies, SandboxAccesses and mirrored Services in each member. `clustermesh_core` computes the desired
//! state.
#![forbid(unsafe_code)]

mod api_error;
mod apply;
pub mod args;
mod backoff;
mod election;
mod events;
mod expiry;
mod feed;
mod held_nodes;
mod hub;
mod hub_writer;
mod metrics;
mod outdated_agents;
mod reconcile;
mod report;
mod resolver;
pub mod run;
mod session;
