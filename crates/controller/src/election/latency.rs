//! Chooses the duration of the leader's Lease by the time that the hub takes to answer.
//!
//! The right to write begins when a renewal is sent, and the next renewal is sent only after this one is answered. So the right must
//! last longer than two requests take. Otherwise it lapses before the second one is answered. A longer Lease delays the next
//! leader, so it is used only while the hub is slow.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use kube::Error;
use tokio::time::Instant;

use super::{LEASE, lease::DURATION};

/// The duration of the Lease while the hub is slow.
const SLOW_DURATION: Duration = Duration::from_secs(20);
/// The hub counts as slow from a request that takes longer than `SLOW` until one that takes less than `FAST`.
const SLOW: Duration = Duration::from_secs(1);
const FAST: Duration = Duration::from_millis(500);

/// For how long the leader may write after it has sent a successful renewal of a Lease of `duration`. The result is shorter than
/// `duration`, so that the leader's last requests end before another replica takes the Lease.
pub(super) fn validity(duration: Duration) -> Duration {
    duration * 3 / 4
}

/// Whether the hub is slow.
#[derive(Default)]
pub(super) struct Latency {
    is_slow: AtomicBool,
}

impl Latency {
    /// The duration of the Lease for the next renewal.
    pub(super) fn lease_duration(&self) -> Duration {
        if self.is_slow.load(Ordering::Relaxed) {
            SLOW_DURATION
        } else {
            DURATION
        }
    }

    /// Sends a request, and records whether it was slow.
    pub(super) async fn measure<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let sent = Instant::now();
        let answer = request.await;
        let took = sent.elapsed();
        let was_slow = self.is_slow.load(Ordering::Relaxed);
        let is_slow = took > if was_slow { FAST } else { SLOW };
        self.is_slow.store(is_slow, Ordering::Relaxed);
        if is_slow && !was_slow {
            tracing::warn!(
                lease = LEASE,
                ?took,
                "the hub answers slowly or not at all: while it does, another replica replaces a failed leader only after {} s",
                SLOW_DURATION.as_secs()
            );
        }
        answer
    }
}
