use proptest::prelude::*;

use super::*;

fn key(n: u8) -> PublicKey {
    PublicKey::new([n; 32])
}

fn spec(endpoint: &str, allowed_ips: &[&str]) -> PeerSpec {
    PeerSpec {
        endpoint: Some(endpoint.parse().expect("endpoint")),
        allowed_ips: allowed_ips.iter().map(|net| net.parse().expect("network")).collect(),
        ..PeerSpec::default()
    }
}

fn observed(peers: &Peers) -> ObservedPeers {
    peers
        .iter()
        .map(|(key, spec)| {
            (
                *key,
                ObservedPeer {
                    configured: spec.clone(),
                    stats: PeerStats::default(),
                },
            )
        })
        .collect()
}

#[test]
fn device_in_the_desired_state_needs_no_change() {
    let peers = Peers::from([(key(1), spec("192.0.2.1:51820", &["10.0.0.0/24"]))]);
    assert_eq!(diff(&observed(&peers), &peers), None);
}

#[test]
fn stats_and_roamed_endpoint_are_no_difference() {
    let peers = Peers::from([(key(1), spec("192.0.2.1:51820", &["10.0.0.0/24"]))]);
    let mut seen = observed(&peers);
    seen.get_mut(&key(1)).expect("peer").stats = PeerStats {
        endpoint: Some("198.51.100.7:4000".parse().expect("endpoint")),
        handshake_age: Some(Duration::from_secs(7)),
        rx_bytes: 1,
        tx_bytes: 2,
    };
    assert_eq!(diff(&seen, &peers), None);
}

#[test]
fn endpoint_that_is_no_longer_known_is_kept() {
    let had = Peers::from([(key(1), spec("192.0.2.1:51820", &["10.0.0.0/24"]))]);
    let mut want = had.clone();
    want.get_mut(&key(1)).expect("peer").endpoint = None;
    assert_eq!(diff(&observed(&had), &want), None);
}

#[test]
fn moving_allowed_ip_is_added_before_old_owner_is_removed() {
    let had = Peers::from([(key(1), spec("192.0.2.1:51820", &["10.0.0.0/24"]))]);
    let want = Peers::from([(key(2), spec("192.0.2.2:51820", &["10.0.0.0/24"]))]);
    assert_eq!(
        diff(&observed(&had), &want),
        Some(vec![
            PeerChange::Add(key(2), want[&key(2)].clone()),
            PeerChange::Remove(key(1))
        ])
    );
}

#[test]
fn update_contains_only_differences() {
    let had = Peers::from([(key(1), spec("192.0.2.1:51820", &["10.0.0.0/24", "10.0.1.0/24"]))]);
    let mut want = Peers::from([(key(1), spec("192.0.2.9:51820", &["10.0.0.0/24", "10.0.2.0/24"]))]);
    want.get_mut(&key(1)).expect("peer").keepalive = NonZeroU16::new(25);
    let changes = diff(&observed(&had), &want).expect("a change");
    assert_eq!(
        changes,
        vec![PeerChange::Update(
            key(1),
            PeerUpdate {
                endpoint: Some("192.0.2.9:51820".parse().expect("endpoint")),
                keepalive: Some(NonZeroU16::new(25)),
                preshared_key: None,
                add_allowed_ips: ["10.0.2.0/24".parse().expect("network")].into(),
                remove_allowed_ips: ["10.0.1.0/24".parse().expect("network")].into(),
            }
        )]
    );
    assert_eq!(
        changes[0].to_string(),
        format!(
            "update peer {}: endpoint 192.0.2.9:51820 keepalive 25s +10.0.2.0/24 -10.0.1.0/24",
            key(1)
        )
    );
}

/// Each peer has an endpoint, because [`diff`] keeps an endpoint that is no longer desired.
fn any_peers() -> impl Strategy<Value = Peers> {
    // At most one owner for each of eight prefixes.
    let owners = prop::collection::vec(prop::option::of(0u8..5), 8);
    let attributes = prop::collection::vec((any::<bool>(), 1u16..4, 0u16..3, 0u8..3), 5);
    (owners, attributes).prop_map(|(owners, attributes)| {
        let mut peers = Peers::new();
        for (n, (present, port, keepalive, secret)) in (0u8..).zip(attributes) {
            if present {
                let endpoint = format!("192.0.2.{n}:{port}").parse().expect("endpoint");
                let keepalive = NonZeroU16::new(keepalive);
                let preshared_key = PresharedKey::new([secret; 32]);
                let spec = PeerSpec {
                    endpoint: Some(endpoint),
                    keepalive,
                    preshared_key,
                    allowed_ips: BTreeSet::new(),
                };
                peers.insert(key(n + 1), spec);
            }
        }
        for (n, owner) in (0u8..).zip(owners) {
            if let Some(spec) = owner.and_then(|owner| peers.get_mut(&key(owner + 1))) {
                spec.allowed_ips
                    .insert(format!("10.{n}.0.0/16").parse().expect("network"));
            }
        }
        peers
    })
}

proptest! {
    #[test]
    fn any_desired_peers_with_endpoints_are_reached_by_one_diff(had in any_peers(), want in any_peers()) {
        let mut now = had.clone();
        if let Some(changes) = diff(&observed(&had), &want) {
            apply(&mut now, &changes);
        }
        prop_assert_eq!(&now, &want);
        prop_assert_eq!(diff(&observed(&now), &want), None);
    }

    #[test]
    fn allowed_ip_that_stays_has_an_owner_at_every_step(had in any_peers(), want in any_peers()) {
        let owned = |peers: &Peers| -> BTreeSet<IpNet> {
            peers.values().flat_map(|spec| spec.allowed_ips.iter().copied()).collect()
        };
        let kept: BTreeSet<IpNet> = owned(&had).intersection(&owned(&want)).copied().collect();
        let mut now = had.clone();
        for change in diff(&observed(&had), &want).unwrap_or_default() {
            apply(&mut now, &[change]);
            prop_assert!(kept.is_subset(&owned(&now)));
        }
    }
}
