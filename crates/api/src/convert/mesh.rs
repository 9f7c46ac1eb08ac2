//! Converts a `ClusterMesh` to [`clustermesh_core::mesh::Mesh`]. It repeats the checks of the CRD's schema, because a dry run reads files,
//! and a stored object may be older than the CRD.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_core::mesh as core;
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Finding, creation_time, excerpt, parse_network};
use crate::{
    mesh::{
        Addressing, ClusterEntry, ClusterMesh, Egress, Export, IsolationProfile, Locations, PodNetwork, ServicePort,
    },
    names::{ADOPT_HUB, DELETE_FOR_MOVE, PAUSED, QUARANTINE, is_label, is_subdomain},
};

/// The largest number of Nodes of one member that are used.
pub const MAX_NODES: usize = 5_000;

/// Whether nothing may be written or deleted for this mesh, because it is paused, or because `clusterctl move` has created it on another
/// hub and deletes it here.
#[must_use]
pub fn is_paused(object: &ClusterMesh) -> bool {
    let annotation = |key| object.metadata.annotations.as_ref().and_then(|a| a.get(key));
    let moved = annotation(DELETE_FOR_MOVE).is_some();
    moved || object.spec.paused || annotation(PAUSED).is_some_and(|value| value != "false")
}

/// Converts a mesh. Returns it with warnings about values that are ignored or changed.
///
/// # Errors
/// Findings for all invalid fields. The whole mesh is refused, because a mesh without the invalid parts would cut connections.
pub fn to_core(object: &ClusterMesh) -> Result<(core::Mesh, Vec<Finding>), Vec<Finding>> {
    let id = core::MeshId {
        namespace: object
            .metadata
            .namespace
            .clone()
            .unwrap_or_else(|| "default".to_owned()),
        name: object.metadata.name.clone().unwrap_or_default(),
    };
    let mut reader = Reader {
        object: format!("ClusterMesh {id}"),
        problems: Vec::new(),
        warnings: Vec::new(),
    };
    if !is_subdomain(&id.name) || id.name.len() > 63 {
        reader.problem(
            "metadata.name",
            "must be a name of at most 63 characters: it becomes the value of a label",
        );
    }
    let mut clusters: Vec<core::Cluster> = object
        .spec
        .clusters
        .iter()
        .enumerate()
        .map(|(index, entry)| reader.read_cluster(&id.namespace, &format!("spec.clusters[{index}]"), entry))
        .collect();
    reader.check_entries(&object.spec.clusters);
    let accepted = reader.read_accepted(object);
    let mut previous_anchors = reader.read_previous_anchors(object);
    let quarantined = reader.read_quarantine(object);
    if !reader.problems.is_empty() {
        return Err(reader.problems);
    }
    for cluster in &mut clusters {
        cluster.quarantine |= quarantined.contains(&cluster.name);
        cluster.previous_anchors = previous_anchors.remove(&cluster.name).unwrap_or_default();
    }
    let annotation = |key| object.metadata.annotations.as_ref().and_then(|a| a.get(key));
    let mesh = core::Mesh {
        id,
        created: creation_time(&object.metadata),
        paused: is_paused(object),
        deleting: object.metadata.deletion_timestamp.is_some(),
        adopt_hub: annotation(ADOPT_HUB).filter(|hub| !hub.is_empty()).cloned(),
        clusters,
        accepted,
    };
    Ok((mesh, reader.warnings))
}

/// Collects errors and warnings while a mesh is converted.
struct Reader {
    object: String,
    problems: Vec<Finding>,
    warnings: Vec<Finding>,
}

