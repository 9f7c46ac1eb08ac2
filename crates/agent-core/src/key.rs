//! The one secret that desired state carries: a peer's preshared key. The node's private key never comes near this crate.

use std::fmt;

/// A WireGuard preshared key, 32 bytes (wg(8), `PresharedKey`). It is never printed: `Debug` hides it and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct PresharedKey([u8; 32]);

impl PresharedKey {
    /// Takes 32 bytes; `None` for 32 zeros, which WireGuard reads as "no preshared key".
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Option<Self> {
        (bytes != [0; 32]).then_some(Self(bytes))
    }

    /// The 32 bytes, for the device alone.
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
    fn a_preshared_key_is_not_in_its_debug_text() {
        let key = PresharedKey::new([0xab; 32]).expect("not zero");
        assert_eq!(format!("{key:?}"), "PresharedKey(hidden)");
    }

    #[test]
    fn thirty_two_zeros_are_no_preshared_key() {
        assert_eq!(PresharedKey::new([0; 32]), None);
    }
}
