//! Computes the desired kernel state (WireGuard device, routes, firewall, sysctls) of one node from Peers and PeerPolicies, and of one
//! gateway from SandboxAccesses. Pure functions over plain values, without I/O, clock, runtime or Kubernetes types.
//!
//! # Example
//!
//! [`compile()`] turns one Peer into a route and a peer of the device:
//!
//! ```
//! use clustermesh_agent_core::{
//!     compile::{Inputs, Node, Peer, compile},
//!     routes::Kind,
//! };
//! use clustermesh_core::{key::PublicKey, observe::PeerRole};
//!
//! let inputs = Inputs {
//!     node: Node {
//!         name: "n1".into(),
//!         public_key: PublicKey::new([1; 32]),
//!         wireguard_ips: ["100.66.1.1".parse().unwrap()].into(),
//!         device: "kilo0".parse().unwrap(),
//!         listen_port: 51820,
//!         mtu: 1420,
//!         underlay: "eth0".parse().unwrap(),
//!         underlay_addresses: ["192.0.2.1".parse().unwrap()].into(),
//!         internal_ips: ["192.0.2.1".parse().unwrap()].into(),
//!         pod_cidrs: ["10.1.7.0/24".parse().unwrap()].into(),
//!     },
//!     peers: vec![Peer {
//!         name: "demo--edge--n2".into(),
//!         revision: 1,
//!         public_key: PublicKey::new([2; 32]),
//!         preshared_key: None,
//!         endpoint: Some("192.0.2.2:51820".parse().unwrap()),
//!         candidates: vec![],
//!         keepalive: None,
//!         allowed_ips: vec!["10.2.0.0/24".parse().unwrap()],
//!         role: PeerRole::Node,
//!     }],
//!     policies: [].into(),
//!     throw: [].into(),
//!     api_servers: [].into(),
//!     all_node_addresses: [].into(),
//!     pod_cidrs_of_other_nodes: [].into(),
//!     own_sources: [].into(),
//!     peer_mtus: [].into(),
//! };
//! let compiled = compile(&inputs);
//! assert!(compiled.peers.contains_key(&PublicKey::new([2; 32])));
//! let mut routes = compiled.routes.routes.iter();
//! assert!(routes.any(|route| route.prefix.to_string() == "10.2.0.0/24" && matches!(route.kind, Kind::Device { .. })));
//! assert_eq!(compiled.refused, []);
//! ```
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
pub mod prefixes;
pub mod routes;
pub mod sysctl;

pub use compile::{Compiled, Inputs, compile};
