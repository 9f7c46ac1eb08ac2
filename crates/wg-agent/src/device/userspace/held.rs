//! Packets that wait for a session: few for each peer, and no more than a device can bear for all together. The oldest give way.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// For one peer, as many as the kernel keeps (`MAX_STAGED_PACKETS`).
pub(super) const PACKETS: usize = 128;
const BYTES: usize = 128 << 10;
/// For all peers of a device.
const DEVICE_BYTES: usize = 32 << 20;

/// Bytes held by all peers of a device.
pub(super) type Budget = Arc<AtomicUsize>;

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
            if self.pop().is_none() {
                return;
            }
        }
        // Peers add at the same time: each takes its room before it looks, so that no two take the same.
        while self.budget.fetch_add(packet.len(), Ordering::Relaxed) + packet.len() > DEVICE_BYTES {
            self.budget.fetch_sub(packet.len(), Ordering::Relaxed);
            if self.pop().is_none() {
                return;
            }
        }
        self.bytes += packet.len();
        self.packets.push_back(packet.to_vec());
    }

    /// The oldest.
    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        let packet = self.packets.pop_front()?;
        self.bytes -= packet.len();
        self.budget.fetch_sub(packet.len(), Ordering::Relaxed);
        Some(packet)
    }

    pub(super) fn clear(&mut self) {
        self.budget.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = 0;
        self.packets.clear();
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
        assert_eq!(held.pop(), Some(vec![128]));
        held.push(&vec![1; BYTES]);
        assert_eq!((held.packets.len(), held.bytes), (1, BYTES));
        held.push(&vec![2; BYTES + 1]);
        assert_eq!((held.packets.len(), held.bytes), (0, 0), "larger than all there may be");
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
            (full, budget.load(Ordering::Relaxed)),
            (DEVICE_BYTES / BYTES, DEVICE_BYTES)
        );
        peers[0].clear();
        peers[full].push(&[1]);
        assert_eq!(budget.load(Ordering::Relaxed), DEVICE_BYTES - BYTES + 1);
        drop(peers);
        assert_eq!(budget.load(Ordering::Relaxed), 0);
    }
}
