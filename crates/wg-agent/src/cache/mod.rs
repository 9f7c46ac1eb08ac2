//! What was last applied to this node, kept in a file of root's, so that an agent that starts while its API server is away
//! carries on; and the last live endpoint of each peer, so that one without a known endpoint is greeted after a restart.
//! How the file looks is `form`'s, how it is read and written `file`'s; when it is used is `source::store`'s.
//!
//! Peers with `requires-policy` are never kept: what they may reach is for a reachable API server to say.

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
        objects::{NodeSeen, PeerSeen, PolicySeen},
        store::World,
    },
};

mod file;
mod form;

pub use file::{Found, load, remove};

/// Between two writes when objects have changed: a mesh that is made comes in many small pieces.
const EVERY: Duration = Duration::from_secs(1);
/// Between two writes when only endpoints have changed: a peer that roams does so all the time.
const EVERY_LIVE: Duration = Duration::from_secs(10);

/// What a pass over the node needs of the cluster's objects.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Saved {
    /// Peers that could be read.
    pub peers: BTreeMap<String, PeerSeen>,
    /// PeerPolicies.
    pub policies: BTreeMap<String, PolicySeen>,
    /// Nodes, without what is only of the moment: what this one has published, and kg's last sign of life.
    pub nodes: BTreeMap<String, NodeSeen>,
    /// The API server's endpoints, by EndpointSlice.
    pub api_servers: BTreeMap<String, std::collections::BTreeSet<SocketAddr>>,
    /// Names that were looked up.
    pub addresses: BTreeMap<String, IpAddr>,
}

impl Saved {
    /// What is to be kept of a world that was read whole.
    #[must_use]
    pub fn of(world: &World) -> Self {
        let keep = |(name, node): (&str, &NodeSeen)| {
            let mut node = node.clone();
            if let Some(own) = &mut node.own {
                own.kg_seen = None;
                own.published.clear();
            }
            (name.to_owned(), node)
        };
        Self {
            peers: (world.peers.known())
                .filter(|(_, peer)| peer.spec.is_ok())
                .map(|(name, peer)| (name.to_owned(), peer.clone()))
                .collect(),
            policies: owned(world.policies.known()),
            nodes: world.nodes.known().map(keep).collect(),
            api_servers: owned(world.api_servers.known()),
            addresses: world.addresses.clone(),
        }
    }
}

fn owned<'a, V: Clone + 'a>(all: impl Iterator<Item = (&'a str, &'a V)>) -> BTreeMap<String, V> {
    all.map(|(name, value)| (name.to_owned(), value.clone())).collect()
}

/// Where the peers of this node were heard from last.
pub type Live = BTreeMap<PublicKey, SocketAddr>;

/// What the file should hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Kept {
    /// `None` = nothing was applied yet by this process: the file stays as it is.
    pub saved: Option<Arc<Saved>>,
    /// When the API server last said that this is so. It moves on in steps ([`Place::step`]), not with every pass.
    pub confirmed: Stamp,
    /// Endpoints.
    pub live: Live,
}

impl Kept {
    /// The API server says now that `saved` is so. Whether that has to be written.
    pub fn confirm(&mut self, saved: Saved, now: Stamp, step: Duration) -> bool {
        let changed = self.saved.as_deref() != Some(&saved);
        let moved = now.since(self.confirmed) >= step || now < self.confirmed;
        if changed {
            self.saved = Some(Arc::new(saved));
        }
        if changed || moved {
            self.confirmed = now;
        }
        changed || moved
    }
}

/// A moment, in whole seconds since 1970 (UTC): the file outlives the process and its monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Stamp(u64);

impl Stamp {
    /// The moment of a clock.
    #[must_use]
    pub fn of(time: SystemTime) -> Self {
        Self(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }

    /// How much later than another one; a clock that was set back makes that nothing.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(self.0.saturating_sub(earlier.0))
    }
}

impl Display for Stamp {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match i64::try_from(self.0).map(jiff::Timestamp::from_second) {
            Ok(Ok(time)) => time.fmt(f),
            _ => write!(f, "{} s after 1970", self.0),
        }
    }
}

/// Where the file is and whose.
#[derive(Debug, Clone)]
pub struct Place {
    /// `--cache-file`.
    pub path: PathBuf,
    /// Name of this node's Node object: a copy of another node's disk is not ours.
    pub node: String,
    /// `--cache-max-age`: a file that the API server confirmed longer ago is not used.
    pub max_age: Duration,
}

impl Place {
    /// How far the file may lag behind what the API server confirms: little beside the age it may have.
    #[must_use]
    pub fn step(&self) -> Duration {
        (self.max_age / 24).clamp(Duration::from_secs(60), Duration::from_secs(3600))
    }
}

/// How long until `kept` has to be written, where `written` was `since` ago; `None` = it need not be.
fn due(kept: &Kept, written: &Kept, since: Option<Duration>) -> Option<Duration> {
    if kept.saved.is_none() || kept == written {
        return None;
    }
    let every = if kept.saved == written.saved { EVERY_LIVE } else { EVERY };
    Some(since.map_or(Duration::ZERO, |since| every.saturating_sub(since)))
}

/// Writes whatever `kept` comes to hold, when it differs from what was written last; ends with the last sender, after a last
/// write. Where the new file cannot be written the old one goes: it may hold a Peer or an allowance that was taken back since,
/// and no cache is better than that one. It is said, and tried again.
pub async fn run(place: Place, mut kept: watch::Receiver<Kept>, metrics: Metrics) {
    let mut written = Kept::default();
    let mut at: Option<Instant> = None;
    let mut said = String::new();
    loop {
        let ended = kept.has_changed().is_err();
        let now = kept.borrow_and_update().clone();
        let Some(wait) = due(&now, &written, at.map(|at| at.elapsed())) else {
            if ended {
                return;
            }
            // An error is the end of the senders, which the next turn sees.
            let _ = kept.changed().await;
            continue;
        };
        if !ended && !wait.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = kept.changed() => continue,
            }
        }
        let mut wait_longer = false;
        let (to, what) = (place.clone(), now.clone());
        let done = tokio::task::spawn_blocking(move || file::write(&to, &what)).await;
        let done = done.map_err(|error| error.to_string());
        match done.and_then(|done| done.map_err(|error| error.to_string())) {
            Ok(()) => {
                said.clear();
                written = now;
            }
            Err(error) => {
                metrics.failed("cache");
                // Nothing stands there any more, so that whatever comes next has to be written.
                written = Kept::default();
                for error in remove(&place.path) {
                    tracing::warn!("{error}: what it says is no longer in force");
                }
                wait_longer = true;
                if said != error {
                    tracing::warn!("{error}; an agent that starts while its API server is away has to wait for it");
                    said = error;
                }
            }
        }
        if ended {
            return;
        }
        at = Some(Instant::now());
        if wait_longer {
            tokio::select! {
                () = tokio::time::sleep(EVERY_LIVE) => {}
                _ = kept.changed() => kept.mark_changed(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
