//! Converts Services, EndpointSlices and Pods to the values of `clustermesh_core`, and planned mirrored Services and their EndpointSlices
//! to Kubernetes objects.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::Protocol,
    observe::{self, Families, Mirror, Owner, ServicePort, Slice, SliceEndpoint},
    plan::PlannedSlice,
};
use k8s_openapi::{
    api::{
        core::v1::{Pod, Service, ServicePort as K8sServicePort, ServiceSpec},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::ResourceExt;

use super::{owner, set_labels};
use crate::names::{ALLOWED_FROM, LABEL_MANAGED_BY, LABEL_SERVICE_NAME, LABEL_SLICE_MANAGED_BY, MANAGED_BY, is_label};

/// Converts a Service. Ports with an unknown protocol are left out.
#[must_use]
pub fn to_core(service: &Service) -> observe::Service {
    let spec = service.spec.as_ref();
    let kind = spec.and_then(|s| s.type_.as_deref()).unwrap_or("ClusterIP");
    observe::Service {
        managed: managing_owner(&service.metadata),
        external_name: kind == "ExternalName",
        selectorless: spec
            .and_then(|s| s.selector.as_ref())
            .is_none_or(|selector| selector.is_empty()),
        ports: spec
            .iter()
            .flat_map(|s| s.ports.iter().flatten())
            .filter_map(|port| service_port(port.name.as_deref(), Some(port.port), port.protocol.as_deref()))
            .collect(),
        families: service_families(spec),
        allowed_from: allowed_from(service),
    }
}

/// The IP families of a Service. A Service with a dual-stack policy counts as having both, even if its cluster has only one. Otherwise
/// every pass would try to add the family that the cluster lacks. A new Service has no families yet: Kubernetes gives it the first family
/// of the cluster. Until then IPv4 is assumed; if that is wrong, the next pass corrects it.
fn service_families(spec: Option<&ServiceSpec>) -> Families {
    let policy = spec.and_then(|s| s.ip_family_policy.as_deref());
    if policy.is_some_and(|policy| policy != "SingleStack") {
        return Families::BOTH;
    }
    let named = spec.and_then(|s| s.ip_families.as_deref());
    let has = |family: &str| named.map(|named| named.iter().any(|one| one == family));
    Families {
        v4: has("IPv4").unwrap_or(true),
        v6: has("IPv6").unwrap_or(false),
    }
}

/// At most this many namespaces are read from the annotation [`ALLOWED_FROM`].
const MAX_NAMESPACES: usize = 256;

fn allowed_from(service: &Service) -> BTreeSet<String> {
    let text = service.annotations().get(ALLOWED_FROM);
    let names = text.into_iter().flat_map(|text| text.split(','));
    let names = names.map(str::trim).filter(|name| is_label(name)).take(MAX_NAMESPACES);
    names.map(str::to_owned).collect()
}

/// Converts an EndpointSlice; `None` = it belongs to no Service, or contains names instead of addresses.
#[must_use]
pub fn slice_to_core(slice: &EndpointSlice) -> Option<Slice> {
    let v6 = match &*slice.address_type {
        "IPv4" => false,
        "IPv6" => true,
        _ => return None,
    };
    Some(Slice {
        managed: managing_owner(&slice.metadata),
        service: slice
            .metadata
            .labels
            .as_ref()?
            .get(LABEL_SERVICE_NAME)
            .filter(|name| !name.is_empty())?
            .clone(),
        v6,
        ports: slice
            .ports
            .iter()
            .flatten()
            .filter_map(|port| service_port(port.name.as_deref(), port.port, port.protocol.as_deref()))
            .collect(),
        endpoints: slice
            .endpoints
            .iter()
            .flatten()
            .filter_map(|endpoint| slice_endpoint(endpoint, v6))
            .collect(),
    })
}

/// Converts an endpoint. Only its first address is used, as by kube-proxy; the others belong to the same backend.
fn slice_endpoint(endpoint: &Endpoint, v6: bool) -> Option<SliceEndpoint> {
    let address: IpAddr = endpoint.addresses.first()?.parse().ok()?;
    if address.is_ipv6() != v6 {
        return None;
    }
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    Some(SliceEndpoint {
        address,
        node: endpoint.node_name.clone().filter(|node| !node.is_empty()),
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.or(conditions.ready).unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
    })
}

/// The addresses and ports of the API server: the endpoints of `default/kubernetes` in any state.
#[must_use]
pub fn api_endpoints<'a>(slices: impl IntoIterator<Item = &'a EndpointSlice>) -> BTreeSet<SocketAddr> {
    slices
        .into_iter()
        .filter(|slice| slice.metadata.namespace.as_deref() == Some("default"))
        .filter_map(slice_to_core)
        .filter(|slice| slice.service == "kubernetes")
        .flat_map(|slice| {
            let ports: Vec<u16> = slice.ports.iter().map(|port| port.port).collect();
            slice.endpoints.into_iter().flat_map(move |endpoint| {
                ports
                    .clone()
                    .into_iter()
                    .map(move |port| SocketAddr::new(endpoint.address, port))
            })
        })
        .collect()
}

/// Converts a Pod for exports. A Pod that has ended gets no addresses, because other Pods may have them. A Pod that is not scheduled yet
/// or uses the host network gets none either.
#[must_use]
pub fn pod_to_core(pod: &Pod) -> observe::Pod {
    let spec = pod.spec.as_ref();
    let status = pod.status.as_ref();
    let node = spec.and_then(|s| s.node_name.clone()).unwrap_or_default();
    let ended = matches!(status.and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"));
    let host_network = spec.and_then(|s| s.host_network).unwrap_or(false);
    let pod_ips = status.and_then(|s| s.pod_ips.as_deref()).unwrap_or_default();
    let texts: Vec<&str> = if pod_ips.is_empty() {
        status.and_then(|s| s.pod_ip.as_deref()).into_iter().collect()
    } else {
        pod_ips.iter().map(|ip| &*ip.ip).collect()
    };
    observe::Pod {
        labels: pod.metadata.labels.clone().unwrap_or_default(),
        addresses: if ended || host_network || node.is_empty() {
            Vec::new()
        } else {
            texts.into_iter().filter_map(|text| text.parse().ok()).collect()
        },
        node,
    }
}

fn managing_owner(metadata: &ObjectMeta) -> Option<Owner> {
    let labels = metadata.labels.as_ref()?;
    (labels.get(LABEL_MANAGED_BY).map(String::as_str) == Some(MANAGED_BY)).then(|| owner(Some(labels)))
}

fn service_port(name: Option<&str>, port: Option<i32>, protocol: Option<&str>) -> Option<ServicePort> {
    Some(ServicePort {
        name: name.unwrap_or_default().to_owned(),
        port: u16::try_from(port?).ok().filter(|port| *port > 0)?,
        protocol: match protocol {
            None | Some("" | "TCP") => Protocol::Tcp,
            Some("UDP") => Protocol::Udp,
            Some("SCTP") => Protocol::Sctp,
            Some(_) => return None,
        },
    })
}

/// Changes a Service (a new one, or an existing mirrored Service) to the planned one. It has no selector, so that Kubernetes' own
/// controllers do not write its EndpointSlices.
pub fn update(service: &mut Service, planned: &Mirror, owner: &Owner) {
    set_labels(service.labels_mut(), owner);
    service
        .labels_mut()
        .insert(LABEL_MANAGED_BY.to_owned(), MANAGED_BY.to_owned());
    let spec = service.spec.get_or_insert_with(ServiceSpec::default);
    spec.selector = None;
    // In a single-stack cluster, `PreferDualStack` gives one family. The policy is never reverted, because that would remove an address.
    if !service_families(Some(spec)).cover(planned.families) {
        spec.ip_family_policy = Some("PreferDualStack".to_owned());
    }
    spec.ports = Some(
        planned
            .ports
            .iter()
            .map(|port| K8sServicePort {
                name: Some(port.name.clone()).filter(|name| !name.is_empty()),
                port: port.port.into(),
                protocol: Some(port.protocol.as_str().to_owned()),
                ..K8sServicePort::default()
            })
            .collect(),
    );
}

/// Changes an EndpointSlice of a mirrored Service (a new one, or an existing one) to the planned one.
pub fn update_slice(slice: &mut EndpointSlice, service: &str, planned: &PlannedSlice, owner: &Owner) {
    set_labels(slice.labels_mut(), owner);
    for (key, value) in [
        (LABEL_MANAGED_BY, MANAGED_BY),
        (LABEL_SLICE_MANAGED_BY, MANAGED_BY),
        (LABEL_SERVICE_NAME, service),
    ] {
        slice.labels_mut().insert(key.to_owned(), value.to_owned());
    }
    // The field is immutable, but the name of the slice contains the family, so the value never changes.
    slice.address_type = if planned.v6 { "IPv6" } else { "IPv4" }.to_owned();
    slice.ports = Some(
        planned
            .ports
            .iter()
            .map(|port| EndpointPort {
                // The only port of a Service may have no name. Its name in an EndpointSlice is then empty, the default of the API server.
                name: Some(port.name.clone()),
                port: Some(port.port.into()),
                protocol: Some(port.protocol.as_str().to_owned()),
                app_protocol: None,
            })
            .collect(),
    );
    slice.endpoints = Some(
        planned
            .endpoints
            .iter()
            .map(|endpoint| Endpoint {
                addresses: vec![endpoint.address.to_string()],
                conditions: Some(EndpointConditions {
                    ready: Some(endpoint.ready),
                    serving: Some(endpoint.serving),
                    terminating: Some(endpoint.terminating),
                }),
                ..Endpoint::default()
            })
            .collect(),
    );
}

#[cfg(test)]
mod tests;
