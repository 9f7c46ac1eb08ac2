//! Tests the planner by examples; `crates/core/tests/properties` tests its rules with generated input.
//!
//! This file has the shared fixture: a mesh of two clusters, and helpers that plan the mesh and write the plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use super::*;
use crate::{
    diff::{Action, Item, Step, diff},
    key::PublicKey,
    mesh::{Addressing, Cluster, Export, Grant, GrantPort, Locations, PodNetwork, PortRef, Profile, Protocol},
    observe::{
        Claim, Endpoint, Granularity, Member, Node, Observation, ObservedAccess, ObservedPeer, ObservedPolicy, Owner,
        PeerRole, PeerSpec, Pod, PolicySpec, Rows, Server, Service, ServicePort, Slice, SliceEndpoint,
    },
};

mod addresses;
mod anchors;
mod existing_peers;
mod follow;
mod keys;
mod kilo;
mod locations;
mod nat;
mod networks;
mod networks_in_use;
mod nodes;
mod ownership;
mod sandbox;
mod wide_changes;

struct TestNaming;

impl Naming for TestNaming {
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, is_name_taken: bool) -> String {
        let tail = if is_name_taken {
            format!("-{}", mesh.namespace)
        } else {
            String::new()
        };
        format!("{}--{cluster}--{node}{tail}", mesh.name)
    }

    fn policy(&self, mesh: &MeshId, cluster: &str, is_name_taken: bool) -> String {
        let tail = if is_name_taken {
            format!("-{}", mesh.namespace)
        } else {
            String::new()
        };
        format!("{}--{cluster}{tail}", mesh.name)
    }

    fn sandbox_id(&self, identity: &ClusterIdentity) -> String {
        identity.to_string()
    }

    fn slice(&self, _mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String {
        format!("{}-{}-{index}", service.name, if v6 { 6 } else { 4 })
    }
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

fn ips(list: &[&str]) -> Vec<std::net::IpAddr> {
    list.iter().map(|ip| ip.parse().unwrap()).collect()
}

fn net_set(list: &[&str]) -> BTreeSet<IpNet> {
    nets(list).into_iter().collect()
}

fn secret(name: &str) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: "meshes".into(),
        name: name.into(),
        key: "value".into(),
        context: None,
    }
}

pub(crate) fn entry(name: &str, identity: ClusterIdentity, allowed_networks: &[&str]) -> Cluster {
    Cluster {
        name: name.into(),
        identity,
        profile: Profile::ClusterMeshed,
        addressing: Addressing::Routed,
        allowed: nets(allowed_networks),
        anchored: None,
        previous_anchors: BTreeMap::new(),
        anchors: 1,
        pod_network: PodNetwork::PerNode,
        exports: vec![],
        wireguard_port: 51820,
        persistent_keepalive: 0,
        locations: Locations::Ignored,
        endpoint_networks: vec![],
        egress: vec![],
        quarantine: false,
        confined_to: None,
        max_nodes: 5000,
    }
}

fn id() -> MeshId {
    MeshId {
        namespace: "meshes".into(),
        name: "m".into(),
    }
}

fn two_clusters() -> Mesh {
    Mesh {
        id: id(),
        created: 1,
        paused: false,
        deleting: false,
        adopt_hub: None,
        clusters: vec![
            entry(
                "mgmt",
                ClusterIdentity::Local,
                &["10.1.0.0/16", "100.66.1.0/24", "10.96.0.0/16"],
            ),
            entry("tenant", secret("tenant"), &["10.2.0.0/16", "100.66.2.0/24"]),
        ],
        accepted: BTreeMap::new(),
    }
}

fn key(n: u8) -> PublicKey {
    PublicKey::new([n; 32])
}

fn node(cluster: u8, n: u8) -> Node {
    Node {
        created: i64::from(n),
        ready: true,
        pod_cidrs: vec![Claim::Valid(format!("10.{cluster}.{n}.0/24").parse().unwrap())],
        wireguard_ip: Claim::Valid(format!("100.66.{cluster}.{n}/24").parse().unwrap()),
        public_key: Claim::Valid(key(cluster * 16 + n)),
        kilo_endpoint: Claim::Valid(Endpoint::Ip(format!("172.30.{cluster}.{n}:51820").parse().unwrap())),
        internal_ips: vec![format!("172.30.{cluster}.{n}").parse().unwrap()],
        server: Server::Agent,
        ..Node::default()
    }
}

