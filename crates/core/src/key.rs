//! Parses, prints and compares WireGuard public keys. This crate never handles private keys.

use std::{fmt, str::FromStr};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// A WireGuard public key: a Curve25519 point, 32 bytes, written as 44 characters of padded base64
/// (wg(8), `PublicKey`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

/// Why a string is not a WireGuard public key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The string is not the padded base64 form of 32 bytes. Contains the first 60 characters of the string.
    #[error(
        "{0:?} is not a WireGuard public key: expected 44 characters of base64 that hold 32 bytes, as `wg pubkey` prints"
    )]
    Malformed(String),
    /// A point of low order. A shared secret with it is zero, so WireGuard never completes a handshake with it.
    #[error("{0:?} is a Curve25519 point of low order, which no WireGuard node can have as its key")]
    LowOrder(String),
}

/// The points whose order divides 8 (RFC 7748 §6.1: the shared secret would be zero), in all encodings whose highest bit is 0.
/// The bytes are in little-endian order; p = 2^255 - 19 is the prime of the field.
const LOW_ORDER: [[u8; 32]; 7] = {
    let mut p_minus_1 = [0xff; 32];
    p_minus_1[0] = 0xec;
    p_minus_1[31] = 0x7f;
    let mut p = p_minus_1;
    p[0] = 0xed;
    let mut p_plus_1 = p_minus_1;
    p_plus_1[0] = 0xee;
    let mut one = [0; 32];
    one[0] = 1;
    [
        [0; 32],
        one,
        // The next two have order 8.
        [
            0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a, 0xda, 0x09,
            0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00,
        ],
        [
            0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef, 0x5b, 0x04, 0x44,
            0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f, 0x11, 0x57,
        ],
        p_minus_1,
        p,
        p_plus_1,
    ]
};

impl PublicKey {
    /// Wraps 32 bytes without checking them.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// X25519 ignores the highest bit of a key (RFC 7748 §5).
fn is_low_order(mut bytes: [u8; 32]) -> bool {
    bytes[31] &= 0x7f;
    LOW_ORDER.contains(&bytes)
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let bytes = STANDARD.decode(text).ok().and_then(|v| <[u8; 32]>::try_from(v).ok());
        match bytes {
            None => Err(KeyError::Malformed(text.chars().take(60).collect())),
            Some(bytes) if is_low_order(bytes) => Err(KeyError::LowOrder(text.to_owned())),
            Some(bytes) => Ok(Self(bytes)),
        }
    }
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_key_is_printed_unchanged() {
        let text = "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=";
        assert_eq!(text.parse::<PublicKey>().map(|k| k.to_string()), Ok(text.to_owned()));
    }

    #[test]
    fn malformed_key_is_refused() {
        for text in [
            "",
            "not-base64",
            "AAAA",
            "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU",
            "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=\n",
        ] {
            assert_eq!(text.parse::<PublicKey>(), Err(KeyError::Malformed(text.to_owned())));
        }
    }

    // threat: weak-key
    #[test]
    fn points_of_low_order_are_refused() {
        for mut bytes in LOW_ORDER {
            for highest_bit in [0, 0x80] {
                bytes[31] = bytes[31] & 0x7f | highest_bit;
                let text = STANDARD.encode(bytes);
                assert_eq!(text.parse::<PublicKey>(), Err(KeyError::LowOrder(text.clone())));
            }
        }
    }
}
