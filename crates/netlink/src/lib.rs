//! Exchanges netlink(7) messages with the kernel. The messages are those of the netlink-packet crates.
//!
//! A [`Socket`] sends one request at a time and returns the complete answer:
//!
//! | method | request | answer |
//! |---|---|---|
//! | [`Socket::get`] | for one object | the object |
//! | [`Socket::change`], [`Socket::create`], [`Socket::replace`] | a change | an acknowledgement |
//! | [`Socket::dump`] | for all objects of a kind | the objects; the request is repeated until the answer is consistent |
//!
//! [`Events`] receives multicast notifications. [`link`] finds, creates, changes and deletes network interfaces.
//!
//! # Blocking
//!
//! Requests block the calling thread. The kernel handles a request within the system call that sends it, and fills each
//! part of a dump within the call that receives it. So an async client would block its thread just as long. A dump whose
//! size depends on other programs belongs on a blocking thread. Only [`Events`] waits for the kernel, so it is async.
//!
//! # Network namespaces
//!
//! A socket belongs to the network namespace of the thread that opened it, and stays there.
//!
//! # Example
//!
//! ```
//! use clustermesh_netlink::{Protocol, Socket, link};
//! use netlink_packet_route::{
//!     RouteNetlinkMessage,
//!     address::{AddressAttribute, AddressMessage},
//! };
//!
//! let socket = Socket::open(Protocol::Route)?;
//! let loopback = link::by_name(&socket, "lo")?.expect("every namespace has a loopback interface");
//! let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
//! let addresses = socket.dump(&request, |answer| match answer {
//!     RouteNetlinkMessage::NewAddress(address) if address.header.index == loopback.header.index => {
//!         address.attributes.into_iter().find_map(|attribute| match attribute {
//!             AddressAttribute::Address(address) => Some(address),
//!             _ => None,
//!         })
//!     }
//!     _ => None,
//! })?;
//! println!("lo has {addresses:?}");
//! # Ok::<(), clustermesh_netlink::Error>(())
//! ```
#![deny(unsafe_code)]

mod error;
mod events;
pub mod link;
mod message;
mod socket;

pub use error::Error;
pub use events::{Event, Events, Subscription};
pub use message::Message;
pub use rustix::io::Errno;
pub use socket::{Protocol, Socket};
pub use socket2::SockFilter;
