//! What a new leader does before its first write: it reads everything again.

use std::time::Duration;

use tokio::time::Instant;

use super::Reconciler;

/// How long a new leader waits at most for new lists of ClusterMeshes, Nodes and Peers before it writes. If one of these lists is
/// still missing then, the leader plans with the old list and writes. The old list does not count as current, so it causes no
/// delete.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The last time that this replica became the leader.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// The number of the leader's term.
    term: Option<u64>,
    /// The end of [`MAX_WAIT`].
    until: Option<Instant>,
}

impl Reconciler {
    /// Whether this replica has just become the leader and must not write yet.
    ///
    /// Another leader may have written what this replica has not seen: after an interruption of this replica's connections, its
    /// watches are behind until TCP sends the lost packets again. If its old lists of Nodes and ClusterMeshes counted as current,
    /// its plan would delete newer Peers.
    pub(super) fn is_taking_over(&mut self) -> bool {
        let term = self.hub.election.term_number();
        if term != self.takeover.term {
            self.takeover = Takeover {
                term,
                until: Some(Instant::now() + MAX_WAIT),
            };
            self.meshes.feed.read_again(crate::feed::Cluster::Same);
            self.members.values().for_each(|member| member.session.read_again());
            return true;
        }
        let mut sessions = self.members.values().map(|member| &member.session);
        let mut needs_lists = || self.meshes.feed.needs_list() || sessions.any(|session| session.needs_lists());
        self.takeover.until.is_some_and(|until| Instant::now() < until) && needs_lists()
    }
}
