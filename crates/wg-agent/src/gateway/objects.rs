//! Parses SandboxAccess, SandboxGateway, Service and EndpointSlice into plain values. A part of a SandboxAccess that cannot
//! be parsed becomes an error message; such a part of another object is left out.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::gateway::{Access, Endpoint, GrantSpec, Node};
use clustermesh_api::{
    names::{LABEL_HUB, LABEL_MANAGED_BY, LABEL_SERVICE_NAME, LABEL_SLICE_MANAGED_BY, MANAGED_BY},
    sandbox::{AppliedAccess, SandboxAccess, SandboxGateway},
};
use clustermesh_core::{
    key::PublicKey,
    mesh::{ObjectName, Protocol},
};
use ipnet::IpNet;
use k8s_openapi::api::{core::v1, discovery::v1::EndpointSlice};
use kube::{ResourceExt, api::DynamicObject};

/// A SandboxAccess.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParsedAccess {
    pub(super) access: Access,
    /// The entry in `status.applied` of the gateway when this object is applied.
    pub(super) applied: AppliedAccess,
    /// Why the object cannot be parsed.
    pub(super) problem: Option<String>,
}

impl ParsedAccess {
    /// Parses the object. One that cannot be parsed, for example with values of a newer CRD version, grants nothing.
    pub(super) fn new(object: DynamicObject) -> Self {
        let mut parsed = Self {
            access: Access {
                name: object.name_any(),
                created: object.creation_timestamp().map_or(i64::MAX, |time| time.0.as_second()),
                ..Access::default()
            },
            applied: AppliedAccess {
                name: object.name_any(),
                uid: object.uid().unwrap_or_default(),
                generation: object.metadata.generation.unwrap_or_default(),
            },
            problem: None,
        };
        match object.try_parse::<SandboxAccess>() {
            Ok(object) => read_spec(object, &mut parsed.access),
            Err(error) => parsed.problem = Some(format!("is not what the SandboxAccess CRD describes: {error}")),
        }
        parsed
    }
}

fn read_spec(object: SandboxAccess, access: &mut Access) {
    let hub = object.labels().get(LABEL_HUB).cloned().unwrap_or_default();
    let spec = object.spec;
    access.identity = if spec.sandbox_id.is_empty() {
        access.name.clone()
    } else {
        format!("{hub}/{}", spec.sandbox_id)
    };
    access.sandbox = spec.sandbox;
    access.networks = spec.networks.iter().map(|text| network(text)).collect();
    let nodes = spec.nodes.iter().map(|node| Node {
        public_key: node.public_key.parse::<PublicKey>().map_err(|error| error.to_string()),
        addresses: node.wireguard_ips.iter().map(|text| address(text)).collect(),
    });
    access.nodes = nodes.collect();
    let grants = spec.grants.into_iter().map(|grant| GrantSpec {
        service: ObjectName {
            namespace: grant.service.namespace,
            name: grant.service.name,
        },
        port: grant.port,
        protocol: grant.protocol,
        gateway_port: grant.gateway_port,
    });
    access.grants = grants.collect();
    access.new_connections = spec.new_connections_per_second;
}

fn network(text: &str) -> Result<IpNet, String> {
    let wrong = || format!("{text:?} is not a network: write an address and a prefix length, such as 100.80.16.0/20");
    let network: IpNet = text.parse().map_err(|_| wrong())?;
    if network != network.trunc() {
        return Err(format!("{text} has host bits: write {}", network.trunc()));
    }
    Ok(network)
}

fn address(text: &str) -> Result<IpAddr, String> {
    let wrong = |_| format!("{text:?} is not an address: write it without a prefix length, such as 100.80.16.1");
    text.parse::<IpAddr>().map(|ip| ip.to_canonical()).map_err(wrong)
}

/// The spec of this pod's SandboxGateway.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ParsedGateway {
    pub(super) endpoints: Vec<SocketAddr>,
    pub(super) node_port: Option<u16>,
}

impl ParsedGateway {
    pub(super) fn new(object: SandboxGateway) -> Self {
        Self {
            // The CRD validates the addresses, but not that ports are at most 65535.
            endpoints: object
                .spec
                .endpoints
                .iter()
                .filter_map(|text| text.parse().ok())
                .collect(),
            node_port: object.spec.node_port,
        }
    }
}

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParsedService {
    pub(super) has_selector: bool,
    pub(super) is_external_name: bool,
    /// The controller wrote it, so it mirrors a Service of another member.
    pub(super) is_mirror: bool,
    /// `sessionAffinity: ClientIP`.
    pub(super) is_sticky: bool,
    pub(super) ports: BTreeSet<(Protocol, String)>,
}

