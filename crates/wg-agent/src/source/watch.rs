//! Watches one kind of object: a list, then changes, with retries.
//!
//! Objects that were listed stay until newer ones are known: an API server that goes away changes nothing.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBuilder};
use futures::TryStreamExt;
use kube::{
    Api, Resource, ResourceExt,
    runtime::watcher::{self, Event},
};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

/// Objects of one kind by name, as far as known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum WatchedKind<V> {
    /// Never listed since this process started.
    #[default]
    Pending,
    /// The API server does not know the kind: its CRD is not installed. Counts as no objects.
    CrdMissing,
    /// Not listed since this process started; taken from the cache until the first list.
    Cached(BTreeMap<String, V>),
    /// Listed completely, and kept up to date as far as possible.
    Listed(BTreeMap<String, V>),
}

impl<V> WatchedKind<V> {
    /// The objects; none if the kind is unknown or not listed yet: check
    /// [`super::store::ClusterSnapshot::pending_kinds`] first.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&str, &V)> {
        let objects = match self {
            Self::Pending | Self::CrdMissing => None,
            Self::Cached(objects) | Self::Listed(objects) => Some(objects),
        };
        objects
            .into_iter()
            .flatten()
            .map(|(name, value)| (name.as_str(), value))
    }
}

/// Takes the objects and errors of one watch.
pub(crate) trait WatchSink<V>: Send {
    /// Changes the objects; the closure returns whether anything changed.
    fn change(&self, change: impl FnOnce(&mut WatchedKind<V>) -> bool + Send);
    /// A list or watch failed.
    fn failed(&self, error: &watcher::Error);
}

/// Timeout of a watch request: an idle watch is renewed after it.
const WATCH_SECONDS: u32 = 60;
/// Pause before an unknown kind is listed again.
const ABSENT_RETRY: Duration = Duration::from_secs(3);
/// How long a kind must be unknown until it counts as not installed, because a starting API server may not know its
/// CRDs yet. Where the kind was listed before, believing it would tear the mesh down. Where it was not (`_FIRST`), the
/// kernel may still deny what an earlier process denied.
const ABSENT_BELIEVED: Duration = Duration::from_secs(60);
const ABSENT_BELIEVED_FIRST: Duration = Duration::from_secs(10);

/// Since when a kind has been unknown without interruption.
#[derive(Debug, Default)]
struct Absence(Option<Instant>);

impl Absence {
    /// The kind is unknown again; returns for how long.
    fn absent_for(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.0.get_or_insert(now))
    }

    /// Another answer, or none.
    fn reset(&mut self) {
        self.0 = None;
    }
}

impl<V> WatchedKind<V> {
    /// Whether a kind becomes [`Self::CrdMissing`] now, after the API server has not known it for `absent`.
    fn becomes_absent(&self, absent: Duration) -> bool {
        match self {
            Self::CrdMissing => false,
            Self::Pending => absent > ABSENT_BELIEVED_FIRST,
            Self::Cached(_) | Self::Listed(_) => absent > ABSENT_BELIEVED,
        }
    }
}

fn backoff() -> impl Iterator<Item = Duration> {
    // At most a few seconds: requests are cheap, and the node waits for the answer.
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(250))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times()
        .build()
}

/// Watches until the token is cancelled. `convert` parses each object; equal values are no change.
pub(crate) async fn watch_kind<K, V>(
    api: Api<K>,
    config: watcher::Config,
    convert: impl Fn(K) -> V + Send,
    sink: impl WatchSink<V>,
    stop: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send,
{
    let mut events = Box::pin(watcher::watcher(api, config.timeout(WATCH_SECONDS)));
    let mut pause = backoff();
    let mut absence = Absence::default();
    let mut listing: BTreeMap<String, V> = BTreeMap::new();
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.try_next() => event,
        };
        let wait = match event {
            Ok(Some(event)) => {
                // A watcher emits Init before its first request.
                if !matches!(event, Event::Init) {
                    pause = backoff();
                    absence.reset();
                }
                handle_event(event, &mut listing, &convert, &sink);
                continue;
            }
            Ok(None) => return, // a watcher never ends
            Err(error) if is_unknown_kind(&error) => {
                let absent_for = absence.absent_for(Instant::now());
                sink.change(|seen| {
                    let changed = seen.becomes_absent(absent_for);
                    if changed {
                        *seen = WatchedKind::CrdMissing;
                    }
                    changed
                });
                ABSENT_RETRY
            }
            Err(error) => {
                absence.reset();
                sink.failed(&error);
                pause.next().unwrap_or(ABSENT_RETRY)
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

fn handle_event<K: Resource, V: PartialEq + Send>(
    event: Event<K>,
    listing: &mut BTreeMap<String, V>,
    convert: &(impl Fn(K) -> V + Send),
    sink: &impl WatchSink<V>,
) {
    match event {
        Event::Init => listing.clear(),
        Event::InitApply(object) => {
            listing.insert(object.name_any(), convert(object));
        }
        Event::InitDone => {
            let whole = WatchedKind::Listed(std::mem::take(listing));
            sink.change(move |seen| {
                let changed = *seen != whole;
                *seen = whole;
                changed
            });
        }
        Event::Apply(object) => {
            let (name, value) = (object.name_any(), convert(object));
            sink.change(move |seen| match seen {
                WatchedKind::Listed(objects) if objects.get(&name) == Some(&value) => false,
                WatchedKind::Listed(objects) => {
                    objects.insert(name, value);
                    true
                }
                WatchedKind::Pending | WatchedKind::CrdMissing | WatchedKind::Cached(_) => false, // a watcher lists first
            });
        }
        Event::Delete(object) => {
            let name = object.name_any();
            sink.change(move |seen| match seen {
                WatchedKind::Listed(objects) => objects.remove(&name).is_some(),
                WatchedKind::Pending | WatchedKind::CrdMissing | WatchedKind::Cached(_) => false,
            });
        }
    }
}

/// A list of an unknown kind returns 404; an empty list never does.
fn is_unknown_kind(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a watch in state `seen` reports the kind as missing after each answer: seconds since the start, and
    /// whether the answer was the 404 of an unknown kind or none at all.
    fn believes(seen: &WatchedKind<()>, answers: &[(u64, bool)]) -> Vec<bool> {
        let start = Instant::now();
        let mut absence = Absence::default();
        let mut believed = |(at, missing): &(u64, bool)| {
            if !missing {
                absence.reset();
                return false;
            }
            seen.becomes_absent(absence.absent_for(start + Duration::from_secs(*at)))
        };
        answers.iter().map(&mut believed).collect()
    }

    #[test]
    fn kind_missing_at_the_start_is_believed_after_ten_seconds() {
        let answers = [(0, true), (3, true), (9, true), (12, true)];
        assert_eq!(believes(&WatchedKind::Pending, &answers), [false, false, false, true]);
        // The API server restarted in between, and may not know its CRDs yet.
        let answers = [(0, true), (3, false), (12, true), (15, true), (24, true)];
        assert_eq!(
            believes(&WatchedKind::Pending, &answers),
            [false, false, false, false, true]
        );
    }

    #[test]
    fn kind_missing_later_is_believed_after_a_minute() {
        let answers = [(0, true), (12, true), (60, true), (63, true)];
        assert_eq!(
            believes(&WatchedKind::Listed(BTreeMap::new()), &answers),
            [false, false, false, true]
        );
        assert_eq!(
            believes(&WatchedKind::Cached(BTreeMap::new()), &answers),
            [false, false, false, true]
        );
        assert_eq!(believes(&WatchedKind::CrdMissing, &answers), [false; 4]);
    }
}
