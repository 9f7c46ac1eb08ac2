//! How `wg-agent status` reaches the agent that runs on this node: over a Unix socket next to the agent's lock, whatever
//! `--listen` says. The agent answers root alone with its state, and closes.

use std::{
    io::{self, Read},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

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

/// In addition to the socket's mode, which a call between `bind` and `chmod` would not meet.
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
    /// It closed without a word, or said something else than its state.
    #[error("the agent gave no state: it answers root alone, and only once it has started ({0})")]
    Nothing(String),
    /// It said nothing for too long.
    #[error("the agent does not answer within {} s: it is starting, ending or stuck; its log says which", PATIENCE.as_secs())]
    Silent,
}

/// Asks the agent of this network namespace for its state.
pub(crate) fn ask() -> Result<Value, AskError> {
    ask_at(&lock::status_socket().map_err(|error| AskError::Nobody(io::Error::other(error)))?)
}

fn ask_at(path: &Path) -> Result<Value, AskError> {
    let mut stream = UnixStream::connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => AskError::Nothing(error.to_string()),
        _ => AskError::Nobody(error),
    })?;
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
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("status");
        let listener = UnixListener::bind(&path).unwrap();
        let (dump, stop) = (Dump::default(), CancellationToken::new());
        dump.set("agent", serde_json::json!({"mode": "full"}));
        let answering = tokio::spawn(answer(listener, dump, stop.clone()));
        let ask = move || {
            let path = path.clone();
            tokio::task::spawn_blocking(move || ask_at(&path))
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
