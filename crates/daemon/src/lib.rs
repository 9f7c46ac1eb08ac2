//! Code that the controller and the agent share as daemons: logs, metrics, readiness, liveness, shutdown, the admin
//! endpoint, and the client for their own cluster.
//!
//! A program calls [`telemetry::init`], [`descriptors::raise_limit`], [`drain::on_signal`] and [`admin::Admin::bind`], spawns
//! [`admin::Admin::serve`], works until the token of `on_signal` is cancelled, and waits for its remaining work with [`drain::within`].
//!
//! # Example
//!
//! A program lists by name the items for which it waits, and `/readyz` shows the list:
//!
//! ```
//! use clustermesh_daemon::Readiness;
//!
//! let readiness = Readiness::new();
//! let peers = readiness.pending("the first list of Peers");
//! assert_eq!(readiness.pending_items(), ["the first list of Peers"]);
//!
//! drop(peers);
//! assert!(readiness.is_ready());
//! ```
#![forbid(unsafe_code)]

pub mod admin;
pub mod client;
pub mod descriptors;
pub mod drain;
pub mod liveness;
pub mod metrics;
pub mod random;
pub mod readiness;
pub mod telemetry;

pub use admin::{Admin, Audience, State};
pub use liveness::{Heartbeat, Liveness};
pub use readiness::{Readiness, ReadinessItem};
pub use telemetry::LogFormat;
pub use tokio_util::sync::CancellationToken;
