//! Finds the endpoints of a Service.

use std::{collections::BTreeSet, net::IpAddr};

use clustermesh_core::{
    mesh::{ObjectName, Protocol},
    observe::Member,
};

/// One endpoint of a Service. A Service that is mirrored into a sandbox has gateways as endpoints.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Backend {
    pub(crate) address: IpAddr,
    /// The Node on which the endpoint runs, if its EndpointSlice names one.
    pub(crate) node: Option<String>,
    pub(crate) port: (Protocol, u16),
    /// Whether it accepts new connections.
    pub(crate) ready: bool,
}

/// Returns the endpoints of a Service, from its EndpointSlices. `port` = one port of the Service; `None` = all its ports.
pub(crate) fn backends(member: &Member, service: &ObjectName, port: Option<(Protocol, u16)>) -> BTreeSet<Backend> {
    let service_ports = member.services.get(service).map_or(&[][..], |service| &service.ports);
    // A port of an EndpointSlice belongs to the port of the Service that has the same name and protocol.
    let is_requested = |name: &str, protocol: Protocol| {
        service_ports.iter().any(|service_port| {
            let is_wanted = port.is_none_or(|wanted| wanted == (service_port.protocol, service_port.port));
            is_wanted && service_port.name == name && service_port.protocol == protocol
        })
    };
    let mut found = BTreeSet::new();
    let slices = member.slices.iter();
    for (_, slice) in
        slices.filter(|(name, slice)| name.namespace == service.namespace && slice.service == service.name)
    {
        for slice_port in slice
            .ports
            .iter()
            .filter(|slice_port| is_requested(&slice_port.name, slice_port.protocol))
        {
            found.extend(slice.endpoints.iter().map(|endpoint| Backend {
                address: endpoint.address,
                node: endpoint.node.clone(),
                port: (slice_port.protocol, slice_port.port),
                ready: endpoint.ready && !endpoint.terminating,
            }));
        }
    }
    found
}
