//! Copies of the rows of the two largest feeds. All observations share these copies.

use std::sync::{Arc, Mutex, PoisonError};

use clustermesh_core::observe::{Node, ObservedPeer, Rows};

use super::MemberFeeds;

/// The Nodes and Peers of a member as they were last observed. In a large mesh nearly all observed objects are Nodes and Peers,
/// and few of them change from one observation to the next.
#[derive(Debug, Default)]
pub(super) struct Copies(Mutex<(Rows<Node>, Rows<ObservedPeer>)>);

impl Copies {
    /// Updates the copies with the rows that changed, and returns them.
    pub(super) fn update(&self, feeds: &MemberFeeds) -> (Rows<Node>, Rows<ObservedPeer>) {
        let mut copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (nodes, peers) = &mut *copies;
        feeds.nodes.update(nodes, |row| Arc::clone(&row.node));
        feeds.peers.update(peers, Arc::clone);
        (nodes.clone(), peers.clone())
    }
}
