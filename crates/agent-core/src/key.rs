//! The preshared key of a peer. It is the only secret in the desired state, because this crate never gets the node's private key.

use std::fmt;

/// A WireGuard preshared key, 32 bytes (wg(8), `PresharedKey`). It is never printed: `Debug` hides it and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct PresharedKey([u8; 32]);

impl PresharedKey {
    /// `None` for 32 zeros, which WireGuard reads as "no preshared key".
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Option<Self> {
        (bytes != [0; 32]).then_some(Self(bytes))
    }

    /// The 32 bytes, for the configuration of the device.
    #[must_use]
    pub const fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for PresharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PresharedKey(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_text_does_not_contain_the_key() {
        let key = PresharedKey::new([0xab; 32]).expect("not zero");
        assert_eq!(format!("{key:?}"), "PresharedKey(hidden)");
    }

    #[test]
    fn all_zero_key_is_no_preshared_key() {
        assert_eq!(PresharedKey::new([0; 32]), None);
    }
}
