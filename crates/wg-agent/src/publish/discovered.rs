//! Chooses the peers whose endpoints this node publishes (`kilo.squat.ai/discovered-endpoints`), so that other members can reach
//! nodes behind NATs.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    net::SocketAddr,
};

use clustermesh_core::key::PublicKey;

/// The largest number of published endpoints. An endpoint takes about 100 bytes, and every watcher of Nodes receives all of them.
const MAX_ENDPOINTS: usize = 100;

/// A peer with a live session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LivePeer<'a> {
    pub(crate) key: PublicKey,
    /// The address and port from which it last sent.
    pub(crate) endpoint: SocketAddr,
    /// The endpoints in its Peer.
    pub(crate) candidates: &'a [SocketAddr],
}

/// Returns the endpoints of live peers, at most [`MAX_ENDPOINTS`]: those that the peer's own Peer object does not contain, and those in
/// `published`, the current annotation.
///
/// The second condition is needed because the controller adds a published endpoint to the Peers in this cluster, too. Without it, this
/// node would stop publishing the endpoint, the controller would remove it from the Peers, and this node would publish it again.
pub(crate) fn endpoints<'a>(
    node: &str,
    peers: impl Iterator<Item = LivePeer<'a>>,
    published: &BTreeMap<PublicKey, SocketAddr>,
) -> BTreeMap<PublicKey, SocketAddr> {
    let is_discovered = |peer: &LivePeer<'_>| {
        !peer.candidates.contains(&peer.endpoint) || published.get(&peer.key) == Some(&peer.endpoint)
    };
    let mut found: Vec<(PublicKey, SocketAddr)> = peers
        .filter(is_discovered)
        .map(|peer| (peer.key, peer.endpoint))
        .collect();
    if found.len() > MAX_ENDPOINTS {
        // Each node chooses a different subset, so that many nodes together publish most of them.
        found.sort_by_cached_key(|(key, _)| {
            let mut hasher = DefaultHasher::new();
            (node, key).hash(&mut hasher);
            hasher.finish()
        });
        found.truncate(MAX_ENDPOINTS);
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn key(n: u8) -> PublicKey {
        PublicKey::new([n; 32])
    }

    #[test]
    fn endpoint_that_is_no_candidate_is_published_until_peer_moves() {
        let (internal, nat, moved) = (
            socket("192.168.2.1:51820"),
            socket("198.51.100.9:40001"),
            socket("198.51.100.9:40002"),
        );
        let publish = |endpoint, candidates: &[SocketAddr], published: &BTreeMap<_, _>| {
            let key = key(1);
            let peer = LivePeer {
                key,
                endpoint,
                candidates,
            };
            endpoints("a", std::iter::once(peer), published)
        };
        let nothing = BTreeMap::new();
        assert_eq!(
            publish(internal, &[internal], &nothing),
            nothing,
            "the Peer already has it"
        );
        let first = publish(nat, &[internal], &nothing);
        assert_eq!(first, [(key(1), nat)].into());
        let as_candidate = [nat, internal];
        assert_eq!(
            publish(nat, &as_candidate, &first),
            first,
            "the controller has added it"
        );
        assert_eq!(
            publish(nat, &as_candidate, &nothing),
            nothing,
            "another node publishes it"
        );
        assert_eq!(publish(moved, &as_candidate, &first), [(key(1), moved)].into());
        assert_eq!(publish(internal, &as_candidate, &first), nothing);
        assert_eq!(endpoints("a", std::iter::empty(), &first), nothing, "no live session");
    }

    #[test]
    fn nodes_choose_different_endpoints_of_many() {
        let peers = || {
            (0..200).map(|n| LivePeer {
                key: key(n),
                endpoint: socket("198.51.100.9:40001"),
                candidates: &[],
            })
        };
        let [a, b] = ["a", "b"].map(|node| endpoints(node, peers(), &BTreeMap::new()));
        assert_eq!((a.len(), b.len()), (MAX_ENDPOINTS, MAX_ENDPOINTS));
        assert_ne!(a, b);
        assert_eq!(endpoints("a", peers(), &a), a, "the choice is stable");
    }
}
