//! Compiles SandboxAccesses and Services into the peers and the table of a gateway.
//!
//! SandboxAccesses of sandboxes that the gateway does not serve are ignored. Of the others only invalid parts are left out; a
//! SandboxAccess is left out as a whole only if it has no valid network. Of two parts that conflict, the one in the older SandboxAccess
//! wins; if both are equally old, the one in the SandboxAccess whose name sorts first; in one SandboxAccess, the one that is listed
//! first. Two SandboxAccesses of one sandbox, written for two meshes, conflict only in parts that differ.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    num::NonZeroU32,
};

use clustermesh_core::{key::PublicKey, mesh::Protocol};
use ipnet::IpNet;

use super::{
    Access, Compiled, Grant, GrantId, GrantSpec, Inputs, Reason, Refused, RuleParameters, SandboxId, Table, endpoints,
    id::IdAllocator,
};
use crate::{
    device::{PeerSpec, Peers},
    prefixes::{SPECIAL_PURPOSE, host, overlap},
};

/// Compiles the desired state of a gateway.
#[must_use]
pub fn compile(inputs: &Inputs) -> Compiled {
    let settings = &inputs.settings;
    let mut compiler = Compiler {
        inputs,
        networks: BTreeMap::new(),
        keys: BTreeMap::new(),
        addresses: BTreeMap::new(),
        ports: BTreeMap::new(),
        sandboxes: IdAllocator::default(),
        grants: IdAllocator::default(),
        out: Compiled {
            peers: Peers::new(),
            routes: BTreeSet::new(),
            table: Table {
                parameters: RuleParameters {
                    interface: settings.interface.clone(),
                    listen_port: settings.listen_port,
                    admin_port: settings.admin_port,
                    addresses: settings.addresses.clone(),
                    sandbox_connections: NonZeroU32::new(settings.sandbox_connections),
                    endpoint_connections: NonZeroU32::new(settings.endpoint_connections),
                },
                sandboxes: BTreeMap::new(),
                rates: BTreeMap::new(),
                grants: BTreeMap::new(),
            },
            served: BTreeSet::new(),
            refused: BTreeSet::new(),
        },
    };
    let serves = |access: &&Access| settings.serves.is_empty() || settings.serves.contains(&access.sandbox);
    let mut accesses: Vec<&Access> = inputs.accesses.iter().filter(serves).collect();
    accesses.sort_by_key(|access| (access.created, &access.name));
    for access in accesses {
        compiler.add_access(access);
    }
    compiler.out
}

/// A node of a SandboxAccess, with its index in `spec.nodes`.
#[derive(Clone, Copy)]
struct NodeRef<'a> {
    access: &'a Access,
    index: usize,
    node: &'a super::Node,
}

impl fmt::Display for NodeRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SandboxAccess {} spec.nodes[{}]", self.access.name, self.index)
    }
}

struct Compiler<'a> {
    inputs: &'a Inputs,
    // The accepted networks, keys, addresses and gateway ports, each with its owner.
    networks: BTreeMap<IpNet, &'a Access>,
    keys: BTreeMap<PublicKey, NodeRef<'a>>,
    addresses: BTreeMap<IpAddr, NodeRef<'a>>,
    ports: BTreeMap<(SandboxId, Protocol, u16), &'a GrantSpec>,
    sandboxes: IdAllocator<&'a str>,
    grants: IdAllocator<(&'a str, &'a GrantSpec)>,
    out: Compiled,
}

impl<'a> Compiler<'a> {
    fn refuse(&mut self, access: &Access, field: String, reason: Reason, message: String) {
        self.out.refused.insert(Refused {
            access: access.name.clone(),
            field,
            grant: None,
            reason,
            message,
        });
    }

    fn refuse_grant(&mut self, access: &Access, granted: &GrantSpec, field: String, reason: Reason, message: String) {
        self.out.refused.insert(Refused {
            access: access.name.clone(),
            field,
            grant: Some((granted.protocol, granted.gateway_port)),
            reason,
            message,
        });
    }

    fn add_access(&mut self, access: &'a Access) {
        let networks = self.accept_networks(access);
        if networks.is_empty() {
            return;
        }
        let sandbox = SandboxId(self.sandboxes.allocate(&access.identity, &[&access.identity]));
        for network in &networks {
            self.networks.entry(*network).or_insert(access);
            self.out.table.sandboxes.insert(*network, sandbox);
        }
        self.out.routes.extend(&networks);
        self.out.served.insert(access.name.clone());
        let rate = access.new_connections.unwrap_or(self.inputs.settings.new_connections);
        if let Some(rate) = NonZeroU32::new(rate) {
            self.out.table.rates.entry(sandbox).or_insert(rate);
        }
        for (index, node) in access.nodes.iter().enumerate() {
            self.add_node(access, &networks, index, node);
        }
        for (index, granted) in access.grants.iter().enumerate() {
            self.add_grant(access, sandbox, index, granted);
        }
    }

