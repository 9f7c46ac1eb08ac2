//! Detects handshake initiations for a public key that the device does not have yet: during a key rotation, they show
//! that a peer knows the new key. `rotation` decides what follows.
//!
//! The device cannot report them: the kernel drops such a packet silently. So an nftables rule copies every initiation
//! to the agent (`log group`, nfnetlink_log). That needs NET_ADMIN and changes no packet. The table exists while a key
//! is rotated.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use boringtun::noise::{Packet, rate_limiter::RateLimiter};
use clustermesh_core::key::PublicKey;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_NETFILTER};
use tokio::task::AbortHandle;

use crate::{
    firewall::{Backend, Error, Nft},
    source::store::Store,
};

/// A table of its own, because the firewall's table is replaced as a whole.
const TABLE: &str = "clustermesh-rotate";
/// Length of an initiation (WireGuard paper §5.4.2).
const INITIATION: usize = 148;
/// The nfnetlink_log group: any number that no other program uses.
const GROUP: u16 = 5182;

/// Listens until it is dropped.
#[derive(Debug)]
pub(crate) struct InitiationListener {
    initiation_seen: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Why the listener could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// The rule.
    #[error(
        "cannot write the nftables rule that copies handshakes to the agent (is the kernel module nfnetlink_log available?): {0}"
    )]
    Rule(#[from] Error),
    /// The socket.
    #[error("cannot listen to nfnetlink_log's group {GROUP}: {0}")]
    Socket(#[from] io::Error),
}

impl InitiationListener {
    /// Listens on the device's UDP `port` for initiations for `key`; wakes the store's waiter at the first.
    pub(crate) async fn open(port: u16, key: PublicKey, store: Store) -> Result<Self, ListenError> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        for message in subscribe() {
            socket.send_to(&message, &SocketAddr::new(0, 0)).await?;
            check_ack(&socket.recv_from_full().await?.0)?;
        }
        Nft::default().run(&script(port)).await?;
        let initiation_seen = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&initiation_seen);
        let task = tokio::spawn(async move {
            let gate = gate(&key);
            loop {
                match socket.recv_from_full().await {
                    Ok((datagram, _)) if payloads(&datagram).any(|packet| is_for_key(packet, &gate)) => {
                        flag.store(true, Ordering::Release);
                        store.wake();
                        return;
                    }
                    // ENOBUFS: copies were lost in a flood; a peer repeats its initiation.
                    Ok(_) => {}
                    Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                    Err(error) => {
                        tracing::warn!(%error, "cannot detect handshakes for this node's new key any more");
                        return;
                    }
                }
            }
        });
        Ok(Self {
            initiation_seen,
            task: task.abort_handle(),
        })
    }

    /// Whether an initiation for the key arrived.
    pub(crate) fn initiation_seen(&self) -> bool {
        self.initiation_seen.load(Ordering::Acquire)
    }
}

impl Drop for InitiationListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Deletes the table, if there is one.
pub(crate) async fn remove() -> Result<(), Error> {
    Nft::default()
        .run(&format!("table inet {TABLE}\ndelete table inet {TABLE}\n"))
        .await
}

/// The rule precedes all others, including a firewall that drops these packets.
fn script(port: u16) -> String {
    let length = INITIATION + 8;
    format!(
        "table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n  chain called {{\n    type filter hook \
         prerouting priority -450; policy accept;\n    udp dport {port} udp length {length} @th,64,8 1 log group {GROUP} \
         snaplen 256\n  }}\n}}\n"
    )
}

/// linux/netfilter/nfnetlink_log.h: bind the group, copy whole packets, and deliver each at once.
fn subscribe() -> [Vec<u8>; 3] {
    const BIND: &[u8] = &[1];
    const COPY_PACKET: &[u8] = &[0, 0, 0xff, 0xff, 2, 0];
    const AT_ONCE: &[u8] = &[0, 0, 0, 1];
    [(1, BIND), (2, COPY_PACKET), (5, AT_ONCE)].map(|(attribute, value)| config(attribute, value))
}

