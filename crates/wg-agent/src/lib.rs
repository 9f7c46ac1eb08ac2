//! One node's WireGuard device, routes and firewall: sources -> compile -> diff -> apply -> publish.
//!
//! The middle is `clustermesh_agent_core`; here are the ends that touch the API server, the kernel and the disk. `run` is
//! the wiring.
#![deny(unsafe_code)]

pub mod args;
pub mod identity;
pub mod lock;
pub mod source;
