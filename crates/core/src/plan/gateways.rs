//! Plans how sandboxes enter a member through gateways (design rule 7): the SandboxAccess in the member, and the Peers of its
//! gateways in the sandbox.
//!
//! In this file, sandbox means any member that reaches Services through gateways ([`MeshInputs::uses_gateways`]): a sandbox, or another
//! importer of a masqueraded member. Only where the two differ, the code tests the profile.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use super::{
    PlannedAccess, Reason, endpoint,
    nodes::host_route,
    peers::{OwnNames, PeerPlanner},
    services::{self, AccessPath},
    target::{MeshInputs, MeshMember},
};
use crate::{
    hash::fnv1a,
    mesh::{Cluster, ObjectName, Profile, Protocol},
    observe::{AccessNode, AccessSpec, Claim, Gateway, GrantedPort, Member, Observation, ServicePort},
    ownership::{self, Ownership},
};

/// Host bits of the largest network that counts as a network of gateways. Gateways are few, so a wider network has other uses even
/// if a gateway publishes an address in it.
const MAX_HOST_BITS: u8 = 8;

/// Removes the networks of gateways from `allowed` of a cluster-meshed entry: small networks that contain an address of a gateway and
/// none of a Node. Members that use gateways have Peers for the gateways. Other cluster-meshed members must not have a
/// route to these networks.
pub(super) fn remove_gateway_networks(cluster: &mut Cluster, member: &Member) {
    if cluster.profile != Profile::ClusterMeshed {
        return;
    }
    let is_small = |net: &IpNet| net.max_prefix_len() - net.prefix_len() <= MAX_HOST_BITS;
    let gateway_addresses = || member.gateways.values().flat_map(|gateway| &gateway.addresses);
    let claimed_by_nodes = || {
        member.nodes.values().flat_map(|node| {
            let wireguard = node.wireguard_ip.value().map(IpNet::addr);
            let pods = node.pod_cidrs.iter().filter_map(Claim::value).map(IpNet::addr);
            wireguard
                .into_iter()
                .chain(pods)
                .chain(node.internal_ips.iter().copied())
        })
    };
    let is_gateway_network = |net: &IpNet| {
        is_small(net)
            && gateway_addresses().any(|address| net.contains(address))
            && !claimed_by_nodes().any(|address| net.contains(&address))
    };
    cluster.allowed.retain(|net| !is_gateway_network(net));
}

/// The largest length of a node's name in a SandboxAccess, in bytes. A sandbox chooses the names of its Nodes. With 253 bytes each, the
/// object for 5,000 Nodes would exceed etcd's limit of 1.5 MiB, and neither a revocation nor a quarantine could be written.
const MAX_NODE_NAME: usize = 40;

/// The name of a node in a SandboxAccess: the Node's name, or a part of that name with a hash.
pub(super) fn short_name(node: &str) -> String {
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    if node.len() <= MAX_NODE_NAME && node.chars().all(|c| is_allowed(&c)) {
        return node.to_owned();
    }
    let start: String = node.chars().filter(is_allowed).take(MAX_NODE_NAME - 9).collect();
    format!("{start}-{:08x}", fnv1a(node.bytes()))
}

/// The range of gateway ports: above well-known server ports, below the kernel's default range of ephemeral ports (32768).
const FIRST_PORT: u16 = 20_000;
pub(super) const PORT_COUNT: u16 = 10_000;

/// How one sandbox can use the gateways of one member.
#[derive(Default)]
pub(super) struct GatewayAccess<'a> {
    /// The existing SandboxAccess in the member, which gateways enforce.
    pub(super) existing: Option<&'a AccessSpec>,
    /// The accepted WireGuard addresses of the Ready gateways that serve the sandbox and have an endpoint that it can reach.
    pub(super) usable_addresses: BTreeSet<IpAddr>,
    /// Protocols whose gateway ports are all used by grants of the sandbox.
    pub(super) exhausted: BTreeSet<Protocol>,
    /// Why the sandbox can use no gateway.
    pub(super) unusable_because: Option<String>,
    /// Grants that gateways refuse, by protocol and gateway port: each message with the names of the gateways that report it.
    pub(super) refused: BTreeMap<(Protocol, u16), BTreeMap<&'a str, Vec<String>>>,
}

