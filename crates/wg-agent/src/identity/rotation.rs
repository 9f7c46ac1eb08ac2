//! Decides when the device switches to a new key.
//!
//! A device has one private key, and its peers learn a new public key at different times, each from its own API server.
//! So the new key is published first, while the device keeps the old one, with which all sessions continue. A peer that
//! learns the new key drops its session and sends an initiation for the new key. At the first such initiation the
//! device switches, and starts a handshake with every peer that has an endpoint. Traffic with a peer is interrupted from the
//! time when the peer or the device switches, whichever is first, until both have switched and completed a handshake. As long
//! as no peer learns the new key, for example because the controller is down, nothing is interrupted, except on a node that
//! cannot detect initiations (see below).
//!
//! ```text
//! rotate-key     published       first initiation for the new key      every peer knows the new key
//!     |--------------|------------------------|--------------------------------|
//!     device: old key, all sessions continue  | new key: a handshake with each peer that knows it
//! ```
//! A node behind NAT receives no initiations. It switches when no peer answers its rekeys ([`NO_REPLY_MARGIN`]). A rekey is due
//! two minutes after the last handshake, so the switch follows two to three minutes after this handshake. A node that cannot
//! detect initiations switches as soon as the new key is published. This interrupts its traffic with every peer that does not
//! know the new key yet.

use std::{fmt, path::Path, time::Duration};

use clustermesh_core::key::PublicKey;

use super::{
    initiation_listener::{self, InitiationListener},
    key::{self, KeyFileError, NodeKey},
};
use crate::{source::store::Store, status::Trouble};

/// How long a due rekey may stay unanswered by all peers before the device switches: long enough for an initiation and two
/// retries, which follow at intervals of 5 s plus jitter (`REKEY_TIMEOUT`).
const NO_REPLY_MARGIN: Duration = Duration::from_secs(12);

/// The facts that decide whether the device switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// Whether an initiation for the new key arrived; `None` = this node cannot detect them.
    pub(crate) initiation_seen: Option<bool>,
    /// Whether the Node has the new key in its annotation.
    pub(crate) is_published: bool,
    /// For how long no peer has answered a rekey; `None` = a peer has answered, or no rekey was due.
    pub(crate) unanswered_for: Option<Duration>,
}

/// Why the device switches now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trigger {
    Initiation,
    NoReply,
    CannotListen,
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Initiation => "a peer initiated a handshake with it",
            Self::NoReply => "no peer answers handshakes with the old key",
            Self::CannotListen => "it is published, and this node cannot detect handshakes with it",
        })
    }
}

fn find_trigger(evidence: &Evidence) -> Option<Trigger> {
    let Evidence {
        initiation_seen,
        is_published,
        unanswered_for,
    } = evidence;
    match initiation_seen {
        Some(true) => Some(Trigger::Initiation),
        None if *is_published => Some(Trigger::CannotListen),
        _ if *is_published && unanswered_for.is_some_and(|time| time > NO_REPLY_MARGIN) => Some(Trigger::NoReply),
        _ => None,
    }
}

/// A rotation that is under way.
#[derive(Debug)]
pub(crate) struct Rotation {
    next: NodeKey,
    listener: Option<InitiationListener>,
}

impl Rotation {
    /// The key to publish.
    pub(crate) fn public(&self) -> PublicKey {
        self.next.public()
    }

    /// Whether an initiation for the new key arrived; `None` = this node cannot detect them.
    pub(crate) fn initiation_seen(&self) -> Option<bool> {
        self.listener.as_ref().map(InitiationListener::initiation_seen)
    }
}

/// Begins, continues or ends a rotation of `key`, whose file is `path`. Returns a message while the rotation is
/// under way, or if a key file cannot be read or replaced.
pub(crate) async fn advance(
    rotation: &mut Option<Rotation>,
    key: &mut NodeKey,
    path: &Path,
    port: u16,
    store: &Store,
    evidence: impl FnOnce(&Rotation) -> Evidence,
) -> Option<Trouble> {
    let trouble = |error: KeyFileError| Some(Trouble::harmless("key", error));
    let next = match key::load_next(path) {
        Ok(next) => next,
        Err(error) => return trouble(error),
    };
    let Some(next) = next else {
        if rotation.take().is_some() {
            tracing::info!(public = %key.public(), "the new key was removed: this node keeps its old one");
            remove_listener_rule().await;
        }
        return None;
    };
    if rotation
        .as_ref()
        .is_none_or(|rotation| rotation.public() != next.public())
    {
        let listener = match InitiationListener::open(port, next.public(), store.clone()).await {
            Ok(listener) => Some(listener),
            Err(error) => {
                tracing::warn!(%error, "cannot detect handshakes with the new key: it is used as soon as it is published");
                None
            }
        };
        tracing::info!(old = %key.public(), new = %next.public(), "publishing a new key; this node still uses the old one");
        *rotation = Some(Rotation { next, listener });
    }
    let current = rotation.as_ref()?;
    let Some(trigger) = find_trigger(&evidence(current)) else {
        return Some(Trouble::harmless(
            "key",
            format!(
                "the agent publishes the new key {} and still uses the old one; to cancel before it switches, remove {}",
                current.public(),
                key::next_path(path).display()
            ),
        ));
    };
    if let Err(error) = key::promote(path) {
        return trouble(error);
    }
    if let Some(done) = rotation.take() {
        tracing::info!(old = %key.public(), new = %done.public(), "this node has a new key: {trigger}");
        *key = done.next;
    }
    remove_listener_rule().await;
    None
}

async fn remove_listener_rule() {
    if let Err(error) = initiation_listener::remove().await {
        tracing::warn!(%error, "cannot remove the rule that copies handshakes to the agent; it does no harm");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_switches_only_for_one_of_three_triggers() {
        let seconds = |n| Some(Duration::from_secs(n));
        let trigger = |initiation_seen, is_published, unanswered_for| {
            find_trigger(&Evidence {
                initiation_seen,
                is_published,
                unanswered_for,
            })
        };
        assert_eq!(trigger(Some(false), true, None), None);
        assert_eq!(trigger(Some(false), true, seconds(11)), None);
        assert_eq!(
            trigger(Some(false), false, seconds(60)),
            None,
            "no peer can know the new key"
        );
        assert_eq!(trigger(Some(false), true, seconds(13)), Some(Trigger::NoReply));
        // An initiation proves that the new key is published, even if this agent has not observed its annotation yet.
        assert_eq!(trigger(Some(true), false, None), Some(Trigger::Initiation));
        assert_eq!(trigger(None, false, seconds(60)), None);
        assert_eq!(trigger(None, true, None), Some(Trigger::CannotListen));
    }
}
