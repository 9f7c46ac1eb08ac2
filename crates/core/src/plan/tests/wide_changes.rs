//! Changes that look as if they concerned only one Peer, but change more of the plan.

use std::sync::Arc;

use super::*;
use crate::planner::Planner;

/// A mesh whose plan is written, and the planner that follows its changes.
struct Followed {
    mesh: Mesh,
    seen: Observations,
    planner: Planner,
}

impl Followed {
    /// Writes the plan into the members, then applies `change`. Only then does the planner plan for the first time.
    fn new(mut mesh: Mesh, mut seen: Observations, change: impl FnOnce(&mut Observations)) -> Self {
        for _ in 0..3 {
            write_plan(&mesh, &mut seen);
            store_anchors(&mut mesh, &seen);
        }
        change(&mut seen);
        let planner = Planner::default();
        let mut followed = Self { mesh, seen, planner };
        followed.check(|_| {});
        followed
    }

    /// Applies a change. The planner's plan and steps must then equal those of a plan that is computed anew.
    fn check(&mut self, change: impl FnOnce(&mut Observations)) {
        change(&mut self.seen);
        let (meshes, seen) = (std::slice::from_ref(&self.mesh), Arc::new(self.seen.clone()));
        let planned = self.planner.plan(meshes, &seen, &Settings::default(), &TestNaming);
        assert_eq!(*planned.plan, plan(meshes, &seen, &Settings::default(), &TestNaming));
        for (identity, observation) in &seen.members {
            let steps = observation.last().map(|member| diff(&planned.plan, identity, member));
            assert_eq!(planned.steps.get(identity), steps.as_ref());
        }
    }
}

/// Three clusters, of which the third has the node `z`.
fn three_clusters() -> (Mesh, Observations) {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    let third = entry("third", secret("third"), &["10.3.0.0/16", "100.66.3.0/24"]);
    mesh.clusters.push(third);
    let member = member(&[("z", node(3, 1))]);
    seen.members.insert(secret("third"), Observation::Fresh(member));
    (mesh, seen)
}

fn change_node(seen: &mut Observations, identity: &ClusterIdentity, name: &str, change: impl FnOnce(&mut Node)) {
    edit(seen, identity, |member| change(member.nodes.get_mut(name).unwrap()));
}

fn set_key(seen: &mut Observations, identity: &ClusterIdentity, node: &str, key: PublicKey) {
    change_node(seen, identity, node, |node| node.public_key = Claim::Valid(key));
}

/// The key of the node that [`node`] returns.
fn key_of_node(cluster: u8, n: u8) -> PublicKey {
    *node(cluster, n).public_key.value().unwrap()
}

fn remove_peer(seen: &mut Observations, identity: &ClusterIdentity, name: &str) {
    edit(seen, identity, |member| {
        assert!(member.peers.as_mut().unwrap().remove(name))
    });
}

/// Adds a changed copy of an existing Peer.
fn copy_peer(
    seen: &mut Observations,
    identity: &ClusterIdentity,
    from: &str,
    to: &str,
    change: impl FnOnce(&mut Owner, &mut PeerSpec),
) {
    edit(seen, identity, |member| {
        let peers = member.peers.as_mut().unwrap();
        let mut peer = peers[from].clone();
        change(&mut peer.owner, peer.spec.as_mut().unwrap());
        peers.insert(to.to_owned(), peer);
    });
}

const HUB: ClusterIdentity = ClusterIdentity::Local;

#[test]
fn address_of_quarantined_node_enters_closed_policy() {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    mesh.clusters[0].quarantine = true;
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    // The tenant's pods lie in the hub's network 10.1.0.0/16. So the tenant's policy for the hub leaves this network out, and
    // contains the allowed IPs of the hub's Peers instead.
    change_node(&mut seen, &secret("tenant"), "x", |x| {
        x.pod_cidrs = vec![Claim::Valid("10.1.7.0/24".parse().unwrap())];
    });
    let mut followed = Followed::new(mesh, seen, |_| {});
    followed.check(|seen| change_node(seen, &HUB, "a", |a| a.internal_ips.extend(ips(&["10.1.200.1"]))));
}

