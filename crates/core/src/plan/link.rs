//! Which members are connected and how, what a sandbox's grants come to, and where no sandbox may be written (rule 7). What
//! is written then stands in [`super::target`] and [`super::peers`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    nodes::{Registered, Roll, host},
    services,
    target::Party,
};
use crate::{
    enforcement::{Bypass, WITHOUT_IPVS, named},
    mesh::{ObjectName, Profile, Protocol},
    observe::{Claim, Member, Server, ServiceGrant},
};

/// How a source is written into a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    /// Both are cluster-meshed.
    Meshed,
    /// The source is a sandbox with a grant toward the target.
    Sandbox,
    /// The target is a sandbox to which Services of the source are granted.
    Grantor,
}

/// Why one member is not written into another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Apart {
    /// Two entries of one cluster.
    SameCluster,
    /// This entry is connected to nothing.
    Standard(String),
    /// This entry holds no network that was accepted.
    NoNetworks(String),
    /// Both are sandboxes.
    Sandboxes,
    /// This sandbox has no grant toward the other.
    NoGrant(String),
}

/// How `source` is written into `target`. Two sandboxes never meet.
///
/// # Errors
/// It is not, and why.
pub(super) fn tie(target: &Party<'_>, source: &Party<'_>) -> Result<Link, Apart> {
    if target.cluster.identity.same_cluster(&source.cluster.identity) {
        return Err(Apart::SameCluster);
    }
    let both = [source, target];
    let of = |profile| both.iter().filter(move |party| party.cluster.profile == profile);
    if let Some(party) = of(Profile::Standard).next() {
        return Err(Apart::Standard(party.cluster.name.clone()));
    }
    if of(Profile::Sandbox).count() == 2 {
        return Err(Apart::Sandboxes);
    }
    if let Some(party) = both.iter().find(|party| !party.connected) {
        return Err(Apart::NoNetworks(party.cluster.name.clone()));
    }
    let (link, sandbox, other) = if source.cluster.profile == Profile::Sandbox {
        (Link::Sandbox, source, target)
    } else if target.cluster.profile == Profile::Sandbox {
        (Link::Grantor, target, source)
    } else {
        return Ok(Link::Meshed);
    };
    let mut egress = sandbox.cluster.egress.iter();
    if egress.any(|grant| grant.cluster == other.cluster.name) {
        Ok(link)
    } else {
        Err(Apart::NoGrant(sandbox.cluster.name.clone()))
    }
}

/// How `source` is written into `target`; `None` = not at all.
pub(super) fn between(target: &Party<'_>, source: &Party<'_>) -> Option<Link> {
    tie(target, source).ok()
}

/// Which of the two has to hold the other to a policy; `None` = nobody is held to one that is tighter than the Peers.
pub(super) fn enforced_by<'n>(link: Link, target: &'n str, source: &'n str, party: &Party<'_>) -> Option<&'n str> {
    match link {
        Link::Meshed if !party.cluster.quarantine => None,
        Link::Meshed | Link::Sandbox => Some(target),
        Link::Grantor => Some(source),
    }
}

/// Addresses of granted endpoints by the node that runs them.
pub(super) type Hosts = BTreeMap<String, BTreeSet<IpAddr>>;

/// What the grants of one sandbox toward one member come to. Nothing seen of the sandbox has a part in it.
#[derive(Debug, Default)]
pub(super) struct Granted {
    /// What the member's own nodes look up: each Service once.
    pub(super) grants: BTreeSet<ServiceGrant>,
    /// The endpoints that are there now.
    pub(super) hosts: Hosts,
    /// Services in namespaces that were never listed: neither of these says anything of them.
    pub(super) unlisted: BTreeSet<ObjectName>,
}

/// On what terms a source is written into a target.
pub(super) enum Terms<'t> {
    /// With all its prefixes.
    Meshed,
    /// A sandbox: its nodes' WireGuard addresses, nothing to dial, and never before a node enforces its policy.
    Sandbox {
        /// Name and revision of the policy.
        requires: &'t str,
        /// The networks it speaks of.
        networks: &'t BTreeSet<IpNet>,
    },
    /// Into a sandbox: the endpoints it is granted and the nodes that run them.
    Grantor {
        /// The endpoints by node.
        hosts: &'t Hosts,
        /// They are all that there are.
        whole: bool,
    },
}

impl Terms<'_> {
    /// What a node's Peer may carry, of what it could; `None` = the node gets none.
    pub(super) fn prefixes(&self, node: &Registered<'_>) -> Option<BTreeSet<IpNet>> {
        match self {
            Self::Meshed => Some(node.prefixes.clone()),
            Self::Sandbox { networks, .. } => {
                let mut own = BTreeSet::from([node.wireguard]);
                own.retain(|host| networks.iter().any(|net| net.contains(host)));
                Some(own)
            }
            Self::Grantor { hosts, .. } => {
                let endpoints = hosts.get(node.node)?.iter().map(|address| host(*address));
                Some(endpoints.chain([node.wireguard]).collect())
            }
        }
    }
}

