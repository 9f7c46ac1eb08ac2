//! Compares the times of the latest handshakes, as `wg show INTERFACE latest-handshakes` prints them.

use std::collections::BTreeMap;

/// Checks two `latest-handshakes`, by public key: no session was replaced.
pub fn check_session_kept(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) {
    assert!(
        !before.is_empty() && before.keys().eq(after.keys()),
        "{before:?} {after:?}"
    );
    for (key, then) in before {
        let [then, now] = [then, &after[key]].map(|time| time.parse().expect("seconds"));
        check_handshake_kept(key, then, now);
    }
}

/// Checks two times of the latest handshake with a peer: the second is not later, unless by the 120 s (REKEY_AFTER_TIME) after which
/// WireGuard starts a new handshake by itself. `wg` shows whole seconds, and the node that did not start the handshake takes the time of
/// the first packet after it, so the difference may be a little less than 120 s.
pub fn check_handshake_kept(peer: &str, then: u64, now: u64) {
    assert!(
        then == now || then + 115 <= now,
        "{peer}: handshakes at {then} and {now}"
    );
}
