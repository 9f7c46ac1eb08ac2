//! Makes the planner's input from the objects that were read: assigns them to the members, determines the hub's id, and marks
//! objects as foreign if their mesh was not given, so that the plan does not change them.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_api::{convert, names};
use clustermesh_core::{
    checkin,
    mesh::{ClusterIdentity, Mesh, ObjectName},
    observe::{Claim, Gateway, Member, Observation, Observations, ObservedPeer, Owner, Server, Unlisted},
};
use kube::ResourceExt;

use crate::{objects::Objects, problem::Problem};

/// Replaces the hub id of this hub's objects whose mesh was not given. No hub has this id, because it is no valid label value. So these
/// objects count as objects of another hub: no other object gets their keys and addresses, and they are not deleted.
const HUB_OF_MISSING_MESH: &str = "(mesh not given)";

/// One cluster that was read.
#[derive(Debug)]
pub(crate) struct ReadCluster {
    pub(crate) objects: Objects,
    /// The planner's input, made from the objects.
    pub(crate) member: Member,
    /// The number of objects that are left unchanged because their mesh was not given, by mesh.
    pub(crate) left_unchanged: BTreeMap<String, usize>,
    /// Kinds of which the cluster must have objects, but its files have none. They were probably not listed. Empty for a running cluster.
    pub(crate) not_listed: BTreeSet<&'static str>,
}

/// The planner's observations, and the clusters from which they were made.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) observations: Observations,
    /// The clusters that were read, by name: with `--filename` the name in `--cluster`, else the one that `live::cluster_names` chose.
    pub(crate) clusters: BTreeMap<String, ReadCluster>,
    /// For each entry, the key of its cluster in `clusters`.
    pub(crate) names: BTreeMap<ClusterIdentity, String>,
}

/// The result of reading one cluster.
#[derive(Debug)]
pub(crate) enum ReadResult {
    Read(Box<Objects>),
    /// The cluster could not be read, for this reason.
    Unreadable(String),
}

/// The results of reading all clusters.
#[derive(Debug, Default)]
pub(crate) struct ReadResults {
    /// For each entry, the key of its cluster in `clusters`. If an entry has no key here, its cluster was not given.
    pub(crate) names: BTreeMap<ClusterIdentity, String>,
    pub(crate) clusters: BTreeMap<String, ReadResult>,
}

impl ReadResults {
    /// Assigns the objects of files to members, by the names on the command line.
    pub(crate) fn from_files(meshes: &[Mesh], given: BTreeMap<String, Objects>) -> Result<Self, Vec<Problem>> {
        let names = match_names(meshes, given.keys().map(String::as_str).collect())?;
        let result = |(name, objects)| (name, ReadResult::Read(Box::new(objects)));
        Ok(Self {
            names,
            clusters: given.into_iter().map(result).collect(),
        })
    }
}

impl Inputs {
    /// `hub` is the value of `--hub-id`.
    pub(crate) fn new(meshes: &[Mesh], results: ReadResults, hub: Option<&str>) -> Self {
        let ReadResults { names, clusters } = results;
        let mut unreadable = BTreeMap::new();
        let mut objects = BTreeMap::new();
        for (name, result) in clusters {
            match result {
                ReadResult::Read(read) => drop(objects.insert(name, *read)),
                ReadResult::Unreadable(why) => drop(unreadable.insert(name, why)),
            }
        }
        let hub = hub.map_or_else(|| default_hub_id(meshes, &objects, &names), str::to_owned);
        let clusters: BTreeMap<String, ReadCluster> = objects
            .into_iter()
            .map(|(name, objects)| (name, ReadCluster::new(objects, meshes, &hub)))
            .collect();
        let mut observations = Observations {
            hub,
            ..Observations::default()
        };
        for entry in meshes.iter().flat_map(|mesh| &mesh.clusters) {
            let name = names.get(&entry.identity);
            let observation = match name.map(|name| (clusters.get(name), unreadable.get(name))) {
                Some((Some(cluster), _)) => Observation::Fresh(cluster.member.clone()),
                Some((None, Some(why))) => Observation::Unreachable(why.clone()),
                _ => Observation::Missing(format!("not given; add --cluster {}=FILE_OR_DIR", entry.name)),
            };
            observations
                .members
                .entry(entry.identity.clone())
                .or_insert(observation);
        }
        Self {
            observations,
            clusters,
            names,
        }
    }

    /// The cluster of an entry, if it was read.
    pub(crate) fn cluster(&self, identity: &ClusterIdentity) -> Option<&ReadCluster> {
        self.clusters.get(self.names.get(identity)?)
    }
}

