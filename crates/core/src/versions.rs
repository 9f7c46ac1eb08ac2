//! Compares versions, and derives the condition `VersionsCompatible`: which members run versions that do not work together, and which
//! agents need an update before the controller's next update. The supported versions are data (`versions.json` of the crate
//! `api`).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::{
    enforcement::list_nodes,
    status::{Condition, join_first_five},
};

/// The first three numbers of a version; missing ones are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// Reads the numbers at the start of a text such as `v1.36.3`, `v1.31.4-eks-1a2b`, `6.12.117+deb12-amd64` or `1.0.6`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let end = text.find(|c: char| c != '.' && !c.is_ascii_digit());
        let mut numbers = text[..end.unwrap_or(text.len())].split('.');
        let major = numbers.next()?.parse().ok()?;
        let mut next = || numbers.next().and_then(|number| number.parse().ok());
        Some(Self(major, next()?, next().unwrap_or(0)))
    }

    fn minor(self) -> (u32, u32) {
        (self.0, self.1)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// The supported versions of the programs whose versions the controller can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supported {
    /// The oldest Kubernetes of a member with wg-agent.
    pub oldest_kubernetes: Version,
    /// The newest Kubernetes that the tests run with.
    pub tested_kubernetes: Version,
    /// The oldest kernel of a node with wg-agent.
    pub oldest_kernel: Version,
    /// The oldest wg-agent whose reports the controller understands.
    pub oldest_agent: Version,
}

/// What one member reports about its versions. All texts are untrusted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemberVersions {
    /// The version of the API server.
    pub kubernetes: Option<String>,
    /// Whether the member lacks the CRD of PeerPolicy.
    pub lacks_policies: bool,
    /// The versions of wg-agent and of the kernel, by node with wg-agent.
    pub nodes: BTreeMap<String, NodeVersions>,
}

/// What one node with wg-agent reports about its versions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeVersions {
    /// The version of wg-agent.
    pub agent: String,
    /// The release of the kernel, from the Node's status. Empty = not reported.
    pub kernel: String,
}

/// Builds the condition `VersionsCompatible`. `members` are by entry name; `controller` is the controller's own version.
///
/// It is False only for what is known not to work. Versions that may break something, now or at the next update, change the reason and
/// the message. A text that is not a version is ignored.
#[must_use]
pub fn condition(members: &BTreeMap<String, MemberVersions>, controller: &str, supported: &Supported) -> Condition {
    let mut problems = Vec::new();
    let mut warnings = Vec::new();
    for (cluster, member) in members.iter().filter(|(_, member)| !member.nodes.is_empty()) {
        check_kubernetes(cluster, member, supported, &mut problems, &mut warnings);
        check_agents(
            cluster,
            member,
            (controller, supported.oldest_agent),
            &mut problems,
            &mut warnings,
        );
        check_kernels(cluster, member, supported.oldest_kernel, &mut warnings);
    }
    let is_compatible = problems.is_empty();
    // The reason is that of the first message. The more urgent kinds of warnings come first.
    warnings.sort_by_key(|(urgency, ..)| *urgency);
    problems.extend(warnings.into_iter().map(|(_, reason, message)| (reason, message)));
    let (reason, message) = match problems.first() {
        None => (
            "Compatible",
            "all versions that members report are supported and tested".to_owned(),
        ),
        Some((reason, _)) => (*reason, join_first_five(problems.iter().map(|(_, message)| message))),
    };
    Condition {
        kind: "VersionsCompatible",
        status: is_compatible,
        reason,
        message,
    }
}

