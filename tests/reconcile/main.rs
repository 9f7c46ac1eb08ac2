//! Tests the real controller on real API servers: its writes into members and the status of ClusterMeshes. Needs root.

mod closing;
mod credentials;
mod failover;
mod flood;
mod gateways;
mod hostile;
mod invalid_claims;
mod kilo;
mod live_status;
mod members;
mod meshes;
mod moved;
mod nodes;
mod operator;
mod owners;
mod profiles;
mod removed;
mod restart;
mod sandbox;
mod services;
mod status;
mod status_command;
mod writes;
