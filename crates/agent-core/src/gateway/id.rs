//! Assigns the numbers that identify sandboxes and grants in the kernel. A number is a hash of the sandbox or grant, so after a restart
//! the gateway assigns the same numbers, and open connections continue. Equal hashes are the exception: the first allocated gets the hash,
//! each later one the next free number.

use std::collections::BTreeMap;

use clustermesh_core::hash::fnv1a;

/// The number of a sandbox: the mark of its packets, within the chains `enter` and `count` of the gateway's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SandboxId(pub u32);

/// The number of a grant: the mark of its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantId(pub u32);

/// Hashes the length of each part and then the part, so that different lists of parts are different inputs of the hash.
fn hash(parts: &[&str]) -> u32 {
    let bytes = |part: &&str| [&part.len().to_le_bytes(), part.as_bytes()].concat();
    fnv1a(parts.iter().flat_map(bytes))
}

/// Assigns a number other than 0 to each key.
#[derive(Debug)]
pub(super) struct IdAllocator<K> {
    /// The key of each assigned number.
    assigned: BTreeMap<u32, K>,
}

impl<K> Default for IdAllocator<K> {
    fn default() -> Self {
        Self {
            assigned: BTreeMap::new(),
        }
    }
}

impl<K: PartialEq> IdAllocator<K> {
    /// Returns the number of `key`: the hash of `parts`, or the next free number if another key has that one.
    pub(super) fn allocate(&mut self, key: K, parts: &[&str]) -> u32 {
        let mut number = hash(parts).max(1);
        while self.assigned.get(&number).is_some_and(|other| *other != key) {
            number = number.wrapping_add(1).max(1);
        }
        self.assigned.insert(number, key);
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_text_split_differently_has_another_hash() {
        assert_ne!(hash(&["a", "bc"]), hash(&["ab", "c"]));
        assert_eq!(hash(&["a", "bc"]), hash(&["a", "bc"]));
    }

    #[test]
    fn equal_hashes_get_the_next_number() {
        let mut ids = IdAllocator::default();
        let first = ids.allocate("x", &["same"]);
        assert_eq!(ids.allocate("x", &["same"]), first);
        assert_eq!(ids.allocate("y", &["same"]), first + 1);
    }

    #[test]
    fn next_number_after_the_highest_is_1() {
        // The hash of this text is the highest number.
        let parts = ["mcldtwz"];
        let mut ids = IdAllocator::default();
        assert_eq!(ids.allocate("x", &parts), u32::MAX);
        assert_eq!(ids.allocate("y", &parts), 1);
    }
}
