//! Errors in the input, with the file and line where the user has to correct them.

use std::fmt;

/// A position in a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FilePosition {
    /// The path: FILE as on the command line, or FOLDER/FILE if the command line names the folder. `-` = standard input.
    pub(crate) file: String,
    /// Counted from 1; 0 = the whole file.
    pub(crate) line: u64,
    /// The number of the document, from 1, if the file has several documents. Empty documents are not counted.
    pub(crate) document: Option<usize>,
}

impl fmt::Display for FilePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.file)?,
            line => write!(f, "{}:{line}", self.file)?,
        }
        match self.document {
            None => Ok(()),
            Some(number) => write!(f, " (document {number})"),
        }
    }
}

/// An error that the user has to correct before anything can be planned.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    /// `None` = the error is not in a file, but for example in the command line or in a running cluster.
    pub(crate) position: Option<FilePosition>,
    /// Kind and name of the object, its field, and the error: `Node w1: spec.podCIDRs: ...`.
    pub(crate) message: String,
}

impl Problem {
    /// A problem without a position in a file.
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self {
            position: None,
            message: message.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(position) = &self.position {
            write!(f, "{position}: ")?;
        }
        f.write_str(&self.message)
    }
}
