//! The two macs at the end of a handshake message (whitepaper §5.4.4) and the cookies behind the second (§5.4.7).

use std::time::{Duration, Instant};

use blake2::{
    Blake2s256, Blake2sMac, Digest,
    digest::{FixedOutput, KeyInit, Update, consts::U16},
};
use chacha20poly1305::{
    XChaCha20Poly1305,
    aead::{AeadInPlace, Tag},
};
use x25519_dalek::PublicKey;

use crate::{
    Refused,
    message::{self, COOKIE_REPLY, MACS},
};

/// How long a cookie, and the secret it was made with, is good (`COOKIE_REFRESH_TIME`).
pub(crate) const COOKIE_LIFE: Duration = Duration::from_secs(120);
/// Bytes of a mac and of a cookie.
pub(crate) const MAC: usize = 16;

pub(crate) type Cookie = [u8; MAC];

/// Keyed BLAKE2s with an output of 16 bytes.
pub(crate) fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; MAC] {
    // A key of 32 bytes or fewer, which all of ours are, is always taken.
    let Ok(mut mac) = <Blake2sMac<U16> as KeyInit>::new_from_slice(key) else {
        return [0; MAC];
    };
    for part in parts {
        Update::update(&mut mac, part);
    }
    mac.finalize_fixed().into()
}

/// What a receiver's public key gives everybody who speaks to it.
#[derive(Clone)]
pub(crate) struct ReceiverKeys {
    pub(crate) mac1: [u8; 32],
    pub(crate) cookie: [u8; 32],
}

impl ReceiverKeys {
    pub(crate) fn new(receiver: &PublicKey) -> Self {
        let labelled = |label: &[u8]| {
            Blake2s256::new()
                .chain_update(label)
                .chain_update(receiver)
                .finalize()
                .into()
        };
        Self {
            mac1: labelled(b"mac1----"),
            cookie: labelled(b"cookie--"),
        }
    }
}

/// A handshake message with what each mac covers.
pub(crate) struct Sealed<'a> {
    pub(crate) under_mac1: &'a [u8],
    pub(crate) mac1: &'a [u8; MAC],
    pub(crate) under_mac2: &'a [u8],
    pub(crate) mac2: &'a [u8; MAC],
}

impl<'a> Sealed<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Option<Self> {
        let (under_mac2, mac2) = message.split_last_chunk::<MAC>()?;
        let (under_mac1, mac1) = under_mac2.split_last_chunk::<MAC>()?;
        Some(Self {
            under_mac1,
            mac1,
            under_mac2,
            mac2,
        })
    }
}

/// Puts macs under the handshake messages to one peer, and keeps the cookie that it asked for.
pub struct Macs {
    receiver: ReceiverKeys,
    last_mac1: Option<[u8; MAC]>,
    cookie: Option<(Cookie, Instant)>,
}

impl Macs {
    /// For messages to the peer with that key.
    #[must_use]
    pub fn new(receiver: &PublicKey) -> Self {
        Self {
            receiver: ReceiverKeys::new(receiver),
            last_mac1: None,
            cookie: None,
        }
    }

    /// Fills in the last 32 bytes of an initiation or a response.
    pub fn seal(&mut self, message: &mut [u8], now: Instant) {
        let Some(end) = message.len().checked_sub(MACS) else {
            return;
        };
        let mac1 = mac(&self.receiver.mac1, &[&message[..end]]);
        message[end..end + MAC].copy_from_slice(&mac1);
        self.last_mac1 = Some(mac1);
        let fresh = self
            .cookie
            .filter(|(_, since)| now.saturating_duration_since(*since) < COOKIE_LIFE);
        let mac2 = fresh.map_or([0; MAC], |(cookie, _)| mac(&cookie, &[&message[..end + MAC]]));
        message[end + MAC..].copy_from_slice(&mac2);
    }

    /// Keeps the cookie of a reply to our last message.
    ///
    /// # Errors
    /// We asked for none, or it does not authenticate.
    pub fn take(&mut self, reply: &[u8; COOKIE_REPLY], now: Instant) -> Result<(), Refused> {
        let asked = self.last_mac1.ok_or(Refused::UnknownSession)?;
        let (nonce, sealed) = reply[8..].split_at(24);
        let (cookie, tag) = sealed.split_at(MAC);
        let mut cookie: Cookie = cookie.try_into().map_err(|_| Refused::Invalid)?;
        XChaCha20Poly1305::new(&self.receiver.cookie.into())
            .decrypt_in_place_detached(
                nonce.into(),
                &asked,
                &mut cookie,
                Tag::<XChaCha20Poly1305>::from_slice(tag),
            )
            .map_err(|_| Refused::Invalid)?;
        self.cookie = Some((cookie, now));
        // One reply for each message: a replayed one cannot put an old cookie back.
        self.last_mac1 = None;
        Ok(())
    }
}

/// Says "first show that the address is yours" to the sender of a message with that index and first mac.
pub(crate) fn cookie_reply(
    own: &ReceiverKeys,
    sender: u32,
    mac1: &[u8; MAC],
    mut cookie: Cookie,
    nonce: [u8; 24],
) -> [u8; COOKIE_REPLY] {
    let mut reply = [0; COOKIE_REPLY];
    reply[..4].copy_from_slice(&message::COOKIE_REPLY_TYPE);
    reply[4..8].copy_from_slice(&sender.to_le_bytes());
    reply[8..32].copy_from_slice(&nonce);
    // It only fails beyond 256 GiB.
    if let Ok(tag) =
        XChaCha20Poly1305::new(&own.cookie.into()).encrypt_in_place_detached(&nonce.into(), mac1, &mut cookie)
    {
        reply[32..48].copy_from_slice(&cookie);
        reply[48..].copy_from_slice(&tag);
    }
    reply
}
