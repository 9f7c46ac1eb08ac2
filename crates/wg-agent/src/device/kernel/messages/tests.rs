use std::fmt::Write as _;

use clustermesh_agent_core::key::PresharedKey;

use super::*;

fn key(number: u8) -> PublicKey {
    PublicKey::new([number; 32])
}

fn allowed_ips(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn socket(text: &str) -> Option<SocketAddr> {
    Some(text.parse().unwrap())
}

/// Renders each entry as a line, such as `1 update-only endpoint=.. +10.0.0.0/8`. A key of equal bytes is rendered as one
/// byte, the key of a temporary peer as `temporary`.
fn lines(messages: &[Vec<WireguardPeer>]) -> Vec<String> {
    messages.iter().flatten().map(entry).collect()
}

fn entry(peer: &WireguardPeer) -> String {
    let mut line = String::new();
    for attribute in &peer.0 {
        match attribute {
            Attribute::PublicKey(key) if *key == [key[0]; 32] => write!(line, "{}", key[0]),
            Attribute::PublicKey(_) => write!(line, "temporary"),
            Attribute::Flags(Flags::RemoveMe) => write!(line, " remove"),
            Attribute::Flags(Flags::UpdateOnly) => write!(line, " update-only"),
            Attribute::Flags(Flags::ReplaceAllowedIps) => write!(line, " replace"),
            Attribute::PresharedKey(key) => write!(line, " psk={}", key[0]),
            Attribute::Endpoint(at) => write!(line, " endpoint={at}"),
            Attribute::PersistentKeepalive(seconds) => write!(line, " keepalive={seconds}"),
            Attribute::AllowedIps(all) => all.iter().try_for_each(|range| match &range.0[1..] {
                [WireguardAllowedIpAttr::IpAddr(ip), WireguardAllowedIpAttr::Cidr(bits)] => {
                    write!(line, " +{ip}/{bits}")
                }
                other => write!(line, " {other:?}"),
            }),
            other => write!(line, " {other:?}"),
        }
        .unwrap();
    }
    line
}

#[test]
fn toggled_keepalive_starts_handshake_with_new_peer() {
    let spec = PeerSpec {
        endpoint: socket("192.0.2.1:51820"),
        keepalive: None,
        preshared_key: PresharedKey::new([5; 32]),
        allowed_ips: allowed_ips(&["10.1.0.0/16", "fd01::/64"]),
    };
    let without_endpoint = PeerSpec {
        endpoint: None,
        keepalive: NonZeroU16::new(10),
        ..PeerSpec::default()
    };
    let changes = [PeerChange::Add(key(1), spec), PeerChange::Add(key(2), without_endpoint)];
    assert_eq!(
        lines(&plan(&Peers::new(), &LiveEndpoints::new(), &changes)),
        [
            "1 replace psk=5 endpoint=192.0.2.1:51820 +10.1.0.0/16 +fd01::/64",
            "1 update-only keepalive=0",
            "1 update-only keepalive=25",
            "1 update-only keepalive=0",
            "2 replace keepalive=10",
        ]
    );
}

#[test]
fn update_moves_removed_allowed_ip_and_starts_handshake() {
    let peers: Peers = [
        (
            key(1),
            PeerSpec {
                allowed_ips: allowed_ips(&["10.1.0.0/16", "10.2.0.0/16"]),
                ..PeerSpec::default()
            },
        ),
        (
            key(2),
            PeerSpec {
                allowed_ips: allowed_ips(&["10.3.0.0/16"]),
                ..PeerSpec::default()
            },
        ),
    ]
    .into();
    let update = PeerUpdate {
        // A new endpoint starts a handshake: the keepalive is turned off and on.
        endpoint: socket("192.0.2.1:7"),
        keepalive: Some(NonZeroU16::new(9)),
        add_allowed_ips: allowed_ips(&["10.3.0.0/16"]),
        // Peer 1 does not have 10.9.0.0/16, so only 10.2.0.0/16 moves to the temporary peer.
        remove_allowed_ips: allowed_ips(&["10.2.0.0/16", "10.9.0.0/16"]),
        ..PeerUpdate::default()
    };
    let changes = [
        PeerChange::Update(key(1), update),
        PeerChange::Remove(key(2)),
        // No peer has this key, so both changes are ignored.
        PeerChange::Remove(key(3)),
        PeerChange::Update(key(3), PeerUpdate::default()),
    ];
    assert_eq!(
        lines(&plan(&peers, &LiveEndpoints::new(), &changes)),
        [
            "temporary +10.2.0.0/16",
            "temporary remove",
            "1 update-only endpoint=192.0.2.1:7",
            "1 update-only keepalive=0",
            "1 update-only keepalive=9",
            "1 update-only +10.3.0.0/16",
            "2 remove",
        ]
    );
}

#[test]
fn new_preshared_key_recreates_the_peer_at_its_live_endpoint() {
    let peers: Peers = [(
        key(1),
        PeerSpec {
            endpoint: socket("192.0.2.1:1"),
            allowed_ips: allowed_ips(&["10.1.0.0/16"]),
            ..PeerSpec::default()
        },
    )]
    .into();
    let live = [(key(1), "192.0.2.77:1".parse().unwrap())].into();
    let update = PeerUpdate {
        preshared_key: Some(PresharedKey::new([8; 32])),
        ..PeerUpdate::default()
    };
    assert_eq!(
        lines(&plan(&peers, &live, &[PeerChange::Update(key(1), update)])),
        [
            "1 remove",
            "1 replace psk=8 endpoint=192.0.2.77:1 +10.1.0.0/16",
            "1 update-only keepalive=0",
            "1 update-only keepalive=25",
            "1 update-only keepalive=0",
        ]
    );
}

#[test]
fn many_allowed_ips_are_split_into_messages_below_a_page() {
    let many: BTreeSet<IpNet> = (0..1_000_u32)
        .map(|n| IpNet::new((0xfd00_u128 << 112 | u128::from(n)).to_be_bytes().into(), 128).unwrap())
        .collect();
    let changes = [PeerChange::Add(
        key(1),
        PeerSpec {
            allowed_ips: many.clone(),
            ..PeerSpec::default()
        },
    )];
    let messages = plan(&Peers::new(), &LiveEndpoints::new(), &changes);
    let sizes: Vec<usize> = messages
        .iter()
        .map(|message| message.iter().map(|peer| peer.value_len() + 4).sum())
        .collect();
    assert!(sizes.iter().all(|size| *size < 4_000), "{sizes:?}");
    let lines = lines(&messages);
    assert!(
        lines[0].starts_with("1 replace keepalive=0 +fd00::/128"),
        "{}",
        lines[0]
    );
    assert!(lines[1..].iter().all(|line| line.starts_with("1 update-only +")));
    assert_eq!(
        lines.iter().map(|line| line.matches('+').count()).sum::<usize>(),
        many.len()
    );
}
