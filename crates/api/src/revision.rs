//! What all PeerPolicies of one cluster say, as one word: an agent publishes it for those that it enforces, and the controller
//! holds it against those that stand. Who compares, and when, is not decided here.

use serde_json::Value;
use sha2::{Digest, Sha256};

/// The first bytes of the SHA-256 of one policy's name and whatever its `spec` says, fields unknown here included.
pub type PolicyDigest = [u8; 8];

/// The digest of the policy of this name; `spec` = the object's field of that name as the API server tells it.
#[must_use]
pub fn digest(name: &str, spec: Option<&Value>) -> PolicyDigest {
    let said = spec.map(ToString::to_string).unwrap_or_default();
    let sum = Sha256::new().chain_update(name).chain_update([0]).chain_update(said);
    let mut digest = PolicyDigest::default();
    for (to, from) in digest.iter_mut().zip(sum.finalize()) {
        *to = from;
    }
    digest
}

/// 8 hex digits of the SHA-256 of the digests of all policies of a cluster, in the order of their names.
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

    /// These words stand on Nodes, written by agents of other versions: another hash would have them all outdated.
    #[test]
    fn the_word_changes_with_whatever_a_policy_says_and_stays_what_earlier_agents_write() {
        let spec = json!({"sources": ["10.5.0.0/16"], "networks": [], "later": 7});
        let one = digest("m--a", Some(&spec));
        let word = of_all([&one]);
        assert_eq!(word, "7002e223");
        assert_eq!(of_all([]), "e3b0c442");
        let others = [
            digest("m--b", Some(&spec)),
            digest(
                "m--a",
                Some(&json!({"sources": ["10.5.0.0/16"], "networks": [], "later": 8})),
            ),
            digest("m--a", None),
        ];
        let words = others.map(|other| of_all([&other]));
        assert!(words.iter().all(|other| *other != word), "{words:?}");
    }
}
