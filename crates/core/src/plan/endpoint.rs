//! Chooses the endpoint candidates of a node or gateway for the nodes of one target (design rule 8).

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use ipnet::IpNet;

use super::{Reason, discovered::Discovered, peers::own_pods::OwnPods, target::MeshMember};
use crate::{
    mesh::Cluster,
    observe::{Claim, Endpoint, Families, Member, Node, PeerSpec},
};

/// The largest number of endpoints that an agent tries for one peer.
const MAX_CANDIDATES: usize = 8;

/// Why an address can never be an endpoint; `None` = it can be one.
pub(super) fn unusable_reason(address: IpAddr) -> Option<&'static str> {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if address.is_unspecified() {
        Some("the unspecified address")
    } else if address.is_loopback() {
        Some("a loopback address")
    } else if link_local {
        Some("a link-local address")
    } else if address.is_multicast() {
        Some("a multicast address")
    } else if address == IpAddr::V4(Ipv4Addr::BROADCAST) {
        Some("the broadcast address")
    } else {
        None
    }
}

/// Whether an address is usually not reachable from another site: private addresses, and shared address space (RFC 6598), which Kilo
/// treats as public. [`choose`] ignores Kilo's endpoint if it has such an address.
pub(super) fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_private() || (v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64),
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

/// The IP families of a member's nodes, derived from their addresses and endpoints. Nodes without any address are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeFamilies {
    /// Families that every node has.
    every: Families,
    /// Families that at least one node has.
    some: Families,
}

impl NodeFamilies {
    pub(super) fn of(member: Option<&Member>) -> Self {
        let nodes = member.into_iter().flat_map(|member| member.nodes.values());
        let (mut every, mut some) = (Families::BOTH, Families::default());
        for families in nodes.filter_map(node_families) {
            every = Families {
                v4: every.v4 && families.v4,
                v6: every.v6 && families.v6,
            };
            some = Families {
                v4: some.v4 || families.v4,
                v6: some.v6 || families.v6,
            };
        }
        Self { every, some }
    }

    /// A sort key: 0 = every node has the family of `address`, 1 = some nodes have it, 2 = none.
    fn rank(self, address: IpAddr) -> u8 {
        let has = |families: Families| if address.is_ipv4() { families.v4 } else { families.v6 };
        match (has(self.every), has(self.some)) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        }
    }
}

/// The IP families of a node's addresses and endpoints. Host names are ignored; `None` = the node has no IP address at all.
fn node_families(node: &Node) -> Option<Families> {
    let endpoints = explicit_annotations(node).map(|(_, claim)| claim);
    let endpoints = endpoints.into_iter().chain([&node.kilo_endpoint]);
    let endpoints = endpoints.filter_map(|claim| match claim.value()? {
        Endpoint::Ip(address) => Some(address.ip()),
        Endpoint::Dns(..) => None,
    });
    let addresses = node.internal_ips.iter().chain(&node.external_ips).copied();
    let mut known = None;
    for address in addresses.chain(endpoints) {
        let families: &mut Families = known.get_or_insert_default();
        match address.to_canonical() {
            IpAddr::V4(_) => families.v4 = true,
            IpAddr::V6(_) => families.v6 = true,
        }
    }
    known
}

/// Whether the Node publishes an address or an endpoint, also a malformed endpoint. A new Node of a cloud provider publishes none for
/// some time. That does not show that the Node is behind NAT.
pub(super) fn has_any_address(node: &Node) -> bool {
    let has_explicit = explicit_annotations(node)
        .into_iter()
        .any(|(_, claim)| *claim != Claim::Absent);
    has_explicit
        || node.kilo_endpoint != Claim::Absent
        || !node.internal_ips.is_empty()
        || !node.external_ips.is_empty()
}

