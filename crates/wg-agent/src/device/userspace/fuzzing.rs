//! A session in memory that a script of bytes may do anything to: for the fuzz targets (fuzz/) and their corpus, no part of the agent.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use x25519_dalek::{PublicKey, StaticSecret};

use super::tunnel::{Output, Tunnel, no_limit};

const PEER_AT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
/// The largest packet of a script, and room for what a message adds.
const BUFFER: usize = 4096;

#[derive(Default)]
struct Said {
    network: Vec<Vec<u8>>,
    inner: Vec<Vec<u8>>,
}

impl Output for Said {
    fn network(&mut self, datagram: &[u8]) {
        self.network.push(datagram.to_vec());
    }
    fn inner(&mut self, packet: &[u8], _: IpAddr) {
        self.inner.push(packet.to_vec());
    }
}

/// Runs a script: each step is a letter, a length and so many bytes. The peer of the session keeps to the protocol; the network does what
/// the script says. Returns what the peer sent and what was given to the interface.
#[must_use]
pub fn run(script: &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut now = Instant::now();
    let (ours, theirs) = (StaticSecret::from([1; 32]), StaticSecret::from([2; 32]));
    let (our_public, their_public) = (PublicKey::from(&ours), PublicKey::from(&theirs));
    let mut us = Tunnel::new(ours, their_public, None, 1, no_limit(&our_public), None, now);
    let mut peer = Tunnel::new(theirs, our_public, None, 2, no_limit(&their_public), None, now);
    let mut scratch = vec![0; BUFFER];
    let mut packet = vec![0; BUFFER];
    let (mut sent, mut given) = (Vec::new(), Vec::new());
    // What is under way to us; anything may become of it.
    let mut wire: Vec<Vec<u8>> = Vec::new();
    let mut rest = script;
    while let [step, length, after @ ..] = rest {
        let (bytes, following) = after.split_at(after.len().min(usize::from(*length) * 4));
        rest = following;
        let mut said = Said::default();
        let mut answers = Said::default();
        match step {
            // The peer sends a packet.
            b's' => {
                peer.send(bytes, now, &mut scratch, &mut answers);
                sent.push(bytes.to_vec());
            }
            // We send one.
            b'o' => us.send(bytes, now, &mut scratch, &mut said),
            // The oldest message arrives, whole.
            b'a' if !wire.is_empty() => {
                let message = wire.remove(0);
                let _ = us.receive(PEER_AT, &message, now, &mut packet, &mut scratch, &mut said);
            }
            // The newest one arrives changed, or cut, or once more.
            b'c' => {
                if let Some(mut message) = wire.last().cloned() {
                    for (at, change) in bytes.iter().enumerate() {
                        let at = at * 7 % message.len().max(1);
                        message[at] ^= change;
                    }
                    message.truncate(message.len() - bytes.len() % message.len().max(1));
                    let _ = us.receive(PEER_AT, &message, now, &mut packet, &mut scratch, &mut said);
                }
            }
            // Anything arrives.
            b'r' => drop(us.receive(PEER_AT, bytes, now, &mut packet, &mut scratch, &mut said)),
            // Time passes.
            b't' => {
                now += Duration::from_millis(50 * u64::from(bytes.first().copied().unwrap_or(1)));
                us.tick(now, &mut scratch, &mut said);
                peer.tick(now, &mut scratch, &mut answers);
            }
            _ => {}
        }
        given.append(&mut said.inner);
        // Toward the peer the network is kind.
        for message in said.network {
            let _ = peer.receive(PEER_AT, &message, now, &mut packet, &mut scratch, &mut answers);
        }
        wire.append(&mut answers.network);
    }
    (sent, given)
}
