//! Reports that nftables changed, in any table. A [`super::Listing`] of our table then shows what changed.

use std::io;

use futures::FutureExt;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_NETFILTER};
use rustix::io::Errno;

/// Notifications of the nftables in the network namespace of the thread that called [`Watch::open`]. All tables count:
/// a flush of the whole ruleset deletes ours, too.
pub struct Watch {
    socket: TokioSocket,
}

/// NFNLGRP_NFTABLES (linux/netfilter/nfnetlink.h).
const GROUP: u32 = 7;

impl Watch {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be opened; the caller must poll then.
    pub fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        socket.socket_mut().add_membership(GROUP)?;
        Ok(Self { socket })
    }

    /// Waits for the next change and consumes all notifications that have arrived by then, since one transaction sends
    /// many. The agent's own writes are among them. Safe to cancel.
    ///
    /// # Errors
    /// The socket failed for good.
    pub async fn changed(&mut self) -> io::Result<()> {
        ignore_overflow(self.socket.recv_from_full().await)?;
        while let Some(more) = self.socket.recv_from_full().now_or_never() {
            ignore_overflow(more)?;
        }
        Ok(())
    }
}

/// Lost notifications (ENOBUFS) count as a change.
fn ignore_overflow<T>(received: io::Result<T>) -> io::Result<()> {
    match received {
        Err(error) if error.raw_os_error() != Some(Errno::NOBUFS.raw_os_error()) => Err(error),
        _ => Ok(()),
    }
}
