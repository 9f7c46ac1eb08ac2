//! Which Nodes of a member get a Peer, with which prefixes, and why the others do not (rules 1 to 5, 9).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    Fact, HOLD, Reason, Skipped, endpoint,
    location::{self, Segments},
};
use crate::{
    key::PublicKey,
    mesh::{Addressing, Cluster, PodNetwork},
    observe::{Claim, Member, Node, Server},
};

/// A Node that gets a Peer in every connected member.
#[derive(Debug, Clone)]
pub(super) struct Registered<'a> {
    pub(super) node: &'a str,
    pub(super) view: &'a Node,
    pub(super) key: PublicKey,
    /// What its Peers carry, anchored networks not among it. Inside allowedNetworks, always.
    pub(super) prefixes: BTreeSet<IpNet>,
    /// Its WireGuard address.
    pub(super) wireguard: IpNet,
    /// Those of them that are the node's own: no exported pods, no location IPs.
    pub(super) own: BTreeSet<IpNet>,
}

/// What became of a member's Nodes.
#[derive(Debug, Default)]
pub(super) struct Roll<'a> {
    /// In order of age.
    pub(super) registered: Vec<Registered<'a>>,
    pub(super) skipped: Vec<Skipped>,
    /// Nodes whose last Peers stand a while longer.
    pub(super) held: BTreeMap<&'a str, Reason>,
    pub(super) facts: BTreeSet<Fact>,
}

/// One member as the planner uses it: the entry, with `allowed` cut down to what was accepted.
pub(super) struct Source<'a, 'f> {
    pub(super) cluster: &'f Cluster,
    pub(super) member: &'a Member,
    /// Whether some member holds a Peer of ours for this node.
    pub(super) has_peer: &'f dyn Fn(&str) -> bool,
}

type Refusal = (Reason, String);

