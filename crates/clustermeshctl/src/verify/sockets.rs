//! Collects the addresses and TCP ports that are probed in one cluster. They come from the cluster's objects: pods, endpoints,
//! Services, Nodes, gateways and API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::{ObjectName, Protocol},
    observe::{AccessSpec, Claim, Gateway},
    plan::Settings,
};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Pod, Service};

use crate::{
    explanation::{Backend, backends},
    inputs::ReadCluster,
};

/// Probed on every address of a node or gateway, in addition to the infrastructure ports.
const SSH_PORT: u16 = 22;

/// A socket to probe. Its address and port are the key in [`Sockets`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Socket {
    pub(super) description: String,
    /// The Node that has the address, or on which the pod with the address runs.
    pub(super) node: Option<String>,
    /// Whether the socket should answer, according to the objects.
    pub(super) should_answer: bool,
    /// The endpoints to which kube-proxy translates the address of a Service. `classify::combine` combines their verdicts.
    pub(super) backends: BTreeSet<Backend>,
    /// Whether it is the ClusterIP of a mirrored Service in the probing cluster ([`collect_mirrored`]).
    pub(super) is_local_mirror: bool,
}

/// By address and TCP port.
pub(super) type Sockets = BTreeMap<SocketAddr, Socket>;

fn parse_address(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

#[derive(Default)]
struct Collector(Sockets);

impl Collector {
    /// Adds a socket, except at port 0 or at an unspecified address. The first socket at an address and port stays. It should answer if
    /// any socket added there should.
    fn add(&mut self, address: IpAddr, port: u16, socket: Socket) {
        if port == 0 || address.is_unspecified() {
            return;
        }
        let existing = self.0.entry(SocketAddr::new(address, port)).or_insert_with(|| Socket {
            should_answer: false,
            ..socket.clone()
        });
        existing.should_answer |= socket.should_answer;
    }
}

/// Collects the sockets of one cluster. `planned` are the SandboxAccesses that should exist there.
pub(super) fn collect(read: &ReadCluster, settings: &Settings, planned: &[&AccessSpec]) -> Sockets {
    let mut sockets = Collector::default();
    for (name, pod) in &read.objects.pods {
        add_pod(&mut sockets, name, pod);
    }
    let member = &read.member;
    for slice in member.slices.iter().filter(|(_, slice)| slice.managed.is_none()) {
        let (name, slice) = slice;
        for endpoint in &slice.endpoints {
            for port in slice.ports.iter().filter(|port| port.protocol == Protocol::Tcp) {
                let socket = Socket {
                    description: format!("endpoint of Service {}/{}", name.namespace, slice.service),
                    node: endpoint.node.clone(),
                    should_answer: endpoint.ready && !endpoint.terminating,
                    ..Socket::default()
                };
                sockets.add(endpoint.address.to_canonical(), port.port, socket);
            }
        }
    }
    for api in &member.api_endpoints {
        let socket = Socket {
            description: "the API server".to_owned(),
            ..Socket::default()
        };
        sockets.add(api.ip().to_canonical(), api.port(), socket);
    }
    let nodes: Vec<(String, IpAddr)> = read
        .objects
        .nodes
        .keys()
        .flat_map(|name| {
            node_addresses(read, name)
                .into_iter()
                .map(move |address| (name.clone(), address))
        })
        .collect();
    for (name, service) in &read.objects.services {
        add_service(&mut sockets, read, name, service, &nodes);
    }
    let infrastructure = settings.infrastructure_ports.iter();
    let infrastructure = infrastructure.filter(|(protocol, _)| *protocol == Protocol::Tcp);
    let ports: BTreeSet<u16> = infrastructure.map(|(_, port)| *port).chain([SSH_PORT]).collect();
    for (node, address) in &nodes {
        for port in &ports {
            let socket = Socket {
                description: format!("Node {node}"),
                node: Some(node.clone()),
                ..Socket::default()
            };
            sockets.add(*address, *port, socket);
        }
    }
    add_gateways(&mut sockets, read, planned, &ports);
    sockets.0
}

/// Adds gateways at their WireGuard addresses, with the ports of all grants and with the ports in `closed_ports`, at which no gateway
/// should answer. A revoked grant may still be open, so the grants of existing SandboxAccesses are added, too.
fn add_gateways(sockets: &mut Collector, read: &ReadCluster, planned: &[&AccessSpec], closed_ports: &BTreeSet<u16>) {
    let member = &read.member;
    let existing = member.accesses.iter().flat_map(BTreeMap::values);
    let existing = existing.filter_map(|access| access.spec.as_ref().ok());
    let grants = existing
        .chain(planned.iter().copied())
        .flat_map(|access| &access.grants);
    let grants = grants.filter(|((protocol, _), _)| *protocol == Protocol::Tcp);
    let grants: Vec<_> = grants.map(|((_, port), granted)| (*port, granted)).collect();
    for (name, gateway) in &member.gateways {
        let pod = read.objects.pods.get(name);
        let node = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
        let socket = |description: String, should_answer: bool| Socket {
            description,
            node: node.clone(),
            should_answer,
            ..Socket::default()
        };
        for address in gateway.addresses.iter().map(IpAddr::to_canonical) {
            for (port, granted) in &grants {
                let backends = backends(member, &granted.service, None);
                let should_answer = gateway.ready && backends.iter().any(|backend| backend.ready);
                let description = format!("gateway {name} for Service {}", granted.service);
                sockets.add(address, *port, socket(description, should_answer));
            }
            for port in closed_ports {
                sockets.add(address, *port, socket(format!("gateway {name}"), false));
            }
        }
    }
}

/// Returns the addresses in a Node's status, and its WireGuard address.
fn node_addresses(read: &ReadCluster, name: &str) -> BTreeSet<IpAddr> {
    let raw = read.objects.nodes.get(name);
    let addresses = raw.into_iter().flat_map(|node: &Node| {
        let status = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        status
            .into_iter()
            .flatten()
            .filter_map(|entry| parse_address(&entry.address))
    });
    let wireguard = read.member.nodes.get(name).and_then(|node| match &node.wireguard_ip {
        Claim::Valid(net) => Some(net.addr()),
        _ => None,
    });
    addresses.chain(wireguard).collect()
}

/// Adds the declared ports of a running pod.
fn add_pod(sockets: &mut Collector, name: &ObjectName, pod: &Pod) {
    let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else {
        return;
    };
    if status.phase.as_deref() != Some("Running") {
        return;
    }
    let conditions = status.conditions.iter().flatten();
    let is_ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    let addresses: Vec<IpAddr> = status
        .pod_ips
        .iter()
        .flatten()
        .filter_map(|ip| parse_address(&ip.ip))
        .collect();
    let ports = spec
        .containers
        .iter()
        .flat_map(|container| container.ports.iter().flatten());
    for port in ports.filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP") {
        for address in &addresses {
            let socket = Socket {
                description: format!("pod {name}"),
                node: spec.node_name.clone(),
                // A declared port does not show the address at which a process listens. In the host network it may be only the
                // loopback address.
                should_answer: is_ready && spec.host_network != Some(true),
                ..Socket::default()
            };
            sockets.add(*address, u16::try_from(port.container_port).unwrap_or(0), socket);
        }
    }
}

