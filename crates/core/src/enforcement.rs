//! On which nodes of a mesh PeerPolicies are not enforced, as those nodes say of themselves: the condition `PolicyEnforced`.
//! A node's claims are hostile; they are quoted, and can only make its own cluster look worse or better.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{observe::Member, pending::Pending, status::Condition};

/// The word for nodes whose packets pass by the PeerPolicies.
pub const DATAPATH_BYPASSED: &str = "DatapathBypassed";

/// How packets pass by the PeerPolicies of a node: each has a remedy of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bypass {
    /// The CNI leads packets of pods past netfilter.
    Netfilter,
    /// kube-proxy in mode ipvs: the kernel's IPVS translates in netfilter's hook for what the node itself is called by, after
    /// the policies looked (`ip_vs_core.c`, `ip_vs_ops`), and what was a Service's address goes to any of its backends.
    Ipvs,
}

/// What to do about [`Bypass::Ipvs`]; also where the agent says it.
pub const IPVS_REMEDY: &str = "set mode: nftables (or iptables) in kube-proxy's configuration and restart it, then remove the \
                                interface kube-ipvs0, which it leaves behind (`ip link delete kube-ipvs0`, or a reboot)";

/// Nodes of one member on which something is not enforced, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unenforced {
    /// Where packets pass by netfilter, and why, in the agent's words.
    pub bypassed: BTreeMap<String, String>,
    /// Where kube-proxy's IPVS translates behind the policies.
    pub ipvs: BTreeSet<String>,
    /// That Kilo's `kg` serves alone.
    pub without_agent: BTreeSet<String>,
    /// Whose agent has said for [`GRACE`] that it enforces other PeerPolicies than stand.
    pub outdated: BTreeSet<String>,
    /// Gateways that have not applied a SandboxAccess for [`GRACE`], by namespace and name.
    pub gateways: BTreeSet<String>,
}

/// For so long an agent may say other PeerPolicies than stand: it enforces a change in a moment, and tells so within 10 s.
pub const GRACE: Duration = Duration::from_secs(15);

/// Whether an agent that says the revision `said` enforces others than those of the revision `standing`. One that says
/// nothing is of a version that does not tell.
#[must_use]
pub fn outdated(said: &str, standing: &str) -> bool {
    !said.is_empty() && said != standing
}

/// What [`applied_by_gateways`] returns of a gateway that is up to date.
pub const APPLIED: &str = "applied";

/// Of each gateway of a member whose pod exists, whether what is in force there is what stands: [`APPLIED`], else which
/// SandboxAccesses are in force in another generation. One that was never applied there opens nothing.
#[must_use]
pub fn applied_by_gateways(member: &Member) -> BTreeMap<String, String> {
    let Some(accesses) = &member.accesses else {
        return BTreeMap::new();
    };
    let gateways = member.gateways.iter().filter(|(_, gateway)| gateway.exists);
    let said = gateways.map(|(name, gateway)| {
        let behind = gateway.applied.iter().filter(|(access, generation)| {
            let standing = accesses.get(*access);
            standing.is_none_or(|standing| standing.generation != **generation)
        });
        let behind: Vec<String> = behind
            .map(|(access, generation)| format!("{access} {generation}"))
            .collect();
        let said = if behind.is_empty() {
            APPLIED.to_owned()
        } else {
            behind.join(", ")
        };
        (name.to_string(), said)
    });
    said.collect()
}

/// How many nodes of a member are named.
const NAMED: usize = 10;

