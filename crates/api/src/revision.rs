//! Computes the policy revision: a hash over all PeerPolicies of a cluster. An agent publishes the revision of the policies that it
//! enforces, and the controller compares it with the revision of the existing policies.

use serde_json::Value;
use sha2::{Digest, Sha256};

/// The first bytes of the SHA-256 of a policy's name and `spec`, including fields that this version does not know.
pub type PolicyDigest = [u8; 8];

/// Computes the digest of a policy. `spec` is the object's field as the API server returned it.
#[must_use]
pub fn digest(name: &str, spec: Option<&Value>) -> PolicyDigest {
    let text = spec.map(ToString::to_string).unwrap_or_default();
    let sum = Sha256::new().chain_update(name).chain_update([0]).chain_update(text);
    let mut digest = PolicyDigest::default();
    for (to, from) in digest.iter_mut().zip(sum.finalize()) {
        *to = from;
    }
    digest
}

/// Computes the revision: the first 8 hex digits of the SHA-256 of `digests`. The caller passes the digests of all policies of a cluster,
/// sorted by policy name.
#[must_use]
pub fn of_all<'a>(digests: impl IntoIterator<Item = &'a PolicyDigest>) -> String {
    let sum = digests
        .into_iter()
        .fold(Sha256::new(), |sum, digest| sum.chain_update(digest));
    sum.finalize()
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Agents of other versions compute revisions, too. If this version computed them differently, all those agents would look outdated.
    #[test]
    fn revision_is_a_fixed_hash_of_name_and_every_field() {
        let spec = json!({"sources": ["10.5.0.0/16"], "networks": [], "later": 7});
        let one = digest("m--a", Some(&spec));
        let revision = of_all([&one]);
        assert_eq!(revision, "7002e223");
        assert_eq!(of_all([]), "e3b0c442");
        let others = [
            digest("m--b", Some(&spec)),
            digest(
                "m--a",
                Some(&json!({"sources": ["10.5.0.0/16"], "networks": [], "later": 8})),
            ),
            digest("m--a", None),
        ];
        let revisions = others.map(|other| of_all([&other]));
        assert!(revisions.iter().all(|other| *other != revision), "{revisions:?}");
    }
}