impl GatewayAccess<'_> {
    /// Translates granted Service ports into gateway ports. Ports that the existing SandboxAccess does not contain yet are left
    /// out.
    pub(super) fn gateway_ports(&self, service: &ObjectName, ports: &[ServicePort]) -> Vec<ServicePort> {
        let existing = self.existing.into_iter().flat_map(|access| &access.grants);
        let gateway_port = |port: &ServicePort| {
            let mut matching = existing.clone().filter(|((protocol, _), granted)| {
                *protocol == port.protocol && granted.service == *service && granted.port == port.name
            });
            matching.next().map(|((_, number), _)| *number)
        };
        let known = ports.iter().filter_map(|port| {
            Some(ServicePort {
                port: gateway_port(port)?,
                ..port.clone()
            })
        });
        known.collect()
    }
}

impl<'a> MeshInputs<'a> {
    /// The existing SandboxAccess of this mesh for a sandbox in a member, with its name. `None` also if its spec is invalid.
    pub(super) fn existing_access(&self, member: &'a Member, sandbox: &str) -> Option<(&'a str, &'a AccessSpec)> {
        let mut all = member.accesses.iter().flatten();
        let (name, ours) = all.find(|(_, access)| {
            access.owner.source_cluster.as_deref() == Some(sandbox)
                && ownership::of(&access.owner, &self.seen.hub, self.claimants) == Ownership::Mesh(self.mesh)
        })?;
        Some((name, ours.spec.as_ref().ok()?))
    }

