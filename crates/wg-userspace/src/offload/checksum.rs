//! Computes the Internet checksum (RFC 1071).

/// A running sum in native byte order. The one's complement sum works in either byte order (RFC 1071 §2(B)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sum(u64);

/// Number of words summed in parallel, so that the compiler can use wide registers.
const LANES: usize = 8;

impl Sum {
    /// Adds bytes. They must begin at an even offset of the summed data.
    #[must_use]
    pub(crate) fn bytes(self, bytes: &[u8]) -> Self {
        // No lane overflows: a packet has at most about 64 KiB, so each lane adds at most about 2,048 words of 32 bits.
        let mut lanes = [0_u64; LANES];
        let mut chunks = bytes.chunks_exact(4 * LANES);
        for chunk in &mut chunks {
            for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(4)) {
                *lane += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
            }
        }
        let mut sum = lanes.iter().sum::<u64>();
        let mut words = chunks.remainder().chunks_exact(2);
        for word in &mut words {
            sum += u64::from(u16::from_ne_bytes([word[0], word[1]]));
        }
        if let [last] = words.remainder() {
            sum += u64::from(u16::from_ne_bytes([*last, 0]));
        }
        Self(self.0 + sum)
    }

    /// Adds a number as a header field in network byte order.
    #[must_use]
    pub(crate) fn number(self, number: u16) -> Self {
        Self(self.0 + u64::from(u16::from_ne_bytes(number.to_be_bytes())))
    }

    /// Subtracts a number that was added.
    #[must_use]
    pub(crate) fn without(self, number: u16) -> Self {
        self.number(!number)
    }

    /// The sum without the final complement, as in a checksum field that has to be completed.
    #[must_use]
    pub(crate) fn partial(self) -> [u8; 2] {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (sum as u16).to_ne_bytes()
    }

    /// The checksum.
    #[must_use]
    pub(crate) fn finish(self) -> [u8; 2] {
        self.partial().map(|byte| !byte)
    }

    /// Whether the checksum of a packet is correct, after the packet was summed including its checksum.
    #[must_use]
    pub(crate) fn is_valid(self) -> bool {
        self.partial() == [0xff, 0xff]
    }
}