impl ParsedService {
    pub(super) fn new(object: v1::Service) -> Self {
        let is_mirror = object
            .labels()
            .get(LABEL_MANAGED_BY)
            .is_some_and(|value| value == MANAGED_BY);
        let spec = object.spec.unwrap_or_default();
        let ports = spec.ports.iter().flatten();
        let ports = ports.filter_map(|port| {
            Some((
                protocol(port.protocol.as_deref())?,
                port.name.clone().unwrap_or_default(),
            ))
        });
        Self {
            has_selector: spec.selector.is_some_and(|labels| !labels.is_empty()),
            is_external_name: spec.type_.as_deref() == Some("ExternalName"),
            is_mirror,
            is_sticky: spec.session_affinity.as_deref() == Some("ClientIP"),
            ports: ports.collect(),
        }
    }
}

fn protocol(text: Option<&str>) -> Option<Protocol> {
    match text {
        None | Some("TCP") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some("SCTP") => Some(Protocol::Sctp),
        Some(_) => None,
    }
}

/// An EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParsedSlice {
    /// The name of its Service.
    pub(super) service: String,
    pub(super) endpoints: BTreeSet<Endpoint>,
}

impl ParsedSlice {
    /// Parses a slice. Only the first address of an endpoint counts, as for kube-proxy. The endpoints of a slice that the
    /// controller wrote are ignored, because they are in other members.
    pub(super) fn new(object: EndpointSlice) -> Self {
        let labels = object.metadata.labels.clone().unwrap_or_default();
        let has_controller_value = |label: &str| labels.get(label).is_some_and(|value| value == MANAGED_BY);
        let mut endpoints = BTreeSet::new();
        if !has_controller_value(LABEL_MANAGED_BY) && !has_controller_value(LABEL_SLICE_MANAGED_BY) {
            let ports = object.ports.iter().flatten().filter_map(|port| {
                let number = u16::try_from(port.port?).ok().filter(|number| *number > 0)?;
                Some((
                    protocol(port.protocol.as_deref())?,
                    port.name.clone().unwrap_or_default(),
                    number,
                ))
            });
            for (protocol, port_name, port) in ports {
                endpoints.extend(object.endpoints.iter().flatten().filter_map(|endpoint| {
                    let conditions = endpoint.conditions.clone().unwrap_or_default();
                    let ready = conditions.ready.unwrap_or(true);
                    Some(Endpoint {
                        protocol,
                        port_name: port_name.clone(),
                        address: endpoint.addresses.first()?.parse().ok()?,
                        port,
                        ready,
                        serving: conditions.serving.unwrap_or(ready),
                    })
                }));
            }
        }
        Self {
            service: labels.get(LABEL_SERVICE_NAME).cloned().unwrap_or_default(),
            endpoints,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn malformed_access_or_value_becomes_an_error() {
        let object = |spec| {
            serde_json::from_value(json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess",
                "metadata": {"name": "m--s", "uid": "u", "generation": 3}, "spec": spec,
            }))
        };
        let seen = ParsedAccess::new(object(json!({"sandbox": 7})).unwrap());
        assert!(
            seen.problem
                .unwrap()
                .starts_with("is not what the SandboxAccess CRD describes")
        );
        assert_eq!((seen.access.networks, seen.applied.generation), (Vec::new(), 3));
        let odd = json!({"sandbox": "s", "networks": ["100.80.0.1/20", "x"], "nodes": [{"publicKey": "k", "wireguardIPs": ["y"]}]});
        let access = ParsedAccess::new(object(odd).unwrap()).access;
        assert_eq!(
            access.networks[0],
            Err("100.80.0.1/20 has host bits: write 100.80.0.0/20".to_owned())
        );
        assert!(
            access.networks[1].is_err() && access.nodes[0].public_key.is_err() && access.nodes[0].addresses[0].is_err()
        );
    }

    #[test]
    fn endpoints_are_read_as_by_kube_proxy_and_mirrors_ignored() {
        let slice = |labels, conditions| {
            let object = json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {"name": "db-1", "labels": labels}, "ports": [{"name": "sql", "port": 5432}, {"name": "none"}],
                "endpoints": [{"addresses": ["10.1.0.5", "10.1.0.6"], "conditions": conditions}, {"addresses": []}],
            });
            ParsedSlice::new(serde_json::from_value(object).unwrap())
        };
        let plain = json!({LABEL_SERVICE_NAME: "db"});
        let endpoints_of = |seen: ParsedSlice| {
            seen.endpoints
                .into_iter()
                .map(|e| (e.address.to_string(), e.ready, e.serving))
                .collect::<Vec<_>>()
        };
        let seen = slice(plain.clone(), json!({}));
        assert_eq!(seen.service, "db");
        assert_eq!(endpoints_of(seen), [("10.1.0.5".to_owned(), true, true)]);
        let terminating = slice(
            plain.clone(),
            json!({"ready": false, "serving": true, "terminating": true}),
        );
        assert_eq!(endpoints_of(terminating), [("10.1.0.5".to_owned(), false, true)]);
        let unready = slice(plain, json!({"ready": false}));
        assert_eq!(endpoints_of(unready), [("10.1.0.5".to_owned(), false, false)]);
        let mirrored = slice(
            json!({LABEL_SERVICE_NAME: "db", LABEL_MANAGED_BY: MANAGED_BY}),
            json!({}),
        );
        assert_eq!(endpoints_of(mirrored), []);
    }
}
