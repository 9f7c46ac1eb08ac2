//! Everything that a cluster answers at, as its objects say: pods, endpoints, Services, nodes, API server. Whether it may be
//! reached is not known here.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::{ObjectName, Protocol},
    observe::{AccessSpec, Claim, Gateway},
    plan::{
        Settings,
        explain::{self, Backend},
    },
};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Pod, Service};

use crate::world::Seen;

/// Beside the infrastructure ports, tried on every address of a node.
const SSH: u16 = 22;

/// One address and port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Socket {
    /// What it is, in words.
    pub(super) what: String,
    /// On which Node.
    pub(super) node: Option<String>,
    /// Something should answer there, as Kubernetes says.
    pub(super) serving: bool,
    /// Who answers in its place: it is translated, and lets in what one of these lets in.
    pub(super) backends: BTreeSet<Backend>,
    /// It is asked for under an address of the cluster that asks.
    pub(super) mirror: bool,
}

/// By address and port; TCP.
pub(super) type Sockets = BTreeMap<SocketAddr, Socket>;

/// Addresses as they are compared; text of objects.
fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

#[derive(Default)]
struct Found(Sockets);

impl Found {
    /// What was found first names it; what should answer by any word should answer.
    fn add(&mut self, address: IpAddr, port: u16, socket: Socket) {
        if port == 0 || address.is_unspecified() {
            return;
        }
        let held = self.0.entry(SocketAddr::new(address, port)).or_insert_with(|| Socket {
            serving: false,
            ..socket.clone()
        });
        held.serving |= socket.serving;
    }
}

/// All of one cluster. `planned` = the SandboxAccesses that should be there.
pub(super) fn of(seen: &Seen, settings: &Settings, planned: &[&AccessSpec]) -> Sockets {
    let mut found = Found::default();
    for (name, pod) in &seen.objects.pods {
        of_pod(&mut found, name, pod);
    }
    let member = &seen.member;
    for slice in member.slices.iter().filter(|(_, slice)| slice.managed.is_none()) {
        let (name, slice) = slice;
        for endpoint in &slice.endpoints {
            for port in slice.ports.iter().filter(|port| port.protocol == Protocol::Tcp) {
                let socket = Socket {
                    what: format!("endpoint of Service {}/{}", name.namespace, slice.service),
                    node: endpoint.node.clone(),
                    serving: endpoint.ready && !endpoint.terminating,
                    ..Socket::default()
                };
                found.add(endpoint.address.to_canonical(), port.port, socket);
            }
        }
    }
    for api in &member.api_endpoints {
        let socket = Socket {
            what: "the API server".to_owned(),
            ..Socket::default()
        };
        found.add(api.ip().to_canonical(), api.port(), socket);
    }
    let nodes: Vec<(String, IpAddr)> = seen
        .objects
        .nodes
        .keys()
        .flat_map(|name| {
            node_addresses(seen, name)
                .into_iter()
                .map(move |address| (name.clone(), address))
        })
        .collect();
    for (name, service) in &seen.objects.services {
        of_service(&mut found, seen, name, service, &nodes);
    }
    let infrastructure = settings.infrastructure_ports.iter();
    // TCP alone is tried.
    let infrastructure = infrastructure.filter(|(protocol, _)| *protocol == Protocol::Tcp);
    let ports: BTreeSet<u16> = infrastructure.map(|(_, port)| *port).chain([SSH]).collect();
    for (node, address) in &nodes {
        for port in &ports {
            let socket = Socket {
                what: format!("Node {node}"),
                node: Some(node.clone()),
                ..Socket::default()
            };
            found.add(*address, *port, socket);
        }
    }
    of_gateways(&mut found, seen, planned, &ports);
    found.0
}

/// Gateways at their addresses inside the tunnel. A grant that was taken back may still be open, so SandboxAccesses are read as
/// they are in the cluster, too.
fn of_gateways(found: &mut Found, seen: &Seen, planned: &[&AccessSpec], closed: &BTreeSet<u16>) {
    let member = &seen.member;
    let present = member.accesses.iter().flat_map(BTreeMap::values);
    let present = present.filter_map(|access| access.spec.as_ref().ok());
    let grants = present.chain(planned.iter().copied()).flat_map(|access| &access.grants);
    let grants = grants.filter(|((protocol, _), _)| *protocol == Protocol::Tcp);
    let grants: Vec<_> = grants.map(|((_, port), granted)| (*port, granted)).collect();
    for (name, gateway) in &member.gateways {
        let pod = seen.objects.pods.get(name);
        let node = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
        let socket = |what: String, serving: bool| Socket {
            what,
            node: node.clone(),
            serving,
            ..Socket::default()
        };
        for address in gateway.addresses.iter().map(IpAddr::to_canonical) {
            for (port, granted) in &grants {
                let served = explain::backends(member, &granted.service, None);
                let serving = gateway.ready && served.iter().any(|backend| backend.ready);
                let what = format!("gateway {name} for Service {}", granted.service);
                found.add(address, *port, socket(what, serving));
            }
            for port in closed {
                found.add(address, *port, socket(format!("gateway {name}"), false));
            }
        }
    }
}

