//! Derives the condition `PolicyEnforced`, which names the nodes and gateways that do not enforce the current PeerPolicies or
//! SandboxAccesses. The inputs are their reports about themselves, and pending revocations. The reports are untrusted and quoted in
//! messages. A false report can change the status, the reason, and the part of the message about the reporter's own cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    observe::Member,
    pending::PendingRevocation,
    status::{Cause, Condition},
};

/// The type of the condition.
const POLICY_ENFORCED: &str = "PolicyEnforced";

/// The condition reason for nodes on which packets bypass the PeerPolicies.
pub const DATAPATH_BYPASSED: &str = "DatapathBypassed";

/// How packets bypass the PeerPolicies of a node. Each kind has its own remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bypass {
    /// The CNI forwards packets of pods without netfilter.
    Cni,
    /// kube-proxy in mode ipvs. The kernel's IPVS translates Service addresses in netfilter's `input` hook, after the policies
    /// were evaluated (`ip_vs_core.c`, `ip_vs_ops`), so a packet to a Service address goes to any of its endpoints.
    Ipvs,
}

/// The remedy for [`Bypass::Ipvs`]; wg-agent shows it too.
pub const IPVS_REMEDY: &str = "set mode: nftables (or iptables) in kube-proxy's configuration and restart it, then remove the \
                                interface kube-ipvs0, which it leaves behind (`ip link delete kube-ipvs0`, or a reboot)";

/// Nodes and gateways of one member that do not enforce policies, by kind of problem.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unenforced {
    /// Nodes on which packets bypass netfilter ([`Bypass::Cni`]), with the reason that the agent reports.
    pub without_netfilter: BTreeMap<String, String>,
    /// Nodes on which kube-proxy's IPVS translates Service addresses after the policies ([`Bypass::Ipvs`]).
    pub ipvs: BTreeSet<String>,
    /// Nodes on which Kilo's `kg` runs without wg-agent.
    pub without_agent: BTreeSet<String>,
    /// Nodes whose agent has reported the same outdated revision of the PeerPolicies for longer than [`GRACE`] and
    /// [`report_interval`] together.
    pub outdated: BTreeSet<String>,
    /// Gateways that have enforced an outdated SandboxAccess for [`GRACE`] or longer, as NAMESPACE/NAME.
    pub gateways: BTreeSet<String>,
}

/// How long a gateway may report an outdated SandboxAccess. An agent may report an outdated revision for [`report_interval`]
/// longer. Both enforce a change at once. A gateway reports the change within 10 s. An agent writes its status at most every 10 s,
/// and may then have to wait for up to [`report_interval`], because the agents of a cluster write one after the other.
pub const GRACE: Duration = Duration::from_secs(15);

/// How many agents of a cluster write their status in one second. Each write changes a Node, which the API server sends to every watcher of
/// Nodes, such as the CNI's agent on each node.
const REPORTS_PER_SECOND: u32 = 10;

/// The time in which each agent may write its status once, in a cluster with this number of Nodes.
#[must_use]
pub fn report_interval(nodes: usize) -> Duration {
    Duration::from_secs(1) / REPORTS_PER_SECOND * u32::try_from(nodes.max(1)).unwrap_or(u32::MAX)
}

/// Whether an agent that reports the revision `reported` does not enforce the current PeerPolicies, whose revision is `current`. An agent
/// that reports no revision is too old to report one, so it does not count.
#[must_use]
pub fn is_outdated(reported: &str, current: &str) -> bool {
    !reported.is_empty() && reported != current
}

/// The value that [`outdated_accesses`] returns for a gateway that is up to date.
pub const APPLIED: &str = "applied";

/// Returns a report for each gateway with a pod: the SandboxAccesses that it enforces in an outdated generation or after their
/// deletion, each with the enforced generation; [`APPLIED`] = there are none. A SandboxAccess that the gateway has never applied
/// opens nothing, so it does not count. The result is empty if SandboxAccesses cannot be read.
#[must_use]
pub fn outdated_accesses(member: &Member) -> BTreeMap<String, String> {
    let Some(accesses) = &member.accesses else {
        return BTreeMap::new();
    };
    let gateways = member.gateways.iter().filter(|(_, gateway)| gateway.exists);
    let reports = gateways.map(|(name, gateway)| {
        let behind = gateway.applied.iter().filter(|(access, generation)| {
            let current = accesses.get(*access);
            current.is_none_or(|current| current.generation != **generation)
        });
        let behind: Vec<String> = behind
            .map(|(access, generation)| format!("{access} {generation}"))
            .collect();
        let report = if behind.is_empty() {
            APPLIED.to_owned()
        } else {
            behind.join(", ")
        };
        (name.to_string(), report)
    });
    reports.collect()
}

