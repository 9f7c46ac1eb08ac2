//! Deserializes a [`Tree`] into a typed value. Errors contain the field and the line.

use std::fmt;

use serde::de::DeserializeOwned;
use serde_ignored::Path;
use serde_json::Value;
use serde_path_to_error::Segment;

use super::Tree;

/// A field that does not fit its type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FieldError {
    /// The path, such as `spec.allowedIPs[0]`; empty = the whole tree.
    pub(crate) field: String,
    /// Counted from 1.
    pub(crate) line: u64,
    pub(crate) message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.field {
            "" => f.write_str(&self.message),
            field => write!(f, "{field}: {}", self.message),
        }
    }
}

/// Deserializes a tree. Also returns the fields that the type does not have, each with its line.
///
/// # Errors
/// The first field that does not fit its type.
pub(crate) fn read<T: DeserializeOwned>(tree: &Tree) -> Result<(T, Vec<(String, u64)>), FieldError> {
    deserialize(tree, &Value::from(tree))
}

/// Deserializes only these keys of a map.
///
/// # Errors
/// The first field that does not fit its type.
pub(crate) fn read_keys<T: DeserializeOwned>(tree: &Tree, keys: &[&str]) -> Result<T, FieldError> {
    let present = keys
        .iter()
        .filter_map(|key| Some(((*key).to_owned(), Value::from(tree.get(key)?))));
    let (read, _) = deserialize(tree, &Value::Object(present.collect()))?;
    Ok(read)
}

/// Deserializes `value`, which is `tree` or a part of it. `tree` provides the line numbers.
fn deserialize<T: DeserializeOwned>(tree: &Tree, value: &Value) -> Result<(T, Vec<(String, u64)>), FieldError> {
    let mut track = serde_path_to_error::Track::new();
    let mut unknown = Vec::new();
    let mut note_unknown = |path: Path<'_>| unknown.push(field_of(&path));
    let deserializer = serde_path_to_error::Deserializer::new(value, &mut track);
    let read = T::deserialize(serde_ignored::Deserializer::new(deserializer, &mut note_unknown));
    match read {
        Ok(value) => {
            let with_line = |field: String| {
                let line = tree.line_of(&field);
                (field, line)
            };
            Ok((value, unknown.into_iter().map(with_line).collect()))
        }
        Err(error) => {
            let path = track.path();
            let is_root = path.iter().next().is_none();
            let field = if is_root { String::new() } else { path.to_string() };
            Err(FieldError {
                line: line_at(tree, path.iter()),
                field,
                message: error.to_string(),
            })
        }
    }
}

/// The line of the value at a path, or of its innermost parent that exists. Unlike [`Tree::line_of`], also finds keys that contain dots.
fn line_at<'p>(tree: &Tree, path: impl Iterator<Item = &'p Segment>) -> u64 {
    let mut current = tree;
    for segment in path {
        let next = match segment {
            Segment::Map { key } => current.get(key),
            Segment::Seq { index } => current.item(*index),
            Segment::Enum { .. } | Segment::Unknown => None,
        };
        let Some(next) = next else { break };
        current = next;
    }
    current.line
}

/// Formats a path as in [`FieldError::field`].
fn field_of(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", field_of(parent)),
        Path::Map { parent, key } => match &*field_of(parent) {
            "" => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => field_of(parent),
    }
}
