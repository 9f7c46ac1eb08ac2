//! Watches the loops of a program: when a loop is stuck, `/healthz` fails and the kubelet restarts the container. A loop must also call
//! [`Heartbeat::beat`] while it waits for a remote server, because a lost connection is no reason for a restart.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The list of watched loops. Cheap to clone; all clones share one list.
#[derive(Debug, Clone, Default)]
pub struct Liveness(Arc<Mutex<BTreeMap<String, Beat>>>);

#[derive(Debug)]
struct Beat {
    last: Instant,
    limit: Duration,
}

impl Liveness {
    /// Creates an empty list. While no loop is watched, the program counts as alive.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Watches a loop until the returned value is dropped. The loop must call [`Heartbeat::beat`] at least every `limit`.
    pub fn watch(&self, name: impl Into<String>, limit: Duration) -> Heartbeat {
        let name = name.into();
        self.lock().insert(
            name.clone(),
            Beat {
                last: Instant::now(),
                limit,
            },
        );
        Heartbeat {
            list: self.clone(),
            name,
        }
    }

    /// Returns the loops whose last beat is longer ago than their limit, with the time since that beat.
    #[must_use]
    pub fn silent(&self) -> BTreeMap<String, Duration> {
        let now = Instant::now();
        self.lock()
            .iter()
            .map(|(name, beat)| (name, beat.limit, now.saturating_duration_since(beat.last)))
            .filter(|(_, limit, silent)| silent > limit)
            .map(|(name, _, silent)| (name.clone(), silent))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Beat>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One watched loop.
#[derive(Debug)]
#[must_use = "the loop is no longer watched when this is dropped"]
pub struct Heartbeat {
    list: Liveness,
    name: String,
}

impl Heartbeat {
    /// Records that the loop is not stuck.
    pub fn beat(&self) {
        if let Some(beat) = self.list.lock().get_mut(&self.name) {
            beat.last = Instant::now();
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.list.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_watched_loop_beyond_its_limit_is_silent() {
        let liveness = Liveness::new();
        let _patient = liveness.watch("patient", Duration::from_secs(3600));
        let prompt = liveness.watch("prompt", Duration::ZERO);
        let names = || liveness.silent().into_keys().collect::<Vec<_>>();
        assert_eq!(names(), ["prompt"]);
        drop(prompt);
        assert_eq!(names(), Vec::<String>::new());
    }
}