    /// Selects the valid networks of a SandboxAccess. [`Self::add_node`] refuses node addresses outside these networks.
    fn accept_networks(&mut self, access: &Access) -> BTreeSet<IpNet> {
        let settings = &self.inputs.settings;
        let mut networks: BTreeSet<IpNet> = BTreeSet::new();
        for (index, network) in access.networks.iter().enumerate() {
            let field = format!("spec.networks[{index}]");
            let network = match network {
                Ok(network) => *network,
                Err(why) => {
                    self.refuse(access, field, Reason::NetworkInvalid, why.clone());
                    continue;
                }
            };
            // The limits of `clustermesh_core::mesh::is_too_wide`.
            let widest = if network.addr().is_ipv4() { 8 } else { 7 };
            let reserved = settings.reserved.iter().chain(&settings.endpoint_networks);
            let mut reserved = reserved.chain(&SPECIAL_PURPOSE);
            if network.prefix_len() < widest {
                let message = format!("{network} is wider than /{widest}: name the networks of the sandbox");
                self.refuse(access, field, Reason::NetworkInvalid, message);
            } else if let Some(range) = reserved.find(|range| overlap(range, &network)) {
                let message = format!(
                    "{network} overlaps {range}, which this cluster or the gateway uses or which is a special-purpose range: give the \
                     sandbox another range"
                );
                self.refuse(access, field, Reason::NetworkInvalid, message);
            } else if let Some((other, owner)) = self.networks.iter().find(|(other, owner)| {
                let is_same = **other == network && owner.identity == access.identity;
                overlap(other, &network) && !is_same
            }) {
                let message = format!(
                    "{network} overlaps {other} of SandboxAccess {}, which comes first and keeps it",
                    owner.name
                );
                self.refuse(access, field, Reason::NetworkOverlap, message);
            } else if let Some(other) = networks.iter().find(|other| overlap(other, &network)) {
                let message = format!("{network} overlaps {other} of the same sandbox: name one of them");
                self.refuse(access, field, Reason::NetworkOverlap, message);
            } else {
                networks.insert(network);
            }
        }
        networks
    }

    fn add_node(&mut self, access: &'a Access, networks: &BTreeSet<IpNet>, index: usize, node: &'a super::Node) {
        let field = |part: &str| format!("spec.nodes[{index}].{part}");
        let key = match &node.public_key {
            Ok(key) => *key,
            Err(why) => {
                self.refuse(access, field("publicKey"), Reason::PublicKeyInvalid, why.clone());
                return;
            }
        };
        let owner = NodeRef { access, index, node };
        if let Some(other) = self.keys.get(&key) {
            if other.access.identity == access.identity && other.node.addresses == node.addresses {
                return;
            }
            let message = format!("{other} has this key, too, and keeps it: each node needs a key of its own");
            self.refuse(access, field("publicKey"), Reason::PublicKeyDuplicate, message);
            return;
        }
        let mut allowed_ips = BTreeSet::new();
        for (position, address) in node.addresses.iter().enumerate() {
            let field = field(&format!("wireguardIPs[{position}]"));
            let address = match address {
                Ok(address) => *address,
                Err(why) => {
                    self.refuse(access, field, Reason::AddressInvalid, why.clone());
                    continue;
                }
            };
            if !networks.iter().any(|network| network.contains(&address)) {
                let message =
                    format!("{address} lies outside the networks of this sandbox that are served (spec.networks)");
                self.refuse(access, field, Reason::AddressInvalid, message);
            } else if let Some(other) = self.addresses.get(&address) {
                let message = format!("{other} has {address}, too, and keeps it");
                self.refuse(access, field, Reason::AddressDuplicate, message);
            } else {
                self.addresses.insert(address, owner);
                allowed_ips.insert(host(address));
            }
        }
        if allowed_ips.is_empty() {
            return;
        }
        self.keys.insert(key, owner);
        let spec = PeerSpec {
            allowed_ips,
            ..PeerSpec::default()
        };
        self.out.peers.insert(key, spec);
    }

    fn add_grant(&mut self, access: &'a Access, sandbox: SandboxId, index: usize, granted: &'a GrantSpec) {
        let field = |part: &str| format!("spec.grants[{index}]{part}");
        if granted.protocol == Protocol::Sctp {
            let message = "a gateway translates only TCP and UDP".to_owned();
            self.refuse_grant(access, granted, field(".protocol"), Reason::ProtocolNotServed, message);
            return;
        }
        let key = (sandbox, granted.protocol, granted.gateway_port);
        if let Some(other) = self.ports.get(&key) {
            if *other == granted {
                return;
            }
            let message = format!(
                "port {} ({}) belongs to another grant, which comes first and keeps it",
                granted.gateway_port,
                granted.protocol.lowercase()
            );
            self.refuse_grant(access, granted, field(".gatewayPort"), Reason::PortDuplicate, message);
            return;
        }
        // The grant keeps the port even if its Service does not exist or is not read yet, so that the port does not move between grants.
        self.ports.insert(key, granted);
        let service = self.inputs.services.get(&granted.service);
        let resolved = match endpoints::resolve(granted, service, &self.inputs.settings) {
            Ok(resolved) => resolved,
            Err((reason, message)) => {
                self.refuse_grant(access, granted, field(".service"), reason, message);
                return;
            }
        };
        // This reports only the endpoints that are left out. The grant is still added, with its other endpoints.
        if let Some(message) = resolved.left_out {
            self.refuse_grant(access, granted, field(".service"), Reason::EndpointForbidden, message);
        }
        let id = self.grants.allocate(
            (&access.identity, granted),
            &[
                &access.identity,
                &granted.service.namespace,
                &granted.service.name,
                &granted.port,
                granted.protocol.lowercase(),
                &granted.gateway_port.to_string(),
            ],
        );
        let grant = Grant {
            id: GrantId(id),
            service: granted.service.clone(),
            balancer: resolved.balancer,
            allowed_endpoints: resolved.allowed_endpoints,
        };
        self.out.table.grants.insert(key, grant);
    }
}
