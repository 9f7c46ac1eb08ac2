//! The Peers of one target: endpoints, names, anchors, and one owner for each key and prefix (rules 2, 6, 8).

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
};

use ipnet::IpNet;

use super::{
    Fact, PlannedPeer, Reason, Skipped, anchor, endpoint,
    link::Terms,
    nodes::{Registered, Roll},
    target::{Assembled, Assembly, Party},
};
use crate::{
    key::PublicKey,
    mesh::Addressing,
    observe::{Claim, Endpoint, Member, Observation, ObservedPeer, PeerSpec, Server},
    ownership::{self, Ownership},
};

/// Seconds between keepalives where a NAT stands between two nodes: below the 30 s after which many forget a UDP flow.
const NAT_KEEPALIVE: NonZeroU16 = NonZeroU16::new(25).unwrap();

/// Collects the Peers of one target, so that a key and a prefix have one owner.
pub(super) struct Writer<'a, 'p> {
    assembly: &'p Assembly<'a>,
    name: &'p str,
    target: &'p Party<'a>,
    standing: BTreeMap<&'p str, &'p ObservedPeer>,
    /// Names of the standing Peers that carry a key.
    by_key: BTreeMap<PublicKey, Vec<&'p str>>,
    keys: BTreeMap<PublicKey, String>,
    prefixes: BTreeMap<IpNet, String>,
    peers: BTreeMap<String, PlannedPeer>,
    skipped: BTreeMap<String, Vec<Skipped>>,
    facts: BTreeSet<Fact>,
    runs_kg: bool,
}

impl<'a, 'p> Writer<'a, 'p> {
    pub(super) fn new(assembly: &'p Assembly<'a>, name: &'p str, target: &'p Party<'a>) -> Self {
        let member = target.member();
        let standing: BTreeMap<&str, &ObservedPeer> = member
            .and_then(|m| m.peers.as_ref())
            .into_iter()
            .flatten()
            .map(|(name, peer)| (&**name, peer))
            .collect();
        let mut keys = BTreeMap::new();
        let mut prefixes = BTreeMap::new();
        let mut by_key: BTreeMap<PublicKey, Vec<&str>> = BTreeMap::new();
        for (peer, observed) in &standing {
            let Ok(spec) = &observed.spec else { continue };
            by_key.entry(spec.public_key).or_default().push(peer);
            // A Peer of someone else's (a person's laptop) keeps its key and its addresses; so does one of ours whose member
            // is not seen now, or whoever copies its key could take its place meanwhile.
            let kept = match ownership::of(&observed.owner, &assembly.seen.hub, assembly.claimants) {
                Ownership::Foreign => true,
                Ownership::Mesh(mesh) => mesh == assembly.mesh && assembly.unseen(name, target, observed),
                Ownership::Orphan => false,
            };
            if kept {
                keys.insert(spec.public_key, format!("Peer {peer}"));
                prefixes.extend(spec.allowed_ips.iter().map(|net| (*net, format!("Peer {peer}"))));
            }
        }
        // kg loses a node of its own cluster for good when a Peer carries that node's key (KILO.md §8).
        for (node, view) in member.into_iter().flat_map(|m| &m.nodes) {
            if let Some(key) = view.public_key.value() {
                keys.insert(*key, format!("Node {node}"));
            }
        }
        Self {
            assembly,
            name,
            target,
            standing,
            by_key,
            keys,
            prefixes,
            peers: BTreeMap::new(),
            skipped: BTreeMap::new(),
            facts: BTreeSet::new(),
            runs_kg: member.is_some_and(runs_kg),
        }
    }

    fn ours_of(&self, source: &str, peer: &ObservedPeer) -> bool {
        peer.owner.source_cluster.as_deref() == Some(source) && self.assembly.ours(&peer.owner)
    }

    fn skip(&mut self, source: &str, node: &str, reason: Reason, message: &str) {
        let message = format!("toward cluster {:?}: {message}", self.name);
        self.skipped.entry(source.to_owned()).or_default().push(Skipped {
            node: node.to_owned(),
            reason,
            message,
        });
    }

    pub(super) fn add_source(&mut self, source: &str, party: &Party<'a>, terms: &Terms<'_>) {
        if let Some(roll) = self.assembly.rolls.get(source) {
            self.add_roll(source, party, roll, terms);
        }
        if let Terms::Sandbox { requires, networks } = terms
            && party.observed.and_then(Observation::fresh).is_none()
        {
            self.restate(source, requires, networks);
        }
    }

