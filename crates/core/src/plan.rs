//! The plan: what every member should hold for all meshes. Pure and total: any input gives a plan, none panics.
//!
//! The rules are numbered as in the design (§4); each module below names those it carries.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use ipnet::IpNet;

use crate::{
    key::PublicKey,
    mesh::{Cluster, ClusterIdentity, Mesh, MeshId, ObjectName, Profile, Protocol},
    observe::{Observation, Observations, ObservedPeer, PeerSpec, PolicySpec, ServicePort, SliceEndpoint},
    ownership::{self, Claimant, Ownership},
};

mod anchor;
mod claims;
mod endpoint;
mod location;
mod nodes;
mod services;
mod target;

#[cfg(test)]
mod tests;

/// For how long a node whose annotations vanished, or whose address clashes while kg renumbers, keeps its last Peer
/// (DESIGN §4 rule 9).
pub const HOLD: Duration = Duration::from_secs(300);

/// Peers a node of one target is tested with; more and the mesh is too large.
pub const MAX_PEERS_PER_TARGET: usize = 5_000;

/// How names of written objects are made. Core does not spell what users see.
pub trait Naming {
    /// Name of the Peer of `node`; `taken` = the readable name is someone else's already.
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, taken: bool) -> String;
    /// Name of the PeerPolicy for what `cluster` may reach.
    fn policy(&self, mesh: &MeshId, cluster: &str, taken: bool) -> String;
    /// Name of the `index`-th EndpointSlice of one family of a mirrored Service.
    fn slice(&self, mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String;
}

/// What the operator of the controller set for all meshes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Ports closed to every member on each address of a node itself: API server, kubelet, etcd and their like.
    pub infrastructure_ports: BTreeSet<(Protocol, u16)>,
}

impl Default for Settings {
    fn default() -> Self {
        // kube-apiserver, etcd client and peer, kubelet, its read-only port, scheduler, controller-manager, kube-proxy,
        // wg-agent's own metrics.
        let ports = [6443, 2379, 2380, 10250, 10255, 10259, 10257, 10249, 10256, 9587];
        Self {
            infrastructure_ports: ports.map(|port| (Protocol::Tcp, port)).into(),
        }
    }
}

/// Why a Node has no Peer (DESIGN §4 rule 3). The word stands in Events, conditions, metrics and `skipped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the words are the documentation; `message` says the rest")]
pub enum Reason {
    NodeNoPodCIDR,
    NodePodCIDROutOfRange,
    PodCIDRDuplicate,
    NodeNoWireguardIP,
    WGIPInvalid,
    WGIPOutOfRange,
    WGIPDuplicate,
    NodeNoPublicKey,
    PublicKeyInvalid,
    PublicKeyDuplicate,
    NodeEndpointInvalid,
    EndpointForbidden,
    TooManyNodes,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One Node that has no Peer, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// `metadata.name`.
    pub node: String,
    /// One word.
    pub reason: Reason,
    /// The value that is wrong and the remedy.
    pub message: String,
}

/// The kinds of condition a mesh reports; `Ready` and the rest are derived from facts in [`crate::status`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// Two claims overlap; the entry named here is left with what it had.
    NetworksOverlap {
        /// Entry of this mesh.
        cluster: String,
        /// Names both claims.
        message: String,
        /// This mesh's entry is the one that lost (it runs on with less); `false` = it holds, and the other is refused.
        lost: bool,
    },
    /// A member has two profiles in meshes of this hub; the tighter one holds.
    ProfileConflict {
        /// Entry of this mesh.
        cluster: String,
        /// Names both meshes.
        message: String,
    },
    /// A value of the API that this version does not serve yet; the entry is treated as `standard`.
    NotServed {
        /// Entry of this mesh.
        cluster: String,
        /// The field and what to write instead.
        message: String,
    },
    /// Nothing is seen of a member, or not lately; nothing is deleted because of it.
    MemberNotFresh {
        /// Entry of this mesh.
        cluster: String,
        /// `Stale`, `Unreachable` or `Missing`.
        state: &'static str,
        /// Why.
        message: String,
    },
    /// The Peer CRD is not there.
    PeerCRDMissing {
        /// Entry of this mesh.
        cluster: String,
    },
    /// InternalIPs of these nodes lie outside allowedNetworks: host-network sources of kg nodes are not accepted.
    InternalIPNotCovered {
        /// Entry of this mesh.
        cluster: String,
        /// Nodes, first few.
        nodes: Vec<String>,
    },
    /// A prefix that two nodes claim stays with its first owner; the node itself has its Peer.
    AddressShared {
        /// Entry of this mesh.
        cluster: String,
        /// Names prefix, owner and loser.
        message: String,
    },
    /// No node can carry the anchored networks.
    NoAnchor {
        /// Entry of this mesh.
        cluster: String,
        /// What would make one eligible.
        message: String,
    },
    /// A grant that does not resolve.
    EgressUnresolved {
        /// The member that imports.
        cluster: String,
        /// Name of the mirrored Service.
        service: ObjectName,
        /// Why, and the remedy.
        message: String,
    },
    /// A node of one target would have more Peers than promised.
    MeshTooLarge {
        /// Target.
        cluster: String,
        /// How many.
        peers: usize,
    },
    /// An annotation of one member's Nodes names an endpoint as a host name that does not resolve now.
    EndpointUnresolved {
        /// Entry of this mesh.
        cluster: String,
        /// Node.
        node: String,
        /// The name.
        host: String,
    },
}