/// Returns the name under which the files of an entry's cluster are given, for each entry whose cluster has files. A cluster may have
/// different names in several meshes; its files may be given under only one of them.
fn match_names(meshes: &[Mesh], given: BTreeSet<&str>) -> Result<BTreeMap<ClusterIdentity, String>, Vec<Problem>> {
    let entries = || meshes.iter().flat_map(|mesh| &mesh.clusters);
    let mut problems: Vec<Problem> = given
        .iter()
        .filter(|name| !entries().any(|entry| entry.name == **name))
        .map(|name| {
            let known: BTreeSet<&str> = entries().map(|entry| entry.name.as_str()).collect();
            let known: Vec<&str> = known.into_iter().collect();
            Problem::other(format!(
                "--cluster {name}: no mesh has an entry of that name; there are {}",
                known.join(", ")
            ))
        })
        .collect();
    let mut matched = BTreeMap::new();
    for entry in entries() {
        let names: BTreeSet<&str> = entries()
            .filter(|other| other.identity.same_cluster(&entry.identity) && given.contains(&*other.name))
            .map(|other| other.name.as_str())
            .collect();
        let mut names = names.into_iter();
        match (names.next(), names.next()) {
            (Some(one), Some(other)) => problems.push(Problem::other(format!(
                "--cluster {one} and --cluster {other} are the same cluster ({}): give one of them",
                entry.identity
            ))),
            (Some(name), None) => {
                matched.insert(entry.identity.clone(), name.to_owned());
            }
            (None, _) => {}
        }
    }
    problems.sort();
    problems.dedup();
    if problems.is_empty() {
        Ok(matched)
    } else {
        Err(problems)
    }
}

/// Returns the default of `--hub-id`: the UID of the hub's Namespace kube-system, else the id that most Peers of these meshes have,
/// else `unknown`. Peers of a hub that a mesh adopts (`adopt_hub`) are not counted.
fn default_hub_id(
    meshes: &[Mesh],
    given: &BTreeMap<String, Objects>,
    names: &BTreeMap<ClusterIdentity, String>,
) -> String {
    let local = names.get(&ClusterIdentity::Local).and_then(|name| given.get(name));
    if let Some(uid) = local.and_then(|objects| objects.uid.clone()) {
        return uid;
    }
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for peer in given.values().flat_map(|objects| objects.peers.values()) {
        let owner = convert::owner(Some(peer.labels()));
        let own_mesh = meshes.iter().find(|mesh| {
            owner.mesh.as_deref() == Some(&mesh.id.name) && owner.mesh_namespace.as_deref() == Some(&mesh.id.namespace)
        });
        if let (Some(mesh), Some(hub)) = (own_mesh, owner.hub)
            && mesh.adopt_hub.as_deref() != Some(&hub)
        {
            *found.entry(hub).or_default() += 1;
        }
    }
    let most = found.iter().max_by(|(a, n), (b, m)| n.cmp(m).then(b.cmp(a)));
    most.map_or_else(|| "unknown".to_owned(), |(hub, _)| hub.clone())
}

impl ReadCluster {
    fn new(objects: Objects, meshes: &[Mesh], hub: &str) -> Self {
        let mut left_unchanged = BTreeMap::new();
        let mut mark_unless_given = |owner: &mut Owner| {
            let is_given = meshes.iter().any(|mesh| {
                owner.mesh.as_deref() == Some(&mesh.id.name)
                    && owner.mesh_namespace.as_deref().is_none_or(|ns| ns == mesh.id.namespace)
            });
            if owner.hub.as_deref() == Some(hub) && !is_given {
                let text = |part: &Option<String>| part.clone().unwrap_or_else(|| "?".to_owned());
                let mesh = format!("{}/{}", text(&owner.mesh_namespace), text(&owner.mesh));
                *left_unchanged.entry(mesh).or_default() += 1;
                owner.hub = Some(HUB_OF_MISSING_MESH.to_owned());
            }
        };
        let mut member = member(&objects);
        for peer in member.peers.iter_mut().flat_map(|peers| peers.values_mut()) {
            mark_unless_given(&mut peer.owner);
        }
        for policy in member.policies.iter_mut().flat_map(BTreeMap::values_mut) {
            mark_unless_given(&mut policy.owner);
        }
        for access in member.accesses.iter_mut().flat_map(BTreeMap::values_mut) {
            mark_unless_given(&mut access.owner);
        }
        for owner in member
            .services
            .values_mut()
            .filter_map(|service| service.managed.as_mut())
        {
            mark_unless_given(owner);
        }
        for owner in member.slices.values_mut().filter_map(|slice| slice.managed.as_mut()) {
            mark_unless_given(owner);
        }
        // After `mark_unless_given`, only objects of given meshes have this hub's id.
        let is_of_hub = |peer: &ObservedPeer| peer.owner.hub.as_deref() == Some(hub);
        let has_peers = (member.peers.as_ref()).is_some_and(|peers| peers.values().any(is_of_hub));
        // The controller writes the policy before the Peers, so Peers without a policy mean that policies were not listed. Every
        // cluster has the Service default/kubernetes and its EndpointSlice.
        let is_from_files = objects.crds.is_none();
        let not_listed = [
            (
                "PeerPolicy",
                has_peers && member.policies.as_ref().is_some_and(BTreeMap::is_empty),
            ),
            ("Service", objects.services.is_empty()),
            ("EndpointSlice", objects.slices.is_empty()),
        ];
        Self {
            objects,
            member,
            left_unchanged,
            not_listed: not_listed
                .into_iter()
                .filter_map(|(kind, is_missing)| (is_from_files && is_missing).then_some(kind))
                .collect(),
        }
    }
}

