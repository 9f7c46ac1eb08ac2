//! Exports the functions that fuzz targets test: segmentation and coalescing, ICMP errors, and two tunnels in memory that a script drives.
//! This module is not part of the API.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use x25519_dalek::StaticSecret;

use crate::tunnel::{Inner, Local, Output, Tunnel};
pub use crate::{
    offload::{Coalescer, HEADER, Header, Malformed, Segments, complete_checksum},
    unreachable::icmp_unreachable,
};

/// Room for the largest packet of a script and the overhead of its message.
const BUFFER: usize = 4096;

impl Output for Vec<Vec<u8>> {
    fn send_datagram(&mut self, datagram: &[u8]) {
        self.push(datagram.to_vec());
    }
}

/// Runs a script. Each step is a byte that selects the action, a byte `n`, and 4 × `n` bytes; the last step may have fewer. The peer
/// follows the protocol. The script determines how the network changes the peer's messages. Returns the packets that the peer sent, and
/// those that our tunnel decrypted.
#[must_use]
pub fn run(script: &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut now = Instant::now();
    let [ours, theirs] = [1, 2].map(|number| Arc::new(Local::new(StaticSecret::from([number; 32]))));
    let mut us = Tunnel::new(Arc::clone(&ours), theirs.public, None, 1, None, now);
    let mut peer = Tunnel::new(theirs, ours.public, None, 2, None, now);
    let mut scratch = vec![0; BUFFER];
    let (mut sent, mut delivered) = (Vec::new(), Vec::new());
    // Messages of the peer that have not arrived yet.
    let mut wire: Vec<Vec<u8>> = Vec::new();
    let mut rest = script;
    while let [step, length, after @ ..] = rest {
        let (bytes, following) = after.split_at(after.len().min(usize::from(*length) * 4));
        rest = following;
        let (mut our_messages, mut peer_messages) = (Vec::new(), Vec::new());
        let mut deliver = |us: &mut Tunnel, message: Vec<u8>, our_messages: &mut Vec<Vec<u8>>| {
            let mut plain = vec![0; BUFFER];
            if let Ok(received) = us.receive(&message, now, &mut plain, &mut scratch, our_messages)
                && let Inner::Packet(length, _) = received.inner
            {
                delivered.push(plain[..length].to_vec());
            }
        };
        match step {
            // The peer sends a packet.
            b's' => {
                peer.send(bytes, now, &mut scratch, &mut peer_messages);
                sent.push(bytes.to_vec());
            }
            // Our tunnel sends a packet.
            b'o' => us.send(bytes, now, &mut scratch, &mut our_messages),
            // The oldest message arrives unchanged.
            b'a' if !wire.is_empty() => {
                let message = wire.remove(0);
                deliver(&mut us, message, &mut our_messages);
            }
            // A copy of the newest message arrives changed, truncated or unchanged. The message stays on the wire.
            b'c' => {
                if let Some(mut message) = wire.last().cloned() {
                    for (at, change) in bytes.iter().enumerate() {
                        let at = at * 7 % message.len().max(1);
                        message[at] ^= change;
                    }
                    message.truncate(message.len() - bytes.len() % message.len().max(1));
                    deliver(&mut us, message, &mut our_messages);
                }
            }
            // Arbitrary bytes arrive.
            b'r' => deliver(&mut us, bytes.to_vec(), &mut our_messages),
            // Time passes.
            b't' => {
                now += Duration::from_millis(50 * u64::from(bytes.first().copied().unwrap_or(1)));
                us.tick(now, &mut scratch, &mut our_messages);
                peer.tick(now, &mut scratch, &mut peer_messages);
            }
            _ => {}
        }
        // The network delivers every message of our tunnel to the peer, unchanged.
        let mut plain = vec![0; BUFFER];
        for message in our_messages {
            let _ = peer.receive(&message, now, &mut plain, &mut scratch, &mut peer_messages);
        }
        wire.append(&mut peer_messages);
    }
    (sent, delivered)
}
