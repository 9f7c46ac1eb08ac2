//! The Internet checksum (RFC 1071). Knows no header.

/// A sum under way. It is kept in the machine's own byte order, which the one's complement sum does not mind (RFC 1071 §2(B)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum(u64);

/// Words summed side by side, so that the compiler can use wide registers.
const LANES: usize = 8;

impl Sum {
    /// Adds bytes that begin at an even offset of what is summed.
    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        // A lane takes at most 64 KiB / 32 words of 32 bits: no overflow.
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

    /// Adds a number as it would stand in a header.
    #[must_use]
    pub fn number(self, number: u16) -> Self {
        Self(self.0 + u64::from(u16::from_ne_bytes(number.to_be_bytes())))
    }

    /// Takes a number out that was added.
    #[must_use]
    pub fn without(self, number: u16) -> Self {
        self.number(!number)
    }

    /// The sum as it stands in a header, not yet complemented: what a header holds that is to be completed.
    #[must_use]
    pub fn partial(self) -> [u8; 2] {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (sum as u16).to_ne_bytes()
    }

    /// The checksum.
    #[must_use]
    pub fn finish(self) -> [u8; 2] {
        self.partial().map(|byte| !byte)
    }

    /// Whether a packet summed with its checksum is whole.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.partial() == [0xff, 0xff]
    }
}
