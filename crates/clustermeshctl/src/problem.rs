//! What is wrong with what was given, and where it stands. How it came to that is in the readers.

use std::fmt;

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// As it was given on the command line, with what was found below; `-` = standard input.
    pub(crate) file: String,
    /// From 1; 0 = the file as a whole.
    pub(crate) line: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.file),
            line => write!(f, "{}:{line}", self.file),
        }
    }
}

/// Something that has to be mended before anything can be planned.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    /// Where; `None` = on the command line.
    pub(crate) place: Option<Place>,
    /// Kind and name of the object, its field, and what is wrong: `Node w1: spec.podCIDRs: ...`.
    pub(crate) message: String,
}

impl Problem {
    /// A problem with the command line itself.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self {
            place: None,
            message: message.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        f.write_str(&self.message)
    }
}
