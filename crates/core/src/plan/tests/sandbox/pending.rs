//! Tests the report of revocations that may not be in effect yet: it names the member and the reason.

use super::*;
use crate::pending::{PendingReason, PendingRevocation, find_pending};

/// The mesh with a sandbox, after its plan was written.
fn written_mesh() -> (Mesh, Observations) {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    (mesh, seen)
}

fn pending_revocations(mesh: &Mesh, seen: &Observations, unwritten: &[(&str, &str)]) -> Vec<PendingRevocation> {
    let plan = plan(std::slice::from_ref(mesh), seen, &Settings::default(), &TestNaming);
    let owned = |(name, why): &(&str, &str)| ((*name).to_owned(), (*why).to_owned());
    find_pending(mesh, &plan, seen, &unwritten.iter().map(owned).collect())
        .into_iter()
        .collect()
}

fn make_stale(seen: &mut Observations, identity: &ClusterIdentity) {
    let observation = seen.members.get_mut(identity).unwrap();
    let member = observation.last().cloned().unwrap();
    *observation = Observation::Stale(member, "no answer".into());
}

fn still_open(quarantine: bool, source: &str, target: &str, why: &str) -> PendingRevocation {
    PendingRevocation {
        quarantine,
        source: source.into(),
        target: target.into(),
        why: PendingReason::Open(why.into()),
    }
}

// threat: closing-not-written
#[test]
fn quarantine_is_pending_until_the_closed_policy_exists() {
    let (mut mesh, mut seen) = written_mesh();
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    mesh.clusters[1].quarantine = true;
    // The quarantine is pending before it is written, while writing fails, while the mesh is paused, and while the API server
    // does not answer.
    let pending_because = |why| [still_open(true, "tenant", "mgmt", why)];
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        pending_because("it is being written")
    );
    assert_eq!(
        pending_revocations(&mesh, &seen, &[("mgmt", "forbidden")]),
        pending_because("forbidden")
    );
    mesh.paused = true;
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        pending_because("the ClusterMesh is paused, so nothing is written")
    );
    mesh.paused = false;
    make_stale(&mut seen, &ClusterIdentity::Local);
    assert_eq!(pending_revocations(&mesh, &seen, &[]), pending_because("no answer"));
    assert_eq!(
        pending_revocations(&mesh, &seen, &[])[0].message(),
        "cluster \"tenant\" is quarantined, and this is not yet in effect in cluster \"mgmt\": no answer"
    );
    // Once the closed policy exists, it does not matter that the API server does not answer.
    let (_, mut seen) = written_mesh();
    write_plan(&mesh, &mut seen);
    make_stale(&mut seen, &ClusterIdentity::Local);
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    mesh.clusters[1].quarantine = false;
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        [],
        "ending a quarantine is no revocation"
    );
}

#[test]
fn quarantine_in_unreachable_member_is_reported_as_unknown() {
    let (mut mesh, mut seen) = written_mesh();
    mesh.clusters[2].quarantine = true;
    write_plan(&mesh, &mut seen);
    let unseen = Observation::Unreachable("connection refused".into());
    seen.members.insert(ClusterIdentity::Local, unseen);
    let pending_revocations = pending_revocations(&mesh, &seen, &[]);
    let message =
        "cluster \"nb\" is quarantined, and it is not known whether cluster \"mgmt\" enforces this: connection refused";
    assert_eq!(
        pending_revocations
            .iter()
            .map(PendingRevocation::message)
            .collect::<Vec<_>>(),
        [message]
    );
}

// threat: closing-not-written
#[test]
fn revoked_grant_and_stricter_profile_are_pending() {
    let (mut mesh, mut seen) = written_mesh();
    make_stale(&mut seen, &ClusterIdentity::Local);
    let egress = std::mem::take(&mut mesh.clusters[2].egress);
    let revoked = [still_open(false, "nb", "mgmt", "no answer")];
    assert_eq!(
        (pending_revocations(&mesh, &seen, &[]), revoked[0].reason()),
        (revoked.clone().into(), "RevokePending")
    );
    mesh.clusters[2].egress = egress.clone();
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    // If port 9187 replaces port 5432 in the grant, port 5432 is revoked. An additional port revokes nothing.
    mesh.clusters[2].egress[0].ports = grant(postgres(), &[9187], "postgres").ports;
    assert_eq!(pending_revocations(&mesh, &seen, &[]), revoked);
    mesh.clusters[2].egress[0].ports = grant(postgres(), &[9187, 5432], "postgres").ports;
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    mesh.clusters[2].egress = egress;
    mesh.clusters[1].profile = Profile::Standard;
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        [still_open(false, "tenant", "mgmt", "no answer")]
    );
}

// threat: closing-not-written
#[test]
fn quarantine_without_enforcement_is_pending_until_peers_are_gone() {
    let (mut mesh, mut seen) = written_mesh();
    // kg serves the hub's nodes: it accepts whatever its Peers allow, although the PeerPolicy CRD exists.
    edit(&mut seen, &ClusterIdentity::Local, |member| {
        member.nodes.values_mut().for_each(|node| node.server = Server::Kilo);
    });
    write_plan(&mesh, &mut seen);
    mesh.clusters[1].quarantine = true;
    let before = seen.clone();
    write_plan(&mesh, &mut seen);
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    // The closed policy is written, and the Peers are not deleted yet.
    let peers_of = |seen: &Observations| seen.members[&ClusterIdentity::Local].last().unwrap().peers.clone();
    edit(&mut seen, &ClusterIdentity::Local, |member| {
        member.peers = peers_of(&before)
    });
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        [still_open(true, "tenant", "mgmt", "it is being written")]
    );
}
