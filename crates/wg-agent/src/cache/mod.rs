//! Keeps the objects that were last applied to this node in a file that only root can access, so that an agent that
//! starts while its API server is away can use them. It also keeps the live endpoint of each peer, so that peers
//! without a known endpoint can be reached after a restart.
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

/// Between two writes while objects change: a new mesh arrives in many small changes.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Between two writes while only endpoints change: some peers roam all the time.
const ENDPOINT_WRITE_INTERVAL: Duration = Duration::from_secs(10);

/// The objects that the cache contains: all that a pass works from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SavedObjects {
    /// Peers that could be parsed.
    pub peers: BTreeMap<String, ParsedPeer>,
    /// PeerPolicies.
    pub policies: BTreeMap<String, ParsedPolicy>,
    /// Nodes, without values that are only true for the moment: the annotations of this one, and kg's last-seen time.
    pub nodes: BTreeMap<String, ParsedNode>,
    /// The API server's endpoints, by EndpointSlice.
    pub api_servers: BTreeMap<String, std::collections::BTreeSet<SocketAddr>>,
    /// Addresses of host names.
    pub addresses: BTreeMap<String, IpAddr>,
}

impl SavedObjects {
    /// The objects of a snapshot in which every kind was listed.
    #[must_use]
    pub fn of(snapshot: &ClusterSnapshot) -> Self {
        let keep = |(name, node): (&str, &ParsedNode)| {
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
            nodes: snapshot.nodes.objects().map(keep).collect(),
            api_servers: owned(snapshot.api_servers.objects()),
            addresses: snapshot.addresses.clone(),
        }
    }
}

fn owned<'a, V: Clone + 'a>(all: impl Iterator<Item = (&'a str, &'a V)>) -> BTreeMap<String, V> {
    all.map(|(name, value)| (name.to_owned(), value.clone())).collect()
}

/// The endpoint from which each peer of this node last sent.
pub type LiveEndpoints = BTreeMap<PublicKey, SocketAddr>;

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheContent {
    /// `None` = this process has not applied anything yet: the file stays as it is.
    pub saved: Option<Arc<SavedObjects>>,
    /// When the API server last confirmed `saved`. It is is_due forward in steps ([`CacheFile::max_lag`]), not with
    /// every pass.
    pub confirmed: UnixTime,
    /// Live endpoints.
    pub live: LiveEndpoints,
}

impl CacheContent {
    /// Notes that the API server confirms `saved` at the time `now`. Returns whether the file must be written.
    pub fn confirm(&mut self, saved: SavedObjects, now: UnixTime, max_lag: Duration) -> bool {
        let changed = self.saved.as_deref() != Some(&saved);
        let is_due = now.since(self.confirmed) >= max_lag || now < self.confirmed;
        if changed {
            self.saved = Some(Arc::new(saved));
        }
        if changed || is_due {
            self.confirmed = now;
        }
        changed || is_due
    }
}

/// A time in whole seconds since 1970 (UTC): the file outlives the process and its monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct UnixTime(u64);

impl UnixTime {
    /// The time of a clock.
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

/// The file, and what it must match to be used.
#[derive(Debug, Clone)]
pub struct CacheFile {
    /// `--cache-file`.
    pub path: PathBuf,
    /// Name of this node's Node: a file copied from another node's disk is not used.
    pub node: String,
    /// `--cache-max-age`: a file that the API server confirmed longer ago is not used.
    pub max_age: Duration,
}

impl CacheFile {
    /// How old the confirmation time in the file may become before it is written again: little compared to the maximum
    /// age.
    #[must_use]
    pub fn max_lag(&self) -> Duration {
        (self.max_age / 24).clamp(Duration::from_secs(60), Duration::from_secs(3600))
    }
}

/// How long until `content` must be written, if `written` was written `since` ago; `None` = no write is needed.
fn write_delay(content: &CacheContent, written: &CacheContent, since: Option<Duration>) -> Option<Duration> {
    if content.saved.is_none() || content == written {
        return None;
    }
    let every = if content.saved == written.saved {
        ENDPOINT_WRITE_INTERVAL
    } else {
        WRITE_INTERVAL
    };
    Some(since.map_or(Duration::ZERO, |since| every.saturating_sub(since)))
}

/// Writes the content when it changes; ends, after a last write, when the senders are gone.
///
/// If the new file cannot be written, the old one is deleted: it may contain a Peer or an allowed network that was
/// revoked since, and no cache is better than that. The write is tried again.
pub async fn run(file: CacheFile, mut content: watch::Receiver<CacheContent>, metrics: Metrics) {
    let mut written = CacheContent::default();
    let mut at: Option<Instant> = None;
    let mut last_error = String::new();
    loop {
        let ended = content.has_changed().is_err();
        let now = content.borrow_and_update().clone();
        let Some(wait) = write_delay(&now, &written, at.map(|at| at.elapsed())) else {
            if ended {
                return;
            }
            // An error means that the senders are gone, which the next iteration sees.
            let _ = content.changed().await;
            continue;
        };
        if !ended && !wait.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = content.changed() => continue,
            }
        }
        let mut wait_longer = false;
        let (to, new) = (file.clone(), now.clone());
        let done = tokio::task::spawn_blocking(move || file::write(&to, &new)).await;
        let done = done.map_err(|error| error.to_string());
        match done.and_then(|done| done.map_err(|error| error.to_string())) {
            Ok(()) => {
                last_error.clear();
                written = now;
            }
            Err(error) => {
                metrics.count_error("cache");
                // The file is gone, so the next content must be written in any case.
                written = CacheContent::default();
                for error in remove(&file.path) {
                    tracing::warn!("{error}: its content is outdated");
                }
                wait_longer = true;
                if last_error != error {
                    tracing::warn!(
                        "{error}; without a cache an agent that starts while its API server is away waits for it"
                    );
                    last_error = error;
                }
            }
        }
        if ended {
            return;
        }
        at = Some(Instant::now());
        if wait_longer {
            tokio::select! {
                () = tokio::time::sleep(ENDPOINT_WRITE_INTERVAL) => {}
                _ = content.changed() => content.mark_changed(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
