//! A sandbox's policy between two revisions. The controller writes the policy and then the Peers that name it, and a node
//! hears of the two in any order; until they agree, what both revisions grant is open and nothing else, so that nobody loses
//! a packet over another's grant.

use std::collections::BTreeMap;

use super::{Inputs, Peer};
use crate::policy::Policy;

/// What policies said when this node saw them, by `name@revision`.
pub type Earlier = BTreeMap<String, Policy>;

/// What is worth knowing at the next [`super::compile`]: the policies as they are now, and of those before them the ones that
/// some Peer still names.
#[must_use]
pub fn remember(inputs: &Inputs) -> Earlier {
    let named = |revision: &String| (inputs.peers.iter()).any(|peer| peer.requires_policy.as_ref() == Some(revision));
    let before = inputs.earlier.iter().filter(|(revision, _)| named(revision));
    let mut out: Earlier = before
        .map(|(revision, policy)| (revision.clone(), policy.clone()))
        .collect();
    let now = inputs.policies.iter().filter(|policy| policy.sandbox);
    out.extend(now.map(|policy| (format!("{}@{}", policy.name, policy.revision), policy.clone())));
    out
}

/// The policy, without what it says beyond an earlier revision that some Peer still names.
pub(super) fn narrowed(mut policy: Policy, inputs: &Inputs) -> Policy {
    if !policy.sandbox {
        return policy;
    }
    let before = |peer: &Peer| {
        let required = peer.requires_policy.as_ref()?;
        let (name, revision) = named(required);
        let other = name == policy.name && revision != policy.revision;
        inputs.earlier.get(required).filter(|_| other)
    };
    let before: Vec<&Policy> = inputs.peers.iter().filter_map(before).collect();
    for earlier in before {
        let was = |endpoint: &_| earlier.granted.contains(endpoint) || earlier.draining.contains(endpoint);
        policy.granted.retain(|endpoint| earlier.granted.contains(endpoint));
        policy.draining.retain(was);
        policy.infrastructure_ports.extend(&earlier.infrastructure_ports);
    }
    policy
}

/// Name and revision of a policy that a Peer requires; empty where it names none.
pub(super) fn named(required: &str) -> (&str, &str) {
    required.rsplit_once('@').unwrap_or((required, ""))
}
