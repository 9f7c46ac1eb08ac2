//! Serves the agent's state on a Unix socket next to the agent's lock file, and queries the socket for `wg-agent status`.
//! The socket works without `--listen`. Only root and the agent's own user get an answer.

use std::{
    io::{self, Read},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use serde_json::Value;
use tokio::{
    io::AsyncWriteExt,
    net::{UnixListener, UnixStream as Client},
};
use tokio_util::sync::CancellationToken;

use super::Dump;
use crate::lock;

/// Timeout of one query.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Serves queries until the token is cancelled.
pub(crate) async fn serve(listener: UnixListener, dump: Dump, stop: CancellationToken) {
    loop {
        let client = tokio::select! {
            () = stop.cancelled() => return,
            client = listener.accept() => client,
        };
        match client {
            Ok((client, _)) if can_query(&client) => {
                let dump = dump.clone();
                // A slow client must not delay other clients.
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(TIMEOUT, send_state(client, &dump)).await;
                });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn send_state(mut client: Client, dump: &Dump) -> io::Result<()> {
    client.write_all(format!("{:#}\n", dump.render()).as_bytes()).await?;
    client.shutdown().await
}

/// Whether the client runs as root or as this agent's user. The socket's mode alone does not protect against a
/// connection between `bind` and `chmod`.
fn can_query(client: &Client) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    client
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}

/// Why a query failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueryError {
    /// No process listens, or the path of the socket is unknown.
    #[error(
        "no wg-agent runs in this network namespace ({0}). Run this in the agent's pod (`kubectl -n NAMESPACE exec POD -- \
         wg-agent status`) or as root on its node; if the agent should run here, its log says why it does not"
    )]
    NotRunning(io::Error),
    /// The user may not open the socket, the agent closed the connection, or its answer is not JSON.
    #[error("the agent sent no state: it answers only root and its own user, and only once it has started ({0})")]
    NoState(String),
    /// The agent did not answer in time.
    #[error("the agent does not answer within {} s: it is starting, ending or stuck; its log says which", TIMEOUT.as_secs())]
    Timeout,
}

/// Queries the agent of this network namespace for its state.
pub(crate) fn query() -> Result<Value, QueryError> {
    query_at(&lock::status_socket().map_err(|error| QueryError::NotRunning(io::Error::other(error)))?)
}

fn query_at(path: &Path) -> Result<Value, QueryError> {
    let mut stream = UnixStream::connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => QueryError::NoState(error.to_string()),
        _ => QueryError::NotRunning(error),
    })?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(QueryError::NotRunning)?;
    let mut text = String::new();
    match stream.read_to_string(&mut text) {
        Ok(_) => serde_json::from_str(&text).map_err(|error| QueryError::NoState(error.to_string())),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(QueryError::Timeout)
        }
        Err(error) => Err(QueryError::NoState(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn status_query_is_answered_until_the_agent_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("status");
        let listener = UnixListener::bind(&path).unwrap();
        let (dump, stop) = (Dump::default(), CancellationToken::new());
        dump.set("agent", serde_json::json!({"mode": "full"}));
        let answering = tokio::spawn(serve(listener, dump, stop.clone()));
        let query = move || {
            let path = path.clone();
            tokio::task::spawn_blocking(move || query_at(&path))
        };
        for _ in 0..2 {
            let answer = query().await.unwrap().unwrap();
            assert_eq!(answer, serde_json::json!({"agent": {"mode": "full"}}));
        }
        stop.cancel();
        answering.await.unwrap();
        let error = query().await.unwrap().unwrap_err();
        assert!(matches!(error, QueryError::NotRunning(_)), "{error}");
    }
}
