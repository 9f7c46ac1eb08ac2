//! A map of observed objects that observations share.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Objects by name. A clone shares all objects, and a change copies only the part of the map that contains the object.
///
/// Observations of a large member are cloned in each pass of the controller, but nearly all of its objects stay as they are.
#[derive(Debug, Clone)]
pub struct Rows<T> {
    map: Arc<Map<T>>,
    /// `None` = the changed rows are not known.
    origin: Option<Origin<T>>,
}

/// The map that was copied, and the names of the rows that were changed since.
#[derive(Debug, Clone)]
struct Origin<T> {
    map: Arc<Map<T>>,
    changed: Arc<BTreeSet<Arc<str>>>,
}

/// The last parameter is the largest number of rows in one part. A change copies one part.
type Map<T> = immutable_chunkmap::map::Map<Arc<str>, Arc<T>, 64>;

type MapIter<'a, T> = <&'a Map<T> as IntoIterator>::IntoIter;

/// The rows of a [`Rows`], sorted by name.
pub struct Iter<'a, T>(MapIter<'a, T>);

/// The objects of a [`Rows`], sorted by name.
pub struct Values<'a, T>(MapIter<'a, T>);

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
    fn of(map: Map<T>) -> Self {
        Self {
            map: Arc::new(map),
            origin: None,
        }
    }

    /// The object with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&T> {
        self.map.get(name).map(|row| &**row)
    }

    /// The object with this name, and its name, borrowed from these rows.
    #[must_use]
    pub fn get_key_value(&self, name: &str) -> Option<(&str, &T)> {
        self.map.get_full(name).map(|(name, row)| (&**name, &**row))
    }

    /// Whether there is an object with this name.
    #[must_use]
    pub fn contains_key(&self, name: &str) -> bool {
        self.map.get(name).is_some()
    }

    /// The number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there is no object.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The objects with their names, sorted by name.
    #[must_use]
    pub fn iter(&self) -> Iter<'_, T> {
        Iter(self.map.into_iter())
    }

    /// The names, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.iter().map(|(name, _)| name)
    }

    /// The objects, sorted by name.
    #[must_use]
    pub fn values(&self) -> Values<'_, T> {
        Values(self.map.into_iter())
    }

    /// Adds or replaces an object.
    pub fn insert(&mut self, name: String, row: impl Into<Arc<T>>) {
        let name: Arc<str> = name.into();
        self.change(&name).insert_cow(Arc::clone(&name), row.into());
    }

    /// Removes an object. Returns whether it existed.
    pub fn remove(&mut self, name: &str) -> bool {
        let Some(name) = self.map.get_key(name).cloned() else {
            return false;
        };
        self.change(&name).remove_cow(&name).is_some()
    }

    /// Records that the row with this name changes, and returns the map.
    fn change(&mut self, name: &Arc<str>) -> &mut Map<T> {
        if Arc::strong_count(&self.map) > 1 {
            let (map, changed) = (Arc::clone(&self.map), Arc::default());
            self.origin = Some(Origin { map, changed });
        }
        if let Some(origin) = &mut self.origin {
            Arc::make_mut(&mut origin.changed).insert(Arc::clone(name));
        }
        Arc::make_mut(&mut self.map)
    }

    /// Keeps the objects for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(&str, &T) -> bool) {
        let rows = self.map.into_iter().filter(|(name, row)| keep(name, row));
        let kept = rows.map(|(name, row)| (Arc::clone(name), Arc::clone(row)));
        *self = Self::of(Map::new().insert_many(kept));
    }

    /// Whether both are the same map, and not only equal.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.map, &other.map)
    }
}

impl<T: Clone> Rows<T> {
    /// The object with this name, to change it.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut T> {
        let name = self.map.get_key(name).cloned()?;
        self.change(&name).get_mut_cow(&name).map(Arc::make_mut)
    }

    /// The objects, to change them.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.origin = None;
        let rows = Arc::make_mut(&mut self.map).iter_mut_cow();
        rows.map(|(_, row)| Arc::make_mut(row))
    }
}

impl<T: PartialEq> Rows<T> {
    /// The rows that differ from those of an earlier copy, sorted by name. Rows that both share are not compared.
    #[must_use]
    pub fn changes_since<'a>(&'a self, earlier: &'a Self) -> Vec<ChangedRow<'a, T>> {
        if self.is_same(earlier) {
            return Vec::new();
        }
        let compared = |name, before: Option<&'a Arc<T>>, after: Option<&'a Arc<T>>| {
            let is_same = match (before, after) {
                (Some(before), Some(after)) => Arc::ptr_eq(before, after) || before == after,
                (None, None) => true,
                _ => false,
            };
            (!is_same).then(|| ChangedRow {
                name,
                before: before.map(|row| &**row),
                after: after.map(|row| &**row),
            })
        };
        if let Some(origin) = &self.origin
            && Arc::ptr_eq(&origin.map, &earlier.map)
        {
            let names = origin.changed.iter();
            return names
                .filter_map(|name| compared(&**name, earlier.map.get(name), self.map.get(name)))
                .collect();
        }
        let mut changed = Vec::new();
        let (mut old, mut new) = (earlier.map.into_iter().peekable(), self.map.into_iter().peekable());
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
            let name = before.or(after).map(|(name, _)| &**name);
            let row = |row: Option<(_, &'a Arc<T>)>| row.map(|(_, row)| row);
            changed.extend(name.and_then(|name| compared(name, row(before), row(after))));
        }
    }
}

impl<T: PartialEq> PartialEq for Rows<T> {
    fn eq(&self, other: &Self) -> bool {
        self.map == other.map
    }
}

impl<T: Eq> Eq for Rows<T> {}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self::of(Map::new())
    }
}

impl<T> std::ops::Index<&str> for Rows<T> {
    type Output = T;

    fn index(&self, name: &str) -> &T {
        &self.map[&Arc::<str>::from(name)]
    }
}

impl<T, R: Into<Arc<T>>> FromIterator<(String, R)> for Rows<T> {
    fn from_iter<I: IntoIterator<Item = (String, R)>>(rows: I) -> Self {
        let rows = rows.into_iter().map(|(name, row)| (name.into(), row.into()));
        Self::of(Map::new().insert_many(rows))
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
}

impl<'a, T> Iterator for Values<'a, T> {
    type Item = &'a T;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|(_, row)| &**row)
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
        assert!(later.get_mut("b").is_some() && !later.remove("x"));
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
        // A later copy is compared with any earlier one.
        let middle = later.clone();
        *later.get_mut("b").unwrap() = 8;
        assert_eq!(later.changes_since(&middle), [change("b", Some(&7), Some(&8))]);
        let expected = [expected[0], change("b", Some(&2), Some(&8)), expected[2]];
        assert_eq!(later.changes_since(&earlier), expected);
        later.retain(|name, _| name == "b");
        let gone = [("c", &3), ("d", &4)].map(|(name, row)| change(name, Some(row), None));
        assert_eq!(later.changes_since(&middle)[1..], gone);
        assert_eq!(earlier, rows(&[("a", 1), ("b", 2), ("c", 3)]));
    }
}
