//! Reads from credentials when they expire. Signatures are not verified: a forged date only makes the status show a wrong date
//! for the forged token or certificate.

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use k8s_openapi::jiff::Timestamp;
use kube::config::AuthInfo;
use secrecy::ExposeSecret;
use serde::Deserialize;
use x509_parser::pem::Pem;

/// When credentials expire, as they say themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expiry {
    /// What expires.
    pub credential: Credential,
    /// When it was issued: `iat` of a token, `notBefore` of a certificate. `None` = unknown.
    pub issued: Option<Timestamp>,
    /// When it expires: `exp` of a token, `notAfter` of a certificate. From 1970 to 9999, in whole seconds.
    pub expires: Timestamp,
}

/// The kind of credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credential {
    /// A bearer token.
    Token,
    /// A client certificate.
    Certificate,
}

impl Credential {
    /// The words for a message.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Certificate => "client certificate",
        }
    }
}

/// Reads when the inline credentials of a user expire. `None` = they contain no date, or none that can be read: the token is no
/// JWT, or the date is after the year 9999.
pub(crate) fn read(user: &AuthInfo) -> Option<Expiry> {
    if let Some(token) = &user.token {
        return of_token(token.expose_secret());
    }
    of_certificate(&STANDARD.decode(user.client_certificate_data.as_ref()?).ok()?)
}

/// The claims of a JWT (RFC 7519), in seconds since 1970, which may have a fraction.
#[derive(Deserialize)]
struct Claims {
    exp: f64,
    iat: Option<f64>,
}

fn of_token(token: &str) -> Option<Expiry> {
    let mut parts = token.trim().split('.');
    let (_header, claims, _signature) = (parts.next()?, parts.next()?, parts.next()?);
    let claims = URL_SAFE_NO_PAD.decode(claims).ok()?;
    let claims: Claims = serde_json::from_slice(&claims).ok()?;
    // A value beyond i64 becomes the limit of i64.
    let seconds = |time: f64| time.floor() as i64;
    Some(Expiry {
        credential: Credential::Token,
        issued: claims.iat.and_then(|time| timestamp(seconds(time))),
        expires: timestamp(seconds(claims.exp))?,
    })
}

/// Reads the first certificate, which is the client's own. The others are those of its authorities.
fn of_certificate(pem: &[u8]) -> Option<Expiry> {
    let blocks = Pem::iter_from_buffer(pem).map_while(Result::ok);
    let first = blocks.into_iter().find(|block| block.label == "CERTIFICATE")?;
    let certificate = first.parse_x509().ok()?;
    let validity = certificate.validity();
    Some(Expiry {
        credential: Credential::Certificate,
        issued: timestamp(validity.not_before.timestamp()),
        expires: timestamp(validity.not_after.timestamp())?,
    })
}

/// A time before 1970 becomes 1970: a status cannot contain a negative year.
fn timestamp(seconds: i64) -> Option<Timestamp> {
    Timestamp::from_second(seconds.max(0)).ok()
}

#[cfg(test)]
mod tests;
