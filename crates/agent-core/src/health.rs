//! Whether a peer is up, and which of its endpoints to try next: pure functions of ages and counters that are handed in;
//! no clock, and nothing is sent or configured here.
//!
//! ```text
//! age of the last handshake ->         0 s               180 s          275 s
//! keepalive                            |------- up --------|---- up -----|---- down ---->   (a new one was due at 180 s)
//! none, and idle                       |------- up --------|------ unknown ------------->   (nobody asked for a new one)
//!
//! no keepalive, and we send without an answer, for ->  0 s           15 s          45 s
//! the session lives                                    |-------------- up -----------|---- down ---->
//! it is dead                                           |-- unknown ---|----------- down ------------>
//!
//! never a handshake, since it was added ->             0 s           15 s
//! we know where it is: we greeted it                   |-- unknown ---|----------- down ------------>
//! it has to find us                                    |----------------- unknown ------------------>
//! ```
//! A session lives 180 s (WireGuard paper §6.1, Reject-After-Time), a retry takes 5 s and is given up after 90 s
//! (Rekey-Timeout, Rekey-Attempt-Time): 275 s without a handshake is more than one that failed by bad luck. Whoever
//! receives data answers within 10 s, with a keepalive if nothing else (Keepalive-Timeout), so a peer that is sent data and
//! keeps silent is gone long before its session is. A keepalive itself asks for no answer: where we send them at an interval,
//! silence says nothing.

use std::time::Duration;

/// A session without a newer handshake is dead at this age.
pub const SESSION: Duration = Duration::from_secs(180);
/// A peer we want to talk to and that made no handshake for so long is down.
pub const DOWN_AFTER: Duration = Duration::from_secs(180 + 5 + 90);
/// A peer we greeted has three tries to answer.
pub const GREETED: Duration = Duration::from_secs(15);

/// WireGuard takes 15 s to notice that its data is not answered, and has then tried six handshakes.
pub const SILENT: Duration = Duration::from_secs(15 + 6 * 5);
/// Bytes of a keepalive on the wire: data of nothing (header, counter, tag).
pub const KEEPALIVE: u64 = 32;

/// How a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Its session is alive, or a new one is due and still has time.
    Up,
    /// We want to talk to it and cannot.
    Down,
    /// Nobody has tried, so nobody knows.
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

/// What is known of one peer at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signs {
    /// Since it was put on the device.
    pub configured: Duration,
    /// Since its last handshake; `None` = never.
    pub handshake: Option<Duration>,
    /// We were given an endpoint, or it was heard from: there is somewhere to send to.
    pub reachable: bool,
    /// It has a keepalive interval.
    pub keepalive: bool,
    /// For how long we have been sending what asks for an answer, that is more than one [`KEEPALIVE`], without hearing
    /// anything back; `None` = the last word was not ours.
    pub unanswered: Option<Duration>,
}

/// How a peer with these signs is.
#[must_use]
pub fn state(signs: &Signs) -> State {
    let Some(age) = signs.handshake else {
        let down = signs.reachable && signs.configured > GREETED;
        return if down { State::Down } else { State::Unknown };
    };
    let alive = age <= SESSION;
    let patience = if alive { SILENT } else { GREETED };
    let silent = !signs.keepalive && signs.unanswered.is_some_and(|for_| for_ > patience);
    let overdue = signs.keepalive && age > DOWN_AFTER;
    if signs.reachable && (silent || overdue) {
        State::Down
    } else if alive || (signs.reachable && signs.keepalive) {
        State::Up
    } else {
        State::Unknown
    }
}

/// Whether it is time to try the next endpoint: nothing was heard for a greeting's time at the present one.
///
/// `since` is how long the present endpoint has been tried. A peer that is heard from keeps what it has.
#[must_use]
pub fn try_next(signs: &Signs, since: Duration) -> bool {
    let silent = match signs.handshake {
        None => true,
        // A dead session that we keep sending into: the peer may have moved. Not before it is dead, since its node may
        // just be restarting, and the present endpoint is the best guess then.
        Some(age) => age > SESSION && (signs.keepalive || signs.unanswered.is_some_and(|for_| for_ > GREETED)),
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
        keepalive: false,
        unanswered: None,
    };

    #[test]
    fn the_timeline_holds_at_its_marks() {
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
                keepalive: true,
                ..QUIET
            })
        };
        assert_eq!(
            [0, 180, 181, 275, 276].map(kept),
            [State::Up, State::Up, State::Up, State::Up, State::Down]
        );
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
        assert_eq!([45, 46].map(silent(false)), [State::Up, State::Down]);
        assert_eq!([45, 46].map(silent(true)), [State::Up; 2]);
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

    fn seconds() -> impl Strategy<Value = Duration> {
        (0u64..400).prop_map(s)
    }

    fn signs() -> impl Strategy<Value = Signs> {
        let (configured, handshake) = (seconds(), option::of(seconds()));
        (
            configured,
            handshake,
            any::<bool>(),
            any::<bool>(),
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
        fn an_idle_peer_without_keepalive_is_never_down_once_it_was_heard(some in signs(), age in seconds()) {
            let idle = Signs { handshake: Some(age), keepalive: false, unanswered: None, ..some };
            prop_assert_ne!(state(&idle), State::Down);
        }

        #[test]
        fn who_shook_hands_within_a_session_and_is_not_silent_is_up(some in signs(), age in 0u64..=180, quiet in 0u64..=45) {
            let alive = Signs { handshake: Some(s(age)), unanswered: Some(s(quiet)), ..some };
            prop_assert_eq!(state(&alive), State::Up);
        }

        #[test]
        fn nobody_is_down_whom_we_cannot_send_to(some in signs()) {
            prop_assert_ne!(state(&Signs { reachable: false, ..some }), State::Down);
        }

        /// Time alone makes nobody better, and nobody who is down anything but down.
        #[test]
        fn without_a_sign_of_life_a_peer_only_gets_worse(some in signs(), later in seconds()) {
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

        /// A peer that lives is left where it is.
        #[test]
        fn no_other_endpoint_is_tried_for_who_shook_hands_within_a_session(some in signs(), age in 0u64..=180, since in seconds()) {
            let alive = Signs { handshake: Some(s(age)), ..some };
            prop_assert!(!try_next(&alive, since));
        }
    }

    #[test]
    fn a_peer_that_never_answered_is_tried_elsewhere_and_one_that_lives_is_not() {
        assert_eq!([15, 16].map(|since| try_next(&QUIET, s(since))), [false, true]);
        let lives = Signs {
            handshake: Some(s(100)),
            keepalive: true,
            ..QUIET
        };
        assert!(!try_next(&lives, s(9999)));
        let idle = Signs {
            handshake: Some(s(9999)),
            ..QUIET
        };
        assert!(!try_next(&idle, s(9999)));
        let moved = Signs {
            handshake: Some(s(181)),
            keepalive: true,
            ..QUIET
        };
        assert!(try_next(&moved, s(16)));
    }
}