/// Whether PeerPolicies are enforced on every node that is meshed; by entry. `pending` = what was closed and could not be written
/// yet.
#[must_use]
pub fn condition(members: &BTreeMap<String, Unenforced>, pending: &BTreeSet<Pending>) -> Condition {
    let bypassed = members.iter().filter(|(_, member)| !member.bypassed.is_empty());
    let bypassed = bypassed.map(|(cluster, member)| {
        let reasons: BTreeSet<&str> = member.bypassed.values().map(String::as_str).collect();
        let reasons: Vec<&str> = reasons.into_iter().take(3).collect();
        format!(
            "on {} of cluster {cluster:?} the CNI leads packets of pods past netfilter ({:?}): PeerPolicies do not see them, and \
             pods there may not reach the mesh. Set enable-host-legacy-routing to \"true\" and datapath-mode to \"veth\" in \
             kube-system/cilium-config there (Helm: bpf.hostLegacyRouting=true) and restart Cilium",
            named(member.bypassed.keys()),
            reasons.join("; "),
        )
    });
    let ipvs = members.iter().filter(|(_, member)| !member.ipvs.is_empty());
    let ipvs = ipvs.map(|(cluster, member)| {
        format!(
            "on {} of cluster {cluster:?} kube-proxy in mode ipvs translates packets for Services after PeerPolicies looked at \
             them, which do not see where they go: {IPVS_REMEDY}",
            named(member.ipvs.iter())
        )
    });
    let bypassed = bypassed.chain(ipvs);
    let outdated = members.iter().filter(|(_, member)| !member.outdated.is_empty());
    let outdated = outdated.map(|(cluster, member)| {
        format!(
            "on {} of cluster {cluster:?} wg-agent does not say that it enforces the PeerPolicies that stand there, but others, \
             for {} s or longer: it is dead, or cannot read them or write its table, and what was closed since may be open \
             there. See the log of its pod there, and `wg-agent status` on the node",
            named(member.outdated.iter()),
            GRACE.as_secs(),
        )
    });
    let gateways = members.iter().filter(|(_, member)| !member.gateways.is_empty());
    let gateways = gateways.map(|(cluster, member)| {
        let names: Vec<&str> = member.gateways.iter().map(String::as_str).take(NAMED).collect();
        format!(
            "gateway {} of cluster {cluster:?} has not applied the SandboxAccesses there for {} s or longer: what was revoked since \
             may be open through it until its --grant-timeout. See the log of that pod, and its SandboxGateway",
            names.join(", "),
            GRACE.as_secs(),
        )
    });
    let alone = members.iter().filter(|(_, member)| !member.without_agent.is_empty());
    let alone = alone.map(|(cluster, member)| {
        format!(
            "on {} of cluster {cluster:?} kg runs without wg-agent and accepts whatever its Peers admit: run wg-agent there with \
             --mode=policy",
            named(member.without_agent.iter())
        )
    });
    let (bypassed, alone): (Vec<String>, Vec<String>) = (bypassed.collect(), alone.collect());
    let outdated: Vec<String> = outdated.chain(gateways).collect();
    // A quarantine is the more urgent of the two.
    let mut pending: Vec<&Pending> = pending.iter().collect();
    pending.sort_by_key(|pending| !pending.quarantine);
    let open = told(&pending);
    let words = [
        (&outdated, "PolicyOutdated"),
        (&bypassed, DATAPATH_BYPASSED),
        (&alone, "NoAgent"),
    ];
    let word = words
        .into_iter()
        .find(|(said, _)| !said.is_empty())
        .map(|(_, word)| word);
    let Some(reason) = pending.first().map(|pending| pending.reason()).or(word) else {
        return Condition {
            kind: "PolicyEnforced",
            status: true,
            reason: "Enforced",
            message: "no node that is meshed is known not to enforce PeerPolicies".to_owned(),
        };
    };
    Condition {
        kind: "PolicyEnforced",
        status: false,
        reason,
        message: [open, outdated, bypassed, alone].concat().join("; "),
    }
}

/// As many as a person reads.
fn told(pending: &[&Pending]) -> Vec<String> {
    let mut told: Vec<String> = pending.iter().take(NAMED).map(|pending| pending.message()).collect();
    if let more @ 1.. = pending.len().saturating_sub(NAMED) {
        told.push(format!("and {more} more"));
    }
    told
}

