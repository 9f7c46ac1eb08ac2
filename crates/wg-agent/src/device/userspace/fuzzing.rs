//! A session in memory that a script of bytes may do anything to: for the fuzz targets (fuzz/) and their corpus, no part of the agent.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use x25519_dalek::StaticSecret;

use super::tunnel::{Inner, Local, Output, Tunnel};

/// The largest packet of a script, and room for what a message adds.
const BUFFER: usize = 4096;

impl Output for Vec<Vec<u8>> {
    fn network(&mut self, datagram: &[u8]) {
        self.push(datagram.to_vec());
    }
}

/// Runs a script: each step is a letter, a length and so many bytes. The peer of the session keeps to the protocol; the network does what
/// the script says. Returns what the peer sent and what was given to the interface.
#[must_use]
pub fn run(script: &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut now = Instant::now();
    let [ours, theirs] = [1, 2].map(|number| Arc::new(Local::new(StaticSecret::from([number; 32]))));
    let mut us = Tunnel::new(Arc::clone(&ours), theirs.public, None, 1, None, now);
    let mut peer = Tunnel::new(theirs, ours.public, None, 2, None, now);
    let mut scratch = vec![0; BUFFER];
    let (mut sent, mut given) = (Vec::new(), Vec::new());
    // What is under way to us; anything may become of it.
    let mut wire: Vec<Vec<u8>> = Vec::new();
    let mut rest = script;
    while let [step, length, after @ ..] = rest {
        let (bytes, following) = after.split_at(after.len().min(usize::from(*length) * 4));
        rest = following;
        let (mut said, mut answers) = (Vec::new(), Vec::new());
        let mut hear = |us: &mut Tunnel, message: Vec<u8>, said: &mut Vec<Vec<u8>>| {
            let mut plain = vec![0; BUFFER];
            if let Ok(received) = us.receive(&message, now, &mut plain, &mut scratch, said)
                && let Inner::Packet(length, _) = received.inner
            {
                given.push(plain[..length].to_vec());
            }
        };
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
                hear(&mut us, message, &mut said);
            }
            // The newest one arrives changed, or cut, or once more.
            b'c' => {
                if let Some(mut message) = wire.last().cloned() {
                    for (at, change) in bytes.iter().enumerate() {
                        let at = at * 7 % message.len().max(1);
                        message[at] ^= change;
                    }
                    message.truncate(message.len() - bytes.len() % message.len().max(1));
                    hear(&mut us, message, &mut said);
                }
            }
            // Anything arrives.
            b'r' => hear(&mut us, bytes.to_vec(), &mut said),
            // Time passes.
            b't' => {
                now += Duration::from_millis(50 * u64::from(bytes.first().copied().unwrap_or(1)));
                us.tick(now, &mut scratch, &mut said);
                peer.tick(now, &mut scratch, &mut answers);
            }
            _ => {}
        }
        // Toward the peer the network is kind.
        let mut plain = vec![0; BUFFER];
        for message in said {
            let _ = peer.receive(&message, now, &mut plain, &mut scratch, &mut answers);
        }
        wire.append(&mut answers);
    }
    (sent, given)
}
