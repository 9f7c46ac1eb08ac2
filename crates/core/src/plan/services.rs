//! Plans mirrored Services: resolves each grant to a Service and EndpointSlices in the importing member.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    EgressReport, Naming, PlannedService, PlannedSlice,
    gateways::{GatewayAccess, PORT_COUNT},
};
use crate::{
    mesh::{Cluster, Grant, MeshId, ObjectName, PortRef, Protocol},
    observe::{Member, Observation, ServicePort, Slice, SliceEndpoint},
};

/// The largest number of endpoints in one planned EndpointSlice, the default of Kubernetes' own controller.
const SLICE_SIZE: usize = 100;

/// The result of resolving one grant.
pub(super) struct GrantOutcome {
    pub(super) report: EgressReport,
    /// `None` = no mirrored Service is planned for the grant.
    pub(super) service: Option<PlannedService>,
    /// The objects on which the grant depends were not observed, so an existing mirrored Service is kept.
    pub(super) keep: bool,
}

/// How an importing member reaches the endpoints of a Service.
pub(super) enum AccessPath<'a> {
    /// Directly.
    Direct,
    /// Through gateways: the importing member is a sandbox, or the exporting member is masqueraded.
    Gateways(&'a GatewayAccess<'a>),
}

/// The importing and the exporting member of a grant, with the other inputs that decide it.
pub(super) struct GrantResolver<'a> {
    pub(super) mesh: &'a MeshId,
    pub(super) importer: &'a Cluster,
    /// The observed state of the importing member.
    pub(super) importer_state: Option<&'a Member>,
    /// The exporting member's entry, with `allowed` reduced to accepted networks; `Err` = why the grant is unusable.
    pub(super) exporter: Result<&'a Cluster, String>,
    /// The observed state of the exporting member.
    pub(super) exporter_state: Option<&'a Observation<Member>>,
    /// How the importer reaches the endpoints.
    pub(super) access_path: AccessPath<'a>,
    /// Returns whether the existing Service with this name in the importer belongs to this mesh.
    pub(super) is_ours: &'a dyn Fn(&ObjectName) -> bool,
    /// Whether an earlier grant or an older mesh already mirrors a Service as `grant.local`.
    pub(super) is_local_name_used: bool,
}

impl GrantResolver<'_> {
    /// Resolves the grant against the observed state, and builds its status.
    pub(super) fn resolve(&self, grant: &Grant, naming: &dyn Naming) -> GrantOutcome {
        let outcome_of = |service: Option<PlannedService>, keep: bool, message: String| {
            let endpoints = service
                .iter()
                .flat_map(|s| s.slices.values())
                .map(|slice| slice.endpoints.len())
                .sum();
            let ready = service
                .iter()
                .flat_map(|s| s.slices.values())
                .flat_map(|slice| &slice.endpoints)
                .any(|e| e.ready);
            let message = match (message.is_empty(), ready) {
                (true, false) => format!(
                    "Service {} of cluster {:?} has no ready endpoint",
                    grant.service, grant.cluster
                ),
                _ => message,
            };
            let report = EgressReport {
                cluster: self.importer.name.clone(),
                service: grant.local.clone(),
                ready,
                endpoints,
                message,
            };
            GrantOutcome { report, service, keep }
        };
        let exporter = match &self.exporter {
            Ok(exporter) => *exporter,
            Err(why) => return outcome_of(None, false, why.clone()),
        };
        if self.is_local_name_used {
            let message = format!(
                "another grant is already mirrored as {} in cluster {:?}; set `as` to another name",
                grant.local, self.importer.name
            );
            return outcome_of(None, false, message);
        }
        let Some(exporter_state) = self.exporter_state.and_then(Observation::last) else {
            return outcome_of(
                None,
                true,
                format!(
                    "cluster {:?} was not observed yet; an existing mirrored Service is kept",
                    grant.cluster
                ),
            );
        };
        let unlisted = |member: &Member, namespace: &String, cluster: &str| {
            let why = member.unlisted.services.get(namespace)?;
            Some(format!(
                "the Services in namespace {namespace} of cluster {cluster:?} are not known: {why}; an existing mirrored Service is kept"
            ))
        };
        let importer_unlisted =
            (self.importer_state).and_then(|m| unlisted(m, &grant.local.namespace, &self.importer.name));
        if let Some(message) = unlisted(exporter_state, &grant.service.namespace, &grant.cluster).or(importer_unlisted)
        {
            return outcome_of(None, true, message);
        }
        if let Some(importer_state) = self.importer_state
            && importer_state.services.contains_key(&grant.local)
            && !(self.is_ours)(&grant.local)
        {
            let message = format!(
                "another Service {} already exists in cluster {:?}; rename it or set `as` to another name",
                grant.local, self.importer.name
            );
            return outcome_of(None, false, message);
        }
        match resolve_endpoints(grant, self.importer, exporter, exporter_state, &self.access_path) {
            Err(message) => outcome_of(None, false, message),
            Ok(Resolved { ports, groups, message }) => {
                let slices = pack_slices(self.mesh, &grant.local, groups, naming);
                outcome_of(
                    Some(PlannedService {
                        source: grant.cluster.clone(),
                        ports,
                        slices,
                    }),
                    false,
                    message,
                )
            }
        }
    }
}