/// Adds the ClusterIPs, NodePorts and load balancer addresses of a Service.
fn add_service(
    sockets: &mut Collector,
    read: &ReadCluster,
    name: &ObjectName,
    service: &Service,
    nodes: &[(String, IpAddr)],
) {
    let Some(spec) = &service.spec else { return };
    // With a `Local` traffic policy only nodes with an endpoint answer, so the Service does not have to answer every probe.
    let has_local_policy = [&spec.external_traffic_policy, &spec.internal_traffic_policy]
        .iter()
        .any(|policy| policy.as_deref() == Some("Local"));
    let cluster_ips = cluster_ips(service);
    let ingress = service.status.iter().filter_map(|status| status.load_balancer.as_ref());
    let ingress = ingress.flat_map(|status| status.ingress.iter().flatten());
    let load_balancer_addresses: Vec<IpAddr> = ingress
        .filter_map(|entry| entry.ip.as_deref())
        .chain(spec.external_ips.iter().flatten().map(String::as_str))
        .filter_map(parse_address)
        .collect();
    for port in spec
        .ports
        .iter()
        .flatten()
        .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
    {
        let Ok(number) = u16::try_from(port.port) else { continue };
        let backends = backends(&read.member, name, Some((Protocol::Tcp, number)));
        // The endpoints of a mirrored Service are in another cluster, whose objects only `collect_mirrored` has.
        let is_mirrored = read
            .member
            .services
            .get(name)
            .is_some_and(|service| service.managed.is_some());
        let backends = if is_mirrored { BTreeSet::new() } else { backends };
        let backends_of_family = |address: &IpAddr| -> BTreeSet<Backend> {
            let same = backends
                .iter()
                .filter(|backend| backend.address.is_ipv4() == address.is_ipv4());
            same.cloned().collect()
        };
        let socket = |kind: &str, address: &IpAddr, node: Option<String>| {
            let backends = backends_of_family(address);
            Socket {
                description: format!("{kind} of Service {name}"),
                node,
                should_answer: backends.iter().any(|backend| backend.ready) && !has_local_policy,
                backends,
                is_local_mirror: false,
            }
        };
        for address in &cluster_ips {
            sockets.add(*address, number, socket("ClusterIP", address, None));
        }
        for address in &load_balancer_addresses {
            // The objects do not show which clients can reach a load balancer.
            let may_be_silent = Socket {
                should_answer: false,
                ..socket("load-balancer address", address, None)
            };
            sockets.add(*address, number, may_be_silent);
        }
        let Some(node_port) = port.node_port.and_then(|port| u16::try_from(port).ok()) else {
            continue;
        };
        for (node, address) in nodes {
            // kube-proxy's configuration (`nodePortAddresses`) decides which addresses of a node serve NodePorts.
            let may_be_silent = Socket {
                should_answer: false,
                ..socket("NodePort", address, Some(node.clone()))
            };
            sockets.add(*address, node_port, may_be_silent);
        }
    }
}

