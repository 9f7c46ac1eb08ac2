//! What stands behind a name or an address in what was given: addresses, nodes, endpoints. Nothing is decided here.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use clustermesh_core::{
    mesh::{ClusterIdentity, ObjectName, PortRef, Protocol},
    plan::explain::{self, Destination, Source},
};

use super::place::{Place, Port};
use crate::{plan::Outcome, world::Seen};

/// Why an end was not found.
pub(super) enum Missing {
    /// It cannot be meant so.
    Usage(String),
    /// It is not in what was given.
    NotThere(String),
}

/// One address that the connection may go to.
pub(super) struct Target {
    pub(super) to: Destination,
    /// What it is: `endpoint`, `ClusterIP`, `address`.
    pub(super) words: &'static str,
    pub(super) cluster_ip: bool,
    /// It takes connections, as far as Kubernetes says.
    pub(super) ready: bool,
}

/// The addresses of a destination.
pub(super) struct Located {
    pub(super) notes: Vec<String>,
    pub(super) targets: Vec<Target>,
}

pub(super) struct Finder<'o> {
    pub(super) outcome: &'o Outcome,
}

/// Whose an address is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    cluster: ClusterIdentity,
    node: Option<String>,
    /// It is the Node's own.
    host: bool,
    words: String,
}

const ANYWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);