/// Endpoints, grouped by (is IPv6, backend ports), because all endpoints of one EndpointSlice share these two.
pub(super) type EndpointGroups = BTreeMap<(bool, Vec<ServicePort>), BTreeSet<SliceEndpoint>>;

/// The ports and endpoints of a grant.
pub(super) struct Resolved {
    /// The granted ports of the Service.
    pub(super) ports: Vec<ServicePort>,
    /// The endpoints of the mirrored Service.
    pub(super) groups: EndpointGroups,
    /// What to report: why endpoints are left out, or why gateways do not serve the grant; empty = nothing.
    pub(super) message: String,
}

/// Resolves a grant against the observed state of the exporting member.
///
/// Endpoints of an IP family in which the importer has no network are left out, because its nodes have no source address for them.
/// If gateways serve the grant, no message reports this. Otherwise a message reports it only if no endpoint remains, because the
/// same pods usually have endpoints of the other family.
///
/// # Errors
/// Why the grant cannot be mirrored, and the remedy.
pub(super) fn resolve_endpoints(
    grant: &Grant,
    importer: &Cluster,
    exporter: &Cluster,
    exporter_state: &Member,
    access_path: &AccessPath<'_>,
) -> Result<Resolved, String> {
    let uses_gateways = !matches!(access_path, AccessPath::Direct);
    let describe = || format!("Service {} of cluster {:?}", grant.service, grant.cluster);
    let service = exporter_state.services.get(&grant.service);
    if let Some(namespace) = exporter.confined_to.as_ref().filter(|own| **own != grant.service.namespace)
        // The message is the same if the Service does not exist, so that it does not reveal which Services exist.
        && !service.is_some_and(|service| service.allowed_from.contains(namespace))
    {
        return Err(format!(
            "{} may not be granted by a mesh in namespace {namespace}: the owner of the Service can allow it with the annotation \
             kilo-clustermesh.io/allowed-from: {namespace} on the Service",
            describe()
        ));
    }
    let service = service.ok_or_else(|| format!("{} does not exist", describe()))?;
    if service.external_name {
        return Err(format!(
            "{} is of type ExternalName: it has no endpoints in that cluster",
            describe()
        ));
    }
    if service.managed.is_some() {
        return Err(format!(
            "{} is itself a mirror; name the Service that it mirrors",
            describe()
        ));
    }
    if uses_gateways && service.selectorless {
        return Err(format!(
            "{} has no selector, so its EndpointSlices may list any address: gateways do not serve it",
            describe()
        ));
    }
    let mut ports: Vec<ServicePort> = Vec::new();
    for requested_port in &grant.ports {
        let found = service.ports.iter().find(|port| {
            port.protocol == requested_port.protocol
                && match &requested_port.port {
                    PortRef::Number(number) => port.port == *number,
                    PortRef::Name(name) => port.name == *name,
                }
        });
        let port = found.ok_or_else(|| {
            let requested = match &requested_port.port {
                PortRef::Number(number) => number.to_string(),
                PortRef::Name(name) => name.clone(),
            };
            format!(
                "{} has no port {requested}/{}",
                describe(),
                requested_port.protocol.as_str()
            )
        })?;
        if !ports.contains(port) {
            ports.push(port.clone());
        }
    }
    if grant.ports.is_empty() {
        ports.clone_from(&service.ports);
    }
    if ports.is_empty() {
        return Err(format!("{} has no ports", describe()));
    }
    if let AccessPath::Gateways(gateway_access) = access_path {
        return resolve_with_gateways(grant, importer, ports, gateway_access);
    }
    let mut groups = EndpointGroups::new();
    let mut has_other_family = false;
    let mut outside = BTreeSet::new();
    for (_, slice) in exporter_state
        .slices
        .iter()
        .filter(|(name, slice)| is_slice_of(name, slice, &grant.service))
    {
        let backend: Vec<ServicePort> = slice
            .ports
            .iter()
            .filter(|p| ports.iter().any(|s| s.name == p.name && s.protocol == p.protocol))
            .cloned()
            .collect();
        for endpoint in &slice.endpoints {
            if !importer
                .allowed
                .iter()
                .any(|net| net.addr().is_ipv4() == endpoint.address.is_ipv4())
            {
                has_other_family = true;
                continue;
            }
            if !exporter.allows(IpNet::from(endpoint.address)) {
                outside.insert(endpoint.address);
                continue;
            }
            // The node is not in the importer's cluster.
            let without_node = SliceEndpoint {
                node: None,
                ..endpoint.clone()
            };
            groups
                .entry((slice.v6, backend.clone()))
                .or_default()
                .insert(without_node);
        }
    }
    groups.retain(|(_, ports), _| !ports.is_empty());
    let no_family = (has_other_family && groups.is_empty()).then(|| {
        format!(
            "{} has no endpoint of an IP family that cluster {:?} has in its allowedNetworks",
            describe(),
            importer.name
        )
    });
    let left_out = |addresses: &BTreeSet<IpAddr>, why: &str| {
        (!addresses.is_empty()).then(|| {
            let few: Vec<String> = addresses.iter().take(3).map(ToString::to_string).collect();
            format!(
                "{} endpoint(s) of {} {why} and are left out ({}{})",
                addresses.len(),
                describe(),
                few.join(", "),
                if addresses.len() > few.len() { ", ..." } else { "" }
            )
        })
    };
    let messages = [
        no_family,
        left_out(&outside, "lie outside allowedNetworks of that cluster"),
    ];
    Ok(Resolved {
        ports,
        groups,
        message: messages.into_iter().flatten().collect::<Vec<_>>().join("; "),
    })
}

