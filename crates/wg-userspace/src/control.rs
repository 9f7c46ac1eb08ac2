//! Serves the socket from which `wg show` reads a userspace device (wireguard.com/xplatform, "Cross-platform Userspace Implementation").
//!
//! Requests other than `get=1` are refused with EPERM, because only the program that opened the device may change it. No answer
//! contains a private or preshared key.

use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, Permissions},
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::{
        fs::{DirBuilderExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    datapath::Shared,
    error::Error,
    key::PublicKey,
    observed::{Observed, observed},
};

/// How long one read from a client or one write to it may wait.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of bytes of a request that are read.
const MAX_REQUEST_BYTES: u64 = 4096;

/// The socket's file, which is removed when this value is dropped.
pub(crate) struct ControlSocket {
    path: PathBuf,
    /// Whether [`Self::close`] was called. It removes the file itself, so dropping does not.
    closed: bool,
}

pub(crate) fn path(directory: &Path, interface: &str) -> PathBuf {
    directory.join(format!("{interface}.sock"))
}

impl ControlSocket {
    /// Creates the socket, accessible to root only. Replaces a socket on which no process listens.
    pub(crate) fn open(directory: &Path, interface: &str) -> io::Result<(Self, UnixListener)> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let path = path(directory, interface);
        remove_stale(&path).map_err(io::Error::other)?;
        let listener = UnixListener::bind(&path)?;
        let socket = Self { path, closed: false };
        fs::set_permissions(&socket.path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok((socket, listener))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn close(mut self) -> Result<(), Error> {
        self.closed = true;
        remove(&self.path)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if !self.closed {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket on which no process listens, if there is one. Fails if a process listens on it.
pub(crate) fn remove_stale(path: &Path) -> Result<(), Error> {
    match UnixStream::connect(path) {
        Ok(_) => {
            let source = io::Error::new(ErrorKind::AddrInUse, "another process answers on it");
            Err(Error::ControlSocket {
                path: path.to_owned(),
                source,
            })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(_) => remove(path),
    }
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(Error::ControlSocket {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Answers one client after another until the device stops.
pub(crate) fn serve(listener: &UnixListener, shared: &Shared) {
    loop {
        let mut files = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&shared.stop, PollFlags::IN),
        ];
        let _ = poll(&mut files, None);
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        if let Ok((client, _)) = listener.accept() {
            // An error is the client's: it closed the connection, did not send or read within `CLIENT_TIMEOUT`, or sent no UTF-8.
            let _ = answer(client, shared);
        }
    }
}

fn answer(mut client: UnixStream, shared: &Shared) -> io::Result<()> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut request = BufReader::new(client.try_clone()?.take(MAX_REQUEST_BYTES));
    let mut operation = String::new();
    request.read_line(&mut operation)?;
    let is_get = operation.trim_end() == "get=1";
    let mut line = String::new();
    // Reads up to the empty line that ends a request. If the socket were closed with unread data, the client would lose the answer.
    while request.read_line(&mut line)? > 1 {
        line.clear();
    }
    let answer = if is_get {
        render(
            &observed(shared),
            shared.fwmark.load(Ordering::Relaxed),
            SystemTime::now(),
        )
    } else {
        format!("errno={}\n\n", nix::errno::Errno::EPERM as i32)
    };
    client.write_all(answer.as_bytes())
}

fn render(observed: &Observed, fwmark: u32, now: SystemTime) -> String {
    let mut text = format!("listen_port={}\n", observed.listen_port);
    if fwmark != 0 {
        let _ = writeln!(text, "fwmark={fwmark}");
    }
    for (key, peer) in &observed.peers {
        let handshake = peer.stats.handshake_age.and_then(|age| now.checked_sub(age));
        let handshake = handshake
            .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
            .unwrap_or_default();
        let _ = writeln!(text, "public_key={}", hex(key));
        if let Some(endpoint) = peer.stats.endpoint {
            let _ = writeln!(text, "endpoint={endpoint}");
        }
        let _ = writeln!(text, "last_handshake_time_sec={}", handshake.as_secs());
        let _ = writeln!(text, "last_handshake_time_nsec={}", handshake.subsec_nanos());
        let _ = writeln!(text, "tx_bytes={}", peer.stats.tx_bytes);
        let _ = writeln!(text, "rx_bytes={}", peer.stats.rx_bytes);
        let keepalive = peer.configured.keepalive.map_or(0, std::num::NonZeroU16::get);
        let _ = writeln!(text, "persistent_keepalive_interval={keepalive}");
        for net in &peer.configured.allowed_ips {
            let _ = writeln!(text, "allowed_ip={net}");
        }
        text.push_str("protocol_version=1\n");
    }
    text.push_str("errno=0\n\n");
    text
}

fn hex(key: &PublicKey) -> String {
    key.as_bytes().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        key::PresharedKey,
        observed::{ObservedPeer, PeerStats},
        peer::PeerSpec,
    };

    // threat: key-file
    #[test]
    fn answer_to_get_has_the_xplatform_format_and_no_secret() {
        let peer = ObservedPeer {
            configured: PeerSpec {
                endpoint: None,
                keepalive: std::num::NonZeroU16::new(25),
                preshared_key: PresharedKey::new([0xaa; 32]),
                allowed_ips: [
                    "10.1.0.0/16".parse().expect("a network"),
                    "fd00::/64".parse().expect("a network"),
                ]
                .into(),
            },
            stats: PeerStats {
                endpoint: Some("[2001:db8::1]:51820".parse().expect("endpoint")),
                handshake_age: Some(Duration::from_millis(1500)),
                rx_bytes: 7,
                tx_bytes: 9,
            },
        };
        let observed = Observed {
            peers: [(PublicKey::new([1; 32]), peer)].into(),
            listen_port: 51820,
            ..Observed::default()
        };
        assert_eq!(
            render(&observed, 0x10_0000, UNIX_EPOCH + Duration::from_secs(100)),
            format!(
                "listen_port=51820\nfwmark=1048576\npublic_key={}\nendpoint=[2001:db8::1]:51820\n\
                 last_handshake_time_sec=98\nlast_handshake_time_nsec=500000000\ntx_bytes=9\nrx_bytes=7\n\
                 persistent_keepalive_interval=25\nallowed_ip=10.1.0.0/16\nallowed_ip=fd00::/64\n\
                 protocol_version=1\nerrno=0\n\n",
                "01".repeat(32)
            )
        );
    }

    #[test]
    fn stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        drop(UnixListener::bind(path(directory.path(), "kilo0")).expect("a stale socket"));
        let (socket, _listener) = ControlSocket::open(directory.path(), "kilo0").expect("a new socket");
        assert_eq!(
            fs::metadata(socket.path()).expect("the socket").permissions().mode() & 0o777,
            0o600
        );
        assert!(ControlSocket::open(directory.path(), "kilo0").is_err());
        let file = socket.path().to_owned();
        socket.close().expect("the socket is removed");
        assert!(!file.exists());
    }
}
