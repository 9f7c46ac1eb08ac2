//! Saves the last applied objects in a file that only root can access, so that an agent can use them if it starts while
//! the API server does not answer. The file also contains the live endpoint of each peer, so that peers without a
//! configured endpoint can be reached after a restart.
//!
//! `format` defines the file's format, `file` reads and writes it, `source::store` decides when its content is used.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clustermesh_core::key::PublicKey;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{
    metrics::Metrics,
    source::{
        objects::{ParsedNode, ParsedPeer, ParsedPolicy},
        store::ClusterSnapshot,
    },
};

mod file;
mod format;

pub use file::{LoadedCache, load, remove};

/// The minimum time between two writes if the saved objects changed: the objects of a new mesh arrive in many small changes.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The minimum time between two writes if the saved objects did not change: some peers roam all the time.
const ENDPOINT_WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// The time after which a failed write is tried again; a change of the content causes an earlier try.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// The objects in the cache: the complete input of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SavedObjects {
    /// Peers that could be parsed.
    pub peers: BTreeMap<String, ParsedPeer>,
    /// PeerPolicies.
    pub policies: BTreeMap<String, ParsedPolicy>,
    /// Nodes, without two values that soon change: the annotations that this agent writes, and the time at which kg checked in last.
    pub nodes: BTreeMap<String, ParsedNode>,
    /// The API server's endpoints, by EndpointSlice.
    pub api_servers: BTreeMap<String, std::collections::BTreeSet<SocketAddr>>,
    /// Addresses of host names.
    pub addresses: BTreeMap<String, IpAddr>,
}

impl SavedObjects {
    /// Copies the objects of a snapshot in which every kind was listed.
    #[must_use]
    pub fn of(snapshot: &ClusterSnapshot) -> Self {
        let save_node = |(name, node): (&str, &ParsedNode)| {
            let mut node = node.clone();
            if let Some(own) = &mut node.own {
                own.kg_seen = None;
                own.published.clear();
            }
            (name.to_owned(), node)
        };
        Self {
            peers: (snapshot.peers.objects())
                .filter(|(_, peer)| peer.spec.is_ok())
                .map(|(name, peer)| (name.to_owned(), peer.clone()))
                .collect(),
            policies: owned(snapshot.policies.objects()),
            nodes: snapshot.nodes.objects().map(save_node).collect(),
            api_servers: owned(snapshot.api_servers.objects()),
            addresses: snapshot.addresses.clone(),
        }
    }
}

fn owned<'a, V: Clone + 'a>(all: impl Iterator<Item = (&'a str, &'a V)>) -> BTreeMap<String, V> {
    all.map(|(name, value)| (name.to_owned(), value.clone())).collect()
}

/// For each peer, the endpoint from which it last sent.
pub type LiveEndpoints = BTreeMap<PublicKey, SocketAddr>;

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheContent {
    /// `None` = this process has not applied anything yet, so the file must not be overwritten.
    pub saved: Option<Arc<SavedObjects>>,
    /// When the API server confirmed `saved`. The last confirmation may be later, by up to [`CacheFile::max_lag`], so that
    /// not every pass writes the file.
    pub confirmed: UnixTime,
    /// Live endpoints.
    pub live: LiveEndpoints,
}

impl CacheContent {
    /// Must be called when the API server confirmed `saved` at the time `now`. Records this if `saved` changed, if the recorded
    /// time lags by `max_lag`, or if the clock was set back. Returns whether it did, so that the file must be written.
    pub fn confirm(&mut self, saved: SavedObjects, now: UnixTime, max_lag: Duration) -> bool {
        let changed = self.saved.as_deref() != Some(&saved);
        let was_clock_set_back = now < self.confirmed;
        let is_due = now.since(self.confirmed) >= max_lag || was_clock_set_back;
        if changed {
            self.saved = Some(Arc::new(saved));
        }
        if changed || is_due {
            self.confirmed = now;
        }
        changed || is_due
    }
}

