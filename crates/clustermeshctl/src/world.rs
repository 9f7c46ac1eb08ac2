//! What was given, as the planner takes it: which files belong to which member, which hub asks, and how far what was not
//! given must be left alone.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_api::{convert, names};
use clustermesh_core::{
    checkin,
    mesh::{ClusterIdentity, Mesh, ObjectName},
    observe::{Claim, Gateway, Member, Observation, Observations, Owner, Server, Unlisted},
};
use kube::ResourceExt;

use crate::{objects::Objects, problem::Problem};

/// The label of an object whose mesh was not given is made to say this: a hub that is nobody's, so that the object counts as
/// someone else's, keeps its key and addresses, and stays. No label can hold it.
const NOT_GIVEN: &str = "(mesh not given)";

/// What stands in one member, raw and as values.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) objects: Objects,
    pub(crate) member: Member,
    /// Objects left alone because their mesh was not given, by that mesh.
    pub(crate) left_alone: BTreeMap<String, usize>,
    /// Kinds that nobody asked kubectl for, it seems: none is there though there must be some.
    pub(crate) not_listed: BTreeSet<&'static str>,
}

/// Everything the planner is told, and what it was made of.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) observations: Observations,
    /// What was given, by the name on the command line.
    pub(crate) given: BTreeMap<String, Seen>,
    /// Which of them each entry's cluster is.
    pub(crate) sources: BTreeMap<ClusterIdentity, String>,
}

/// What is known of one cluster.
#[derive(Debug)]
pub(crate) enum Source {
    Seen(Box<Objects>),
    /// Nothing; why.
    Unseen(String),
}

/// What was given or read, and which entries it is of.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// What each entry's cluster is called. One that is not here was not given.
    pub(crate) names: BTreeMap<ClusterIdentity, String>,
    /// By that name.
    pub(crate) given: BTreeMap<String, Source>,
}

impl Sources {
    /// Ties files to members, by the names that were given to them.
    pub(crate) fn files(meshes: &[Mesh], given: BTreeMap<String, Objects>) -> Result<Self, Vec<Problem>> {
        let names = names(meshes, given.keys().map(String::as_str).collect())?;
        let seen = |(name, objects)| (name, Source::Seen(Box::new(objects)));
        Ok(Self {
            names,
            given: given.into_iter().map(seen).collect(),
        })
    }
}