/// NFULNL_MSG_CONFIG with one attribute, with acknowledgement (netlink(7)).
fn config(attribute: u16, value: &[u8]) -> Vec<u8> {
    const REQUEST_ACK: u16 = 1 | 4;
    let mut body = vec![0, 0];
    body.extend(GROUP.to_be_bytes());
    body.extend(u16::try_from(4 + value.len()).unwrap_or(4).to_ne_bytes());
    body.extend(attribute.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
    let mut message = u32::try_from(16 + body.len()).unwrap_or(16).to_ne_bytes().to_vec();
    message.extend((LOG << 8 | 1).to_ne_bytes());
    message.extend(REQUEST_ACK.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// NFNL_SUBSYS_ULOG.
const LOG: u16 = 4;

/// The error in an acknowledgement.
fn check_ack(datagram: &[u8]) -> io::Result<()> {
    const ERROR: u16 = 2;
    let code = datagram
        .get(16..20)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes);
    match (u16_at(datagram, 4), code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(io::Error::from_raw_os_error(-code)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The packets (NFULA_PAYLOAD, from the IP header on) in a datagram from the kernel.
fn payloads(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    const PAYLOAD: u16 = 9;
    let messages = split(datagram, |rest| {
        Some(u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?) as usize)
    });
    let packets = messages.filter(|message| u16_at(message, 4) == Some(LOG << 8));
    let attributes = packets.flat_map(|message| {
        split(message.get(20..).unwrap_or_default(), |rest| {
            u16_at(rest, 0).map(usize::from)
        })
    });
    attributes.filter_map(|attribute| (u16_at(attribute, 2)? & 0x3fff == PAYLOAD).then(|| attribute.get(4..))?)
}

/// Splits consecutive netlink messages or attributes: each begins with its length, aligned to four bytes.
fn split(mut rest: &[u8], length: impl Fn(&[u8]) -> Option<usize>) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = length(rest).filter(|length| *length >= 4)?;
        let piece = rest.get(..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(piece)
    })
}

/// Checks mac1 for the key; it never rate limits.
fn gate(key: &PublicKey) -> RateLimiter {
    RateLimiter::new(&(*key.as_bytes()).into(), u64::MAX)
}

/// Whether an IP packet ends with a handshake initiation for the key.
fn is_for_key(packet: &[u8], gate: &RateLimiter) -> bool {
    let message = packet.last_chunk::<INITIATION>();
    message.is_some_and(|message| matches!(gate.verify_packet(None, message, &mut []), Ok(Packet::HandshakeInit(_))))
}

#[cfg(test)]
mod tests {
    use boringtun::noise::{Tunn, TunnResult};
    use x25519_dalek::StaticSecret;

    use super::*;

    fn key(n: u8) -> (StaticSecret, PublicKey) {
        let secret = StaticSecret::from([n; 32]);
        let public = x25519_dalek::PublicKey::from(&secret).to_bytes();
        (secret, PublicKey::new(public))
    }

    /// An IPv4 packet with an initiation for a key, made by boringtun.
    fn initiation(to: &PublicKey) -> Vec<u8> {
        let mut tunnel = Tunn::new(key(1).0, (*to.as_bytes()).into(), None, None, 0, None);
        let mut scratch = [0; 256];
        match tunnel.format_handshake_initiation(&mut scratch, false) {
            TunnResult::WriteToNetwork(message) => [&[0x45; 28], &*message].concat(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn initiation_matches_only_the_key_it_is_for() {
        let (ours, other) = (key(2).1, key(3).1);
        let packet = initiation(&ours);
        assert!(is_for_key(&packet, &gate(&ours)));
        assert!(!is_for_key(&packet, &gate(&other)));
        assert!(!is_for_key(&packet[1..147], &gate(&ours)));
        assert!(!is_for_key(&[], &gate(&ours)));
        let mut changed = packet.clone();
        changed[28 + 60] ^= 1;
        assert!(!is_for_key(&changed, &gate(&ours)));
    }

    #[test]
    fn log_datagrams_are_parsed_at_any_length() {
        // A packet message with an attribute of 5 bytes and a payload, and a message of another kind.
        let attribute = |kind: u16, value: &[u8]| {
            let mut out = (4 + value.len() as u16).to_ne_bytes().to_vec();
            out.extend(kind.to_ne_bytes());
            out.extend(value);
            out.resize(out.len().next_multiple_of(4), 0);
            out
        };
        let message = |kind: u16, body: &[u8]| {
            let mut out = (16 + body.len() as u32).to_ne_bytes().to_vec();
            out.extend(kind.to_ne_bytes());
            out.extend([0; 10]);
            out.extend(body);
            out
        };
        let body = [vec![2, 0, 0x14, 0x3e], attribute(3, b"hello"), attribute(9, b"packet")].concat();
        let all = [message(LOG << 8, &body), message(2, &body)].concat();
        assert_eq!(payloads(&all).collect::<Vec<_>>(), [b"packet"]);
        for cut in 0..all.len() {
            assert!(payloads(&all[..cut]).all(|packet| packet == b"packet"));
        }
        let error = |code: i32| message(2, &code.to_ne_bytes());
        assert_eq!(check_ack(&error(-1)).unwrap_err().raw_os_error(), Some(1));
        check_ack(&error(0)).unwrap();
        check_ack(&[]).unwrap_err();
    }
}
