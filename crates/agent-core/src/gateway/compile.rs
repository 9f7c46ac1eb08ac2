//! Which parts of the SandboxAccesses are served, and what they come to. What is wrong costs that part alone; between two that
//! exclude each other the older SandboxAccess wins, then the one whose name comes first. Two that speak of one sandbox, as two
//! meshes write them, exclude each other only where they differ.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    num::NonZeroU32,
};

use clustermesh_core::key::PublicKey;
use ipnet::IpNet;

use super::{
    Access, Compiled, Frame, Grant, GrantId, Granted, Inputs, Reason, Refused, SandboxId, Table, endpoints, id::Numbers,
};
use crate::{
    device::{PeerSpec, Peers},
    policy::Protocol,
    prefixes::{NOT_UNICAST, host, overlap},
};

/// Compiles everything a gateway knows.
#[must_use]
pub fn compile(inputs: &Inputs) -> Compiled {
    let settings = &inputs.settings;
    let mut compiler = Compiler {
        inputs,
        networks: BTreeMap::new(),
        keys: BTreeMap::new(),
        addresses: BTreeMap::new(),
        open: BTreeMap::new(),
        sandboxes: Numbers::default(),
        grants: Numbers::default(),
        out: Compiled {
            peers: Peers::new(),
            routes: BTreeSet::new(),
            table: Table {
                frame: Frame {
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
        compiler.access(access);
    }
    compiler.out
}

/// A node of a SandboxAccess.
#[derive(Clone, Copy)]
struct Holder<'a> {
    access: &'a Access,
    index: usize,
    node: &'a super::Node,
}

impl fmt::Display for Holder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SandboxAccess {} spec.nodes[{}]", self.access.name, self.index)
    }
}

struct Compiler<'a> {
    inputs: &'a Inputs,
    /// Who has them.
    networks: BTreeMap<IpNet, &'a Access>,
    keys: BTreeMap<PublicKey, Holder<'a>>,
    addresses: BTreeMap<IpAddr, Holder<'a>>,
    open: BTreeMap<(SandboxId, Protocol, u16), &'a Granted>,
    sandboxes: Numbers<&'a str>,
    grants: Numbers<(&'a str, &'a Granted)>,
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

    fn refuse_grant(&mut self, access: &Access, granted: &Granted, field: String, reason: Reason, message: String) {
        self.out.refused.insert(Refused {
            access: access.name.clone(),
            field,
            grant: Some((granted.protocol, granted.gateway_port)),
            reason,
            message,
        });
    }

    fn access(&mut self, access: &'a Access) {
        let networks = self.networks(access);
        if networks.is_empty() {
            return;
        }
        let sandbox = SandboxId(self.sandboxes.get(&access.identity, &[&access.identity]));
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
            self.node(access, &networks, index, node);
        }
        for (index, granted) in access.grants.iter().enumerate() {
            self.grant(access, sandbox, index, granted);
        }
    }

    /// The networks that are this sandbox's. One that is wrong costs it alone: its nodes' addresses there are refused with it.
    fn networks(&mut self, access: &Access) -> BTreeSet<IpNet> {
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
            let widest = if network.addr().is_ipv4() { 8 } else { 7 };
            let reserved = settings.reserved.iter().chain(&settings.endpoint_networks);
            let mut reserved = reserved.chain(&NOT_UNICAST);
            if network.prefix_len() < widest {
                let message = format!("{network} is wider than /{widest}: name the networks of the sandbox");
                self.refuse(access, field, Reason::NetworkInvalid, message);
            } else if let Some(own) = reserved.find(|own| overlap(own, &network)) {
                let message = format!(
                    "{network} overlaps {own}, which this cluster, the gateway or the local host has itself: give the sandbox another \
                     range"
                );
                self.refuse(access, field, Reason::NetworkInvalid, message);
            } else if let Some((other, of)) = self.networks.iter().find(|(other, of)| {
                let same = **other == network && of.identity == access.identity;
                overlap(other, &network) && !same
            }) {
                let message = format!(
                    "{network} overlaps {other} of SandboxAccess {}, which is older and keeps it",
                    of.name
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

    fn node(&mut self, access: &'a Access, networks: &BTreeSet<IpNet>, index: usize, node: &'a super::Node) {
        let field = |part: &str| format!("spec.nodes[{index}].{part}");
        let key = match &node.public_key {
            Ok(key) => *key,
            Err(why) => {
                self.refuse(access, field("publicKey"), Reason::PublicKeyInvalid, why.clone());
                return;
            }
        };
        let place = Holder { access, index, node };
        if let Some(other) = self.keys.get(&key) {
            if other.access.identity == access.identity && other.node.addresses == node.addresses {
                return;
            }
            let message = format!("{other} has this key, too, and keeps it: each node needs a key of its own");
            self.refuse(access, field("publicKey"), Reason::PublicKeyDuplicate, message);
            return;
        }
        let mut allowed_ips = BTreeSet::new();
        for (at, address) in node.addresses.iter().enumerate() {
            let field = field(&format!("wireguardIPs[{at}]"));
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
                self.addresses.insert(address, place);
                allowed_ips.insert(host(address));
            }
        }
        if allowed_ips.is_empty() {
            return;
        }
        self.keys.insert(key, place);
        let spec = PeerSpec {
            allowed_ips,
            ..PeerSpec::default()
        };
        self.out.peers.insert(key, spec);
    }

    fn grant(&mut self, access: &'a Access, sandbox: SandboxId, index: usize, granted: &'a Granted) {
        let field = |part: &str| format!("spec.grants[{index}]{part}");
        if granted.protocol == Protocol::Sctp {
            let message = "a gateway translates TCP and UDP alone".to_owned();
            self.refuse_grant(access, granted, field(".protocol"), Reason::ProtocolNotServed, message);
            return;
        }
        let place = (sandbox, granted.protocol, granted.gateway_port);
        if let Some(other) = self.open.get(&place) {
            if *other == granted {
                return;
            }
            let message = format!(
                "port {} ({}) has another grant, which comes first and keeps it",
                granted.gateway_port, granted.protocol
            );
            self.refuse_grant(access, granted, field(".gatewayPort"), Reason::PortDuplicate, message);
            return;
        }
        // Whether its Service is known or not: a port must not come and go between two grants.
        self.open.insert(place, granted);
        let service = self.inputs.services.get(&granted.service);
        let found = match endpoints::resolve(granted, service, &self.inputs.settings) {
            Ok(found) => found,
            Err((reason, message)) => {
                self.refuse_grant(access, granted, field(".service"), reason, message);
                return;
            }
        };
        if let Some(message) = found.left_out {
            self.refuse_grant(access, granted, field(".service"), Reason::EndpointForbidden, message);
        }
        let id = self.grants.get(
            (&access.identity, granted),
            &[
                &access.identity,
                &granted.service.namespace,
                &granted.service.name,
                &granted.port,
                &granted.protocol.to_string(),
                &granted.gateway_port.to_string(),
            ],
        );
        let grant = Grant {
            id: GrantId(id),
            service: granted.service.clone(),
            balancer: found.balancer,
            standing: found.standing,
        };
        self.out.table.grants.insert(place, grant);
    }
}
