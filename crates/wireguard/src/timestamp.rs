//! The time in an initiation, by which a responder knows a replayed one (whitepaper §5.1, TAI64N: <https://cr.yp.to/libtai/tai64.html>).

use std::time::Duration;

/// TAI as WireGuard counts it: 10 s ahead of UTC, leap seconds left out, as the kernel and wireguard-go do. What counts is that all
/// implementations that a node may run in turn agree: a peer refuses everything older than the newest it has seen.
const BASE: u64 = 0x4000_0000_0000_000a;
/// Nanoseconds are cut to about 17 ms, so that they tell less about the machine (as the kernel, `tai64n_now`).
const GRAIN: u32 = 1 << 24;

/// A TAI64N label; later times compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp([u8; Self::LENGTH]);

impl Timestamp {
    /// Bytes of the label.
    pub const LENGTH: usize = 12;

    /// A label for the time since the Unix epoch that comes after `last`, also when the clock has not moved or was set back.
    #[must_use]
    pub fn after(last: Self, since_epoch: Duration) -> Self {
        let nanoseconds = since_epoch.subsec_nanos() & !(GRAIN - 1);
        let now = Self::new(BASE.saturating_add(since_epoch.as_secs()), nanoseconds);
        if now > last { now } else { last.next() }
    }

    fn new(seconds: u64, nanoseconds: u32) -> Self {
        let mut label = [0; Self::LENGTH];
        label[..8].copy_from_slice(&seconds.to_be_bytes());
        label[8..].copy_from_slice(&nanoseconds.to_be_bytes());
        Self(label)
    }

    fn next(self) -> Self {
        let [a, b, c, d, e, f, g, h, nanoseconds @ ..] = self.0;
        let seconds = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        match u32::from_be_bytes(nanoseconds).saturating_add(GRAIN) {
            more if more < 1_000_000_000 => Self::new(seconds, more),
            _ => Self::new(seconds.saturating_add(1), 0),
        }
    }

    pub(crate) const fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        Self(bytes)
    }

    pub(crate) const fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_the_kernels_for_the_same_time() {
        let label = Timestamp::after(Timestamp::default(), Duration::new(0x1234_5678, 0x0300_0001));
        assert_eq!(label.0, [0x40, 0, 0, 0, 0x12, 0x34, 0x56, 0x82, 3, 0, 0, 0]);
    }

    #[test]
    fn a_label_comes_after_the_last_whatever_the_clock_says() {
        let at = Duration::new(1000, 999_000_000);
        let first = Timestamp::after(Timestamp::default(), at);
        let second = Timestamp::after(first, at);
        let third = Timestamp::after(second, at);
        let earlier = Timestamp::after(third, Duration::from_secs(10));
        assert!(first < second && second < third && third < earlier);
        assert_eq!(second.0[..8], (BASE + 1001).to_be_bytes(), "a whole second is carried");
        assert_eq!(
            Timestamp::after(earlier, Duration::from_secs(2000)),
            Timestamp::new(BASE + 2000, 0)
        );
    }
}
