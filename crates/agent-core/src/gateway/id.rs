//! Numbers by which the kernel knows sandboxes and grants. Each is a hash of what it stands for, so that a process that starts
//! anew finds the connections of the one before; the rare two that would be equal are told apart by counting on.

use std::collections::BTreeMap;

use clustermesh_core::hash::fnv1a;

/// A sandbox: the mark of its packets between two rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SandboxId(pub u32);

/// A grant: the mark of its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantId(pub u32);

/// A length stands before each part, so that no two lists of parts read the same.
fn hash(parts: &[&str]) -> u32 {
    let bytes = |part: &&str| [&part.len().to_le_bytes(), part.as_bytes()].concat();
    fnv1a(parts.iter().flat_map(bytes))
}

/// Gives a number, which is not 0, to each.
#[derive(Debug)]
pub(super) struct Numbers<K> {
    taken: BTreeMap<u32, K>,
}

impl<K> Default for Numbers<K> {
    fn default() -> Self {
        Self { taken: BTreeMap::new() }
    }
}

impl<K: PartialEq> Numbers<K> {
    pub(super) fn get(&mut self, key: K, parts: &[&str]) -> u32 {
        let mut number = hash(parts).max(1);
        while self.taken.get(&number).is_some_and(|other| *other != key) {
            number = number.wrapping_add(1).max(1);
        }
        self.taken.insert(number, key);
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_read_the_same_together_have_different_numbers() {
        assert_ne!(hash(&["a", "bc"]), hash(&["ab", "c"]));
        assert_eq!(hash(&["a", "bc"]), hash(&["a", "bc"]));
    }

    #[test]
    fn numbers_that_would_be_equal_are_counted_on_and_none_is_zero() {
        let mut numbers = Numbers::default();
        let first = numbers.get("x", &["same"]);
        assert_eq!(numbers.get("x", &["same"]), first);
        assert_eq!(numbers.get("y", &["same"]), first + 1);
        let mut full = Numbers {
            taken: [(u32::MAX, "z")].into(),
        };
        full.taken.insert(hash(&["same"]), "z");
        assert_ne!(full.get("x", &["same"]), 0);
    }
}
