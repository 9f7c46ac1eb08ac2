//! Which Nodes of a member get a Peer, with which prefixes, and why the others do not (rules 1 to 5, 9).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    Fact, HOLD, HOLD_REPORT_DELAY, Reason, Skipped, Uncovered, anchor, endpoint,
    location::{self, Segments},
};
use crate::{
    key::PublicKey,
    mesh::{Addressing, Cluster, PodNetwork},
    observe::{Claim, Member, Node, ObservedPeer, Server},
};

mod duplicates;

use duplicates::{ClaimIndex, NodeClaims};

/// A Node that gets a Peer in every connected member.
#[derive(Debug, Clone)]
pub(super) struct RegisteredNode<'a> {
    pub(super) node: &'a str,
    pub(super) observed: &'a Node,
    pub(super) key: PublicKey,
    /// What its Peers carry, anchored networks not among it. Inside allowedNetworks, always.
    pub(super) prefixes: BTreeSet<IpNet>,
    /// Its WireGuard address.
    pub(super) wireguard: IpNet,
}

/// What became of a member's Nodes.
#[derive(Debug, Default)]
pub(super) struct NodeRegistry<'a> {
    /// In order of age.
    pub(super) registered: Vec<RegisteredNode<'a>>,
    pub(super) skipped: Vec<Skipped>,
    /// Nodes whose last Peers stand a while longer.
    pub(super) held: BTreeMap<&'a str, Reason>,
    /// podCIDRs of registered nodes that lie outside allowedNetworks, in order of the nodes' age.
    pub(super) uncovered: Vec<Uncovered>,
    /// Which nodes of a location stand for which others.
    pub(super) segments: Segments<'a>,
    /// Prefixes that belong to some Node, whether it has a Peer or not. A network that holds one of them is not anchored by
    /// default, unless an earlier plan anchored it.
    pub(super) owned: BTreeSet<IpNet>,
    pub(super) facts: BTreeSet<Fact>,
}

/// One member as the planner uses it: the entry, with `allowed` cut down to what was accepted.
pub(super) struct RegistryBuilder<'a, 'f> {
    pub(super) cluster: &'f Cluster,
    pub(super) member: &'a Member,
    /// The Peers of ours for this node that stand in the members.
    pub(super) existing: &'f dyn Fn(&str) -> Vec<&'a ObservedPeer>,
}

/// Inside what the member may claim, and no part of what only an anchor carries.
pub(super) fn is_routable(cluster: &Cluster, net: IpNet) -> bool {
    cluster.allows(net) && anchor::find_reserved_overlap(cluster, net).is_none()
}

type Refusal = (Reason, String);

