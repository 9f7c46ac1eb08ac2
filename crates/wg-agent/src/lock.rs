//! One agent for each network namespace: a second one is refused before it touches anything. What the lock protects (table
//! numbers, firewall table, device) belongs to the namespace, so the namespace's inode is in the lock file's name.
//!
//! Only root can open the file, so no other process can keep the agent out. It lies where userspace devices have their control
//! sockets: the DaemonSet mounts that directory from the node, so that agents in different pods see one file. Next to it is the
//! socket of `wg-agent status` ([`crate::status::ask`]).

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};

/// Where the file is.
const DIRECTORY: &str = "/var/run/wireguard";

/// Held as long as the value lives.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    status: PathBuf,
    _file: File,
}

/// Why the node could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent runs.
    #[error(
        "another wg-agent already serves this node's network namespace (process {holder}): stop it first; two would undo \
         each other's routes"
    )]
    Held {
        /// Process id, or words where it is not known.
        holder: String,
    },
    /// Another user than root could replace the file.
    #[error("the directory of the agent's lock, {}, can be written by others than root: chown root and chmod go-w", .0.display())]
    Writable(PathBuf),
    /// The system said no.
    #[error("cannot take the agent's lock {what}: {source}")]
    Io {
        /// Which part of it.
        what: String,
        /// What it said.
        source: io::Error,
    },
}

fn failed(what: impl ToString) -> impl FnOnce(io::Error) -> LockError {
    let what = what.to_string();
    move |source| LockError::Io { what, source }
}

/// Takes the lock, or says who has it.
pub fn take() -> Result<Lock, LockError> {
    Lock::take(Path::new(DIRECTORY), namespace()?)
}

/// Where the agent of this network namespace answers `wg-agent status`.
pub(crate) fn status_socket() -> Result<PathBuf, LockError> {
    Ok(status_socket_in(Path::new(DIRECTORY), namespace()?))
}

/// `wg show` takes every `*.sock` in that directory for a device's.
fn status_socket_in(directory: &Path, namespace: u64) -> PathBuf {
    directory.join(format!("wg-agent-{namespace}.status"))
}

/// The inode of this process's network namespace.
fn namespace() -> Result<u64, LockError> {
    let namespace = fs::metadata("/proc/self/ns/net").map_err(failed("of /proc/self/ns/net"))?;
    Ok(namespace.ino())
}

/// A pod's own volume (emptyDir) is writable by everybody. While nobody has put anything there, it is closed to others; where
/// something is there then, it stays as it is, and is refused.
fn close_if_empty(directory: &Path) -> io::Result<()> {
    let empty = || Ok::<_, io::Error>(fs::read_dir(directory)?.next().is_none());
    let of = fs::metadata(directory)?;
    let (mode, own) = (of.mode(), of.uid() == nix::unistd::geteuid().as_raw());
    if mode & 0o022 == 0 || !own || !empty()? {
        return Ok(());
    }
    fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    if !empty()? {
        fs::set_permissions(directory, Permissions::from_mode(mode & 0o7777))?;
    }
    Ok(())
}

impl Lock {
    /// Binds the socket of `wg-agent status`. Whoever holds the lock may replace what a killed agent left.
    pub(crate) fn status_listener(&self) -> io::Result<tokio::net::UnixListener> {
        match fs::remove_file(&self.status) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = tokio::net::UnixListener::bind(&self.status)?;
        fs::set_permissions(&self.status, Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    fn take(directory: &Path, namespace: u64) -> Result<Self, LockError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.map_err(failed(format!(
            "in {} (a pod mounts it from its node, as deploy/agent.yaml says)",
            directory.display()
        )))?;
        close_if_empty(directory).map_err(failed(directory.display()))?;
        let of = fs::metadata(directory).map_err(failed(directory.display()))?;
        if of.uid() != nix::unistd::geteuid().as_raw() || of.mode() & 0o022 != 0 {
            return Err(LockError::Writable(directory.to_owned()));
        }
        let path = directory.join(format!("wg-agent-{namespace}.lock"));
        let failed = || failed(path.display());
        let no_link = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = options
                .mode(0o600)
                .custom_flags(no_link)
                .open(&path)
                .map_err(failed())?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let mut holder = String::new();
                    let _ = file.read_to_string(&mut holder);
                    let holder = holder.trim().to_owned();
                    return Err(LockError::Held { holder });
                }
                Err(error) => return Err(failed()(error.into())),
            }
            // Whoever held it before may have removed it since it was opened.
            let own = file.metadata().map_err(failed())?;
            let there = fs::metadata(&path);
            if !there.is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())) {
                continue;
            }
            // For people; what a killed process left is overwritten.
            let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
            written.map_err(failed())?;
            return Ok(Self {
                path,
                status: status_socket_in(directory, namespace),
                _file: file,
            });
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.status);
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn second_agent_of_a_namespace_is_refused_until_the_first_ends() {
        let directory = tempfile::tempdir().unwrap();
        let take = |namespace| Lock::take(directory.path(), namespace);
        let first = take(7).unwrap();
        let error = take(7).unwrap_err().to_string();
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
        let _other = take(8).unwrap();
        let mode = fs::metadata(&first.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let path = first.path.clone();
        drop(first);
        assert!(!path.exists());
        // What a killed process left is no lock.
        fs::write(&path, "1234567\n").unwrap();
        take(7).unwrap();
    }

    #[test]
    fn directory_that_others_may_write_is_refused_unless_nothing_is_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let open = || fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        let mode = || fs::metadata(directory.path()).unwrap().permissions().mode() & 0o777;
        open();
        drop(Lock::take(directory.path(), 7).unwrap());
        assert_eq!(mode(), 0o700);
        open();
        fs::write(directory.path().join("planted"), "").unwrap();
        let error = Lock::take(directory.path(), 7).unwrap_err();
        assert!(matches!(error, LockError::Writable(_)), "{error}");
        assert_eq!(mode(), 0o777);
    }

    #[tokio::test]
    async fn status_socket_is_roots_alone_and_replaces_a_stale_one() {
        let directory = tempfile::tempdir().unwrap();
        let lock = Lock::take(directory.path(), 7).unwrap();
        let path = status_socket_in(directory.path(), 7);
        // As a killed agent leaves it.
        drop(UnixListener::bind(&path).unwrap());
        let _listener = lock.status_listener().unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(lock);
        assert!(!path.exists());
    }
}
