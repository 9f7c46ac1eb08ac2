//! Mirrored Services: a Service of one member that appears in another under a name (DESIGN §5).

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{EgressReport, Naming, PlannedService, PlannedSlice};
use crate::{
    mesh::{Addressing, Cluster, Grant, MeshId, ObjectName, PortRef},
    observe::{Member, Observation, ServicePort, Slice, SliceEndpoint},
};

/// Endpoints of one EndpointSlice, at most.
const SLICE_SIZE: usize = 100;

/// What became of one grant.
pub(super) struct Mirror {
    pub(super) report: EgressReport,
    /// `None` = nothing may stand under that name.
    pub(super) service: Option<PlannedService>,
    /// The source was not seen: what stands is kept.
    pub(super) keep: bool,
}

/// Both ends of a grant.
pub(super) struct Ends<'a> {
    pub(super) mesh: &'a MeshId,
    pub(super) importer: &'a Cluster,
    pub(super) importing: Option<&'a Member>,
    /// The entry that has the Service, with `allowed` cut to what was accepted, if it is connected to the importer.
    pub(super) exporter: Option<&'a Cluster>,
    pub(super) exporting: Option<&'a Observation<Member>>,
    /// Whether the Service that stands under the local name is this mesh's own.
    pub(super) ours: &'a dyn Fn(&ObjectName) -> bool,
    /// An earlier grant, or an older mesh, has the local name.
    pub(super) taken: bool,
}

impl Ends<'_> {
    /// Resolves one grant against what was seen.
    pub(super) fn mirror(&self, grant: &Grant, naming: &dyn Naming) -> Mirror {
        let done = |service: Option<PlannedService>, keep: bool, message: String| {
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
            Mirror { report, service, keep }
        };
        let Some(exporter) = self.exporter else {
            return done(
                None,
                false,
                format!("cluster {:?} is not connected to this one", grant.cluster),
            );
        };
        if self.taken {
            let message = format!(
                "another grant already appears as {} in cluster {:?}; set `as`",
                grant.local, self.importer.name
            );
            return done(None, false, message);
        }
        let Some(member) = self.exporting.and_then(Observation::last) else {
            return done(
                None,
                true,
                format!("cluster {:?} has not been seen yet; what stands is kept", grant.cluster),
            );
        };
        if let Some(standing) = self.importing
            && standing.services.contains_key(&grant.local)
            && !(self.ours)(&grant.local)
        {
            let message = format!(
                "a Service {} that is not ours stands in cluster {:?}; rename it or set `as` to another name",
                grant.local, self.importer.name
            );
            return done(None, false, message);
        }
        match resolve(grant, exporter, member) {
            Err(message) => done(None, false, message),
            Ok((ports, slices, message)) => {
                let slices = pack(self.mesh, &grant.local, slices, naming);
                done(
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

/// Backends of one family that answer on one set of ports.
type Groups = BTreeMap<(bool, Vec<ServicePort>), BTreeSet<SliceEndpoint>>;

fn resolve(grant: &Grant, exporter: &Cluster, member: &Member) -> Result<(Vec<ServicePort>, Groups, String), String> {
    let words = || format!("Service {} of cluster {:?}", grant.service, grant.cluster);
    let service = member
        .services
        .get(&grant.service)
        .ok_or_else(|| format!("{} is not there", words()))?;
    if service.external_name {
        return Err(format!(
            "{} is of type ExternalName: it has no endpoints in that cluster",
            words()
        ));
    }
    if service.managed.is_some() {
        return Err(format!("{} is itself a mirror; name the Service it mirrors", words()));
    }
    if exporter.effective_addressing() == Addressing::Masqueraded {
        return Err(format!(
            "cluster {:?} is masqueraded: its pods have no address in the mesh",
            grant.cluster
        ));
    }
    let mut ports: Vec<ServicePort> = Vec::new();
    for wanted in &grant.ports {
        let found = service.ports.iter().find(|port| {
            port.protocol == wanted.protocol
                && match &wanted.port {
                    PortRef::Number(number) => port.port == *number,
                    PortRef::Name(name) => port.name == *name,
                }
        });
        let port = found.ok_or_else(|| {
            let wanted_port = match &wanted.port {
                PortRef::Number(number) => number.to_string(),
                PortRef::Name(name) => name.clone(),
            };
            format!("{} has no port {wanted_port}/{}", words(), wanted.protocol.as_str())
        })?;
        if !ports.contains(port) {
            ports.push(port.clone());
        }
    }
    if grant.ports.is_empty() {
        ports.clone_from(&service.ports);
    }
    if ports.is_empty() {
        return Err(format!("{} has no ports", words()));
    }
    let mut groups = Groups::new();
    let mut outside: BTreeSet<String> = BTreeSet::new();
    for (_, slice) in member
        .slices
        .iter()
        .filter(|(name, slice)| belongs(name, slice, &grant.service))
    {
        let backend: Vec<ServicePort> = slice
            .ports
            .iter()
            .filter(|p| ports.iter().any(|s| s.name == p.name && s.protocol == p.protocol))
            .cloned()
            .collect();
        for endpoint in &slice.endpoints {
            if exporter.allows(IpNet::from(endpoint.address)) {
                groups
                    .entry((slice.v6, backend.clone()))
                    .or_default()
                    .insert(endpoint.clone());
            } else {
                outside.insert(endpoint.address.to_string());
            }
        }
    }
    groups.retain(|(_, ports), _| !ports.is_empty());
    let message = if outside.is_empty() {
        String::new()
    } else {
        let few: Vec<_> = outside.iter().take(3).cloned().collect();
        format!(
            "{} endpoint(s) of {} lie outside allowedNetworks of that cluster and are left out ({}{})",
            outside.len(),
            words(),
            few.join(", "),
            if outside.len() > few.len() { ", ..." } else { "" }
        )
    };
    Ok((ports, groups, message))
}

fn belongs(name: &ObjectName, slice: &Slice, service: &ObjectName) -> bool {
    slice.managed.is_none() && name.namespace == service.namespace && slice.service == service.name
}

fn pack(mesh: &MeshId, service: &ObjectName, groups: Groups, naming: &dyn Naming) -> BTreeMap<String, PlannedSlice> {
    let mut slices = BTreeMap::new();
    let mut index = BTreeMap::from([(false, 0), (true, 0)]);
    for ((v6, ports), endpoints) in groups {
        let endpoints: Vec<SliceEndpoint> = endpoints.into_iter().collect();
        for chunk in endpoints.chunks(SLICE_SIZE) {
            let index = index.entry(v6).or_default();
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
