//! Finds networks that are listed for one member although Nodes of another one have addresses in them. Nothing is planned otherwise
//! for it: it is said ([`Fact::NetworkInUse`]).

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Fact, target::MeshMember};
use crate::{
    mesh::Profile,
    observe::{Node, Server},
};

/// Networks of all members, each with its member; those of different clusters are disjoint.
struct Listed<'p> {
    members: BTreeMap<IpNet, &'p str>,
    lengths: BTreeSet<u8>,
}

impl<'p> Listed<'p> {
    fn of(mesh_members: &'p BTreeMap<String, MeshMember<'_>>) -> Self {
        let networks = mesh_members.iter().flat_map(|(name, mesh_member)| {
            let accepted = mesh_member.accepted.iter();
            accepted.map(move |network| (*network, &**name))
        });
        let members: BTreeMap<IpNet, &str> = networks.collect();
        let lengths = members.keys().map(IpNet::prefix_len).collect();
        Self { members, lengths }
    }

    /// The network that holds all of `net`, and its member.
    fn around(&self, net: IpNet) -> Option<(IpNet, &'p str)> {
        let lengths = self.lengths.iter().filter(|length| **length <= net.prefix_len());
        lengths.into_iter().find_map(|length| {
            let outer = IpNet::new(net.addr(), *length).ok()?.trunc();
            Some((outer, *self.members.get(&outer)?))
        })
    }

    /// Networks inside `net`, and their members.
    fn inside(&self, net: IpNet) -> impl Iterator<Item = (IpNet, &'p str)> {
        let all = self.members.iter().map(|(network, name)| (*network, *name));
        all.filter(move |(network, _)| net.contains(network))
    }
}

/// What is to be said, one fact for each pair of a member and a network of another. Sandboxes are not asked: whatever their Nodes
/// say moves nothing elsewhere.
pub(super) fn facts(mesh_members: &BTreeMap<String, MeshMember<'_>>) -> BTreeSet<Fact> {
    let listed = Listed::of(mesh_members);
    let mut facts = BTreeSet::new();
    for (name, mesh_member) in mesh_members
        .iter()
        .filter(|(_, mesh_member)| mesh_member.cluster.profile == Profile::ClusterMeshed)
    {
        let cluster = &mesh_member.cluster;
        let foreign = |owner: &str, network: IpNet| {
            let hosted = cluster
                .endpoint_networks
                .iter()
                .any(|net| net.contains(&network) || network.contains(net));
            let other = mesh_members
                .get(owner)
                .filter(|other| !other.cluster.identity.same_cluster(&cluster.identity));
            other.is_some() && !hosted
        };
        // By network: its member, how many Nodes, the first of them and its address.
        let mut found: BTreeMap<IpNet, (&str, usize, &str, IpNet)> = BTreeMap::new();
        let mut networks: BTreeMap<IpNet, Vec<(IpNet, &str)>> = BTreeMap::new();
        for (node, view) in mesh_member.last_observed().into_iter().flat_map(|member| &member.nodes) {
            let mut hits: BTreeMap<IpNet, (&str, IpNet)> = BTreeMap::new();
            for address in addresses(view) {
                hits.extend(
                    listed
                        .around(address)
                        .map(|(network, owner)| (network, (owner, address))),
                );
            }
            if let Some(transit) = transit(view) {
                let inside = networks
                    .entry(transit)
                    .or_insert_with(|| listed.inside(transit).collect());
                hits.extend(inside.iter().map(|(network, owner)| (*network, (*owner, transit))));
            }
            for (network, (owner, address)) in hits
                .into_iter()
                .filter(|(network, (owner, _))| foreign(owner, *network))
            {
                found.entry(network).or_insert((owner, 0, node, address)).1 += 1;
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
                    "{nodes} Node(s) of cluster {name:?} have addresses in {network}, first {first}: {address}; what is sent to \
                     them there is lost or enters the mesh. Give this cluster another network"
                ),
            });
        }
    }
    facts
}

/// The addresses of a Node that its cluster knows.
fn addresses(node: &Node) -> impl Iterator<Item = IpNet> {
    let addresses = node.internal_ips.iter().chain(&node.external_ips);
    let wireguard = node.wireguard_ip.value().map(|claim| IpNet::from(claim.addr()));
    addresses.map(|address| IpNet::from(*address)).chain(wireguard)
}

/// The network that kg routes into its own interface.
fn transit(node: &Node) -> Option<IpNet> {
    let claim = node.wireguard_ip.value().filter(|_| node.server != Server::Agent)?;
    (claim.prefix_len() < claim.max_prefix_len()).then(|| claim.trunc())
}
