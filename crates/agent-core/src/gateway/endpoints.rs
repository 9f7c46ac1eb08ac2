//! Resolves a grant: finds the endpoints that new connections go to, and the endpoints at which open connections may continue.

use std::{collections::BTreeSet, net::SocketAddr};

use clustermesh_core::plan::INFRASTRUCTURE_PORTS;

use super::{Balancer, GrantSpec, Reason, Service, Settings};
use crate::prefixes::SPECIAL_PURPOSE;

/// The endpoints of a grant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ResolvedGrant {
    /// The endpoints that new connections are translated to.
    pub(super) balancer: Balancer,
    /// The endpoints to which packets of the grant's connections may go: those of `balancer`, and draining ones (serving, not ready).
    pub(super) allowed_endpoints: BTreeSet<SocketAddr>,
    /// Message about the endpoints that are left out because sandboxes must not reach them; `None` = there are none.
    pub(super) left_out: Option<String>,
}

/// Resolves a grant. Endpoints that sandboxes must not reach are left out.
///
/// # Errors
/// The reason and a message, if the Service or its port is missing, the Service was not observed, it is of type ExternalName, or
/// sandboxes must not reach it.
pub(super) fn resolve(
    granted: &GrantSpec,
    service: Option<&Service>,
    settings: &Settings,
) -> Result<ResolvedGrant, (Reason, String)> {
    let name = &granted.service;
    let refused = |message: String| Err((Reason::ServiceNotServed, message));
    if (&*name.namespace, &*name.name) == ("default", "kubernetes") {
        return refused("this is the API server, which no sandbox may reach".to_owned());
    }
    let observed = match service {
        Some(Service::Observed(observed)) => observed,
        Some(Service::Absent) => {
            return Err((Reason::ServiceMissing, format!("there is no Service {name}")));
        }
        Some(Service::Unknown(why)) => return Err((Reason::ServiceUnknown, why.clone())),
        None => {
            let message = format!("Service {name} has not been read yet");
            return Err((Reason::ServiceUnknown, message));
        }
    };
    if observed.is_mirror {
        return refused(format!(
            "Service {name} mirrors a Service of another cluster: grant that Service"
        ));
    }
    if observed.is_external_name {
        return refused(format!("Service {name} is of type ExternalName and has no endpoints"));
    }
    if !observed.has_selector {
        return refused(format!(
            "Service {name} has no selector: its EndpointSlices are written by hand and may hold any address, so no sandbox may \
             reach it"
        ));
    }
    if !observed.ports.contains(&(granted.protocol, granted.port.clone())) {
        let message = format!(
            "Service {name} has no {} port {:?}",
            granted.protocol.lowercase(),
            granted.port
        );
        return Err((Reason::ServiceMissing, message));
    }
    let mut resolved = ResolvedGrant::default();
    let mut left_out: Vec<String> = Vec::new();
    let (mut ready, mut draining) = (BTreeSet::new(), BTreeSet::new());
    let is_granted_port = |e: &&super::Endpoint| e.protocol == granted.protocol && e.port_name == granted.port;
    for endpoint in observed.endpoints.iter().filter(is_granted_port) {
        let address = endpoint.address.to_canonical();
        let is_outside = !settings.endpoint_networks.iter().any(|net| net.contains(&address));
        let is_reserved =
            settings.addresses.contains(&address) || settings.reserved.iter().any(|net| net.contains(&address));
        if is_outside {
            left_out.push(format!("{address} lies outside the networks of --endpoint-network"));
            continue;
        }
        if is_reserved || SPECIAL_PURPOSE.iter().any(|net| net.contains(&address)) {
            left_out.push(format!(
                "{address} belongs to a gateway, this pod, the API server or the local host: closed to every sandbox"
            ));
            continue;
        }
        if INFRASTRUCTURE_PORTS.contains(&endpoint.port) {
            left_out.push(format!(
                "{address} port {}: a port of Kubernetes or wg-agent, closed to every sandbox",
                endpoint.port
            ));
            continue;
        }
        let socket = SocketAddr::new(address, endpoint.port);
        if endpoint.ready {
            ready.insert(socket);
        } else if endpoint.serving {
            draining.insert(socket);
        }
    }
    resolved.allowed_endpoints = ready.union(&draining).copied().collect();
    for v6 in [false, true] {
        let of_this_family = |all: &BTreeSet<SocketAddr>| -> Vec<SocketAddr> {
            all.iter().filter(|socket| socket.is_ipv6() == v6).copied().collect()
        };
        // As in kube-proxy, draining endpoints get new connections if no endpoint of the family is ready.
        let chosen = Some(of_this_family(&ready))
            .filter(|all| !all.is_empty())
            .unwrap_or_else(|| of_this_family(&draining));
        if v6 {
            resolved.balancer.v6 = chosen;
        } else {
            resolved.balancer.v4 = chosen;
        }
    }
    resolved.balancer.sticky = observed.is_sticky;
    if let Some(first) = left_out.first() {
        resolved.left_out = Some(match left_out.len() {
            1 => format!("endpoint {first}"),
            count => format!("{count} endpoints are left out: {first}, ..."),
        });
    }
    Ok(resolved)
}