/// A host route.
pub(super) fn host(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

impl<'a> RegistryBuilder<'a, '_> {
    /// Goes through the Nodes in order of (creationTimestamp, name), so that the first claim of an address wins whatever
    /// order they were listed in.
    pub(super) fn build(&self) -> NodeRegistry<'a> {
        let is_held = |name: &str, node: &Node| self.may_hold(name, node);
        let mut registry = NodeRegistry {
            segments: location::segments(self.member, &is_held),
            ..NodeRegistry::default()
        };
        let mut nodes: Vec<(&'a str, &'a Node)> =
            self.member.nodes.iter().map(|(name, node)| (&**name, node)).collect();
        nodes.sort_by_key(|(name, node)| (node.created, *name));

        let mut outcomes: Vec<(&'a str, &'a Node, Result<NodeClaims<'a>, Refusal>)> = Vec::new();
        for (position, (name, node)) in nodes.into_iter().enumerate() {
            if registry.segments.led.contains(name) {
                continue;
            }
            let claims = if position >= self.cluster.max_nodes {
                Err((
                    Reason::TooManyNodes,
                    format!(
                        "more than {} Nodes; the oldest are served, raise maxNodes if they are real",
                        self.cluster.max_nodes
                    ),
                ))
            } else {
                self.read(name, node, &mut registry)
            };
            outcomes.push((name, node, claims));
        }
        let mut index = ClaimIndex::default();
        for (.., claims) in &outcomes {
            if let Ok(claims) = claims
                && !claims.observed.is_silent()
            {
                index.active_addresses.entry(claims.wireguard_ip).or_insert(claims.node);
            }
        }
        for (name, node, claims) in outcomes {
            let outcome = claims.and_then(|claims| index.register(claims));
            match outcome {
                Ok((registered, uncovered)) => {
                    registry.registered.push(registered);
                    registry.uncovered.extend(uncovered);
                }
                Err((reason, _)) if self.holds(name, node, reason) => {
                    registry.held.insert(name, reason);
                }
                Err((reason, message)) => registry.skipped.push(Skipped {
                    node: name.to_owned(),
                    reason,
                    message,
                }),
            }
        }
        registry
            .facts
            .extend(index.shared.into_iter().map(|message| Fact::AddressShared {
                cluster: self.cluster.name.clone(),
                message,
            }));
        registry.skipped.sort();
        let missing = registry
            .uncovered
            .iter()
            .find(|pods| self.meshes_family_of(pods.network));
        registry.facts.extend(missing.map(|first| Fact::PodCIDRNotCovered {
            cluster: self.cluster.name.clone(),
            message: self.uncovered(first),
        }));
        self.report_held_nodes(&mut registry);
        self.report_silent_nodes(&mut registry);
        let nodes = self.nodes_with_uncovered_ips(&registry);
        if !nodes.is_empty() {
            registry.facts.insert(Fact::InternalIPNotCovered {
                cluster: self.cluster.name.clone(),
                nodes,
            });
        }
        registry.owned = self.owned(&registry);
        registry
    }

    /// Nodes that have been held for longer than a restart takes.
    fn report_held_nodes(&self, registry: &mut NodeRegistry<'a>) {
        let lasting = |name: &str| {
            self.member.nodes[name]
                .held_for
                .is_some_and(|age| age >= HOLD_REPORT_DELAY)
        };
        let held = registry.held.iter().filter(|(name, _)| lasting(name));
        let nodes: BTreeMap<String, Reason> = held.map(|(name, reason)| ((*name).to_owned(), *reason)).collect();
        if !nodes.is_empty() {
            registry.facts.insert(Fact::NodesHeld {
                cluster: self.cluster.name.clone(),
                nodes,
            });
        }
    }

    /// Nodes for which kg does not check in.
    fn report_silent_nodes(&self, registry: &mut NodeRegistry<'a>) {
        let nodes = self.member.nodes.iter();
        let silent = nodes.filter(|(_, node)| node.is_silent() && node.public_key != Claim::Absent);
        let nodes: BTreeSet<String> = silent.map(|(name, _)| name.clone()).collect();
        if !nodes.is_empty() {
            registry.facts.insert(Fact::KgSilent {
                cluster: self.cluster.name.clone(),
                nodes,
            });
        }
    }

    /// Everything that some Node claims or has: a Node that fails for a moment keeps its networks from being anchored. Also the
    /// addresses of every Node: carried by another one, an address would lead the outer packets for its own node into the
    /// tunnel where kg serves. Exported pods have no part, since they lie in the shared network that is anchored.
    fn owned(&self, registry: &NodeRegistry<'a>) -> BTreeSet<IpNet> {
        let mut owned: BTreeSet<IpNet> = BTreeSet::new();
        let routed = self.cluster.effective_addressing() == Addressing::Routed;
        for (name, node) in &self.member.nodes {
            owned.extend(endpoint::node_addresses(node).map(host));
            owned.extend(node.wireguard_ip.value().map(|claim| host(claim.addr())));
            if routed {
                owned.extend(node.allowed_location_ips.iter().map(IpNet::trunc));
            }
            if routed && self.cluster.pod_network == PodNetwork::PerNode {
                owned.extend(node.pod_cidrs.iter().filter_map(Claim::value).map(IpNet::trunc));
            }
            if !registry.held.contains_key(&**name) {
                continue;
            }
            // Its annotations may be gone; its Peers still say what they were.
            for spec in (self.existing)(name).iter().filter_map(|peer| peer.spec.as_ref().ok()) {
                let hosts = spec
                    .allowed_ips
                    .iter()
                    .filter(|net| net.prefix_len() == net.max_prefix_len());
                // An address that the entry lists by itself may be there as an anchored network.
                owned.extend(hosts.filter(|net| !self.cluster.allowed.contains(net)));
                owned.extend(endpoint::peer_endpoints(spec).map(host));
            }
        }
        owned
    }

    /// kg removes its annotations at each restart and publishes a renumbering late: what was true before stands a while.
    fn holds(&self, name: &str, node: &Node, reason: Reason) -> bool {
        let passing = match reason {
            Reason::NodeNoPublicKey | Reason::NodeNoWireguardIP => true,
            Reason::WGIPDuplicate => node.server != Server::Agent,
            _ => false,
        };
        passing && self.may_hold(name, node)
    }

    /// Whether it has a Peer and that may stand without its annotations.
    fn may_hold(&self, name: &str, node: &Node) -> bool {
        node.held_for.is_none_or(|age| age < HOLD) && !(self.existing)(name).is_empty()
    }

    /// Reads one Node's own claims, and those of the nodes it leads.
    fn read(
        &self,
        name: &'a str,
        observed: &'a Node,
        registry: &mut NodeRegistry<'a>,
    ) -> Result<NodeClaims<'a>, Refusal> {
        endpoint::check_explicit(observed)?;
        let key = match &observed.public_key {
            Claim::Valid(key) => *key,
            Claim::Absent => {
                return Err((
                    Reason::NodeNoPublicKey,
                    "no annotation kilo.squat.ai/key; is wg-agent (or kg) running there?".into(),
                ));
            }
            Claim::Invalid(why) => {
                return Err((Reason::PublicKeyInvalid, format!("annotation kilo.squat.ai/key: {why}")));
            }
        };
        let wireguard_ip = self.wireguard_ip(observed)?;
        let mut uncovered = Vec::new();
        let mut pods = self.pod_cidrs(name, observed, &mut uncovered)?;
        let mut internal = self.internal_ips(observed);
        for follower in registry.segments.followers.get(name).cloned().unwrap_or_default() {
            let Some(led) = self.member.nodes.get(follower) else {
                continue;
            };
            match self.pod_cidrs(follower, led, &mut uncovered) {
                Ok(cidrs) => {
                    pods.extend(cidrs);
                    internal.extend(self.internal_ips(led));
                }
                Err((reason, message)) => registry.skipped.push(Skipped {
                    node: follower.to_owned(),
                    reason,
                    message,
                }),
            }
        }
        let mut extra: BTreeSet<IpNet> = BTreeSet::new();
        if self.cluster.effective_addressing() == Addressing::Routed {
            extra.extend(
                observed
                    .allowed_location_ips
                    .iter()
                    .map(IpNet::trunc)
                    .filter(|net| self.routable(*net)),
            );
            extra.extend(self.exported(name));
        }
        Ok(NodeClaims {
            node: name,
            observed,
            key,
            wireguard_ip,
            pods,
            internal,
            extra,
            uncovered,
        })
    }

    fn routable(&self, net: IpNet) -> bool {
        is_routable(self.cluster, net)
    }

    fn uncovered(&self, first: &Uncovered) -> String {
        let claim = format!("podCIDR {} of Node {}", first.network, first.node);
        let why = self.refusal(&claim, first.network.trunc());
        if self.cluster.allows(first.network) {
            format!("{why}. Its pods in there are not reached; there may be more of them")
        } else {
            format!(
                "{why}, and its pods in there are not reached; there may be more of them: add the network that holds them all"
            )
        }
    }

    /// Why a claim that is not routable is refused.
    fn refusal(&self, claim: &str, net: IpNet) -> String {
        let cluster = &self.cluster.name;
        match anchor::find_reserved_overlap(self.cluster, net).filter(|_| self.cluster.allows(net)) {
            None => format!("{claim} lies outside {}", self.bounds()),
            Some(anchored) if self.cluster.anchored.is_some() => {
                format!("{claim} overlaps {anchored}, which is one of anchoredNetworks of cluster {cluster:?}")
            }
            Some(anchored) => format!(
                "{claim} overlaps {anchored} of cluster {cluster:?}, which is anchored (status.clusters[].anchored). If Nodes own \
                 it, list anchoredNetworks without it on that entry; an empty list lets Nodes claim all of allowedNetworks"
            ),
        }
    }

    fn bounds(&self) -> String {
        let list: Vec<String> = self.cluster.allowed.iter().map(ToString::to_string).collect();
        format!(
            "allowedNetworks of cluster {:?} ({})",
            self.cluster.name,
            list.join(", ")
        )
    }

    fn wireguard_ip(&self, observed: &Node) -> Result<IpAddr, Refusal> {
        match &observed.wireguard_ip {
            Claim::Absent => Err((
                Reason::NodeNoWireguardIP,
                "no annotation kilo.squat.ai/wireguard-ip; is wg-agent running there, with --wireguard-cidr?".into(),
            )),
            Claim::Invalid(why) => Err((
                Reason::WGIPInvalid,
                format!("annotation kilo.squat.ai/wireguard-ip: {why}"),
            )),
            Claim::Valid(net) if self.routable(host(net.addr())) => Ok(net.addr()),
            Claim::Valid(net) => Err((
                Reason::WGIPOutOfRange,
                self.refusal(&format!("WireGuard address {}", net.addr()), host(net.addr())),
            )),
        }
    }

    /// Those that the member may claim. What lies outside costs itself alone, unless nothing is left.
    fn pod_cidrs(
        &self,
        name: &str,
        observed: &Node,
        uncovered: &mut Vec<Uncovered>,
    ) -> Result<BTreeSet<IpNet>, Refusal> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded
            || self.cluster.pod_network == PodNetwork::Shared
        {
            return Ok(BTreeSet::new());
        }
        let (mut claims, mut outside) = (BTreeSet::new(), Vec::new());
        for claim in &observed.pod_cidrs {
            match claim {
                Claim::Absent => {}
                Claim::Invalid(why) => return Err((Reason::NodeNoPodCIDR, format!("spec.podCIDRs: {why}"))),
                Claim::Valid(net) if self.routable(net.trunc()) => {
                    claims.insert(net.trunc());
                }
                Claim::Valid(net) => outside.push(*net),
            }
        }
        if let (true, Some(net)) = (
            claims.is_empty(),
            outside.iter().find(|net| self.meshes_family_of(**net)),
        ) {
            return Err((
                Reason::NodePodCIDROutOfRange,
                self.refusal(&format!("podCIDR {net}"), net.trunc()),
            ));
        }
        uncovered.extend(outside.into_iter().map(|network| Uncovered {
            node: name.to_owned(),
            network,
        }));
        if claims.is_empty() {
            let message = "spec.podCIDRs holds no network of a family in allowedNetworks; does the cluster allocate node CIDRs? \
                           If its pod network is shared, set podNetwork: Shared";
            return Err((Reason::NodeNoPodCIDR, message.into()));
        }
        Ok(claims)
    }

    fn meshes_family_of(&self, net: IpNet) -> bool {
        self.cluster
            .allowed
            .iter()
            .any(|allowed| allowed.addr().is_ipv4() == net.addr().is_ipv4())
    }

    fn internal_ips(&self, observed: &Node) -> BTreeSet<IpNet> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded {
            return BTreeSet::new();
        }
        let hosts = observed.internal_ips.iter().map(|address| host(address.to_canonical()));
        hosts.filter(|net| self.routable(*net)).collect()
    }

    /// The nodes of kg whose InternalIPs no Peer may carry: kg sends its host network's packets with them, an agent with
    /// the WireGuard address. The first few, since a fleet must not fill a condition.
    fn nodes_with_uncovered_ips(&self, registry: &NodeRegistry<'a>) -> Vec<String> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded {
            return Vec::new();
        }
        let registered: BTreeSet<&str> = registry.registered.iter().map(|node| node.node).collect();
        let served = |name: &str| {
            registered.contains(name) || registry.held.contains_key(name) || registry.segments.led.contains(name)
        };
        let bare = |node: &Node| {
            let mut hosts = node.internal_ips.iter().map(|address| host(address.to_canonical()));
            hosts.any(|net| self.meshes_family_of(net) && !self.routable(net))
        };
        let nodes = self.member.nodes.iter().filter(|(name, _)| served(name));
        let nodes = nodes.filter(|(_, node)| node.server != Server::Agent && bare(node));
        nodes.map(|(name, _)| name.clone()).take(5).collect()
    }

    /// As [`is_routable`], but inside a network that is anchored by default: `exports` names these pods, no Node claims them.
    fn exportable(&self, net: IpNet) -> bool {
        self.cluster.allows(net) && (self.cluster.anchored.is_none() || self.routable(net))
    }

    fn exported(&self, node: &str) -> impl Iterator<Item = IpNet> + '_ {
        let node = node.to_owned();
        let shared = self.cluster.pod_network == PodNetwork::Shared && !self.cluster.exports.is_empty();
        self.member
            .pods
            .iter()
            .filter(move |(name, pod)| {
                shared
                    && pod.node == node
                    && self
                        .cluster
                        .exports
                        .iter()
                        .any(|e| e.selects(&name.namespace, &pod.labels))
            })
            .flat_map(|(_, pod)| pod.addresses.iter().map(|address| host(*address)))
            .filter(|net| self.exportable(*net))
    }
}
