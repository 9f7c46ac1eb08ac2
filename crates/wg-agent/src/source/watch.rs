//! Watches one kind of object: lists the objects, then receives changes, and retries after errors.
//!
//! Known objects stay until newer ones arrive or the CRD counts as missing, so an unreachable API server changes nothing.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBuilder};
use clustermesh_daemon::random;
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
    /// Not listed since this process started, and not filled from the cache.
    #[default]
    Pending,
    /// The API server does not know the kind, because its CRD is not installed. Counts as a kind without objects.
    CrdMissing,
    /// Not listed since this process started. The objects come from the cache until the first list.
    Cached(BTreeMap<String, V>),
    /// Listed completely, and kept up to date as far as possible.
    Listed(BTreeMap<String, V>),
}

impl<V> WatchedKind<V> {
    /// The listed or cached objects; none if the CRD is missing or the kind is pending. Check
    /// [`super::store::ClusterSnapshot::pending_kinds`] first, because a pending kind may have objects.
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

/// Receives the objects and errors of one watch.
pub(crate) trait WatchSink<V>: Send {
    /// Changes the objects; the closure returns whether anything changed.
    fn change(&self, change: impl FnOnce(&mut WatchedKind<V>) -> bool + Send);
    /// Records that a list or watch failed.
    fn failed(&self, error: &watcher::Error);
}

/// Timeout of a watch request in seconds, after which the watch is renewed. Each watch draws its own, so that the watches of thousands of
/// agents that connected at the same time are not renewed at the same time. A dead connection is found much earlier
/// ([`clustermesh_daemon::client`]).
const WATCH_SECONDS: RangeInclusive<u32> = 300..=600;
/// Pause before an unknown kind is listed again.
const UNKNOWN_KIND_RETRY: Duration = Duration::from_secs(3);
/// How long a kind must be unknown until its CRD counts as missing. A starting API server may not know its CRDs yet, and
/// the next pass removes the state of all objects of a missing kind.
const CRD_MISSING_AFTER: Duration = Duration::from_secs(60);
/// Replaces [`CRD_MISSING_AFTER`] for a pending kind. It is shorter, because passes change nothing while a kind is pending:
/// meanwhile only the kernel state of an earlier process is in force.
const CRD_MISSING_AFTER_AT_START: Duration = Duration::from_secs(10);

/// Since when the API server has answered every request with "unknown kind"; `None` = the last request had another result.
#[derive(Debug, Default)]
struct UnknownSince(Option<Instant>);

impl UnknownSince {
    /// Records that the kind is unknown, and returns for how long it has been unknown.
    fn record(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.0.get_or_insert(now))
    }

    /// Records any other answer, or a request without an answer.
    fn reset(&mut self) {
        self.0 = None;
    }
}

impl<V> WatchedKind<V> {
    /// Whether a kind becomes [`Self::CrdMissing`], after the API server has not known it for `unknown_for`.
    fn becomes_missing(&self, unknown_for: Duration) -> bool {
        match self {
            Self::CrdMissing => false,
            Self::Pending => unknown_for > CRD_MISSING_AFTER_AT_START,
            Self::Cached(_) | Self::Listed(_) => unknown_for > CRD_MISSING_AFTER,
        }
    }
}

pub(super) fn backoff() -> impl Iterator<Item = Duration> {
    // At most a few seconds: requests are cheap, and the node's configuration is outdated until one succeeds.
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(250))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times()
        .build()
}

/// Watches until the token is cancelled. `convert` parses each object; an object whose parsed value stays equal counts as unchanged.
/// The API server ends a watch after the timeout of `config`, or after one from [`WATCH_SECONDS`]; then the watch is renewed.
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
    let seconds = config.timeout.unwrap_or_else(|| random::within(WATCH_SECONDS));
    let mut events = Box::pin(watcher::watcher(api, config.timeout(seconds)));
    let mut pause = backoff();
    let mut unknown_since = UnknownSince::default();
    let mut listing: BTreeMap<String, V> = BTreeMap::new();
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.try_next() => event,
        };
        let wait = match event {
            Ok(Some(event)) => {
                // All events except `Init` come from an answer. A watcher emits `Init` before it requests a list.
                if !matches!(event, Event::Init) {
                    pause = backoff();
                    unknown_since.reset();
                }
                handle_event(event, &mut listing, &convert, &sink);
                continue;
            }
            Ok(None) => return, // not reached: a watcher never ends
            Err(error) if is_unknown_kind(&error) => {
                let unknown_for = unknown_since.record(Instant::now());
                sink.change(|seen| {
                    let changed = seen.becomes_missing(unknown_for);
                    if changed {
                        *seen = WatchedKind::CrdMissing;
                    }
                    changed
                });
                UNKNOWN_KIND_RETRY
            }
            Err(error) => {
                unknown_since.reset();
                sink.failed(&error);
                pause.next().unwrap_or(UNKNOWN_KIND_RETRY)
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
                // Not reached: a watcher lists first.
                WatchedKind::Pending | WatchedKind::CrdMissing | WatchedKind::Cached(_) => false,
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

/// Listing an unknown kind returns 404; listing a known kind without objects does not.
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

    /// For each request, whether a kind in the state `seen` becomes missing. A request is the seconds since the start, and `true`
    /// for the answer 404 (unknown kind) or `false` for no answer.
    fn missing_after_each(seen: &WatchedKind<()>, requests: &[(u64, bool)]) -> Vec<bool> {
        let start = Instant::now();
        let mut unknown_since = UnknownSince::default();
        let mut becomes_missing = |(at, is_unknown): &(u64, bool)| {
            if !is_unknown {
                unknown_since.reset();
                return false;
            }
            seen.becomes_missing(unknown_since.record(start + Duration::from_secs(*at)))
        };
        requests.iter().map(&mut becomes_missing).collect()
    }

    #[test]
    fn pending_kind_counts_as_missing_after_ten_seconds() {
        let requests = [(0, true), (3, true), (9, true), (12, true)];
        assert_eq!(
            missing_after_each(&WatchedKind::Pending, &requests),
            [false, false, false, true]
        );
        // The request at 3 s gets no response, because the API server restarts. It may not know its CRDs for a while afterwards.
        let requests = [(0, true), (3, false), (12, true), (15, true), (24, true)];
        assert_eq!(
            missing_after_each(&WatchedKind::Pending, &requests),
            [false, false, false, false, true]
        );
    }

    #[test]
    fn listed_or_cached_kind_counts_as_missing_after_a_minute() {
        let requests = [(0, true), (12, true), (60, true), (63, true)];
        assert_eq!(
            missing_after_each(&WatchedKind::Listed(BTreeMap::new()), &requests),
            [false, false, false, true]
        );
        assert_eq!(
            missing_after_each(&WatchedKind::Cached(BTreeMap::new()), &requests),
            [false, false, false, true]
        );
        assert_eq!(missing_after_each(&WatchedKind::CrdMissing, &requests), [false; 4]);
    }
}
