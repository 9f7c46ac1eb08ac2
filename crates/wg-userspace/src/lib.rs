//! A WireGuard device in userspace, for Linux: the protocol (boringtun) between a TUN device and UDP sockets.
//!
//! [`Device`] creates an interface and exchanges packets with its peers. Its configuration can change while it runs. The caller sets the
//! addresses and routes of the interface. Privileges and limits are in the [README](https://github.com/clustermesh-for-kilo/clustermesh/tree/main/crates/wg-userspace).
//!
//! # How it works
//!
//! Plain threads do the work. A worker is a pair of threads, one from interface to network (`outbound`) and one from network to interface
//! (`inbound`); [`Options::workers`] is the number of workers. Further threads run timers (`timer_queue`), answer initiations
//! (`handshakes`) and serve `wg show` (`control`). All share one immutable table of peers, which is replaced as a whole. A thread locks the
//! state of a peer for one burst of packets and never locks two peers at once. The threads do not run on the program's async runtime, so a
//! blocked runtime delays no packets, and packets do not block the runtime.
//!
//! With the kernel's offloads, one system call transfers a large TCP or UDP packet (TUN with a virtio-net header) or a run: several
//! datagrams of one size to or from one address (UDP segmentation and receive offload). Without them each packet takes its own system
//! call.
//!
//! The interface outlives the process (`tun`), unless [`Device::close`] removes it. While no process has it open, the kernel drops the
//! packets routed into it. The next process takes it over and initiates a handshake with
//! every peer that its caller adds with an endpoint.
#![deny(unsafe_code)]

mod configuration;
mod control;
mod datapath;
mod device;
mod drops;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod handshake_gate;
mod handshakes;
mod inbound;
mod inner_packet;
mod key;
mod link;
mod observed;
mod offload;
mod outbound;
mod peer;
mod peers;
mod prefix_map;
mod sockets;
mod source_limiter;
mod staged;
mod timer_queue;
mod tun;
mod tunnel;
mod unreachable;

pub use configuration::{Configuration, Interface, Options};
pub use device::{Device, remove_control_socket, remove_interface};
pub use error::Error;
pub use key::{MalformedKey, PresharedKey, PrivateKey, PublicKey};
pub use observed::{Altered, Observed, ObservedPeer, PeerStats};
pub use peer::{PeerChange, PeerSpec, PeerUpdate};