/// Every address that a Node says is its own.
fn node_addresses(seen: &Seen, name: &str) -> BTreeSet<IpAddr> {
    let raw = seen.objects.nodes.get(name);
    let said = raw.into_iter().flat_map(|node: &Node| {
        let status = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        status.into_iter().flatten().filter_map(|one| address(&one.address))
    });
    let wireguard = seen.member.nodes.get(name).and_then(|node| match &node.wireguard_ip {
        Claim::Valid(net) => Some(net.addr()),
        _ => None,
    });
    said.chain(wireguard).collect()
}

fn of_pod(found: &mut Found, name: &ObjectName, pod: &Pod) {
    let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else {
        return;
    };
    if status.phase.as_deref() != Some("Running") {
        return;
    }
    let conditions = status.conditions.iter().flatten();
    let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    let addresses: Vec<IpAddr> = status
        .pod_ips
        .iter()
        .flatten()
        .filter_map(|ip| address(&ip.ip))
        .collect();
    let ports = spec
        .containers
        .iter()
        .flat_map(|container| container.ports.iter().flatten());
    for port in ports.filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP") {
        for address in &addresses {
            let socket = Socket {
                what: format!("pod {name}"),
                node: spec.node_name.clone(),
                // A declared port says that one is meant to listen, not on which address: of a host's, some do on the
                // loopback alone.
                serving: ready && spec.host_network != Some(true),
                ..Socket::default()
            };
            found.add(*address, u16::try_from(port.container_port).unwrap_or(0), socket);
        }
    }
}

fn of_service(found: &mut Found, seen: &Seen, name: &ObjectName, service: &Service, nodes: &[(String, IpAddr)]) {
    let Some(spec) = &service.spec else { return };
    let local = [&spec.external_traffic_policy, &spec.internal_traffic_policy]
        .iter()
        .any(|policy| policy.as_deref() == Some("Local"));
    let cluster_ips = cluster_ips(service);
    let ingress = service.status.iter().filter_map(|status| status.load_balancer.as_ref());
    let ingress = ingress.flat_map(|status| status.ingress.iter().flatten());
    let outside: Vec<IpAddr> = ingress
        .filter_map(|at| at.ip.as_deref())
        .chain(spec.external_ips.iter().flatten().map(String::as_str))
        .filter_map(address)
        .collect();
    for port in spec
        .ports
        .iter()
        .flatten()
        .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
    {
        let Ok(number) = u16::try_from(port.port) else { continue };
        let backends = explain::backends(&seen.member, name, Some((Protocol::Tcp, number)));
        // Of a member that it is mirrored from, the endpoints are not here to be looked at.
        let mirrored = seen
            .member
            .services
            .get(name)
            .is_some_and(|service| service.managed.is_some());
        let backends = if mirrored { BTreeSet::new() } else { backends };
        let of_family = |at: &IpAddr| -> BTreeSet<Backend> {
            let same = backends
                .iter()
                .filter(|backend| backend.address.is_ipv4() == at.is_ipv4());
            same.cloned().collect()
        };
        let socket = |words: &str, at: &IpAddr, node: Option<String>| {
            let backends = of_family(at);
            Socket {
                what: format!("{words} of Service {name}"),
                node,
                serving: backends.iter().any(|backend| backend.ready) && !local,
                backends,
                mirror: false,
            }
        };
        for at in &cluster_ips {
            found.add(*at, number, socket("ClusterIP", at, None));
        }
        for at in &outside {
            // Who announces such an address, and to whom, is not the cluster's to say.
            let quiet = Socket {
                serving: false,
                ..socket("load-balancer address", at, None)
            };
            found.add(*at, number, quiet);
        }
        let Some(node_port) = port.node_port.and_then(|port| u16::try_from(port).ok()) else {
            continue;
        };
        for (node, at) in nodes {
            // On which of a node's addresses it is served is kube-proxy's configuration.
            let quiet = Socket {
                serving: false,
                ..socket("NodePort", at, Some(node.clone()))
            };
            found.add(*at, node_port, quiet);
        }
    }
}

fn cluster_ips(service: &Service) -> BTreeSet<IpAddr> {
    let spec = service.spec.iter();
    let texts = spec.flat_map(|spec| spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten()));
    texts.filter_map(|text| address(text)).collect()
}

