//! This node's identity in the mesh: its key pair and its WireGuard address. `crate::publish` writes the public key and
//! the address into the Node's annotations.

pub mod address;
pub(crate) mod initiation_listener;
pub mod key;
pub(crate) mod rotation;