#[test]
fn deleted_peers_release_a_duplicate_key() {
    let (mesh, mut seen) = three_clusters();
    set_key(&mut seen, &secret("third"), "z", key(7));
    // The existing Peers of `z` have the key, so the planner skips `x`.
    let mut followed = Followed::new(mesh, seen, |seen| set_key(seen, &secret("tenant"), "x", key(7)));
    followed.check(|seen| {
        remove_peer(seen, &HUB, "m--third--z");
        remove_peer(seen, &secret("tenant"), "m--third--z");
    });
}

#[test]
fn changed_keys_of_two_members_end_a_duplicate() {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    // The hub has no PeerPolicies, so it gets no Peers of the quarantined tenant. Otherwise the Peer of `x` would be missing in
    // the hub because of the duplicate key, and this alone would make the planner plan anew.
    mesh.clusters[1].quarantine = true;
    edit(&mut seen, &HUB, |member| member.policies = None);
    set_key(&mut seen, &HUB, "a", key(7));
    set_key(&mut seen, &secret("tenant"), "x", key(7));
    let mut followed = Followed::new(mesh, seen, |_| {});
    followed.check(|seen| {
        set_key(seen, &HUB, "a", key(8));
        set_key(seen, &secret("tenant"), "x", key(9));
    });
}

fn kilo_nodes(seen: &mut Observations) {
    edit(seen, &secret("tenant"), |member| {
        member.nodes.insert("w".into(), node(2, 3));
        member.nodes.insert("y".into(), node(2, 2));
        for name in ["x", "y"] {
            let node = member.nodes.get_mut(name).unwrap();
            node.server = Server::Kilo;
            node.kilo_internal_ip = node.internal_ips.pop();
        }
    });
}

fn invalidate_address(node: &mut Node) {
    node.wireguard_ip = Claim::Invalid("x".into());
}

/// `x` and `y` publish neither a valid WireGuard address nor a granularity. Each keeps its Peer, until the Peer of `y` is
/// deleted: then `x` counts as the leader of `y`.
#[test]
fn kilo_node_whose_peer_is_deleted_gets_a_leader() {
    let mut seen = seen();
    kilo_nodes(&mut seen);
    let mut followed = Followed::new(two_clusters(), seen, |seen| {
        change_node(seen, &secret("tenant"), "x", invalidate_address);
        change_node(seen, &secret("tenant"), "y", invalidate_address);
    });
    followed.check(|seen| remove_peer(seen, &HUB, "m--tenant--y"));
}

/// `y` has neither a WireGuard address nor a Peer. When the address of `x`, which has a Peer, becomes invalid, `x` counts as the
/// leader of `y`.
#[test]
fn kilo_node_without_an_address_becomes_a_leader() {
    let mut seen = seen();
    kilo_nodes(&mut seen);
    change_node(&mut seen, &secret("tenant"), "y", |y| y.wireguard_ip = Claim::Absent);
    let mut followed = Followed::new(two_clusters(), seen, |_| {});
    followed.check(|seen| change_node(seen, &secret("tenant"), "x", invalidate_address));
}

/// The Peer of `z` has the source label of the tenant, and the keepalive for NATs. Because of this Peer, the planner gives the
/// keepalive to the tenant's Peers in the hub, until the label is corrected. The Peers of `third` have the keepalive in any case,
/// because of the Peer of `y`.
#[test]
fn corrected_source_label_ends_keepalive_of_wrong_source() {
    let (mesh, mut seen) = three_clusters();
    edit(&mut seen, &secret("third"), |member| {
        member.nodes.insert("y".into(), node(3, 2));
    });
    let mut followed = Followed::new(mesh, seen, |seen| {
        copy_peer(seen, &HUB, "m--third--y", "m--third--y", |_, spec| {
            spec.persistent_keepalive = 25
        });
        copy_peer(seen, &HUB, "m--third--z", "m--third--z", |owner, spec| {
            owner.source_cluster = Some("tenant".into());
            spec.persistent_keepalive = 25;
        });
    });
    followed.check(|seen| {
        copy_peer(seen, &HUB, "m--third--z", "m--third--z", |owner, _| {
            owner.source_cluster = Some("third".into())
        });
    });
}