/// A host route.
pub(super) fn host(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

impl<'a> Source<'a, '_> {
    /// Goes through the Nodes in order of (creationTimestamp, name), so that the first claim of an address wins whatever
    /// order they were listed in.
    pub(super) fn roll(&self) -> Roll<'a> {
        let mut roll = Roll::default();
        let segments = location::segments(self.member);
        let mut nodes: Vec<(&'a str, &'a Node)> =
            self.member.nodes.iter().map(|(name, node)| (&**name, node)).collect();
        nodes.sort_by_key(|(name, node)| (node.created, *name));

        let mut taken = Taken::default();
        for (position, (name, node)) in nodes.into_iter().enumerate() {
            if segments.led.contains(name) {
                continue;
            }
            let outcome = if position >= self.cluster.max_nodes {
                Err((
                    Reason::TooManyNodes,
                    format!(
                        "more than {} Nodes; the oldest are served, raise maxNodes if they are real",
                        self.cluster.max_nodes
                    ),
                ))
            } else {
                self.read(name, node, &segments, &mut roll)
                    .and_then(|found| taken.take(found))
            };
            match outcome {
                Ok(found) => roll.registered.push(found),
                Err((reason, _)) if self.holds(name, node, reason) => {
                    roll.held.insert(name, reason);
                }
                Err((reason, message)) => roll.skipped.push(Skipped {
                    node: name.to_owned(),
                    reason,
                    message,
                }),
            }
        }
        roll.facts
            .extend(taken.shared.into_iter().map(|message| Fact::AddressShared {
                cluster: self.cluster.name.clone(),
                message,
            }));
        roll.skipped.sort();
        roll
    }

    /// kg removes its annotations at each restart and publishes a renumbering late: what was true before stands a while.
    fn holds(&self, name: &str, node: &Node, reason: Reason) -> bool {
        let passing = match reason {
            Reason::NodeNoPublicKey | Reason::NodeNoWireguardIP => true,
            Reason::WGIPDuplicate => node.server == Server::Kilo,
            _ => false,
        };
        passing && node.held_for.is_none_or(|age| age < HOLD) && (self.has_peer)(name)
    }

    /// Reads one Node's own claims, and those of the nodes it leads.
    fn read(
        &self,
        name: &'a str,
        view: &'a Node,
        segments: &Segments<'a>,
        roll: &mut Roll<'a>,
    ) -> Result<Found<'a>, Refusal> {
        endpoint::check(view)?;
        let key = match &view.public_key {
            Claim::Is(key) => *key,
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
        let wireguard_ip = self.wireguard_ip(view)?;
        let mut pods = self.pod_cidrs(view)?;
        let mut internal = self.internal_ips(name, view, roll);
        for &follower in segments.followers.get(name).into_iter().flatten() {
            let Some(led) = self.member.nodes.get(follower) else {
                continue;
            };
            match self.pod_cidrs(led) {
                Ok(cidrs) => {
                    pods.extend(cidrs);
                    internal.extend(self.internal_ips(follower, led, roll));
                }
                Err((reason, message)) => roll.skipped.push(Skipped {
                    node: follower.to_owned(),
                    reason,
                    message,
                }),
            }
        }
        let mut extra: BTreeSet<IpNet> = BTreeSet::new();
        if self.cluster.effective_addressing() == Addressing::Routed {
            extra.extend(
                view.allowed_location_ips
                    .iter()
                    .map(IpNet::trunc)
                    .filter(|net| self.routable(*net)),
            );
            extra.extend(self.exported(name));
        }
        Ok(Found {
            node: name,
            view,
            key,
            wireguard_ip,
            pods,
            internal,
            extra,
        })
    }

    /// Inside what the member may claim, and no part of what only an anchor carries.
    fn routable(&self, net: IpNet) -> bool {
        let anchored = self.cluster.anchored.as_deref().unwrap_or_default();
        self.cluster.allows(net) && !anchored.iter().any(|a| a.contains(&net) || net.contains(a))
    }

    fn bounds(&self) -> String {
        let list: Vec<String> = self.cluster.allowed.iter().map(ToString::to_string).collect();
        format!(
            "allowedNetworks of cluster {:?} ({})",
            self.cluster.name,
            list.join(", ")
        )
    }

    fn wireguard_ip(&self, view: &Node) -> Result<IpAddr, Refusal> {
        match &view.wireguard_ip {
            Claim::Absent => Err((
                Reason::NodeNoWireguardIP,
                "no annotation kilo.squat.ai/wireguard-ip; is wg-agent running there, with --wireguard-cidr?".into(),
            )),
            Claim::Invalid(why) => Err((
                Reason::WGIPInvalid,
                format!("annotation kilo.squat.ai/wireguard-ip: {why}"),
            )),
            Claim::Is(net) if self.routable(host(net.addr())) => Ok(net.addr()),
            Claim::Is(net) => Err((
                Reason::WGIPOutOfRange,
                format!(
                    "WireGuard address {} lies outside {}, or inside anchoredNetworks",
                    net.addr(),
                    self.bounds()
                ),
            )),
        }
    }

    fn pod_cidrs(&self, view: &Node) -> Result<BTreeSet<IpNet>, Refusal> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded
            || self.cluster.pod_network == PodNetwork::Shared
        {
            return Ok(BTreeSet::new());
        }
        let mut found = BTreeSet::new();
        for claim in &view.pod_cidrs {
            match claim {
                Claim::Absent => {}
                Claim::Invalid(why) => return Err((Reason::NodeNoPodCIDR, format!("spec.podCIDRs: {why}"))),
                // A dual-stack cluster may mesh one family only: then nothing of the other is claimed, or missing.
                Claim::Is(net) if !self.meshes_family_of(*net) => {}
                Claim::Is(net) if self.routable(net.trunc()) => {
                    found.insert(net.trunc());
                }
                Claim::Is(net) => {
                    return Err((
                        Reason::NodePodCIDROutOfRange,
                        format!(
                            "podCIDR {net} lies outside {}, or inside anchoredNetworks",
                            self.bounds()
                        ),
                    ));
                }
            }
        }
        if found.is_empty() {
            let message = "spec.podCIDRs holds no network of a family in allowedNetworks; does the cluster allocate node CIDRs? \
                           If its pod network is shared, set podNetwork: Shared";
            return Err((Reason::NodeNoPodCIDR, message.into()));
        }
        Ok(found)
    }

    fn meshes_family_of(&self, net: IpNet) -> bool {
        self.cluster
            .allowed
            .iter()
            .any(|allowed| allowed.addr().is_ipv4() == net.addr().is_ipv4())
    }

    fn internal_ips(&self, name: &str, view: &Node, roll: &mut Roll<'a>) -> BTreeSet<IpNet> {
        if self.cluster.effective_addressing() == Addressing::Masqueraded {
            return BTreeSet::new();
        }
        let (covered, bare): (BTreeSet<IpNet>, BTreeSet<IpNet>) = view
            .internal_ips
            .iter()
            .map(|address| host(address.to_canonical()))
            .partition(|net| self.routable(*net));
        // An agent gives its host traffic the WireGuard address; kg sends it with the private one.
        if view.server != Server::Agent && bare.iter().any(|net| self.meshes_family_of(*net)) {
            roll.note_uncovered(&self.cluster.name, name);
        }
        covered
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
            .filter(|net| self.routable(*net))
    }
}