/// The endpoint annotations that a person sets, by priority.
fn explicit_annotations(node: &Node) -> [(&'static str, &Claim<Endpoint>); 2] {
    [
        ("clustermesh-endpoint", &node.clustermesh_endpoint),
        ("force-endpoint", &node.force_endpoint),
    ]
}

/// Refuses a Node if its explicit endpoint annotation with the highest priority is malformed, or has an address that no
/// target can use.
pub(super) fn check_explicit(node: &Node) -> Result<(), (Reason, String)> {
    for (name, claim) in explicit_annotations(node) {
        match claim {
            Claim::Absent => {}
            Claim::Invalid(why) => {
                return Err((
                    Reason::NodeEndpointInvalid,
                    format!("annotation {name}: {why}; write host:port"),
                ));
            }
            Claim::Valid(Endpoint::Ip(address)) => {
                return match unusable_reason(address.ip().to_canonical()) {
                    None => Ok(()),
                    Some(what) => Err((
                        Reason::EndpointForbidden,
                        format!("annotation {name} is {address}, {what}; name an address that the other members reach"),
                    )),
                };
            }
            Claim::Valid(Endpoint::Dns(..)) => return Ok(()),
        }
    }
    Ok(())
}

/// The addresses that a Node publishes without an explicit annotation, each with the name of its field. [`choose`] leaves out those that
/// can never be an endpoint.
pub(super) fn implicit_addresses(node: &Node) -> impl Iterator<Item = (&'static str, IpAddr)> {
    let kilo_endpoint = match &node.kilo_endpoint {
        Claim::Valid(Endpoint::Ip(address)) => Some(("annotation endpoint", address.ip())),
        _ => None,
    };
    let internal = node.internal_ips.iter().map(|address| ("InternalIP", *address));
    let external = node.external_ips.iter().map(|address| ("ExternalIP", *address));
    let all = kilo_endpoint.into_iter().chain(external).chain(internal);
    all.map(|(kind, address)| (kind, address.to_canonical()))
}

/// All addresses that a Node publishes, in its status and as endpoints.
pub(super) fn node_addresses(node: &Node) -> impl Iterator<Item = IpAddr> {
    let claims = [&node.clustermesh_endpoint, &node.force_endpoint, &node.kilo_endpoint];
    let endpoints = claims.into_iter().filter_map(|claim| match claim {
        Claim::Valid(Endpoint::Ip(address)) => Some(address.ip()),
        _ => None,
    });
    let status = node.internal_ips.iter().chain(&node.external_ips).copied();
    status.chain(endpoints).map(|address| address.to_canonical())
}

/// Whether all addresses that a Node publishes are private, and it publishes some.
pub(super) fn is_private_only(node: &Node) -> bool {
    let mut addresses = node_addresses(node).peekable();
    addresses.peek().is_some() && addresses.all(is_private)
}

/// The addresses of a Peer's endpoint and candidates.
pub(super) fn peer_endpoint_ips(spec: &PeerSpec) -> impl Iterator<Item = IpAddr> {
    let first = match &spec.endpoint {
        Some(Endpoint::Ip(address)) => Some(*address),
        _ => None,
    };
    first
        .into_iter()
        .chain(spec.candidates.iter().copied())
        .map(|address| address.ip())
}

/// The endpoint candidates of one node for one target, best first.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    pub(super) addresses: Vec<SocketAddr>,
    /// Host names that do not resolve at the moment.
    pub(super) unresolved: Vec<String>,
}

/// The source and target for which endpoints are chosen.
pub(super) struct EndpointContext<'a> {
    pub(super) source: &'a Cluster,
    /// The target's networks. An endpoint inside them is refused, because with it a source could direct the target's WireGuard
    /// packets at any address there. Exception: it lies in endpointNetworks of the source.
    pub(super) target_networks: &'a [IpNet],
    pub(super) target_families: NodeFamilies,
    /// The endpoints of the source's nodes, as the target's nodes report them.
    pub(super) discovered: &'a Discovered,
    /// The endpoints of the source's nodes, as nodes of other members report them; `None` = not used.
    pub(super) discovered_by_others: Option<&'a Discovered>,
    pub(super) resolved: &'a BTreeMap<String, IpAddr>,
}

impl EndpointContext<'_> {
    pub(super) fn allows(&self, address: IpAddr) -> bool {
        unusable_reason(address).is_none()
            && (!self.target_networks.iter().any(|network| network.contains(&address))
                || self
                    .source
                    .endpoint_networks
                    .iter()
                    .any(|network| network.contains(&address)))
    }

    fn resolve(&self, endpoint: &Endpoint, unresolved: &mut Vec<String>) -> Option<SocketAddr> {
        let address = match endpoint {
            Endpoint::Ip(address) => *address,
            Endpoint::Dns(host, port) => match self.resolved.get(host) {
                Some(address) => SocketAddr::new(*address, *port),
                None => {
                    unresolved.push(host.clone());
                    return None;
                }
            },
        };
        Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }
}

