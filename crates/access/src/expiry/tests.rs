use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use secrecy::SecretString;
use serde_json::{Value, json};

use super::*;

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn with_token(token: String) -> AuthInfo {
    AuthInfo {
        token: Some(SecretString::from(token)),
        ..AuthInfo::default()
    }
}

fn with_claims(claims: &str) -> AuthInfo {
    let [header, claims] = [r#"{"alg":"RS256"}"#, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
    with_token(format!("{header}.{claims}.c2lnbmF0dXJl"))
}

fn expires(claims: &Value) -> Option<Timestamp> {
    read(&with_claims(&claims.to_string())).map(|expiry| expiry.expires)
}

/// PEM of a certificate that is valid from the start of one year to the start of another.
fn certificate(from: i32, to: i32) -> String {
    let mut params = CertificateParams::default();
    (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
}

fn with_certificate(pem: &str) -> AuthInfo {
    AuthInfo {
        client_certificate_data: Some(STANDARD.encode(pem)),
        ..AuthInfo::default()
    }
}

#[test]
fn token_says_when_it_expires() {
    let claims =
        json!({"aud": ["https://kubernetes.default.svc"], "exp": 1_795_000_000, "iat": 1_794_000_000, "sub": "a"});
    let expiry = Expiry {
        credential: Credential::Token,
        issued: Some(Timestamp::from_second(1_794_000_000).unwrap()),
        expires: Timestamp::from_second(1_795_000_000).unwrap(),
    };
    assert_eq!(read(&with_claims(&claims.to_string())), Some(expiry));
    assert_eq!(expires(&json!({"exp": 1_795_000_000.9})), Some(expiry.expires));
}

#[test]
fn certificate_says_when_it_expires() {
    let expiry = Expiry {
        credential: Credential::Certificate,
        issued: Some(time("2026-01-01T00:00:00Z")),
        expires: time("2031-01-01T00:00:00Z"),
    };
    // The certificate of an authority may follow.
    let chain = certificate(2026, 2031) + &certificate(2020, 2060);
    assert_eq!(read(&with_certificate(&chain)), Some(expiry));
    // After 2049, X.509 writes the year with four digits.
    let late = read(&with_certificate(&certificate(2026, 2060))).unwrap();
    assert_eq!(late.expires, time("2060-01-01T00:00:00Z"));
}

#[test]
fn credentials_without_a_date_have_no_expiry() {
    assert_eq!(read(&AuthInfo::default()), None);
    // The token in a Secret of a ServiceAccount has no `exp`.
    assert_eq!(expires(&json!({"sub": "system:serviceaccount:a:b"})), None);
    for token in ["", "opaque", "a.b", "..", "a.b.c", "a.!!!.c", "e30.e30.e30"] {
        assert_eq!(read(&with_token(token.to_owned())), None, "{token}");
    }
}

#[test]
fn hostile_date_becomes_a_valid_status_date_or_none() {
    // A status cannot contain a year with a sign or with more than four digits.
    for past in [json!(-1), json!(-1e300), json!(i64::MIN), json!(0)] {
        assert_eq!(expires(&json!({"exp": past})), Some(Timestamp::UNIX_EPOCH), "{past}");
    }
    for none in [
        json!(1e300),
        json!(i64::MAX),
        json!(u64::MAX),
        json!("tomorrow"),
        json!(null),
        json!([1]),
        json!({}),
    ] {
        assert_eq!(expires(&json!({"exp": none})), None, "{none}");
    }
    let deep = format!("{{\"exp\": {}", "[".repeat(200_000));
    for text in ["{\"exp\": 1e999}", "{\"exp\": 1, \"exp\": 2}", "[]", "{", &deep] {
        assert_eq!(read(&with_claims(text)), None);
    }
}

#[test]
fn damaged_certificate_does_not_panic() {
    let pem = certificate(2026, 2031);
    let der = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap().1.contents;
    for index in 0..der.len() {
        for value in [0, 1, 0x7f, 0x80, 0x84, 0xff, der[index] ^ 1] {
            let mut damaged = der.clone();
            damaged[index] = value;
            let pem = format!(
                "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
                STANDARD.encode(damaged)
            );
            if let Some(expiry) = read(&with_certificate(&pem)) {
                assert!(expiry.expires >= Timestamp::UNIX_EPOCH);
            }
        }
    }
    for length in 0..pem.len() {
        let _ = read(&with_certificate(&pem[..length]));
    }
}
