//! A node's change to a new key: when the device takes it. Where keys lie is `key`'s, who is heard `caller`'s.
//!
//! A device has one private key, and its peers learn of a new public key at their own time, each from its own API server.
//! So the new key is published first and the device keeps the old one, with which everybody still talks to it. A peer that
//! has learnt of the new key drops its session and calls at once, by the new key: at the first such call the device takes
//! it and calls everybody in turn. What is lost is the time from a peer's change to the next handshake; and while nobody
//! learns of the new key, since the controller is away, nothing is lost at all.
//!
//! ```text
//! rotate-key     published           first call by the new key         every peer has learnt of it
//!     |--------------|------------------------|--------------------------------|
//!     device: old key, all sessions stand     | new key: a handshake with each, as soon as it knows
//! ```
//! A node that nobody can call, since it is behind NAT, hears nothing: it takes the new key when those it talks to have
//! not renewed a session that was due, which takes two to three minutes.

use std::{fmt, path::Path, time::Duration};

use clustermesh_core::key::PublicKey;

use super::{
    caller::{self, Caller},
    key::{self, KeyFileError, NodeKey},
};
use crate::{source::store::Store, status::Trouble};

/// On top of the time that a renewal has.
const SILENT: Duration = Duration::from_secs(12);

/// What is known when it is to be decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signs {
    /// Somebody called by the new key; `None` = that cannot be heard on this node.
    pub(crate) called: Option<bool>,
    /// The new key stands on the Node, as far as was seen.
    pub(crate) published: bool,
    /// For how long nobody has answered although a session was to be renewed; `None` = somebody has, or nobody was asked.
    pub(crate) silent: Option<Duration>,
}

/// Why the device takes the new key now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Called,
    Silent,
    Deaf,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Called => "a peer called by it",
            Self::Silent => "no peer answers to the old one any more",
            Self::Deaf => "it is published, and this node cannot hear who calls by it",
        })
    }
}

fn due(signs: &Signs) -> Option<Why> {
    let Signs {
        called,
        published,
        silent,
    } = signs;
    match called {
        Some(true) => Some(Why::Called),
        None if *published => Some(Why::Deaf),
        _ if *published && silent.is_some_and(|for_| for_ > SILENT) => Some(Why::Silent),
        _ => None,
    }
}

/// A change that is under way.
#[derive(Debug)]
pub(crate) struct Rotation {
    next: NodeKey,
    caller: Option<Caller>,
}

impl Rotation {
    /// The key to publish.
    pub(crate) fn public(&self) -> PublicKey {
        self.next.public()
    }

    /// Whether somebody called by the new key; `None` = that cannot be heard.
    pub(crate) fn called(&self) -> Option<bool> {
        self.caller.as_ref().map(Caller::called)
    }
}

/// Begins, goes on with or ends a change of `key`, whose file is `path`. Returns what to say while it is under way.
pub(crate) async fn step(
    rotation: &mut Option<Rotation>,
    key: &mut NodeKey,
    path: &Path,
    port: u16,
    store: &Store,
    signs: impl FnOnce(&Rotation) -> Signs,
) -> Option<Trouble> {
    let say = |error: KeyFileError| Some(Trouble::harmless("key", error));
    let next = match key::load_next(path) {
        Ok(next) => next,
        Err(error) => return say(error),
    };
    let Some(next) = next else {
        if rotation.take().is_some() {
            tracing::info!(public = %key.public(), "the new key was taken away: this node keeps its old one");
            forget().await;
        }
        return None;
    };
    if rotation
        .as_ref()
        .is_none_or(|rotation| rotation.public() != next.public())
    {
        let caller = match Caller::open(port, next.public(), store.clone()).await {
            Ok(caller) => Some(caller),
            Err(error) => {
                tracing::warn!(%error, "cannot hear who calls by the new key: it is taken as soon as it is published");
                None
            }
        };
        tracing::info!(old = %key.public(), new = %next.public(), "a new key is published; the old one serves until a peer calls by it");
        *rotation = Some(Rotation { next, caller });
    }
    let under_way = rotation.as_ref()?;
    let Some(why) = due(&signs(under_way)) else {
        return Some(Trouble::harmless(
            "key",
            format!(
                "the new key {} is published and waits for the first peer that learns of it; to take it back, remove {}",
                under_way.public(),
                key::next(path).display()
            ),
        ));
    };
    if let Err(error) = key::promote(path) {
        return say(error);
    }
    if let Some(done) = rotation.take() {
        tracing::info!(old = %key.public(), new = %done.public(), "this node has a new key: {why}");
        *key = done.next;
    }
    forget().await;
    None
}

async fn forget() {
    if let Err(error) = caller::remove().await {
        tracing::warn!(%error, "cannot remove the rule that hands handshakes over; it does no harm");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_key_serves_until_somebody_calls_by_the_new_one_or_nobody_answers_to_it() {
        let seconds = |n| Some(Duration::from_secs(n));
        let decided = |called, published, silent| {
            due(&Signs {
                called,
                published,
                silent,
            })
        };
        assert_eq!(decided(Some(false), true, None), None);
        assert_eq!(decided(Some(false), true, seconds(11)), None);
        assert_eq!(
            decided(Some(false), false, seconds(60)),
            None,
            "nobody can know the new one"
        );
        assert_eq!(decided(Some(false), true, seconds(13)), Some(Why::Silent));
        assert_eq!(decided(Some(true), false, None), Some(Why::Called));
        assert_eq!(decided(None, false, seconds(60)), None);
        assert_eq!(decided(None, true, None), Some(Why::Deaf));
    }
}
