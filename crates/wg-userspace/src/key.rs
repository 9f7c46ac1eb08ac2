//! WireGuard's keys. Private and public keys are parsed from the text form of `wg(8)`: 44 characters of base64.

use std::{fmt, str::FromStr};

use base64::{Engine, engine::general_purpose::STANDARD};
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

/// The error of a text that is not a key. The text may be a secret, so the message does not contain it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a WireGuard key: write 32 bytes as 44 characters of base64, as `wg genkey` and `wg pubkey` print")]
pub struct MalformedKey;

/// A private key. Wiped when dropped, and never printed.
#[derive(Clone)]
pub struct PrivateKey(StaticSecret);

/// A public key, by which a peer is identified.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

/// A symmetric key that two peers use in addition to their key pairs. Wiped when dropped, and never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PresharedKey(Zeroizing<[u8; 32]>);

impl PrivateKey {
    /// Computes the public key of this private key.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        PublicKey(x25519_dalek::PublicKey::from(&self.0).to_bytes())
    }

    pub(crate) const fn secret(&self) -> &StaticSecret {
        &self.0
    }
}

impl From<StaticSecret> for PrivateKey {
    fn from(secret: StaticSecret) -> Self {
        Self(secret)
    }
}

impl PartialEq for PrivateKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_bytes() == other.0.as_bytes()
    }
}

impl Eq for PrivateKey {}

impl FromStr for PrivateKey {
    type Err = MalformedKey;

    fn from_str(text: &str) -> Result<Self, MalformedKey> {
        Ok(Self(StaticSecret::from(*decode(text)?)))
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(hidden)")
    }
}

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

impl FromStr for PublicKey {
    type Err = MalformedKey;

    fn from_str(text: &str) -> Result<Self, MalformedKey> {
        Ok(Self(*decode(text)?))
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

impl PresharedKey {
    /// Wraps 32 bytes. `None` for zeros, which WireGuard reads as "no preshared key".
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Option<Self> {
        (bytes != [0; 32]).then(|| Self(Zeroizing::new(bytes)))
    }

    /// The 32 bytes.
    #[must_use]
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for PresharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PresharedKey(hidden)")
    }
}

fn decode(text: &str) -> Result<Zeroizing<[u8; 32]>, MalformedKey> {
    let bytes = Zeroizing::new(STANDARD.decode(text).map_err(|_| MalformedKey)?);
    let bytes: &[u8; 32] = bytes.as_slice().try_into().map_err(|_| MalformedKey)?;
    Ok(Zeroizing::new(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=";

    #[test]
    fn public_key_is_printed_as_it_was_written() {
        assert_eq!(
            TEXT.parse::<PublicKey>().map(|key| key.to_string()),
            Ok(TEXT.to_owned())
        );
    }

    #[test]
    fn private_key_has_the_public_key_of_rfc_7748() {
        // Section 6.1: the key pair of Alice.
        let private = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=".parse::<PrivateKey>();
        let public = private.map(|key| key.public_key().to_string());
        assert_eq!(public, Ok("hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=".to_owned()));
    }

    #[test]
    fn malformed_keys_are_refused() {
        for text in ["", "not-base64", "AAAA", &TEXT[..43], &format!("{TEXT}\n")] {
            assert_eq!(text.parse::<PublicKey>(), Err(MalformedKey), "{text:?}");
            assert_eq!(text.parse::<PrivateKey>(), Err(MalformedKey), "{text:?}");
        }
    }

    #[test]
    fn debug_text_contains_no_secret() {
        let private = PrivateKey::from(StaticSecret::from([0xab; 32]));
        let preshared = PresharedKey::new([0xab; 32]).expect("not zero");
        assert_eq!(
            format!("{private:?} {preshared:?}"),
            "PrivateKey(hidden) PresharedKey(hidden)"
        );
    }

    #[test]
    fn zero_bytes_are_no_preshared_key() {
        assert_eq!(PresharedKey::new([0; 32]), None);
    }
}