/// A Peer that should stand in a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPeer {
    /// The member that has the node, by its entry's name.
    pub source: String,
    /// The node.
    pub node: String,
    /// What it says.
    pub spec: PeerSpec,
}

/// A PeerPolicy that should stand in a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPolicy {
    /// The member it speaks of, by its entry's name.
    pub source: String,
    /// What it says.
    pub spec: PolicySpec,
}

/// A mirrored Service: selector-less, so that the member's own kube-proxy or Cilium balances over our EndpointSlices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedService {
    /// The member that has the Service, by its entry's name.
    pub source: String,
    /// Ports as in the source, those that were granted.
    pub ports: Vec<ServicePort>,
    /// Its EndpointSlices by name, at most 100 endpoints each.
    pub slices: BTreeMap<String, PlannedSlice>,
}

/// One EndpointSlice of a mirrored Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSlice {
    /// Family of its addresses.
    pub v6: bool,
    /// Ports of the backends.
    pub ports: Vec<ServicePort>,
    /// Backends, sorted by address.
    pub endpoints: Vec<SliceEndpoint>,
}

/// What one member should hold for one mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TargetPlan {
    /// Peers by name.
    pub peers: BTreeMap<String, PlannedPeer>,
    /// PeerPolicies by name.
    pub policies: BTreeMap<String, PlannedPolicy>,
    /// Mirrored Services.
    pub services: BTreeMap<ObjectName, PlannedService>,
    /// Sources that were not freshly observed: their objects here are changed where the plan says so, never deleted.
    pub retained: BTreeSet<String>,
}

/// What is reported of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterReport {
    /// What of allowedNetworks was accepted (DESIGN §4 rule 10).
    pub accepted: Vec<IpNet>,
    /// How many of its nodes have a Peer in the other members.
    pub registered: usize,
    /// The nodes that have none, by name.
    pub skipped: Vec<Skipped>,
    /// Nodes whose last Peer is being held, and the reason they would be skipped for. The caller notes when it first saw
    /// each and hands the age back as [`crate::observe::Node::held_for`].
    pub held: BTreeMap<String, Reason>,
}

/// Whether a grant resolves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressReport {
    /// The member that imports, by its entry's name.
    pub cluster: String,
    /// Name of the mirrored Service there.
    pub service: ObjectName,
    /// It stands and has an endpoint that takes connections.
    pub ready: bool,
    /// How many endpoints.
    pub endpoints: usize,
    /// Why not, and the remedy; empty when ready.
    pub message: String,
}

/// The plan of one mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MeshPlan {
    /// Write nothing and delete nothing for it.
    pub paused: bool,
    /// It is being deleted: everything it owns goes.
    pub deleting: bool,
    /// By entry name.
    pub clusters: BTreeMap<String, ClusterReport>,
    /// What every member should hold, by entry name.
    pub targets: BTreeMap<String, TargetPlan>,
    /// Which cluster each entry is.
    pub identities: BTreeMap<String, ClusterIdentity>,
    /// What is to be said, sorted.
    pub facts: BTreeSet<Fact>,
    /// Grants in the order of the entries.
    pub egress: Vec<EgressReport>,
}

/// The plan of all meshes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// By mesh.
    pub meshes: BTreeMap<MeshId, MeshPlan>,
    /// All meshes, oldest first: what [`crate::ownership::of`] goes by.
    pub claimants: Vec<Claimant>,
    /// This hub's id.
    pub hub: String,
}

