//! Shuts down a program: a signal cancels one token that every task watches, and a time limit applies to the remaining work.

use std::{future::Future, time::Duration};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that SIGTERM or SIGINT cancels. A second signal ends the process at once, with status 1.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if first {
                tracing::info!(signal = name, "draining; a second signal exits at once");
                cancelled.cancel();
            } else {
                tracing::warn!(signal = name, "second signal: exiting without draining");
                std::process::exit(1);
            }
        }
    });
    Ok(token)
}

/// Waits for the remaining work, at most for `limit`. `None` = the work did not finish in time.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let done = tokio::time::timeout(limit, work).await.ok();
    if done.is_none() {
        tracing::warn!(
            seconds = limit.as_secs_f32(),
            "work not finished within the time limit; exiting anyway"
        );
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_is_awaited_until_the_time_limit() {
        assert_eq!(within(Duration::from_secs(60), async { 7 }).await, Some(7));
        assert_eq!(
            within(Duration::from_millis(1), std::future::pending::<()>()).await,
            None
        );
    }
}
