//! Shuts a program down: a signal cancels one token that every task watches, and the remaining work has a time limit.

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
                tracing::info!(signal = name, "draining; a second signal ends at once");
                cancelled.cancel();
            } else {
                tracing::warn!(signal = name, "second signal: ending without draining");
                std::process::exit(1);
            }
        }
    });
    Ok(token)
}

/// Waits for the remaining work, at most for `bound`. `None` = it was not done by then.
pub async fn within<T>(bound: Duration, rest: impl Future<Output = T>) -> Option<T> {
    let done = tokio::time::timeout(bound, rest).await.ok();
    if done.is_none() {
        tracing::warn!(
            seconds = bound.as_secs_f32(),
            "not drained within the bound; ending anyway"
        );
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_is_awaited_until_the_bound() {
        assert_eq!(within(Duration::from_secs(60), async { 7 }).await, Some(7));
        assert_eq!(
            within(Duration::from_millis(1), std::future::pending::<()>()).await,
            None
        );
    }
}
