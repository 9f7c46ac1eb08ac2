//! Recognizes public keys of low order, whose shared secret with every private key is zero. WireGuard refuses them (whitepaper §5.1, the
//! kernel's `curve25519`), but boringtun does not check.

/// Every public key of low order, in little-endian: 0, 1, p - 1 and the two of order 8, where p = 2^255 - 19. Keys count modulo p, so
/// p and p + 1 are other encodings of 0 and 1. The highest bit of a key is ignored (RFC 7748 §5).
const POINTS: [[u8; 32]; 7] = [
    [0; 32],
    with_ends([1, 0], 0, [0, 0]),
    // The two of order 8.
    [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a, 0xda, 0x09,
        0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00,
    ],
    [
        0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef, 0x5b, 0x04, 0x44,
        0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f, 0x11, 0x57,
    ],
    // p - 1, p, p + 1.
    with_ends([0xec, 0xff], 0xff, [0xff, 0x7f]),
    with_ends([0xed, 0xff], 0xff, [0xff, 0x7f]),
    with_ends([0xee, 0xff], 0xff, [0xff, 0x7f]),
];

const fn with_ends(first: [u8; 2], between: u8, last: [u8; 2]) -> [u8; 32] {
    let mut bytes = [between; 32];
    [bytes[0], bytes[1], bytes[30], bytes[31]] = [first[0], first[1], last[0], last[1]];
    bytes
}

pub(super) fn is_low_order(key: &[u8; 32]) -> bool {
    let mut key = *key;
    key[31] &= 0x7f;
    POINTS.contains(&key)
}

#[cfg(test)]
mod tests {
    use x25519_dalek::{PublicKey, StaticSecret, x25519};

    use super::*;

    #[test]
    fn low_order_key_gives_zero_shared_secret() {
        for mut point in POINTS {
            for high in [0, 0x80] {
                point[31] = point[31] & 0x7f | high;
                assert!(is_low_order(&point));
                for private in [[1; 32], [0xa5; 32]] {
                    assert_eq!(x25519(private, point), [0; 32], "{point:x?}");
                }
            }
        }
    }

    #[test]
    fn other_keys_are_not_low_order() {
        for seed in 0..=255 {
            let public = PublicKey::from(&StaticSecret::from([seed; 32]));
            assert!(!is_low_order(public.as_bytes()));
        }
        // p + 2 equals 2 modulo p.
        let two = with_ends([0xef, 0xff], 0xff, [0xff, 0x7f]);
        assert!(!is_low_order(&two) && x25519([1; 32], two) != [0; 32]);
    }
}
