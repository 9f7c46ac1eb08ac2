//! Computes a hash that is the same in every build, because numbers derived from it are written to clusters and kernels.

/// FNV-1a, 32 bits.
#[must_use]
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    bytes.into_iter().fold(0x811c_9dc5, step)
}

#[cfg(test)]
mod tests {
    /// The published test vectors.
    #[test]
    fn fnv1a_test_vectors_match() {
        let hashes = ["", "a", "foobar"].map(|text| super::fnv1a(text.bytes()));
        assert_eq!(hashes, [0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968]);
    }
}
