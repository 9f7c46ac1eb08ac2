//! Derives from ages and counters whether a peer is up, and when to try its next endpoint. Pure functions: the caller reads the clock.
//!
//! ```text
//! time since data was sent without any reply  ->             0 s           15 s          45 s
//! the session is alive                                       |------------- up -----------|---- down ---->
//! the session has expired                                    |-- as below --|-------- down ------------->
//!
//! otherwise: age of the last handshake  ->                   0 s               180 s        180 s + interval + 15 s
//! with keepalives at an interval                             |------- up --------|--- up ---|---- down ---->
//! without keepalives, and idle                               |------- up --------|------ unknown ---------->
//!
//! no handshake yet, time since the peer was added  ->        0 s           15 s
//! its endpoint is known, so this node initiates              |-- unknown ---|----------- down ------------>
//! its endpoint is unknown, so the peer has to initiate       |----------------- unknown ------------------>
//! ```
//! Without a known endpoint, a peer is up while its session is alive, else unknown, and never down.
//!
//! A session expires after 180 s (WireGuard paper §6.1, Reject-After-Time). Its initiator starts a new handshake when it sends a packet
//! after 120 s (Rekey-After-Time), and either side does when it sends a packet after the session has expired. A keepalive is such a
//! packet. So with keepalives every 25 s the next handshake begins after 205 s at the latest, and three attempts, 5 s apart
//! (Rekey-Timeout), end at 220 s.
//!
//! A peer replies to data within 10 s, at least with a keepalive (Keepalive-Timeout), and to an initiation at once. So a peer
//! that replies to neither is found to be down long before its session expires. A keepalive needs no reply: if only
//! keepalives are sent, a missing reply proves nothing until the handshake that they trigger fails.

use std::time::Duration;

/// A session expires when its handshake is older than this.
pub const SESSION_LIFETIME: Duration = Duration::from_secs(180);
/// Time for three handshake initiations without a response.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);

/// A peer with a live session that has not replied to data for this time is down: WireGuard initiates a handshake after 15 s, and then
/// six attempts fail.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(15 + 6 * 5);
/// A peer with a live session that has not replied to data for this time may have moved: WireGuard initiates a handshake after 15 s, and
/// the peer had 5 s to respond to it.
const MOVED_TIMEOUT: Duration = Duration::from_secs(15 + 5);
/// How long an endpoint is tried before the next one: two initiations, the second after 5 s (Rekey-Timeout), with 3 s for its response.
/// The agent checks this every 5 s, so a turn lasts 10 s.
///
/// A NAT router keeps a mapping without packets for at least 30 s. Two nodes A and B behind NATs each try the endpoints of the other in
/// turns, at most four. A's packet to the endpoint at which B can be reached makes a mapping in A's NAT. It is followed by at most
/// three turns (30 s) at B's other endpoints, so the mapping still exists when B's turn at A's endpoint comes.
const ENDPOINT_TURN: Duration = Duration::from_secs(5 + 3);
/// Bytes of a keepalive on the wire: a data message with an empty payload (header, counter, tag).
pub const KEEPALIVE_BYTES: u64 = 32;

/// The state of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerHealth {
    /// Its session is alive. Or keepalives are sent to its known endpoint, and the handshake that they trigger is not overdue yet.
    Up,
    /// The peer does not reply to packets that need a reply, although its endpoint is known. Takes precedence over `Up`.
    Down,
    /// Neither `Up` nor `Down`: the session is missing or expired, and nothing proves that the peer fails to reply.
    Unknown,
}

impl PeerHealth {
    /// The word for metrics and status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Unknown => "unknown",
        }
    }
}

/// Observations of one peer at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerActivity {
    /// Time since the peer was added to the device.
    pub configured: Duration,
    /// Time since its last handshake; `None` = never.
    pub handshake: Option<Duration>,
    /// The device has an endpoint for it, configured or learned from its packets.
    pub has_endpoint: bool,
    /// Interval between keepalives; `None` = none are sent.
    pub keepalive: Option<Duration>,
    /// How long the peer has not replied to packets other than keepalives; `None` = it has replied, or no such packets were sent. The
    /// device counts bytes, not packets: such packets were sent if the bytes exceed [`max_keepalive_bytes`].
    pub unanswered: Option<Duration>,
}

