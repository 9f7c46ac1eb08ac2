//! What is closed in the plan and stands open somewhere is told, with where and why.

use super::*;
use crate::pending::{Pending, Why, pending};

/// `three`, with what one plan makes of it standing everywhere.
fn written() -> (Mesh, Observations) {
    let (mesh, mut seen) = three();
    settle(&mesh, &mut seen);
    (mesh, seen)
}

fn told(mesh: &Mesh, seen: &Observations, unwritten: &[(&str, &str)]) -> Vec<Pending> {
    let plan = plan(std::slice::from_ref(mesh), seen, &Settings::default(), &Plain);
    let words = |(name, why): &(&str, &str)| ((*name).to_owned(), (*why).to_owned());
    pending(mesh, &plan, seen, &unwritten.iter().map(words).collect())
        .into_iter()
        .collect()
}

fn silent(seen: &mut Observations, identity: &ClusterIdentity) {
    let observation = seen.members.get_mut(identity).unwrap();
    let member = observation.last().cloned().unwrap();
    *observation = Observation::Stale(member, "no answer".into());
}

fn open(quarantine: bool, source: &str, target: &str, why: &str) -> Pending {
    Pending {
        quarantine,
        source: source.into(),
        target: target.into(),
        why: Why::Open(why.into()),
    }
}

#[test]
fn a_quarantine_is_pending_where_the_closing_policy_does_not_stand() {
    let (mut mesh, mut seen) = written();
    assert_eq!(told(&mesh, &seen, &[]), []);
    mesh.clusters[1].quarantine = true;
    // Before it is written, while it cannot be, and when its API is away.
    let now = |why| [open(true, "tenant", "mgmt", why)];
    assert_eq!(told(&mesh, &seen, &[]), now("it is being written"));
    assert_eq!(told(&mesh, &seen, &[("mgmt", "forbidden")]), now("forbidden"));
    mesh.paused = true;
    assert_eq!(
        told(&mesh, &seen, &[]),
        now("the ClusterMesh is paused, and nothing is written")
    );
    mesh.paused = false;
    silent(&mut seen, &ClusterIdentity::Local);
    assert_eq!(told(&mesh, &seen, &[]), now("no answer"));
    assert_eq!(
        told(&mesh, &seen, &[])[0].message(),
        "cluster \"tenant\" is quarantined, and stands open in cluster \"mgmt\": no answer"
    );
    // Closed, though nobody answers any more.
    let (_, mut seen) = written();
    settle(&mesh, &mut seen);
    silent(&mut seen, &ClusterIdentity::Local);
    assert_eq!(told(&mesh, &seen, &[]), []);
    mesh.clusters[1].quarantine = false;
    assert_eq!(told(&mesh, &seen, &[]), [], "what opens is nobody's worry");
}

#[test]
fn of_a_member_that_was_never_seen_it_is_not_known() {
    let (mut mesh, mut seen) = written();
    mesh.clusters[2].quarantine = true;
    settle(&mesh, &mut seen);
    let unseen = Observation::Unreachable("connection refused".into());
    seen.members.insert(ClusterIdentity::Local, unseen);
    let told = told(&mesh, &seen, &[]);
    let message =
        "cluster \"nb\" is quarantined, and whether cluster \"mgmt\" closed it is not known: connection refused";
    assert_eq!(told.iter().map(Pending::message).collect::<Vec<_>>(), [message]);
}

#[test]
fn a_grant_or_a_profile_taken_back_is_pending_until_it_is_written() {
    let (mut mesh, mut seen) = written();
    silent(&mut seen, &ClusterIdentity::Local);
    let egress = std::mem::take(&mut mesh.clusters[2].egress);
    let revoked = [open(false, "nb", "mgmt", "no answer")];
    assert_eq!(
        (told(&mesh, &seen, &[]), revoked[0].reason()),
        (revoked.clone().into(), "RevokePending")
    );
    mesh.clusters[2].egress = egress.clone();
    assert_eq!(told(&mesh, &seen, &[]), []);
    // Fewer ports, and one more: what is added is not pending.
    mesh.clusters[2].egress[0].ports = grant(postgres(), &[9187], "postgres").ports;
    assert_eq!(told(&mesh, &seen, &[]), revoked);
    mesh.clusters[2].egress[0].ports = grant(postgres(), &[9187, 5432], "postgres").ports;
    assert_eq!(told(&mesh, &seen, &[]), []);
    mesh.clusters[2].egress = egress;
    mesh.clusters[1].profile = Profile::Standard;
    assert_eq!(told(&mesh, &seen, &[]), [open(false, "tenant", "mgmt", "no answer")]);
}