/// Resolves a grant that gateways serve: the endpoints are the usable gateways, with the gateway ports of the grant.
fn resolve_with_gateways(
    grant: &Grant,
    importer: &Cluster,
    ports: Vec<ServicePort>,
    gateway_access: &GatewayAccess<'_>,
) -> Result<Resolved, String> {
    if let Some(port) = ports.iter().find(|port| port.protocol == Protocol::Sctp) {
        return Err(format!(
            "port {} of Service {} of cluster {:?} is SCTP: gateways forward only TCP and UDP; name the other ports in the grant",
            port.port, grant.service, grant.cluster
        ));
    }
    let gateway_ports = gateway_access.gateway_ports(&grant.service, &ports);
    let mut groups = EndpointGroups::new();
    if !gateway_ports.is_empty() {
        for address in &gateway_access.usable_addresses {
            if importer
                .allowed
                .iter()
                .any(|own| own.addr().is_ipv4() == address.is_ipv4())
            {
                let endpoint = SliceEndpoint {
                    address: *address,
                    node: None,
                    ready: true,
                    serving: true,
                    terminating: false,
                };
                groups
                    .entry((address.is_ipv6(), gateway_ports.clone()))
                    .or_default()
                    .insert(endpoint);
            }
        }
    }
    let missing_ports: Vec<&ServicePort> = ports
        .iter()
        .filter(|port| {
            let is_port = |known: &ServicePort| known.name == port.name && known.protocol == port.protocol;
            !gateway_ports.iter().any(is_port)
        })
        .collect();
    let exhausted = missing_ports
        .iter()
        .find(|port| gateway_access.exhausted.contains(&port.protocol));
    let exhausted = exhausted.map(|port| {
        format!(
            "port {} of Service {} has no port at the gateways of cluster {:?}: other grants of this cluster use all {PORT_COUNT} \
             for {}; remove some of them",
            port.port,
            grant.service,
            grant.cluster,
            port.protocol.as_str()
        )
    });
    let missing = (!missing_ports.is_empty()).then(|| {
        format!(
            "the SandboxAccess in cluster {:?} does not contain this grant yet",
            grant.cluster
        )
    });
    let refused = gateway_ports.iter().find_map(|port| {
        let (why, gateways) = gateway_access
            .refused
            .get(&(port.protocol, port.port))?
            .first_key_value()?;
        Some(format!(
            "gateway {} of cluster {:?} does not serve port {:?} of Service {}: {why}",
            gateways.join(", "),
            grant.cluster,
            port.name,
            grant.service
        ))
    });
    let message = gateway_access
        .unusable_because
        .clone()
        .or(exhausted)
        .or(missing)
        .or(refused);
    Ok(Resolved {
        ports,
        groups,
        message: message.unwrap_or_default(),
    })
}

fn is_slice_of(name: &ObjectName, slice: &Slice, service: &ObjectName) -> bool {
    slice.managed.is_none() && name.namespace == service.namespace && slice.service == service.name
}

fn pack_slices(
    mesh: &MeshId,
    service: &ObjectName,
    groups: EndpointGroups,
    naming: &dyn Naming,
) -> BTreeMap<String, PlannedSlice> {
    let mut slices = BTreeMap::new();
    let mut next_index = BTreeMap::from([(false, 0), (true, 0)]);
    for ((v6, ports), endpoints) in groups {
        let endpoints: Vec<SliceEndpoint> = endpoints.into_iter().collect();
        for chunk in endpoints.chunks(SLICE_SIZE) {
            let index = next_index.entry(v6).or_default();
            let name = naming.slice(mesh, service, v6, *index);
            *index += 1;
            slices.insert(
                name,
                PlannedSlice {
                    v6,
                    ports: ports.clone(),
                    endpoints: chunk.to_vec(),
                },
            );
        }
    }
    slices
}
