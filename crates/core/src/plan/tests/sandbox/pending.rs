//! Tests that a revocation which is not in effect in some member is reported, with the member and the reason.

use super::*;
use crate::pending::{Pending, Why, pending};

/// The mesh with a sandbox, after its plan was written.
fn written_mesh() -> (Mesh, Observations) {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    (mesh, seen)
}

fn pending_revocations(mesh: &Mesh, seen: &Observations, unwritten: &[(&str, &str)]) -> Vec<Pending> {
    let plan = plan(std::slice::from_ref(mesh), seen, &Settings::default(), &TestNaming);
    let words = |(name, why): &(&str, &str)| ((*name).to_owned(), (*why).to_owned());
    pending(mesh, &plan, seen, &unwritten.iter().map(words).collect())
        .into_iter()
        .collect()
}

fn make_stale(seen: &mut Observations, identity: &ClusterIdentity) {
    let observation = seen.members.get_mut(identity).unwrap();
    let member = observation.last().cloned().unwrap();
    *observation = Observation::Stale(member, "no answer".into());
}

fn not_closed(quarantine: bool, source: &str, target: &str, why: &str) -> Pending {
    Pending {
        quarantine,
        source: source.into(),
        target: target.into(),
        why: Why::Open(why.into()),
    }
}

// threat: closing-not-written
#[test]
fn quarantine_is_pending_until_the_closed_policy_exists() {
    let (mut mesh, mut seen) = written_mesh();
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    mesh.clusters[1].quarantine = true;
    // Pending before it is written, while writing fails, while the mesh is paused, and while the API server does not answer.
    let now = |why| [not_closed(true, "tenant", "mgmt", why)];
    assert_eq!(pending_revocations(&mesh, &seen, &[]), now("it is being written"));
    assert_eq!(
        pending_revocations(&mesh, &seen, &[("mgmt", "forbidden")]),
        now("forbidden")
    );
    mesh.paused = true;
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        now("the ClusterMesh is paused, so nothing is written")
    );
    mesh.paused = false;
    make_stale(&mut seen, &ClusterIdentity::Local);
    assert_eq!(pending_revocations(&mesh, &seen, &[]), now("no answer"));
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
fn revocation_in_unseen_member_is_unknown() {
    let (mut mesh, mut seen) = written_mesh();
    mesh.clusters[2].quarantine = true;
    write_plan(&mesh, &mut seen);
    let unseen = Observation::Unreachable("connection refused".into());
    seen.members.insert(ClusterIdentity::Local, unseen);
    let pending_revocations = pending_revocations(&mesh, &seen, &[]);
    let message =
        "cluster \"nb\" is quarantined, and it is not known whether cluster \"mgmt\" enforces this: connection refused";
    assert_eq!(
        pending_revocations.iter().map(Pending::message).collect::<Vec<_>>(),
        [message]
    );
}

// threat: closing-not-written
#[test]
fn revoked_grant_or_profile_is_pending_until_written() {
    let (mut mesh, mut seen) = written_mesh();
    make_stale(&mut seen, &ClusterIdentity::Local);
    let egress = std::mem::take(&mut mesh.clusters[2].egress);
    let revoked = [not_closed(false, "nb", "mgmt", "no answer")];
    assert_eq!(
        (pending_revocations(&mesh, &seen, &[]), revoked[0].reason()),
        (revoked.clone().into(), "RevokePending")
    );
    mesh.clusters[2].egress = egress.clone();
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    // Another port instead of the granted one is pending; an additional port is not.
    mesh.clusters[2].egress[0].ports = grant(postgres(), &[9187], "postgres").ports;
    assert_eq!(pending_revocations(&mesh, &seen, &[]), revoked);
    mesh.clusters[2].egress[0].ports = grant(postgres(), &[9187, 5432], "postgres").ports;
    assert_eq!(pending_revocations(&mesh, &seen, &[]), []);
    mesh.clusters[2].egress = egress;
    mesh.clusters[1].profile = Profile::Standard;
    assert_eq!(
        pending_revocations(&mesh, &seen, &[]),
        [not_closed(false, "tenant", "mgmt", "no answer")]
    );
}
