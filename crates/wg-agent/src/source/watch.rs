//! Following one kind of object: a list, then changes, for ever; what cannot be had now is asked for again. What the
//! objects mean is not known here.
//!
//! Whatever was listed once stays until something newer is known: an API server that goes away changes nothing.

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

/// Objects of one kind, by name, as far as they were seen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Seen<V> {
    /// Never listed since this process started.
    #[default]
    Pending,
    /// The API server does not know the kind: its CRD is not installed. Counts as no objects.
    Absent,
    /// Not listed since this process started: what an earlier one kept (`cache`), until the first list.
    Remembered(BTreeMap<String, V>),
    /// Listed whole, and kept up to date as far as possible.
    Listed(BTreeMap<String, V>),
}

impl<V> Seen<V> {
    /// The objects; none where the kind is absent, nor where nothing is known yet: ask [`super::store::World::pending`]
    /// first.
    pub(crate) fn known(&self) -> impl Iterator<Item = (&str, &V)> {
        let objects = match self {
            Self::Pending | Self::Absent => None,
            Self::Remembered(objects) | Self::Listed(objects) => Some(objects),
        };
        objects
            .into_iter()
            .flatten()
            .map(|(name, value)| (name.as_str(), value))
    }
}

/// Where a follower puts what it sees, and how it says that it has trouble.
pub(crate) trait Sink<V>: Send {
    /// Changes the collection; the closure says whether anything changed.
    fn change(&self, change: impl FnOnce(&mut Seen<V>) -> bool + Send);
    /// A list or watch failed.
    fn failed(&self, error: &watcher::Error);
}

/// How long a silent connection is believed: watches are renewed at this pace.
const WATCH_SECONDS: u32 = 60;
/// How long until an absent kind is asked for again.
const ABSENT_RETRY: Duration = Duration::from_secs(3);
/// How long a kind has to be absent until that is believed: an API server that starts may not know its CRDs yet. Where it
/// was listed before, tearing the mesh down for that would be wrong; where it was not, the kernel may still hold what an
/// earlier process closed.
const ABSENT_BELIEVED: Duration = Duration::from_secs(60);
const ABSENT_BELIEVED_FIRST: Duration = Duration::from_secs(10);

/// Since when a kind is absent, without a break.
#[derive(Debug, Default)]
struct Absence(Option<Instant>);

impl Absence {
    /// Absent once more: for how long by now.
    fn lasts(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.0.get_or_insert(now))
    }

    /// Any other answer, or none.
    fn broken(&mut self) {
        self.0 = None;
    }
}

impl<V> Seen<V> {
    /// Whether a kind that has been absent for so long counts as absent from now on, and did not before.
    fn gives_up(&self, absent: Duration) -> bool {
        match self {
            Self::Absent => false,
            Self::Pending => absent > ABSENT_BELIEVED_FIRST,
            Self::Remembered(_) | Self::Listed(_) => absent > ABSENT_BELIEVED,
        }
    }
}

fn pauses() -> impl Iterator<Item = Duration> {
    // At most a few seconds: what is asked is cheap, and the node waits for it.
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(250))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times()
        .build()
}

/// Follows until the token is cancelled. `convert` makes of each object what is kept of it; equal values are no change.
pub(crate) async fn follow<K, V>(
    api: Api<K>,
    config: watcher::Config,
    convert: impl Fn(K) -> V + Send,
    sink: impl Sink<V>,
    stop: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send,
{
    let mut events = Box::pin(watcher::watcher(api, config.timeout(WATCH_SECONDS)));
    let mut pause = pauses();
    let mut absence = Absence::default();
    let mut listing: BTreeMap<String, V> = BTreeMap::new();
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.try_next() => event,
        };
        let wait = match event {
            Ok(Some(event)) => {
                // A watcher says Init before it has asked anything.
                if !matches!(event, Event::Init) {
                    pause = pauses();
                    absence.broken();
                }
                take(event, &mut listing, &convert, &sink);
                continue;
            }
            Ok(None) => return, // a watcher never ends
            Err(error) if absent(&error) => {
                let lasts = absence.lasts(Instant::now());
                sink.change(|seen| {
                    let changed = seen.gives_up(lasts);
                    if changed {
                        *seen = Seen::Absent;
                    }
                    changed
                });
                ABSENT_RETRY
            }
            Err(error) => {
                absence.broken();
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

fn take<K: Resource, V: PartialEq + Send>(
    event: Event<K>,
    listing: &mut BTreeMap<String, V>,
    convert: &(impl Fn(K) -> V + Send),
    sink: &impl Sink<V>,
) {
    match event {
        Event::Init => listing.clear(),
        Event::InitApply(object) => {
            listing.insert(object.name_any(), convert(object));
        }
        Event::InitDone => {
            let whole = Seen::Listed(std::mem::take(listing));
            sink.change(move |seen| {
                let changed = *seen != whole;
                *seen = whole;
                changed
            });
        }
        Event::Apply(object) => {
            let (name, value) = (object.name_any(), convert(object));
            sink.change(move |seen| match seen {
                Seen::Listed(objects) if objects.get(&name) == Some(&value) => false,
                Seen::Listed(objects) => {
                    objects.insert(name, value);
                    true
                }
                Seen::Pending | Seen::Absent | Seen::Remembered(_) => false, // a watcher lists first
            });
        }
        Event::Delete(object) => {
            let name = object.name_any();
            sink.change(move |seen| match seen {
                Seen::Listed(objects) => objects.remove(&name).is_some(),
                Seen::Pending | Seen::Absent | Seen::Remembered(_) => false,
            });
        }
    }
}

/// An unknown kind answers 404 to a list, which an empty one never does.
fn absent(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a follower that has `seen` so far believes of answers, each so many seconds after the start: the 404 of a
    /// missing kind, or no answer at all.
    fn believes(seen: &Seen<()>, answers: &[(u64, bool)]) -> Vec<bool> {
        let start = Instant::now();
        let mut absence = Absence::default();
        let mut believed = |(at, missing): &(u64, bool)| {
            if !missing {
                absence.broken();
                return false;
            }
            seen.gives_up(absence.lasts(start + Duration::from_secs(*at)))
        };
        answers.iter().map(&mut believed).collect()
    }

    #[test]
    fn a_kind_that_is_missing_at_the_start_is_waited_for_before_it_counts_as_none() {
        let answers = [(0, true), (3, true), (9, true), (12, true)];
        assert_eq!(believes(&Seen::Pending, &answers), [false, false, false, true]);
        // An API server that went away in between starts anew, and may not know its CRDs again.
        let answers = [(0, true), (3, false), (12, true), (15, true), (24, true)];
        assert_eq!(believes(&Seen::Pending, &answers), [false, false, false, false, true]);
    }

    #[test]
    fn a_kind_that_was_there_is_waited_for_longer_and_one_that_is_absent_is_no_news() {
        let answers = [(0, true), (12, true), (60, true), (63, true)];
        assert_eq!(
            believes(&Seen::Listed(BTreeMap::new()), &answers),
            [false, false, false, true]
        );
        assert_eq!(
            believes(&Seen::Remembered(BTreeMap::new()), &answers),
            [false, false, false, true]
        );
        assert_eq!(believes(&Seen::Absent, &answers), [false; 4]);
    }
}
