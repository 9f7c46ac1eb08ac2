//! Whether a peer is up, and which of its endpoints to try next: pure functions of ages and counters that are handed in;
//! no clock, and nothing is sent or configured here.
//!
//! ```text
//! we send what asks for an answer, and hear nothing, for ->  0 s           15 s          45 s
//! the session lives                                          |------------- up -----------|---- down ---->
//! it is dead                                                 |-- as below --|-------- down ------------->
//!
//! age of the last handshake, else ->                         0 s               180 s        180 s + interval + 15 s
//! keepalive at an interval                                   |------- up --------|--- up ---|---- down ---->
//! none, and idle                                             |------- up --------|------ unknown ---------->
//!
//! never a handshake, since it was added ->                   0 s           15 s
//! we know where it is: we greeted it                         |-- unknown ---|----------- down ------------>
//! it has to find us                                          |----------------- unknown ------------------>
//! ```
//! A session lives 180 s (WireGuard paper §6.1, Reject-After-Time). Whoever began it renews it at 120 s when it sends
//! (Rekey-After-Time), anybody when it sends into a dead one; a keepalive is sending. So with keepalives every 25 s the next
//! handshake begins at 205 s at the latest, and three tries, 5 s apart (Rekey-Timeout), are over at 220 s. Whoever receives
//! data answers within 10 s, with a keepalive if nothing else (Keepalive-Timeout), and who begins a handshake is answered at
//! once, so a peer that is sent either and keeps silent is gone long before its session is. A keepalive itself asks for no
//! answer: who sends nothing else learns nothing from silence, until the handshake that it asks for is not answered.

use std::time::Duration;

/// A session without a newer handshake is dead at this age.
pub const SESSION: Duration = Duration::from_secs(180);
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
    /// Between two keepalives; `None` = none are sent.
    pub keepalive: Option<Duration>,
    /// For how long we have been sending what asks for an answer, that is more than [`keepalives`], without hearing anything
    /// back; `None` = the last word was not ours.
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
    let silent = signs.unanswered.is_some_and(|for_| for_ > patience);
    if signs.reachable && (silent || overdue(signs.keepalive, age)) {
        State::Down
    } else if alive || (signs.reachable && signs.keepalive.is_some()) {
        State::Up
    } else {
        State::Unknown
    }
}

/// Whether keepalives would have brought a new handshake by now.
fn overdue(keepalive: Option<Duration>, age: Duration) -> bool {
    keepalive.is_some_and(|interval| age > SESSION + interval + GREETED)
}

/// What keepalives alone may come to within `time`, bytes on the wire: one for each interval, one for its edges, and one that
/// ends a conversation. At no interval only that one, however long it takes.
#[must_use]
pub fn keepalives(interval: Option<Duration>, time: Duration) -> u64 {
    let periodic = interval.filter(|interval| !interval.is_zero());
    let periodic = periodic.map_or(0, |interval| 1 + time.as_secs() / interval.as_secs().max(1));
    KEEPALIVE * (1 + periodic)
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
        Some(age) => {
            age > SESSION && (overdue(signs.keepalive, age) || signs.unanswered.is_some_and(|for_| for_ > GREETED))
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
    fn keepalives_alone_ask_for_nothing() {
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
        fn an_idle_peer_without_keepalive_is_never_down_once_it_was_heard(some in signs(), age in seconds()) {
            let idle = Signs { handshake: Some(age), keepalive: None, unanswered: None, ..some };
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
            "its keepalive has not asked for a handshake yet"
        );
        assert!(!try_next(&kept(205, Some(15)), s(999)));
        assert!(try_next(&kept(205, Some(16)), s(16)));
        assert!(try_next(&kept(221, None), s(16)));
    }
}
