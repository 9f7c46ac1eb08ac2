//! Tells that someone wrote to nftables; what they wrote is for a listing to say.

use std::io;

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

    /// Waits for the next change. Our own make events too: a pass over them finds nothing to do. One transaction makes
    /// many; wait a moment before looking. Safe to cancel.
    ///
    /// # Errors
    /// When the socket fails for good.
    pub async fn changed(&mut self) -> io::Result<()> {
        match self.socket.recv_from_full().await {
            Ok(_) => Ok(()),
            // Lost events are news as well.
            Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