impl World {
    /// `hub` = the operator's own word for the hub's id.
    pub(crate) fn new(meshes: &[Mesh], sources: Sources, hub: Option<&str>) -> Self {
        let Sources { names: sources, given } = sources;
        let mut unseen = BTreeMap::new();
        let mut objects = BTreeMap::new();
        for (name, source) in given {
            match source {
                Source::Seen(of) => drop(objects.insert(name, *of)),
                Source::Unseen(why) => drop(unseen.insert(name, why)),
            }
        }
        let hub = hub.map_or_else(|| hub_id(meshes, &objects, &sources), str::to_owned);
        let given: BTreeMap<String, Seen> = objects
            .into_iter()
            .map(|(name, objects)| (name, Seen::new(objects, meshes, &hub)))
            .collect();
        let mut observations = Observations {
            hub,
            ..Observations::default()
        };
        for entry in meshes.iter().flat_map(|mesh| &mesh.clusters) {
            let name = sources.get(&entry.identity);
            let observation = match name.map(|name| (given.get(name), unseen.get(name))) {
                Some((Some(seen), _)) => Observation::Fresh(seen.member.clone()),
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
            given,
            sources,
        }
    }

    /// What stands in the cluster of an entry, if it was given.
    pub(crate) fn seen(&self, identity: &ClusterIdentity) -> Option<&Seen> {
        self.given.get(self.sources.get(identity)?)
    }
}

/// Which name on the command line each cluster has. One cluster may be an entry of several meshes under several names; one
/// of them is enough.
fn names(meshes: &[Mesh], given: BTreeSet<&str>) -> Result<BTreeMap<ClusterIdentity, String>, Vec<Problem>> {
    let entries = || meshes.iter().flat_map(|mesh| &mesh.clusters);
    let mut problems: Vec<Problem> = given
        .iter()
        .filter(|name| !entries().any(|entry| entry.name == **name))
        .map(|name| {
            let known: BTreeSet<&str> = entries().map(|entry| entry.name.as_str()).collect();
            let known: Vec<&str> = known.into_iter().collect();
            Problem::usage(format!(
                "--cluster {name}: no mesh has an entry of that name; there are {}",
                known.join(", ")
            ))
        })
        .collect();
    let mut sources = BTreeMap::new();
    for entry in entries() {
        let names: BTreeSet<&str> = entries()
            .filter(|other| other.identity.same_cluster(&entry.identity) && given.contains(&*other.name))
            .map(|other| other.name.as_str())
            .collect();
        let mut names = names.into_iter();
        match (names.next(), names.next()) {
            (Some(one), Some(other)) => problems.push(Problem::usage(format!(
                "--cluster {one} and --cluster {other} are the same cluster ({}): give one of them",
                entry.identity
            ))),
            (Some(name), None) => {
                sources.insert(entry.identity.clone(), name.to_owned());
            }
            (None, _) => {}
        }
    }
    problems.sort();
    problems.dedup();
    if problems.is_empty() {
        Ok(sources)
    } else {
        Err(problems)
    }
}

/// The hub's id where the operator names none (documented at `--hub-id`).
fn hub_id(meshes: &[Mesh], given: &BTreeMap<String, Objects>, sources: &BTreeMap<ClusterIdentity, String>) -> String {
    let local = sources.get(&ClusterIdentity::Local).and_then(|name| given.get(name));
    if let Some(uid) = local.and_then(|objects| objects.uid.clone()) {
        return uid;
    }
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for peer in given.values().flat_map(|objects| objects.peers.values()) {
        let owner = convert::owner(Some(peer.labels()));
        let ours = meshes.iter().find(|mesh| {
            owner.mesh.as_deref() == Some(&mesh.id.name) && owner.mesh_namespace.as_deref() == Some(&mesh.id.namespace)
        });
        if let (Some(mesh), Some(hub)) = (ours, owner.hub)
            && mesh.adopt_hub.as_deref() != Some(&hub)
        {
            *found.entry(hub).or_default() += 1;
        }
    }
    let most = found.iter().max_by(|(a, n), (b, m)| n.cmp(m).then(b.cmp(a)));
    most.map_or_else(|| "unknown".to_owned(), |(hub, _)| hub.clone())
}

impl Seen {
    fn new(objects: Objects, meshes: &[Mesh], hub: &str) -> Self {
        let mut left_alone = BTreeMap::new();
        let mut known = |owner: &mut Owner| {
            let of_given = meshes.iter().any(|mesh| {
                owner.mesh.as_deref() == Some(&mesh.id.name)
                    && owner.mesh_namespace.as_deref().is_none_or(|ns| ns == mesh.id.namespace)
            });
            if owner.hub.as_deref() == Some(hub) && !of_given {
                let words = |part: &Option<String>| part.clone().unwrap_or_else(|| "?".to_owned());
                let mesh = format!("{}/{}", words(&owner.mesh_namespace), words(&owner.mesh));
                *left_alone.entry(mesh).or_default() += 1;
                owner.hub = Some(NOT_GIVEN.to_owned());
            }
        };
        let mut member = member(&objects);
        for peer in member.peers.iter_mut().flat_map(BTreeMap::values_mut) {
            known(&mut peer.owner);
        }
        for policy in member.policies.iter_mut().flat_map(BTreeMap::values_mut) {
            known(&mut policy.owner);
        }
        for access in member.accesses.iter_mut().flat_map(BTreeMap::values_mut) {
            known(&mut access.owner);
        }
        for owner in member
            .services
            .values_mut()
            .filter_map(|service| service.managed.as_mut())
        {
            known(owner);
        }
        for owner in member.slices.values_mut().filter_map(|slice| slice.managed.as_mut()) {
            known(owner);
        }
        let peers = member.peers.iter().flat_map(BTreeMap::values);
        let ours = |owner: &Owner| {
            meshes
                .iter()
                .any(|mesh| owner.mesh.as_deref() == Some(&mesh.id.name) && owner.hub.as_deref() == Some(hub))
        };
        // The controller writes the policy before the Peers; every cluster has the Service default/kubernetes.
        let meshed = peers.into_iter().any(|peer| ours(&peer.owner));
        let dump = objects.served.is_none();
        let not_listed = [
            (
                "PeerPolicy",
                meshed && member.policies.as_ref().is_some_and(BTreeMap::is_empty),
            ),
            ("Service", objects.services.is_empty()),
            ("EndpointSlice", objects.slices.is_empty()),
        ];
        Self {
            objects,
            member,
            left_alone,
            not_listed: not_listed
                .into_iter()
                .filter_map(|(kind, not)| (dump && not).then_some(kind))
                .collect(),
        }
    }
}

fn member(objects: &Objects) -> Member {
    let mut nodes: BTreeMap<_, _> = objects
        .nodes
        .iter()
        .map(|(name, node)| (name.clone(), convert::node::to_core(node)))
        .collect();
    // A dump may be of any earlier time, so the age of a check-in counts from the newest one in it.
    let last_seen = objects.nodes.iter();
    let last_seen = last_seen.filter_map(|(name, node)| Some((name.clone(), convert::node::last_seen(node)?)));
    for (name, age) in checkin::ages(&last_seen.collect(), k8s_openapi::jiff::Timestamp::now().as_second()) {
        if let Some(node) = nodes.get_mut(&name) {
            node.silent = age >= checkin::SILENT;
        }
    }
    // A dump does not say which CRDs are there. Where kg publishes keys and no agent of ours does, nobody reads policies.
    let runs_kg = nodes.values().any(|node| node.public_key != Claim::Absent);
    let runs_agent = nodes.values().any(|node| node.server != Server::Kilo);
    let policies = match objects.served {
        Some(served) => served.policies,
        None => runs_agent || !runs_kg || !objects.policies.is_empty(),
    };
    let peers = objects.served.is_none_or(|served| served.peers);
    Member {
        uid: objects.uid.clone(),
        peers: peers.then(|| {
            let ours = objects.peers.iter();
            ours.map(|(name, peer)| (name.clone(), convert::peer::to_core(peer)))
                .collect()
        }),
        policies: policies.then(|| {
            let ours = objects.policies.iter();
            ours.map(|(name, policy)| (name.clone(), convert::policy::to_core(policy)))
                .collect()
        }),
        accesses: objects.served.is_none_or(|served| served.accesses).then(|| {
            let ours = objects.accesses.iter();
            ours.map(|(name, access)| (name.clone(), convert::sandbox::to_core(access)))
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
        // Namespaces that the account may not read are reported elsewhere; a dump contains all of its namespaces.
        unlisted: Unlisted::default(),
        api_endpoints: convert::service::api_endpoints(objects.slices.values()),
        nodes,
    }
}

/// As the controller sees them: one that says something wrong is not there.
fn gateways(objects: &Objects) -> BTreeMap<ObjectName, Gateway> {
    let said = objects.gateways.iter().filter_map(|(name, gateway)| {
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
    said.collect()
}

/// How names are made for this hub.
pub(crate) fn naming(hub: &str) -> names::Names {
    names::Names { hub: hub.to_owned() }
}
