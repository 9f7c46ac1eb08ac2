//! Finds credentials of members that expire soon or have expired. Pure functions.

use clustermesh_access::expiry::Expiry;
use clustermesh_core::{mesh::ClusterIdentity, status::Cause};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// The reason for credentials that expire soon.
pub(crate) const EXPIRING: &str = "CredentialsExpiring";
/// The reason for credentials that have expired.
pub(crate) const EXPIRED: &str = "CredentialsExpired";

/// Credentials are reported at most this long before they expire.
const WARNING: SignedDuration = SignedDuration::from_hours(7 * 24);

/// Returns the cause of the condition `Degraded` if the credentials of a member expire soon or have expired.
pub(crate) fn find_cause(entry: &str, identity: &ClusterIdentity, expiry: &Expiry, now: Timestamp) -> Option<Cause> {
    let Expiry {
        credential, expires, ..
    } = expiry;
    let (reason, verb, when) = if now >= *expires {
        (EXPIRED, "expired", "")
    } else if now >= warned_from(expiry) {
        (EXPIRING, "expires", " before then")
    } else {
        return None;
    };
    let message = format!(
        "cluster {entry:?}: the {} in {identity} {verb} at {expires}. Put a new kubeconfig into this Secret{when} \
         (deploy/member-kubeconfig.sh prints one); the controller uses it at once",
        credential.name()
    );
    Some(Cause::of_member("Degraded", reason, entry, message))
}

/// Returns the time from which on credentials are reported. Those that are valid for less than 70 days are reported in the last
/// tenth of that time: a token of one hour that is renewed every half hour needs no warning.
fn warned_from(expiry: &Expiry) -> Timestamp {
    let life = expiry.issued.map(|issued| issued.duration_until(expiry.expires));
    let warning = life.map_or(WARNING, |life| (life / 10).clamp(SignedDuration::ZERO, WARNING));
    expiry.expires.saturating_sub(warning).unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use clustermesh_access::expiry::Credential;

    use super::*;

    fn time(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    fn reason(issued: Option<&str>, expires: &str, now: &str) -> Option<&'static str> {
        let identity = ClusterIdentity::Secret {
            namespace: "ns".into(),
            name: "a".into(),
            key: "value".into(),
            context: None,
        };
        let expiry = Expiry {
            credential: Credential::Token,
            issued: issued.map(time),
            expires: time(expires),
        };
        let cause = find_cause("a", &identity, &expiry, time(now))?;
        let named = ["Secret ns/a", "key", "value", expires, "deploy/member-kubeconfig.sh"];
        assert!(
            named.iter().all(|word| cause.message.contains(word)),
            "{}",
            cause.message
        );
        assert_eq!((cause.kind, cause.cluster.as_deref()), ("Degraded", Some("a")));
        Some(cause.reason)
    }

    #[test]
    fn credentials_are_reported_from_a_week_before_they_expire() {
        let expires = "2027-01-08T00:00:00Z";
        for issued in [None, Some("2026-01-08T00:00:00Z"), Some("1970-01-01T00:00:00Z")] {
            let reason = |now| reason(issued, expires, now);
            assert_eq!(reason("2026-12-31T23:59:59Z"), None);
            assert_eq!(reason("2027-01-01T00:00:00Z"), Some(EXPIRING));
            assert_eq!(reason("2027-01-07T23:59:59Z"), Some(EXPIRING));
            assert_eq!(reason("2027-01-08T00:00:00Z"), Some(EXPIRED));
        }
    }

    #[test]
    fn short_lived_credentials_are_reported_in_their_last_tenth() {
        let reason = |now| reason(Some("2027-01-01T00:00:00Z"), "2027-01-01T10:00:00Z", now);
        assert_eq!(reason("2027-01-01T08:59:59Z"), None);
        assert_eq!(reason("2027-01-01T09:00:00Z"), Some(EXPIRING));
        assert_eq!(reason("2027-01-01T10:00:00Z"), Some(EXPIRED));
    }

    #[test]
    fn hostile_dates_are_reported_or_ignored() {
        let reason = |issued, expires| reason(Some(issued), expires, "2026-11-26T00:00:00Z");
        assert_eq!(reason("2026-11-26T00:00:00Z", "1970-01-01T00:00:00Z"), Some(EXPIRED));
        assert_eq!(reason("9999-12-30T00:00:00Z", "2026-11-26T00:00:01Z"), None);
        assert_eq!(reason("1970-01-01T00:00:00Z", "9999-12-30T22:00:00Z"), None);
    }
}
