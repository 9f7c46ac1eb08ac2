//! Packets that wait for a session: few for each peer, and no more than a device can bear for all together. The oldest give way, and are
//! counted.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// For one peer, as many as the kernel keeps (`MAX_STAGED_PACKETS`).
pub(super) const PACKETS: usize = 128;
const BYTES: usize = 128 << 10;
/// For all peers of a device.
const DEVICE_BYTES: usize = 32 << 20;

/// What all peers of a device share.
pub(super) type Budget = Arc<Room>;

/// The room for all that waits in a device.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Bytes that are taken.
    taken: AtomicUsize,
    /// Packets that waited in vain: others took their room, no session came, or their peer went.
    given_up: AtomicU64,
}

impl Room {
    /// Packets that waited in vain so far.
    pub(super) fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    fn give_up(&self, packets: usize) {
        self.given_up.fetch_add(packets as u64, Ordering::Relaxed);
    }
}

/// One peer's.
#[derive(Debug, Default)]
pub(super) struct Held {
    packets: VecDeque<Vec<u8>>,
    bytes: usize,
    budget: Budget,
}

impl Held {
    pub(super) fn new(budget: Budget) -> Self {
        Self {
            packets: VecDeque::new(),
            bytes: 0,
            budget,
        }
    }

    /// Keeps a packet where there is room for it.
    pub(super) fn push(&mut self, packet: &[u8]) {
        while self.packets.len() == PACKETS || self.bytes + packet.len() > BYTES {
            if !self.give_way() {
                return self.budget.give_up(1);
            }
        }
        // Peers add at the same time: each takes its room before it looks, so that no two take the same.
        while self.budget.taken.fetch_add(packet.len(), Ordering::Relaxed) + packet.len() > DEVICE_BYTES {
            self.budget.taken.fetch_sub(packet.len(), Ordering::Relaxed);
            if !self.give_way() {
                return self.budget.give_up(1);
            }
        }
        self.bytes += packet.len();
        self.packets.push_back(packet.to_vec());
    }

    /// The oldest, to be sent.
    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        let packet = self.packets.pop_front()?;
        self.bytes -= packet.len();
        self.budget.taken.fetch_sub(packet.len(), Ordering::Relaxed);
        Some(packet)
    }

    /// Forgets all: there will be no session.
    pub(super) fn clear(&mut self) {
        self.budget.taken.fetch_sub(self.bytes, Ordering::Relaxed);
        self.budget.give_up(self.packets.len());
        self.bytes = 0;
        self.packets.clear();
    }

    fn give_way(&mut self) -> bool {
        let gone = self.pop().is_some();
        self.budget.give_up(usize::from(gone));
        gone
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_holds_so_many_packets_and_so_many_bytes_the_newest() {
        let mut held = Held::default();
        for number in 0..=u8::MAX {
            held.push(&[number]);
        }
        assert_eq!((held.pop(), held.budget.given_up()), (Some(vec![128]), 128));
        held.push(&vec![1; BYTES]);
        assert_eq!((held.packets.len(), held.bytes), (1, BYTES));
        held.push(&vec![2; BYTES + 1]);
        assert_eq!((held.packets.len(), held.bytes), (0, 0), "larger than all there may be");
        assert_eq!(
            held.budget.given_up(),
            128 + 127 + 1 + 1,
            "all but the one that was to be sent"
        );
    }

    #[test]
    fn what_waited_for_a_peer_that_goes_is_counted() {
        let budget = Budget::default();
        let mut held = Held::new(Arc::clone(&budget));
        held.push(&[1]);
        held.push(&[2]);
        held.clear();
        held.push(&[3]);
        drop(held);
        assert_eq!((budget.taken.load(Ordering::Relaxed), budget.given_up()), (0, 3));
    }

    #[test]
    fn all_peers_together_hold_no_more_than_their_device_may_and_give_back_what_they_had() {
        let budget = Budget::default();
        let mut peers: Vec<_> = (0..DEVICE_BYTES / BYTES + 10)
            .map(|_| Held::new(Arc::clone(&budget)))
            .collect();
        for held in &mut peers {
            held.push(&vec![0; BYTES]);
        }
        let full = peers.iter().filter(|held| !held.packets.is_empty()).count();
        assert_eq!(
            (full, budget.taken.load(Ordering::Relaxed)),
            (DEVICE_BYTES / BYTES, DEVICE_BYTES)
        );
        peers[0].clear();
        peers[full].push(&[1]);
        assert_eq!(budget.taken.load(Ordering::Relaxed), DEVICE_BYTES - BYTES + 1);
        drop(peers);
        assert_eq!(budget.taken.load(Ordering::Relaxed), 0);
    }
}
