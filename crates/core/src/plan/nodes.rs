//! Builds the registry of a member's nodes: which Nodes get a Peer, with which prefixes, and why the others do not (design rules
//! 1 to 5, 9).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{Fact, HOLD, HOLD_REPORT_DELAY, Reason, Skipped, Uncovered, anchor, endpoint, location};
use crate::{
    mesh::{Addressing, Cluster, PodNetwork, Profile},
    observe::{Claim, Member, Node, ObservedPeer, Server},
};

mod duplicates;
mod left_out;
mod registry;

use duplicates::{ClaimIndex, NodeClaims};
pub(super) use registry::{NodeRegistry, RegisteredNode};

/// Builds the registry of one member.
pub(super) struct RegistryBuilder<'a, 'f> {
    /// The entry, with `allowed` reduced to the accepted networks.
    pub(super) cluster: &'f Cluster,
    pub(super) member: &'a Member,
    /// The existing Peers of this mesh for a node, in all cluster-meshed members.
    pub(super) existing: &'f dyn Fn(&str) -> Vec<&'a ObservedPeer>,
    /// [`RegisteredNode::peer_name`] of a node.
    pub(super) peer_name: &'f dyn Fn(&str) -> String,
}

/// Whether a Node of the member may claim `net`: it lies inside allowedNetworks and does not overlap an anchored network.
pub(super) fn is_claimable(cluster: &Cluster, net: IpNet) -> bool {
    cluster.allows(net) && anchor::find_reserved_overlap(cluster, net).is_none()
}

/// The prefixes that a Node claims (WireGuard address, pod CIDRs, location IPs), and the addresses that it publishes.
pub(super) fn owned_prefixes(cluster: &Cluster, node: &Node) -> impl Iterator<Item = IpNet> {
    let routed = cluster.effective_addressing() == Addressing::Routed;
    let has_pods = routed && cluster.pod_network == PodNetwork::PerNode;
    let wireguard = node.wireguard_ip.value().map(|claim| host_route(claim.addr()));
    let location_ips = node.allowed_location_ips.iter().filter(move |_| routed);
    let pods = node.pod_cidrs.iter().filter(move |_| has_pods).filter_map(Claim::value);
    let addresses = endpoint::node_addresses(node).map(host_route);
    addresses
        .chain(wireguard)
        .chain(location_ips.chain(pods).map(IpNet::trunc))
}

type Refusal = (Reason, String);