/// `x` gets the key of the Peer `m--tenant--y`, but not its name, because that is the name of `y` by the naming rule.
#[test]
fn peer_name_of_another_node_is_not_kept() {
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |member| {
        member.nodes.insert("y".into(), node(2, 2));
    });
    let mut followed = Followed::new(two_clusters(), seen, |seen| {
        // `y` keeps the name `foo`.
        copy_peer(seen, &HUB, "m--tenant--y", "foo", |_, _| {});
        copy_peer(seen, &HUB, "m--tenant--y", "m--tenant--y", |_, spec| {
            spec.public_key = key(7)
        });
    });
    followed.check(|seen| set_key(seen, &secret("tenant"), "x", key(7)));
}

#[test]
fn name_of_a_gone_node_is_kept_by_another() {
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |member| {
        member.nodes.insert("y".into(), node(2, 2));
    });
    let mut followed = Followed::new(two_clusters(), seen, |seen| {
        remove_peer(seen, &HUB, "m--tenant--y");
        // The key of `y`.
        copy_peer(seen, &HUB, "m--tenant--x", "m--tenant--x", |_, spec| {
            spec.public_key = key_of_node(2, 2)
        });
    });
    followed.check(|seen| edit(seen, &secret("tenant"), |member| assert!(member.nodes.remove("x"))));
}

#[test]
fn peer_that_a_stale_member_retains_keeps_its_name() {
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |member| {
        member.nodes.insert("y".into(), node(2, 2));
    });
    let change = |seen: &mut Observations, change: &dyn Fn(&mut Member)| {
        let Some(Observation::Fresh(member) | Observation::Stale(member, _)) = seen.members.get_mut(&secret("tenant"))
        else {
            panic!("not observed");
        };
        change(member);
        let stale = Observation::Stale(member.clone(), "watch broken".into());
        seen.members.insert(secret("tenant"), stale);
    };
    let mut followed = Followed::new(two_clusters(), seen, |seen| {
        change(seen, &|member| assert!(member.nodes.remove("y")));
    });
    followed.check(|seen| {
        change(seen, &|member| {
            // The key of `y`.
            member.nodes.get_mut("x").unwrap().public_key = Claim::Valid(key_of_node(2, 2))
        });
    });
}

#[test]
fn anchor_that_returns_before_its_peer_is_deleted_stays_anchor() {
    let (mesh, mut seen) = (two_clusters(), seen());
    edit(&mut seen, &HUB, |member| assert!(member.nodes.remove("b")));
    let mut followed = Followed::new(mesh, seen, |seen| {
        copy_peer(seen, &secret("tenant"), "m--mgmt--a", "m--mgmt--b", |_, spec| {
            spec.public_key = key_of_node(1, 2);
            assert!(spec.allowed_ips.contains(&nets(&["10.96.0.0/16"])[0]));
        });
    });
    followed.check(|seen| edit(seen, &HUB, |member| member.nodes.insert("b".into(), node(1, 2))));
}

#[test]
fn second_peer_with_the_key_keeps_its_name() {
    let mut followed = Followed::new(two_clusters(), seen(), |seen| {
        copy_peer(seen, &HUB, "m--tenant--x", "zzz", |_, _| {});
    });
    followed.check(|seen| remove_peer(seen, &HUB, "m--tenant--x"));
}

#[test]
fn node_with_exported_pods_gets_their_addresses() {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    mesh.clusters[1].pod_network = PodNetwork::Shared;
    mesh.clusters[1].exports = vec![Export {
        namespace: "ns".into(),
        selector: vec![],
    }];
    edit(&mut seen, &secret("tenant"), |member| {
        let pod = Pod {
            node: "y".into(),
            addresses: ips(&["10.2.0.7"]),
            ..Pod::default()
        };
        let name = ObjectName {
            namespace: "ns".into(),
            name: "p".into(),
        };
        member.pods.insert(name, pod);
    });
    let mut followed = Followed::new(mesh, seen, |_| {});
    followed.check(|seen| {
        edit(seen, &secret("tenant"), |member| {
            member.nodes.insert("y".into(), node(2, 2))
        });
    });
}

#[test]
fn key_in_a_peer_of_an_unobserved_member_stays_taken() {
    let (mesh, seen) = three_clusters();
    let mut followed = Followed::new(mesh, seen, |seen| {
        seen.members
            .insert(secret("third"), Observation::Unreachable("refused".into()));
    });
    // The key of `z`.
    followed.check(|seen| set_key(seen, &secret("tenant"), "x", key_of_node(3, 1)));
}
