//! Applies the addresses, routes and rules that [`clustermesh_agent_core::routes`] computes: the trait [`Routing`] with
//! an rtnetlink and an in-memory implementation. Also applies kernel settings and looks up path MTUs.
//!
//! Ownership: `observe` returns only the routes in the agent's tables with its protocol number, the rules with its protocol
//! number, and the addresses of its device. So a diff changes no other objects of the node.

use std::{collections::BTreeMap, future::Future, net::IpAddr};

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

/// The agent's addresses, routes and rules in a kernel.
pub trait Routing: Send {
    /// Reads the agent's addresses, routes and rules. A missing device has no addresses and is not an error.
    fn observe(&mut self) -> impl Future<Output = Result<Routes, Error>> + Send;

    /// In each family, the priority of the first rule of another program that applies to packets for the mesh, such as
    /// `not fwmark 51820 lookup 51820` of wg-quick(8). A rule before the agent's rules hides them.
    fn foreign_rules(&mut self) -> impl Future<Output = Result<BTreeMap<Family, u32>, Error>> + Send;

    /// Applies one change. Deleting an object that does not exist is not an error.
    fn apply(&mut self, change: &Change) -> impl Future<Output = Result<(), Error>> + Send;
}

/// Why the kernel's routing could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The netlink socket cannot be opened.
    #[error(transparent)]
    Open(NetlinkError),
    /// A dump failed.
    #[error("cannot read the {what} of this node: {source}")]
    Read {
        /// The kind of the dumped objects.
        what: &'static str,
        /// The kernel's error.
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
        /// The kernel's error.
        source: NetlinkError,
    },
    /// The kernel refused a change.
    #[error("{change}: {source}{}", hint(change, source))]
    Change {
        /// The change.
        change: Box<Change>,
        /// The kernel's error.
        source: NetlinkError,
    },
}

/// The likely cause of an error, if the errno alone does not show it.
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
    /// The errors of the changes that failed. A failure does not stop the other changes.
    pub failed: Vec<Error>,
}

/// Applies `desired`: makes one change for each difference from the observed state. A returned error means that nothing
/// was changed.
pub async fn converge<R: Routing>(routing: &mut R, desired: &Routes) -> Result<Outcome, Error> {
    apply_changes(routing, desired, |_| true).await
}

/// Like [`converge`], while the agent's device is not open: adds no address or route to an interface with the device's name, because
/// that interface may belong to another program. Desired addresses and routes that exist already stay: a kernel device forwards packets
/// even if the agent has not opened it.
pub async fn converge_without_device<R: Routing>(routing: &mut R, desired: &Routes) -> Result<Outcome, Error> {
    apply_changes(routing, desired, |change| !change.adds_to_device()).await
}

async fn apply_changes<R: Routing>(
    routing: &mut R,
    desired: &Routes,
    is_allowed: impl Fn(&Change) -> bool,
) -> Result<Outcome, Error> {
    let observed = routing.observe().await?;
    let mut outcome = Outcome::default();
    let changes = diff(&observed, desired).unwrap_or_default();
    for change in changes.into_iter().filter(is_allowed) {
        match routing.apply(&change).await {
            Ok(()) => outcome.done.push(change),
            Err(error) => outcome.failed.push(error),
        }
    }
    Ok(outcome)
}

/// Removes all objects of the agent. Continues after a failure, and returns all failures.
pub async fn cleanup<R: Routing>(routing: &mut R) -> Vec<Error> {
    match converge(routing, &Routes::default()).await {
        Ok(outcome) => outcome.failed,
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
        let outcome = converge(&mut kernel, &routes()).await.unwrap();
        assert_eq!(
            outcome.failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                "route add unreachable 10.1.0.0/16 table 5182 metric 4096: File exists (os error 17); another program's route has this key in table 5182, which must contain only wg-agent's routes: remove it"
            ]
        );
        assert_eq!(outcome.done.len(), 4, "two routes and two rules");
        kernel.refuse.clear();
        let outcome = converge(&mut kernel, &routes()).await.unwrap();
        assert_eq!(
            outcome.done.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["route add unreachable 10.1.0.0/16 table 5182 metric 4096"]
        );
        assert_eq!(kernel.routes, routes());
    }

    #[test]
    fn error_for_a_down_device_names_device_and_remedy() {
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