/// How many nodes, gateways or pending revocations a message lists.
const MAX_LISTED: usize = 10;

/// Finds why policies are not enforced, the most urgent first. `members` = the nodes and gateways that do not enforce policies, by entry
/// name. `pending` = the revocations that are not yet in effect.
#[must_use]
pub fn causes(members: &BTreeMap<String, Unenforced>, pending: &BTreeSet<PendingRevocation>) -> Vec<Cause> {
    let cause = |reason, cluster: &str, message| Cause::of_member(POLICY_ENFORCED, reason, cluster, message);
    // Quarantines come first, because they are more urgent than other revocations.
    let (quarantines, others): (Vec<_>, Vec<_>) = pending.iter().partition(|pending| pending.quarantine);
    let pending = quarantines.into_iter().chain(others);
    let mut found: Vec<Cause> = pending
        .map(|pending| cause(pending.reason(), &pending.target, pending.message()))
        .collect();
    let without_netfilter = members
        .iter()
        .filter(|(_, member)| !member.without_netfilter.is_empty());
    let without_netfilter = without_netfilter.map(|(cluster, member)| {
        let reasons: BTreeSet<&str> = member.without_netfilter.values().map(String::as_str).collect();
        let reasons: Vec<&str> = reasons.into_iter().take(3).collect();
        let message = format!(
            "on {} of cluster {cluster:?} the CNI forwards packets of pods without netfilter ({:?}): PeerPolicies do not apply to \
             them, and pods there may fail to reach the mesh. Set enable-host-legacy-routing to \"true\" and datapath-mode to \"veth\" in \
             kube-system/cilium-config there (Helm: bpf.hostLegacyRouting=true) and restart Cilium",
            list_nodes(member.without_netfilter.keys()),
            reasons.join("; "),
        );
        cause(DATAPATH_BYPASSED, cluster, message)
    });
    let ipvs = members.iter().filter(|(_, member)| !member.ipvs.is_empty());
    let ipvs = ipvs.map(|(cluster, member)| {
        let message = format!(
            "on {} of cluster {cluster:?} kube-proxy in mode ipvs translates packets for Services after the PeerPolicies, so \
             these do not apply to their final destinations: {IPVS_REMEDY}",
            list_nodes(member.ipvs.iter())
        );
        cause(DATAPATH_BYPASSED, cluster, message)
    });
    let outdated = members.iter().filter(|(_, member)| !member.outdated.is_empty());
    let outdated = outdated.map(|(cluster, member)| {
        let message = format!(
            "on {} of cluster {cluster:?} wg-agent has reported an outdated revision of the PeerPolicies for {} s or longer: it is \
             dead, or cannot read them or write its table. Access that was revoked since then may still be open there. See the log \
             of its pod there, and `wg-agent status` on the node",
            list_nodes(member.outdated.iter()),
            GRACE.as_secs(),
        );
        cause("PolicyOutdated", cluster, message)
    });
    let gateways = members.iter().filter(|(_, member)| !member.gateways.is_empty());
    let gateways = gateways.map(|(cluster, member)| {
        let message = format!(
            "gateway {} of cluster {cluster:?} has not applied the SandboxAccesses there for {} s or longer: grants that were revoked \
             since then may still work through it until its --grant-timeout. See the log of that pod, and its SandboxGateway",
            list(member.gateways.iter()),
            GRACE.as_secs(),
        );
        cause("PolicyOutdated", cluster, message)
    });
    let without_agent = members.iter().filter(|(_, member)| !member.without_agent.is_empty());
    let without_agent = without_agent.map(|(cluster, member)| {
        let message = format!(
            "on {} of cluster {cluster:?} kg runs without wg-agent and accepts all packets from its Peers: run wg-agent there with \
             --mode=policy",
            list_nodes(member.without_agent.iter())
        );
        cause("NoAgent", cluster, message)
    });
    found.extend(
        outdated
            .chain(gateways)
            .chain(without_netfilter)
            .chain(ipvs)
            .chain(without_agent),
    );
    found
}

