//! Converts [`SandboxAccess`] to and from core's `AccessSpec`, and [`SandboxGateway`] to core's `Gateway`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use clustermesh_core::{
    key::PublicKey,
    mesh::{ObjectName, Protocol},
    observe::{AccessNode, AccessSpec, Gateway, GrantedPort, ObservedAccess, Owner},
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::{owner, parse_network, set_labels};
use crate::sandbox::{
    LocalService, SandboxAccess, SandboxAccessSpec, SandboxGateway, SandboxGatewayStatus, SandboxGrant, SandboxNode,
};

/// Converts an observed SandboxAccess. If a network, key or address is invalid or `newConnectionsPerSecond` is set, the field `spec` of
/// the result is an error, and the controller rewrites the object.
#[must_use]
pub fn to_core(access: &SandboxAccess) -> ObservedAccess {
    ObservedAccess {
        owner: owner(access.metadata.labels.as_ref()),
        generation: access.metadata.generation.unwrap_or_default(),
        spec: spec_to_core(&access.spec),
    }
}

fn spec_to_core(written: &SandboxAccessSpec) -> Result<AccessSpec, String> {
    let mut networks = BTreeSet::new();
    for (index, text) in written.networks.iter().enumerate() {
        match parse_network(text) {
            Ok((net, false)) => drop(networks.insert(net)),
            Ok((net, true)) => return Err(format!("spec.networks[{index}]: {text} has host bits: write {net}")),
            Err(why) => return Err(format!("spec.networks[{index}]: {why}")),
        }
    }
    let mut nodes = BTreeMap::new();
    for (index, node) in written.nodes.iter().enumerate() {
        let key: PublicKey = node
            .public_key
            .parse()
            .map_err(|error| format!("spec.nodes[{index}].publicKey: {error}"))?;
        let seen = AccessNode {
            name: node.name.clone(),
            addresses: parse_addresses(&node.wireguard_ips)
                .map_err(|why| format!("spec.nodes[{index}].wireguardIPs: {why}"))?,
        };
        nodes.insert(key, seen);
    }
    if written.new_connections_per_second.is_some() {
        return Err("spec.newConnectionsPerSecond: must be empty: use the gateway flag --sandbox-new-flows".to_owned());
    }
    let grants = written.grants.iter().map(|grant| {
        let granted = GrantedPort {
            service: ObjectName {
                namespace: grant.service.namespace.clone(),
                name: grant.service.name.clone(),
            },
            port: grant.port.clone(),
        };
        ((grant.protocol, grant.gateway_port), granted)
    });
    Ok(AccessSpec {
        sandbox: written.sandbox.clone(),
        id: written.sandbox_id.clone(),
        networks,
        nodes,
        grants: grants.collect(),
    })
}

fn parse_addresses(texts: &[String]) -> Result<BTreeSet<IpAddr>, String> {
    let parse = |text: &String| {
        let address = text
            .parse::<IpAddr>()
            .map_err(|_| format!("{text:?} is not an address"));
        address.map(|ip| ip.to_canonical())
    };
    texts.iter().map(parse).collect()
}

/// Parses the WireGuard addresses of a gateway. More than one of a family is an error: only a compromised gateway publishes more.
fn parse_gateway_addresses(texts: &[String]) -> Result<BTreeSet<IpAddr>, String> {
    let addresses = parse_addresses(texts)?;
    let families: BTreeSet<bool> = addresses.iter().map(IpAddr::is_ipv4).collect();
    if families.len() < addresses.len() {
        return Err("more than one address of a family".to_owned());
    }
    Ok(addresses)
}

