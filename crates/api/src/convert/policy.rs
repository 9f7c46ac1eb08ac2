//! Converts [`PeerPolicy`] to and from [`observe::PolicySpec`].

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

use super::{mesh::port_ref, owner, parse_network, set_labels};
use crate::{
    mesh::{IsolationProfile, ServicePort},
    policy::{Allow, Deny, InfrastructurePort, PeerPolicy, PeerPolicySpec},
};

/// The schema's limit of networks in one rule.
const RULE_NETWORKS: usize = 1024;

/// Converts an observed policy. If one of its networks or denied ports is not as the controller writes it, the spec is an error and the
/// policy is rewritten.
#[must_use]
pub fn to_core(policy: &PeerPolicy) -> ObservedPolicy {
    ObservedPolicy {
        owner: owner(policy.metadata.labels.as_ref()),
        spec: spec_to_core(&policy.spec),
    }
}

fn spec_to_core(written: &PeerPolicySpec) -> Result<observe::PolicySpec, String> {
    let mut allow = BTreeSet::new();
    for (index, rule) in written.allow.iter().enumerate() {
        allow.extend(parse_networks(&format!("spec.allow[{index}].to"), &rule.to)?);
    }
    let mut deny = BTreeSet::new();
    for (index, rule) in written.deny.iter().enumerate() {
        let to = parse_networks(&format!("spec.deny[{index}].to"), &rule.to)?;
        if rule.ports.is_empty() {
            return Err(format!("spec.deny[{index}].ports: is empty: name the TCP ports"));
        }
        for port in &rule.ports {
            let number = match (port_ref(&port.port), port.protocol) {
                (Ok(PortRef::Number(number)), Protocol::Tcp) => number,
                _ => {
                    return Err(format!(
                        "spec.deny[{index}].ports: the controller writes only TCP port numbers here"
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
        sources: parse_networks("spec.sources", &written.sources)?,
        networks: parse_networks("spec.networks", &written.networks)?,
        allow,
        deny,
        infrastructure_ports: written
            .infrastructure_ports
            .iter()
            .map(|p| (p.protocol, p.port))
            .collect(),
        anchored: parse_networks("spec.anchored", &written.anchored)?,
        closed: written.isolation_profile != IsolationProfile::ClusterMeshed,
    })
}

fn parse_networks(field: &str, texts: &[String]) -> Result<BTreeSet<IpNet>, String> {
    texts
        .iter()
        .enumerate()
        .map(|(index, text)| match parse_network(text) {
            Ok((net, false)) => Ok(net),
            Ok((net, true)) => Err(format!("{field}[{index}]: {text} has host bits: write {net}")),
            Err(why) => Err(format!("{field}[{index}]: {why}")),
        })
        .collect()
}

/// Makes a new policy for the member `source`.
#[must_use]
pub fn from_core(name: &str, source: &str, spec: &observe::PolicySpec, owner: &Owner) -> PeerPolicy {
    let mut policy = PeerPolicy::new(name, PeerPolicySpec::default());
    update(&mut policy, source, spec, owner);
    policy
}

/// Changes an existing policy to `spec` and the labels of `owner`. The rest of its metadata stays.
pub fn update(policy: &mut PeerPolicy, source: &str, spec: &observe::PolicySpec, owner: &Owner) {
    set_labels(policy.labels_mut(), owner);
    policy.spec = spec_from_core(source, spec);
}

/// Converts `spec` to the spec of a PeerPolicy for the member `source`.
pub(crate) fn spec_from_core(source: &str, spec: &observe::PolicySpec) -> PeerPolicySpec {
    let texts = |networks: &BTreeSet<IpNet>| networks.iter().map(IpNet::to_string).collect::<Vec<_>>();
    let mut denied: BTreeMap<IpAddr, Vec<ServicePort>> = BTreeMap::new();
    for address in &spec.deny {
        let port = IntOrString::Int(address.port().into());
        denied.entry(address.ip()).or_default().push(ServicePort {
            port,
            protocol: Protocol::Tcp,
        });
    }
    PeerPolicySpec {
        source: source.to_owned(),
        // Any profile except `ClusterMeshed` closes the member.
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
                protocol: *protocol,
            })
            .collect(),
        anchored: texts(&spec.anchored),
    }
}

#[cfg(test)]
mod tests;