    /// How a sandbox can use the gateways of a member.
    pub(super) fn gateway_access(&self, mesh_member: &'a MeshMember<'a>, sandbox: &str) -> GatewayAccess<'a> {
        let (Some(member), Some(sandbox_member)) = (mesh_member.last_observed(), self.mesh_members.get(sandbox)) else {
            return GatewayAccess::default();
        };
        let ready = member.gateways.iter();
        let ready = ready.filter(|(_, gateway)| gateway.serves(sandbox) && gateway.ready);
        let ready: Vec<_> = ready.collect();
        let usable_gateways = ready
            .iter()
            .filter_map(|(_, gateway)| self.peer_parameters(mesh_member, member, sandbox_member, gateway).ok());
        let usable: BTreeSet<IpAddr> = usable_gateways
            .flat_map(|(prefixes, _)| prefixes)
            .map(|net| net.addr())
            .collect();
        let cluster = &mesh_member.cluster.name;
        let no_gateway = missing_gateway_message(cluster, member);
        let unusable_because = no_gateway.or_else(|| match (ready.is_empty(), usable.is_empty()) {
            (true, _) => Some(format!(
                "no gateway of cluster {cluster:?} that serves this cluster is Ready: look at the pods of its StatefulSet (kubectl get \
                 pods -n clustermesh-gateway) and their SandboxGateways there"
            )),
            (false, true) => Some(format!(
                "no gateway of cluster {cluster:?} can be reached from this cluster: status.clusters[] of cluster {cluster:?} gives the \
                 reason for each"
            )),
            (false, false) => None,
        });
        let existing = self.existing_access(member, sandbox);
        let mut refused: BTreeMap<_, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
        for (gateway_name, (access, protocol, port), message) in ready.iter().flat_map(|(name, gateway)| {
            gateway
                .refused
                .iter()
                .map(move |(refused_grant, message)| (name, refused_grant, message))
        }) {
            if existing.is_some_and(|(name, _)| name == access) {
                let by_message = refused.entry((*protocol, *port)).or_default();
                by_message.entry(message).or_default().push(gateway_name.to_string());
            }
        }
        let taken = self.taken_ports(
            mesh_member,
            member,
            &self.naming.sandbox_id(&sandbox_member.cluster.identity),
        );
        let protocols: BTreeSet<Protocol> = taken.iter().map(|(protocol, _)| *protocol).collect();
        GatewayAccess {
            existing: existing.map(|(_, spec)| spec),
            usable_addresses: usable,
            exhausted: protocols
                .into_iter()
                .filter(|protocol| all_gateway_ports(*protocol, 0).all(|key| taken.contains(&key)))
                .collect(),
            unusable_because,
            refused,
        }
    }

    /// The allowed IPs and the endpoints of a gateway's Peer in a sandbox.
    ///
    /// # Errors
    /// Why the sandbox cannot use this gateway.
    fn peer_parameters(
        &self,
        mesh_member: &MeshMember<'_>,
        member: &Member,
        sandbox: &MeshMember<'_>,
        gateway: &Gateway,
    ) -> Result<(BTreeSet<IpNet>, Vec<SocketAddr>), (Reason, String)> {
        let cluster = &mesh_member.cluster.name;
        let mut prefixes: BTreeSet<IpNet> = gateway.addresses.iter().map(|ip| host_route(*ip)).collect();
        prefixes.retain(|net| mesh_member.accepted.iter().any(|accepted| accepted.contains(net)));
        if prefixes.is_empty() {
            let message = format!(
                "its WireGuard addresses lie outside allowedNetworks of cluster {cluster:?}: add its --gateway-cidr there"
            );
            return Err((Reason::WGIPOutOfRange, message));
        }
        let context = endpoint::EndpointContext {
            source: &mesh_member.cluster,
            target_networks: &sandbox.accepted,
            target_families: sandbox.families,
            discovered: &sandbox.discovered,
            discovered_by_others: None,
            resolved: &self.seen.resolved,
        };
        let endpoints =
            endpoint::choose_for_gateway(&gateway.endpoints, &sandbox.cluster, mesh_member, member, &context);
        if endpoints.is_empty() {
            let named: Vec<String> = gateway.endpoints.iter().map(ToString::to_string).collect();
            let message = format!(
                "none of its endpoints can be reached from there ({}): give it a hostPort, or name an address of a load balancer in \
                 spec.endpoints of its SandboxGateway; if nodes of cluster {sandbox:?} are pods of cluster {cluster:?}, \
                 list that pod network in endpointNetworks of cluster {sandbox:?}",
                named.join(", "),
                sandbox = sandbox.cluster.name
            );
            return Err((Reason::EndpointForbidden, message));
        }
        Ok((prefixes, endpoints))
    }

    /// Plans the SandboxAccess of the sandbox `source` in the member `target_name`. `None` = the member was not observed, or its
    /// SandboxAccesses are unknown ([`Member::accesses`]).
    pub(super) fn plan_access(
        &self,
        target_name: &str,
        target: &'a MeshMember<'a>,
        source: &str,
        sandbox: &'a MeshMember<'a>,
    ) -> Option<(String, PlannedAccess)> {
        let member = target.last_observed()?;
        let accesses = member.accesses.as_ref()?;
        let existing = self.existing_access(member, source).map(|(_, spec)| spec);
        let id = self.naming.sandbox_id(&sandbox.cluster.identity);
        let spec = AccessSpec {
            sandbox: source.to_owned(),
            networks: self.access_networks(source, sandbox, existing),
            nodes: self.planned_nodes(source, sandbox, existing),
            grants: if sandbox.cluster.quarantine || target.cluster.quarantine {
                BTreeMap::new()
            } else {
                self.planned_grants(target_name, target, sandbox, member, &id, existing)
            },
            id,
        };
        // A SandboxAccess is named like a PeerPolicy.
        let name_if = |is_name_taken| self.naming.policy(self.mesh, source, is_name_taken);
        let plain_name = name_if(false);
        let is_foreign = accesses.get(&plain_name).is_some_and(|access| {
            ownership::of(&access.owner, &self.seen.hub, self.claimants) != Ownership::Mesh(self.mesh)
        });
        let access_name = if is_foreign || self.used_names(target).accesses.contains_key(&plain_name) {
            name_if(true)
        } else {
            plain_name
        };
        let source = source.to_owned();
        Some((access_name, PlannedAccess { source, spec }))
    }

    /// The networks of the importer's nodes, which may use the gateways. A sandbox has all its networks there. Any other importer has only its
    /// WireGuard networks and, while it was not observed or has held nodes, also the networks of the existing SandboxAccess: they may
    /// contain nodes whose address is not known now.
    fn access_networks(
        &self,
        source: &str,
        importer: &MeshMember<'_>,
        existing: Option<&AccessSpec>,
    ) -> BTreeSet<IpNet> {
        if importer.cluster.profile == Profile::Sandbox {
            return importer.cluster.allowed.iter().copied().collect();
        }
        let mut networks = importer.wireguard_networks();
        let registry = self.registries.get(source);
        if registry.is_none_or(|registry| !registry.held.is_empty()) {
            let known = existing.into_iter().flat_map(|access| &access.networks).copied();
            networks.extend(known.filter(|net| importer.cluster.allows(*net)));
        }
        networks
    }

    /// The sandbox's registered nodes, and kept nodes of the existing SandboxAccess. A node can be kept for one of two reasons: the
    /// sandbox's observation is not Fresh, or the node is held. It is not kept if the sandbox's networks no longer contain its
    /// addresses, or another planned node has its key, its name or one of its addresses.
    fn planned_nodes(
        &self,
        source: &str,
        sandbox: &MeshMember<'_>,
        existing: Option<&AccessSpec>,
    ) -> BTreeMap<crate::key::PublicKey, AccessNode> {
        let registry = self.registries.get(source);
        let registered = registry.into_iter().flat_map(|registry| &registry.registered);
        let mut nodes: BTreeMap<_, _> = registered
            .map(|node| {
                let seen = AccessNode {
                    name: short_name(node.node),
                    addresses: [node.wireguard.addr()].into(),
                };
                (node.key, seen)
            })
            .collect();
        let fresh = sandbox.observed.and_then(Observation::fresh).is_some();
        let held: BTreeSet<String> = registry
            .into_iter()
            .flat_map(|registry| registry.held.keys())
            .map(|name| short_name(name))
            .collect();
        let is_held = |node: &AccessNode| held.contains(&node.name);
        for (key, node) in existing.into_iter().flat_map(|access| &access.nodes) {
            let is_distinct = |nodes: &BTreeMap<_, AccessNode>| {
                nodes
                    .values()
                    .all(|other| other.name != node.name && other.addresses.is_disjoint(&node.addresses))
            };
            let inside = node.addresses.iter().all(|ip| sandbox.cluster.allows(IpNet::from(*ip)));
            if (!fresh || is_held(node)) && inside && !nodes.contains_key(key) && is_distinct(&nodes) {
                nodes.insert(*key, node.clone());
            }
        }
        nodes
    }

    /// The gateway ports of all existing SandboxAccesses of a sandbox in a member, and of those that older meshes plan.
    fn taken_ports(&self, target: &MeshMember<'_>, member: &Member, id: &str) -> BTreeSet<(Protocol, u16)> {
        let existing = member.accesses.iter().flat_map(BTreeMap::values);
        let existing = existing.filter_map(|access| access.spec.as_ref().ok());
        existing
            .chain(self.used_names(target).accesses.values())
            .filter(|access| access.id == id)
            .flat_map(|access| access.grants.keys().copied())
            .collect()
    }

    /// Gives each granted Service port a gateway port: that of an older mesh which grants the sandbox the same Service port, else that
    /// of the existing SandboxAccess, else a free one. A Service port for which no gateway port is free is left out;
    /// [`GatewayAccess::exhausted`] brings this into the status of the grant.
    fn planned_grants(
        &self,
        target_name: &str,
        target: &'a MeshMember<'a>,
        sandbox: &'a MeshMember<'a>,
        member: &'a Member,
        id: &str,
        existing: Option<&AccessSpec>,
    ) -> BTreeMap<(Protocol, u16), GrantedPort> {
        let mut granted: BTreeSet<(Protocol, GrantedPort)> = BTreeSet::new();
        // The granted ports do not depend on the gateways, so none is passed. Only the endpoints of the mirrored Service depend on them.
        let no_gateways = GatewayAccess::default();
        let egress = sandbox.cluster.egress.iter();
        for grant in egress.filter(|grant| grant.cluster == target_name) {
            if member.unlisted.services.contains_key(&grant.service.namespace) {
                // The Services of this namespace are not known: existing grants for this Service are kept, and no grant is added.
                let ports = existing.into_iter().flat_map(|access| &access.grants);
                let ports = ports.filter(|(_, port)| port.service == grant.service);
                granted.extend(ports.map(|((protocol, _), port)| (*protocol, port.clone())));
                continue;
            }
            let access_path = AccessPath::Gateways(&no_gateways);
            if let Ok(found) =
                services::resolve_endpoints(grant, &sandbox.cluster, &target.cluster, member, &access_path)
            {
                granted.extend(found.ports.into_iter().map(|port| {
                    let service = grant.service.clone();
                    (
                        port.protocol,
                        GrantedPort {
                            service,
                            port: port.name,
                        },
                    )
                }));
            }
        }
        let mut taken = self.taken_ports(target, member, id);
        let used = self.used_names(target);
        let older = || used.accesses.values().filter(|access| access.id == id);
        let known = || older().chain(existing).flat_map(|access| &access.grants);
        let mut grants = BTreeMap::new();
        for (protocol, port) in granted {
            let kept = known().find(|((known_protocol, _), known)| *known_protocol == protocol && **known == port);
            let Some(key) = kept.map_or_else(|| choose_port(protocol, &port, &taken), |(key, _)| Some(*key)) else {
                continue;
            };
            taken.insert(key);
            grants.insert(key, port);
        }
        grants
    }
}