/// Plans all meshes. Neither the order of `meshes` nor of anything observed has a part in the result.
#[must_use]
pub fn plan(meshes: &[Mesh], seen: &Observations, settings: &Settings, naming: &dyn Naming) -> Plan {
    let mut by_age: Vec<&Mesh> = meshes.iter().collect();
    by_age.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    let claimants: Vec<Claimant> = by_age.iter().map(|mesh| Claimant::from(*mesh)).collect();
    let accepted = claims::accept(&by_age);
    let mut plan = Plan {
        meshes: BTreeMap::new(),
        claimants,
        hub: seen.hub.clone(),
    };
    let mut used: BTreeMap<ClusterIdentity, target::Used> = BTreeMap::new();
    for mesh in &by_age {
        let claimants = &plan.claimants;
        let planner = MeshPlanner {
            mesh,
            all: &by_age,
            accepted: &accepted,
            seen,
            settings,
            naming,
            claimants,
            used: &used,
        };
        let planned = planner.plan();
        for (name, target) in &planned.targets {
            if let Some(identity) = planned.identities.get(name) {
                used.entry(target::one_cluster(identity)).or_default().add(target);
            }
        }
        plan.meshes.insert(mesh.id.clone(), planned);
    }
    one_peer_per_key(&mut plan, seen);
    for planned in plan.meshes.values_mut() {
        count(planned);
    }
    plan
}

struct MeshPlanner<'a> {
    mesh: &'a Mesh,
    all: &'a [&'a Mesh],
    accepted: &'a claims::Accepted,
    seen: &'a Observations,
    settings: &'a Settings,
    naming: &'a dyn Naming,
    claimants: &'a [Claimant],
    used: &'a BTreeMap<ClusterIdentity, target::Used>,
}

impl<'a> MeshPlanner<'a> {
    fn plan(&self) -> MeshPlan {
        let mesh = self.mesh;
        let mut planned = MeshPlan {
            paused: mesh.paused,
            deleting: mesh.deleting,
            identities: mesh
                .clusters
                .iter()
                .map(|c| (c.name.clone(), c.identity.clone()))
                .collect(),
            facts: self.accepted.facts.get(&mesh.id).cloned().unwrap_or_default(),
            ..MeshPlan::default()
        };
        if mesh.deleting {
            planned.targets = mesh
                .clusters
                .iter()
                .map(|c| (c.name.clone(), TargetPlan::default()))
                .collect();
            return planned;
        }
        let parties = self.parties(&mut planned);
        let rolls = self.rolls(&parties);
        for (name, party) in &parties {
            let roll = rolls.get(name);
            let report = ClusterReport {
                accepted: party.cluster.allowed.clone(),
                registered: 0,
                skipped: roll.map(|roll| roll.skipped.clone()).unwrap_or_default(),
                held: roll
                    .map(|r| r.held.iter().map(|(n, why)| ((*n).to_owned(), *why)).collect())
                    .unwrap_or_default(),
            };
            planned.clusters.insert(name.clone(), report);
            planned
                .facts
                .extend(roll.into_iter().flat_map(|roll| roll.facts.iter().cloned()));
        }
        let assembly = target::Assembly {
            mesh: &mesh.id,
            parties: &parties,
            rolls: &rolls,
            seen: self.seen,
            settings: self.settings,
            naming: self.naming,
            claimants: self.claimants,
            used: self.used,
        };
        for cluster in &mesh.clusters {
            let assembled = assembly.target(&cluster.name);
            planned.targets.insert(cluster.name.clone(), assembled.plan);
            planned.facts.extend(assembled.facts);
            planned.egress.extend(assembled.egress);
            for (source, skipped) in assembled.skipped {
                let report = planned.clusters.entry(source).or_default();
                report.skipped.extend(skipped);
                report.skipped.sort();
            }
        }
        planned
    }

