//! Takes the lock that allows only one agent in each network namespace. A second agent fails before it changes
//! anything. The lock protects the routing tables, the firewall table and the device, which belong to the namespace, so
//! the file's name contains the namespace's inode.
//!
//! Only root can open the file, so no unprivileged process can block the agent. The file is in the directory of the
//! userspace devices' control sockets: the DaemonSet mounts that directory from the node, so agents in different pods see the
//! same file. Next to it is the socket of `wg-agent status` (`status/socket.rs`).

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

/// The directory of the lock file.
const DIRECTORY: &str = "/var/run/wireguard";

/// The lock; released when dropped.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    status_path: PathBuf,
    _file: File,
}

/// Why the lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent holds the lock.
    #[error(
        "another wg-agent already serves this node's network namespace (process {holder}): stop it first; two would undo \
         each other's routes"
    )]
    Held {
        /// Process id in the lock file.
        holder: String,
    },
    /// Users other than root can write to the directory and so replace the file.
    #[error("users other than root can write to {}, the directory of the agent's lock: run chown root and chmod go-w on it", .0.display())]
    Writable(PathBuf),
    /// A system call failed.
    #[error("cannot take the agent's lock {what}: {source}")]
    Io {
        /// The path, after a preposition if needed.
        what: String,
        /// The error.
        source: io::Error,
    },
}

fn io_error(what: impl ToString) -> impl FnOnce(io::Error) -> LockError {
    let what = what.to_string();
    move |source| LockError::Io { what, source }
}

/// Takes the lock, or names the process that holds it.
pub fn take() -> Result<Lock, LockError> {
    Lock::take(Path::new(DIRECTORY), namespace()?)
}

/// The path of the socket of `wg-agent status` for this network namespace.
pub(crate) fn status_socket() -> Result<PathBuf, LockError> {
    Ok(status_socket_in(Path::new(DIRECTORY), namespace()?))
}

/// The path of the socket. Its name does not end in `.sock`, because `wg show` takes each `.sock` file there for a device.
fn status_socket_in(directory: &Path, namespace: u64) -> PathBuf {
    directory.join(format!("wg-agent-{namespace}.status"))
}

/// The inode of this process's network namespace.
fn namespace() -> Result<u64, LockError> {
    let namespace = fs::metadata("/proc/self/ns/net").map_err(io_error("of /proc/self/ns/net"))?;
    Ok(namespace.ino())
}

/// Sets mode 0700 on a directory that is empty, belongs to this user and is writable by others, such as a pod's emptyDir volume. If a
/// file appears in the directory meanwhile, restores the mode. [`Lock::take`] refuses a directory that stays writable by others.
fn restrict_if_empty(directory: &Path) -> io::Result<()> {
    let empty = || Ok::<_, io::Error>(fs::read_dir(directory)?.next().is_none());
    let meta = fs::metadata(directory)?;
    let (mode, is_own) = (meta.mode(), meta.uid() == nix::unistd::geteuid().as_raw());
    if mode & 0o022 == 0 || !is_own || !empty()? {
        return Ok(());
    }
    fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    if !empty()? {
        fs::set_permissions(directory, Permissions::from_mode(mode & 0o7777))?;
    }
    Ok(())
}

impl Lock {
    /// Binds the socket of `wg-agent status`. Replaces the socket file of a killed agent; this is safe, because this
    /// process holds the lock.
    pub(crate) fn status_listener(&self) -> io::Result<tokio::net::UnixListener> {
        match fs::remove_file(&self.status_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = tokio::net::UnixListener::bind(&self.status_path)?;
        fs::set_permissions(&self.status_path, Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    fn take(directory: &Path, namespace: u64) -> Result<Self, LockError> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        created.map_err(io_error(format!(
            "in {} (a pod must mount it from its node, as in deploy/agent.yaml)",
            directory.display()
        )))?;
        restrict_if_empty(directory).map_err(io_error(directory.display()))?;
        let meta = fs::metadata(directory).map_err(io_error(directory.display()))?;
        if meta.uid() != nix::unistd::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
            return Err(LockError::Writable(directory.to_owned()));
        }
        let path = directory.join(format!("wg-agent-{namespace}.lock"));
        let failed = || io_error(path.display());
        let no_follow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = options
                .mode(0o600)
                .custom_flags(no_follow)
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
            // The previous holder of the lock may have removed the file since it was opened here.
            let own = file.metadata().map_err(failed())?;
            let current = fs::metadata(&path);
            if !current.is_ok_and(|current| (current.dev(), current.ino()) == (own.dev(), own.ino())) {
                continue;
            }
            // Replaces the process id that a killed agent left. Only the error message of a second agent uses the id.
            let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
            written.map_err(failed())?;
            return Ok(Self {
                path,
                status_path: status_socket_in(directory, namespace),
                _file: file,
            });
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.status_path);
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    // threat: agent-lock-taken, second-agent
    #[test]
    fn second_agent_in_a_namespace_is_refused_until_the_first_ends() {
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
        // A file left by a killed process is not locked.
        fs::write(&path, "1234567\n").unwrap();
        take(7).unwrap();
    }

    // threat: agent-lock-taken
    #[test]
    fn writable_lock_directory_is_refused_unless_empty() {
        let directory = tempfile::tempdir().unwrap();
        let make_writable = || fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        let mode = || fs::metadata(directory.path()).unwrap().permissions().mode() & 0o777;
        make_writable();
        drop(Lock::take(directory.path(), 7).unwrap());
        assert_eq!(mode(), 0o700);
        make_writable();
        fs::write(directory.path().join("planted"), "").unwrap();
        let error = Lock::take(directory.path(), 7).unwrap_err();
        assert!(matches!(error, LockError::Writable(_)), "{error}");
        assert_eq!(mode(), 0o777);
    }

    // threat: agent-lock-taken
    #[tokio::test]
    async fn status_socket_has_mode_0600_and_replaces_a_stale_one() {
        let directory = tempfile::tempdir().unwrap();
        let lock = Lock::take(directory.path(), 7).unwrap();
        let path = status_socket_in(directory.path(), 7);
        // A killed agent leaves its socket file behind.
        drop(UnixListener::bind(&path).unwrap());
        let _listener = lock.status_listener().unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(lock);
        assert!(!path.exists());
    }
}
