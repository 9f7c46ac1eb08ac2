//! Tests which changes the planner follows (it updates its last plan), and which changes make it plan all meshes anew.
//! Tests with generated input check that an updated plan is right (`crates/core/tests/properties/follow.rs`).

use std::sync::Arc;

use super::*;
use crate::planner::Planner;

/// Why all meshes were planned anew, and the steps.
type Outcome = (Option<NotFollowed>, Vec<(Action, String)>);

/// A mesh of two clusters to which all objects were written.
struct Followed {
    mesh: Mesh,
    seen: Observations,
    planner: Planner,
}

impl Followed {
    fn new() -> Self {
        let (mut mesh, mut seen) = (two_clusters(), seen());
        write_plan(&mesh, &mut seen);
        store_anchors(&mut mesh, &seen);
        let mut followed = Self {
            mesh,
            seen,
            planner: Planner::default(),
        };
        assert_eq!(followed.plan().0, Some("there is no earlier plan"));
        assert_eq!(followed.plan(), (None, vec![]));
        followed
    }

    fn plan(&mut self) -> Outcome {
        let seen = Arc::new(self.seen.clone());
        let meshes = std::slice::from_ref(&self.mesh);
        let planned = self.planner.plan(meshes, &seen, &Settings::default(), &TestNaming);
        let steps = planned.steps.values().flat_map(|steps| summaries(steps));
        (planned.not_followed, steps.collect())
    }

    fn edit(&mut self, change: impl FnOnce(&mut Member)) -> Outcome {
        edit(&mut self.seen, &secret("tenant"), change);
        self.plan()
    }

    /// Changes the Node `x` of the tenant, of which the hub has a Peer.
    fn edit_node(&mut self, change: impl FnOnce(&mut Node)) -> Outcome {
        self.edit(|m| change(m.nodes.get_mut("x").unwrap()))
    }

    fn write(&mut self) -> Outcome {
        write_plan(&self.mesh, &mut self.seen);
        self.plan()
    }
}

fn step(action: Action, peer: &str) -> Vec<(Action, String)> {
    vec![(action, peer.to_owned())]
}

#[test]
fn changed_node_and_its_written_peer_are_followed() {
    let mut mesh = Followed::new();
    let updated = (None, step(Action::Update, "m--tenant--x"));
    let endpoint = |node: &mut Node| node.kilo_endpoint = Claim::Valid(Endpoint::Ip("192.0.2.9:7".parse().unwrap()));
    assert_eq!(mesh.edit_node(endpoint), updated);
    assert_eq!(mesh.write(), (None, vec![]));
    assert_eq!(mesh.edit_node(|node| node.public_key = Claim::Valid(key(77))), updated);
    assert_eq!(mesh.write(), (None, vec![]));
    assert_eq!(mesh.edit_node(|node| node.ready = false), (None, vec![]));
    assert_eq!(
        mesh.edit_node(|node| node.force_endpoint = Claim::Invalid("no port".into()))
            .0,
        None
    );
    assert_eq!(mesh.plan().1, step(Action::Delete, "m--tenant--x"));
}

#[test]
fn added_and_deleted_nodes_are_followed() {
    let mut mesh = Followed::new();
    let added = mesh.edit(|m| m.nodes.insert("y".into(), node(2, 2)));
    assert_eq!(added, (None, step(Action::Create, "m--tenant--y")));
    assert_eq!(mesh.write(), (None, vec![]));
    let gone = mesh.edit(|m| assert!(m.nodes.remove("y")));
    assert_eq!(gone, (None, step(Action::Delete, "m--tenant--y")));
    assert_eq!(mesh.write(), (None, vec![]));
    // Many Nodes at once.
    let many = mesh.edit(|m| m.nodes.extend((10..90).map(|n| (format!("n{n}"), node(2, n)))));
    assert_eq!((many.0, many.1.len()), (Some("many Nodes changed"), 80));
}

