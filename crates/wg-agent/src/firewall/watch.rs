//! Tells that someone wrote to nftables; what they wrote is for a listing to say.

use std::io;

use futures::FutureExt;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_NETFILTER};
use rustix::io::Errno;

/// Changes to the nftables of the network namespace whose thread called [`Watch::open`], of any table: a flush of the
/// whole ruleset takes ours too.
pub struct Watch {
    socket: TokioSocket,
}

/// NFNLGRP_NFTABLES (linux/netfilter/nfnetlink.h).
const GROUP: u32 = 7;

impl Watch {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the kernel gives none; the agent then has to look by itself now and then.
    pub fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        socket.socket_mut().add_membership(GROUP)?;
        Ok(Self { socket })
    }

    /// Waits for the next change, and takes in with it what else was said by then: one transaction makes many events. Our
    /// own are among them; a pass over those finds nothing to do. Safe to cancel.
    ///
    /// # Errors
    /// When the socket fails for good.
    pub async fn changed(&mut self) -> io::Result<()> {
        heard(self.socket.recv_from_full().await)?;
        while let Some(more) = self.socket.recv_from_full().now_or_never() {
            heard(more)?;
        }
        Ok(())
    }
}

/// Lost events (ENOBUFS) are news as well.
fn heard<T>(received: io::Result<T>) -> io::Result<()> {
    match received {
        Err(error) if error.raw_os_error() != Some(Errno::NOBUFS.raw_os_error()) => Err(error),
        _ => Ok(()),
    }
}
