//! Who this node is toward the mesh: its key and its WireGuard address. Telling others is `publish`'s business.

pub mod address;
pub(crate) mod caller;
pub mod key;
pub(crate) mod rotation;
