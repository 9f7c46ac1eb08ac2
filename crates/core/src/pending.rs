//! Compares planned with observed objects, and finds revocations that are not known to be in effect in a member. A quarantine, a
//! removed grant and a more restrictive profile revoke access.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use crate::{
    mesh::{Mesh, Profile},
    observe::{Member, Observation, Observations, PolicySpec},
    ownership::{self, Ownership},
    plan::{Fact, MeshPlan, Plan},
};

/// A revocation that is not known to be in effect in one target.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PendingRevocation {
    /// `true` = the source is quarantined; `false` = some or all of its access was revoked otherwise.
    pub quarantine: bool,
    /// The member whose access is revoked, by its entry's name.
    pub source: String,
    /// The member in which the revocation is not known to be in effect, by its entry's name.
    pub target: String,
    /// Why the revocation is not known to be in effect.
    pub why: PendingReason,
}

/// Why a revocation is not known to be in effect.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PendingReason {
    /// The target was never observed. The string says why.
    Unknown(String),
    /// The source still had the revoked access at the last observation. The string says why the revocation is not written yet.
    Open(String),
}

impl PendingRevocation {
    /// `QuarantinePending` or `RevokePending`.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        if self.quarantine {
            "QuarantinePending"
        } else {
            "RevokePending"
        }
    }

    /// The message for the condition.
    #[must_use]
    pub fn message(&self) -> String {
        let Self {
            quarantine,
            source,
            target,
            why,
        } = self;
        let what = if *quarantine {
            format!("cluster {source:?} is quarantined")
        } else {
            format!("access was revoked from cluster {source:?}")
        };
        match why {
            PendingReason::Unknown(why) => {
                format!("{what}, and it is not known whether cluster {target:?} enforces this: {why}")
            }
            PendingReason::Open(why) => format!("{what}, and this is not yet in effect in cluster {target:?}: {why}"),
        }
    }
}

/// Lists the revocations in the plan of one mesh that are not known to be in effect. `unwritten` = members, by entry name, into which
/// something could not be written, and why.
#[must_use]
pub fn find_pending(
    mesh: &Mesh,
    plan: &Plan,
    seen: &Observations,
    unwritten: &BTreeMap<String, String>,
) -> BTreeSet<PendingRevocation> {
    let mut found = BTreeSet::new();
    let Some(planned) = plan.meshes.get(&mesh.id).filter(|planned| !planned.deleting) else {
        return found;
    };
    let quarantined: BTreeSet<&str> = planned
        .facts
        .iter()
        .filter_map(|fact| match fact {
            Fact::Quarantined { cluster, .. } => Some(&**cluster),
            _ => None,
        })
        .collect();
    // Only cluster-meshed targets can have a pending revocation: policies inside a sandbox are no security boundary, and a
    // standard member is connected to nothing; it has objects of other members only until they are deleted.
    for target in mesh.clusters.iter().filter(|c| c.profile == Profile::ClusterMeshed) {
        let observation = seen.members.get(&target.identity);
        let not_fresh = observation.map_or(Some("it was not observed yet"), Observation::not_fresh_reason);
        let name = &target.name;
        let Some(member) = observation.and_then(Observation::last) else {
            // The existing objects in this target are not known, so only quarantines can be reported: any other revocation shows
            // only as a difference between planned and existing objects. A source whose nodes need no registration in any member,
            // such as a sandbox without grants, has no access to revoke.
            let needs_registration = |source: &&&str| {
                let report = planned.clusters.get(**source);
                **source != *name && report.is_some_and(|report| report.needs_registration)
            };
            found.extend(
                quarantined
                    .iter()
                    .filter(needs_registration)
                    .map(|source| PendingRevocation {
                        quarantine: true,
                        source: (*source).to_owned(),
                        target: name.clone(),
                        why: PendingReason::Unknown(not_fresh.unwrap_or_default().to_owned()),
                    }),
            );
            continue;
        };
        let why = match (not_fresh, unwritten.get(name)) {
            (Some(why), _) => why.to_owned(),
            (None, Some(why)) => why.clone(),
            (None, None) if planned.paused => "the ClusterMesh is paused, so nothing is written".to_owned(),
            (None, None) => "it is being written".to_owned(),
        };
        let open = find_open_sources(mesh, plan, planned, name, member, &quarantined);
        found.extend(open.into_iter().map(|source| PendingRevocation {
            quarantine: quarantined.contains(&*source),
            source,
            target: name.clone(),
            why: PendingReason::Open(why.clone()),
        }));
    }
    found
}

/// Sources for which the existing objects in `target` allow more than the planned ones.
fn find_open_sources(
    mesh: &Mesh,
    plan: &Plan,
    planned: &MeshPlan,
    target: &str,
    member: &Member,
    quarantined: &BTreeSet<&str>,
) -> BTreeSet<String> {
    let nothing = PolicySpec::default();
    let target_plan = planned.targets.get(target);
    let ours = |owner| ownership::of(owner, &plan.hub, &plan.claimants) == Ownership::Mesh(&mesh.id);
    let mut open = BTreeSet::new();
    for existing in member.policies.iter().flat_map(BTreeMap::values) {
        let (Some(source), Ok(spec)) = (&existing.owner.source_cluster, &existing.spec) else {
            continue;
        };
        let planned_policy =
            target_plan.and_then(|target_plan| target_plan.policies.values().find(|policy| policy.source == *source));
        if ours(&existing.owner) && allows_more(spec, planned_policy.map_or(&nothing, |policy| &policy.spec)) {
            open.insert(source.clone());
        }
    }
    for existing in member.accesses.iter().flat_map(BTreeMap::values) {
        let (Some(source), Ok(spec)) = (&existing.owner.source_cluster, &existing.spec) else {
            continue;
        };
        let planned_access =
            target_plan.and_then(|target_plan| target_plan.accesses.values().find(|access| access.source == *source));
        let kept =
            |key: &(_, _), grant: &_| planned_access.is_some_and(|access| access.spec.grants.get(key) == Some(grant));
        if ours(&existing.owner) && !spec.grants.iter().all(|(key, grant)| kept(key, grant)) {
            open.insert(source.clone());
        }
    }
    // A target that enforces no PeerPolicies has no planned Peers of a quarantined source. There the quarantine is in effect only when
    // the existing Peers are deleted.
    for existing in member.peers.iter().flat_map(|peers| peers.values()) {
        let Some(source) = existing.owner.source_cluster.as_ref() else {
            continue;
        };
        let is_kept = || target_plan.is_some_and(|plan| plan.peers.values().any(|peer| peer.source == *source));
        // The cheapest check first: a target may have thousands of Peers.
        if quarantined.contains(&**source) && !open.contains(source) && ours(&existing.owner) && !is_kept() {
            open.insert(source.clone());
        }
    }
    open
}

/// Whether `existing` allows a network that `planned_spec` does not allow.
fn allows_more(existing: &PolicySpec, planned_spec: &PolicySpec) -> bool {
    let is_allowed = |net: &IpNet| planned_spec.allow.iter().any(|planned| planned.contains(net));
    !existing.allow.iter().all(is_allowed)
}
