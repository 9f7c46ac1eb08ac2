//! `clustermesh-controller`: reads ClusterMeshes and the kubeconfigs they name, watches every member, and keeps the Peers,
//! PeerPolicies and mirrored Services of each true. What they should be is decided in `clustermesh_core`.
#![forbid(unsafe_code)]

mod apply;
pub mod args;
mod backoff;
mod events;
mod feed;
mod held;
mod hub;
mod hub_writer;
mod lagging;
mod metrics;
mod reconcile;
mod report;
mod resolve;
pub mod run;
mod session;
mod trouble;
