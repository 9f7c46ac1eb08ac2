//! Derives the members and links of a graph, and their states, from the ClusterMeshes of the hub.

use std::collections::BTreeMap;

use clustermesh_api::{
    convert,
    mesh::{BrokenLink, ClusterMesh, ClusterStatus},
};
use clustermesh_core::{
    mesh::{Cluster, ClusterIdentity, Mesh},
    plan::{self, Link as Connection},
};
use k8s_openapi::jiff::Timestamp;

use crate::{
    live::cluster_names,
    status::{full_name, snapshot::Snapshot},
};

/// The members of all meshes, and the links between them.
#[derive(Debug)]
pub(super) struct Graph {
    /// When the hub was read.
    pub(super) time: Timestamp,
    /// The hub first, then by name.
    pub(super) members: Vec<Member>,
    /// Sorted by the positions of their members.
    pub(super) links: Vec<Link>,
}

#[derive(Debug, Default)]
pub(super) struct Member {
    /// The name of its entry, as in the output of `plan`.
    pub(super) name: String,
    /// It is the cluster that stores the ClusterMeshes.
    pub(super) is_hub: bool,
    pub(super) is_reachable: bool,
    /// Since when its API server is not reachable.
    pub(super) unreachable_since: Option<Timestamp>,
    pub(super) is_quarantined: bool,
    /// Nodes that are registered in other members.
    pub(super) registered: i64,
    /// Nodes that are left out.
    pub(super) left_out: i64,
    pub(super) gateways: i64,
    has_networks: bool,
}

#[derive(Debug)]
pub(super) struct Link {
    /// Positions in [`Graph::members`], the smaller one first.
    pub(super) ends: (usize, usize),
    pub(super) state: LinkState,
    /// What is wrong; empty if no problem is known.
    pub(super) detail: String,
}

/// The state of a link. The order is from the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LinkState {
    Down,
    Partly,
    /// The API server of a member is not reachable, so the reports of its nodes may be old.
    Unknown,
    /// A member is quarantined.
    Closed,
    /// No tunnel is known to be down.
    Up,
}

impl LinkState {
    pub(super) const ALL: [Self; 5] = [Self::Down, Self::Partly, Self::Unknown, Self::Closed, Self::Up];

    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Partly => "partly up",
            Self::Unknown => "unknown",
            Self::Closed => "closed",
            Self::Up => "up",
        }
    }
}

impl Graph {
    /// Makes the graph. Also returns a note for each mesh that is left out.
    pub(super) fn new(snapshot: &Snapshot) -> (Self, Vec<String>) {
        let mut notes = Vec::new();
        let mut meshes = Vec::new();
        for object in &snapshot.meshes {
            match convert::mesh::to_core(object) {
                Ok((mesh, _)) => meshes.push((object, mesh)),
                Err(findings) => {
                    let findings: Vec<String> = findings.iter().map(ToString::to_string).collect();
                    let (name, why) = (full_name(object), findings.join("; "));
                    notes.push(format!("warning: ClusterMesh {name} is left out: {why}"));
                }
            }
        }
        apply_strictest(&mut meshes);
        let parsed: Vec<Mesh> = meshes.iter().map(|(_, mesh)| mesh.clone()).collect();
        let names = cluster_names(&parsed);
        let mut members: BTreeMap<(bool, &str), Member> = BTreeMap::new();
        for (object, mesh) in &meshes {
            for cluster in &mesh.clusters {
                let Some(name) = names.get(&cluster.identity) else {
                    continue;
                };
                let is_hub = cluster.identity == ClusterIdentity::Local;
                let member = members.entry((!is_hub, name)).or_insert_with(|| Member {
                    name: name.clone(),
                    is_hub,
                    ..Member::default()
                });
                member.add(object, cluster);
            }
        }
        let positions: BTreeMap<&str, usize> = members.keys().zip(0..).map(|((_, name), at)| (*name, at)).collect();
        let position = |cluster: &Cluster| positions.get(&**names.get(&cluster.identity)?).copied();
        let members: Vec<Member> = members.into_values().collect();
        let mut links: BTreeMap<(usize, usize), Link> = BTreeMap::new();
        for (object, mesh) in &meshes {
            for (index, a) in mesh.clusters.iter().enumerate() {
                for b in &mesh.clusters[index + 1..] {
                    let (Ok(connection), Some(at), Some(to)) =
                        (plan::decide_by_entries(a, b), position(a), position(b))
                    else {
                        continue;
                    };
                    let sandbox = match connection {
                        Connection::Meshed => None,
                        // `Sandbox` and `Grantor` are roles of `b`, because `decide_by_entries` gets `b` as the source.
                        Connection::Sandbox => Some(to),
                        Connection::Grantor => Some(at),
                    };
                    let broken = broken_links(object, &a.name, &b.name);
                    let (state, detail) = link_state(&members, (at, to), sandbox, &broken);
                    let ends = (at.min(to), at.max(to));
                    let link = Link { ends, state, detail };
                    let has_worse_or_equal = links.get(&ends).is_some_and(|other| other.state <= state);
                    if !has_worse_or_equal {
                        links.insert(ends, link);
                    }
                }
            }
        }
        let graph = Self {
            time: snapshot.time,
            members,
            links: links.into_values().collect(),
        };
        (graph, notes)
    }

