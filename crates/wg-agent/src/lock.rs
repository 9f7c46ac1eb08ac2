//! One agent for each network namespace: a second one is refused before it touches anything. What the lock protects (table
//! numbers, firewall table, device) belongs to the namespace, so the namespace's inode is in the lock file's name.
//!
//! Only root can open the file, so no other process can keep the agent out. It lies where userspace devices have their control
//! sockets: the DaemonSet mounts that directory from the node, so that agents in different pods see one file.
//!
//! Up to version 0.1 the lock was an abstract socket, which any process of the namespace may bind. It is bound still: for
//! `wg-agent status` ([`crate::status::ask`]), and so that an agent of that version and this one exclude each other. Held by a
//! process that is not root's it locks nothing.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::{
            fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use nix::sys::socket::{UnixCredentials, getsockopt, sockopt::PeerCredentials};
use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};

/// Name of the socket.
pub(crate) const NAME: &[u8] = b"clustermesh-wg-agent";
/// Where the file is.
const DIRECTORY: &str = "/var/run/wireguard";

/// Held as long as the value lives.
#[derive(Debug)]
pub struct Lock {
    socket: Option<UnixListener>,
    _file: Option<LockFile>,
}

impl Lock {
    /// The socket, to answer at; `None` = another process has its name. The lock has to be held on all the same.
    pub(crate) fn listener(&self) -> io::Result<Option<tokio::net::UnixListener>> {
        let Some(socket) = &self.socket else { return Ok(None) };
        socket.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(socket.try_clone()?).map(Some)
    }
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
    let namespace = fs::metadata("/proc/self/ns/net").map_err(failed("of /proc/self/ns/net"))?;
    let file = match LockFile::take(Path::new(DIRECTORY), namespace.ino()) {
        // A pod whose root is read-only and that has no mount there, as of policy mode up to version 0.1.
        Err(LockError::Io { source, .. }) if source.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            tracing::warn!(
                "{DIRECTORY} is not mounted from the node, so the lock is a socket that any process in the host network can \
                 take while this agent restarts: mount it as deploy/README.md says"
            );
            None
        }
        file => Some(file?),
    };
    Ok(Lock {
        socket: bind(NAME, file.is_some())?,
        _file: file,
    })
}

/// A file that this process has locked; removed with this value.
#[derive(Debug)]
struct LockFile {
    path: PathBuf,
    _file: File,
}

impl LockFile {
    fn take(directory: &Path, namespace: u64) -> Result<Self, LockError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.map_err(failed(directory.display()))?;
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
            return Ok(Self { path, _file: file });
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// `locked`: there is a file besides, so that only an agent of an older version can hold the socket rightly.
fn bind(name: &[u8], locked: bool) -> Result<Option<UnixListener>, LockError> {
    let what = || failed("socket @clustermesh-wg-agent");
    let address = SocketAddr::from_abstract_name(name).map_err(what())?;
    match UnixListener::bind_addr(&address) {
        Ok(socket) => Ok(Some(socket)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match holder(&address) {
            Some(holder) if locked && holder.uid() != 0 => {
                tracing::warn!(
                    process = holder.pid(),
                    user = holder.uid(),
                    "a process that is not root's has the socket @clustermesh-wg-agent: `wg-agent status` does not work until \
                     it is stopped and this agent restarted"
                );
                Ok(None)
            }
            holder => Err(LockError::Held {
                holder: holder.filter(|holder| holder.pid() > 0).map_or_else(
                    || "in another process namespace".to_owned(),
                    |holder| holder.pid().to_string(),
                ),
            }),
        },
        Err(error) => Err(what()(error)),
    }
}

/// The credentials of a listening socket are those of the process that listens (unix(7), SO_PEERCRED).
fn holder(address: &SocketAddr) -> Option<UnixCredentials> {
    let stream = UnixStream::connect_addr(address).ok()?;
    getsockopt(&stream.as_fd(), PeerCredentials).ok()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        os::unix::{fs::PermissionsExt, process::CommandExt},
        process::{Command, Stdio},
    };

    use super::*;

    /// An abstract name for [`unprivileged_listener`] to bind.
    const LISTEN: &str = "CLUSTERMESH_TEST_LISTEN";

    #[test]
    fn second_agent_of_a_namespace_is_refused_until_the_first_ends() {
        let directory = tempfile::tempdir().unwrap();
        let take = |namespace| LockFile::take(directory.path(), namespace);
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
    fn directory_that_others_may_write_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = LockFile::take(directory.path(), 7).unwrap_err();
        assert!(matches!(error, LockError::Writable(_)), "{error}");
    }

    #[test]
    fn socket_of_an_older_agent_is_a_lock_still() {
        let name = format!("clustermesh-older-{}", std::process::id());
        let older = bind(name.as_bytes(), true).unwrap();
        let error = bind(name.as_bytes(), true).unwrap_err().to_string();
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
        drop(older);
        assert!(bind(name.as_bytes(), true).unwrap().is_some());
    }

    #[test]
    fn socket_of_an_unprivileged_process_locks_nothing() {
        let name = format!("clustermesh-taken-{}", std::process::id());
        let mut child = Command::new("/proc/self/exe")
            .args(["lock::tests::unprivileged_listener", "--exact", "--nocapture"])
            .env(LISTEN, &name)
            .uid(65534)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        output
            .find(|line| line.as_ref().unwrap().contains("listens"))
            .unwrap()
            .unwrap();
        assert!(UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).is_err());
        assert!(bind(name.as_bytes(), true).unwrap().is_none());
        assert!(bind(name.as_bytes(), false).is_err());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    /// The other process of the test above. Run by itself it does nothing.
    #[test]
    fn unprivileged_listener() {
        let Ok(name) = std::env::var(LISTEN) else { return };
        let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        println!("listens");
        let _ = io::stdin().read_to_string(&mut String::new());
    }
}