/// Derives the state of a peer.
#[must_use]
pub fn state(activity: &PeerActivity) -> PeerHealth {
    let Some(age) = activity.handshake else {
        let down = activity.has_endpoint && activity.configured > HANDSHAKE_TIMEOUT;
        return if down { PeerHealth::Down } else { PeerHealth::Unknown };
    };
    let alive = age <= SESSION_LIFETIME;
    let patience = if alive { REPLY_TIMEOUT } else { HANDSHAKE_TIMEOUT };
    let silent = activity.unanswered.is_some_and(|time| time > patience);
    if activity.has_endpoint && (silent || is_overdue(activity.keepalive, age)) {
        PeerHealth::Down
    } else if alive || (activity.has_endpoint && activity.keepalive.is_some()) {
        PeerHealth::Up
    } else {
        PeerHealth::Unknown
    }
}

/// Whether keepalives would have caused a new handshake by now.
fn is_overdue(keepalive: Option<Duration>, age: Duration) -> bool {
    keepalive.is_some_and(|interval| age > SESSION_LIFETIME + interval + HANDSHAKE_TIMEOUT)
}

/// The maximum number of bytes on the wire that keepalives take within `time`: one keepalive for each interval, one because `time` may
/// begin just before a keepalive, and one that acknowledges received data. Without an interval, only the last one.
#[must_use]
pub fn max_keepalive_bytes(interval: Option<Duration>, time: Duration) -> u64 {
    let periodic = interval.filter(|interval| !interval.is_zero());
    let periodic = periodic.map_or(0, |interval| 1 + time.as_secs() / interval.as_secs().max(1));
    KEEPALIVE_BYTES * (1 + periodic)
}

/// Whether to try the next endpoint, because the peer does not reply at the current one. A peer that replies keeps its endpoint.
///
/// `tried_for` is how long the current endpoint has been tried.
#[must_use]
pub fn should_try_next_endpoint(activity: &PeerActivity, tried_for: Duration) -> bool {
    let endpoint_may_be_wrong = match activity.handshake {
        None => true,
        Some(age) => {
            let alive = age <= SESSION_LIFETIME;
            let patience = if alive { MOVED_TIMEOUT } else { HANDSHAKE_TIMEOUT };
            let is_silent = activity.unanswered.is_some_and(|time| time > patience);
            is_silent || is_overdue(activity.keepalive, age)
        }
    };
    endpoint_may_be_wrong && tried_for > ENDPOINT_TURN
}

#[cfg(test)]
mod tests {
    use proptest::{option, prelude::*};

    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const QUIET: PeerActivity = PeerActivity {
        configured: s(1000),
        handshake: None,
        has_endpoint: true,
        keepalive: None,
        unanswered: None,
    };

    #[test]
    fn state_changes_at_the_times_of_the_timeline() {
        let idle = |age| {
            state(&PeerActivity {
                handshake: Some(s(age)),
                ..QUIET
            })
        };
        assert_eq!(
            [0, 180, 181, 9999].map(idle),
            [PeerHealth::Up, PeerHealth::Up, PeerHealth::Unknown, PeerHealth::Unknown]
        );
        let with_keepalive = |age| {
            state(&PeerActivity {
                handshake: Some(s(age)),
                keepalive: Some(s(25)),
                ..QUIET
            })
        };
        assert_eq!(
            [0, 180, 181, 220, 221].map(with_keepalive),
            [
                PeerHealth::Up,
                PeerHealth::Up,
                PeerHealth::Up,
                PeerHealth::Up,
                PeerHealth::Down
            ]
        );
        let with_rare_keepalive = |age| {
            state(&PeerActivity {
                handshake: Some(s(age)),
                keepalive: Some(s(600)),
                ..QUIET
            })
        };
        assert_eq!(
            [600, 795, 796].map(with_rare_keepalive),
            [PeerHealth::Up, PeerHealth::Up, PeerHealth::Down]
        );
        let unanswered_for_16_s = |age| {
            state(&PeerActivity {
                handshake: Some(s(age)),
                unanswered: Some(s(16)),
                ..QUIET
            })
        };
        assert_eq!(
            [180, 181, 276].map(unanswered_for_16_s),
            [PeerHealth::Up, PeerHealth::Down, PeerHealth::Down]
        );
        let unanswered_for = |keepalive| {
            move |seconds| {
                state(&PeerActivity {
                    handshake: Some(s(100)),
                    unanswered: Some(s(seconds)),
                    keepalive,
                    ..QUIET
                })
            }
        };
        for keepalive in [None, Some(s(25))] {
            assert_eq!(
                [45, 46].map(unanswered_for(keepalive)),
                [PeerHealth::Up, PeerHealth::Down]
            );
        }
        let new = |age| {
            state(&PeerActivity {
                configured: s(age),
                ..QUIET
            })
        };
        assert_eq!(
            [0, 15, 16].map(new),
            [PeerHealth::Unknown, PeerHealth::Unknown, PeerHealth::Down]
        );
        let passive = |age| {
            state(&PeerActivity {
                configured: s(age),
                has_endpoint: false,
                ..QUIET
            })
        };
        assert_eq!([0, 16, 9999].map(passive), [PeerHealth::Unknown; 3]);
    }

