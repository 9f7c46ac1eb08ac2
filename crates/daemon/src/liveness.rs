//! Whether the loops of a program still turn, so that `/healthz` fails when one is wedged. A loop that waits for a remote
//! side must beat meanwhile: being cut off is no reason to be restarted.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The loops that are watched. Cheap to clone; all clones are one list.
#[derive(Debug, Clone, Default)]
pub struct Liveness(Arc<Mutex<BTreeMap<String, Beat>>>);

#[derive(Debug)]
struct Beat {
    last: Instant,
    limit: Duration,
}

impl Liveness {
    /// Nothing watched: alive.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Watches a loop that promises to beat at least every `limit`, until the returned value is dropped.
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

    /// The loops that have been silent for longer than they promised, and for how long.
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
    /// The loop turned.
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
    fn a_loop_that_is_silent_for_longer_than_it_promised_is_named() {
        let liveness = Liveness::new();
        let _patient = liveness.watch("patient", Duration::from_secs(3600));
        let prompt = liveness.watch("prompt", Duration::ZERO);
        let names = || liveness.silent().into_keys().collect::<Vec<_>>();
        assert_eq!(names(), ["prompt"]);
        drop(prompt);
        assert_eq!(names(), Vec::<String>::new());
    }
}
