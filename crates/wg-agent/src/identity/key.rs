//! Stores the node's private key on disk: creates it on the first start, reads it later, and replaces it in a rotation.
//!
//! The file has Kilo's path and format (`/var/lib/kilo/key`: base64 without a newline, 0600), so that an agent that
//! replaces kg keeps the node's identity. A key file that other users can read or write is refused, because they may know the key.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_core::key::PublicKey;
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

/// The node's private key. Zeroized when dropped; its debug output contains only the public half.
#[derive(Clone)]
pub struct NodeKey(StaticSecret);

impl NodeKey {
    /// The public half.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey::new(x25519_dalek::PublicKey::from(&self.0).to_bytes())
    }

    /// The private half, for the device.
    #[must_use]
    pub const fn secret(&self) -> &StaticSecret {
        &self.0
    }
}

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeKey(public {})", self.public())
    }
}

/// Why there is no usable key. Never contains a byte of a private key.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// Users other than the owner can read or write the file.
    #[error(
        "{path} has mode {mode:04o}: other users may know this key. To keep the key: chmod 600 {path}; to replace it: remove \
         the file, and wg-agent creates a new key"
    )]
    FileMode {
        /// The key file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Users other than the owner can replace the file.
    #[error("{path} has mode {mode:04o}: other users may replace the key in it. Run: chmod 700 {path}")]
    DirectoryMode {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file or directory belongs to another user.
    #[error("{path} belongs to user {owner} and this agent runs as user {me}. Run: chown {me} {path}")]
    Owner {
        /// File or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The effective user of this process.
        me: u32,
    },
    /// The file does not contain a private key.
    #[error(
        "{0} does not contain a WireGuard private key (44 characters of base64): restore it, or remove it and wg-agent creates \
         a new one"
    )]
    Malformed(PathBuf),
    /// The path is not a regular file.
    #[error("{0} is not a regular file: remove it, or name another with --key-file")]
    NotAFile(PathBuf),
    /// The path does not name a file in a directory.
    #[error("--key-file {0}: name a file in a directory of its own, such as /var/lib/kilo/key")]
    NoDirectory(PathBuf),
    /// A next key already exists.
    #[error(
        "{0} exists: a rotation to this key is under way; see wg-agent's log and /readyz. To cancel, remove the file"
    )]
    NextKeyExists(PathBuf),
    /// There is no key to rotate.
    #[error("{0} does not exist: this node has no key yet; wg-agent creates one when it first starts")]
    NoKey(PathBuf),
    /// A system call failed.
    #[error("cannot {operation} {path}: {error}")]
    Io {
        /// What failed, such as `open` or `chmod 700`.
        operation: &'static str,
        /// File or directory.
        path: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KeyFileError {
    move |error| KeyFileError::Io {
        operation,
        path: path.to_owned(),
        error,
    }
}

/// Reads the key, or creates one if there is none.
pub fn load_or_create(path: &Path) -> Result<NodeKey, KeyFileError> {
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() && path.file_name().is_some() => directory,
        _ => return Err(KeyFileError::NoDirectory(path.to_owned())),
    };
    restrict(directory)?;
    match read(path)? {
        Some(key) => Ok(key),
        None => create(path, directory),
    }
}

/// The path of the next key's file. A rotation replaces the key in `path` by the next key.
#[must_use]
pub fn next_path(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(path);
    name.push(".next");
    name.into()
}

/// Creates the next key. Fails if a next key already exists, or if there is no key to replace.
pub fn create_next(path: &Path) -> Result<NodeKey, KeyFileError> {
    let directory = path
        .parent()
        .ok_or_else(|| KeyFileError::NoDirectory(path.to_owned()))?;
    let old = read(path)?.ok_or_else(|| KeyFileError::NoKey(path.to_owned()))?;
    let next = next_path(path);
    if load_next(path)?.is_some() {
        return Err(KeyFileError::NextKeyExists(next));
    }
    let new = create(&next, directory)?;
    debug_assert_ne!(new.public(), old.public());
    Ok(new)
}

/// Reads the next key.
pub fn load_next(path: &Path) -> Result<Option<NodeKey>, KeyFileError> {
    read(&next_path(path))
}

/// Replaces the key in `path` by the next key. The rename is atomic: after a crash `path` has the old or the new key.
pub fn promote(path: &Path) -> Result<(), KeyFileError> {
    fs::rename(next_path(path), path).map_err(io_error("replace", path))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    File::open(directory)
        .and_then(|d| d.sync_all())
        .map_err(io_error("sync", directory))
}

