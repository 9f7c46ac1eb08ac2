//! Makes WireGuard messages and inner packets by hand. The socket of a [`RawPeer`] sends them.

use std::net::UdpSocket;

use boringtun::noise::{Tunn, TunnResult};
use x25519_dalek::StaticSecret;

use super::{TIMEOUT, Testbed, VICTIM, secret};

/// A WireGuard peer on a UDP socket of the attacker. It can send messages and inner packets that no real device sends.
pub(crate) struct RawPeer {
    core: Tunn,
    pub(crate) socket: UdpSocket,
}

impl RawPeer {
    /// A peer with this private key, at a free source port.
    pub(crate) fn new(testbed: &Testbed, private_key: StaticSecret) -> Self {
        let socket = testbed.attacker.enter(|| {
            let socket = UdpSocket::bind((testbed.outer.attacker, 0)).expect("bind");
            socket.connect(testbed.victim_endpoint()).expect("connect");
            socket
        });
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        let victim = x25519_dalek::PublicKey::from(&secret(VICTIM));
        Self {
            core: Tunn::new(private_key, victim, None, None, 1, None),
            socket,
        }
    }

    /// Makes a handshake initiation, and does not send it.
    pub(crate) fn initiation(&mut self) -> Vec<u8> {
        let mut buffer = vec![0; 2048];
        match self.core.format_handshake_initiation(&mut buffer, true) {
            TunnResult::WriteToNetwork(message) => message.to_vec(),
            other => panic!("{other:?} for an initiation"),
        }
    }

    /// Establishes a session with the victim. Returns the initiation.
    pub(crate) fn handshake(&mut self) -> Vec<u8> {
        let initiation = self.initiation();
        self.socket.send(&initiation).expect("send");
        let (mut response, mut buffer) = ([0; 2048], vec![0; 2048]);
        let length = self.socket.recv(&mut response).expect("a response");
        match self.core.decapsulate(None, &response[..length], &mut buffer) {
            TunnResult::WriteToNetwork(keepalive) => drop(self.socket.send(keepalive).expect("send")),
            other => panic!("{other:?} for a response"),
        }
        initiation
    }

    /// Encrypts an inner packet into a data message, and does not send it.
    pub(crate) fn seal(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut buffer = vec![0; packet.len() + 64];
        match self.core.encapsulate(packet, &mut buffer) {
            TunnResult::WriteToNetwork(message) => message.to_vec(),
            other => panic!("{other:?} for a packet"),
        }
    }
}

/// An inner IPv4 UDP packet from port 12345 to `port` of the victim, without a UDP checksum, which IPv4 allows.
pub(crate) fn udp(from: [u8; 4], port: u16, text: &[u8]) -> Vec<u8> {
    let length = 28 + text.len() as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0];
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    packet.extend(from);
    packet.extend([10, 9, 0, VICTIM]);
    let sum = packet
        .chunks(2)
        .fold(0_u32, |sum, pair| sum + u32::from(pair[0]) * 256 + u32::from(pair[1]));
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend([0x30, 0x39]);
    packet.extend(port.to_be_bytes());
    packet.extend((length - 20).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(text);
    packet
}
