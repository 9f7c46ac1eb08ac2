//! Finds networks that are listed for one member although another member uses them: Nodes of the other member have addresses
//! in them, or kg on these Nodes routes them into kg's interface. The networks are reported ([`Fact::NetworkInUse`]) and do not
//! change the plan.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Fact, prefix_map::PrefixMap, target::MeshMember};
use crate::{
    mesh::Profile,
    observe::{Endpoint, Node, Rows, Server},
};

/// For each cluster-meshed member, returns one fact for each network of another cluster in which Nodes of the member have addresses,
/// or which kg on these Nodes routes into kg's interface. Networks that overlap the member's endpointNetworks are ignored.
/// Sandboxes are left out, because the untrusted claims of their Nodes must not affect the status of other members.
///
/// `nodes` = the Nodes of the member with this entry name.
pub(super) fn facts<'n>(
    mesh_members: &BTreeMap<String, MeshMember<'_>>,
    nodes: impl Fn(&str) -> Option<&'n Rows<Node>>,
) -> BTreeSet<Fact> {
    // The accepted networks of all members, with the names of the members.
    let accepted_networks: PrefixMap<&str> = mesh_members
        .iter()
        .flat_map(|(name, mesh_member)| mesh_member.accepted.iter().map(|network| (*network, &**name)))
        .collect();
    let mut facts = BTreeSet::new();
    for (name, mesh_member) in mesh_members
        .iter()
        .filter(|(_, mesh_member)| mesh_member.cluster.profile == Profile::ClusterMeshed)
    {
        let cluster = &mesh_member.cluster;
        let is_reported = |owner: &str, network: IpNet| {
            // This member's Nodes may have addresses in its endpointNetworks: they can be VMs inside another member (KubeVirt).
            let hosted = cluster
                .endpoint_networks
                .iter()
                .any(|net| net.contains(&network) || network.contains(net));
            let other = mesh_members
                .get(owner)
                .filter(|other| !other.cluster.identity.same_cluster(&cluster.identity));
            other.is_some() && !hosted
        };
        // By network: (its owner, number of this member's Nodes that use the network, the first such Node, its address or kg network).
        let mut found: BTreeMap<IpNet, (&str, usize, &str, IpNet)> = BTreeMap::new();
        let mut inside_kg_networks: BTreeMap<IpNet, Vec<(IpNet, &str)>> = BTreeMap::new();
        for (node_name, node) in nodes(name).into_iter().flatten() {
            let mut hits: BTreeMap<IpNet, (&str, IpNet)> = BTreeMap::new();
            for address in addresses(node) {
                hits.extend(
                    accepted_networks
                        .find_containing(address)
                        .map(|(network, owner)| (network, (*owner, address))),
                );
            }
            if let Some(kg_network) = kg_network(node) {
                let inside = inside_kg_networks.entry(kg_network).or_insert_with(|| {
                    accepted_networks
                        .find_inside(kg_network)
                        .map(|(network, owner)| (network, *owner))
                        .collect()
                });
                hits.extend(inside.iter().map(|(network, owner)| (*network, (*owner, kg_network))));
            }
            for (network, (owner, address)) in hits
                .into_iter()
                .filter(|(network, (owner, _))| is_reported(owner, *network))
            {
                found.entry(network).or_insert((owner, 0, node_name, address)).1 += 1;
            }
        }
        for (network, (owner, nodes, first, address)) in found {
            let address = match address.prefix_len() == address.max_prefix_len() {
                true => address.addr().to_string(),
                false => address.to_string(),
            };
            facts.insert(Fact::NetworkInUse {
                cluster: owner.to_owned(),
                message: format!(
                    "{nodes} Node(s) of cluster {name:?} use addresses of {network}, first {first}: {address}; packets to these \
                     addresses are lost or enter the mesh. Give cluster {owner:?} another network"
                ),
            });
        }
    }
    facts
}

/// A Node's InternalIPs, ExternalIPs and WireGuard address, and the address of its endpoint in Kilo's annotation.
fn addresses(node: &Node) -> impl Iterator<Item = IpNet> {
    let addresses = node.internal_ips.iter().chain(&node.external_ips);
    let wireguard = node.wireguard_ip.value().map(|claim| IpNet::from(claim.addr()));
    let kilo_endpoint = match node.kilo_endpoint.value() {
        Some(Endpoint::Ip(address)) => Some(IpNet::from(address.ip())),
        _ => None,
    };
    let addresses = addresses.map(|address| IpNet::from(*address));
    addresses.chain(wireguard).chain(kilo_endpoint)
}

/// The WireGuard network of a node whose tunnel kg owns: kg routes the whole network into kg's interface.
fn kg_network(node: &Node) -> Option<IpNet> {
    let claim = node.wireguard_ip.value().filter(|_| node.server != Server::Agent)?;
    (claim.prefix_len() < claim.max_prefix_len()).then(|| claim.trunc())
}
