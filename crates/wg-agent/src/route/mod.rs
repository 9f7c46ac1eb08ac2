//! Applies the addresses, routes and rules that [`clustermesh_agent_core::routes`] desires: the trait [`Routing`] with
//! an rtnetlink and an in-memory implementation; also kernel settings and path MTUs.
//!
//! Ownership: `observe` returns only objects with our table and protocol number, and the addresses of our device. So a
//! diff cannot touch anything else.

use std::{future::Future, net::IpAddr};

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::TABLE,
    prefixes::Family,
    routes::{Change, Routes, diff},
};
use clustermesh_netlink::{Errno, Error as NetlinkError};
use netlink_packet_route::AddressFamily;

mod memory;
pub mod paths;
mod rtnetlink;
mod rules;
pub mod sysctl;
mod watch;

pub use memory::Memory;
pub use rtnetlink::Netlink;
pub use watch::{RoutingEvent, Watch};

/// A kernel's routing, as far as it belongs to the agent.
pub trait Routing: Send {
    /// Our addresses, routes and rules. A missing device has no addresses and is no error.
    fn observe(&mut self) -> impl Future<Output = Result<Routes, Error>> + Send;

    /// Applies one change. Deleting what is already gone is no error.
    fn apply(&mut self, change: &Change) -> impl Future<Output = Result<(), Error>> + Send;
}

/// Why the kernel's routing could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No netlink socket.
    #[error(transparent)]
    Open(NetlinkError),
    /// A dump failed.
    #[error("cannot read the {what} of this node: {source}")]
    Read {
        /// What was asked for.
        what: &'static str,
        /// The kernel's answer.
        source: NetlinkError,
    },
    /// The device does not exist.
    #[error("there is no interface {0}; its routes are added when the device exists again")]
    NoDevice(InterfaceName),
    /// The device was down, and the kernel refused to bring it up.
    #[error(
        "cannot bring up interface {device}: {source}{}; the kernel accepts no route to an interface that is down, see `ip link show {device}`",
        capability_hint(source)
    )]
    SetUp {
        /// The device.
        device: InterfaceName,
        /// The kernel's answer.
        source: NetlinkError,
    },
    /// The kernel refused a change.
    #[error("{change}: {source}{}", hint(change, source))]
    Change {
        /// The change.
        change: Box<Change>,
        /// The kernel's answer.
        source: NetlinkError,
    },
}

/// The likely cause, where an errno alone does not say it.
fn hint(change: &Change, source: &NetlinkError) -> String {
    match (source.errno(), change) {
        (Some(Errno::EXIST), Change::AddRoute(_)) => {
            format!(
                "; another program's route has this key in table {TABLE}, which must contain only wg-agent's routes: remove it"
            )
        }
        (Some(Errno::PERM | Errno::ACCESS), Change::AddAddress(IpAddr::V6(_))) => {
            "; IPv6 is switched off on the device (disable_ipv6), or NET_ADMIN is missing".to_owned()
        }
        (Some(Errno::INVAL), Change::AddRoute(_) | Change::ReplaceRoute(_)) => {
            "; the source address may be gone from this node".to_owned()
        }
        _ => capability_hint(source).to_owned(),
    }
}

fn capability_hint(source: &NetlinkError) -> &'static str {
    match source.errno() {
        Some(Errno::PERM) => "; this needs the capability NET_ADMIN",
        _ => "",
    }
}

const fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

/// The result of applying routes.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Changes that were made, in order.
    pub done: Vec<Change>,
    /// Changes that failed. The others were tried all the same.
    pub failed: Vec<Error>,
}

/// Applies `desired`: one message for each difference, none if nothing differs. A returned error means that nothing was
/// changed.
pub async fn converge<R: Routing>(routing: &mut R, desired: &Routes) -> Result<Outcome, Error> {
    make(routing, desired, |_| true).await
}

/// As [`converge`], if the device could not be opened. What refers to the device stays, since its tunnels may work;
/// nothing new is put on it, since an interface of that name may belong to another program.
pub async fn converge_without_device<R: Routing>(routing: &mut R, desired: &Routes) -> Result<Outcome, Error> {
    make(routing, desired, |change| !change.puts_on_device()).await
}

async fn make<R: Routing>(
    routing: &mut R,
    desired: &Routes,
    wanted: impl Fn(&Change) -> bool,
) -> Result<Outcome, Error> {
    let observed = routing.observe().await?;
    let mut pass = Outcome::default();
    let changes = diff(&observed, desired).unwrap_or_default();
    for change in changes.into_iter().filter(wanted) {
        match routing.apply(&change).await {
            Ok(()) => pass.done.push(change),
            Err(error) => pass.failed.push(error),
        }
    }
    Ok(pass)
}

/// Removes everything of ours; a failure does not stop it, and all failures are returned.
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
    async fn failed_route_change_is_reported_and_the_rest_applied() {
        let mut kernel = Memory::default();
        kernel.refuse.push("unreachable 10.1.0.0/16".to_owned());
        let pass = converge(&mut kernel, &routes()).await.unwrap();
        assert_eq!(
            pass.failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                "route add unreachable 10.1.0.0/16 table 5182 metric 4096: File exists (os error 17); another program's route has this key in table 5182, which must contain only wg-agent's routes: remove it"
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

    #[test]
    fn failure_to_bring_the_device_up_names_it_and_the_remedy() {
        let error = Error::SetUp {
            device: "kilo0".parse().unwrap(),
            source: NetlinkError::Kernel {
                errno: Errno::PERM,
                message: None,
            },
        };
        assert_eq!(
            error.to_string(),
            "cannot bring up interface kilo0: Operation not permitted (os error 1); this needs the capability NET_ADMIN; the kernel accepts no route to an interface that is down, see `ip link show kilo0`"
        );
    }

    #[tokio::test]
    async fn route_cleanup_continues_and_reports_every_failure() {
        let mut kernel = Memory {
            routes: routes(),
            ..Memory::default()
        };
        kernel.refuse.extend(["pref 1000".to_owned(), "10.1.0.0/24".to_owned()]);
        assert_eq!(cleanup(&mut kernel).await.len(), 2);
        assert_eq!((kernel.routes.routes.len(), kernel.routes.rules.len()), (1, 1));
    }
}
