//! Finds what differs between two observations.

use std::collections::BTreeMap;

use super::NotFollowed;
use crate::{
    mesh::ClusterIdentity,
    observe::{ChangedRow, Member, Node, Observation, Observations, ObservedPeer},
};

/// What differs between two observations of one member.
#[derive(Debug)]
pub(super) struct MemberChanges<'a> {
    pub(super) nodes: Vec<ChangedRow<'a, Node>>,
    pub(super) peers: Vec<ChangedRow<'a, ObservedPeer>>,
    /// The present observation, if it became fresh or stale, or is stale for another reason.
    pub(super) freshness: Option<&'a Observation<Member>>,
}

/// The members whose Nodes, Peers or freshness changed.
///
/// # Errors
/// Something else changed.
pub(super) fn find<'a>(
    before: &'a Observations,
    after: &'a Observations,
) -> Result<BTreeMap<&'a ClusterIdentity, MemberChanges<'a>>, NotFollowed> {
    let Observations { members, hub, resolved } = after;
    if before.hub != *hub || before.resolved != *resolved {
        return Err("the hub's id or the address of a host name changed");
    }
    if !before.members.keys().eq(members.keys()) {
        return Err("a member was added or removed");
    }
    // Two identities of one cluster differ only in the key of the Secret's data ([`ClusterIdentity::same_cluster`]).
    let identities = || members.keys();
    if identities().any(|identity| identities().filter(|other| other.same_cluster(identity)).count() > 1) {
        return Err("a cluster is observed through two keys of one Secret");
    }
    let mut changes = BTreeMap::new();
    for ((identity, before), after) in before.members.iter().zip(members.values()) {
        let is_same_state =
            before.state_name() == after.state_name() && before.not_fresh_reason() == after.not_fresh_reason();
        let (Some(last_before), Some(last)) = (before.last(), after.last()) else {
            if is_same_state {
                continue;
            }
            return Err("the state of a member that is or was not observed changed");
        };
        let changed = MemberChanges {
            freshness: (!is_same_state).then_some(after),
            ..compare(last_before, last)?
        };
        if !changed.nodes.is_empty() || !changed.peers.is_empty() || changed.freshness.is_some() {
            changes.insert(identity, changed);
        }
    }
    Ok(changes)
}

/// Compares the observed objects.
fn compare<'a>(before: &'a Member, after: &'a Member) -> Result<MemberChanges<'a>, NotFollowed> {
    let Member {
        uid,
        nodes,
        peers,
        policies,
        accesses,
        gateways,
        services,
        slices,
        pods,
        unlisted,
        api_endpoints,
    } = after;
    let is_same = *uid == before.uid
        && *policies == before.policies
        && *accesses == before.accesses
        && *gateways == before.gateways
        && *services == before.services
        && *slices == before.slices
        && *pods == before.pods
        && *unlisted == before.unlisted
        && *api_endpoints == before.api_endpoints;
    if !is_same {
        return Err("an object other than a Node or Peer changed");
    }
    let peers = match (&before.peers, peers) {
        (None, None) => Vec::new(),
        (Some(before), Some(after)) => after.changes_since(before),
        _ => return Err("the Peer CRD was installed or removed"),
    };
    Ok(MemberChanges {
        nodes: nodes.changes_since(&before.nodes),
        peers,
        freshness: None,
    })
}
