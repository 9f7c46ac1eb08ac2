//! Looks up the path MTU to each peer's endpoint. [`clustermesh_agent_core::mtu`] computes the MTUs of the device
//! and of the routes from the path MTUs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::{
    compile::Peer,
    mtu::{self, Path, Sizes},
    numbers::MARK_UNDERLAY,
    prefixes::Family,
};
use clustermesh_core::key::PublicKey;
use clustermesh_netlink::Error as NetlinkError;

use super::Reconciler;
use crate::{
    args::Mtu,
    firewall::Backend,
    peer_tracker::PeerTracker,
    route::{Routing, paths},
};

/// The first endpoint of each peer, used while the tracker knows no endpoint of the peer.
pub(super) type FirstEndpoints = BTreeMap<PublicKey, SocketAddr>;

/// The first endpoint of each Peer that has one.
pub(super) fn first_endpoints(peers: &[Peer]) -> FirstEndpoints {
    let first = |peer: &Peer| {
        Some((
            peer.public_key,
            peer.endpoint.or_else(|| peer.candidates.first().copied())?,
        ))
    };
    peers.iter().filter_map(first).collect()
}

/// Looks up the path MTUs in the kernel, and computes the packet sizes. A fixed MTU needs no lookup and gives no MTUs of peers.
/// `underlay_mtu` is the MTU of the interface by which outer packets leave.
pub(super) fn packet_sizes(
    wanted: Mtu,
    underlay_mtu: u16,
    first_endpoints: &FirstEndpoints,
    tracker: &PeerTracker,
) -> Result<Sizes, NetlinkError> {
    if let Mtu::Fixed(device) = wanted {
        return Ok(Sizes {
            device,
            peer_mtus: BTreeMap::new(),
        });
    }
    let mut peers: BTreeMap<PublicKey, IpAddr> = first_endpoints
        .iter()
        .map(|(key, endpoint)| (*key, endpoint.ip().to_canonical()))
        .collect();
    // A later entry replaces an earlier one: best is the destination of outer packets, then the endpoint from which the peer last sent,
    // then the first endpoint.
    for (key, endpoint) in tracker
        .live_endpoints()
        .iter()
        .map(|(key, endpoint)| (key, *endpoint))
        .chain(tracker.outer_destinations())
    {
        peers.insert(*key, endpoint.ip().to_canonical());
    }
    let mtus = paths::mtus(&peers.values().copied().collect::<BTreeSet<_>>(), MARK_UNDERLAY)?;
    let path = |(key, address): (&PublicKey, &IpAddr)| {
        let path = Path {
            mtu: *mtus.get(address)?,
            outer: Family::of(&(*address).into()),
        };
        Some((*key, path))
    };
    Ok(mtu::auto(underlay_mtu, &peers.iter().filter_map(path).collect()))
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Whether packet sizes differ from those of the last pass, because a peer roamed or a path MTU changed. The kernel sends
    /// no notification of a new path MTU. False if the lookup fails or no pass has applied sizes.
    pub(crate) fn packet_sizes_changed(&self) -> bool {
        let Some(applied) = &self.applied else { return false };
        match packet_sizes(
            self.deps.config.mtu,
            applied.underlay.mtu,
            &applied.first_endpoints,
            &self.tracker,
        ) {
            Ok(sizes) => sizes != applied.sizes,
            Err(error) => {
                tracing::debug!(%error, "cannot look up the routes to the peers' endpoints");
                false
            }
        }
    }
}