    fn parties(&self, planned: &mut MeshPlan) -> BTreeMap<String, target::Party<'a>> {
        let mut parties = BTreeMap::new();
        for entry in &self.mesh.clusters {
            let mut cluster = entry.clone();
            let key = (self.mesh.id.clone(), entry.name.clone());
            cluster.allowed = self.accepted.networks.get(&key).cloned().unwrap_or_default();
            cluster.profile = self.profile(entry, planned);
            if let Some(message) = not_served(&cluster) {
                planned.facts.insert(Fact::NotServed {
                    cluster: entry.name.clone(),
                    message,
                });
                cluster.profile = Profile::Standard;
            }
            let observed = self.seen.members.get(&entry.identity);
            let (state, trouble) = observed.map_or(("Missing", Some("it has not been looked at yet")), |o| {
                (o.word(), o.trouble())
            });
            if let Some(message) = trouble {
                let message = message.to_owned();
                planned.facts.insert(Fact::MemberNotFresh {
                    cluster: entry.name.clone(),
                    state,
                    message,
                });
            }
            let connected = cluster.profile == Profile::ClusterMeshed && !cluster.allowed.is_empty();
            let discovered = target::discovered(observed.and_then(Observation::last));
            parties.insert(
                entry.name.clone(),
                target::Party {
                    cluster,
                    observed,
                    connected,
                    discovered,
                },
            );
        }
        parties
    }

    /// One profile in all meshes of a hub; else the tighter one holds (rule 7).
    fn profile(&self, entry: &Cluster, planned: &mut MeshPlan) -> Profile {
        let mut tightest = entry.profile;
        for mesh in self.all.iter().filter(|mesh| !mesh.deleting) {
            for other in mesh
                .clusters
                .iter()
                .filter(|other| other.identity.same_cluster(&entry.identity))
            {
                if other.profile != entry.profile {
                    planned.facts.insert(Fact::ProfileConflict {
                        cluster: entry.name.clone(),
                        message: format!(
                            "cluster {:?} is {} here and {} in ClusterMesh {}; the tighter one holds",
                            entry.name,
                            entry.profile.as_str(),
                            other.profile.as_str(),
                            mesh.id
                        ),
                    });
                    tightest = tightest.max(other.profile);
                }
            }
        }
        tightest
    }

    fn rolls(&self, parties: &BTreeMap<String, target::Party<'a>>) -> BTreeMap<String, nodes::Roll<'a>> {
        let mut rolls = BTreeMap::new();
        for (name, party) in parties {
            if let (true, Some(member)) = (party.connected, party.member()) {
                let has_peer = |node: &str| self.has_peer(parties, name, node);
                let source = nodes::Source {
                    cluster: &party.cluster,
                    member,
                    has_peer: &has_peer,
                };
                rolls.insert(name.clone(), source.roll());
            }
        }
        self.settle_keys(parties, &mut rolls);
        rolls
    }

    fn ours(&self, peer: &ObservedPeer) -> bool {
        ownership::of(&peer.owner, &self.seen.hub, self.claimants) == Ownership::Mesh(&self.mesh.id)
    }

    /// Whether any member holds a Peer of this mesh for that node.
    fn has_peer(&self, parties: &BTreeMap<String, target::Party<'_>>, cluster: &str, node: &str) -> bool {
        let names = [false, true].map(|taken| self.naming.peer(&self.mesh.id, cluster, node, taken));
        parties
            .values()
            .filter_map(target::Party::member)
            .filter_map(|member| member.peers.as_ref())
            .any(|peers| {
                names
                    .iter()
                    .filter_map(|name| peers.get(name))
                    .any(|peer| self.ours(peer))
            })
    }

    /// One key, one node, over all members. An attacker chooses its own timestamps, so the order is: local first, then
    /// whoever has the Peer already, then the order of the entries (rule 3).
    fn settle_keys(
        &self,
        parties: &BTreeMap<String, target::Party<'_>>,
        rolls: &mut BTreeMap<String, nodes::Roll<'_>>,
    ) {
        // (not local, has no Peer yet, position of the entry, entry, node): the smallest wins.
        type KeyClaim = (bool, bool, usize, String, String);
        let peers = parties
            .values()
            .filter_map(target::Party::member)
            .filter_map(|member| member.peers.as_ref());
        let mut standing: BTreeMap<&str, BTreeMap<PublicKey, &str>> = BTreeMap::new();
        for (name, peer) in peers.flatten().filter(|(_, peer)| self.ours(peer)) {
            if let (Some(source), Ok(spec)) = (&peer.owner.source_cluster, &peer.spec) {
                standing.entry(source).or_default().insert(spec.public_key, name);
            }
        }
        let mut claims: BTreeMap<PublicKey, Vec<KeyClaim>> = BTreeMap::new();
        for (position, entry) in self.mesh.clusters.iter().enumerate() {
            let Some(party) = parties.get(&entry.name) else {
                continue;
            };
            let standing = standing.get(&*entry.name);
            let local = target::is_local(entry);
            let mut claim = |key: PublicKey, stands: bool, node: &str| {
                let claim = (!local, !stands, position, entry.name.clone(), node.to_owned());
                claims.entry(key).or_default().push(claim);
            };
            match rolls.get(&entry.name) {
                Some(roll) => roll.registered.iter().for_each(|node| {
                    claim(
                        node.key,
                        standing.is_some_and(|keys| keys.contains_key(&node.key)),
                        node.node,
                    );
                }),
                // Not seen since the controller started: its standing Peers speak for it, or whoever copies a key takes it.
                None if party.connected => {
                    standing
                        .into_iter()
                        .flatten()
                        .for_each(|(key, peer)| claim(*key, true, peer));
                }
                None => {}
            }
        }
        for (key, mut claims) in claims {
            claims.sort();
            let mut claims = claims.into_iter();
            let Some((.., owner_cluster, owner)) = claims.next() else {
                continue;
            };
            for (.., cluster, node) in claims {
                let Some(roll) = rolls.get_mut(&cluster) else { continue };
                roll.registered.retain(|registered| registered.node != node);
                let message =
                    format!("key {key} is that of Node {owner} of cluster {owner_cluster:?}; one of the two is a copy");
                roll.skipped.push(Skipped {
                    node,
                    reason: Reason::PublicKeyDuplicate,
                    message,
                });
                roll.skipped.sort();
            }
        }
    }
}