/// Resolves what `sandbox` is granted of `exporter`, as far as it was seen; what does not resolve is left out, and
/// [`super::EgressReport`] says why.
pub(super) fn granted(sandbox: &Party<'_>, exporter: &Party<'_>, roll: Option<&Roll<'_>>) -> Granted {
    let mut granted = Granted::default();
    let Some(member) = exporter.member() else {
        return granted;
    };
    let hosting = hosting(roll);
    let mut services: BTreeMap<ObjectName, BTreeSet<(Protocol, String)>> = BTreeMap::new();
    let grants = sandbox.cluster.egress.iter();
    for grant in grants.filter(|grant| grant.cluster == exporter.cluster.name) {
        if member.unlisted.services.contains_key(&grant.service.namespace) {
            granted.unlisted.insert(grant.service.clone());
            continue;
        }
        let Ok(found) = services::resolve(
            grant,
            &sandbox.cluster,
            &exporter.cluster,
            member,
            &services::Reach::Nodes(&hosting),
        ) else {
            continue;
        };
        let ports = if grant.ports.is_empty() {
            BTreeSet::new()
        } else {
            let ports = found.ports.iter();
            ports.map(|port| (port.protocol, port.name.clone())).collect()
        };
        services
            .entry(grant.service.clone())
            // Every port of one grant is every port.
            .and_modify(|known| {
                if known.is_empty() || ports.is_empty() {
                    known.clear();
                } else {
                    known.extend(ports.iter().cloned());
                }
            })
            .or_insert_with(|| ports.clone());
        for (node, addresses) in found.hosts {
            granted.hosts.entry(node).or_default().extend(addresses);
        }
    }
    granted.grants = services
        .into_iter()
        .map(|(service, ports)| ServiceGrant {
            service,
            ports,
            within: exporter.cluster.allowed.iter().copied().collect(),
        })
        .collect();
    granted
}

/// Nodes of a member that others have a Peer for.
pub(super) fn hosting<'r>(roll: Option<&'r Roll<'_>>) -> BTreeSet<&'r str> {
    let registered = roll.into_iter().flat_map(|roll| &roll.registered);
    let held = roll.into_iter().flat_map(|roll| roll.held.keys());
    registered.map(|node| node.node).chain(held.copied()).collect()
}

/// Why a member takes no sandbox, naming the nodes; `None` = it does. A sandbox's Peer in a cluster is read by every node
/// there, so one that enforces nothing is one too many. A Node that has just joined and published nothing has no tunnel.
pub(super) fn cannot_enforce(party: &Party<'_>, roll: Option<&Roll<'_>>) -> Option<String> {
    let member: &Member = party.member()?;
    let cluster = &party.cluster.name;
    if member.policies.is_none() {
        return Some(format!(
            "cluster {cluster:?} has no CRD peerpolicies.kilo.squat.ai, so nothing there is held to a policy: install the \
             agent's manifests there"
        ));
    }
    let hosting = hosting(roll);
    let serving = member.nodes.iter();
    let serving = serving.filter(|(name, node)| node.public_key != Claim::Absent || hosting.contains(&***name));
    let (mut without, mut bypassed, mut ipvs) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut agents = false;
    for (name, node) in serving {
        agents |= node.server == Server::Agent;
        let fails = match (node.server, node.bypassed) {
            (Server::Agent, None) => continue,
            (Server::Agent, Some(Bypass::Netfilter)) => &mut bypassed,
            (Server::Agent, Some(Bypass::Ipvs)) => &mut ipvs,
            (Server::Kilo | Server::AgentPolicy, _) => &mut without,
        };
        fails.insert(name.clone());
    }
    let mut whys = Vec::new();
    if !agents && without.is_empty() {
        whys.push(format!(
            "no node of cluster {cluster:?} runs wg-agent yet, which would hold a sandbox to its grants"
        ));
    }
    if !without.is_empty() {
        whys.push(format!(
            "{} of cluster {cluster:?} without wg-agent in mode full cannot hold a sandbox to its grants: run wg-agent on every \
             node there",
            named(without.iter())
        ));
    }
    if !bypassed.is_empty() {
        whys.push(format!(
            "on {} of cluster {cluster:?} the CNI leads packets past netfilter, so a sandbox would not be held to its grants: set \
             bpf.hostLegacyRouting=true for Cilium there",
            named(bypassed.iter())
        ));
    }
    if !ipvs.is_empty() {
        whys.push(format!(
            "on {} of cluster {cluster:?} kube-proxy in mode ipvs translates packets after the policies looked at them, so a \
             sandbox would not be held to its grants: {WITHOUT_IPVS}",
            named(ipvs.iter())
        ));
    }
    (!whys.is_empty()).then(|| whys.join("; "))
}

/// Why the entry a grant names has nothing to give to `importer`.
pub(super) fn refusal(importer: &Party<'_>, exporter: Option<&Party<'_>>, name: &str) -> String {
    let words = |party: &Party<'_>| match party.cluster.profile {
        Profile::Sandbox if party.cluster.name == name => Some(format!(
            "cluster {name:?} has isolationProfile sandbox: its pods have no address in the mesh, so it has no Service to give"
        )),
        Profile::Standard => Some(format!(
            "cluster {:?} has isolationProfile standard: it is connected to nothing",
            party.cluster.name
        )),
        _ => None,
    };
    exporter
        .and_then(words)
        .or_else(|| words(importer))
        .unwrap_or_else(|| format!("cluster {name:?} is not connected to this one"))
}

/// Whether packets of this entry are held to its grants, or to nothing: a sandbox, one that is quarantined, or one that is
/// listed alone and on its way out.
pub(super) const fn closed(party: &Party<'_>) -> bool {
    !matches!(party.cluster.profile, Profile::ClusterMeshed) || party.cluster.quarantine
}