impl Reader {
    fn problem(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Finding {
            object: self.object.clone(),
            field: field.into(),
            message: message.into(),
        });
    }

    fn warning(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(Finding {
            object: self.object.clone(),
            field: field.into(),
            message: message.into(),
        });
    }

    /// Reads the names in the quarantine annotation. A name that is not an entry of the mesh causes only a warning, because a quarantine is
    /// urgent and must not fail.
    fn read_quarantine(&mut self, object: &ClusterMesh) -> BTreeSet<String> {
        let annotations = object.metadata.annotations.as_ref();
        let text = annotations.and_then(|annotations| annotations.get(QUARANTINE));
        let names = text.into_iter().flat_map(|text| text.split(','));
        let named: BTreeSet<String> = names.map(|name| name.trim().to_owned()).collect();
        let entries: BTreeSet<&str> = object.spec.clusters.iter().map(|entry| &*entry.name).collect();
        for name in named
            .iter()
            .filter(|name| !name.is_empty() && !entries.contains(&***name))
        {
            let known: Vec<&str> = entries.iter().copied().collect();
            self.warning(
                format!("metadata.annotations[{QUARANTINE}]"),
                format!(
                    "{:?} is not an entry of this mesh (entries: {}) and quarantines nothing",
                    excerpt(name),
                    known.join(", ")
                ),
            );
        }
        named
    }

    /// Checks the rules that involve several entries.
    fn check_entries(&mut self, entries: &[ClusterEntry]) {
        if entries.len() < 2 {
            self.problem("spec.clusters", "a mesh has at least two entries");
        }
        if entries.iter().filter(|entry| entry.local).count() > 1 {
            self.problem(
                "spec.clusters",
                "more than one entry has `local: true`: only the cluster this object lives in may",
            );
        }
        let mut names = BTreeSet::new();
        for (index, entry) in entries.iter().enumerate() {
            if !names.insert(&*entry.name) {
                let message = format!(
                    "{:?} is the name of an earlier entry: names must be unique",
                    excerpt(&entry.name)
                );
                self.problem(format!("spec.clusters[{index}].name"), message);
            }
        }
        for (index, entry) in entries.iter().enumerate() {
            for (egress_index, egress) in entry.egress.iter().enumerate() {
                let field = format!("spec.clusters[{index}].egress[{egress_index}].service.cluster");
                if egress.service.cluster == entry.name {
                    self.problem(
                        field,
                        "names this cluster itself: its own Services are reached without a mesh",
                    );
                } else if !names.contains(&*egress.service.cluster) {
                    let message = format!(
                        "{:?} is not an entry of this mesh: write the `name` of one of spec.clusters",
                        excerpt(&egress.service.cluster)
                    );
                    self.problem(field, message);
                }
            }
        }
    }

    fn read_cluster(&mut self, namespace: &str, path: &str, entry: &ClusterEntry) -> core::Cluster {
        if !is_label(&entry.name) {
            self.problem(
                format!("{path}.name"),
                format!(
                    "{:?} is not a DNS-1123 label: at most 63 lower-case letters, digits and '-', beginning and ending with a letter or a digit",
                    excerpt(&entry.name)
                ),
            );
        }
        let allowed = self.read_networks(&format!("{path}.allowedNetworks"), &entry.allowed_networks);
        for net in allowed.iter().filter(|net| core::is_too_wide(net)) {
            self.problem(
                format!("{path}.allowedNetworks"),
                format!(
                    "{net} is wider than {}, and agents refuse such networks: list the cluster's pod, WireGuard and Service networks",
                    core::WIDEST
                ),
            );
        }
        if entry.allowed_networks.is_empty() {
            self.problem(
                format!("{path}.allowedNetworks"),
                "is empty: list the cluster's pod, WireGuard and Service networks",
            );
        }
        let anchored = entry.anchored_networks.as_ref();
        let anchored = anchored.map(|texts| self.read_anchored(path, texts, &allowed));
        if entry.anchors == 0 {
            self.problem(format!("{path}.anchors"), "must be at least 1");
        }
        if entry.wireguard_port == 0 {
            self.problem(format!("{path}.wireguardPort"), "must be a UDP port, 1 to 65535");
        }
        if entry.pod_network == PodNetwork::PerNode && !entry.exports.is_empty() {
            self.warning(
                format!("{path}.exports"),
                "is not used while podNetwork is PerNode: set `podNetwork: Shared` if pods have no addresses from their node's podCIDRs",
            );
        }
        core::Cluster {
            name: entry.name.clone(),
            identity: self.read_identity(namespace, path, entry),
            profile: profile(entry.isolation_profile),
            addressing: match (entry.isolation_profile, entry.addressing) {
                (IsolationProfile::Sandbox, _) | (_, Addressing::Masqueraded) => core::Addressing::Masqueraded,
                (_, Addressing::Routed) => core::Addressing::Routed,
            },
            allowed,
            anchored,
            previous_anchors: BTreeMap::new(),
            anchors: entry.anchors.max(1),
            pod_network: match entry.pod_network {
                PodNetwork::PerNode => core::PodNetwork::PerNode,
                PodNetwork::Shared => core::PodNetwork::Shared,
            },
            locations: match entry.locations {
                Locations::Ignored => core::Locations::Ignored,
                Locations::Connected => core::Locations::Connected,
            },
            exports: entry
                .exports
                .iter()
                .enumerate()
                .map(|(index, export)| self.read_export(&format!("{path}.exports[{index}]"), export))
                .collect(),
            wireguard_port: entry.wireguard_port,
            persistent_keepalive: entry.persistent_keepalive,
            endpoint_networks: self.read_networks(&format!("{path}.endpointNetworks"), &entry.endpoint_networks),
            egress: self.read_egress(&format!("{path}.egress"), &entry.egress),
            quarantine: entry.quarantine,
            confined_to: None,
            max_nodes: MAX_NODES,
        }
    }

    fn read_identity(&mut self, namespace: &str, path: &str, entry: &ClusterEntry) -> core::ClusterIdentity {
        let field = format!("{path}.kubeconfigSecretRef");
        match (&entry.kubeconfig_secret_ref, entry.local) {
            (None, true) => core::ClusterIdentity::Local,
            (Some(_), true) => {
                self.warning(
                    field,
                    "is not used: `local: true` means the cluster this object lives in",
                );
                core::ClusterIdentity::Local
            }
            (None, false) => {
                self.problem(
                    field,
                    "is missing: name the Secret in this namespace that holds the cluster's kubeconfig",
                );
                // Not used: a mesh with a problem is refused.
                core::ClusterIdentity::Local
            }
            (Some(secret), false) => {
                if !is_subdomain(&secret.name) {
                    self.problem(
                        format!("{field}.name"),
                        format!("{:?} is not the name of a Secret", excerpt(&secret.name)),
                    );
                }
                core::ClusterIdentity::Secret {
                    namespace: namespace.to_owned(),
                    name: secret.name.clone(),
                    key: secret.key.clone(),
                    context: secret.context.clone().filter(|context| !context.is_empty()),
                }
            }
        }
    }

    /// Reads a list of networks: in canonical form, in the order of the list, without duplicates.
    fn read_networks(&mut self, field: &str, texts: &[String]) -> Vec<IpNet> {
        let mut networks = Vec::new();
        for (index, text) in texts.iter().enumerate() {
            let field = format!("{field}[{index}]");
            match parse_network(text) {
                Err(message) => self.problem(field, message),
                Ok((net, host_bits)) => {
                    if host_bits {
                        self.warning(&field, format!("{text} has host bits and is read as {net}"));
                    }
                    if networks.contains(&net) {
                        self.warning(field, format!("{net} is listed twice"));
                    } else {
                        networks.push(net);
                    }
                }
            }
        }
        networks
    }

    fn read_anchored(&mut self, path: &str, texts: &[String], allowed: &[IpNet]) -> Vec<IpNet> {
        let field = format!("{path}.anchoredNetworks");
        let anchored = self.read_networks(&field, texts);
        for net in &anchored {
            if !allowed.iter().any(|outer| outer.contains(net)) {
                let message =
                    format!("{net} lies outside allowedNetworks: add it there, or take it out of anchoredNetworks");
                self.problem(&*field, message);
            }
        }
        anchored
    }

    fn read_export(&mut self, path: &str, export: &Export) -> core::Export {
        if !is_label(&export.namespace) {
            self.problem(
                format!("{path}.namespace"),
                format!("{:?} is not the name of a namespace", excerpt(&export.namespace)),
            );
        }
        let labels = export.pod_selector.match_labels.iter().flatten();
        let mut selector: Vec<core::Requirement> = labels
            .map(|(key, value)| core::Requirement::In(key.clone(), vec![value.clone()]))
            .collect();
        for (index, expression) in export.pod_selector.match_expressions.iter().flatten().enumerate() {
            let key = expression.key.clone();
            let values = expression.values.clone().unwrap_or_default();
            let path = format!("{path}.podSelector.matchExpressions[{index}]");
            let needs_values = matches!(&*expression.operator, "In" | "NotIn");
            if needs_values && values.is_empty() {
                self.problem(
                    format!("{path}.values"),
                    format!("is empty: {} needs at least one", expression.operator),
                );
            }
            match &*expression.operator {
                "In" => selector.push(core::Requirement::In(key, values)),
                "NotIn" => selector.push(core::Requirement::NotIn(key, values)),
                "Exists" => selector.push(core::Requirement::Exists(key)),
                "DoesNotExist" => selector.push(core::Requirement::DoesNotExist(key)),
                other => self.problem(
                    format!("{path}.operator"),
                    format!("{:?} is not one of In, NotIn, Exists, DoesNotExist", excerpt(other)),
                ),
            }
        }
        core::Export {
            namespace: export.namespace.clone(),
            selector,
        }
    }

    fn read_egress(&mut self, path: &str, egress: &[Egress]) -> Vec<core::Grant> {
        let mut grants: Vec<core::Grant> = Vec::new();
        for (index, egress) in egress.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let service = core::ObjectName {
                namespace: egress.service.namespace.clone(),
                name: egress.service.name.clone(),
            };
            let alias = egress.local.clone().unwrap_or_default();
            let local = core::ObjectName {
                namespace: alias.namespace.unwrap_or_else(|| service.namespace.clone()),
                name: alias.name.unwrap_or_else(|| service.name.clone()),
            };
            for (field, text) in [
                ("service.namespace", &service.namespace),
                ("service.name", &service.name),
                ("as.namespace", &local.namespace),
                ("as.name", &local.name),
            ] {
                if !is_label(text) {
                    self.problem(
                        format!("{path}.{field}"),
                        format!("{:?} is not a DNS-1123 label", excerpt(text)),
                    );
                }
            }
            if grants.iter().any(|grant| grant.local == local) {
                self.problem(
                    format!("{path}.as"),
                    format!("an earlier egress appears as {local} too: give one of them another name with `as`"),
                );
            }
            let ports = egress
                .ports
                .iter()
                .enumerate()
                .filter_map(|(index, port)| self.read_grant_port(&format!("{path}.ports[{index}].port"), port))
                .collect();
            grants.push(core::Grant {
                cluster: egress.service.cluster.clone(),
                service,
                ports,
                local,
            });
        }
        grants
    }

    fn read_grant_port(&mut self, field: &str, port: &ServicePort) -> Option<core::GrantPort> {
        match port_ref(&port.port) {
            Ok(reference) => Some(core::GrantPort {
                port: reference,
                protocol: port.protocol,
            }),
            Err(message) => {
                self.problem(field, message);
                None
            }
        }
    }

    /// Reads the networks that an earlier plan accepted. The controller wrote them, so a network that cannot be parsed was changed by
    /// another program, and is ignored.
    fn read_accepted(&mut self, object: &ClusterMesh) -> BTreeMap<String, Vec<IpNet>> {
        let mut accepted = BTreeMap::new();
        for (index, row) in object.status.iter().flat_map(|s| &s.clusters).enumerate() {
            let mut networks = Vec::new();
            for text in &row.accepted_networks {
                match parse_network(text) {
                    Ok((net, _)) => networks.push(net),
                    Err(message) => {
                        self.warning(
                            format!("status.clusters[{index}].acceptedNetworks"),
                            format!("{message}; ignored"),
                        );
                    }
                }
            }
            if !networks.is_empty() {
                accepted.insert(row.name.clone(), networks);
            }
        }
        accepted
    }

    /// Reads the networks that an earlier plan anchored, and their anchor nodes, by entry. Networks that cannot be parsed are ignored.
    fn read_previous_anchors(&mut self, object: &ClusterMesh) -> BTreeMap<String, BTreeMap<IpNet, BTreeSet<String>>> {
        let mut anchors: BTreeMap<String, BTreeMap<IpNet, BTreeSet<String>>> = BTreeMap::new();
        for (index, row) in object.status.iter().flat_map(|s| &s.clusters).enumerate() {
            for (anchored_index, anchored) in row.anchored.iter().enumerate() {
                match parse_network(&anchored.network) {
                    Ok((net, _)) => anchors
                        .entry(row.name.clone())
                        .or_default()
                        .entry(net)
                        .or_default()
                        .extend(anchored.nodes.iter().cloned()),
                    Err(message) => self.warning(
                        format!("status.clusters[{index}].anchored[{anchored_index}].network"),
                        format!("{message}; ignored"),
                    ),
                }
            }
        }
        anchors
    }
}

/// Parses the number or name of a Service's port.
///
/// # Errors
/// It is neither a port number nor the name of a Service's port.
pub(super) fn port_ref(port: &IntOrString) -> Result<core::PortRef, String> {
    match port {
        IntOrString::Int(number) => match u16::try_from(*number) {
            Ok(number) if number > 0 => Ok(core::PortRef::Number(number)),
            _ => Err(format!(
                "{number} is not a port: write 1 to 65535, or the name of the Service's port"
            )),
        },
        IntOrString::String(name) if is_label(name) => Ok(core::PortRef::Name(name.clone())),
        IntOrString::String(name) => Err(format!(
            "{:?} is not the name of a Service's port; a number is written without quotes",
            excerpt(name)
        )),
    }
}

/// Converts a profile to [`core::Profile`].
#[must_use]
pub const fn profile(profile: IsolationProfile) -> core::Profile {
    match profile {
        IsolationProfile::ClusterMeshed => core::Profile::ClusterMeshed,
        IsolationProfile::Sandbox => core::Profile::Sandbox,
        IsolationProfile::Standard => core::Profile::Standard,
    }
}

#[cfg(test)]
mod tests;
