//! Finds, in the input, the addresses and Nodes of the two ends of a connection.

use std::{collections::BTreeSet, net::IpAddr};

use clustermesh_core::mesh::{ClusterIdentity, ObjectName, PortRef, Protocol};

mod owner;

use super::connection_end::{ConnectionEnd, Port};
use crate::{
    explanation::{Backend, Destination, Source, backends},
    inputs::ReadCluster,
    plan::PlanResult,
};

/// Why an end has no addresses to explain.
pub(super) enum LocateError {
    /// The command line is wrong.
    Usage(String),
    /// The input lacks the end, or the address, port or endpoints of the end. Or several clusters in the input have the address.
    Unresolved(String),
}

/// One address of the destination.
pub(super) struct DestinationAddress {
    pub(super) to: Destination,
    /// `endpoint`, `ClusterIP`, `gateway` or `address`.
    pub(super) kind: &'static str,
    pub(super) is_cluster_ip: bool,
    /// Whether the endpoint or gateway is ready. `true` for other kinds.
    pub(super) is_ready: bool,
}

/// The addresses of a destination, and how it was interpreted.
pub(super) struct LocatedDestination {
    pub(super) notes: Vec<String>,
    pub(super) addresses: Vec<DestinationAddress>,
}

pub(super) struct Finder<'o> {
    pub(super) outcome: &'o PlanResult,
}

/// Placeholder for the unknown address of an end in a cluster that was not read.
const UNKNOWN_ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);

fn unknown_source(cluster: ClusterIdentity) -> Source {
    Source {
        cluster,
        node: None,
        address: Some(UNKNOWN_ADDRESS),
    }
}

