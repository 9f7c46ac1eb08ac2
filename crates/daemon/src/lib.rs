//! What both programs share as daemons: logs, metrics, readiness, liveness, drain and the admin endpoint. Nothing here
//! knows meshes, Kubernetes or kernels.
//!
//! A program's wiring is: [`telemetry::init`], [`descriptors::raise_limit`], [`drain::on_signal`], [`admin::Admin::bind`], spawn [`admin::Admin::serve`],
//! do the work until the token is cancelled, [`drain::within`] a bound.
#![forbid(unsafe_code)]

pub mod admin;
pub mod descriptors;
pub mod drain;
pub mod liveness;
pub mod metrics;
pub mod readiness;
pub mod telemetry;

pub use admin::{Admin, Audience, State};
pub use liveness::{Heartbeat, Liveness};
pub use readiness::{Pending, Readiness};
pub use telemetry::LogFormat;
pub use tokio_util::sync::CancellationToken;