#[test]
fn change_that_may_concern_other_nodes_is_not_followed() {
    let anew = |change: fn(&mut Followed) -> Outcome| change(&mut Followed::new()).0.unwrap();
    let copied_key = |mesh: &mut Followed| mesh.edit_node(|node| node.public_key = Claim::Valid(key(17)));
    assert_eq!(anew(copied_key), "two Nodes have, or had, the same key");
    let held = |mesh: &mut Followed| {
        edit(&mut mesh.seen, &ClusterIdentity::Local, |m| {
            m.nodes.get_mut("a").unwrap().public_key = Claim::Absent;
        });
        mesh.plan()
    };
    assert_eq!(
        anew(held),
        "a changed node is held, or is led by another node of its Kilo location"
    );
    let family = |mesh: &mut Followed| mesh.edit_node(|node| node.internal_ips = ips(&["fd00::1"]));
    assert_eq!(
        anew(family),
        "the IP families, the discovered endpoints or the networks of a member changed"
    );
    let lost = |mesh: &mut Followed| {
        let missing = Observation::Missing("no Secret".into());
        mesh.seen.members.insert(secret("tenant"), missing);
        mesh.plan()
    };
    assert_eq!(anew(lost), "the state of a member that is or was not observed changed");
    let edited = |mesh: &mut Followed| {
        mesh.mesh.clusters[0].persistent_keepalive = 15;
        mesh.plan()
    };
    assert_eq!(anew(edited), "the ClusterMeshes or the settings changed");
    // The Service network of the hub is in the Peer of `a` or `b` in the tenant.
    let anchor = |mesh: &mut Followed| {
        edit(&mut mesh.seen, &ClusterIdentity::Local, |m| {
            m.nodes.values_mut().for_each(|node| node.ready = false);
        });
        mesh.plan()
    };
    assert_eq!(anew(anchor), "an anchor changed");
    let foreign = |mesh: &mut Followed| {
        mesh.edit(|m| {
            let spec = Err("does not parse".to_owned());
            let owner = Owner::default();
            m.peers
                .as_mut()
                .unwrap()
                .insert("laptop".into(), ObservedPeer { owner, spec });
        })
    };
    assert_eq!(anew(foreign), "a Peer of another owner changed");
    let policy = |mesh: &mut Followed| mesh.edit(|m| m.policies.as_mut().unwrap().clear());
    assert_eq!(anew(policy), "an object other than a Node or Peer changed");
}

/// The plan contains whether a member is fresh, because objects that describe the member are deleted only then.
#[test]
fn changed_freshness_is_followed() {
    let mut mesh = Followed::new();
    let tenant = mesh.seen.members[&secret("tenant")].last().cloned().unwrap();
    let set = |mesh: &mut Followed, state: fn(Member) -> Observation<Member>| {
        mesh.seen.members.insert(secret("tenant"), state(tenant.clone()));
        mesh.plan()
    };
    edit(&mut mesh.seen, &ClusterIdentity::Local, |hub| {
        let peers = hub.peers.as_mut().unwrap();
        let mut peer = peers.get("m--tenant--x").unwrap().clone();
        peer.spec.as_mut().unwrap().public_key = key(99);
        peers.insert("old".into(), peer.clone());
        peer.spec = Err("does not parse".into());
        peers.insert("broken".into(), peer);
        let policies = hub.policies.as_mut().unwrap();
        let policy = policies
            .values()
            .find(|p| p.owner.source_cluster.as_deref() == Some("tenant"));
        policies.insert("old".into(), policy.unwrap().clone());
    });
    let deletes = ["broken", "old", "old"]
        .map(|name| (Action::Delete, name.to_owned()))
        .to_vec();
    assert_eq!(mesh.plan().1, deletes);
    for _ in 0..2 {
        let stale = set(&mut mesh, |member| Observation::Stale(member, "the watch ended".into()));
        assert_eq!(stale, (None, vec![]));
        let other_reason = set(&mut mesh, |member| Observation::Stale(member, "no answer".into()));
        assert_eq!(other_reason, (None, vec![]));
        assert_eq!(set(&mut mesh, Observation::Fresh), (None, deletes.clone()));
    }
}

#[test]
fn mesh_that_shares_a_cluster_is_not_followed() {
    let mut mesh = Followed::new();
    let other = Mesh {
        id: MeshId {
            name: "n".into(),
            ..id()
        },
        ..two_clusters()
    };
    let meshes = [mesh.mesh.clone(), other];
    let mut plan = |seen: &Observations| {
        let seen = Arc::new(seen.clone());
        mesh.planner
            .plan(&meshes, &seen, &Settings::default(), &TestNaming)
            .not_followed
    };
    assert_eq!(plan(&mesh.seen), Some("the ClusterMeshes or the settings changed"));
    edit(&mut mesh.seen, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().ready = false
    });
    assert_eq!(
        plan(&mesh.seen),
        Some("a cluster is an entry of several meshes, or of one mesh twice")
    );
}
