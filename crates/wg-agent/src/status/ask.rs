//! How `wg-agent status` reaches the agent that runs on this node: over an abstract socket of the node's network
//! namespace, whatever `--listen` says. The agent answers every root there with its state, and closes.

use std::{
    io::{self, Read},
    os::fd::AsFd,
    os::linux::net::SocketAddrExt,
    os::unix::net::{SocketAddr, UnixStream},
    time::Duration,
};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde_json::Value;
use tokio::{
    io::AsyncWriteExt,
    net::{UnixListener, UnixStream as Caller},
};
use tokio_util::sync::CancellationToken;

use super::Dump;
use crate::lock;

/// For one answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers until the token is cancelled.
pub(crate) async fn answer(listener: UnixListener, dump: Dump, stop: CancellationToken) {
    loop {
        let caller = tokio::select! {
            () = stop.cancelled() => return,
            caller = listener.accept() => caller,
        };
        match caller {
            Ok((caller, _)) if root(&caller) => {
                let dump = dump.clone();
                // Who is slow to read delays nobody but itself.
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(PATIENCE, tell(caller, &dump)).await;
                });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a caller went away");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn tell(mut caller: Caller, dump: &Dump) -> io::Result<()> {
    caller.write_all(format!("{:#}\n", dump.get()).as_bytes()).await?;
    caller.shutdown().await
}

/// An abstract socket has no mode: the kernel says who calls.
fn root(caller: &Caller) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    caller.peer_cred().is_ok_and(|who| who.uid() == 0 || who.uid() == own)
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// Nobody listens.
    #[error(
        "no wg-agent runs in this network namespace ({0}). Run this in the agent's pod (`kubectl -n NAMESPACE exec POD -- \
         wg-agent status`) or as root on its node; where the agent should run, its log says why it does not"
    )]
    Nobody(io::Error),
    /// Whoever answers is no agent.
    #[error(
        "process {process} of user {user}, which is no wg-agent, has the socket @clustermesh-wg-agent: stop it and restart the agent"
    )]
    Stranger {
        /// Process id as this process sees it.
        process: i32,
        /// User id.
        user: u32,
    },
    /// It closed without a word, or said something else than its state.
    #[error("the agent gave no state: it answers root alone, and only once it has started ({0})")]
    Nothing(String),
    /// It said nothing for too long.
    #[error("the agent does not answer within {} s: it is starting, ending or stuck; its log says which", PATIENCE.as_secs())]
    Silent,
}

/// Asks the agent of this network namespace for its state.
pub(crate) fn ask() -> Result<Value, AskError> {
    ask_named(lock::NAME)
}

fn ask_named(name: &[u8]) -> Result<Value, AskError> {
    let address = SocketAddr::from_abstract_name(name).map_err(AskError::Nobody)?;
    let mut stream = UnixStream::connect_addr(&address).map_err(AskError::Nobody)?;
    // Any process of the namespace may bind an abstract name.
    let own = nix::unistd::geteuid().as_raw();
    let who = getsockopt(&stream.as_fd(), PeerCredentials).map_err(|error| AskError::Nobody(error.into()))?;
    if who.uid() != 0 && who.uid() != own {
        return Err(AskError::Stranger {
            process: who.pid(),
            user: who.uid(),
        });
    }
    stream.set_read_timeout(Some(PATIENCE)).map_err(AskError::Nobody)?;
    let mut text = String::new();
    match stream.read_to_string(&mut text) {
        Ok(_) => serde_json::from_str(&text).map_err(|error| AskError::Nothing(error.to_string())),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(AskError::Silent)
        }
        Err(error) => Err(AskError::Nothing(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn who_asks_is_answered_until_the_agent_ends() {
        let name = format!("clustermesh-ask-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (dump, stop) = (Dump::default(), CancellationToken::new());
        dump.set("agent", serde_json::json!({"mode": "full"}));
        let answering = tokio::spawn(answer(UnixListener::from_std(listener).unwrap(), dump, stop.clone()));
        let ask = move || {
            let name = name.clone();
            tokio::task::spawn_blocking(move || ask_named(name.as_bytes()))
        };
        for _ in 0..2 {
            let answer = ask().await.unwrap().unwrap();
            assert_eq!(answer, serde_json::json!({"agent": {"mode": "full"}}));
        }
        stop.cancel();
        answering.await.unwrap();
        let error = ask().await.unwrap().unwrap_err();
        assert!(matches!(error, AskError::Nobody(_)), "{error}");
    }
}