fn member(nodes: &[(&str, Node)]) -> Member {
    Member {
        nodes: nodes
            .iter()
            .map(|(name, node)| ((*name).to_owned(), node.clone()))
            .collect(),
        peers: Some(Rows::default()),
        policies: Some(BTreeMap::new()),
        ..Member::default()
    }
}

fn seen() -> Observations {
    Observations {
        members: BTreeMap::from([
            (
                ClusterIdentity::Local,
                Observation::Fresh(member(&[("a", node(1, 1)), ("b", node(1, 2))])),
            ),
            (secret("tenant"), Observation::Fresh(member(&[("x", node(2, 1))]))),
        ]),
        hub: "hub".into(),
        resolved: BTreeMap::new(),
    }
}

fn edit(seen: &mut Observations, identity: &ClusterIdentity, change: impl FnOnce(&mut Member)) {
    if let Some(Observation::Fresh(member)) = seen.members.get_mut(identity) {
        change(member);
    }
}

fn plan_mesh(mesh: &Mesh, seen: &Observations) -> (Plan, MeshPlan) {
    let plan = plan(std::slice::from_ref(mesh), seen, &Settings::default(), &TestNaming);
    let mesh_plan = plan.meshes[&mesh.id].clone();
    (plan, mesh_plan)
}

/// The allowed IPs of a Peer in a target.
fn allowed<'a>(plan: &'a MeshPlan, target: &str, peer: &str) -> &'a BTreeSet<IpNet> {
    &plan.targets[target].peers[peer].spec.allowed_ips
}

/// Applies the steps to the observed state of a member, as its API server would.
fn apply(member: &mut Member, steps: &[Arc<Step>]) {
    for step in steps {
        let owner = Owner::clone(&step.owner);
        match step.item.clone() {
            Item::Peer(name, Some(spec)) => {
                let peer = ObservedPeer {
                    owner,
                    spec: Ok(Arc::unwrap_or_clone(spec)),
                };
                member.peers.as_mut().unwrap().insert(name, peer);
            }
            Item::Peer(name, None) => {
                member.peers.as_mut().unwrap().remove(&name);
            }
            Item::Policy(name, Some(spec)) => {
                let policy = ObservedPolicy { owner, spec: Ok(*spec) };
                member.policies.as_mut().unwrap().insert(name, policy);
            }
            Item::Policy(name, None) => {
                member.policies.as_mut().unwrap().remove(&name);
            }
            Item::Access(name, Some(spec)) => {
                let access = ObservedAccess {
                    owner,
                    generation: 1,
                    spec: Ok(*spec),
                };
                member.accesses.as_mut().unwrap().insert(name, access);
            }
            Item::Access(name, None) => {
                member.accesses.as_mut().unwrap().remove(&name);
            }
            Item::Service(name, Some(mirror)) => {
                member.services.insert(
                    name,
                    Service {
                        managed: Some(owner),
                        selectorless: true,
                        ports: mirror.ports,
                        families: mirror.families,
                        ..Service::default()
                    },
                );
            }
            Item::Service(name, None) => {
                member.services.remove(&name);
            }
            Item::Slice(name, Some(slice)) => {
                let (service, slice) = *slice;
                let slice = Slice {
                    managed: Some(owner),
                    service,
                    v6: slice.v6,
                    ports: slice.ports,
                    endpoints: slice.endpoints,
                };
                member.slices.insert(name, slice);
            }
            Item::Slice(name, None) => {
                member.slices.remove(&name);
            }
        }
    }
}

fn write_plan(mesh: &Mesh, seen: &mut Observations) {
    let (plan, _) = plan_mesh(mesh, seen);
    for (identity, observation) in &mut seen.members {
        if let Observation::Fresh(member) = observation {
            let steps = diff(&plan, identity, member);
            apply(member, &steps);
        }
    }
}

/// Stores the anchored networks of the plan in the mesh, as the controller does through the status.
fn store_anchors(mesh: &mut Mesh, seen: &Observations) {
    let (_, mesh_plan) = plan_mesh(mesh, seen);
    for cluster in &mut mesh.clusters {
        cluster.previous_anchors = mesh_plan.clusters[&cluster.name].anchored.clone();
    }
}

/// The action and the object name of each step.
fn summaries(steps: &[Arc<Step>]) -> Vec<(Action, String)> {
    steps.iter().map(|step| (step.action, step.item.name())).collect()
}
