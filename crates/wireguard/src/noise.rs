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

const NAME: &str = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";
/// Whitepaper §5.4.2, `IDENTIFIER`.
const PROLOGUE: &[u8] = b"WireGuard v1 zx2c4 Jason@zx2c4.com";
/// Where the pattern mixes in the preshared key.
pub(crate) const PSK_AT: usize = 2;

static PARAMETERS: LazyLock<Option<NoiseParams>> = LazyLock::new(|| NAME.parse().ok());

pub(crate) fn initiator(own: &StaticSecret, peer: &PublicKey, psk: &[u8; 32]) -> Result<HandshakeState, Error> {
    builder()?
        .local_private_key(own.as_bytes())?
        .remote_public_key(peer.as_bytes())?
        .psk(PSK_AT as u8, psk)?
        .build_initiator()
}

/// Whose preshared key it is shows after the first message: see [`HandshakeState::set_psk`].
pub(crate) fn responder(own: &StaticSecret) -> Result<HandshakeState, Error> {
    builder()?.local_private_key(own.as_bytes())?.build_responder()
}

fn builder<'a>() -> Result<Builder<'a>, Error> {
    let parameters = PARAMETERS.clone().ok_or(Error::Input)?;
    Builder::with_resolver(parameters, Box::new(Resolver)).prologue(PROLOGUE)
}

/// The library's own primitives, but for the one that holds private keys.
struct Resolver;

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        DefaultResolver.resolve_rng()
    }
    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        match choice {
            DHChoice::Curve25519 => Some(Box::new(X25519::from(StaticSecret::from([0; 32])))),
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

/// The secret is wiped when this goes, which the library's own leaves in memory.
struct X25519 {
    private: StaticSecret,
    public: PublicKey,
}

impl From<StaticSecret> for X25519 {
    fn from(private: StaticSecret) -> Self {
        let public = PublicKey::from(&private);
        Self { private, public }
    }
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
    fn set(&mut self, private: &[u8]) {
        if let Ok(private) = <[u8; 32]>::try_from(private) {
            *self = StaticSecret::from(*Zeroizing::new(private)).into();
        }
    }
    fn generate(&mut self, random: &mut dyn Random) -> Result<(), Error> {
        let mut bytes = Zeroizing::new([0; 32]);
        random.try_fill_bytes(&mut *bytes)?;
        *self = StaticSecret::from(*bytes).into();
        Ok(())
    }
    fn pubkey(&self) -> &[u8] {
        self.public.as_bytes()
    }
    fn privkey(&self) -> &[u8] {
        self.private.as_bytes()
    }
    /// A point of low order gives a result that everybody knows: it is refused, as the kernel does.
    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), Error> {
        // The library hands in a buffer that has room for the keys of other curves.
        let public = public.first_chunk::<32>().ok_or(Error::Dh)?;
        let shared = self.private.diffie_hellman(&PublicKey::from(*public));
        if !shared.was_contributory() {
            return Err(Error::Dh);
        }
        out.first_chunk_mut::<32>()
            .ok_or(Error::Dh)?
            .copy_from_slice(shared.as_bytes());
        Ok(())
    }
}