/// Chooses the endpoints of a gateway for the nodes of `importer`, best first. `exporter` is the gateway's cluster. Its entry is
/// `context.source`, and `member` contains its observed objects. An address inside the exporter's accepted networks or
/// [`OwnPods`] is usable in two cases: a node of the exporter has the address, or endpointNetworks of the importer contain it.
/// The second case means that the importer's nodes are themselves inside the exporter's networks.
pub(super) fn choose_for_gateway(
    endpoints: &[SocketAddr],
    importer: &Cluster,
    exporter: &MeshMember<'_>,
    member: &Member,
    context: &EndpointContext<'_>,
) -> Vec<SocketAddr> {
    let inside = |nets: &[IpNet], ip: IpAddr| nets.iter().any(|net| net.contains(&ip));
    let is_node_address = |ip: IpAddr| {
        let mut nodes = member.nodes.values();
        nodes.any(|node| node_addresses(node).any(|address| address == ip))
    };
    let own_pods = OwnPods::of(exporter);
    let is_inside = |ip: IpAddr| inside(&exporter.accepted, ip) || own_pods.overlaps(ip.into());
    let is_reachable = |ip: IpAddr| !is_inside(ip) || inside(&importer.endpoint_networks, ip) || is_node_address(ip);
    let mut kept: Vec<SocketAddr> = Vec::new();
    for endpoint in endpoints {
        let endpoint = SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port());
        if endpoint.port() != 0
            && context.allows(endpoint.ip())
            && is_reachable(endpoint.ip())
            && !kept.contains(&endpoint)
        {
            kept.push(endpoint);
        }
    }
    kept.sort_by_key(|endpoint| context.target_families.rank(endpoint.ip()));
    kept.truncate(MAX_CANDIDATES);
    kept
}

/// Whether a node surely has a candidate: the endpoint that it publishes is an address that this target can use, and no person set another
/// one. Cheaper than [`choose`].
pub(super) fn has_public_candidate(node: &Node, context: &EndpointContext<'_>) -> bool {
    let mut explicit = explicit_annotations(node).into_iter();
    let is_usable = |address: &SocketAddr| {
        let ip = address.ip().to_canonical();
        address.port() != 0 && !is_private(ip) && context.allows(ip)
    };
    explicit.all(|(_, claim)| *claim == Claim::Absent)
        && matches!(&node.kilo_endpoint, Claim::Valid(Endpoint::Ip(address)) if is_usable(address))
}

/// Chooses the endpoint candidates of a node, best first. If an explicit annotation has an address to which this target must not
/// send, the node is refused in this target.
///
/// Explicit endpoints come first, whatever their family is, because the target's nodes may have more families than the addresses in
/// their Nodes show. The other endpoints are sorted by the families of the target's nodes, because kg uses only the first candidate.
pub(super) fn choose(node: &Node, context: &EndpointContext<'_>) -> Result<Candidates, (Reason, String)> {
    let mut unresolved = Vec::new();
    let mut addresses = Vec::with_capacity(MAX_CANDIDATES);
    for (name, claim) in explicit_annotations(node) {
        let Some(address) = claim
            .value()
            .and_then(|endpoint| context.resolve(endpoint, &mut unresolved))
        else {
            continue;
        };
        // `check_explicit` does not see the address to which a host name resolves.
        if let Some(what) = unusable_reason(address.ip()) {
            let message =
                format!("annotation {name} gives {address}, {what}; name an address that this cluster reaches");
            return Err((Reason::EndpointForbidden, message));
        }
        if !context.allows(address.ip()) {
            return Err((
                Reason::EndpointForbidden,
                format!(
                    "annotation {name} gives {address}, which lies inside the target's own networks; if this is intended, \
                     list its network in endpointNetworks of cluster {:?}",
                    context.source.name
                ),
            ));
        }
        addresses.push(address);
    }
    let explicit_count = addresses.len();
    let kilo_endpoint = node
        .kilo_endpoint
        .value()
        .and_then(|endpoint| context.resolve(endpoint, &mut unresolved));
    addresses.extend(kilo_endpoint.filter(|address| !is_private(address.ip())));
    let port = node
        .kilo_endpoint
        .value()
        .map_or(context.source.wireguard_port, Endpoint::port);
    addresses.extend(node.external_ips.iter().map(|ip| SocketAddr::new(*ip, port)));
    let seen_at = |by: &Discovered| {
        node.public_key
            .value()
            .and_then(|key| by.get(key).cloned())
            .unwrap_or_default()
    };
    addresses.extend(seen_at(context.discovered));
    addresses.extend(node.internal_ips.iter().map(|ip| SocketAddr::new(*ip, port)));
    addresses[explicit_count..].sort_by_key(|address| context.target_families.rank(address.ip().to_canonical()));
    // Endpoints that other members report come last, whatever family they have, because the reports may be false.
    addresses.extend(context.discovered_by_others.map(seen_at).into_iter().flatten());

    let mut kept = 0;
    for next in 0..addresses.len() {
        let address = SocketAddr::new(addresses[next].ip().to_canonical(), addresses[next].port());
        let is_new = !addresses[..kept].contains(&address);
        if address.port() != 0 && context.allows(address.ip()) && is_new && kept < MAX_CANDIDATES {
            addresses[kept] = address;
            kept += 1;
        }
    }
    addresses.truncate(kept);
    Ok(Candidates { addresses, unresolved })
}
