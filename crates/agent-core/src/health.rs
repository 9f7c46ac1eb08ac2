//! Derives from ages and counters whether a peer is up, and when to try its next endpoint. Pure functions: the caller has the clock.
//!
//! ```text
//! time since data was sent without any reply  ->             0 s           15 s          45 s
//! the session is alive                                       |------------- up -----------|---- down ---->
//! the session has expired                                    |-- as below --|-------- down ------------->
//!
//! age of the last handshake, otherwise  ->                   0 s               180 s        180 s + interval + 15 s
//! with keepalives at an interval                             |------- up --------|--- up ---|---- down ---->
//! without keepalives, and idle                               |------- up --------|------ unknown ---------->
//!
//! no handshake yet, time since the peer was added  ->        0 s           15 s
//! its endpoint is known: we initiated a handshake            |-- unknown ---|----------- down ------------>
//! the peer has to initiate                                   |----------------- unknown ------------------>
//! ```
//! A session expires after 180 s (WireGuard paper §6.1, Reject-After-Time). Its initiator renews it when it sends after 120 s
//! (Rekey-After-Time), and either side does when it sends into an expired one. A keepalive counts as sending. So with keepalives every
//! 25 s the next handshake begins after 205 s at the latest, and three attempts, 5 s apart (Rekey-Timeout), end at 220 s.
//!
//! A peer that receives data replies within 10 s, at least with a keepalive (Keepalive-Timeout), and it replies to an initiation at
//! once. So a peer that does not reply to either is gone long before its session expires. A keepalive needs no reply: if only
//! keepalives are sent, silence means nothing until the handshake that they trigger gets no reply.

use std::time::Duration;

/// A session expires at this age of its handshake.
pub const SESSION: Duration = Duration::from_secs(180);
/// Time for three handshake initiations without a response.
pub const GREETED: Duration = Duration::from_secs(15);

/// WireGuard notices after 15 s that its data gets no reply. This is the time until six handshakes have failed after that.
pub const SILENT: Duration = Duration::from_secs(15 + 6 * 5);
/// Bytes of a keepalive on the wire: a data message with an empty payload (header, counter, tag).
pub const KEEPALIVE: u64 = 32;

/// The state of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Its session is alive, or the next handshake is not overdue yet.
    Up,
    /// It should reply and does not.
    Down,
    /// No packet that needs a reply was sent to it.
    Unknown,
}

impl State {
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
pub struct Signs {
    /// Time since it was added to the device.
    pub configured: Duration,
    /// Time since its last handshake; `None` = never.
    pub handshake: Option<Duration>,
    /// The device has an endpoint for it, configured or learned from its packets.
    pub reachable: bool,
    /// Interval between keepalives; `None` = none are sent.
    pub keepalive: Option<Duration>,
    /// For how long packets that need a reply (more than [`keepalives`]) have been sent without receiving anything; `None` = everything
    /// was answered.
    pub unanswered: Option<Duration>,
}

/// Derives the state of a peer.
#[must_use]
pub fn state(signs: &Signs) -> State {
    let Some(age) = signs.handshake else {
        let down = signs.reachable && signs.configured > GREETED;
        return if down { State::Down } else { State::Unknown };
    };
    let alive = age <= SESSION;
    let patience = if alive { SILENT } else { GREETED };
    let silent = signs.unanswered.is_some_and(|for_| for_ > patience);
    if signs.reachable && (silent || is_overdue(signs.keepalive, age)) {
        State::Down
    } else if alive || (signs.reachable && signs.keepalive.is_some()) {
        State::Up
    } else {
        State::Unknown
    }
}

/// Whether keepalives would have caused a new handshake by now.
fn is_overdue(keepalive: Option<Duration>, age: Duration) -> bool {
    keepalive.is_some_and(|interval| age > SESSION + interval + GREETED)
}

/// The most bytes on the wire that keepalives alone may take within `time`: one keepalive for each interval, one for the edges, and the
/// one that acknowledges received data. Without an interval only the last.
#[must_use]
pub fn keepalives(interval: Option<Duration>, time: Duration) -> u64 {
    let periodic = interval.filter(|interval| !interval.is_zero());
    let periodic = periodic.map_or(0, |interval| 1 + time.as_secs() / interval.as_secs().max(1));
    KEEPALIVE * (1 + periodic)
}

/// Whether to try the next endpoint, because the current one has not replied for [`GREETED`].
///
/// `since` is how long the current endpoint has been tried. A peer that replies keeps its endpoint.
#[must_use]
pub fn try_next(signs: &Signs, since: Duration) -> bool {
    let silent = match signs.handshake {
        None => true,
        // The session has expired while packets were sent into it, so the peer may have moved. Before it expires, its node may just be
        // restarting, and then the current endpoint is the best guess.
        Some(age) => {
            age > SESSION && (is_overdue(signs.keepalive, age) || signs.unanswered.is_some_and(|for_| for_ > GREETED))
        }
    };
    silent && since > GREETED
}

#[cfg(test)]
mod tests {
    use proptest::{option, prelude::*};

    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const QUIET: Signs = Signs {
        configured: s(1000),
        handshake: None,
        reachable: true,
        keepalive: None,
        unanswered: None,
    };

