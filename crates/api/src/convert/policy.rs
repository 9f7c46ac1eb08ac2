//! [`PeerPolicy`] to and from [`observe::PolicySpec`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::{PortRef, Protocol},
    observe::{self, ObservedPolicy, Owner},
};
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

use super::{
    mesh::{port_ref, protocol, protocol_from_core},
    network, owner, set_labels,
};
use crate::{
    mesh::{IsolationProfile, ServicePort},
    policy::{Allow, Deny, InfrastructurePort, PeerPolicy, PeerPolicySpec},
};

/// The schema's bound on the networks of one rule.
const RULE_NETWORKS: usize = 1024;

/// What stands. A policy that says anything the planner would not write is an error, and gets rewritten.
#[must_use]
pub fn to_core(policy: &PeerPolicy) -> ObservedPolicy {
    ObservedPolicy {
        owner: owner(policy.metadata.labels.as_ref()),
        spec: spec(&policy.spec),
    }
}

fn spec(written: &PeerPolicySpec) -> Result<observe::PolicySpec, String> {
    let mut allow = BTreeSet::new();
    for (index, entry) in written.allow.iter().enumerate() {
        allow.extend(networks(&format!("spec.allow[{index}].to"), &entry.to)?);
    }
    let mut deny = BTreeSet::new();
    for (index, entry) in written.deny.iter().enumerate() {
        let to = networks(&format!("spec.deny[{index}].to"), &entry.to)?;
        if entry.ports.is_empty() {
            return Err(format!("spec.deny[{index}].ports: is empty: name the TCP ports"));
        }
        for port in &entry.ports {
            let number = match (port_ref(&port.port), protocol(port.protocol)) {
                (Ok(PortRef::Number(number)), Protocol::Tcp) => number,
                _ => {
                    return Err(format!(
                        "spec.deny[{index}].ports: only TCP port numbers are written here"
                    ));
                }
            };
            for net in &to {
                if net.prefix_len() != net.max_prefix_len() {
                    return Err(format!("spec.deny[{index}].to: {net} is not a single address"));
                }
                deny.insert(SocketAddr::new(net.addr(), number));
            }
        }
    }
    Ok(observe::PolicySpec {
        sources: networks("spec.sources", &written.sources)?,
        networks: networks("spec.networks", &written.networks)?,
        allow,
        deny,
        infrastructure_ports: written
            .infrastructure_ports
            .iter()
            .map(|p| (protocol(p.protocol), p.port))
            .collect(),
        anchored: networks("spec.anchored", &written.anchored)?,
        closed: written.isolation_profile != IsolationProfile::ClusterMeshed,
    })
}

fn networks(field: &str, texts: &[String]) -> Result<BTreeSet<IpNet>, String> {
    texts
        .iter()
        .enumerate()
        .map(|(index, text)| match network(text) {
            Ok((net, false)) => Ok(net),
            Ok((net, true)) => Err(format!("{field}[{index}]: {text} has host bits: write {net}")),
            Err(why) => Err(format!("{field}[{index}]: {why}")),
        })
        .collect()
}

/// A policy for what `source` may reach, to be created.
#[must_use]
pub fn from_core(name: &str, source: &str, spec: &observe::PolicySpec, owner: &Owner) -> PeerPolicy {
    let mut policy = PeerPolicy::new(name, PeerPolicySpec::default());
    update(&mut policy, source, spec, owner);
    policy
}

/// Makes a policy that stands say `spec` and belong to `owner`; what others wrote into its metadata stays.
pub fn update(policy: &mut PeerPolicy, source: &str, spec: &observe::PolicySpec, owner: &Owner) {
    set_labels(policy.labels_mut(), owner);
    policy.spec = written(source, spec);
}

/// What an object says that says `spec` of `source`.
pub(crate) fn written(source: &str, spec: &observe::PolicySpec) -> PeerPolicySpec {
    let texts = |networks: &BTreeSet<IpNet>| networks.iter().map(IpNet::to_string).collect::<Vec<_>>();
    let mut denied: BTreeMap<IpAddr, Vec<ServicePort>> = BTreeMap::new();
    for address in &spec.deny {
        let port = IntOrString::Int(address.port().into());
        denied.entry(address.ip()).or_default().push(ServicePort {
            port,
            protocol: crate::mesh::Protocol::Tcp,
        });
    }
    PeerPolicySpec {
        source: source.to_owned(),
        isolation_profile: if spec.closed {
            IsolationProfile::Standard
        } else {
            IsolationProfile::ClusterMeshed
        },
        sources: texts(&spec.sources),
        networks: texts(&spec.networks),
        allow: texts(&spec.allow)
            .chunks(RULE_NETWORKS)
            .map(|to| Allow { to: to.to_vec() })
            .collect(),
        deny: denied
            .into_iter()
            .map(|(address, ports)| Deny {
                to: vec![IpNet::from(address).to_string()],
                ports,
            })
            .collect(),
        infrastructure_ports: spec
            .infrastructure_ports
            .iter()
            .map(|(protocol, port)| InfrastructurePort {
                port: *port,
                protocol: protocol_from_core(*protocol),
            })
            .collect(),
        anchored: texts(&spec.anchored),
    }
}

#[cfg(test)]
mod tests;