/// Builds the condition `PolicyEnforced` from the result of [`causes`]. Of pending revocations, the message lists the first ten.
#[must_use]
pub fn condition(causes: &[Cause]) -> Condition {
    let Some(first) = causes.first() else {
        return Condition {
            kind: POLICY_ENFORCED,
            status: true,
            reason: "Enforced",
            message: "no node or gateway is known that does not enforce its PeerPolicies or SandboxAccesses".to_owned(),
        };
    };
    let is_pending = |cause: &&Cause| ["QuarantinePending", "RevokePending"].contains(&cause.reason);
    let (pending, reports): (Vec<&Cause>, Vec<&Cause>) = causes.iter().partition(is_pending);
    let mut messages: Vec<String> = pending
        .iter()
        .take(MAX_LISTED)
        .map(|cause| cause.message.clone())
        .collect();
    if let more @ 1.. = pending.len().saturating_sub(MAX_LISTED) {
        messages.push(format!("and {more} more"));
    }
    messages.extend(reports.into_iter().map(|cause| cause.message.clone()));
    Condition {
        kind: POLICY_ENFORCED,
        status: false,
        reason: first.reason,
        message: messages.join("; "),
    }
}

/// Lists node names: `Node a`, or `Nodes a, b and 3 more`.
pub(crate) fn list_nodes<'a>(nodes: impl ExactSizeIterator<Item = &'a String>) -> String {
    let noun = if nodes.len() == 1 { "Node" } else { "Nodes" };
    format!("{noun} {}", list(nodes))
}

