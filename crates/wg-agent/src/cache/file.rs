//! The cache on disk: read once at the start, replaced whole. What it says is `form`'s.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use super::{
    Kept, Live, Place, Saved, Stamp,
    form::{self, Unusable, Values},
};

/// A file that is larger is none of ours: 5,000 peers make 2 MB.
const LARGEST: u64 = 64 << 20;

/// What [`load`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Found {
    /// What was last applied.
    pub saved: Option<Saved>,
    /// When the API server last confirmed that.
    pub confirmed: Stamp,
    /// Where peers were heard from last.
    pub live: Live,
    /// What is wrong with the file, and what was done with it.
    pub trouble: Option<String>,
}

/// Why the cache could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} the cache {path}: {error}")]
pub struct CacheError {
    what: &'static str,
    path: PathBuf,
    error: io::Error,
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    move |error| CacheError {
        what,
        path: path.to_owned(),
        error,
    }
}

/// Reads the file. Never fails: one that cannot be used is set aside as `<file>.damaged`, of which the last is kept, and
/// the agent goes on as if there were none.
#[must_use]
pub fn load(place: &Place, now: Stamp) -> Found {
    let Place { path, node, max_age } = place;
    let unusable = match text(path) {
        Ok(None) => return Found::default(),
        Ok(Some(text)) => match form::read(node, &text) {
            Ok(Values { confirmed, .. }) if max_age.is_zero() || now.since(confirmed) > *max_age => Unusable::Old(
                confirmed,
                jiff::SignedDuration::try_from(*max_age).unwrap_or(jiff::SignedDuration::MAX),
            ),
            Ok(Values { saved, live, confirmed }) => {
                return Found {
                    saved: Some(saved),
                    confirmed,
                    live,
                    trouble: None,
                };
            }
            Err(unusable) => unusable,
        },
        Err(Bad::Io(error)) => {
            return Found {
                trouble: Some(format!("{}; it is not used", failed("read", path)(error))),
                ..Found::default()
            };
        }
        Err(Bad::Unusable(unusable)) => unusable,
    };
    let aside = beside(path, ".damaged");
    let done = match fs::rename(path, &aside) {
        Ok(()) => format!("set aside as {}", aside.display()),
        Err(error) => format!("cannot be set aside ({error})"),
    };
    Found {
        trouble: Some(format!("the cache {} is not used: {unusable}; {done}", path.display())),
        ..Found::default()
    }
}

enum Bad {
    Io(io::Error),
    Unusable(Unusable),
}

/// The text of a file that only root can have written.
fn text(path: &Path) -> Result<Option<String>, Bad> {
    let exposed = |why: String| Bad::Unusable(Unusable::Exposed(why));
    // Not through a link, and without waiting for the other end of a pipe.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(exposed("it is a link".to_owned())),
        Err(error) => return Err(Bad::Io(error)),
    };
    let meta = file.metadata().map_err(Bad::Io)?;
    let (mode, owner) = (meta.permissions().mode() & 0o7777, meta.uid());
    if !meta.is_file() {
        return Err(exposed("it is no regular file".to_owned()));
    }
    if owner != rustix::process::geteuid().as_raw() || mode & 0o077 != 0 {
        return Err(exposed(format!("mode {mode:04o}, user {owner}")));
    }
    let mut text = String::new();
    match file.take(LARGEST + 1).read_to_string(&mut text) {
        Ok(_) if text.len() as u64 > LARGEST => Err(Bad::Unusable(Unusable::Damaged("it is too large".to_owned()))),
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(Bad::Unusable(Unusable::Damaged("it is no text".to_owned())))
        }
        Err(error) => Err(Bad::Io(error)),
    }
}

/// Puts a whole new file into the old one's place, or leaves the old one.
pub(super) fn write(place: &Place, kept: &Kept) -> Result<(), CacheError> {
    let Place { path, node, .. } = place;
    let text = form::write(node, kept).map_err(|error| failed("spell", path)(error.into()))?;
    let new = beside(path, ".new");
    let written = replace(&new, path, text.as_bytes());
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn replace(new: &Path, path: &Path, text: &[u8]) -> Result<(), CacheError> {
    // What an earlier process left half written. There is one agent a node, so it is nobody's.
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("replace", new)(error)),
        _ => {}
    }
    let mut file = (OpenOptions::new().write(true).create_new(true).mode(0o600))
        .open(new)
        .map_err(failed("make", new))?;
    file.write_all(text)
        .and_then(|()| file.sync_all())
        .map_err(failed("write", new))?;
    fs::rename(new, path).map_err(failed("replace", path))?;
    match path.parent() {
        Some(directory) => File::open(directory)
            .and_then(|d| d.sync_all())
            .map_err(failed("sync", directory)),
        None => Ok(()),
    }
}

/// Removes the file and what lies beside it, for `cleanup`.
///
/// # Errors
/// What could not be removed; a file that is not there is none of these.
pub fn remove(path: &Path) -> Vec<CacheError> {
    let all = [path.to_owned(), beside(path, ".new"), beside(path, ".damaged")];
    let gone = all.iter().filter_map(|path| match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Some(failed("remove", path)(error)),
        _ => None,
    });
    gone.collect()
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}