/// Sets the spec and the labels of `owner` in a SandboxAccess (a new one, or an existing one). The other metadata stays.
pub fn update(access: &mut SandboxAccess, spec: &AccessSpec, owner: &Owner) {
    set_labels(access.labels_mut(), owner);
    let nodes = spec.nodes.iter().map(|(key, node)| SandboxNode {
        name: node.name.clone(),
        public_key: key.to_string(),
        wireguard_ips: node.addresses.iter().map(ToString::to_string).collect(),
    });
    let grants = spec.grants.iter().map(|((protocol, port), granted)| SandboxGrant {
        service: LocalService {
            namespace: granted.service.namespace.clone(),
            name: granted.service.name.clone(),
        },
        port: granted.port.clone(),
        protocol: *protocol,
        gateway_port: *port,
    });
    access.spec = SandboxAccessSpec {
        sandbox: spec.sandbox.clone(),
        sandbox_id: spec.id.clone(),
        networks: spec.networks.iter().map(ToString::to_string).collect(),
        nodes: nodes.collect(),
        grants: grants.collect(),
        new_connections_per_second: None,
    };
}

/// Converts the status of a gateway. Returns the gateway and the UID of the pod that wrote the status; the caller sets `exists` and
/// `ready` from that pod. `None` = no status is published yet. In `refused`, only entries that name a grant are converted.
///
/// # Errors
/// A field of the status is invalid.
pub fn gateway_to_core(gateway: &SandboxGateway) -> Result<Option<(Gateway, String)>, String> {
    let Some(status) = gateway.status.as_ref().filter(|status| !status.public_key.is_empty()) else {
        return Ok(None);
    };
    let SandboxGatewayStatus {
        public_key,
        wireguard_ips,
        endpoints,
        pod_uid,
        serves,
        applied,
        refused,
        ..
    } = status;
    let refused = refused.iter().filter_map(|refused| {
        let (protocol, port) = refused.grant.split_once('/')?;
        let mut protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].into_iter();
        let protocol = protocols.find(|known| known.as_str() == protocol)?;
        let message = format!("{}: {}", refused.reason, refused.message);
        Some(((refused.name.clone(), protocol, port.parse().ok()?), message))
    });
    let key = public_key
        .parse()
        .map_err(|error| format!("status.publicKey: {error}"))?;
    let endpoints = endpoints.iter().map(|text| {
        let endpoint = text.parse();
        endpoint.map_err(|_| format!("status.endpoints: {text:?} is not an address with a port"))
    });
    let gateway = Gateway {
        public_key: key,
        addresses: parse_gateway_addresses(wireguard_ips).map_err(|why| format!("status.wireguardIPs: {why}"))?,
        endpoints: endpoints.collect::<Result<_, _>>()?,
        serves: serves.iter().cloned().collect(),
        ready: false,
        exists: false,
        applied: applied
            .iter()
            .map(|access| (access.name.clone(), access.generation))
            .collect(),
        refused: refused.collect(),
    };
    Ok(Some((gateway, pod_uid.clone())))
}