    #[test]
    fn max_keepalive_bytes_follow_the_interval() {
        assert_eq!([0, 5, 1000].map(|time| max_keepalive_bytes(None, s(time))), [32; 3]);
        assert_eq!(
            [0, 5, 25, 100].map(|time| max_keepalive_bytes(Some(s(25)), s(time))),
            [64, 64, 96, 192]
        );
        assert_eq!(max_keepalive_bytes(Some(Duration::ZERO), s(5)), 32);
    }

    fn seconds() -> impl Strategy<Value = Duration> {
        (0u64..400).prop_map(s)
    }

    fn activity() -> impl Strategy<Value = PeerActivity> {
        let (configured, handshake) = (seconds(), option::of(seconds()));
        (
            configured,
            handshake,
            any::<bool>(),
            option::of(seconds()),
            option::of(seconds()),
        )
            .prop_map(
                |(configured, handshake, has_endpoint, keepalive, unanswered)| PeerActivity {
                    configured,
                    handshake,
                    has_endpoint,
                    keepalive,
                    unanswered,
                },
            )
    }

    proptest! {
        #[test]
        fn idle_peer_after_a_handshake_is_never_down(some in activity(), age in seconds()) {
            let idle = PeerActivity { handshake: Some(age), keepalive: None, unanswered: None, ..some };
            prop_assert_ne!(state(&idle), PeerHealth::Down);
        }

        #[test]
        fn live_session_is_up_until_the_reply_timeout(some in activity(), age in 0u64..=180, quiet in 0u64..=45) {
            let alive = PeerActivity { handshake: Some(s(age)), unanswered: Some(s(quiet)), ..some };
            prop_assert_eq!(state(&alive), PeerHealth::Up);
        }

        #[test]
        fn peer_without_an_endpoint_is_never_down(some in activity()) {
            prop_assert_ne!(state(&PeerActivity { has_endpoint: false, ..some }), PeerHealth::Down);
        }

        #[test]
        fn state_without_new_packets_only_gets_worse(some in activity(), later in seconds()) {
            let rank = |state| match state {
                PeerHealth::Up => 0,
                PeerHealth::Unknown => 1,
                PeerHealth::Down => 2,
            };
            let then = PeerActivity {
                configured: some.configured + later,
                handshake: some.handshake.map(|age| age + later),
                unanswered: some.unanswered.map(|quiet| quiet + later),
                ..some
            };
            prop_assert!(rank(state(&then)) >= rank(state(&some)), "{:?} and then {:?}", state(&some), state(&then));
        }

        #[test]
        fn peer_that_replies_in_a_live_session_keeps_its_endpoint(
            some in activity(), age in 0u64..=180, unanswered in option::of(0u64..=20), tried_for in seconds(),
        ) {
            let replies = PeerActivity { handshake: Some(s(age)), unanswered: unanswered.map(s), ..some };
            prop_assert!(!should_try_next_endpoint(&replies, tried_for));
        }
    }

    #[test]
    fn next_endpoint_is_tried_only_without_a_reply() {
        assert_eq!(
            [8, 9].map(|tried_for| should_try_next_endpoint(&QUIET, s(tried_for))),
            [false, true]
        );
        let alive = PeerActivity {
            handshake: Some(s(100)),
            keepalive: Some(s(25)),
            ..QUIET
        };
        assert!(!should_try_next_endpoint(&alive, s(9999)));
        let idle = PeerActivity {
            handshake: Some(s(9999)),
            ..QUIET
        };
        assert!(!should_try_next_endpoint(&idle, s(9999)));
        let with_keepalive = |age, unanswered: Option<u64>| PeerActivity {
            handshake: Some(s(age)),
            keepalive: Some(s(25)),
            unanswered: unanswered.map(s),
            ..QUIET
        };
        assert!(
            !should_try_next_endpoint(&with_keepalive(205, None), s(999)),
            "its keepalive has not triggered a handshake yet"
        );
        assert!(!should_try_next_endpoint(&with_keepalive(205, Some(15)), s(999)));
        assert!(should_try_next_endpoint(&with_keepalive(205, Some(16)), s(9)));
        assert!(should_try_next_endpoint(&with_keepalive(221, None), s(9)));
    }
}
