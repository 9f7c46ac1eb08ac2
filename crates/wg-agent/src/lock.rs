//! One agent a network namespace: a second one is refused before it touches anything. What it protects - the table
//! numbers, the firewall table, the device - is the namespace's, so the lock is too: a listening socket with an abstract
//! name (unix(7)), which ends with the process however that ends. Who answers there is `status::ask`.

use std::{
    io,
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
};

/// Name of the socket.
pub(crate) const NAME: &[u8] = b"clustermesh-wg-agent";

/// Held as long as the value lives.
#[derive(Debug)]
pub struct Lock {
    socket: UnixListener,
}

impl Lock {
    /// The socket, to answer at. The lock has to be held on all the same.
    pub(crate) fn listener(&self) -> io::Result<tokio::net::UnixListener> {
        self.socket.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(self.socket.try_clone()?)
    }
}

/// Why the node could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent runs.
    #[error(
        "another wg-agent already serves this node's network namespace (process {holder}): stop it first; two would undo \
         each other's routes"
    )]
    Held {
        /// Process id as this process sees it, or words where it is in another process namespace.
        holder: String,
    },
    /// The system said no.
    #[error("cannot take the agent's lock, the abstract socket @clustermesh-wg-agent: {0}")]
    Io(#[from] io::Error),
}

/// Takes the lock, or says who has it.
pub fn take() -> Result<Lock, LockError> {
    named(NAME)
}

fn named(name: &[u8]) -> Result<Lock, LockError> {
    let address = SocketAddr::from_abstract_name(name)?;
    match UnixListener::bind_addr(&address) {
        Ok(socket) => Ok(Lock { socket }),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(LockError::Held {
            holder: holder(&address),
        }),
        Err(error) => Err(error.into()),
    }
}

/// The credentials of a listening socket are those of the process that listens (unix(7), SO_PEERCRED).
fn holder(address: &SocketAddr) -> String {
    let hidden = || "in another process namespace".to_owned();
    let Ok(stream) = UnixStream::connect_addr(address) else {
        return hidden();
    };
    match nix::sys::socket::getsockopt(&stream.as_fd(), nix::sys::socket::sockopt::PeerCredentials) {
        Ok(credentials) if credentials.pid() > 0 => credentials.pid().to_string(),
        _ => hidden(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_is_the_first_and_may_follow_it() {
        let name = format!("clustermesh-test-{}", std::process::id());
        let take = || named(name.as_bytes());
        let first = take().unwrap();
        let error = take().unwrap_err().to_string();
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
        drop(first);
        take().unwrap();
    }
}