/// `Node a`, `Nodes a, b and 3 more`.
pub(crate) fn named<'a>(nodes: impl ExactSizeIterator<Item = &'a String>) -> String {
    let count = nodes.len();
    let names: Vec<&str> = nodes.take(NAMED).map(String::as_str).collect();
    let word = if count == 1 { "Node" } else { "Nodes" };
    let more = match count.saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{word} {}{more}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        key::PublicKey,
        mesh::ObjectName,
        observe::{AccessSpec, Gateway, ObservedAccess, Owner},
    };

    fn bypassed(nodes: &[String]) -> Unenforced {
        Unenforced {
            bypassed: nodes
                .iter()
                .map(|node| (node.clone(), "datapath-mode is netkit".to_owned()))
                .collect(),
            ..Unenforced::default()
        }
    }

    #[test]
    fn a_mesh_is_enforced_where_nobody_says_otherwise() {
        let members = [("a".to_owned(), Unenforced::default())].into();
        let condition = condition(&members, &BTreeSet::new());
        assert_eq!(
            (condition.kind, condition.status, condition.reason),
            ("PolicyEnforced", true, "Enforced")
        );
    }

    #[test]
    fn nodes_that_do_not_enforce_are_named_with_the_reason_and_the_remedy() {
        let alone = Unenforced {
            without_agent: ["k1".to_owned()].into(),
            ..Unenforced::default()
        };
        let members = [
            ("a".to_owned(), bypassed(&["n2".to_owned(), "n1".to_owned()])),
            ("b".to_owned(), alone.clone()),
        ];
        let members = members.into();
        let both = condition(&members, &BTreeSet::new());
        assert_eq!((both.status, both.reason), (false, "DatapathBypassed"));
        assert_eq!(
            both.message,
            "on Nodes n1, n2 of cluster \"a\" the CNI leads packets of pods past netfilter (\"datapath-mode is netkit\"): \
             PeerPolicies do not see them, and pods there may not reach the mesh. Set enable-host-legacy-routing to \"true\" and \
             datapath-mode to \"veth\" in kube-system/cilium-config there (Helm: bpf.hostLegacyRouting=true) and restart Cilium; \
             on Node k1 of cluster \"b\" kg runs without wg-agent and accepts whatever its Peers admit: run wg-agent there with \
             --mode=policy"
        );
        let ipvs = Unenforced {
            ipvs: ["n4".to_owned()].into(),
            ..Unenforced::default()
        };
        let ipvs = condition(&[("c".to_owned(), ipvs)].into(), &BTreeSet::new());
        assert_eq!(
            (ipvs.reason, ipvs.message.as_str()),
            (
                "DatapathBypassed",
                "on Node n4 of cluster \"c\" kube-proxy in mode ipvs translates packets for Services after PeerPolicies looked at \
                 them, which do not see where they go: set mode: nftables (or iptables) in kube-proxy's configuration and restart \
                 it, then remove the interface kube-ipvs0, which it leaves behind (`ip link delete kube-ipvs0`, or a reboot)"
            )
        );
        let one = condition(&[("b".to_owned(), alone)].into(), &BTreeSet::new());
        assert_eq!((one.status, one.reason), (false, "NoAgent"));
    }

    #[test]
    fn a_node_whose_agent_enforces_others_than_stand_is_named_with_what_to_look_at() {
        let behind = Unenforced {
            outdated: ["w2".to_owned()].into(),
            ..bypassed(&["w1".to_owned()])
        };
        let told = condition(&[("a".to_owned(), behind)].into(), &BTreeSet::new());
        assert_eq!((told.status, told.reason), (false, "PolicyOutdated"));
        let (outdated, bypassed) = told.message.split_once("; ").unwrap();
        assert_eq!(
            outdated,
            "on Node w2 of cluster \"a\" wg-agent does not say that it enforces the PeerPolicies that stand there, but others, \
             for 15 s or longer: it is dead, or cannot read them or write its table, and what was closed since may be open \
             there. See the log of its pod there, and `wg-agent status` on the node"
        );
        assert!(bypassed.starts_with("on Node w1 of cluster"), "{bypassed}");
    }

    #[test]
    fn gateways_that_have_another_generation_in_force_are_named() {
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
            ("same", &[("a", 2), ("b", 1)][..], true),
            ("new", &[], true),
            ("behind", &[("a", 1), ("b", 1)], true),
            ("keeps", &[("a", 2), ("deleted", 7)], true),
            ("gone", &[("a", 1)], false),
        ] {
            let name = ObjectName {
                namespace: "gateways".into(),
                name: name.into(),
            };
            member.gateways.insert(name, gateway(applied, exists));
        }
        let said = applied_by_gateways(&member);
        let said: Vec<(&str, &str)> = said.iter().map(|(name, said)| (&**name, &**said)).collect();
        let want = [
            ("gateways/behind", "a 1"),
            ("gateways/keeps", "deleted 7"),
            ("gateways/new", APPLIED),
            ("gateways/same", APPLIED),
        ];
        assert_eq!(said, want);
        let behind = Unenforced {
            gateways: ["gateways/behind".to_owned()].into(),
            ..Unenforced::default()
        };
        let told = condition(&[("a".to_owned(), behind)].into(), &BTreeSet::new());
        assert_eq!((told.status, told.reason), (false, "PolicyOutdated"));
        assert!(
            told.message
                .starts_with("gateway gateways/behind of cluster \"a\" has not applied"),
            "{}",
            told.message
        );
    }

    #[test]
    fn an_agent_that_does_not_tell_is_not_called_outdated() {
        let said = [("1", "1"), ("1", "2"), ("", "1")];
        assert_eq!(
            said.map(|(said, standing)| outdated(said, standing)),
            [false, true, false]
        );
    }

    #[test]
    fn of_many_nodes_as_many_are_named_as_a_person_reads() {
        let nodes: Vec<String> = (0..12).map(|n| format!("n{n:02}")).collect();
        let message = condition(&[("a".to_owned(), bypassed(&nodes))].into(), &BTreeSet::new()).message;
        assert!(
            message.starts_with("on Nodes n00, n01, n02, n03, n04, n05, n06, n07, n08, n09 and 2 more of cluster"),
            "{message}"
        );
    }
}