type Problems = Vec<(&'static str, String)>;
/// Warnings with their urgency: the lowest number is the most urgent.
type Warnings = Vec<(u8, &'static str, String)>;

fn check_kubernetes(
    cluster: &str,
    member: &MemberVersions,
    supported: &Supported,
    problems: &mut Problems,
    warnings: &mut Warnings,
) {
    let Some(version) = member.kubernetes.as_deref().and_then(Version::parse) else {
        return;
    };
    let (oldest, tested) = (supported.oldest_kubernetes, supported.tested_kubernetes);
    if version < oldest && member.lacks_policies {
        problems.push((
            "KubernetesTooOld",
            format!(
                "cluster {cluster:?} has Kubernetes {version}, which refuses the CRD of PeerPolicy: update it to {oldest} or newer"
            ),
        ));
    } else if version < oldest {
        // Some distributions of an older version accept the CRD (OpenShift backported the functions of CEL).
        let message =
            format!("cluster {cluster:?} has Kubernetes {version}, older than {oldest}, the oldest supported version");
        warnings.push((2, "NotTested", message));
    } else if version.minor() > tested.minor() {
        let message = format!(
            "cluster {cluster:?} has Kubernetes {version}; this version of the controller is tested up to {tested}"
        );
        warnings.push((2, "NotTested", message));
    }
}

fn check_agents(
    cluster: &str,
    member: &MemberVersions,
    (controller, oldest): (&str, Version),
    problems: &mut Problems,
    warnings: &mut Warnings,
) {
    let Some(own) = Version::parse(controller) else { return };
    let mut by_kind: BTreeMap<&str, (BTreeSet<&String>, BTreeSet<Version>)> = BTreeMap::new();
    for (node, versions) in &member.nodes {
        let Some(version) = Version::parse(&versions.agent).filter(|version| *version != own) else {
            continue;
        };
        let kind = match version {
            _ if version < oldest => "AgentTooOld",
            _ if version > own => "AgentNewer",
            _ => "AgentOutdated",
        };
        let (nodes, found) = by_kind.entry(kind).or_default();
        nodes.insert(node);
        found.insert(version);
    }
    for (reason, (nodes, versions)) in by_kind {
        let versions: Vec<String> = versions.iter().take(3).map(ToString::to_string).collect();
        let who = format!(
            "wg-agent on {} of cluster {cluster:?} has version {}",
            list_nodes(nodes.into_iter()),
            versions.join(", ")
        );
        match reason {
            "AgentTooOld" => problems.push((
                "AgentTooOld",
                format!("{who}, and the controller {own} works with {oldest} or newer: apply deploy/agent.yaml of {own} there"),
            )),
            "AgentNewer" => warnings.push((
                0,
                "AgentNewer",
                format!("{who}, newer than the controller ({own}): update the controller, which has to be updated first"),
            )),
            _ => warnings.push((
                1,
                "AgentOutdated",
                format!("{who}, older than the controller ({own}): update the agents there before the controller's next update"),
            )),
        }
    }
}

fn check_kernels(cluster: &str, member: &MemberVersions, oldest: Version, warnings: &mut Warnings) {
    let old = member.nodes.iter();
    let old = old.filter(|(_, versions)| Version::parse(&versions.kernel).is_some_and(|version| version < oldest));
    let old: Vec<&String> = old.map(|(node, _)| node).collect();
    if !old.is_empty() {
        // Only a warning: distributions add features of later kernels to older ones. An agent that cannot write its table
        // reports that.
        let message = format!(
            "{} of cluster {cluster:?}: the kernel is older than {oldest} and may lack nftables features that wg-agent needs",
            list_nodes(old.into_iter())
        );
        warnings.push((2, "NotTested", message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_from_texts_of_kubernetes_and_linux() {
        for (text, want) in [
            ("v1.36.3", Some(Version(1, 36, 3))),
            ("v1.31.4-eks-1a2b3c", Some(Version(1, 31, 4))),
            ("1.31", Some(Version(1, 31, 0))),
            ("6.12.117+deb12-amd64", Some(Version(6, 12, 117))),
            ("5.15.0-91-generic", Some(Version(5, 15, 0))),
            ("v1.36.0-alpha.1", Some(Version(1, 36, 0))),
            ("1.99999999999.3", None),
            ("31", None),
            ("", None),
            ("x1.2", None),
            (".1.2", None),
        ] {
            assert_eq!(Version::parse(text), want, "{text}");
        }
    }

    fn of(members: &[(&str, &MemberVersions)]) -> (bool, &'static str, String) {
        let supported = Supported {
            oldest_kubernetes: Version(1, 31, 0),
            tested_kubernetes: Version(1, 36, 3),
            oldest_kernel: Version(5, 6, 0),
            oldest_agent: Version(0, 2, 0),
        };
        let members = members.iter();
        let members = members.map(|(name, member)| ((*name).to_owned(), (*member).clone()));
        let found = condition(&members.collect(), "0.3.1", &supported);
        (found.status, found.reason, found.message)
    }

    fn member(kubernetes: &str, nodes: &[(&str, &str, &str)]) -> MemberVersions {
        let nodes = nodes.iter().map(|(node, agent, kernel)| {
            let versions = NodeVersions {
                agent: (*agent).to_owned(),
                kernel: (*kernel).to_owned(),
            };
            ((*node).to_owned(), versions)
        });
        MemberVersions {
            kubernetes: Some(kubernetes.to_owned()),
            lacks_policies: false,
            nodes: nodes.collect(),
        }
    }

    #[test]
    fn only_what_cannot_work_makes_the_condition_false() {
        let good = member("v1.36.9", &[("n1", "0.3.1", "6.18.1"), ("n2", "text", "text")]);
        let (status, reason, _) = of(&[("a", &good)]);
        assert_eq!((status, reason), (true, "Compatible"));

        let old = member("v1.30.2", &[("n1", "0.3.1", "")]);
        let (status, reason, message) = of(&[("a", &old)]);
        assert_eq!((status, reason), (true, "NotTested"));
        assert_eq!(
            message,
            "cluster \"a\" has Kubernetes 1.30.2, older than 1.31.0, the oldest supported version"
        );
        let old = MemberVersions {
            lacks_policies: true,
            ..old
        };
        let (status, reason, message) = of(&[("a", &old)]);
        assert_eq!((status, reason), (false, "KubernetesTooOld"));
        assert_eq!(
            message,
            "cluster \"a\" has Kubernetes 1.30.2, which refuses the CRD of PeerPolicy: update it to 1.31.0 or newer"
        );
        // A member without wg-agent needs only the CRD of Peer.
        let of_kg = MemberVersions {
            nodes: BTreeMap::new(),
            ..old
        };
        assert_eq!(of(&[("a", &of_kg)]).1, "Compatible");
    }

    #[test]
    fn agents_of_other_versions_are_named_with_the_remedy() {
        let mixed = member(
            "v1.37.0",
            &[
                ("n1", "0.3.0", "5.4.0-1"),
                ("n2", "0.4.0", "6.1.0"),
                ("n3", "0.2.5", "6.1.0"),
            ],
        );
        let (status, reason, message) = of(&[("a", &mixed)]);
        assert_eq!((status, reason), (true, "AgentNewer"));
        assert_eq!(
            message,
            "wg-agent on Node n2 of cluster \"a\" has version 0.4.0, newer than the controller (0.3.1): update the controller, which has \
             to be updated first; \
             wg-agent on Nodes n1, n3 of cluster \"a\" has version 0.2.5, 0.3.0, older than the controller (0.3.1): update the agents there \
             before the controller's next update; \
             cluster \"a\" has Kubernetes 1.37.0; this version of the controller is tested up to 1.36.3; \
             Node n1 of cluster \"a\": the kernel is older than 5.6.0 and may lack nftables features that wg-agent needs"
        );
        let too_old = member("v1.36.3", &[("n1", "0.1.9", "6.1.0")]);
        let (status, reason, message) = of(&[("a", &mixed), ("b", &too_old)]);
        assert_eq!((status, reason), (false, "AgentTooOld"));
        assert!(
            message.starts_with(
                "wg-agent on Node n1 of cluster \"b\" has version 0.1.9, and the controller 0.3.1 works with 0.2.0 or newer: apply \
                 deploy/agent.yaml of 0.3.1 there; wg-agent on Node n2"
            ),
            "{message}"
        );
    }
}
