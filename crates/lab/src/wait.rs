//! Polls a condition until it is true or a timeout expires.

use std::time::{Duration, Instant};

use crate::{Error, Result};

/// Time limit of the check after the timeout.
const LAST_CHECK: Duration = Duration::from_secs(5);

/// Runs `check` until it returns a value, with a pause of 50 ms after each `Err`. `Err(state)` means that the condition is not true
/// yet, and describes the current state. `what` names the condition in the error. The last check begins after the timeout: the
/// condition may have become true while this process did not run.
///
/// # Errors
/// [`Error::Timeout`] after `timeout` and the last check, which takes at most 5 s, even if a check hangs. It contains the condition and
/// the last state.
pub async fn wait_until<T, F>(what: impl Into<String>, timeout: Duration, mut check: F) -> Result<T>
where
    F: AsyncFnMut() -> std::result::Result<T, String>,
{
    let what = what.into();
    let start = Instant::now();
    let mut last = "the check itself did not return".to_owned();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let is_last = left.is_zero();
        match tokio::time::timeout(if is_last { LAST_CHECK } else { left }, check()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(state)) => last = state,
            Err(_) => {}
        }
        if is_last {
            return Err(Error::Timeout {
                what,
                seconds: start.elapsed().as_secs_f64(),
                last,
            });
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn timeout_error_names_condition_and_last_state() {
        let error = wait_until("the moon", Duration::from_millis(120), async || {
            Err::<(), _>("still dark".to_owned())
        })
        .await;
        let text = error.unwrap_err().to_string();
        assert!(
            text.starts_with("waited 0.") && text.ends_with(" s for the moon; last state: still dark"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn hanging_check_ends_after_the_deadline() {
        let error = wait_until("an answer", Duration::from_millis(60), async || {
            std::future::pending::<()>().await;
            Ok::<(), String>(())
        })
        .await;
        let text = error.unwrap_err().to_string();
        assert!(text.ends_with("last state: the check itself did not return"), "{text}");
    }
}
