//! Detects handshake initiations for a public key that the device does not have yet. During a key rotation they show that
//! a peer knows the new key; then `rotation` switches to it.
//!
//! The device drops such an initiation and reports nothing. So an nftables rule copies every
//! initiation to the agent (`log group`, nfnetlink_log). This needs NET_ADMIN and changes no packet. The nftables table
//! exists only during a rotation.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use boringtun::noise::{Packet, rate_limiter::RateLimiter};
use clustermesh_core::key::PublicKey;
use clustermesh_netlink::{Error as NetlinkError, Event, Protocol, Socket};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    nflog::{ConfigCmd, ConfigMode, ConfigNla, PacketNla, ULogMessage},
};
use tokio::task::AbortHandle;

use crate::{
    firewall::{Backend, Error, Nft},
    source::store::Store,
};

/// A separate table, because the firewall's table is replaced as a whole.
const TABLE: &str = "clustermesh-rotate";
/// Length of a handshake initiation in bytes (WireGuard paper §5.4.2).
const INITIATION: usize = 148;
/// The nfnetlink_log group: any number that no other program uses.
const GROUP: u16 = 5182;

/// Listens for initiations until it is dropped.
#[derive(Debug)]
pub(crate) struct InitiationListener {
    initiation_seen: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Why the listener could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// The nftables rule could not be written.
    #[error(
        "cannot write the nftables rule that copies handshakes to the agent (is the kernel module nfnetlink_log available?): {0}"
    )]
    Rule(#[from] Error),
    /// The netlink socket failed.
    #[error("cannot listen to nfnetlink_log's group {GROUP}: {0}")]
    Socket(#[from] NetlinkError),
}

impl InitiationListener {
    /// Listens for initiations for `key` to the UDP `port` of the device. The first one causes a pass, because it wakes the
    /// main loop, which waits for changes of `store`.
    pub(crate) async fn open(port: u16, key: PublicKey, store: Store) -> Result<Self, ListenError> {
        let socket = Socket::open(Protocol::Netfilter)?;
        for message in subscription() {
            socket.change(&message)?;
        }
        let mut copies = socket.into_events()?;
        Nft::default().run(&script(port)).await?;
        let initiation_seen = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&initiation_seen);
        let task = tokio::spawn(async move {
            let verifier = mac1_verifier(&key);
            loop {
                match copies.next().await {
                    Ok(events) if packets(&events).any(|packet| is_for_key(&packet, &verifier)) => {
                        flag.store(true, Ordering::Release);
                        store.wake();
                        return;
                    }
                    // Initiations for other keys. During a flood, one for this key can get lost, but the peer repeats it.
                    Ok(_) => {}
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

/// The script that writes the table. The low priority makes its chain run before the base chains of a firewall at the
/// prerouting or input hook, which may drop initiations. `udp length` includes the UDP header (8 bytes); `@th,64,8 1` is
/// the message type of an initiation, the first byte after this header.
fn script(port: u16) -> String {
    let length = INITIATION + 8;
    format!(
        "table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n  chain initiations {{\n    type filter hook \
         prerouting priority -450; policy accept;\n    udp dport {port} udp length {length} @th,64,8 1 log group {GROUP} \
         snaplen 256\n  }}\n}}\n"
    )
}

/// The requests that bind the socket to the group, and configure that whole packets are copied and delivered at once.
fn subscription() -> [NetfilterMessage; 3] {
    let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, GROUP);
    [
        ConfigNla::Cmd(ConfigCmd::Bind),
        ConfigNla::Mode(ConfigMode::new_packet(0xffff)),
        ConfigNla::QThresh(1),
    ]
    .map(|attribute| NetfilterMessage::new(header.clone(), ULogMessage::Config(vec![attribute])))
}

/// The copied packets, starting with the IP header.
fn packets(events: &[Event]) -> impl Iterator<Item = Vec<u8>> {
    let messages = events.iter().filter_map(|event| match event {
        Event::Message(message) => message.parse::<NetfilterMessage>().ok(),
        Event::Lost => None,
    });
    let packets = messages.filter_map(|message| match message.inner {
        NetfilterMessageInner::ULog(ULogMessage::Packet(attributes)) => Some(attributes),
        _ => None,
    });
    packets.flatten().filter_map(|attribute| match attribute {
        PacketNla::Payload(packet) => Some(packet),
        _ => None,
    })
}

/// A verifier of mac1 for the key, without a rate limit.
fn mac1_verifier(key: &PublicKey) -> RateLimiter {
    RateLimiter::new(&(*key.as_bytes()).into(), u64::MAX)
}

/// Whether an IP packet ends with a handshake initiation for the key.
fn is_for_key(packet: &[u8], verifier: &RateLimiter) -> bool {
    let message = packet.last_chunk::<INITIATION>();
    message.is_some_and(|message| {
        matches!(
            verifier.verify_packet(None, message, &mut []),
            Ok(Packet::HandshakeInit(_))
        )
    })
}

#[cfg(test)]
mod tests {
    use boringtun::noise::{Tunn, TunnResult};
    use clustermesh_netlink::Message;
    use x25519_dalek::StaticSecret;

    use super::*;

    fn key(n: u8) -> (StaticSecret, PublicKey) {
        let secret = StaticSecret::from([n; 32]);
        let public = x25519_dalek::PublicKey::from(&secret).to_bytes();
        (secret, PublicKey::new(public))
    }

    /// An initiation that boringtun makes for a key, after 28 bytes in place of the IPv4 and UDP headers.
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
        assert!(is_for_key(&packet, &mac1_verifier(&ours)));
        assert!(!is_for_key(&packet, &mac1_verifier(&other)));
        assert!(!is_for_key(&packet[1..147], &mac1_verifier(&ours)));
        assert!(!is_for_key(&[], &mac1_verifier(&ours)));
        let mut changed = packet.clone();
        changed[28 + 60] ^= 1;
        assert!(!is_for_key(&changed, &mac1_verifier(&ours)));
    }

    #[test]
    fn truncated_log_message_yields_no_partial_packet() {
        // The type of a netlink message: subsystem NFNL_SUBSYS_ULOG, NFULNL_MSG_PACKET.
        const PACKET: u16 = 4 << 8;
        let attribute = |kind: u16, value: &[u8]| {
            let mut out = (4 + value.len() as u16).to_ne_bytes().to_vec();
            out.extend(kind.to_ne_bytes());
            out.extend(value);
            out.resize(out.len().next_multiple_of(4), 0);
            out
        };
        // `struct nfgenmsg` (AF_INET, version 0, group 5182), an unknown attribute, and NFULA_PAYLOAD.
        let body = [
            vec![2, 0, 0x14, 0x3e],
            attribute(100, b"hello"),
            attribute(9, b"packet"),
        ]
        .concat();
        let event = |kind, length| Event::Message(Message::new(kind, body[..length].to_vec()));
        let all = [Event::Lost, event(PACKET + 1, body.len()), event(PACKET, body.len())];
        assert_eq!(packets(&all).collect::<Vec<_>>(), [b"packet"]);
        for cut in 0..body.len() {
            assert!(packets(&[event(PACKET, cut)]).all(|packet| packet == b"packet"));
        }
    }
}
