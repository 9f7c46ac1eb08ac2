//! A map of observed objects that observations share.

use std::{
    collections::{BTreeMap, btree_map},
    ops::{Deref, DerefMut},
    sync::Arc,
};

/// Objects by name. A clone shares the map; a change of a shared map copies it first.
///
/// Observations of a large member are cloned in each pass of the controller, but nearly all of its objects stay as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows<T>(Arc<BTreeMap<String, T>>);

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Deref for Rows<T> {
    type Target = BTreeMap<String, T>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T: Clone> DerefMut for Rows<T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        Arc::make_mut(&mut self.0)
    }
}

impl<T> From<BTreeMap<String, T>> for Rows<T> {
    fn from(rows: BTreeMap<String, T>) -> Self {
        Self(Arc::new(rows))
    }
}

impl<T, const N: usize> From<[(String, T); N]> for Rows<T> {
    fn from(rows: [(String, T); N]) -> Self {
        BTreeMap::from(rows).into()
    }
}

impl<T> FromIterator<(String, T)> for Rows<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(rows: I) -> Self {
        BTreeMap::from_iter(rows).into()
    }
}

impl<'a, T> IntoIterator for &'a Rows<T> {
    type Item = (&'a String, &'a T);
    type IntoIter = btree_map::Iter<'a, String, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
