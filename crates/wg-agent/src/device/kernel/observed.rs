//! Parses the netlink messages of a WireGuard device dump.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    num::NonZeroU16,
    time::{Duration, SystemTime},
};

use clustermesh_agent_core::{
    device::{PeerSpec, PeerStats},
    key::PresharedKey,
};
use clustermesh_core::key::PublicKey;
use ipnet::IpNet;
use netlink_packet_wireguard::{
    WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute, WireguardMessage, WireguardPeer,
    WireguardPeerAttribute as Attribute,
};
use zeroize::Zeroize;

/// The values in a dump of a kernel device.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceDump {
    pub(super) name: String,
    /// `None` = the device has no private key.
    pub(super) public_key: Option<[u8; 32]>,
    pub(super) listen_port: u16,
    pub(super) fwmark: u32,
    /// The peers. Both structs contain the endpoint that the kernel uses now.
    pub(super) peers: BTreeMap<PublicKey, (PeerSpec, PeerStats)>,
}

/// Parses one dump. A peer with many allowed IPs is spread over several messages.
pub(super) fn parse_dump(messages: Vec<WireguardMessage>, now: SystemTime) -> DeviceDump {
    let mut seen = DeviceDump::default();
    for attribute in messages.into_iter().flat_map(|message| message.attributes) {
        match attribute {
            WireguardAttribute::IfName(name) => seen.name = name,
            WireguardAttribute::PublicKey(key) => seen.public_key = Some(key),
            WireguardAttribute::PrivateKey(mut key) => key.zeroize(),
            WireguardAttribute::ListenPort(port) => seen.listen_port = port,
            WireguardAttribute::Fwmark(mark) => seen.fwmark = mark,
            WireguardAttribute::Peers(peers) => peers.into_iter().for_each(|peer| add_peer(&mut seen, peer, now)),
            _ => {}
        }
    }
    seen
}

/// Adds the attributes of `peer` to those that earlier messages of the dump contained.
fn add_peer(seen: &mut DeviceDump, peer: WireguardPeer, now: SystemTime) {
    let key = peer.0.iter().find_map(|attribute| match attribute {
        Attribute::PublicKey(key) => Some(PublicKey::new(*key)),
        _ => None,
    });
    let Some(key) = key else { return };
    let (spec, stats) = seen.peers.entry(key).or_default();
    for attribute in peer.0 {
        match attribute {
            Attribute::PresharedKey(mut key) => {
                spec.preshared_key = PresharedKey::new(key);
                key.zeroize();
            }
            Attribute::Endpoint(endpoint) => {
                let endpoint = SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port());
                (spec.endpoint, stats.endpoint) = (Some(endpoint), Some(endpoint));
            }
            Attribute::PersistentKeepalive(seconds) => spec.keepalive = NonZeroU16::new(seconds),
            Attribute::LastHandshake(at) => stats.handshake_age = age(at.seconds, at.nano_seconds, now),
            Attribute::RxBytes(bytes) => stats.rx_bytes = bytes,
            Attribute::TxBytes(bytes) => stats.tx_bytes = bytes,
            Attribute::AllowedIps(all) => spec.allowed_ips.extend(all.iter().filter_map(allowed_ip)),
            _ => {}
        }
    }
}

/// The age of a handshake at the given time; `None` = no handshake yet, which the kernel reports as time 0. The kernel
/// uses wall-clock time: after the clock was set back, a handshake may lie in the future and has age 0.
fn age(seconds: i64, nanoseconds: i64, now: SystemTime) -> Option<Duration> {
    let at = Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanoseconds).ok()?);
    (!at.is_zero()).then(|| now.duration_since(SystemTime::UNIX_EPOCH + at).unwrap_or_default())
}

fn allowed_ip(attributes: &WireguardAllowedIp) -> Option<IpNet> {
    let (mut address, mut length) = (None, None);
    for attribute in &attributes.0 {
        match attribute {
            WireguardAllowedIpAttr::IpAddr(ip) => address = Some(*ip),
            WireguardAllowedIpAttr::Cidr(bits) => length = Some(*bits),
            _ => {}
        }
    }
    IpNet::new(address?, length?).ok()
}

#[cfg(test)]
mod tests {
    use netlink_packet_wireguard::{WireguardAddressFamily, WireguardCmd, WireguardTimeSpec};

    use super::*;

    fn message(attributes: Vec<WireguardAttribute>) -> WireguardMessage {
        WireguardMessage {
            cmd: WireguardCmd::GetDevice,
            attributes,
        }
    }

    fn allowed(address: &str, bits: u8) -> WireguardAllowedIp {
        WireguardAllowedIp(vec![
            WireguardAllowedIpAttr::Family(WireguardAddressFamily::Ipv4),
            WireguardAllowedIpAttr::IpAddr(address.parse().unwrap()),
            WireguardAllowedIpAttr::Cidr(bits),
        ])
    }

    #[test]
    fn peer_split_over_two_messages_is_one_peer() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let first = WireguardPeer(vec![
            Attribute::PublicKey([7; 32]),
            Attribute::PresharedKey([0; 32]),
            Attribute::Endpoint("[::ffff:192.0.2.1]:51820".parse().unwrap()),
            Attribute::PersistentKeepalive(25),
            Attribute::LastHandshake(WireguardTimeSpec {
                seconds: 990,
                nano_seconds: 500_000_000,
            }),
            Attribute::RxBytes(3),
            Attribute::TxBytes(4),
            Attribute::AllowedIps(vec![allowed("10.1.0.0", 16)]),
        ]);
        let rest = WireguardPeer(vec![
            Attribute::PublicKey([7; 32]),
            Attribute::AllowedIps(vec![allowed("10.2.0.0", 16)]),
        ]);
        let without_handshake = WireguardPeer(vec![
            Attribute::PublicKey([8; 32]),
            Attribute::LastHandshake(WireguardTimeSpec::default()),
        ]);
        let messages = vec![
            message(vec![
                WireguardAttribute::IfName("kilo0".into()),
                WireguardAttribute::ListenPort(51820),
                WireguardAttribute::Fwmark(5),
                WireguardAttribute::PublicKey([9; 32]),
                WireguardAttribute::Peers(vec![first]),
            ]),
            message(vec![WireguardAttribute::Peers(vec![rest, without_handshake])]),
        ];
        let endpoint = Some("192.0.2.1:51820".parse().unwrap());
        let want = DeviceDump {
            name: "kilo0".into(),
            public_key: Some([9; 32]),
            listen_port: 51820,
            fwmark: 5,
            peers: [
                (
                    PublicKey::new([7; 32]),
                    (
                        PeerSpec {
                            endpoint,
                            keepalive: NonZeroU16::new(25),
                            preshared_key: None,
                            allowed_ips: ["10.1.0.0/16", "10.2.0.0/16"]
                                .map(|range| range.parse().unwrap())
                                .into(),
                        },
                        PeerStats {
                            endpoint,
                            handshake_age: Some(Duration::from_millis(9_500)),
                            rx_bytes: 3,
                            tx_bytes: 4,
                        },
                    ),
                ),
                (PublicKey::new([8; 32]), Default::default()),
            ]
            .into(),
        };
        assert_eq!(parse_dump(messages, now), want);
    }

    #[test]
    fn handshake_in_the_future_has_age_zero() {
        assert_eq!(age(2_000, 0, SystemTime::UNIX_EPOCH), Some(Duration::ZERO));
        assert_eq!(age(0, 0, SystemTime::UNIX_EPOCH), None);
    }
}