/// Creates the directory, or restricts an existing one to its owner. A directory that others can only read is changed
/// to 0700: container runtimes create host paths with 0755, and an administrator cannot run chmod on a node without a shell.
/// A directory that others can write is an error.
fn restrict(directory: &Path) -> Result<(), KeyFileError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(io_error("create", directory))?;
    let meta = fs::metadata(directory).map_err(io_error("inspect", directory))?;
    check_owner(directory, &meta)?;
    let mode = meta.permissions().mode() & 0o7777;
    if mode & 0o022 != 0 {
        return Err(KeyFileError::DirectoryMode {
            path: directory.to_owned(),
            mode,
        });
    }
    if mode & 0o077 != 0 {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).map_err(io_error("chmod 700", directory))?;
        tracing::info!(directory = %directory.display(), was = format!("{mode:04o}"), "restricted the key's directory to its owner (0700)");
    }
    Ok(())
}

fn check_owner(path: &Path, meta: &fs::Metadata) -> Result<(), KeyFileError> {
    let me = rustix::process::geteuid().as_raw();
    if meta.uid() == me {
        Ok(())
    } else {
        Err(KeyFileError::Owner {
            path: path.to_owned(),
            owner: meta.uid(),
            me,
        })
    }
}

fn read(path: &Path) -> Result<Option<NodeKey>, KeyFileError> {
    // Do not follow a symlink, and do not block on a FIFO.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(KeyFileError::NotAFile(path.to_owned())),
        Err(error) => return Err(io_error("open", path)(error)),
    };
    let meta = file.metadata().map_err(io_error("inspect", path))?;
    if !meta.is_file() {
        return Err(KeyFileError::NotAFile(path.to_owned()));
    }
    check_owner(path, &meta)?;
    let mode = meta.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::FileMode {
            path: path.to_owned(),
            mode,
        });
    }
    let malformed = || KeyFileError::Malformed(path.to_owned());
    // 44 characters, a newline that an editor may have added, and one more to detect longer text.
    let mut text = Zeroizing::new([0u8; 46]);
    let mut length = 0;
    while length < text.len() {
        match file.read(&mut text[length..]).map_err(io_error("read", path))? {
            0 => break,
            n => length += n,
        }
    }
    let text = text.get(..length).map(<[u8]>::trim_ascii_end).ok_or_else(malformed)?;
    let mut bytes = Zeroizing::new([0u8; 33]);
    match STANDARD.decode_slice(text, &mut *bytes) {
        Ok(32) => {}
        _ => return Err(malformed()),
    }
    let mut secret = Zeroizing::new([0u8; 32]);
    secret.copy_from_slice(&bytes[..32]);
    if *secret == [0; 32] {
        return Err(malformed());
    }
    Ok(Some(NodeKey(StaticSecret::from(*secret))))
}

