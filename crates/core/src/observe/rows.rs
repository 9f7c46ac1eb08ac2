//! A map of observed objects that observations share.

use std::{
    collections::{BTreeMap, btree_map},
    sync::Arc,
};

/// Objects by name. A clone shares all objects; a change of a shared map copies the map, but not the objects that stay as they are.
///
/// Observations of a large member are cloned in each pass of the controller, but nearly all of its objects stay as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows<T>(Arc<Map<T>>);

type Map<T> = BTreeMap<Arc<str>, Arc<T>>;

/// The rows of a [`Rows`], sorted by name.
#[derive(Debug)]
pub struct Iter<'a, T>(btree_map::Iter<'a, Arc<str>, Arc<T>>);

/// The objects of a [`Rows`], sorted by name.
#[derive(Debug)]
pub struct Values<'a, T>(btree_map::Values<'a, Arc<str>, Arc<T>>);

/// A row that differs between two [`Rows`]. `None` = the row does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangedRow<'a, T> {
    /// The name.
    pub name: &'a str,
    /// The object in the former rows.
    pub before: Option<&'a T>,
    /// The object in the later rows.
    pub after: Option<&'a T>,
}

impl<T> Rows<T> {
    /// The object with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&T> {
        self.0.get(name).map(|row| &**row)
    }

    /// The object with this name, and the name as the rows have it.
    #[must_use]
    pub fn get_key_value(&self, name: &str) -> Option<(&str, &T)> {
        self.0.get_key_value(name).map(|(name, row)| (&**name, &**row))
    }

    /// Whether there is an object with this name.
    #[must_use]
    pub fn contains_key(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no object.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The objects with their names, sorted by name.
    #[must_use]
    pub fn iter(&self) -> Iter<'_, T> {
        Iter(self.0.iter())
    }

    /// The names, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(|name| &**name)
    }

    /// The objects, sorted by name.
    #[must_use]
    pub fn values(&self) -> Values<'_, T> {
        Values(self.0.values())
    }

    /// Adds or replaces an object.
    pub fn insert(&mut self, name: String, row: T) {
        Arc::make_mut(&mut self.0).insert(name.into(), Arc::new(row));
    }

    /// Removes an object. Returns whether it existed.
    pub fn remove(&mut self, name: &str) -> bool {
        Arc::make_mut(&mut self.0).remove(name).is_some()
    }

    /// Keeps the objects for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(&str, &T) -> bool) {
        Arc::make_mut(&mut self.0).retain(|name, row| keep(name, row));
    }

    /// Whether both are the same map, and not only equal.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T: Clone> Rows<T> {
    /// The object with this name, to change it.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut T> {
        Arc::make_mut(&mut self.0).get_mut(name).map(Arc::make_mut)
    }

    /// The objects, to change them.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        Arc::make_mut(&mut self.0).values_mut().map(Arc::make_mut)
    }
}

impl<T: PartialEq> Rows<T> {
    /// The rows that differ from those of an earlier copy, sorted by name. Rows that both share are not compared.
    #[must_use]
    pub fn changes_since<'a>(&'a self, earlier: &'a Self) -> Vec<ChangedRow<'a, T>> {
        let mut changed = Vec::new();
        if self.is_same(earlier) {
            return changed;
        }
        let (mut old, mut new) = (earlier.0.iter().peekable(), self.0.iter().peekable());
        loop {
            let order = match (old.peek(), new.peek()) {
                (None, None) => return changed,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some((old, _)), Some((new, _))) if Arc::ptr_eq(old, new) => std::cmp::Ordering::Equal,
                (Some((old, _)), Some((new, _))) => old.cmp(new),
            };
            let before = if order.is_le() { old.next() } else { None };
            let after = if order.is_ge() { new.next() } else { None };
            let is_same = match (before, after) {
                (Some((_, before)), Some((_, after))) => Arc::ptr_eq(before, after) || before == after,
                _ => false,
            };
            if let Some((name, _)) = before.or(after).filter(|_| !is_same) {
                changed.push(ChangedRow {
                    name,
                    before: before.map(|(_, row)| &**row),
                    after: after.map(|(_, row)| &**row),
                });
            }
        }
    }
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> std::ops::Index<&str> for Rows<T> {
    type Output = T;

    fn index(&self, name: &str) -> &T {
        &self.0[name]
    }
}

impl<T> FromIterator<(String, T)> for Rows<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(rows: I) -> Self {
        let rows = rows.into_iter().map(|(name, row)| (name.into(), Arc::new(row)));
        Self(Arc::new(rows.collect()))
    }
}

impl<T> From<BTreeMap<String, T>> for Rows<T> {
    fn from(rows: BTreeMap<String, T>) -> Self {
        rows.into_iter().collect()
    }
}

impl<T, const N: usize> From<[(String, T); N]> for Rows<T> {
    fn from(rows: [(String, T); N]) -> Self {
        rows.into_iter().collect()
    }
}

impl<T> Extend<(String, T)> for Rows<T> {
    fn extend<I: IntoIterator<Item = (String, T)>>(&mut self, rows: I) {
        rows.into_iter().for_each(|(name, row)| self.insert(name, row));
    }
}

impl<'a, T> IntoIterator for &'a Rows<T> {
    type Item = (&'a str, &'a T);
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, T> Iterator for Iter<'a, T> {
    type Item = (&'a str, &'a T);

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|(name, row)| (&**name, &**row))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> ExactSizeIterator for Iter<'_, T> {}

impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<'a, T> Iterator for Values<'a, T> {
    type Item = &'a T;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|row| &**row)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> ExactSizeIterator for Values<'_, T> {}

impl<T> Clone for Values<'_, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_found_and_shared_rows_are_not_copied() {
        let rows =
            |rows: &[(&str, u8)]| -> Rows<u8> { rows.iter().map(|(name, row)| ((*name).to_owned(), *row)).collect() };
        let earlier = rows(&[("a", 1), ("b", 2), ("c", 3)]);
        let mut later = earlier.clone();
        assert_eq!(later.changes_since(&earlier), []);
        later.insert("b".to_owned(), 7);
        later.insert("c".to_owned(), 3);
        later.remove("a");
        later.insert("d".to_owned(), 4);
        let change = |name, before: Option<&'static u8>, after| ChangedRow { name, before, after };
        let expected = [
            change("a", Some(&1), None),
            change("b", Some(&2), Some(&7)),
            change("d", None, Some(&4)),
        ];
        assert_eq!(later.changes_since(&earlier), expected);
        // Rows that were built anew are compared by value.
        assert_eq!(rows(&[("a", 1), ("b", 2), ("c", 3)]).changes_since(&earlier), []);
        assert_eq!(earlier, rows(&[("a", 1), ("b", 2), ("c", 3)]));
    }
}