impl Roll<'_> {
    /// One fact for the member, with the first few nodes: a fleet must not fill a condition.
    fn note_uncovered(&mut self, cluster: &str, node: &str) {
        let known = self
            .facts
            .iter()
            .find(|fact| matches!(fact, Fact::InternalIPNotCovered { .. }))
            .cloned();
        let mut nodes = match known {
            Some(Fact::InternalIPNotCovered { ref nodes, .. }) => nodes.clone(),
            _ => Vec::new(),
        };
        if let Some(known) = known {
            self.facts.remove(&known);
        }
        if nodes.len() < 5 {
            nodes.push(node.to_owned());
            nodes.sort();
        }
        self.facts.insert(Fact::InternalIPNotCovered {
            cluster: cluster.to_owned(),
            nodes,
        });
    }
}

/// A Node whose own claims hold, before they are held against the others'.
struct Found<'a> {
    node: &'a str,
    view: &'a Node,
    key: PublicKey,
    wireguard_ip: IpAddr,
    pods: BTreeSet<IpNet>,
    internal: BTreeSet<IpNet>,
    /// Location IPs and exported pods: no part of the node's identity.
    extra: BTreeSet<IpNet>,
}

/// First come, first served, inside one member.
#[derive(Default)]
struct Taken<'a> {
    keys: BTreeMap<PublicKey, &'a str>,
    prefixes: BTreeMap<IpNet, &'a str>,
    shared: BTreeSet<String>,
}

impl<'a> Taken<'a> {
    fn take(&mut self, found: Found<'a>) -> Result<Registered<'a>, Refusal> {
        let name = found.node;
        if let Some(owner) = self.keys.get(&found.key) {
            return Err((
                Reason::PublicKeyDuplicate,
                format!("key {} is that of Node {owner}; one of the two is a copy", found.key),
            ));
        }
        let wireguard = host(found.wireguard_ip);
        if let Some(owner) = self.prefixes.get(&wireguard) {
            return Err((
                Reason::WGIPDuplicate,
                format!("WireGuard address {} is that of Node {owner}", found.wireguard_ip),
            ));
        }
        if let Some((net, owner)) = found
            .pods
            .iter()
            .find_map(|net| self.prefixes.get(net).map(|owner| (net, owner)))
        {
            return Err((
                Reason::PodCIDRDuplicate,
                format!("podCIDR {net} is that of Node {owner}"),
            ));
        }
        let mut own = found.pods;
        own.insert(wireguard);
        own.extend(found.internal.iter().filter(|net| !self.prefixes.contains_key(*net)));
        let mut prefixes = own.clone();
        for net in found
            .internal
            .into_iter()
            .chain(found.extra)
            .filter(|net| !own.contains(net))
        {
            match self.prefixes.get(&net) {
                Some(owner) => {
                    self.shared.insert(format!(
                        "{net} of Node {name} is also that of Node {owner}, which keeps it"
                    ));
                }
                None => {
                    prefixes.insert(net);
                }
            }
        }
        self.keys.insert(found.key, name);
        self.prefixes.extend(prefixes.iter().map(|net| (*net, name)));
        Ok(Registered {
            node: name,
            view: found.view,
            key: found.key,
            prefixes,
            wireguard,
            own,
        })
    }
}