    #[test]
    fn state_changes_at_the_times_of_the_timeline() {
        let idle = |age| {
            state(&Signs {
                handshake: Some(s(age)),
                ..QUIET
            })
        };
        assert_eq!(
            [0, 180, 181, 9999].map(idle),
            [State::Up, State::Up, State::Unknown, State::Unknown]
        );
        let kept = |age| {
            state(&Signs {
                handshake: Some(s(age)),
                keepalive: Some(s(25)),
                ..QUIET
            })
        };
        assert_eq!(
            [0, 180, 181, 220, 221].map(kept),
            [State::Up, State::Up, State::Up, State::Up, State::Down]
        );
        let seldom = |age| {
            state(&Signs {
                handshake: Some(s(age)),
                keepalive: Some(s(600)),
                ..QUIET
            })
        };
        assert_eq!([600, 795, 796].map(seldom), [State::Up, State::Up, State::Down]);
        let sending = |age| {
            state(&Signs {
                handshake: Some(s(age)),
                unanswered: Some(s(16)),
                ..QUIET
            })
        };
        assert_eq!([180, 181, 276].map(sending), [State::Up, State::Down, State::Down]);
        let silent = |keepalive| {
            move |seconds| {
                state(&Signs {
                    handshake: Some(s(100)),
                    unanswered: Some(s(seconds)),
                    keepalive,
                    ..QUIET
                })
            }
        };
        for keepalive in [None, Some(s(25))] {
            assert_eq!([45, 46].map(silent(keepalive)), [State::Up, State::Down]);
        }
        let new = |age| {
            state(&Signs {
                configured: s(age),
                ..QUIET
            })
        };
        assert_eq!([0, 15, 16].map(new), [State::Unknown, State::Unknown, State::Down]);
        let passive = |age| {
            state(&Signs {
                configured: s(age),
                reachable: false,
                ..QUIET
            })
        };
        assert_eq!([0, 16, 9999].map(passive), [State::Unknown; 3]);
    }

    #[test]
    fn keepalives_are_counted_by_interval() {
        assert_eq!([0, 5, 1000].map(|time| keepalives(None, s(time))), [32; 3]);
        assert_eq!(
            [0, 5, 25, 100].map(|time| keepalives(Some(s(25)), s(time))),
            [64, 64, 96, 192]
        );
        assert_eq!(keepalives(Some(Duration::ZERO), s(5)), 32);
    }

    fn seconds() -> impl Strategy<Value = Duration> {
        (0u64..400).prop_map(s)
    }

    fn signs() -> impl Strategy<Value = Signs> {
        let (configured, handshake) = (seconds(), option::of(seconds()));
        (
            configured,
            handshake,
            any::<bool>(),
            option::of(seconds()),
            option::of(seconds()),
        )
            .prop_map(|(configured, handshake, reachable, keepalive, unanswered)| Signs {
                configured,
                handshake,
                reachable,
                keepalive,
                unanswered,
            })
    }

    proptest! {
        #[test]
        fn idle_peer_after_a_handshake_is_never_down(some in signs(), age in seconds()) {
            let idle = Signs { handshake: Some(age), keepalive: None, unanswered: None, ..some };
            prop_assert_ne!(state(&idle), State::Down);
        }

        #[test]
        fn peer_with_a_live_session_that_replies_is_up(some in signs(), age in 0u64..=180, quiet in 0u64..=45) {
            let alive = Signs { handshake: Some(s(age)), unanswered: Some(s(quiet)), ..some };
            prop_assert_eq!(state(&alive), State::Up);
        }

        #[test]
        fn peer_without_an_endpoint_is_never_down(some in signs()) {
            prop_assert_ne!(state(&Signs { reachable: false, ..some }), State::Down);
        }

        /// Time alone improves no state, and a peer that is down stays down.
        #[test]
        fn state_without_new_packets_only_gets_worse(some in signs(), later in seconds()) {
            let rank = |state| match state {
                State::Up => 0,
                State::Unknown => 1,
                State::Down => 2,
            };
            let then = Signs {
                configured: some.configured + later,
                handshake: some.handshake.map(|age| age + later),
                unanswered: some.unanswered.map(|quiet| quiet + later),
                ..some
            };
            prop_assert!(rank(state(&then)) >= rank(state(&some)), "{:?} and then {:?}", state(&some), state(&then));
        }

        #[test]
        fn peer_with_a_live_session_keeps_its_endpoint(some in signs(), age in 0u64..=180, since in seconds()) {
            let alive = Signs { handshake: Some(s(age)), ..some };
            prop_assert!(!try_next(&alive, since));
        }
    }

    #[test]
    fn next_endpoint_is_tried_only_without_a_reply() {
        assert_eq!([15, 16].map(|since| try_next(&QUIET, s(since))), [false, true]);
        let lives = Signs {
            handshake: Some(s(100)),
            keepalive: Some(s(25)),
            ..QUIET
        };
        assert!(!try_next(&lives, s(9999)));
        let idle = Signs {
            handshake: Some(s(9999)),
            ..QUIET
        };
        assert!(!try_next(&idle, s(9999)));
        let kept = |age, unanswered: Option<u64>| Signs {
            handshake: Some(s(age)),
            keepalive: Some(s(25)),
            unanswered: unanswered.map(s),
            ..QUIET
        };
        assert!(
            !try_next(&kept(205, None), s(999)),
            "its keepalive has not triggered a handshake yet"
        );
        assert!(!try_next(&kept(205, Some(15)), s(999)));
        assert!(try_next(&kept(205, Some(16)), s(16)));
        assert!(try_next(&kept(221, None), s(16)));
    }
}