/// Lists names: `a`, or `a, b and 3 more`.
fn list<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> String {
    let more = match names.len().saturating_sub(MAX_LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let names: Vec<&str> = names.take(MAX_LISTED).map(String::as_str).collect();
    format!("{}{more}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        key::PublicKey,
        mesh::ObjectName,
        observe::{AccessSpec, Gateway, ObservedAccess, Owner},
    };

    fn without_netfilter(nodes: &[String]) -> Unenforced {
        Unenforced {
            without_netfilter: nodes
                .iter()
                .map(|node| (node.clone(), "datapath-mode is netkit".to_owned()))
                .collect(),
            ..Unenforced::default()
        }
    }

    #[test]
    fn condition_is_true_without_reported_problems() {
        let members = [("a".to_owned(), Unenforced::default())].into();
        let condition = condition(&causes(&members, &BTreeSet::new()));
        assert_eq!(
            (condition.kind, condition.status, condition.reason),
            ("PolicyEnforced", true, "Enforced")
        );
    }

    #[test]
    fn unprotected_nodes_are_listed_with_reason_and_remedy() {
        let without_agent = Unenforced {
            without_agent: ["k1".to_owned()].into(),
            ..Unenforced::default()
        };
        let members = [
            ("a".to_owned(), without_netfilter(&["n2".to_owned(), "n1".to_owned()])),
            ("b".to_owned(), without_agent.clone()),
        ];
        let members = members.into();
        let both = condition(&causes(&members, &BTreeSet::new()));
        assert_eq!((both.status, both.reason), (false, "DatapathBypassed"));
        assert_eq!(
            both.message,
            "on Nodes n1, n2 of cluster \"a\" the CNI forwards packets of pods without netfilter (\"datapath-mode is netkit\"): \
             PeerPolicies do not apply to them, and pods there may fail to reach the mesh. Set enable-host-legacy-routing to \"true\" and \
             datapath-mode to \"veth\" in kube-system/cilium-config there (Helm: bpf.hostLegacyRouting=true) and restart Cilium; \
             on Node k1 of cluster \"b\" kg runs without wg-agent and accepts all packets from its Peers: run wg-agent there with \
             --mode=policy"
        );
        let ipvs = Unenforced {
            ipvs: ["n4".to_owned()].into(),
            ..Unenforced::default()
        };
        let ipvs = condition(&causes(&[("c".to_owned(), ipvs)].into(), &BTreeSet::new()));
        assert_eq!(
            (ipvs.reason, ipvs.message.as_str()),
            (
                "DatapathBypassed",
                "on Node n4 of cluster \"c\" kube-proxy in mode ipvs translates packets for Services after the PeerPolicies, so \
                 these do not apply to their final destinations: set mode: nftables (or iptables) in kube-proxy's configuration and \
                 restart it, then remove the interface kube-ipvs0, which it leaves behind (`ip link delete kube-ipvs0`, or a reboot)"
            )
        );
        let one = condition(&causes(&[("b".to_owned(), without_agent)].into(), &BTreeSet::new()));
        assert_eq!((one.status, one.reason), (false, "NoAgent"));
    }

    #[test]
    fn node_with_outdated_policies_is_listed_with_remedy() {
        let behind = Unenforced {
            outdated: ["w2".to_owned()].into(),
            ..without_netfilter(&["w1".to_owned()])
        };
        let policy_enforced = condition(&causes(&[("a".to_owned(), behind)].into(), &BTreeSet::new()));
        assert_eq!(
            (policy_enforced.status, policy_enforced.reason),
            (false, "PolicyOutdated")
        );
        let (outdated, without_netfilter) = policy_enforced.message.split_once("; ").unwrap();
        assert_eq!(
            outdated,
            "on Node w2 of cluster \"a\" wg-agent has reported an outdated revision of the PeerPolicies for 15 s or longer: it is \
             dead, or cannot read them or write its table. Access that was revoked since then may still be open there. See the log \
             of its pod there, and `wg-agent status` on the node"
        );
        assert!(
            without_netfilter.starts_with("on Node w1 of cluster"),
            "{without_netfilter}"
        );
    }

    #[test]
    fn gateway_with_outdated_applied_generation_is_listed() {
        let gateway = |applied: &[(&str, i64)], exists| Gateway {
            public_key: PublicKey::new([1; 32]),
            addresses: BTreeSet::new(),
            endpoints: Vec::new(),
            serves: BTreeSet::new(),
            ready: false,
            exists,
            applied: applied
                .iter()
                .map(|(name, number)| ((*name).to_owned(), *number))
                .collect(),
            refused: BTreeMap::new(),
        };
        let access = |generation| ObservedAccess {
            owner: Owner::default(),
            generation,
            spec: Ok(AccessSpec::default()),
        };
        let mut member = Member {
            accesses: Some([("a".to_owned(), access(2)), ("b".to_owned(), access(1))].into()),
            ..Member::default()
        };
        for (name, applied, exists) in [
            ("current", &[("a", 2), ("b", 1)][..], true),
            ("without-access", &[], true),
            ("outdated", &[("a", 1), ("b", 1)], true),
            ("keeps-deleted", &[("a", 2), ("deleted", 7)], true),
            ("without-pod", &[("a", 1)], false),
        ] {
            let name = ObjectName {
                namespace: "gateways".into(),
                name: name.into(),
            };
            member.gateways.insert(name, gateway(applied, exists));
        }
        let reports = outdated_accesses(&member);
        let reports: Vec<(&str, &str)> = reports.iter().map(|(name, report)| (&**name, &**report)).collect();
        let want = [
            ("gateways/current", APPLIED),
            ("gateways/keeps-deleted", "deleted 7"),
            ("gateways/outdated", "a 1"),
            ("gateways/without-access", APPLIED),
        ];
        assert_eq!(reports, want);
        let behind = Unenforced {
            gateways: ["gateways/outdated".to_owned()].into(),
            ..Unenforced::default()
        };
        let policy_enforced = condition(&causes(&[("a".to_owned(), behind)].into(), &BTreeSet::new()));
        assert_eq!(
            (policy_enforced.status, policy_enforced.reason),
            (false, "PolicyOutdated")
        );
        assert!(
            policy_enforced
                .message
                .starts_with("gateway gateways/outdated of cluster \"a\" has not applied"),
            "{}",
            policy_enforced.message
        );
    }

    #[test]
    fn agent_without_reported_revision_is_not_outdated() {
        let reports = [("1", "1"), ("1", "2"), ("", "1")];
        assert_eq!(
            reports.map(|(reported, current)| is_outdated(reported, current)),
            [false, true, false]
        );
    }

    #[test]
    fn list_of_many_nodes_is_shortened() {
        let nodes: Vec<String> = (0..12).map(|n| format!("n{n:02}")).collect();
        let message = condition(&causes(
            &[("a".to_owned(), without_netfilter(&nodes))].into(),
            &BTreeSet::new(),
        ))
        .message;
        assert!(
            message.starts_with("on Nodes n00, n01, n02, n03, n04, n05, n06, n07, n08, n09 and 2 more of cluster"),
            "{message}"
        );
    }
}
