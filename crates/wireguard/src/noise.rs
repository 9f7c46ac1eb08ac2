//! How the Noise library is set up: the pattern's name, and Diffie-Hellman on keys that are wiped.

use std::sync::LazyLock;

use snow::{
    Builder, Error, HandshakeState,
    params::{CipherChoice, DHChoice, HashChoice, NoiseParams},
    resolvers::{CryptoResolver, DefaultResolver},
    types::{Cipher, Dh, Hash, Random},
};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

use crate::Local;

const NAME: &str = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";
/// Whitepaper §5.4.2, `IDENTIFIER`.
const PROLOGUE: &[u8] = b"WireGuard v1 zx2c4 Jason@zx2c4.com";
/// Where the pattern mixes in the preshared key.
pub(crate) const PSK_AT: usize = 2;

static PARAMETERS: LazyLock<Option<NoiseParams>> = LazyLock::new(|| NAME.parse().ok());

pub(crate) fn initiator(local: &Local, peer: &PublicKey, psk: &[u8; 32]) -> Result<HandshakeState, Error> {
    builder(local)?
        .local_private_key(local.private.as_bytes())?
        .remote_public_key(peer.as_bytes())?
        .psk(PSK_AT as u8, psk)?
        .build_initiator()
}

/// Whose preshared key it is shows after the first message: see [`HandshakeState::set_psk`].
pub(crate) fn responder(local: &Local) -> Result<HandshakeState, Error> {
    builder(local)?
        .local_private_key(local.private.as_bytes())?
        .build_responder()
}

fn builder<'a>(local: &Local) -> Result<Builder<'a>, Error> {
    let parameters = PARAMETERS.clone().ok_or(Error::Input)?;
    let resolver = Resolver { own: local.public };
    Builder::with_resolver(parameters, Box::new(resolver)).prologue(PROLOGUE)
}

/// The library's own primitives, but for the one that holds our private keys.
struct Resolver {
    own: PublicKey,
}

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        DefaultResolver.resolve_rng()
    }
    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        match choice {
            DHChoice::Curve25519 => Some(Box::new(X25519 {
                own: self.own,
                pair: None,
            })),
            DHChoice::Curve448 => None,
        }
    }
    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }
    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

/// A pair of keys, of which the secret is wiped when this goes; the library's own leaves it in memory.
struct X25519 {
    /// What belongs to our static key: computing it anew for each handshake costs as much as half of the handshake.
    own: PublicKey,
    pair: Option<(StaticSecret, PublicKey)>,
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }
    fn pub_len(&self) -> usize {
        32
    }
    fn priv_len(&self) -> usize {
        32
    }
    /// The library sets our static key and generates ephemeral ones.
    fn set(&mut self, private: &[u8]) {
        if let Ok(private) = <[u8; 32]>::try_from(private) {
            self.pair = Some((StaticSecret::from(*Zeroizing::new(private)), self.own));
        }
    }
    fn generate(&mut self, random: &mut dyn Random) -> Result<(), Error> {
        let mut bytes = Zeroizing::new([0; 32]);
        random.try_fill_bytes(&mut *bytes)?;
        let private = StaticSecret::from(*bytes);
        let public = PublicKey::from(&private);
        self.pair = Some((private, public));
        Ok(())
    }
    fn pubkey(&self) -> &[u8] {
        self.pair.as_ref().map_or(&[0; 32], |(_, public)| public.as_bytes())
    }
    fn privkey(&self) -> &[u8] {
        self.pair.as_ref().map_or(&[0; 32], |(private, _)| private.as_bytes())
    }
    /// A point of low order gives a result that everybody knows: it is refused, as the kernel does.
    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let (private, _) = self.pair.as_ref().ok_or(Error::Dh)?;
        // The library hands in a buffer that has room for the keys of other curves.
        let public = public.first_chunk::<32>().ok_or(Error::Dh)?;
        let shared = private.diffie_hellman(&PublicKey::from(*public));
        if !shared.was_contributory() {
            return Err(Error::Dh);
        }
        out.first_chunk_mut::<32>()
            .ok_or(Error::Dh)?
            .copy_from_slice(shared.as_bytes());
        Ok(())
    }
}
