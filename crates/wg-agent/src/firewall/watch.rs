//! Reports that nftables changed, in any table. A [`super::Listing`] of our table then shows what changed.

use clustermesh_netlink::{Error, Events, Protocol, Subscription};

/// Notifications of the nftables in the network namespace of the thread that called [`Watch::open`]. All tables count:
/// a flush of the whole ruleset deletes ours, too.
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

    /// Waits for the next change and consumes the notifications that have arrived by then, since one transaction sends
    /// many. The agent's own writes are among them. Lost notifications count as a change. Safe to cancel.
    ///
    /// # Errors
    /// The socket failed for good.
    pub async fn changed(&mut self) -> Result<(), Error> {
        self.0.next().await.map(drop)
    }
}