impl Finder<'_> {
    /// Who may be meant as the one that opens it: one for each family.
    pub(super) fn sources(&self, place: &Place) -> Result<Vec<Source>, Missing> {
        match place {
            Place::Service { cluster, name } => Err(Missing::Usage(format!(
                "SRC {cluster}/{}/svc/{}: a Service opens no connection: write the pod or the node that does",
                name.namespace, name.name
            ))),
            Place::Address(address) => {
                let owner = self.owner(*address)?;
                Ok(vec![Source {
                    cluster: owner.cluster,
                    node: owner.node,
                    address: (!owner.host).then_some(*address),
                }])
            }
            Place::Node { cluster, name } => {
                let cluster = self.cluster(cluster)?;
                self.node(&cluster, name)?;
                Ok(vec![Source {
                    cluster,
                    node: Some(name.clone()),
                    address: None,
                }])
            }
            Place::Pod { cluster, name } => {
                let cluster = self.cluster(cluster)?;
                let Some((node, addresses)) = self.pod(&cluster, name)? else {
                    return Ok(vec![self.unseen(cluster)]);
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

    fn unseen(&self, cluster: ClusterIdentity) -> Source {
        Source {
            cluster,
            node: None,
            address: Some(ANYWHERE),
        }
    }

    /// The addresses that are meant, by whoever opens the connection.
    pub(super) fn targets(&self, place: &Place, port: Option<&Port>, from: &[Source]) -> Result<Located, Missing> {
        let number = match port {
            Some((protocol, PortRef::Number(number))) => Some((*protocol, *number)),
            _ => None,
        };
        let target = |cluster: &ClusterIdentity, node: Option<String>, address| Target {
            to: Destination {
                cluster: cluster.clone(),
                node,
                address,
                port: number,
            },
            words: "address",
            cluster_ip: false,
            ready: true,
        };
        let found = |targets| Located {
            notes: Vec::new(),
            targets,
        };
        match place {
            Place::Address(address) => {
                let owner = self.owner(*address)?;
                let mut located = found(vec![target(&owner.cluster, owner.node, *address)]);
                located.notes.push(format!("{address} is {}", owner.words));
                Ok(located)
            }
            Place::Node { cluster, name } => {
                let cluster = self.cluster(cluster)?;
                let Some(addresses) = self.node(&cluster, name)? else {
                    return Ok(found(vec![target(&cluster, Some(name.clone()), ANYWHERE)]));
                };
                let addresses = addresses.into_iter();
                Ok(found(
                    addresses
                        .map(|address| target(&cluster, Some(name.clone()), address))
                        .collect(),
                ))
            }
            Place::Pod { cluster, name } => {
                let cluster = self.cluster(cluster)?;
                let Some((node, addresses)) = self.pod(&cluster, name)? else {
                    return Ok(found(vec![target(&cluster, None, ANYWHERE)]));
                };
                let mut located = found(Vec::new());
                let addresses = if addresses.is_empty() {
                    located
                        .notes
                        .push(format!("Pod {name} is in the network of Node {node}"));
                    self.node(&cluster, &node)?.unwrap_or_default()
                } else {
                    addresses
                };
                let targets = addresses
                    .into_iter()
                    .map(|address| target(&cluster, Some(node.clone()), address));
                located.targets = targets.collect();
                Ok(located)
            }
            Place::Service { cluster, name } => self.service(&self.cluster(cluster)?, cluster, name, port, from),
        }
    }

    fn service(
        &self,
        cluster: &ClusterIdentity,
        entry: &str,
        name: &ObjectName,
        port: Option<&Port>,
        from: &[Source],
    ) -> Result<Located, Missing> {
        if let Some((cluster, exporter, service)) = self.mirrored(cluster, name) {
            let mut located = self.service(&cluster, &exporter, &service, port, from)?;
            let note =
                format!("Service {name} in cluster {entry:?} is the mirror of {service} in cluster {exporter:?}");
            located.notes.insert(0, note);
            return Ok(located);
        }
        let mut located = Located {
            notes: Vec::new(),
            targets: Vec::new(),
        };
        let Some(seen) = self.seen(cluster) else {
            let unseen = Destination {
                cluster: cluster.clone(),
                node: None,
                address: ANYWHERE,
                port: None,
            };
            located.targets.push(Target {
                to: unseen,
                words: "address",
                cluster_ip: false,
                ready: true,
            });
            return Ok(located);
        };
        let Some(service) = seen.member.services.get(name) else {
            return Err(Missing::NotThere(format!("cluster {entry:?} has no Service {name}")));
        };
        let port = match port {
            None => None,
            Some((protocol, wanted)) => {
                let mut ports = service.ports.iter();
                let found = ports.find(|port| {
                    port.protocol == *protocol
                        && match wanted {
                            PortRef::Number(number) => port.port == *number,
                            PortRef::Name(name) => port.name == *name,
                        }
                });
                let found = found.ok_or_else(|| {
                    let ports = service.ports.iter();
                    let ports = ports.map(|port| format!("{}/{} {}", port.port, port.protocol.as_str(), port.name));
                    let ports: Vec<String> = ports.map(|port| port.trim().to_owned()).collect();
                    Missing::NotThere(format!(
                        "Service {name} of cluster {entry:?} has no such port; it has {}",
                        ports.join(", ")
                    ))
                })?;
                Some(found)
            }
        };
        let gateways = from
            .first()
            .map(|from| self.gateways(&from.cluster, cluster, seen, name));
        let wanted = |(of, _): &(String, Target)| port.is_none_or(|port| port.name == *of);
        let gateways = gateways.into_iter().flatten().filter(wanted);
        located.targets.extend(gateways.map(|(_, target)| target));
        if !located.targets.is_empty() {
            return Ok(located);
        }
        let port = port.map(|port| (port.protocol, port.port));
        for backend in explain::backends(&seen.member, name, port) {
            let explain::Backend {
                address,
                node,
                port,
                ready,
            } = backend;
            located.targets.push(Target {
                to: Destination {
                    cluster: cluster.clone(),
                    node,
                    address,
                    port: Some(port),
                },
                words: "endpoint",
                cluster_ip: false,
                ready,
            });
        }
        if located.targets.is_empty() {
            let why = format!("Service {name} of cluster {entry:?} has no endpoint now, so nothing would answer");
            return Err(Missing::NotThere(why));
        }
        located.targets.extend(self.cluster_ips(cluster, seen, name, port));
        Ok(located)
    }

    /// Where a sandbox calls a Service that it is granted: at the gateways, by the names of the Service's ports.
    fn gateways(
        &self,
        from: &ClusterIdentity,
        cluster: &ClusterIdentity,
        seen: &Seen,
        name: &ObjectName,
    ) -> Vec<(String, Target)> {
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
                for gateway in seen.member.gateways.values().filter(|gateway| gateway.serves(source)) {
                    for address in &gateway.addresses {
                        let to = Destination {
                            cluster: cluster.clone(),
                            node: None,
                            address: *address,
                            port: Some(*port),
                        };
                        let target = Target {
                            to,
                            words: "gateway",
                            cluster_ip: false,
                            ready: gateway.ready,
                        };
                        found.push((granted.port.clone(), target));
                    }
                }
            }
        }
        found
    }

    /// Its ClusterIPs, where they are among what its cluster opens.
    fn cluster_ips(
        &self,
        cluster: &ClusterIdentity,
        seen: &Seen,
        name: &ObjectName,
        port: Option<(Protocol, u16)>,
    ) -> Vec<Target> {
        let spec = seen
            .objects
            .services
            .get(name)
            .and_then(|service| service.spec.as_ref());
        let texts = spec.into_iter().flat_map(|spec| {
            let one = spec.cluster_ip.iter();
            one.chain(spec.cluster_ips.iter().flatten())
        });
        let addresses: BTreeSet<IpAddr> = texts.filter_map(|text| text.parse().ok()).collect();
        let open = |address: &IpAddr| self.accepting(*address).iter().any(|(_, of)| of.same_cluster(cluster));
        let targets = addresses.into_iter().filter(open).map(|address| Target {
            to: Destination {
                cluster: cluster.clone(),
                node: None,
                address,
                port,
            },
            words: "ClusterIP",
            cluster_ip: true,
            ready: true,
        });
        targets.collect()
    }

    /// The Service behind a mirrored one: its cluster, that one's name in the mesh, and its own name.
    fn mirrored(&self, cluster: &ClusterIdentity, name: &ObjectName) -> Option<(ClusterIdentity, String, ObjectName)> {
        let standing = self.seen(cluster).and_then(|seen| seen.member.services.get(name));
        if standing.is_some_and(|service| service.managed.is_none()) {
            return None;
        }
        self.outcome.meshes.iter().find_map(|mesh| {
            let entry = mesh
                .clusters
                .iter()
                .find(|entry| entry.identity.same_cluster(cluster))?;
            let grant = entry.egress.iter().find(|grant| grant.local == *name)?;
            let exporter = mesh.clusters.iter().find(|entry| entry.name == grant.cluster)?;
            Some((exporter.identity.clone(), exporter.name.clone(), grant.service.clone()))
        })
    }

    /// The cluster that the meshes call so.
    fn cluster(&self, name: &str) -> Result<ClusterIdentity, Missing> {
        let entries = || self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let mut named = entries()
            .filter(|entry| entry.name == name)
            .map(|entry| &entry.identity);
        let Some(first) = named.next() else {
            let known: BTreeSet<&str> = entries().map(|entry| &*entry.name).collect();
            let known: Vec<&str> = known.into_iter().collect();
            return Err(Missing::Usage(format!(
                "no mesh has an entry {name:?}; there are {}",
                known.join(", ")
            )));
        };
        if named.any(|other| !other.same_cluster(first)) {
            return Err(Missing::Usage(format!(
                "{name:?} is another cluster in each of several meshes: give the ClusterMesh that is meant alone, or write an address"
            )));
        }
        Ok(first.clone())
    }

    fn seen(&self, cluster: &ClusterIdentity) -> Option<&Seen> {
        self.outcome.world.seen(cluster)
    }

    fn called(&self, cluster: &ClusterIdentity) -> &str {
        let mut entries = self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let entry = entries.find(|entry| entry.identity.same_cluster(cluster));
        entry.map_or("?", |entry| &entry.name)
    }

    /// The addresses of a Node; `None` = its cluster was not given.
    fn node(&self, cluster: &ClusterIdentity, name: &str) -> Result<Option<Vec<IpAddr>>, Missing> {
        let Some(seen) = self.seen(cluster) else {
            return Ok(None);
        };
        let Some(node) = seen.member.nodes.get(name) else {
            let words = self.called(cluster);
            let why = format!("cluster {words:?} has no Node {name}; a pod is written {words}/NAMESPACE/POD");
            return Err(Missing::NotThere(why));
        };
        let wireguard = node.wireguard_ip.value().map(|net| net.addr());
        let mut addresses: Vec<IpAddr> = node.internal_ips.iter().map(IpAddr::to_canonical).collect();
        addresses.extend(wireguard.filter(|address| !addresses.contains(address)));
        Ok(Some(addresses))
    }

    /// The Node of a pod and its own addresses, none where it is in its Node's network; `None` = its cluster was not given.
    fn pod(&self, cluster: &ClusterIdentity, name: &ObjectName) -> Result<Option<(String, Vec<IpAddr>)>, Missing> {
        let Some(seen) = self.seen(cluster) else {
            return Ok(None);
        };
        let words = self.called(cluster);
        let (Some(pod), Some(raw)) = (seen.member.pods.get(name), seen.objects.pods.get(name)) else {
            let service = if seen.member.services.contains_key(name) {
                format!(
                    "; there is a Service of that name: {words}/{}/svc/{}",
                    name.namespace, name.name
                )
            } else if seen.objects.pods.is_empty() {
                "; no pods are in what was given: were they listed?".to_owned()
            } else {
                String::new()
            };
            return Err(Missing::NotThere(format!(
                "cluster {words:?} has no Pod {name}{service}"
            )));
        };
        let host = raw.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
        if pod.addresses.is_empty() && (!host || pod.node.is_empty()) {
            let why = format!("Pod {name} of cluster {words:?} has no address: it has not started, or has ended");
            return Err(Missing::NotThere(why));
        }
        Ok(Some((pod.node.clone(), pod.addresses.clone())))
    }

    /// Entries whose accepted networks hold an address.
    fn accepting(&self, address: IpAddr) -> Vec<(String, ClusterIdentity)> {
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

    /// Whose an address is: what stands under it in some cluster, else whose networks hold it.
    fn owner(&self, address: IpAddr) -> Result<Owner, Missing> {
        let mut owners: BTreeMap<&str, Owner> = BTreeMap::new();
        for (identity, given) in &self.outcome.world.sources {
            let Some(seen) = self.seen(identity) else { continue };
            if let Some(owner) = self.standing(identity, seen, address) {
                owners.entry(given).or_insert(owner);
            }
        }
        if owners.len() > 1 {
            let all: Vec<&str> = owners.values().map(|owner| &*owner.words).collect();
            return Err(Missing::NotThere(format!(
                "{address} stands in several clusters: it is {}. Write the one that is meant by its name",
                all.join(", and ")
            )));
        }
        if let Some(owner) = owners.into_values().next() {
            return Ok(owner);
        }
        match &*self.accepting(address) {
            [] => Err(Missing::NotThere(format!(
                "{address} lies in the allowedNetworks of no member, and nothing that was given has it: no packet to or from it \
                 is the mesh's"
            ))),
            [(name, cluster), ..] => Ok(Owner {
                cluster: cluster.clone(),
                node: None,
                host: false,
                words: format!("in the networks of cluster {name:?}, and nothing that was given there has it"),
            }),
        }
    }

    fn standing(&self, cluster: &ClusterIdentity, seen: &Seen, address: IpAddr) -> Option<Owner> {
        let name = self.called(cluster);
        let owner = |node: Option<&str>, host: bool, words: String| {
            Some(Owner {
                cluster: cluster.clone(),
                node: node.map(str::to_owned),
                host,
                words: format!("{words} of cluster {name:?}"),
            })
        };
        let member = &seen.member;
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
        for slice in member.slices.values().filter(|slice| slice.managed.is_none()) {
            if let Some(endpoint) = slice.endpoints.iter().find(|endpoint| endpoint.address == address) {
                let words = format!("an endpoint of Service {}", slice.service);
                return owner(endpoint.node.as_deref(), false, words);
            }
        }
        if member.api_endpoints.iter().any(|endpoint| endpoint.ip() == address) {
            return owner(None, false, "the API server".to_owned());
        }
        for (service, raw) in &seen.objects.services {
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
