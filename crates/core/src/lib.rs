//! The mesh planner: values in, values out. No I/O, no clock, no Kubernetes types live here.
//!
//! [`plan::plan`] turns all meshes and what was observed of their members into one [`plan::Plan`]; [`diff::diff`] says
//! what to write into one member, [`status`] says what to report. Time is handed in as
//! durations.
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