    fn add_roll(&mut self, source: &str, party: &Party<'a>, roll: &Roll<'a>, terms: &Terms<'_>) {
        let own_names: BTreeSet<String> = roll
            .registered
            .iter()
            .map(|r| self.assembly.naming.peer(self.assembly.mesh, source, r.node, false))
            .collect();
        let keepalive = self.keepalive(party);
        let mut added: BTreeMap<&str, String> = BTreeMap::new();
        for node in &roll.registered {
            let Some(prefixes) = terms.prefixes(node) else { continue };
            let candidates = match terms {
                // It dials; where it says it is has no part in what this side sends.
                Terms::Sandbox { .. } => Ok(endpoint::Candidates::default()),
                Terms::Meshed | Terms::Grantor { .. } => self.candidates(source, party, node),
            };
            if let Some(peer) = self.add_node(source, node, prefixes, candidates, &own_names) {
                let spec = self.peers.get_mut(&peer).map(|peer| &mut peer.spec);
                match (terms, spec) {
                    (Terms::Sandbox { requires, .. }, Some(spec)) => {
                        spec.requires_policy = Some((*requires).to_owned())
                    }
                    (_, Some(spec)) if spec.endpoint.is_none() => {
                        spec.persistent_keepalive = keepalive.max(NAT_KEEPALIVE.get());
                    }
                    (_, Some(spec)) => spec.persistent_keepalive = keepalive,
                    (_, None) => {}
                }
                added.insert(node.node, peer);
            }
        }
        for node in roll.held.keys() {
            self.hold(source, party, node, terms);
        }
        if matches!(terms, Terms::Meshed) {
            self.add_anchors(source, party, roll, &added);
        }
    }

    /// Where this target's nodes find a node, best first.
    fn candidates(
        &mut self,
        source: &str,
        party: &Party<'a>,
        node: &Registered<'a>,
    ) -> Result<endpoint::Candidates, (Reason, String)> {
        let toward = endpoint::Toward {
            source: &party.cluster,
            target_networks: &self.target.cluster.allowed,
            discovered: &self.target.discovered,
            resolved: &self.assembly.seen.resolved,
        };
        let mut candidates = endpoint::choose(node.view, &toward)?;
        let addresses = &mut candidates.addresses;
        if !candidates.unresolved.is_empty()
            && let Some(standing) = self.standing_of(source, &node.key)
            && let Some(Endpoint::Ip(endpoint)) = standing.endpoint
            && toward.admits(endpoint.ip())
        {
            // A resolver that is away must not move a node: where it was last is the best that is known.
            addresses.retain(|address| *address != endpoint);
            addresses.insert(0, endpoint);
        }
        let unresolved = std::mem::take(&mut candidates.unresolved);
        self.facts
            .extend(unresolved.into_iter().map(|host| Fact::EndpointUnresolved {
                cluster: source.to_owned(),
                node: node.node.to_owned(),
                host,
            }));
        Ok(candidates)
    }

    fn add_node(
        &mut self,
        source: &str,
        node: &Registered<'a>,
        prefixes: BTreeSet<IpNet>,
        candidates: Result<endpoint::Candidates, (Reason, String)>,
        own_names: &BTreeSet<String>,
    ) -> Option<String> {
        if let Some(owner) = self.keys.get(&node.key) {
            let message = format!("key {} is that of {owner} there", node.key);
            self.skip(source, node.node, Reason::PublicKeyDuplicate, &message);
            return None;
        }
        let addresses = match candidates {
            Ok(candidates) => candidates.addresses,
            Err((reason, message)) => {
                self.skip(source, node.node, reason, &message);
                return None;
            }
        };
        let first = addresses.first().copied();
        let mut allowed_ips = BTreeSet::new();
        for prefix in &prefixes {
            // kg sends a Peer's own outer packets into the tunnel when its endpoint is among its allowed IPs.
            if self.runs_kg && first.is_some_and(|endpoint| IpNet::from(endpoint.ip()) == *prefix) {
                continue;
            }
            match self.prefixes.get(prefix) {
                None => {
                    allowed_ips.insert(*prefix);
                }
                Some(owner) => {
                    let message = format!(
                        "{prefix} of Node {} stays with {owner} in cluster {:?}",
                        node.node, self.name
                    );
                    self.facts.insert(Fact::AddressShared {
                        cluster: source.to_owned(),
                        message,
                    });
                }
            }
        }
        let spec = PeerSpec {
            public_key: node.key,
            allowed_ips,
            endpoint: first.map(Endpoint::Ip),
            candidates: if addresses.len() > 1 { addresses } else { Vec::new() },
            persistent_keepalive: 0,
            requires_policy: None,
        };
        Some(self.put(source, node.node, spec, own_names))
    }

