//! Which counters of a session were seen: a window that slides with the greatest (RFC 6479).

const BLOCK: u64 = u64::BITS as u64;
const BLOCKS: u64 = 128;
/// Counters that may come late: one block of the ring is always partly ahead.
const WINDOW: u64 = (BLOCKS - 1) * BLOCK;

/// As the kernel's (`COUNTER_WINDOW_SIZE`): with several queues on both sides datagrams overtake each other by hundreds.
#[derive(Debug)]
pub(crate) struct Replay {
    /// One more than the greatest counter seen.
    next: u64,
    ring: [u64; BLOCKS as usize],
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            next: 0,
            ring: [0; BLOCKS as usize],
        }
    }
}

impl Replay {
    /// Whether a message with this counter may still be new: asked before it is authenticated, which costs more.
    pub(crate) fn may_be_new(&self, counter: u64) -> bool {
        counter >= self.next || (counter + WINDOW >= self.next && self.ring[slot(counter)] & bit(counter) == 0)
    }

    /// Marks the counter of an authentic message; false = it was seen.
    pub(crate) fn mark(&mut self, counter: u64) -> bool {
        if !self.may_be_new(counter) {
            return false;
        }
        if counter >= self.next {
            // Blocks that the window enters hold what was seen a round ago.
            let (from, to) = (self.next.div_ceil(BLOCK), counter / BLOCK);
            for block in (from..=to).take(BLOCKS as usize) {
                self.ring[(block % BLOCKS) as usize] = 0;
            }
            self.next = counter + 1;
        }
        self.ring[slot(counter)] |= bit(counter);
        true
    }
}

const fn slot(counter: u64) -> usize {
    (counter / BLOCK % BLOCKS) as usize
}

const fn bit(counter: u64) -> u64 {
    1 << (counter % BLOCK)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_counter_is_taken_once_and_a_late_one_within_the_window() {
        let mut replay = Replay::default();
        assert!(replay.mark(0) && !replay.mark(0));
        assert!(replay.mark(WINDOW + 5) && !replay.mark(WINDOW + 5));
        assert!(!replay.may_be_new(5), "too old");
        assert!(replay.mark(6) && !replay.mark(6), "the oldest that may come");
        assert!(replay.mark(u64::MAX / 2) && !replay.mark(WINDOW + 4));
    }

    proptest! {
        /// The same as a set of everything seen, with the oldest forgotten.
        #[test]
        fn it_knows_what_a_set_would_know(steps in prop::collection::vec((any::<bool>(), 0_u64..20_000, 0_u64..200), 1..400)) {
            let (mut replay, mut seen, mut greatest) = (Replay::default(), BTreeSet::new(), 0_u64);
            for (far, jump, near) in steps {
                let counter = if far { greatest + jump } else { (greatest + 100).saturating_sub(near) };
                let old = seen.last().is_some_and(|last: &u64| counter + WINDOW <= *last);
                let new = !old && seen.insert(counter);
                prop_assert_eq!(replay.mark(counter), new, "counter {}", counter);
                greatest = greatest.max(counter);
            }
        }
    }
}