/// The ports of gateways that lead to one port of a Service.
fn at_gateways(
    to: &Seen,
    sandbox: &str,
    planned: &[&AccessSpec],
    service: &ObjectName,
    port: u16,
) -> BTreeSet<Backend> {
    let member = &to.member;
    let key = (Protocol::Tcp, port);
    let ports = member.services.get(service).map_or(&[][..], |service| &service.ports);
    let names = ports.iter().filter(|own| (own.protocol, own.port) == key);
    let names: BTreeSet<&str> = names.map(|own| &*own.name).collect();
    let served = explain::backends(member, service, Some(key));
    let served = served.iter().any(|backend| backend.ready);
    let accesses = planned.iter().filter(|access| access.sandbox == sandbox);
    let grants = accesses.flat_map(|access| &access.grants);
    let grants = grants
        .filter(|(at, granted)| at.0 == Protocol::Tcp && granted.service == *service && names.contains(&*granted.port));
    let serving = |gateway: &&Gateway| gateway.serves(sandbox);
    let at = |(port, _): (&(Protocol, u16), _)| {
        let gateways = member.gateways.values().filter(serving);
        let addresses =
            gateways.flat_map(|gateway| gateway.addresses.iter().map(|at| (at.to_canonical(), gateway.ready)));
        let backends = addresses.map(|(address, ready)| Backend {
            address,
            node: None,
            port: *port,
            ready: ready && served,
        });
        backends.collect::<Vec<_>>()
    };
    grants.flat_map(at).collect()
}

/// The Service in the cluster which asks, for one of the cluster that answers. `sandbox` = the name of the cluster which asks, and
/// the SandboxAccesses planned in the other, where it enters through gateways.
pub(super) fn mirror(
    from: &Seen,
    to: &Seen,
    local: &ObjectName,
    remote: &ObjectName,
    sandbox: Option<(&str, &[&AccessSpec])>,
) -> Sockets {
    let mut found = Found::default();
    let ours = from
        .member
        .services
        .get(local)
        .is_some_and(|service| service.managed.is_some());
    let Some(service) = from.objects.services.get(local).filter(|_| ours) else {
        return found.0;
    };
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    for port in ports.filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP") {
        let Ok(number) = u16::try_from(port.port) else { continue };
        let backends = match sandbox {
            Some((name, planned)) => at_gateways(to, name, planned, remote, number),
            None => explain::backends(&to.member, remote, Some((Protocol::Tcp, number))),
        };
        for at in cluster_ips(service) {
            let backends: BTreeSet<Backend> = backends
                .iter()
                .filter(|backend| backend.address.is_ipv4() == at.is_ipv4())
                .cloned()
                .collect();
            let socket = Socket {
                what: format!("mirrored Service {local} of {remote}"),
                node: None,
                serving: backends.iter().any(|backend| backend.ready),
                backends,
                mirror: true,
            };
            found.add(at, number, socket);
        }
    }
    found.0
}

/// What means something of a cluster's own, when it is asked for there.
pub(super) struct Own {
    addresses: BTreeSet<IpAddr>,
    sockets: BTreeSet<SocketAddr>,
    networks: Vec<IpNet>,
}

impl Own {
    /// `networks` = its own in the mesh; `allowed` = what the operator lets its nodes reach beside it.
    pub(super) fn of(seen: &Seen, mut networks: Vec<IpNet>, allowed: &[Allowed]) -> Self {
        let mut addresses: BTreeSet<IpAddr> = BTreeSet::new();
        for name in seen.objects.nodes.keys() {
            addresses.extend(node_addresses(seen, name));
        }
        for pod in seen.objects.pods.values().filter_map(|pod| pod.status.as_ref()) {
            addresses.extend(pod.pod_ips.iter().flatten().filter_map(|ip| address(&ip.ip)));
        }
        addresses.extend(seen.objects.services.values().flat_map(cluster_ips));
        let nodes = seen.member.nodes.values();
        networks.extend(nodes.flat_map(|node| node.pod_cidrs.iter().filter_map(|claim| claim.value().copied())));
        let mut sockets = seen.member.api_endpoints.clone();
        for Allowed { address, port } in allowed {
            match port {
                Some(port) => drop(sockets.insert(SocketAddr::new(*address, *port))),
                None => drop(addresses.insert(*address)),
            }
        }
        Self {
            addresses,
            sockets,
            networks,
        }
    }

    pub(super) fn means_itself(&self, socket: SocketAddr) -> bool {
        self.addresses.contains(&socket.ip())
            || self.sockets.contains(&socket)
            || self.networks.iter().any(|net| net.contains(&socket.ip()))
    }
}

/// `--underlay-allows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allowed {
    address: IpAddr,
    /// `None` = every one.
    port: Option<u16>,
}

impl std::str::FromStr for Allowed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self { address, port: None });
        }
        let socket: SocketAddr = text
            .parse()
            .map_err(|_| "write ADDRESS or ADDRESS:PORT, as 10.96.0.10:53 or [fd00::10]:53".to_owned())?;
        Ok(Self {
            address: socket.ip(),
            port: Some(socket.port()),
        })
    }
}