/// The first free gateway port, starting at a hash of the granted Service port, so that a SandboxAccess that is created again usually gets
/// the same ports. `None` = every port is taken.
fn choose_port(protocol: Protocol, port: &GrantedPort, taken: &BTreeSet<(Protocol, u16)>) -> Option<(Protocol, u16)> {
    let text = [&*port.service.namespace, "/", &*port.service.name, "/", &*port.port].concat();
    let offset = u16::try_from(fnv1a(text.bytes()) % u32::from(PORT_COUNT)).unwrap_or_default();
    all_gateway_ports(protocol, offset).find(|key| !taken.contains(key))
}

/// All gateway ports of a protocol, beginning with `FIRST_PORT + offset`.
fn all_gateway_ports(protocol: Protocol, offset: u16) -> impl Iterator<Item = (Protocol, u16)> {
    (0..PORT_COUNT).map(move |step| (protocol, FIRST_PORT + (offset + step) % PORT_COUNT))
}

impl<'a> PeerPlanner<'a, '_> {
    /// Adds Peers for the gateways of `source` to a sandbox, each with only the gateway's own addresses. They are added once the
    /// SandboxAccess exists: a gateway that does not know the sandbox ignores its handshake initiation, and WireGuard sends the
    /// next one only after five seconds.
    pub(super) fn add_gateways(&mut self, source: &str, mesh_member: &'a MeshMember<'a>) {
        let Some(member) = mesh_member.last_observed() else {
            return;
        };
        if self.inputs.existing_access(member, self.name).is_none() {
            return;
        }
        let serving = || {
            let all = member.gateways.iter();
            all.filter(|(_, gateway)| gateway.serves(self.name))
        };
        // The names that the naming rule gives to the Peers of these gateways. An existing Peer with a gateway's key keeps its name,
        // unless the rule gives that name to another of these gateways.
        let names = serving().map(|(name, _)| {
            self.inputs
                .naming
                .peer(self.inputs.mesh, source, &name.to_string(), false)
        });
        let names_by_rule = OwnNames::Gateways(names.collect());
        let serving: Vec<_> = serving().collect();
        for (name, gateway) in serving {
            match self.inputs.peer_parameters(mesh_member, member, self.target, gateway) {
                Ok((prefixes, endpoints)) => {
                    self.add_gateway_peer(source, &name.to_string(), gateway, prefixes, endpoints, &names_by_rule);
                }
                Err((reason, message)) => self.skip(source, &format!("gateway {name}"), reason, &message),
            }
        }
    }
}

/// Why no sandbox can enter a member; `None` = it has gateways.
pub(super) fn missing_gateway_message(cluster: &str, member: &Member) -> Option<String> {
    member.gateways.is_empty().then(|| {
        format!(
            "cluster {cluster:?} has no gateway, and sandboxes enter only through gateways, as do all members if it is masqueraded: \
             install them there (deploy/gateway.yaml), or \
             check why they do not start (kubectl get pods,sandboxgateways -n clustermesh-gateway)"
        )
    })
}