/// Creates a key in a temporary file and makes `path` a hard link to it, so that a crash leaves no partial key in `path`. If another
/// process has created `path` in the meantime, returns the key of that process.
fn create(path: &Path, directory: &Path) -> Result<NodeKey, KeyFileError> {
    let mut secret = Zeroizing::new([0u8; 32]);
    let mut suffix = [0u8; 8];
    File::open("/dev/urandom")
        .and_then(|mut random| {
            random
                .read_exact(&mut *secret)
                .and_then(|()| random.read_exact(&mut suffix))
        })
        .map_err(io_error("read random bytes from", Path::new("/dev/urandom")))?;
    // Clamps the key as `wg genkey` does (RFC 7748 §5).
    secret[0] &= 248;
    secret[31] = secret[31] & 127 | 64;
    let mut text = Zeroizing::new([0u8; 44]);
    let written = STANDARD.encode_slice(*secret, &mut *text);
    debug_assert_eq!(written, Ok(44));

    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{:016x}", u64::from_be_bytes(suffix)));
    let temporary = directory.join(name);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(io_error("create", &temporary))?;
    let linked = file
        .write_all(&*text)
        .and_then(|()| file.sync_all())
        .map_err(io_error("write", &temporary))
        .and_then(|()| match fs::hard_link(&temporary, path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(io_error("link", path)(error)),
        });
    let _ = fs::remove_file(&temporary);
    File::open(directory)
        .and_then(|d| d.sync_all())
        .map_err(io_error("sync", directory))?;
    if linked? {
        let key = NodeKey(StaticSecret::from(*secret));
        tracing::info!(file = %path.display(), public = %key.public(), "created a private key for this node");
        return Ok(key);
    }
    read(path)?.ok_or_else(|| io_error("read", path)(io::ErrorKind::NotFound.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";
    const PUBLIC: &str = "HIgo9xNzJMWLKASShiTqIybxZ0U3wGLiUeJ1PKf8ykw=";

    fn key_path() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("kilo/key");
        (root, path)
    }

    fn write_key(path: &Path, text: &str, mode: u32) {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path.parent().unwrap())
            .unwrap();
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn first_start_creates_a_key_and_the_second_reads_it() {
        let (_root, path) = key_path();
        let first = load_or_create(&path).unwrap();
        assert_eq!(load_or_create(&path).unwrap().public(), first.public());
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(fs::read(&path).unwrap().len(), 44);
        assert_eq!(
            fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1,
            "the directory contains only the key"
        );
    }

    #[test]
    fn kilo_key_file_is_used_unchanged() {
        for text in [TEXT.to_owned(), format!("{TEXT}\n")] {
            let (_root, path) = key_path();
            write_key(&path, &text, 0o600);
            assert_eq!(load_or_create(&path).unwrap().public().to_string(), PUBLIC);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    // threat: key-file
    #[test]
    fn key_readable_by_others_is_refused_with_a_remedy() {
        let (_root, path) = key_path();
        write_key(&path, TEXT, 0o640);
        let error = load_or_create(&path).unwrap_err().to_string();
        assert!(
            error.contains("has mode 0640") && error.contains(&format!("chmod 600 {}", path.display())),
            "{error}"
        );
        assert!(!error.contains(TEXT));
    }

    #[test]
    fn readable_key_directory_is_restricted_writable_one_refused() {
        let (_root, path) = key_path();
        write_key(&path, TEXT, 0o600);
        let directory = path.parent().unwrap();
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        load_or_create(&path).unwrap();
        assert_eq!(mode(directory), 0o700);
        fs::set_permissions(directory, fs::Permissions::from_mode(0o770)).unwrap();
        let error = load_or_create(&path).unwrap_err().to_string();
        assert!(
            error.ends_with(&format!("Run: chmod 700 {}", directory.display())),
            "{error}"
        );
    }

    #[test]
    fn malformed_key_file_is_kept_and_refused() {
        for text in [
            "",
            "hello",
            &TEXT[..43],
            &format!("{TEXT}{TEXT}"),
            &STANDARD.encode([0; 32]),
            &STANDARD.encode([7; 31]),
        ] {
            let (_root, path) = key_path();
            write_key(&path, text, 0o600);
            assert!(
                matches!(load_or_create(&path), Err(KeyFileError::Malformed(_))),
                "{text:?}"
            );
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    // threat: key-file
    #[test]
    fn key_file_symlink_is_not_followed() {
        let (root, path) = key_path();
        write_key(&root.path().join("other/key"), TEXT, 0o600);
        DirBuilder::new().mode(0o700).create(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(root.path().join("other/key"), &path).unwrap();
        assert!(matches!(load_or_create(&path), Err(KeyFileError::NotAFile(_))));
    }

    // threat: key-file
    #[test]
    fn debug_output_of_a_key_shows_only_the_public_half() {
        let (_root, path) = key_path();
        write_key(&path, TEXT, 0o600);
        assert_eq!(
            format!("{:?}", load_or_create(&path).unwrap()),
            format!("NodeKey(public {PUBLIC})")
        );
    }

    #[test]
    fn next_key_is_unused_until_it_is_promoted() {
        let (_root, path) = key_path();
        assert!(matches!(create_next(&path), Err(KeyFileError::NoKey(_))));
        write_key(&path, TEXT, 0o600);
        assert_eq!(load_next(&path).unwrap().map(|key| key.public()), None);
        let new = create_next(&path).unwrap().public();
        assert_eq!(load_next(&path).unwrap().map(|key| key.public()), Some(new));
        assert_eq!(load_or_create(&path).unwrap().public().to_string(), PUBLIC);
        assert!(matches!(create_next(&path), Err(KeyFileError::NextKeyExists(_))));
        promote(&path).unwrap();
        assert_eq!(load_or_create(&path).unwrap().public(), new);
        assert_eq!((mode(&path), next_path(&path).exists()), (0o600, false));
    }

    #[test]
    fn partial_key_file_after_a_crash_is_never_read() {
        let (_root, path) = key_path();
        // The file that `create` leaves behind if it is killed between writing and linking.
        write_key(&path.with_file_name(".key.0011223344556677"), &TEXT[..20], 0o600);
        let key = load_or_create(&path).unwrap();
        assert_ne!(key.public().to_string(), PUBLIC);
        assert_eq!(load_or_create(&path).unwrap().public(), key.public());
    }

    #[test]
    fn simultaneous_first_starts_use_one_key() {
        let (_root, path) = key_path();
        let keys: std::collections::BTreeSet<PublicKey> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| load_or_create(&path).unwrap().public()))
                .collect();
            starts.into_iter().map(|start| start.join().unwrap()).collect()
        });
        assert_eq!(keys.len(), 1);
    }
}