/// A time in whole seconds since 1970 (UTC). A monotonic time would have no meaning in another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct UnixTime(u64);

impl UnixTime {
    /// Converts the time and rounds it down.
    #[must_use]
    pub fn of(time: SystemTime) -> Self {
        Self(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }

    /// The time since `earlier`; zero if the clock was set back.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(self.0.saturating_sub(earlier.0))
    }
}

impl Display for UnixTime {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match i64::try_from(self.0).map(jiff::Timestamp::from_second) {
            Ok(Ok(time)) => time.fmt(f),
            _ => write!(f, "{} s after 1970", self.0),
        }
    }
}

/// The path of the cache file, and the conditions under which it is used.
#[derive(Debug, Clone)]
pub struct CacheFile {
    /// `--cache-file`.
    pub path: PathBuf,
    /// Name of this node's Node object. A file that another node wrote is not used.
    pub node: String,
    /// `--cache-max-age`: a file that the API server confirmed longer ago is not used.
    pub max_age: Duration,
}

impl CacheFile {
    /// How much the confirmation time in the file may lag before the file is written again.
    #[must_use]
    pub fn max_lag(&self) -> Duration {
        (self.max_age / 24).clamp(Duration::from_secs(60), Duration::from_secs(3600))
    }
}

/// How long until `content` must be written; `None` = no write is needed. `written` is the content that was written last,
/// empty after a failed write. `age` is the time since the last write, also a failed one; `None` = there was none.
fn write_delay(content: &CacheContent, written: &CacheContent, age: Option<Duration>) -> Option<Duration> {
    if content.saved.is_none() || content == written {
        return None;
    }
    let interval = if content.saved == written.saved {
        ENDPOINT_WRITE_INTERVAL
    } else {
        WRITE_INTERVAL
    };
    Some(age.map_or(Duration::ZERO, |age| interval.saturating_sub(age)))
}

/// Writes the content when it changes. When the senders are dropped, writes the last content and returns.
///
/// If the new file cannot be written, the old file is deleted: a start from it could restore a Peer or an allowed
/// network that was revoked since. The write is tried again, unless the senders are dropped.
pub async fn run(file: CacheFile, mut content: watch::Receiver<CacheContent>, metrics: Metrics) {
    let mut written = CacheContent::default();
    let mut last_write: Option<Instant> = None;
    let mut last_error = String::new();
    loop {
        let ended = content.has_changed().is_err();
        let current = content.borrow_and_update().clone();
        let Some(wait) = write_delay(&current, &written, last_write.map(|at| at.elapsed())) else {
            if ended {
                return;
            }
            // An error means that the senders are dropped, which the next iteration detects.
            let _ = content.changed().await;
            continue;
        };
        if !ended && !wait.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = content.changed() => continue,
            }
        }
        let mut has_failed = false;
        let (to, new) = (file.clone(), current.clone());
        let done = tokio::task::spawn_blocking(move || file::write(&to, &new)).await;
        let done = done.map_err(|error| error.to_string());
        match done.and_then(|done| done.map_err(|error| error.to_string())) {
            Ok(()) => {
                last_error.clear();
                written = current;
            }
            Err(error) => {
                metrics.count_error("cache");
                // The file is deleted, so the next content must be written even if it does not change.
                written = CacheContent::default();
                for error in remove(&file.path) {
                    tracing::warn!("{error}: its content is outdated");
                }
                has_failed = true;
                if last_error != error {
                    tracing::warn!(
                        "{error}; without a cache, an agent that starts while its API server does not answer waits for it"
                    );
                    last_error = error;
                }
            }
        }
        if ended {
            return;
        }
        last_write = Some(Instant::now());
        if has_failed {
            tokio::select! {
                () = tokio::time::sleep(RETRY_DELAY) => {}
                _ = content.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