fn cluster_ips(service: &Service) -> BTreeSet<IpAddr> {
    let spec = service.spec.iter();
    let texts = spec.flat_map(|spec| spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten()));
    texts.filter_map(|text| parse_address(text)).collect()
}

/// Returns the addresses and ports of gateways at which a sandbox reaches one port of a Service.
fn gateway_backends(
    to: &ReadCluster,
    sandbox: &str,
    planned: &[&AccessSpec],
    service: &ObjectName,
    port: u16,
) -> BTreeSet<Backend> {
    let member = &to.member;
    let key = (Protocol::Tcp, port);
    let ports = member.services.get(service).map_or(&[][..], |service| &service.ports);
    let named = ports.iter().filter(|own| (own.protocol, own.port) == key);
    let port_names: BTreeSet<&str> = named.map(|own| &*own.name).collect();
    let backends = backends(member, service, Some(key));
    let is_service_ready = backends.iter().any(|backend| backend.ready);
    let accesses = planned.iter().filter(|access| access.sandbox == sandbox);
    let grants = accesses.flat_map(|access| &access.grants);
    let grants = grants.filter(|((protocol, _), granted)| {
        *protocol == Protocol::Tcp && granted.service == *service && port_names.contains(&*granted.port)
    });
    let serves_sandbox = |gateway: &&Gateway| gateway.serves(sandbox);
    let backends_at_gateway_port = |(gateway_port, _): (&(Protocol, u16), _)| {
        let gateways = member.gateways.values().filter(serves_sandbox);
        let addresses =
            gateways.flat_map(|gateway| gateway.addresses.iter().map(|ip| (ip.to_canonical(), gateway.ready)));
        let backends = addresses.map(|(address, ready)| Backend {
            address,
            node: None,
            port: *gateway_port,
            ready: ready && is_service_ready,
        });
        backends.collect::<Vec<_>>()
    };
    grants.flat_map(backends_at_gateway_port).collect()
}

