//! Deserializes a [`Tree`] into a typed value. Errors contain the field and the line.

use std::{cell::RefCell, fmt};

use serde::{
    de::{
        self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor,
        value::StrDeserializer,
    },
    forward_to_deserialize_any,
};

use super::{Tree, Value};

/// A field that does not fit its type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FieldError {
    /// `spec.allowedIPs[0]`; empty = the whole tree.
    pub(crate) field: String,
    /// Starts at 1; 0 = not known yet.
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

impl std::error::Error for FieldError {}

impl de::Error for FieldError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self {
            field: String::new(),
            line: 0,
            message: message.to_string(),
        }
    }
}

/// Deserializes a tree. Also returns the fields that the type does not have, each with its line.
///
/// # Errors
/// The first field that does not fit its type.
pub(crate) fn read<T: DeserializeOwned>(tree: &Tree) -> Result<(T, Vec<(String, u64)>), FieldError> {
    let unknown = RefCell::new(Vec::new());
    let reader = Reader {
        tree,
        path: &Path::Root,
        unknown: &unknown,
    };
    let value = T::deserialize(reader)?;
    Ok((value, unknown.into_inner()))
}

/// The path from the root. It becomes text only in an error.
enum Path<'p> {
    Root,
    Key(&'p Path<'p>, &'p str),
    Index(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Key(Self::Root, key) => f.write_str(key),
            Self::Key(parent, key) => write!(f, "{parent}.{key}"),
            Self::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

struct Reader<'t, 'p> {
    tree: &'t Tree,
    path: &'p Path<'p>,
    unknown: &'p RefCell<Vec<(String, u64)>>,
}

impl Reader<'_, '_> {
    fn locate(&self, mut error: FieldError) -> FieldError {
        if error.line == 0 {
            error.line = self.tree.line;
            error.field = self.path.to_string();
        }
        error
    }
}

impl<'de, 't> Deserializer<'de> for Reader<'t, '_> {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        let read = match &self.tree.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(value) => visitor.visit_i64(*value),
            Value::Uint(value) => visitor.visit_u64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_str(value),
            Value::List(items) => visitor.visit_seq(Items {
                parent: &self,
                items: items.iter().enumerate(),
            }),
            Value::Map(entries) => visitor.visit_map(Entries {
                parent: &self,
                entries: entries.iter(),
                value: None,
            }),
        };
        read.map_err(|error| self.locate(error))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.tree.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        let read = match &self.tree.value {
            Value::Text(word) => {
                let word: StrDeserializer<'_, FieldError> = word.as_str().into_deserializer();
                visitor.visit_enum(word)
            }
            _ => Err(de::Error::custom("expected a word")),
        };
        read.map_err(|error| self.locate(error))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        self.unknown.borrow_mut().push((self.path.to_string(), self.tree.line));
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier
    }
}

struct Items<'t, 'p> {
    parent: &'p Reader<'t, 'p>,
    items: std::iter::Enumerate<std::slice::Iter<'t, Tree>>,
}

impl<'de> SeqAccess<'de> for Items<'_, '_> {
    type Error = FieldError;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, FieldError> {
        let Some((index, tree)) = self.items.next() else {
            return Ok(None);
        };
        let reader = Reader {
            tree,
            path: &Path::Index(self.parent.path, index),
            unknown: self.parent.unknown,
        };
        seed.deserialize(reader).map(Some)
    }
}

struct Entries<'t, 'p> {
    parent: &'p Reader<'t, 'p>,
    entries: std::slice::Iter<'t, (String, Tree)>,
    value: Option<&'t (String, Tree)>,
}

impl<'de> MapAccess<'de> for Entries<'_, '_> {
    type Error = FieldError;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, FieldError> {
        self.value = self.entries.next();
        let Some((key, _)) = self.value else { return Ok(None) };
        let key: StrDeserializer<'_, FieldError> = key.as_str().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, FieldError> {
        let Some((key, tree)) = self.value.take() else {
            return Err(de::Error::custom("a value was read before its key"));
        };
        let reader = Reader {
            tree,
            path: &Path::Key(self.parent.path, key),
            unknown: self.parent.unknown,
        };
        seed.deserialize(reader)
    }
}