/// The UID of a gateway's pod, and whether the pod accepts connections: it is Ready and is not being deleted.
#[must_use]
pub fn gateway_pod(pod: &Pod) -> (String, bool) {
    let conditions = pod
        .status
        .iter()
        .filter_map(|status| status.conditions.as_ref())
        .flatten();
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready" && condition.status == "True");
    let is_accepting = pod.metadata.deletion_timestamp.is_none() && ready.next().is_some();
    (pod.metadata.uid.clone().unwrap_or_default(), is_accepting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::RefusedAccess;

    #[test]
    fn planned_access_is_written_and_read_back() {
        let key = |number: u8| PublicKey::new([number; 32]);
        let node = |name: &str, address: &str| AccessNode {
            name: name.into(),
            addresses: [address.parse().unwrap()].into(),
        };
        let granted = GrantedPort {
            service: ObjectName {
                namespace: "team".into(),
                name: "db".into(),
            },
            port: "pg".into(),
        };
        let spec = AccessSpec {
            sandbox: "nb".into(),
            id: "0123".into(),
            networks: ["100.80.0.0/20".parse().unwrap(), "fd80::/64".parse().unwrap()].into(),
            nodes: [(key(1), node("a", "100.80.0.1")), (key(2), node("b", "fd80::2"))].into(),
            grants: [((Protocol::Udp, 20_001), granted)].into(),
        };
        let owner = Owner {
            mesh: Some("m".into()),
            mesh_namespace: Some("ns".into()),
            hub: Some("hub".into()),
            source_cluster: Some("nb".into()),
        };
        let mut access = SandboxAccess::new("m--nb", SandboxAccessSpec::default());
        update(&mut access, &spec, &owner);
        let seen = to_core(&access);
        assert_eq!((seen.owner, seen.spec), (owner, Ok(spec)));
    }

    #[test]
    fn invalid_access_is_an_error_that_names_the_field() {
        let wrong = |change: fn(&mut SandboxAccessSpec)| {
            let mut written = SandboxAccessSpec {
                networks: vec!["100.80.0.0/20".into()],
                nodes: vec![SandboxNode {
                    public_key: PublicKey::new([1; 32]).to_string(),
                    wireguard_ips: vec!["100.80.0.1".into()],
                    ..SandboxNode::default()
                }],
                ..SandboxAccessSpec::default()
            };
            change(&mut written);
            spec_to_core(&written).unwrap_err()
        };
        let cases = [
            (wrong(|s| s.networks[0] = "x".into()), "spec.networks[0]: "),
            (wrong(|s| s.networks[0] = "100.80.0.1/20".into()), "spec.networks[0]: "),
            (
                wrong(|s| s.nodes[0].public_key = "x".into()),
                "spec.nodes[0].publicKey: ",
            ),
            (
                wrong(|s| s.nodes[0].wireguard_ips[0] = "x".into()),
                "spec.nodes[0].wireguardIPs: ",
            ),
            (
                wrong(|s| s.new_connections_per_second = Some(1)),
                "spec.newConnectionsPerSecond: ",
            ),
        ];
        for (error, field) in cases {
            assert!(error.starts_with(field), "{error}");
        }
    }

    #[test]
    fn gateway_status_is_converted_only_if_published_and_valid() {
        let mut gateway = SandboxGateway::new("g-0", Default::default());
        assert_eq!(gateway_to_core(&gateway), Ok(None));
        let status = SandboxGatewayStatus {
            public_key: PublicKey::new([1; 32]).to_string(),
            wireguard_ips: vec!["100.66.255.1".into()],
            endpoints: vec!["192.0.2.1:51821".into()],
            pod_uid: "u".into(),
            refused: [
                ("UDP/20001", "m--a"),
                ("", "m--a"),
                ("QUIC/1", "m--a"),
                ("TCP/x", "m--a"),
            ]
            .map(|(grant, name)| RefusedAccess {
                name: name.into(),
                grant: grant.into(),
                reason: "ServiceMissing".into(),
                message: "there is none".into(),
                ..RefusedAccess::default()
            })
            .into(),
            ..SandboxGatewayStatus::default()
        };
        gateway.status = Some(status);
        let (seen, pod) = gateway_to_core(&gateway).unwrap().unwrap();
        assert_eq!((pod.as_str(), seen.endpoints.len(), seen.ready), ("u", 1, false));
        let refused = [(
            ("m--a".to_owned(), Protocol::Udp, 20_001),
            "ServiceMissing: there is none".to_owned(),
        )];
        assert_eq!(seen.refused, refused.into());
        gateway.status.as_mut().unwrap().endpoints[0] = "x".into();
        assert!(gateway_to_core(&gateway).unwrap_err().starts_with("status.endpoints: "));
        gateway.status.as_mut().unwrap().wireguard_ips.push("10.0.0.1".into());
        let error = "status.wireguardIPs: more than one address of a family";
        assert_eq!(gateway_to_core(&gateway).unwrap_err(), error);
    }
}