/// Returns the sockets of the mirrored Service `local` in the probing cluster `from`. Its original is the Service `remote` in `to`.
///
/// `sandbox` is set if `from` is a sandbox that reaches `to` through gateways: its name, and the SandboxAccesses planned in `to`.
pub(super) fn collect_mirrored(
    from: &ReadCluster,
    to: &ReadCluster,
    local: &ObjectName,
    remote: &ObjectName,
    sandbox: Option<(&str, &[&AccessSpec])>,
) -> Sockets {
    let mut sockets = Collector::default();
    let is_mirrored = from
        .member
        .services
        .get(local)
        .is_some_and(|service| service.managed.is_some());
    let Some(service) = from.objects.services.get(local).filter(|_| is_mirrored) else {
        return sockets.0;
    };
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    for port in ports.filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP") {
        let Ok(number) = u16::try_from(port.port) else { continue };
        let backends = match sandbox {
            Some((name, planned)) => gateway_backends(to, name, planned, remote, number),
            None => backends(&to.member, remote, Some((Protocol::Tcp, number))),
        };
        for address in cluster_ips(service) {
            let backends: BTreeSet<Backend> = backends
                .iter()
                .filter(|backend| backend.address.is_ipv4() == address.is_ipv4())
                .cloned()
                .collect();
            let socket = Socket {
                description: format!("mirrored Service {local} of {remote}"),
                node: None,
                should_answer: backends.iter().any(|backend| backend.ready),
                backends,
                is_local_mirror: true,
            };
            sockets.add(address, number, socket);
        }
    }
    sockets.0
}

/// The addresses, sockets and networks that are not probed from a cluster: its own, and those of `--underlay-allows`.
pub(super) struct ExcludedAddresses {
    addresses: BTreeSet<IpAddr>,
    sockets: BTreeSet<SocketAddr>,
    networks: Vec<IpNet>,
}

impl ExcludedAddresses {
    /// `networks` are `allowedNetworks` of the cluster.
    pub(super) fn new(read: &ReadCluster, mut networks: Vec<IpNet>, allowed: &[UnderlayAllowed]) -> Self {
        let mut addresses: BTreeSet<IpAddr> = BTreeSet::new();
        for name in read.objects.nodes.keys() {
            addresses.extend(node_addresses(read, name));
        }
        for pod in read.objects.pods.values().filter_map(|pod| pod.status.as_ref()) {
            addresses.extend(pod.pod_ips.iter().flatten().filter_map(|ip| parse_address(&ip.ip)));
        }
        addresses.extend(read.objects.services.values().flat_map(cluster_ips));
        let nodes = read.member.nodes.values();
        networks.extend(nodes.flat_map(|node| node.pod_cidrs.iter().filter_map(|claim| claim.value().copied())));
        let mut sockets = read.member.api_endpoints.clone();
        for UnderlayAllowed { address, port } in allowed {
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

    pub(super) fn contains(&self, socket: SocketAddr) -> bool {
        self.addresses.contains(&socket.ip())
            || self.sockets.contains(&socket)
            || self.networks.iter().any(|net| net.contains(&socket.ip()))
    }
}

/// A value of `--underlay-allows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnderlayAllowed {
    address: IpAddr,
    /// `None` = every port.
    port: Option<u16>,
}

impl std::str::FromStr for UnderlayAllowed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self { address, port: None });
        }
        let socket: SocketAddr = text
            .parse()
            .map_err(|_| "write ADDRESS or ADDRESS:PORT, for example 10.96.0.10:53 or [fd00::10]:53".to_owned())?;
        Ok(Self {
            address: socket.ip(),
            port: Some(socket.port()),
        })
    }
}
