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
    /// The Node that runs it, if its EndpointSlice names one.
    pub(crate) node: Option<String>,
    pub(crate) port: (Protocol, u16),
    /// Whether it accepts new connections.
    pub(crate) ready: bool,
}

/// Returns the endpoints of a Service, from its EndpointSlices. `port` = one port of the Service; `None` = all its ports.
pub(crate) fn backends(member: &Member, service: &ObjectName, port: Option<(Protocol, u16)>) -> BTreeSet<Backend> {
    let ports = member.services.get(service).map_or(&[][..], |service| &service.ports);
    let is_requested = |name: &str, protocol: Protocol| {
        let mut ports = ports.iter();
        ports.any(|own| {
            let is_same_port = port.is_none_or(|port| port == (own.protocol, own.port));
            is_same_port && own.name == name && own.protocol == protocol
        })
    };
    let mut found = BTreeSet::new();
    let slices = member.slices.iter();
    for (_, slice) in
        slices.filter(|(name, slice)| name.namespace == service.namespace && slice.service == service.name)
    {
        for port in slice
            .ports
            .iter()
            .filter(|port| is_requested(&port.name, port.protocol))
        {
            found.extend(slice.endpoints.iter().map(|endpoint| Backend {
                address: endpoint.address,
                node: endpoint.node.clone(),
                port: (port.protocol, port.port),
                ready: endpoint.ready && !endpoint.terminating,
            }));
        }
    }
    found
}