/// The host route (/32 or /128) of an address.
pub(super) fn host_route(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

impl<'a> RegistryBuilder<'a, '_> {
    /// Registers the Nodes in the order of (creationTimestamp, name): if two Nodes claim one prefix, the older Node wins, in
    /// whatever order the API server lists them. But a silent node loses its WireGuard address to any node that is not silent.
    pub(super) fn build(&self) -> NodeRegistry<'a> {
        let can_hold = |name: &str, node: &Node| self.can_hold(name, node);
        let mut registry = NodeRegistry::new(location::segments(self.member, &can_hold));
        let mut nodes: Vec<(&'a str, &'a Node)> = self.member.nodes.iter().collect();
        nodes.sort_by_key(|(name, node)| (node.created, *name));

        let mut outcomes: Vec<(&'a str, &'a Node, Result<NodeClaims<'a>, Refusal>)> = Vec::new();
        for (position, (name, node)) in nodes.into_iter().enumerate() {
            if registry.segments.all_followers.contains(name) {
                continue;
            }
            let claims = if position >= self.cluster.max_nodes {
                Err((
                    Reason::TooManyNodes,
                    format!(
                        "the cluster has more than {} Nodes; only its oldest Nodes are used",
                        self.cluster.max_nodes
                    ),
                ))
            } else {
                self.read_claims(name, node, &mut registry)
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
            let outcome = claims.and_then(|claims| index.register(claims, self.peer_name));
            match outcome {
                Ok((registered, uncovered)) => {
                    registry.registered.push(registered);
                    registry.uncovered.extend(uncovered);
                }
                Err((reason, _)) if self.is_held(name, node, reason) => {
                    registry.held.insert(name, reason);
                }
                Err((reason, message)) => registry.skipped.push(Skipped {
                    node: name.to_owned(),
                    reason,
                    message,
                    target: None,
                }),
            }
        }
        registry
            .facts
            .extend(index.duplicate_messages.into_iter().map(|message| Fact::AddressShared {
                cluster: self.cluster.name.clone(),
                message,
            }));
        registry.skipped.sort();
        let uncovered = registry
            .uncovered
            .iter()
            .find(|pods| self.allows_family_of(pods.network));
        registry.facts.extend(uncovered.map(|first| Fact::PodCIDRNotCovered {
            cluster: self.cluster.name.clone(),
            message: self.uncovered_message(first),
        }));
        self.report_left_out(&mut registry);
        self.report_held_nodes(&mut registry);
        self.report_silent_nodes(&mut registry);
        let nodes = self.nodes_with_uncovered_ips(&registry);
        if !nodes.is_empty() {
            registry.facts.insert(Fact::InternalIPNotCovered {
                cluster: self.cluster.name.clone(),
                nodes,
            });
        }
        registry.owned = self.collect_owned(&registry);
        registry.anchored = anchor::anchored_networks(self.cluster, Some(&registry));
        registry
    }

    /// Reports nodes that have been held for longer than a restart takes.
    fn report_held_nodes(&self, registry: &mut NodeRegistry<'a>) {
        let is_reported = |name: &str| {
            self.member.nodes[name]
                .held_for
                .is_some_and(|age| age >= HOLD_REPORT_DELAY)
        };
        let held = registry.held.iter().filter(|(name, _)| is_reported(name));
        let nodes: BTreeMap<String, Reason> = held.map(|(name, reason)| ((*name).to_owned(), *reason)).collect();
        if !nodes.is_empty() {
            registry.facts.insert(Fact::NodesHeld {
                cluster: self.cluster.name.clone(),
                nodes,
            });
        }
    }

    /// Reports nodes for which kg has stopped checking in.
    fn report_silent_nodes(&self, registry: &mut NodeRegistry<'a>) {
        let nodes = self.member.nodes.iter();
        let silent = nodes.filter(|(_, node)| node.is_silent() && node.public_key != Claim::Absent);
        let nodes: BTreeSet<String> = silent.map(|(name, _)| name.to_owned()).collect();
        if !nodes.is_empty() {
            registry.facts.insert(Fact::KgSilent {
                cluster: self.cluster.name.clone(),
                nodes,
            });
        }
    }

    /// The [`owned_prefixes`] of all Nodes, even of a Node that is invalid for a moment. If the entry does not set
    /// `anchoredNetworks`, the planner anchors a network that contains one of these prefixes only if an earlier plan anchored it.
    ///
    /// This includes the addresses of every Node. If another node's Peer contained one of them, kg would route the outer packets
    /// for that Node into the tunnel. Addresses of exported pods are not included, because they lie in the shared network that
    /// is anchored.
    fn collect_owned(&self, registry: &NodeRegistry<'a>) -> BTreeSet<IpNet> {
        let mut owned: BTreeSet<IpNet> = BTreeSet::new();
        for (name, node) in &self.member.nodes {
            owned.extend(owned_prefixes(self.cluster, node));
            if !registry.held.contains_key(name) {
                continue;
            }
            // The annotations of a held node may be missing. Its existing Peers contain their last values.
            for spec in (self.existing)(name).iter().filter_map(|peer| peer.spec.as_ref().ok()) {
                let hosts = spec
                    .allowed_ips
                    .iter()
                    .filter(|net| net.prefix_len() == net.max_prefix_len());
                // If allowedNetworks contains a /32 or /128, the Peer may have it as an anchored network and not as the node's address.
                owned.extend(hosts.filter(|net| !self.cluster.allowed.contains(net)));
                owned.extend(endpoint::peer_endpoint_ips(spec).map(host_route));
            }
        }
        owned
    }

    /// Whether a Node keeps its last Peer although `reason` prevents its registration. A restart of kg removes the Node's annotations,
    /// and kg publishes a new WireGuard address late. So a missing key, a missing address and, with kg, a duplicate address may be
    /// temporary.
    fn is_held(&self, name: &str, node: &Node, reason: Reason) -> bool {
        let is_temporary = match reason {
            Reason::NodeNoPublicKey | Reason::NodeNoWireguardIP => true,
            Reason::WGIPDuplicate => node.server != Server::Agent,
            _ => false,
        };
        is_temporary && self.can_hold(name, node)
    }

    /// Whether the node has an existing Peer in a cluster-meshed member, and its hold has not expired. A sandbox's node has only entries
    /// in SandboxAccesses, so it is not held.
    fn can_hold(&self, name: &str, node: &Node) -> bool {
        node.held_for.is_none_or(|age| age < HOLD) && !(self.existing)(name).is_empty()
    }

    /// Reads the claims of one Node, including those of its followers if it is the leader of a location.
    fn read_claims(
        &self,
        name: &'a str,
        observed: &'a Node,
        registry: &mut NodeRegistry<'a>,
    ) -> Result<NodeClaims<'a>, Refusal> {
        // Gateways learn the endpoint of a sandbox's node from its first packet, so the endpoint annotations of the node do not matter.
        if self.cluster.profile != Profile::Sandbox {
            endpoint::check_explicit(observed)?;
        }
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
        for follower in registry
            .segments
            .followers_by_leader
            .get(name)
            .cloned()
            .unwrap_or_default()
        {
            let Some(follower_node) = self.member.nodes.get(follower) else {
                continue;
            };
            match self.pod_cidrs(follower, follower_node, &mut uncovered) {
                Ok(cidrs) => {
                    pods.extend(cidrs);
                    internal.extend(self.internal_ips(follower_node));
                }
                Err((reason, message)) => registry.skipped.push(Skipped {
                    node: follower.to_owned(),
                    reason,
                    message,
                    target: None,
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
                    .filter(|net| self.is_claimable(*net)),
            );
            extra.extend(self.exported_addresses(name));
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

    fn is_claimable(&self, net: IpNet) -> bool {
        is_claimable(self.cluster, net)
    }

    fn uncovered_message(&self, first: &Uncovered) -> String {
        let claim = format!("podCIDR {} of Node {}", first.network, first.node);
        let why = self.refusal_message(&claim, first.network.trunc());
        if self.cluster.allows(first.network) {
            format!("{why}. Its pods in that network cannot be reached; other Nodes may have the same problem")
        } else {
            format!(
                "{why}, and its pods in that network cannot be reached; other Nodes may have the same problem: add a network that \
                 contains all podCIDRs"
            )
        }
    }

    /// Why a claim that is not [`is_claimable`] is refused, as a message.
    fn refusal_message(&self, claim: &str, net: IpNet) -> String {
        let cluster = &self.cluster.name;
        match anchor::find_reserved_overlap(self.cluster, net).filter(|_| self.cluster.allows(net)) {
            None => format!("{claim} lies outside {}", self.allowed_networks_text()),
            Some(anchored) if self.cluster.anchored.is_some() => {
                format!("{claim} overlaps {anchored}, one of the anchoredNetworks of cluster {cluster:?}")
            }
            Some(anchored) => format!(
                "{claim} overlaps {anchored} of cluster {cluster:?}, which is anchored (status.clusters[].anchored). If Nodes own \
                 this network, set anchoredNetworks of the cluster's entry to a list without it; an empty list lets Nodes claim all of \
                 allowedNetworks"
            ),
        }
    }

    fn allowed_networks_text(&self) -> String {
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
            Claim::Valid(net) if self.is_claimable(host_route(net.addr())) => Ok(net.addr()),
            Claim::Valid(net) => Err((
                Reason::WGIPOutOfRange,
                self.refusal_message(&format!("WireGuard address {}", net.addr()), host_route(net.addr())),
            )),
        }
    }

    /// The podCIDRs that the Node may claim. Others are left out and added to `uncovered`. The Node is refused if none is left or
    /// one is malformed. If the member is masqueraded or its pod network shared, the result is empty.
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
                Claim::Valid(net) if self.is_claimable(net.trunc()) => {
                    claims.insert(net.trunc());
                }
                Claim::Valid(net) => outside.push(*net),
            }
        }
        if let (true, Some(net)) = (
            claims.is_empty(),
            outside.iter().find(|net| self.allows_family_of(**net)),
        ) {
            return Err((
                Reason::NodePodCIDROutOfRange,
                self.refusal_message(&format!("podCIDR {net}"), net.trunc()),
            ));
        }
        uncovered.extend(outside.into_iter().map(|network| Uncovered {
            node: name.to_owned(),
            network,
        }));
        if claims.is_empty() {
            let message = "spec.podCIDRs has no network of an IP family in allowedNetworks; does the cluster allocate node CIDRs? \
                           If its pod network is shared, set podNetwork: Shared";
            return Err((Reason::NodeNoPodCIDR, message.into()));
        }
        Ok(claims)
    }

    /// Whether allowedNetworks has a network of the IP family of `net`.
    fn allows_family_of(&self, net: IpNet) -> bool {
        self.cluster
            .allowed
            .iter()
            .any(|allowed| allowed.addr().is_ipv4() == net.addr().is_ipv4())
    }

    fn internal_ips(&self, observed: &Node) -> BTreeSet<IpNet> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded {
            return BTreeSet::new();
        }
        let hosts = observed
            .internal_ips
            .iter()
            .map(|address| host_route(address.to_canonical()));
        hosts.filter(|net| self.is_claimable(*net)).collect()
    }

    /// Nodes whose tunnel kg owns and which have an InternalIP that no Peer may contain. kg sends packets of the host network from the
    /// InternalIP, so other members drop them; wg-agent sends them from the WireGuard address. At most five, because a condition has no
    /// room for all.
    fn nodes_with_uncovered_ips(&self, registry: &NodeRegistry<'a>) -> Vec<String> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded {
            return Vec::new();
        }
        let registered: BTreeSet<&str> = registry.registered.iter().map(|node| node.node).collect();
        let is_in_a_peer = |name: &str| {
            registered.contains(name)
                || registry.held.contains_key(name)
                || registry.segments.all_followers.contains(name)
        };
        let has_uncovered_ip = |node: &Node| {
            let mut hosts = node
                .internal_ips
                .iter()
                .map(|address| host_route(address.to_canonical()));
            hosts.any(|net| self.allows_family_of(net) && !self.is_claimable(net))
        };
        let nodes = self.member.nodes.iter().filter(|(name, _)| is_in_a_peer(name));
        let nodes = nodes.filter(|(_, node)| node.server != Server::Agent && has_uncovered_ip(node));
        nodes.map(|(name, _)| name.to_owned()).take(5).collect()
    }

    /// Whether `net`, the address of an exported pod, may be published. If the entry sets `anchoredNetworks`, this is [`is_claimable`].
    /// Otherwise `net` may also lie inside an anchored network, because the planner anchors the whole shared pod network by
    /// default.
    fn is_exportable(&self, net: IpNet) -> bool {
        self.cluster.allows(net) && (self.cluster.anchored.is_none() || self.is_claimable(net))
    }

    fn exported_addresses(&self, node: &str) -> impl Iterator<Item = IpNet> + '_ {
        let node = node.to_owned();
        let has_exports = self.cluster.pod_network == PodNetwork::Shared && !self.cluster.exports.is_empty();
        self.member
            .pods
            .iter()
            .filter(move |(name, pod)| {
                has_exports
                    && pod.node == node
                    && self
                        .cluster
                        .exports
                        .iter()
                        .any(|e| e.selects(&name.namespace, &pod.labels))
            })
            .flat_map(|(_, pod)| pod.addresses.iter().map(|address| host_route(*address)))
            .filter(|net| self.is_exportable(*net))
    }
}
