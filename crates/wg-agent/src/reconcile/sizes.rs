//! How large packets may be: where each peer is now, and what the way there carries. What follows for the device and the
//! routes is decided in [`clustermesh_agent_core::mtu`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::{
    compile::Peer,
    mtu::{self, Path, Sizes},
    numbers::MARK_UNDERLAY,
    prefixes::Family,
};
use clustermesh_core::key::PublicKey;

use super::Reconciler;
use crate::{
    args::Mtu,
    endpoints::Tracks,
    firewall::Backend,
    route::{Routing, paths},
};

/// Where packets to each peer go while nothing better is known of it: the first of its endpoints.
pub(super) type Ends = BTreeMap<PublicKey, SocketAddr>;

/// The first endpoint of each Peer that has one.
pub(super) fn ends(peers: &[Peer]) -> Ends {
    let end = |peer: &Peer| {
        Some((
            peer.public_key,
            peer.endpoint.or_else(|| peer.candidates.first().copied())?,
        ))
    };
    peers.iter().filter_map(end).collect()
}

/// Asks the kernel. `underlay` is the MTU of the interface that outer packets leave by.
pub(super) fn sizes(wanted: Mtu, underlay: u16, ends: &Ends, tracks: &Tracks) -> io::Result<Sizes> {
    if let Mtu::Fixed(device) = wanted {
        return Ok(Sizes {
            device,
            narrow: BTreeMap::new(),
        });
    }
    let mut peers: BTreeMap<PublicKey, IpAddr> = ends.iter().map(|(key, at)| (*key, at.ip().to_canonical())).collect();
    for (key, at) in tracks.live().iter().map(|(key, at)| (key, *at)).chain(tracks.toward()) {
        peers.insert(*key, at.ip().to_canonical());
    }
    let carried = paths::mtus(&peers.values().copied().collect::<BTreeSet<_>>(), MARK_UNDERLAY)?;
    let path = |(key, at): (&PublicKey, &IpAddr)| {
        let path = Path {
            mtu: *carried.get(at)?,
            outer: Family::of(&(*at).into()),
        };
        Some((*key, path))
    };
    Ok(mtu::auto(underlay, &peers.iter().filter_map(path).collect()))
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Whether the ways to the peers carry other packets than at the last pass: a peer is heard from elsewhere, or the
    /// kernel was told of a narrower way, of which it makes no event.
    pub(crate) fn ways_changed(&self) -> bool {
        let Some(current) = &self.current else { return false };
        match sizes(self.parts.config.mtu, current.underlay.mtu, &current.ends, &self.tracks) {
            Ok(sizes) => sizes != current.sizes,
            Err(error) => {
                tracing::debug!(%error, "cannot ask for the routes to the peers' endpoints");
                false
            }
        }
    }
}
