//! Plans all meshes: computes the objects that each member cluster should hold, the writes that get there, and the status.
//!
//! [`plan::plan`] turns all meshes and the observed state of their members into one [`plan::Plan`]. [`diff::diff`] lists the
//! writes for one member. [`status`] derives the conditions of a mesh. Everything here is a pure function over plain values:
//! no I/O, no clock (time is passed in as durations), no Kubernetes client types.
#![forbid(unsafe_code)]

pub mod checkin;
pub mod diff;
pub mod enforcement;
pub mod hash;
pub mod hub;
pub mod key;
pub mod lanes;
pub mod links;
pub mod mesh;
pub mod observe;
pub mod ownership;
pub mod pending;
pub mod plan;
pub mod status;
