//! Property tests: after arbitrary sequences of changes, a plan that followed them equals one that is made anew, and the steps of
//! both plans are equal.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use clustermesh_core::{
    diff::{Item, Step, diff},
    key::PublicKey,
    mesh::{Addressing, Locations, Mesh, MeshId, Profile},
    observe::{
        Claim, Endpoint, Member, Node, Observation, Observations, ObservedPeer, ObservedPolicy, Owner, PolicySpec,
        Rows, Server,
    },
    plan::{NotFollowed, Plan, Settings, plan},
    planner::{Planner, Steps},
};
use clustermesh_scenarios::{Scenario, TestNaming, after_writes, identity, ip, node, scenario};
use ipnet::IpNet;
use proptest::{collection, prelude::*, sample::select, strategy::ValueTree, test_runner::TestRunner};

/// The names of the nodes of each cluster.
const NODES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// What changes.
#[derive(Debug, Clone)]
enum Change {
    /// A Node is added, or gets other values.
    Node(usize, usize, Box<Node>),
    /// One field of a Node changes.
    Field(usize, usize, Field),
    /// A Node is deleted.
    NodeGone(usize, usize),
    /// Some of the planned steps for a member are written: bit `i` of the mask selects those whose position modulo 8 is `i`.
    Written(usize, u8),
    /// An external change: a Peer is edited, deleted, renamed or copied.
    Peer(usize, usize, PeerEdit),
    /// A member becomes stale, or fresh again.
    Freshness(usize),
    /// An entry of the first mesh is changed.
    Entry(usize, EntryEdit),
    /// Something else that was observed of a member changes.
    Member(usize, MemberEdit),
}

#[derive(Debug, Clone, Copy)]
enum EntryEdit {
    Quarantine,
    Keepalive,
}

#[derive(Debug, Clone, Copy)]
enum MemberEdit {
    Policies,
    /// A PeerPolicy of another member that is not planned is created.
    OldPolicy,
    Peers,
    ApiEndpoint,
}

#[derive(Debug, Clone)]
enum Field {
    Ready,
    Deleting,
    Leaving,
    Silent,
    Agent,
    Key(Claim<PublicKey>),
    /// The key of another node.
    KeyOf(usize, usize),
    Created,
    WireguardAddress(Claim<IpNet>),
    Endpoint(Claim<Endpoint>),
    Explicit(Claim<Endpoint>),
    InternalIp(Vec<IpAddr>),
    ExternalIp(Vec<IpAddr>),
    Keepalive(u16),
    Discovered(usize, usize, SocketAddr),
}

#[derive(Debug, Clone, Copy)]
enum PeerEdit {
    Deleted,
    Renamed,
    Keepalive,
    Endpoint,
    WithoutPrefixes,
    Unlabelled,
    Foreign,
    Copied,
    OfOtherSource,
    /// The Peer gets the key of the next one.
    OtherKey,
}

