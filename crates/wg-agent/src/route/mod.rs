//! How the kernel's routing is told what [`clustermesh_agent_core::routes`] wants: a trait, the rtnetlink backend, one in
//! memory, and the settings beside it. What should be there is not decided here.
//!
//! Ownership: `observe` returns what carries our table and protocol number, and the addresses of our own device. So a diff
//! cannot touch anything else.

use std::{future::Future, io, net::IpAddr};

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::TABLE,
    routes::{Change, Routes, diff},
};

mod memory;
pub mod paths;
mod rtnetlink;
mod rules;
pub mod sysctl;
mod watch;

pub use memory::Memory;
pub use rtnetlink::Netlink;
pub use watch::{News, Watch};

/// A kernel's routing, as far as it is ours.
pub trait Routing: Send {
    /// What is there of ours. Without a device there are no addresses; that is no error.
    fn observe(&mut self) -> impl Future<Output = Result<Routes, Error>> + Send;

    /// Makes one change. Taking away what is gone already is no error.
    fn apply(&mut self, change: &Change) -> impl Future<Output = Result<(), Error>> + Send;
}

/// Why the kernel's routing could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No netlink socket.
    #[error("cannot open a netlink socket: {0}")]
    Open(#[source] io::Error),
    /// A dump failed.
    #[error("cannot read the {what} of this node: {source}")]
    Read {
        /// What was asked for.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The device is not there.
    #[error("there is no interface {0}; routes into it wait until the device is made again")]
    NoDevice(InterfaceName),
    /// The kernel refused a change.
    #[error("{change}: {source}{}", hint(change, source))]
    Change {
        /// The change.
        change: Box<Change>,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// The likely cause, where an errno alone does not say it.
fn hint(change: &Change, source: &io::Error) -> String {
    let code = source
        .raw_os_error()
        .and_then(|code| rustix::io::Errno::from_raw_os_error(code).into());
    match (code, change) {
        (Some(rustix::io::Errno::EXIST), Change::AddRoute(_)) => {
            format!(
                "; someone else's route has this place in table {TABLE}, which is meant to be ours alone: remove it"
            )
        }
        (Some(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS), Change::AddAddress(IpAddr::V6(_))) => {
            "; IPv6 is switched off on the device (disable_ipv6), or NET_ADMIN is missing".to_owned()
        }
        (Some(rustix::io::Errno::PERM), _) => "; this needs the capability NET_ADMIN".to_owned(),
        (Some(rustix::io::Errno::INVAL), Change::AddRoute(_) | Change::ReplaceRoute(_)) => {
            "; the source address may be gone from this node".to_owned()
        }
        _ => String::new(),
    }
}

/// What one pass did.
#[derive(Debug, Default)]
pub struct Pass {
    /// Changes that were made, in order.
    pub done: Vec<Change>,
    /// Those that were not. The rest was tried all the same.
    pub failed: Vec<Error>,
}

/// Brings the kernel from what is there to `desired`: one message for each thing that differs, none if nothing does.
/// An error that is returned means that nothing was changed.
pub async fn converge<R: Routing>(routing: &mut R, desired: &Routes) -> Result<Pass, Error> {
    make(routing, desired, |_| true).await
}

/// The same where the device could not be opened. What stands on it stays, since its tunnels may well live; nothing new is
/// put there, since an interface of its name may be somebody's.
pub async fn converge_without_device<R: Routing>(routing: &mut R, desired: &Routes) -> Result<Pass, Error> {
    make(routing, desired, |change| !change.puts_on_device()).await
}

async fn make<R: Routing>(routing: &mut R, desired: &Routes, wanted: impl Fn(&Change) -> bool) -> Result<Pass, Error> {
    let observed = routing.observe().await?;
    let mut pass = Pass::default();
    let changes = diff(&observed, desired).unwrap_or_default();
    for change in changes.into_iter().filter(wanted) {
        match routing.apply(&change).await {
            Ok(()) => pass.done.push(change),
            Err(error) => pass.failed.push(error),
        }
    }
    Ok(pass)
}

/// Takes everything of ours away, carrying on past errors; returns all of them.
pub async fn cleanup<R: Routing>(routing: &mut R) -> Vec<Error> {
    match converge(routing, &Routes::default()).await {
        Ok(pass) => pass.failed,
        Err(error) => vec![error],
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::routes::{Plan, desired};

    use super::*;

    fn routes() -> Routes {
        let nets = |text: &str| [text.parse().unwrap()].into();
        desired(&Plan {
            peers: nets("10.1.0.0/24"),
            mesh: nets("10.1.0.0/16"),
            ..Plan::default()
        })
    }

    #[tokio::test]
    async fn a_change_that_fails_is_reported_and_the_rest_is_made() {
        let mut kernel = Memory::default();
        kernel.refuse.push("unreachable 10.1.0.0/16".to_owned());
        let pass = converge(&mut kernel, &routes()).await.unwrap();
        assert_eq!(
            pass.failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                "route add unreachable 10.1.0.0/16 table 5182 metric 4096: File exists (os error 17); someone else's route has this place in table 5182, which is meant to be ours alone: remove it"
            ]
        );
        assert_eq!(pass.done.len(), 4);
        kernel.refuse.clear();
        let pass = converge(&mut kernel, &routes()).await.unwrap();
        assert_eq!(
            pass.done.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["route add unreachable 10.1.0.0/16 table 5182 metric 4096"]
        );
        assert_eq!(kernel.routes, routes());
    }

    #[tokio::test]
    async fn cleanup_carries_on_and_reports_every_failure() {
        let mut kernel = Memory {
            routes: routes(),
            ..Memory::default()
        };
        kernel.refuse.extend(["pref 1000".to_owned(), "10.1.0.0/24".to_owned()]);
        assert_eq!(cleanup(&mut kernel).await.len(), 2);
        assert_eq!((kernel.routes.routes.len(), kernel.routes.rules.len()), (1, 1));
    }
}