    /// What a standing Peer of ours says of this key.
    fn standing_of(&self, source: &str, key: &PublicKey) -> Option<&'p PeerSpec> {
        let names = self.by_key.get(key).into_iter().flatten();
        let ours = names
            .filter_map(|name| self.standing.get(name))
            .find(|peer| self.ours_of(source, peer))?;
        ours.spec.as_ref().ok()
    }

    /// Names and keeps a Peer. A standing Peer of ours with this key keeps its name, whatever the rule would call it now: to
    /// create one and delete the other would take the key away from kg for minutes (PREDECESSOR.md W7).
    fn put(&mut self, source: &str, node: &str, spec: PeerSpec, own_names: &BTreeSet<String>) -> String {
        let naming = self.assembly.naming;
        let readable = naming.peer(self.assembly.mesh, source, node, false);
        let kept = self.by_key.get(&spec.public_key).into_iter().flatten().find(|name| {
            let free = ***name == *readable || !own_names.contains(**name);
            free && self.standing.get(*name).is_some_and(|peer| self.ours_of(source, peer))
        });
        let kept = kept.map(|name| (*name).to_owned());
        let name = kept.unwrap_or_else(|| {
            let foreign = self
                .standing
                .get(&*readable)
                .is_some_and(|peer| !self.assembly.ours(&peer.owner));
            let used = self.assembly.used(self.target).peers.contains(&readable);
            if foreign || used || self.peers.contains_key(&readable) {
                naming.peer(self.assembly.mesh, source, node, true)
            } else {
                readable
            }
        });
        self.keys.insert(spec.public_key, format!("Peer {name}"));
        self.prefixes
            .extend(spec.allowed_ips.iter().map(|net| (*net, format!("Peer {name}"))));
        self.peers.insert(
            name.clone(),
            PlannedPeer {
                source: source.to_owned(),
                node: node.to_owned(),
                spec,
            },
        );
        name
    }

    /// A held node keeps the Peer it has, as far as nobody else owns its key and prefixes now.
    fn hold(&mut self, source: &str, party: &Party<'a>, node: &str, terms: &Terms<'_>) {
        let names = [false, true].map(|taken| self.assembly.naming.peer(self.assembly.mesh, source, node, taken));
        let standing = names.iter().find_map(|name| {
            let peer = self.standing.get(&**name).filter(|peer| self.ours_of(source, peer))?;
            Some((name.clone(), peer.spec.as_ref().ok()?.clone()))
        });
        let Some((name, mut spec)) = standing else { return };
        if self.keys.contains_key(&spec.public_key) || self.peers.contains_key(&name) {
            return;
        }
        spec.allowed_ips
            .retain(|net| party.cluster.allows(*net) && !self.prefixes.contains_key(net));
        match terms {
            Terms::Meshed => spec.requires_policy = None,
            Terms::Sandbox { requires, networks } => {
                // What it was before it became a sandbox is not held.
                if spec.requires_policy.is_none() {
                    return;
                }
                confine(&mut spec, requires, networks);
            }
            Terms::Grantor { hosts } => {
                let view = self
                    .assembly
                    .rolls
                    .get(source)
                    .and_then(|_| party.member()?.nodes.get(node));
                let Some(endpoints) = hosts.get(node) else { return };
                let wireguard = view
                    .and_then(|view| view.wireguard_ip.value())
                    .map(|claim| claim.addr());
                spec.allowed_ips.retain(|net| {
                    let host = net.prefix_len() == net.max_prefix_len();
                    host && (endpoints.contains(&net.addr()) || wireguard == Some(net.addr()))
                });
                spec.requires_policy = None;
            }
        }
        self.keys.insert(spec.public_key, format!("Peer {name}"));
        self.prefixes
            .extend(spec.allowed_ips.iter().map(|net| (*net, format!("Peer {name}"))));
        self.peers.insert(
            name,
            PlannedPeer {
                source: source.to_owned(),
                node: node.to_owned(),
                spec,
            },
        );
    }

    /// Peers of a sandbox that is not seen now: what its policy says may change meanwhile, and they name its revision.
    fn restate(&mut self, source: &str, requires: &str, networks: &BTreeSet<IpNet>) {
        let standing: Vec<(&str, PeerSpec)> = self
            .standing
            .iter()
            .filter(|(name, peer)| !self.peers.contains_key(**name) && self.ours_of(source, peer))
            .filter_map(|(name, peer)| Some((*name, peer.spec.as_ref().ok()?.clone())))
            .collect();
        for (name, mut spec) in standing {
            let own = format!("Peer {name}");
            if self.keys.get(&spec.public_key).is_some_and(|owner| *owner != own) {
                continue;
            }
            confine(&mut spec, requires, networks);
            spec.allowed_ips
                .retain(|net| self.prefixes.get(net).is_none_or(|owner| *owner == own));
            self.keys.insert(spec.public_key, own.clone());
            self.prefixes
                .extend(spec.allowed_ips.iter().map(|net| (*net, own.clone())));
            self.peers.insert(
                name.to_owned(),
                PlannedPeer {
                    source: source.to_owned(),
                    node: name.to_owned(),
                    spec,
                },
            );
        }
    }

    fn add_anchors(&mut self, source: &str, party: &Party<'a>, roll: &Roll<'a>, added: &BTreeMap<&str, String>) {
        if party.cluster.effective_addressing() == Addressing::Masqueraded {
            return;
        }
        let eligible: BTreeSet<&str> = roll
            .registered
            .iter()
            .filter(|node| node.view.ready && !node.view.deleting)
            .filter(|node| {
                let peer = added.get(node.node).and_then(|name| self.peers.get(name));
                peer.is_some_and(|peer| peer.spec.endpoint.is_some())
            })
            .map(|node| node.node)
            .collect();
        let mut now: BTreeMap<IpNet, String> = BTreeMap::new();
        for (node, peer) in added {
            if let Some(ObservedPeer { spec: Ok(spec), .. }) = self.standing.get(&**peer) {
                now.extend(spec.allowed_ips.iter().map(|net| (*net, (*node).to_owned())));
            }
        }
        let networks = anchor::anchored(&party.cluster, &roll.registered);
        if eligible.is_empty() {
            if !networks.is_empty() && !roll.registered.is_empty() {
                let message =
                    "no node is Ready, has an endpoint and is not being deleted; the anchored networks are unreachable";
                self.facts.insert(Fact::NoAnchor {
                    cluster: source.to_owned(),
                    message: message.into(),
                });
            }
            return;
        }
        for (part, node) in anchor::assign(&party.cluster, &roll.registered, &eligible, &now) {
            let Some(peer) = added.get(node.as_str()).and_then(|name| self.peers.get_mut(name)) else {
                continue;
            };
            match self.prefixes.get(&part) {
                None => {
                    peer.spec.allowed_ips.insert(part);
                    self.prefixes.insert(part, format!("Node {node}"));
                }
                Some(owner) => {
                    let message = format!("anchored network {part} stays with {owner} in cluster {:?}", self.name);
                    self.facts.insert(Fact::AddressShared {
                        cluster: source.to_owned(),
                        message,
                    });
                }
            }
        }
    }

    /// The mesh's floor (the predecessor's meaning: the highest of all entries), raised where this target's nodes sit
    /// behind NAT: they must keep their binding open.
    fn keepalive(&self, source: &Party<'a>) -> u16 {
        let floor = self
            .assembly
            .parties
            .values()
            .map(|party| party.cluster.persistent_keepalive)
            .max()
            .unwrap_or(0);
        let toward = endpoint::Toward {
            source: &self.target.cluster,
            target_networks: &source.cluster.allowed,
            discovered: &source.discovered,
            resolved: &self.assembly.seen.resolved,
        };
        let behind_nat = self.target.member().is_some_and(|member| {
            member.nodes.values().any(|node| {
                node.persistent_keepalive > 0
                    || endpoint::choose(node, &toward).is_ok_and(|candidates| candidates.addresses.is_empty())
            })
        });
        if behind_nat {
            floor.max(NAT_KEEPALIVE.get())
        } else {
            floor
        }
    }

    pub(super) fn finish(self, assembled: &mut Assembled) {
        assembled.plan.peers = self.peers;
        assembled.skipped = self.skipped;
        assembled.facts.extend(self.facts);
        if let Some(member) = self.target.member()
            && member.peers.is_none()
        {
            assembled.facts.insert(Fact::PeerCRDMissing {
                cluster: self.name.to_owned(),
            });
        }
    }
}

/// Makes a standing Peer one of a sandbox.
fn confine(spec: &mut PeerSpec, requires: &str, networks: &BTreeSet<IpNet>) {
    spec.allowed_ips.retain(|host| {
        host.prefix_len() == host.max_prefix_len() && networks.iter().any(|network| network.contains(host))
    });
    spec.endpoint = None;
    spec.candidates = Vec::new();
    spec.persistent_keepalive = 0;
    spec.requires_policy = Some(requires.to_owned());
}

/// Whether kg turns this member's Peers into routes. A Node that has just joined and published nothing is neither's, so it
/// decides nothing where others have spoken; where none has, the cautious answer stands.
fn runs_kg(member: &Member) -> bool {
    let kilo = member
        .nodes
        .values()
        .any(|node| node.server != Server::Agent && node.public_key != Claim::Absent);
    kilo || !member.nodes.values().any(|node| node.server == Server::Agent)
}
