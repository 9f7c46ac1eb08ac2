//! This node's identity in the mesh: its key and its WireGuard address. `crate::publish` writes it into the Node's annotations.

pub mod address;
pub(crate) mod initiation_listener;
pub mod key;
pub(crate) mod rotation;
