//! Reads the cache file when the process starts, and replaces it atomically later. `format` defines its content.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use super::{
    CacheContent, CacheFile, LiveEndpoints, SavedObjects, UnixTime,
    format::{self, Unusable, Values},
};

/// A larger file was not written by the agent: the cache of 5,000 peers has 2 MB.
const MAX_BYTES: u64 = 64 << 20;

/// The result of [`load`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadedCache {
    /// The objects that were last applied.
    pub saved: Option<SavedObjects>,
    /// When the API server last confirmed them.
    pub confirmed: UnixTime,
    /// Live endpoints of the peers.
    pub live: LiveEndpoints,
    /// Why the file is not used, and whether it was renamed; `None` = it is used, or does not exist.
    pub problem: Option<String>,
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

/// Reads the file. Never fails: an unusable file is renamed to `<file>.damaged` (replacing an earlier one), a file that
/// cannot be read stays. In both cases the agent starts without a cache.
#[must_use]
pub fn load(cache_file: &CacheFile, now: UnixTime) -> LoadedCache {
    let CacheFile { path, node, max_age } = cache_file;
    let unusable = match read_private(path) {
        Ok(None) => return LoadedCache::default(),
        Ok(Some(text)) => match format::read(node, &text) {
            // A maximum age of zero refuses also a cache that was confirmed in this second.
            Ok(Values { confirmed, .. }) if max_age.is_zero() || now.since(confirmed) > *max_age => Unusable::Old(
                confirmed,
                jiff::SignedDuration::try_from(*max_age).unwrap_or(jiff::SignedDuration::MAX),
            ),
            Ok(Values { saved, live, confirmed }) => {
                return LoadedCache {
                    saved: Some(saved),
                    confirmed,
                    live,
                    problem: None,
                };
            }
            Err(unusable) => unusable,
        },
        Err(ReadError::Io(error)) => {
            return LoadedCache {
                problem: Some(format!("{}; it is not used", failed("read", path)(error))),
                ..LoadedCache::default()
            };
        }
        Err(ReadError::Unusable(unusable)) => unusable,
    };
    let aside = with_suffix(path, ".damaged");
    let done = match fs::rename(path, &aside) {
        Ok(()) => format!("set aside as {}", aside.display()),
        Err(error) => format!("cannot be set aside ({error})"),
    };
    LoadedCache {
        problem: Some(format!("the cache {} is not used: {unusable}; {done}", path.display())),
        ..LoadedCache::default()
    }
}

enum ReadError {
    Io(io::Error),
    Unusable(Unusable),
}

/// Reads a file that only this user can read and write; `None` = there is no file.
fn read_private(path: &Path) -> Result<Option<String>, ReadError> {
    let exposed = |why: String| ReadError::Unusable(Unusable::Exposed(why));
    // Do not follow a symlink, and do not block on a FIFO.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return Err(exposed("it is a symbolic link".to_owned()));
        }
        Err(error) => return Err(ReadError::Io(error)),
    };
    let meta = file.metadata().map_err(ReadError::Io)?;
    let (mode, owner) = (meta.permissions().mode() & 0o7777, meta.uid());
    if !meta.is_file() {
        return Err(exposed("it is not a regular file".to_owned()));
    }
    if owner != rustix::process::geteuid().as_raw() || mode & 0o077 != 0 {
        return Err(exposed(format!("mode {mode:04o}, user {owner}")));
    }
    let mut text = String::new();
    match file.take(MAX_BYTES + 1).read_to_string(&mut text) {
        Ok(_) if text.len() as u64 > MAX_BYTES => {
            Err(ReadError::Unusable(Unusable::Damaged("it is too large".to_owned())))
        }
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(ReadError::Unusable(Unusable::Damaged(
            "it is not UTF-8 text".to_owned(),
        ))),
        Err(error) => Err(ReadError::Io(error)),
    }
}

/// Replaces the file atomically. If the sync of the directory fails, which is the last step, the new file is in place. After any other
/// error the old file stays.
pub(super) fn write(cache_file: &CacheFile, content: &CacheContent) -> Result<(), CacheError> {
    let CacheFile { path, node, .. } = cache_file;
    let text = format::write(node, content).map_err(|error| failed("encode", path)(error.into()))?;
    let new = with_suffix(path, ".new");
    let written = replace(&new, path, text.as_bytes());
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn replace(new: &Path, path: &Path, text: &[u8]) -> Result<(), CacheError> {
    // A process that is killed while it writes leaves the file `new`. No other agent runs on this node, so no process uses that file.
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

/// Removes the cache file and the files `.new` and `.damaged` derived from it. Returns an error for each file that
/// could not be removed; a missing file is no error.
pub fn remove(path: &Path) -> Vec<CacheError> {
    let all = [
        path.to_owned(),
        with_suffix(path, ".new"),
        with_suffix(path, ".damaged"),
    ];
    let failures = all.iter().filter_map(|path| match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Some(failed("remove", path)(error)),
        _ => None,
    });
    failures.collect()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}
