//! Reads YAML and JSON files into trees. A tree keeps the line of every value, for error messages.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use serde::{
    Deserialize,
    de::{Deserializer, MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::Spanned;

use crate::problem::{FilePosition, Problem};

mod read;

pub(crate) use read::{read, read_keys};

#[cfg(test)]
mod tests;

/// One YAML document of a file.
#[derive(Debug)]
pub(crate) struct Document {
    /// The path of the file, as in [`FilePosition::file`].
    file: String,
    /// The number of the document, as in [`FilePosition::document`].
    number: Option<usize>,
    pub(crate) tree: Tree,
}

impl Document {
    /// The position of a line of this document. `line` counts from the start of the file.
    pub(crate) fn position(&self, line: u64) -> FilePosition {
        FilePosition {
            file: self.file.clone(),
            line,
            document: self.number,
        }
    }
}

/// A value and its first line, counted from 1.
#[derive(Debug, PartialEq)]
pub(crate) struct Tree {
    pub(crate) line: u64,
    pub(crate) value: Value,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    /// In the order of the document. The parser refuses duplicate keys.
    Map(Vec<(String, Tree)>),
}

impl Tree {
    /// The value under a key of a map.
    fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, tree)| tree),
            _ => None,
        }
    }

    /// Whether the value is a map with this key.
    pub(crate) fn has_key(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// The entries of the list under a key of a map. `null` is an empty list, because Go encodes a nil slice as `null`.
    pub(crate) fn list(&self, key: &str) -> Option<&[Self]> {
        match &self.get(key)?.value {
            Value::List(entries) => Some(entries),
            Value::Null => Some(&[]),
            _ => None,
        }
    }

    /// The entry of a list at an index.
    fn item(&self, index: usize) -> Option<&Self> {
        match &self.value {
            Value::List(items) => items.get(index),
            _ => None,
        }
    }

    /// Returns the line of a field such as `spec.clusters[1].name`. If the field is missing, the line of its innermost existing parent.
    pub(crate) fn line_of(&self, field: &str) -> u64 {
        let mut innermost = self;
        for part in field.split(['.', '[']) {
            let next = match part.strip_suffix(']').map(str::parse) {
                Some(Ok(index)) => innermost.item(index),
                _ => innermost.get(part),
            };
            match next {
                Some(next) => innermost = next,
                None => break,
            }
        }
        innermost.line
    }
}

impl From<Spanned<Value>> for Tree {
    fn from(spanned: Spanned<Value>) -> Self {
        Self {
            line: spanned.defined.line(),
            value: spanned.value,
        }
    }
}

/// Drops the line numbers.
impl From<&Tree> for serde_json::Value {
    fn from(tree: &Tree) -> Self {
        match &tree.value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::from(*value),
            Value::Int(value) => Self::from(*value),
            Value::Uint(value) => Self::from(*value),
            Value::Float(value) => Self::from(*value),
            Value::Text(value) => Self::from(&**value),
            Value::List(entries) => entries.iter().map(Self::from).collect(),
            Value::Map(entries) => {
                let entries = entries.iter().map(|(key, tree)| (key.clone(), Self::from(tree)));
                Self::Object(entries.collect())
            }
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_none<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
                Value::deserialize(deserializer)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Int(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(i64::try_from(value).map_or(Value::Uint(value), Value::Int))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Float(value))
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }

            fn visit_string<E>(self, value: String) -> Result<Value, E> {
                Ok(Value::Text(value))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element::<Spanned<Value>>()? {
                    items.push(item.into());
                }
                Ok(Value::List(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut entries = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Spanned<Value>>()? {
                    entries.push((key, value.into()));
                }
                Ok(Value::Map(entries))
            }
        }

        deserializer.deserialize_any(Any)
    }
}

