//! Finds the object or the cluster that an address belongs to.

use std::{collections::BTreeMap, net::IpAddr};

use clustermesh_core::mesh::ClusterIdentity;

use super::{Finder, LocateError};
use crate::inputs::ReadCluster;

/// The owner of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddressOwner {
    pub(super) cluster: ClusterIdentity,
    pub(super) node: Option<String>,
    /// Whether the address belongs to the Node itself.
    pub(super) is_host: bool,
    /// For messages, for example `Node w1 of cluster "a"`.
    pub(super) description: String,
}

impl Finder<'_> {
    /// Returns the entries whose accepted networks contain an address.
    pub(super) fn entries_accepting(&self, address: IpAddr) -> Vec<(String, ClusterIdentity)> {
        let mut found = Vec::new();
        for mesh in self.outcome.plan.meshes.values() {
            for (name, report) in &mesh.clusters {
                if report.accepted.iter().any(|net| net.contains(&address)) {
                    found.extend(
                        mesh.identities
                            .get(name)
                            .map(|identity| (name.clone(), identity.clone())),
                    );
                }
            }
        }
        found
    }

    /// Returns the owner of an address: the object that has this address, else the cluster whose accepted networks contain it.
    pub(super) fn find_owner(&self, address: IpAddr) -> Result<AddressOwner, LocateError> {
        let mut owners: BTreeMap<&str, AddressOwner> = BTreeMap::new();
        for (identity, name) in &self.outcome.inputs.names {
            let Some(read) = self.read_cluster(identity) else {
                continue;
            };
            if let Some(owner) = self.find_object(identity, read, address) {
                owners.entry(name).or_insert(owner);
            }
        }
        if owners.len() > 1 {
            let all: Vec<&str> = owners.values().map(|owner| &*owner.description).collect();
            return Err(LocateError::Unresolved(format!(
                "{address} exists in several clusters: it is {}. Write the object's name instead of the address",
                all.join(", and ")
            )));
        }
        if let Some(owner) = owners.into_values().next() {
            return Ok(owner);
        }
        match &*self.entries_accepting(address) {
            [] => Err(LocateError::Unresolved(format!(
                "{address} is in the accepted networks of no member, and no object in the input has it: the mesh carries no \
                 packet to or from it"
            ))),
            // The accepted networks of different clusters are disjoint, so all entries are of the same cluster.
            [(name, cluster), ..] => Ok(AddressOwner {
                cluster: cluster.clone(),
                node: None,
                is_host: false,
                description: format!("in the networks of cluster {name:?}, and no object in the input has it"),
            }),
        }
    }

    /// Returns the object of a cluster that has an address: a pod, a Node, an endpoint, the API server, a Service, or a Node's pod
    /// network.
    pub(super) fn find_object(
        &self,
        cluster: &ClusterIdentity,
        read: &ReadCluster,
        address: IpAddr,
    ) -> Option<AddressOwner> {
        let name = self.name_of(cluster);
        let owner = |node: Option<&str>, is_host: bool, description: String| {
            Some(AddressOwner {
                cluster: cluster.clone(),
                node: node.map(str::to_owned),
                is_host,
                description: format!("{description} of cluster {name:?}"),
            })
        };
        let member = &read.member;
        // Pods in the host network have no `addresses`: theirs belong to the Node.
        for (pod, value) in &member.pods {
            if value.addresses.contains(&address) {
                return owner(Some(&value.node), false, format!("Pod {pod} on Node {}", value.node));
            }
        }
        for (node, value) in &member.nodes {
            let wireguard = value.wireguard_ip.value().map(|net| net.addr());
            let own = value
                .internal_ips
                .iter()
                .chain(&value.external_ips)
                .map(IpAddr::to_canonical);
            if own.chain(wireguard).any(|own| own == address) {
                return owner(Some(node), true, format!("Node {node}"));
            }
        }
        // Mirrored Services have endpoints in other members.
        for slice in member.slices.values().filter(|slice| slice.managed.is_none()) {
            if let Some(endpoint) = slice.endpoints.iter().find(|endpoint| endpoint.address == address) {
                let description = format!("an endpoint of Service {}", slice.service);
                return owner(endpoint.node.as_deref(), false, description);
            }
        }
        if member.api_endpoints.iter().any(|endpoint| endpoint.ip() == address) {
            return owner(None, false, "the API server".to_owned());
        }
        for (service, raw) in &read.objects.services {
            let spec = raw.spec.as_ref();
            let texts = spec
                .into_iter()
                .flat_map(|spec| spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten()));
            if texts
                .filter_map(|text| text.parse::<IpAddr>().ok())
                .any(|own| own == address)
            {
                return owner(None, false, format!("the ClusterIP of Service {service}"));
            }
        }
        for (node, value) in &member.nodes {
            let mut nets = value.pod_cidrs.iter().filter_map(|claim| claim.value());
            if nets.any(|net| net.contains(&address)) {
                return owner(Some(node), false, format!("in the pod network of Node {node}"));
            }
        }
        None
    }
}
