//! Computes the desired kernel state of one node (WireGuard device, routes, firewall) from Peers and policies. Pure functions over
//! plain values, without I/O, clock, runtime or Kubernetes types.
#![forbid(unsafe_code)]

pub mod compile;
pub mod datapath;
pub mod device;
pub mod firewall;
pub mod gateway;
pub mod health;
pub mod interface;
pub mod key;
pub mod mtu;
pub mod numbers;
pub mod policy;
pub mod prefixes;
pub mod routes;
pub mod sysctl;

pub use compile::{Compiled, Inputs, compile};