impl Finder<'_> {
    /// Returns one source for each address of a pod, and one source for any other end: a Node, an address, a pod in the host network or
    /// in a cluster that was not read. A Service is an error, because it opens no connection.
    pub(super) fn find_sources(&self, end: &ConnectionEnd) -> Result<Vec<Source>, LocateError> {
        match end {
            ConnectionEnd::Service { cluster, name } => Err(LocateError::Usage(format!(
                "SRC {cluster}/{}/svc/{}: a Service opens no connection: write the pod or Node that opens it",
                name.namespace, name.name
            ))),
            ConnectionEnd::Address(address) => {
                let owner = self.find_owner(*address)?;
                Ok(vec![Source {
                    cluster: owner.cluster,
                    node: owner.node,
                    address: (!owner.is_host).then_some(*address),
                }])
            }
            ConnectionEnd::Node { cluster, name } => {
                let cluster = self.find_cluster(cluster)?;
                self.find_node(&cluster, name)?;
                Ok(vec![Source {
                    cluster,
                    node: Some(name.clone()),
                    address: None,
                }])
            }
            ConnectionEnd::Pod { cluster, name } => {
                let cluster = self.find_cluster(cluster)?;
                let Some((node, addresses)) = self.find_pod(&cluster, name)? else {
                    return Ok(vec![unknown_source(cluster)]);
                };
                let source = |address| Source {
                    cluster: cluster.clone(),
                    node: Some(node.clone()),
                    address,
                };
                if addresses.is_empty() {
                    return Ok(vec![source(None)]);
                }
                Ok(addresses.into_iter().map(|address| source(Some(address))).collect())
            }
        }
    }

    /// Returns the addresses of this end. If the end is a Service that the cluster of the sources `from` reaches through
    /// gateways, these are addresses of gateways.
    pub(super) fn find_destinations(
        &self,
        end: &ConnectionEnd,
        port: Option<&Port>,
        from: &[Source],
    ) -> Result<LocatedDestination, LocateError> {
        let numbered_port = match port {
            Some((protocol, PortRef::Number(number))) => Some((*protocol, *number)),
            _ => None,
        };
        let destination = |cluster: &ClusterIdentity, node: Option<String>, address| DestinationAddress {
            to: Destination {
                cluster: cluster.clone(),
                node,
                address,
                port: numbered_port,
            },
            kind: "address",
            is_cluster_ip: false,
            is_ready: true,
        };
        let located = |addresses| LocatedDestination {
            notes: Vec::new(),
            addresses,
        };
        match end {
            ConnectionEnd::Address(address) => {
                let owner = self.find_owner(*address)?;
                let mut located = located(vec![destination(&owner.cluster, owner.node, *address)]);
                located.notes.push(format!("{address} is {}", owner.description));
                Ok(located)
            }
            ConnectionEnd::Node { cluster, name } => {
                let cluster = self.find_cluster(cluster)?;
                let Some(addresses) = self.find_node(&cluster, name)? else {
                    return Ok(located(vec![destination(
                        &cluster,
                        Some(name.clone()),
                        UNKNOWN_ADDRESS,
                    )]));
                };
                let addresses = addresses.into_iter();
                Ok(located(
                    addresses
                        .map(|address| destination(&cluster, Some(name.clone()), address))
                        .collect(),
                ))
            }
            ConnectionEnd::Pod { cluster, name } => {
                let cluster = self.find_cluster(cluster)?;
                let Some((node, addresses)) = self.find_pod(&cluster, name)? else {
                    return Ok(located(vec![destination(&cluster, None, UNKNOWN_ADDRESS)]));
                };
                let mut located = located(Vec::new());
                let addresses = if addresses.is_empty() {
                    located
                        .notes
                        .push(format!("Pod {name} uses the host network of Node {node}"));
                    self.find_node(&cluster, &node)?.unwrap_or_default()
                } else {
                    addresses
                };
                let addresses = addresses
                    .into_iter()
                    .map(|address| destination(&cluster, Some(node.clone()), address));
                located.addresses = addresses.collect();
                Ok(located)
            }
            ConnectionEnd::Service { cluster, name } => {
                self.find_service(&self.find_cluster(cluster)?, cluster, name, port, from)
            }
        }
    }

    fn find_service(
        &self,
        cluster: &ClusterIdentity,
        entry: &str,
        name: &ObjectName,
        port: Option<&Port>,
        from: &[Source],
    ) -> Result<LocatedDestination, LocateError> {
        if let Some((remote, remote_entry, service)) = self.find_remote_service(cluster, name) {
            let mut located = self.find_service(&remote, &remote_entry, &service, port, from)?;
            let note =
                format!("Service {name} in cluster {entry:?} is the mirror of {service} in cluster {remote_entry:?}");
            located.notes.insert(0, note);
            return Ok(located);
        }
        let mut located = LocatedDestination {
            notes: Vec::new(),
            addresses: Vec::new(),
        };
        let Some(read) = self.read_cluster(cluster) else {
            let to = Destination {
                cluster: cluster.clone(),
                node: None,
                address: UNKNOWN_ADDRESS,
                port: None,
            };
            located.addresses.push(DestinationAddress {
                to,
                kind: "address",
                is_cluster_ip: false,
                is_ready: true,
            });
            return Ok(located);
        };
        let Some(service) = read.member.services.get(name) else {
            return Err(LocateError::Unresolved(format!(
                "cluster {entry:?} has no Service {name}"
            )));
        };
        let service_port = match port {
            None => None,
            Some((protocol, port)) => {
                let mut ports = service.ports.iter();
                let found = ports.find(|own| {
                    own.protocol == *protocol
                        && match port {
                            PortRef::Number(number) => own.port == *number,
                            PortRef::Name(name) => own.name == *name,
                        }
                });
                let found = found.ok_or_else(|| {
                    let ports = service.ports.iter();
                    let ports = ports.map(|port| format!("{}/{} {}", port.port, port.protocol.as_str(), port.name));
                    let ports: Vec<String> = ports.map(|port| port.trim().to_owned()).collect();
                    LocateError::Unresolved(format!(
                        "Service {name} of cluster {entry:?} has no such port; it has {}",
                        ports.join(", ")
                    ))
                })?;
                Some(found)
            }
        };
        // All sources are in the same cluster.
        let gateways = from
            .first()
            .map(|from| self.find_gateways(&from.cluster, cluster, read, name));
        let has_port =
            |(port_name, _): &(String, DestinationAddress)| service_port.is_none_or(|port| port.name == *port_name);
        let gateways = gateways.into_iter().flatten().filter(has_port);
        located.addresses.extend(gateways.map(|(_, address)| address));
        if !located.addresses.is_empty() {
            return Ok(located);
        }
        let port = service_port.map(|port| (port.protocol, port.port));
        for backend in backends(&read.member, name, port) {
            let Backend {
                address,
                node,
                port,
                ready,
            } = backend;
            located.addresses.push(DestinationAddress {
                to: Destination {
                    cluster: cluster.clone(),
                    node,
                    address,
                    port: Some(port),
                },
                kind: "endpoint",
                is_cluster_ip: false,
                is_ready: ready,
            });
        }
        if located.addresses.is_empty() {
            let why =
                format!("Service {name} of cluster {entry:?} has no endpoint, so no connection to it can succeed");
            return Err(LocateError::Unresolved(why));
        }
        located.addresses.extend(self.cluster_ips(cluster, read, name, port));
        Ok(located)
    }

    /// Returns the addresses of gateways at which the cluster `from` reaches a granted Service, each with the name of the
    /// Service's port. The result is empty unless `from` is a sandbox or `cluster` is masqueraded.
    fn find_gateways(
        &self,
        from: &ClusterIdentity,
        cluster: &ClusterIdentity,
        read: &ReadCluster,
        name: &ObjectName,
    ) -> Vec<(String, DestinationAddress)> {
        let mut found = Vec::new();
        for mesh in self.outcome.plan.meshes.values() {
            let entry = |of: &ClusterIdentity| {
                let mut entries = mesh.identities.iter().filter(|(_, identity)| identity.same_cluster(of));
                entries.next().map(|(name, _)| name)
            };
            let (Some(source), Some(target)) = (entry(from), entry(cluster).and_then(|name| mesh.targets.get(name)))
            else {
                continue;
            };
            let accesses = target.accesses.values().filter(|access| access.source == *source);
            let grants = accesses.flat_map(|access| &access.spec.grants);
            for (port, granted) in grants.filter(|(_, granted)| granted.service == *name) {
                for gateway in read.member.gateways.values().filter(|gateway| gateway.serves(source)) {
                    for address in &gateway.addresses {
                        let to = Destination {
                            cluster: cluster.clone(),
                            node: None,
                            address: *address,
                            port: Some(*port),
                        };
                        let destination = DestinationAddress {
                            to,
                            kind: "gateway",
                            is_cluster_ip: false,
                            is_ready: gateway.ready,
                        };
                        found.push((granted.port.clone(), destination));
                    }
                }
            }
        }
        found
    }

    /// Returns the ClusterIPs of a Service that are inside the accepted networks of its cluster.
    fn cluster_ips(
        &self,
        cluster: &ClusterIdentity,
        read: &ReadCluster,
        name: &ObjectName,
        port: Option<(Protocol, u16)>,
    ) -> Vec<DestinationAddress> {
        let spec = read
            .objects
            .services
            .get(name)
            .and_then(|service| service.spec.as_ref());
        let texts = spec.into_iter().flat_map(|spec| {
            let first = spec.cluster_ip.iter();
            first.chain(spec.cluster_ips.iter().flatten())
        });
        let addresses: BTreeSet<IpAddr> = texts.filter_map(|text| text.parse().ok()).collect();
        let is_accepted = |address: &IpAddr| {
            let entries = self.entries_accepting(*address);
            entries.iter().any(|(_, identity)| identity.same_cluster(cluster))
        };
        let addresses = addresses
            .into_iter()
            .filter(is_accepted)
            .map(|address| DestinationAddress {
                to: Destination {
                    cluster: cluster.clone(),
                    node: None,
                    address,
                    port,
                },
                kind: "ClusterIP",
                is_cluster_ip: true,
                is_ready: true,
            });
        addresses.collect()
    }

    /// Returns the remote Service of the mirrored Service `name`: the remote cluster, the name of its entry, and the remote Service's
    /// name. The mirrored Service may not exist yet: a grant is enough. `None` = the Service is not mirrored.
    fn find_remote_service(
        &self,
        cluster: &ClusterIdentity,
        name: &ObjectName,
    ) -> Option<(ClusterIdentity, String, ObjectName)> {
        let existing = self
            .read_cluster(cluster)
            .and_then(|read| read.member.services.get(name));
        if existing.is_some_and(|service| service.managed.is_none()) {
            return None;
        }
        self.outcome.meshes.iter().find_map(|mesh| {
            let entry = mesh
                .clusters
                .iter()
                .find(|entry| entry.identity.same_cluster(cluster))?;
            let grant = entry.egress.iter().find(|grant| grant.local == *name)?;
            let remote = mesh.clusters.iter().find(|entry| entry.name == grant.cluster)?;
            Some((remote.identity.clone(), remote.name.clone(), grant.service.clone()))
        })
    }

    /// Returns the cluster with this name in the meshes.
    fn find_cluster(&self, name: &str) -> Result<ClusterIdentity, LocateError> {
        let entries = || self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let mut named = entries()
            .filter(|entry| entry.name == name)
            .map(|entry| &entry.identity);
        let Some(first) = named.next() else {
            let known: BTreeSet<&str> = entries().map(|entry| &*entry.name).collect();
            let known: Vec<&str> = known.into_iter().collect();
            return Err(LocateError::Usage(format!(
                "no mesh has an entry {name:?}; there are {}",
                known.join(", ")
            )));
        };
        if named.any(|other| !other.same_cluster(first)) {
            return Err(LocateError::Usage(format!(
                "{name:?} is the name of different clusters in several meshes: give only one of these ClusterMeshes, or write an address"
            )));
        }
        Ok(first.clone())
    }

    fn read_cluster(&self, cluster: &ClusterIdentity) -> Option<&ReadCluster> {
        self.outcome.inputs.cluster(cluster)
    }

    /// The name of a cluster in the meshes.
    fn name_of(&self, cluster: &ClusterIdentity) -> &str {
        let mut entries = self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let entry = entries.find(|entry| entry.identity.same_cluster(cluster));
        entry.map_or("?", |entry| &entry.name)
    }

    /// Returns the InternalIPs and the WireGuard address of a Node. `None` = its cluster was not read.
    fn find_node(&self, cluster: &ClusterIdentity, name: &str) -> Result<Option<Vec<IpAddr>>, LocateError> {
        let Some(read) = self.read_cluster(cluster) else {
            return Ok(None);
        };
        let Some(node) = read.member.nodes.get(name) else {
            let cluster = self.name_of(cluster);
            let why = format!("cluster {cluster:?} has no Node {name}; write a pod as {cluster}/NAMESPACE/POD");
            return Err(LocateError::Unresolved(why));
        };
        let wireguard = node.wireguard_ip.value().map(|net| net.addr());
        let mut addresses: Vec<IpAddr> = node.internal_ips.iter().map(IpAddr::to_canonical).collect();
        addresses.extend(wireguard.filter(|address| !addresses.contains(address)));
        Ok(Some(addresses))
    }

    /// Returns the Node of a pod and the pod's own addresses (none if it uses the host network). `None` = its cluster was not
    /// read.
    fn find_pod(
        &self,
        cluster: &ClusterIdentity,
        name: &ObjectName,
    ) -> Result<Option<(String, Vec<IpAddr>)>, LocateError> {
        let Some(read) = self.read_cluster(cluster) else {
            return Ok(None);
        };
        let cluster = self.name_of(cluster);
        let (Some(pod), Some(raw)) = (read.member.pods.get(name), read.objects.pods.get(name)) else {
            let hint = if read.member.services.contains_key(name) {
                format!(
                    "; there is a Service of that name: {cluster}/{}/svc/{}",
                    name.namespace, name.name
                )
            } else if read.objects.pods.is_empty() {
                "; the input has no pods of this cluster: were they listed?".to_owned()
            } else {
                String::new()
            };
            return Err(LocateError::Unresolved(format!(
                "cluster {cluster:?} has no Pod {name}{hint}"
            )));
        };
        let uses_host_network = raw.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
        if pod.addresses.is_empty() && (!uses_host_network || pod.node.is_empty()) {
            let why = format!("Pod {name} of cluster {cluster:?} has no address: it has not started, or has ended");
            return Err(LocateError::Unresolved(why));
        }
        Ok(Some((pod.node.clone(), pod.addresses.clone())))
    }
}