/// What this version does not serve. Such an entry is connected to nothing: a boundary that is not enforced must not look
/// as if it were.
fn not_served(cluster: &Cluster) -> Option<String> {
    if cluster.quarantine {
        return Some(format!(
            "quarantine of cluster {:?} is not served yet: its Peers are removed as for isolationProfile: standard",
            cluster.name
        ));
    }
    (cluster.profile == Profile::Sandbox).then(|| {
        format!(
            "isolationProfile sandbox of cluster {:?} is not served yet: it is connected to nothing. Use cluster-meshed for a \
             trusted cluster, or standard",
            cluster.name
        )
    })
}

/// One key in two meshes of one target is one Peer: of the mesh that has it already, else of the older one (rule 2).
fn one_peer_per_key(plan: &mut Plan, seen: &Observations) {
    // (has no Peer yet, age of the mesh, mesh, target, name of the Peer): the smallest wins.
    type Place = (bool, usize, MeshId, String, String);
    let mut places: BTreeMap<(ClusterIdentity, PublicKey), Vec<Place>> = BTreeMap::new();
    for (age, claimant) in plan.claimants.iter().enumerate() {
        let Some(planned) = plan.meshes.get(&claimant.mesh) else {
            continue;
        };
        for (target, held) in &planned.targets {
            let Some(identity) = planned.identities.get(target) else {
                continue;
            };
            let standing = seen
                .members
                .get(identity)
                .and_then(Observation::last)
                .and_then(|member| member.peers.as_ref());
            for (name, peer) in &held.peers {
                let stands = standing.and_then(|peers| peers.get(name)).is_some_and(|peer_there| {
                    peer_there
                        .spec
                        .as_ref()
                        .is_ok_and(|spec| spec.public_key == peer.spec.public_key)
                        && ownership::of(&peer_there.owner, &plan.hub, &plan.claimants)
                            == Ownership::Mesh(&claimant.mesh)
                });
                let place = (!stands, age, claimant.mesh.clone(), target.clone(), name.clone());
                places
                    .entry((target::one_cluster(identity), peer.spec.public_key))
                    .or_default()
                    .push(place);
            }
        }
    }
    for mut claims in places.into_values().filter(|claims| claims.len() > 1) {
        claims.sort();
        for (_, _, mesh, target, name) in claims.into_iter().skip(1) {
            if let Some(held) = plan
                .meshes
                .get_mut(&mesh)
                .and_then(|planned| planned.targets.get_mut(&target))
            {
                held.peers.remove(&name);
            }
        }
    }
    one_owner_per_prefix(plan);
}

/// Two meshes of one target may share a source, and then each has chosen its anchors for itself: the older one's stand.
fn one_owner_per_prefix(plan: &mut Plan) {
    let mut owned: BTreeMap<ClusterIdentity, BTreeSet<IpNet>> = BTreeMap::new();
    for claimant in &plan.claimants {
        let Some(planned) = plan.meshes.get_mut(&claimant.mesh) else {
            continue;
        };
        for (target, held) in &mut planned.targets {
            let Some(identity) = planned.identities.get(target) else {
                continue;
            };
            let owned = owned.entry(target::one_cluster(identity)).or_default();
            for peer in held.peers.values_mut() {
                peer.spec.allowed_ips.retain(|net| owned.insert(*net));
            }
        }
    }
}

/// Counts the nodes that have a Peer somewhere, and the Peers a target's nodes have to carry.
fn count(planned: &mut MeshPlan) {
    let mut registered: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (target, held) in &planned.targets {
        for peer in held.peers.values() {
            registered.entry(&peer.source).or_default().insert(&peer.node);
        }
        if held.peers.len() > MAX_PEERS_PER_TARGET {
            planned.facts.insert(Fact::MeshTooLarge {
                cluster: target.clone(),
                peers: held.peers.len(),
            });
        }
    }
    for (cluster, nodes) in registered {
        planned.clusters.entry(cluster.to_owned()).or_default().registered = nodes.len();
    }
}