/// Parses the documents in `text`. The parser leaves out empty documents, so they get no number. JSON is valid YAML.
pub(crate) fn parse(file: &str, text: &str) -> Result<Vec<Document>, Problem> {
    // By default the parser limits the size of its input, for use in servers. The objects of a large cluster exceed these four limits.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
        },
    };
    let trees: Vec<Spanned<Value>> = serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let line = error.location().map_or(0, |location| location.line());
        Problem {
            position: Some(FilePosition {
                file: file.to_owned(),
                line,
                document: None,
            }),
            message: format!("is not YAML or JSON: {}", error.without_snippet()),
        }
    })?;
    let is_one_of_several = trees.len() > 1;
    Ok((1..)
        .zip(trees)
        .map(|(number, tree)| Document {
            file: file.to_owned(),
            number: is_one_of_several.then_some(number),
            tree: tree.into(),
        })
        .collect())
}

/// Reads the paths of the command line: files, folders (see [`collect_files`]), and `-` for standard input.
pub(crate) struct DocumentReader<'a> {
    /// `None` = standard input was read already.
    stdin: Option<&'a mut dyn Read>,
}

impl<'a> DocumentReader<'a> {
    pub(crate) fn new(stdin: &'a mut dyn Read) -> Self {
        Self { stdin: Some(stdin) }
    }

    /// Reads the documents of one path, in the order of file names.
    pub(crate) fn read(&mut self, path: &Path) -> Result<Vec<Document>, Vec<Problem>> {
        if path == Path::new("-") {
            let Some(stdin) = self.stdin.take() else {
                return Err(vec![Problem::other(
                    "- is given twice: standard input can be read once",
                )]);
            };
            let mut text = String::new();
            return match stdin.read_to_string(&mut text) {
                Ok(_) => parse("-", &text).map_err(|problem| vec![problem]),
                Err(error) => Err(vec![read_problem(path, &error)]),
            };
        }
        let mut files = Vec::new();
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                collect_files(path, &mut BTreeSet::new(), &mut files).map_err(|problem| vec![problem])?;
                if files.is_empty() {
                    return Err(vec![Problem {
                        position: position(path),
                        message: "contains no *.yaml, *.yml or *.json".to_owned(),
                    }]);
                }
            }
            Ok(_) => files.push(path.to_owned()),
            Err(error) => return Err(vec![read_problem(path, &error)]),
        }
        let mut documents = Vec::new();
        let mut problems = Vec::new();
        for file in files {
            let read = fs::read_to_string(&file).map_err(|error| read_problem(&file, &error));
            match read.and_then(|text| parse(&file.display().to_string(), &text)) {
                Ok(found) => documents.extend(found),
                Err(problem) => problems.push(problem),
            }
        }
        if problems.is_empty() {
            Ok(documents)
        } else {
            Err(problems)
        }
    }
}

fn position(path: &Path) -> Option<FilePosition> {
    Some(FilePosition {
        file: path.display().to_string(),
        line: 0,
        document: None,
    })
}

fn read_problem(path: &Path, error: &std::io::Error) -> Problem {
    Problem {
        position: position(path),
        message: format!("cannot be read: {error}"),
    }
}

/// Collects the *.yaml, *.yml and *.json files in a folder and its subfolders. Names that begin with a dot are skipped, because a mounted
/// ConfigMap contains each file a second time in the folder `..data`. A folder that symbolic links make reachable twice is read once.
fn collect_files(path: &Path, visited: &mut BTreeSet<PathBuf>, files: &mut Vec<PathBuf>) -> Result<(), Problem> {
    let canonical_path = fs::canonicalize(path).map_err(|error| read_problem(path, &error))?;
    if !visited.insert(canonical_path) {
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(|error| read_problem(path, &error))?;
    let mut names = entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| read_problem(path, &error))?;
    names.sort();
    for name in names.iter().filter(|name| !name.as_encoded_bytes().starts_with(b".")) {
        let child = path.join(name);
        let metadata = fs::metadata(&child).map_err(|error| read_problem(&child, &error))?;
        let extension = child.extension().and_then(|extension| extension.to_str());
        if metadata.is_dir() {
            collect_files(&child, visited, files)?;
        } else if matches!(extension, Some("yaml" | "yml" | "json")) {
            files.push(child);
        }
    }
    Ok(())
}
