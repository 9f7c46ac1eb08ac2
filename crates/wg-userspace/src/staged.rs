//! Stages packets until their peer has a session, with limits for each peer and for the whole device. A full queue drops its oldest packets
//! and counts them.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// Maximum number of packets of one peer, as in the kernel (`MAX_STAGED_PACKETS`).
pub(crate) const MAX_PACKETS: usize = 128;
/// Maximum bytes of one peer's packets.
const MAX_BYTES: usize = 128 << 10;
/// Maximum bytes of all peers' packets.
const MAX_DEVICE_BYTES: usize = 32 << 20;

/// The budget that all peers of a device share.
pub(crate) type SharedBudget = Arc<StagingBudget>;

/// Counts the staged bytes of a device, and the packets that were dropped.
#[derive(Debug, Default)]
pub(crate) struct StagingBudget {
    /// Staged bytes of all peers.
    bytes: AtomicUsize,
    /// Packets that were never sent: the limits had no room for them or newer ones displaced them, no session was established, or
    /// their peer was removed.
    dropped: AtomicU64,
}

impl StagingBudget {
    /// Packets dropped so far.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn count_dropped(&self, packets: usize) {
        self.dropped.fetch_add(packets as u64, Ordering::Relaxed);
    }
}

/// The staged packets of one peer.
#[derive(Debug, Default)]
pub(crate) struct StagedPackets {
    packets: VecDeque<Vec<u8>>,
    bytes: usize,
    budget: SharedBudget,
}

impl StagedPackets {
    pub(crate) fn new(budget: SharedBudget) -> Self {
        Self {
            packets: VecDeque::new(),
            bytes: 0,
            budget,
        }
    }

    /// Stages a packet. Drops this peer's oldest packets until the limits allow the new one, and drops the new one if that is not enough.
    pub(crate) fn push(&mut self, packet: &[u8]) {
        while self.packets.len() == MAX_PACKETS || self.bytes + packet.len() > MAX_BYTES {
            if !self.drop_oldest() {
                return self.budget.count_dropped(1);
            }
        }
        // Other peers push at the same time. So the bytes are reserved before the limit is checked, and released if they exceed it.
        while self.budget.bytes.fetch_add(packet.len(), Ordering::Relaxed) + packet.len() > MAX_DEVICE_BYTES {
            self.budget.bytes.fetch_sub(packet.len(), Ordering::Relaxed);
            if !self.drop_oldest() {
                return self.budget.count_dropped(1);
            }
        }
        self.bytes += packet.len();
        self.packets.push_back(packet.to_vec());
    }

    /// Removes and returns the oldest packet.
    pub(crate) fn pop(&mut self) -> Option<Vec<u8>> {
        let packet = self.packets.pop_front()?;
        self.bytes -= packet.len();
        self.budget.bytes.fetch_sub(packet.len(), Ordering::Relaxed);
        Some(packet)
    }

    /// Drops all packets.
    pub(crate) fn clear(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.budget.count_dropped(self.packets.len());
        self.bytes = 0;
        self.packets.clear();
    }

    /// Drops the oldest packet; `false` = no packet is staged.
    fn drop_oldest(&mut self) -> bool {
        let dropped = self.pop().is_some();
        self.budget.count_dropped(usize::from(dropped));
        dropped
    }
}

impl Drop for StagedPackets {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_queue_drops_the_oldest_packets() {
        let mut staged = StagedPackets::default();
        for number in 0..=u8::MAX {
            staged.push(&[number]);
        }
        assert_eq!((staged.pop(), staged.budget.dropped()), (Some(vec![128]), 128));
        staged.push(&vec![1; MAX_BYTES]);
        assert_eq!((staged.packets.len(), staged.bytes), (1, MAX_BYTES));
        staged.push(&vec![2; MAX_BYTES + 1]);
        assert_eq!((staged.packets.len(), staged.bytes), (0, 0), "larger than the limit");
        assert_eq!(
            staged.budget.dropped(),
            128 + 127 + 1 + 1,
            "every packet except the popped one"
        );
    }

    #[test]
    fn packets_of_a_removed_peer_count_as_dropped() {
        let budget = SharedBudget::default();
        let mut staged = StagedPackets::new(Arc::clone(&budget));
        staged.push(&[1]);
        staged.push(&[2]);
        staged.clear();
        staged.push(&[3]);
        drop(staged);
        assert_eq!((budget.bytes.load(Ordering::Relaxed), budget.dropped()), (0, 3));
    }

    #[test]
    fn device_budget_limits_all_peers_and_is_released() {
        let budget = SharedBudget::default();
        let mut peers: Vec<_> = (0..MAX_DEVICE_BYTES / MAX_BYTES + 10)
            .map(|_| StagedPackets::new(Arc::clone(&budget)))
            .collect();
        for staged in &mut peers {
            staged.push(&vec![0; MAX_BYTES]);
        }
        let full = peers.iter().filter(|staged| !staged.packets.is_empty()).count();
        assert_eq!(
            (full, budget.bytes.load(Ordering::Relaxed)),
            (MAX_DEVICE_BYTES / MAX_BYTES, MAX_DEVICE_BYTES)
        );
        peers[0].clear();
        peers[full].push(&[1]);
        assert_eq!(budget.bytes.load(Ordering::Relaxed), MAX_DEVICE_BYTES - MAX_BYTES + 1);
        drop(peers);
        assert_eq!(budget.bytes.load(Ordering::Relaxed), 0);
    }
}