/// Converts the objects of a cluster to the planner's input.
fn member(objects: &Objects) -> Member {
    let mut nodes: BTreeMap<_, _> = objects
        .nodes
        .iter()
        .map(|(name, node)| (name.clone(), convert::node::to_core(node)))
        .collect();
    // Files may have been saved at any earlier time. So the ages of kg's check-ins (`last-seen`) are measured from the newest check-in in
    // the cluster, unless this check-in is in the future. Then they are measured from now.
    let last_seen = objects.nodes.iter();
    let last_seen = last_seen.filter_map(|(name, node)| Some((name.clone(), convert::node::last_seen(node)?)));
    for (name, age) in checkin::ages(&last_seen.collect(), k8s_openapi::jiff::Timestamp::now().as_second()) {
        if let Some(node) = nodes.get_mut(&name) {
            node.silent = age >= checkin::SILENT_AFTER;
        }
    }
    // Files do not show which CRDs are installed. If Nodes have keys and no wg-agent runs, kg serves them and nothing reads PeerPolicies,
    // so the CRD counts as missing, unless the files contain PeerPolicies.
    let has_keys = nodes.values().any(|node| node.public_key != Claim::Absent);
    let runs_agent = nodes.values().any(|node| node.server != Server::Kilo);
    let has_policies = match objects.crds {
        Some(crds) => crds.policies,
        None => runs_agent || !has_keys || !objects.policies.is_empty(),
    };
    let has_peers = objects.crds.is_none_or(|crds| crds.peers);
    Member {
        uid: objects.uid.clone(),
        peers: has_peers.then(|| {
            let peers = objects.peers.iter();
            peers
                .map(|(name, peer)| (name.clone(), convert::peer::to_core(peer)))
                .collect()
        }),
        policies: has_policies.then(|| {
            let policies = objects.policies.iter();
            policies
                .map(|(name, policy)| (name.clone(), convert::policy::to_core(policy)))
                .collect()
        }),
        accesses: objects.crds.is_none_or(|crds| crds.accesses).then(|| {
            let accesses = objects.accesses.iter();
            accesses
                .map(|(name, access)| (name.clone(), convert::sandbox::to_core(access)))
                .collect()
        }),
        gateways: gateways(objects),
        services: objects
            .services
            .iter()
            .map(|(name, service)| (name.clone(), convert::service::to_core(service)))
            .collect(),
        slices: objects
            .slices
            .iter()
            .filter_map(|(name, slice)| Some((name.clone(), convert::service::slice_to_core(slice)?)))
            .collect(),
        pods: objects
            .pods
            .iter()
            .map(|(name, pod)| (name.clone(), convert::service::pod_to_core(pod)))
            .collect(),
        // No namespace is missing: a list of a running cluster covers all namespaces or fails, and files are assumed to cover all.
        unlisted: Unlisted::default(),
        api_endpoints: convert::service::api_endpoints(objects.slices.values()),
        nodes: nodes.into(),
    }
}

/// Converts the SandboxGateways. Invalid objects are ignored, as in the controller.
fn gateways(objects: &Objects) -> BTreeMap<ObjectName, Gateway> {
    let gateways = objects.gateways.iter().filter_map(|(name, gateway)| {
        let (gateway, pod_uid) = convert::sandbox::gateway_to_core(gateway).ok()??;
        let pod = objects.pods.get(name).map(convert::sandbox::gateway_pod);
        let pod = pod.filter(|(uid, _)| *uid == pod_uid);
        let (exists, ready) = (pod.is_some(), pod.is_some_and(|(_, ready)| ready));
        let gateway = Gateway {
            ready,
            exists,
            ..gateway
        };
        Some((name.clone(), gateway))
    });
    gateways.collect()
}

/// Returns the rules by which this hub names its objects.
pub(crate) fn naming(hub: &str) -> names::Names {
    names::Names { hub: hub.to_owned() }
}
