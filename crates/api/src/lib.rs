//! The Kubernetes types of the project and their meaning: ClusterMesh, PeerPolicy, Kilo's Peer and annotations, and the
//! conversions between them and the plain values of `clustermesh_core`. No client, no clock and no planning live here.
//!
//! This is the only crate in which `kilo.squat.ai` is spelled.
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