fn field(n: usize) -> impl Strategy<Value = Field> {
    let own = move |host: u8| -> IpAddr { format!("172.30.{}.{host}", n + 1).parse().unwrap() };
    let public = |host: u8| -> IpAddr { format!("203.0.113.{host}").parse().unwrap() };
    let address = prop_oneof![4 => (1u8..30).prop_map(own), 4 => (1u8..30).prop_map(public), 1 => ip()];
    let socket = (address.clone(), select(&[51820u16, 7][..])).prop_map(SocketAddr::from);
    let at = socket.clone().prop_map(|at| Claim::Valid(Endpoint::Ip(at)));
    let endpoint = prop_oneof![
        6 => at,
        1 => Just(Claim::Absent),
        1 => Just(Claim::Valid(Endpoint::Dns("a.example".into(), 51820))),
    ];
    let key =
        prop_oneof![8 => (50u8..60).prop_map(|key| Claim::Valid(PublicKey::new([key; 32]))), 1 => Just(Claim::Absent)];
    prop_oneof![
        2 => Just(Field::Ready),
        1 => Just(Field::Deleting),
        1 => Just(Field::Leaving),
        1 => Just(Field::Silent),
        1 => Just(Field::Agent),
        3 => key.prop_map(Field::Key),
        1 => (0usize..3, 0usize..5).prop_map(|(n, k)| Field::KeyOf(n, k)),
        1 => Just(Field::Created),
        1 => select(vec![Claim::Absent, Claim::Invalid("x".into())]).prop_map(Field::WireguardAddress),
        6 => endpoint.clone().prop_map(Field::Endpoint),
        2 => endpoint.prop_map(Field::Explicit),
        2 => collection::vec(address.clone(), 0..2).prop_map(Field::InternalIp),
        2 => collection::vec(address, 0..2).prop_map(Field::ExternalIp),
        1 => select(&[0u16, 25][..]).prop_map(Field::Keepalive),
        2 => (0usize..3, 0usize..5, socket).prop_map(|(n, k, at)| Field::Discovered(n, k, at)),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    let of_node = (0usize..3, 0usize..5).prop_flat_map(|(n, k)| {
        let number = u8::try_from(k).unwrap() + 1;
        prop_oneof![
            2 => node(n, number).prop_map(move |node| Change::Node(n, k, Box::new(node))),
            6 => field(n).prop_map(move |field| Change::Field(n, k, field)),
            1 => Just(Change::NodeGone(n, k)),
        ]
    });
    let edit = select(
        &[
            PeerEdit::Deleted,
            PeerEdit::Renamed,
            PeerEdit::Keepalive,
            PeerEdit::Endpoint,
            PeerEdit::WithoutPrefixes,
            PeerEdit::Unlabelled,
            PeerEdit::Foreign,
            PeerEdit::Copied,
            PeerEdit::OfOtherSource,
            PeerEdit::OtherKey,
        ][..],
    );
    let entry = select(&[EntryEdit::Quarantine, EntryEdit::Keepalive][..]);
    let member = select(
        &[
            MemberEdit::Policies,
            MemberEdit::OldPolicy,
            MemberEdit::Peers,
            MemberEdit::ApiEndpoint,
        ][..],
    );
    let rare = prop_oneof![
        1 => (0usize..3, entry).prop_map(|(n, edit)| Change::Entry(n, edit)),
        1 => (0usize..3, member).prop_map(|(n, edit)| Change::Member(n, edit)),
    ];
    prop_oneof![
        12 => of_node,
        8 => (0usize..3, prop_oneof![1 => Just(255u8), 1 => any::<u8>()]).prop_map(|(n, mask)| Change::Written(n, mask)),
        3 => (0usize..3, 0usize..20, edit).prop_map(|(n, position, edit)| Change::Peer(n, position, edit)),
        2 => (0usize..3).prop_map(Change::Freshness),
        1 => rare,
    ]
}

/// Some changes before each plan.
fn changes() -> impl Strategy<Value = Vec<Vec<Change>>> {
    collection::vec(collection::vec(change(), 1..3), 1..12)
}

/// Scenarios of one mesh without anything that prevents following. The members already contain the planned objects.
fn plain() -> impl Strategy<Value = Scenario> {
    let only_agents = prop::bool::weighted(0.7);
    let routed = prop::bool::weighted(0.8);
    (scenario(), only_agents, routed).prop_map(|(mut scenario, only_agents, routed)| {
        scenario.meshes.truncate(1);
        let mesh = &mut scenario.meshes[0];
        (mesh.paused, mesh.deleting) = (false, false);
        for cluster in &mut mesh.clusters {
            (cluster.profile, cluster.locations) = (Profile::ClusterMeshed, Locations::Ignored);
            cluster.egress.clear();
            cluster.max_nodes = 5000;
            if routed {
                cluster.addressing = Addressing::Routed;
            }
        }
        for observation in scenario.seen.members.values_mut() {
            let mut member = observation.last().cloned().unwrap_or_default();
            member.peers = Some(Rows::default());
            member.policies = Some(BTreeMap::new());
            member.gateways.clear();
            member.services.clear();
            member.slices.clear();
            for node in member.nodes.values_mut() {
                node.held_for = None;
                if only_agents {
                    node.server = Server::Agent;
                }
            }
            *observation = Observation::Fresh(member);
        }
        after_writes(scenario)
    })
}

fn member_mut(seen: &mut Observations, n: usize) -> Option<&mut Member> {
    match seen.members.get_mut(&identity(n))? {
        Observation::Fresh(member) | Observation::Stale(member, _) => Some(member),
        Observation::Unreachable(_) | Observation::Missing(_) => None,
    }
}

fn set_field(node: &mut Node, field: &Field, keys: &[Vec<PublicKey>]) {
    match field {
        Field::Ready => node.ready = !node.ready,
        Field::Deleting => node.deleting = !node.deleting,
        Field::Leaving => node.leaving = !node.leaving,
        Field::Silent => node.silent = !node.silent,
        Field::Agent => node.server = Server::Agent,
        Field::Key(key) => node.public_key = key.clone(),
        Field::KeyOf(n, k) => {
            if let Some(key) = keys[*n].get(*k) {
                node.public_key = Claim::Valid(*key);
            }
        }
        Field::Created => node.created = (node.created + 1) % 3,
        Field::WireguardAddress(claim) => node.wireguard_ip = claim.clone(),
        Field::Endpoint(endpoint) => node.kilo_endpoint = endpoint.clone(),
        Field::Explicit(endpoint) => node.clustermesh_endpoint = endpoint.clone(),
        Field::InternalIp(addresses) => node.internal_ips = addresses.clone(),
        Field::ExternalIp(addresses) => node.external_ips = addresses.clone(),
        Field::Keepalive(seconds) => node.persistent_keepalive = *seconds,
        Field::Discovered(n, k, at) => {
            node.discovered.extend(keys[*n].get(*k).map(|key| (*key, *at)));
        }
    }
}

fn edit_peer(member: &mut Member, position: usize, edit: PeerEdit) {
    let Some(peers) = &mut member.peers else { return };
    let name = peers.keys().nth(position).map(str::to_owned);
    let Some((name, mut peer)) = name.and_then(|name| Some((name.clone(), peers.get(&name)?.clone()))) else {
        return;
    };
    let keys: Vec<PublicKey> = peers
        .values()
        .filter_map(|peer| Some(peer.spec.as_ref().ok()?.public_key))
        .collect();
    match (edit, &mut peer.spec) {
        (PeerEdit::Deleted, _) => drop(peers.remove(&name)),
        (PeerEdit::Renamed, _) => {
            peers.remove(&name);
            peers.insert(format!("{name}-renamed"), peer);
        }
        (PeerEdit::Foreign, _) => {
            peer.owner = Owner::default();
            peers.insert(format!("{name}-foreign"), peer);
        }
        (PeerEdit::Copied, _) => {
            peers.insert(format!("{name}-copied"), peer);
        }
        (PeerEdit::OfOtherSource, _) => {
            peer.owner.source_cluster = Some(format!("c{}", position % 3));
            peers.insert(name, peer);
        }
        (PeerEdit::Unlabelled, _) => {
            peer.owner.mesh = None;
            peers.insert(name, peer);
        }
        (PeerEdit::Keepalive, Ok(spec)) => {
            spec.persistent_keepalive = 25;
            peers.insert(name, peer);
        }
        (PeerEdit::Endpoint, Ok(spec)) => {
            spec.endpoint = Some(Endpoint::Ip("198.51.100.7:7".parse().unwrap()));
            peers.insert(name, peer);
        }
        (PeerEdit::WithoutPrefixes, Ok(spec)) => {
            spec.allowed_ips.clear();
            peers.insert(name, peer);
        }
        (PeerEdit::OtherKey, Ok(spec)) => {
            spec.public_key = keys[(position + 1) % keys.len()];
            peers.insert(name, peer);
        }
        (_, Err(_)) => {}
    }
}

fn write(member: &mut Member, step: &Step) {
    let (Some(peers), Item::Peer(name, spec)) = (&mut member.peers, &step.item) else {
        return;
    };
    match spec {
        Some(spec) => {
            let (owner, spec) = (Owner::clone(&step.owner), Ok(spec.as_ref().clone()));
            peers.insert(name.clone(), ObservedPeer { owner, spec });
        }
        None => drop(peers.remove(name)),
    }
}

/// A PeerPolicy of the mesh for the member `source`.
fn old_policy(mesh: &MeshId, source: usize) -> ObservedPolicy {
    let owner = Owner {
        mesh: Some(mesh.name.clone()),
        mesh_namespace: Some(mesh.namespace.clone()),
        hub: Some("hub".into()),
        source_cluster: Some(format!("c{source}")),
    };
    ObservedPolicy {
        owner,
        spec: Ok(PolicySpec::default()),
    }
}

fn apply(meshes: &mut [Mesh], seen: &mut Observations, change: &Change, last: &Plan) {
    let keys: Vec<Vec<PublicKey>> = (0..3)
        .map(|n| {
            let member = seen.members[&identity(n)].last();
            let nodes = member.into_iter().flat_map(|member| member.nodes.values());
            nodes.filter_map(|node| node.public_key.value().copied()).collect()
        })
        .collect();
    match change {
        Change::Node(n, k, node) => {
            let Some(member) = member_mut(seen, *n) else { return };
            let mut node = Node::clone(node);
            node.held_for = None;
            // A Node keeps its creationTimestamp.
            node.created = member.nodes.get(NODES[*k]).map_or(node.created, |old| old.created);
            member.nodes.insert(NODES[*k].to_owned(), node);
        }
        Change::Field(n, k, field) => {
            let node = member_mut(seen, *n).and_then(|member| member.nodes.get_mut(NODES[*k]));
            if let Some(node) = node {
                set_field(node, field, &keys);
            }
        }
        Change::NodeGone(n, k) => {
            if let Some(member) = member_mut(seen, *n) {
                member.nodes.remove(NODES[*k]);
            }
        }
        Change::Written(n, mask) => {
            let Some(member) = member_mut(seen, *n) else { return };
            let steps = diff(last, &identity(*n), member);
            for (position, step) in steps.iter().enumerate() {
                if mask >> (position % 8) & 1 == 1 {
                    write(member, step);
                }
            }
        }
        Change::Peer(n, position, edit) => {
            if let Some(member) = member_mut(seen, *n) {
                edit_peer(member, *position, *edit);
            }
        }
        Change::Entry(n, edit) => {
            let entry = &mut meshes[0].clusters[*n];
            match edit {
                EntryEdit::Quarantine => entry.quarantine = !entry.quarantine,
                EntryEdit::Keepalive => entry.persistent_keepalive = 15 - entry.persistent_keepalive,
            }
        }
        Change::Member(n, edit) => {
            let Some(member) = member_mut(seen, *n) else { return };
            match edit {
                MemberEdit::Policies => {
                    member.policies = member.policies.is_none().then(BTreeMap::new);
                }
                MemberEdit::OldPolicy => {
                    let policies = member.policies.iter_mut();
                    policies.for_each(|policies| {
                        drop(policies.insert("old".into(), old_policy(&meshes[0].id, (n + 1) % 3)))
                    });
                }
                MemberEdit::Peers => member.peers = member.peers.is_none().then(Rows::default),
                MemberEdit::ApiEndpoint => drop(member.api_endpoints.insert("172.30.1.9:6443".parse().unwrap())),
            }
        }
        Change::Freshness(n) => {
            let observation = seen.members.get_mut(&identity(*n)).unwrap();
            *observation = match observation.clone() {
                Observation::Fresh(member) => Observation::Stale(member, "watch broken".into()),
                Observation::Stale(member, _) => Observation::Fresh(member),
                other => other,
            };
        }
    }
}

fn all_steps(plan: &Plan, seen: &Observations) -> Steps {
    let members = seen.members.iter();
    let observed = members.filter_map(|(identity, observation)| Some((identity, observation.last()?)));
    observed
        .map(|(identity, member)| (identity.clone(), diff(plan, identity, member)))
        .collect()
}

/// Plans after each group of changes. Returns for each group whether it was followed, and else why not.
fn follow(scenario: &Scenario, changes: &[Vec<Change>]) -> Result<Vec<Option<NotFollowed>>, TestCaseError> {
    let (settings, mut planner) = (Settings::default(), Planner::default());
    let mut meshes = scenario.meshes.clone();
    let mut seen = Arc::new(scenario.seen.clone());
    let mut last = planner.plan(&meshes, &seen, &settings, &TestNaming).plan;
    let mut outcomes = Vec::new();
    for group in changes {
        let mut next = Observations::clone(&seen);
        group
            .iter()
            .for_each(|change| apply(&mut meshes, &mut next, change, &last));
        drop(last);
        seen = Arc::new(next);
        let planned = planner.plan(&meshes, &seen, &settings, &TestNaming);
        let anew = plan(&meshes, &seen, &settings, &TestNaming);
        prop_assert_eq!(&*planned.plan, &anew);
        prop_assert_eq!(planned.steps, &all_steps(&anew, &seen));
        outcomes.push(planned.not_followed);
        last = planned.plan;
    }
    Ok(outcomes)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn followed_plan_equals_one_that_is_made_anew(scenario in scenario(), changes in changes()) {
        follow(&scenario, &changes)?;
    }

    #[test]
    fn followed_plan_of_a_plain_mesh_equals_one_that_is_made_anew(scenario in plain(), changes in changes()) {
        follow(&scenario, &changes)?;
    }
}

/// Without this, the properties could hold because nothing is followed.
#[test]
fn changes_of_plain_meshes_are_often_followed() {
    let mut runner = TestRunner::deterministic();
    let mut counts: BTreeMap<Option<NotFollowed>, usize> = BTreeMap::new();
    for _ in 0..200 {
        let scenario = plain().new_tree(&mut runner).unwrap().current();
        let changes = changes().new_tree(&mut runner).unwrap().current();
        for outcome in follow(&scenario, &changes).unwrap() {
            *counts.entry(outcome).or_default() += 1;
        }
    }
    let all: usize = counts.values().sum();
    assert!(counts[&None] * 3 > all, "{counts:#?}");
}
