//! The Kubernetes types of the project (ClusterMesh, PeerPolicy, Kilo's Peer and annotations), and conversions between them and the
//! plain values of `clustermesh_core`.
//!
//! The API group `kilo.squat.ai` is written only in this crate.
#![forbid(unsafe_code)]

pub mod annotations;
pub mod convert;
pub mod crds;
pub mod mesh;
pub mod names;
pub mod peer;
pub mod policy;
pub mod revision;
pub mod sandbox;
mod schema;
