//! Notifies of changes of nftables, in any table. A [`super::Listing`] then shows whether the agent's table changed.

use clustermesh_netlink::{Error, Events, Protocol, Subscription};

/// Notifications of nftables changes in the network namespace of the thread that called [`Watch::open`]. All tables count,
/// because a flush of the whole ruleset deletes the agent's table, too.
pub struct Watch(Events);

/// NFNLGRP_NFTABLES (linux/netfilter/nfnetlink.h).
const GROUP: u32 = 7;

impl Watch {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be opened; the caller must poll then.
    pub fn open() -> Result<Self, Error> {
        let subscription = Subscription {
            groups: &[GROUP],
            ..Subscription::default()
        };
        Events::open(Protocol::Netfilter, subscription).map(Self)
    }

    /// Waits for the next change and consumes the notifications that have arrived, because one transaction sends many.
    /// The agent's own writes are also reported. Lost notifications count as a change. Safe to cancel.
    ///
    /// # Errors
    /// The socket failed; open a new one.
    pub async fn changed(&mut self) -> Result<(), Error> {
        self.0.next().await.map(drop)
    }
}