    /// The number of links in a state.
    pub(super) fn count(&self, state: LinkState) -> usize {
        self.links.iter().filter(|link| link.state == state).count()
    }
}

/// Gives a cluster that is in several meshes the most restrictive of its profiles, as the planner does. If one mesh quarantines
/// the cluster, all meshes quarantine it.
fn apply_strictest(meshes: &mut [(&ClusterMesh, Mesh)]) {
    let entries: Vec<Cluster> = meshes.iter().flat_map(|(_, mesh)| mesh.clusters.clone()).collect();
    for cluster in meshes.iter_mut().flat_map(|(_, mesh)| &mut mesh.clusters) {
        for other in entries
            .iter()
            .filter(|other| other.identity.same_cluster(&cluster.identity))
        {
            cluster.profile = cluster.profile.max(other.profile);
            cluster.quarantine |= other.quarantine;
        }
    }
}

impl Member {
    /// Adds what one mesh reports about the member. A node may be registered in several meshes, so the largest counts are kept.
    fn add(&mut self, object: &ClusterMesh, cluster: &Cluster) {
        self.is_quarantined |= cluster.quarantine;
        let status = object.status.as_ref();
        let row = status.and_then(|status| status.clusters.iter().find(|row| row.name == cluster.name));
        let Some(ClusterStatus {
            registered_peers,
            gateways,
            skipped_nodes,
            reachable,
            accepted_networks,
            ..
        }) = row
        else {
            return;
        };
        self.is_reachable |= *reachable == Some(true);
        self.registered = self.registered.max(*registered_peers);
        self.left_out = self.left_out.max(*skipped_nodes);
        self.gateways = self.gateways.max(gateways.unwrap_or_default());
        self.has_networks |= !accepted_networks.is_empty();
        let problems = status.iter().flat_map(|status| &status.problems);
        let unreachable = problems.filter(|problem| {
            problem.cluster.as_ref() == Some(&cluster.name)
                && ["MemberMissing", "MemberUnreachable", "MemberStale"].contains(&&*problem.reason)
        });
        self.unreachable_since = unreachable
            .map(|problem| problem.since.0)
            .chain(self.unreachable_since)
            .min();
    }

    /// What the member's box shows below its name.
    pub(super) fn describe_nodes(&self) -> String {
        let registered = match self.registered {
            1 => "1 node".to_owned(),
            count => format!("{count} nodes"),
        };
        match self.left_out {
            0 => registered,
            left_out => format!("{registered}, {left_out} left out"),
        }
    }
}

fn broken_links<'m>(object: &'m ClusterMesh, a: &str, b: &str) -> Vec<&'m BrokenLink> {
    let broken = object.status.iter().flat_map(|status| &status.broken_links);
    broken
        .filter(|link| [(a, b), (b, a)].contains(&(&*link.from, &*link.to)))
        .collect()
}

/// Returns the state of a link, and what is wrong with it. `sandbox` = the position of the member that is a sandbox, if one is.
/// Its tunnels lead to gateways of the other member.
fn link_state(
    members: &[Member],
    (a, b): (usize, usize),
    sandbox: Option<usize>,
    broken: &[&BrokenLink],
) -> (LinkState, String) {
    let ends = [(a, &members[a]), (b, &members[b])];
    if let Some((_, member)) = ends.iter().find(|(_, member)| member.is_quarantined) {
        return (LinkState::Closed, format!("{} is quarantined", member.name));
    }
    if let Some((_, member)) = ends.iter().find(|(_, member)| !member.is_reachable) {
        return (
            LinkState::Unknown,
            format!("the API server of {} is not reachable", member.name),
        );
    }
    if let Some((_, member)) = ends.iter().find(|(_, member)| !member.has_networks) {
        return (LinkState::Down, format!("{} has no accepted network", member.name));
    }
    for (at, member) in ends {
        let has_gateways = sandbox.is_some_and(|sandbox| sandbox != at);
        if has_gateways && member.gateways == 0 {
            return (LinkState::Down, format!("{} has no gateway", member.name));
        }
        if !has_gateways && member.registered == 0 {
            return (LinkState::Down, format!("{} has no registered node", member.name));
        }
    }
    if broken.is_empty() {
        return (LinkState::Up, String::new());
    }
    let sum = |count: fn(&BrokenLink) -> i64| broken.iter().copied().map(count).sum::<i64>();
    let (up, total) = (sum(|link| link.up), sum(|link| link.total));
    // A `BrokenLink` is about one direction. Its `total` counts the tunnels of those nodes that report a tunnel down. If `total` is
    // less than the number of all tunnels between the members, further nodes report no tunnel down, so the link is partly up.
    let tunnels = members[a].registered.saturating_mul(members[b].registered);
    let is_down = up == 0 && broken.iter().all(|link| link.total >= tunnels);
    let state = if is_down { LinkState::Down } else { LinkState::Partly };
    (state, format!("{up} of {total} reported tunnels up"))
}
