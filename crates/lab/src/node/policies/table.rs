//! Renders the NetworkPolicies that apply to one node's pods as a script for `nft -f`.
//!
//! The semantics are those of `kubectl explain networkpolicy`: if policies of a direction select a pod, then in that
//! direction only packets of established flows pass, and packets that one of these policies allows. A packet to a ClusterIP is matched
//! after DNAT, by the pod's address. Packets from a pod to its own node are matched as well; packets from the node to its pods always pass.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::{Selector, SelectorExt};

use super::Objects;

/// All objects of the cluster from which the table is rendered.
pub(super) struct ClusterObjects<'a> {
    pub(super) policies: &'a Objects<NetworkPolicy>,
    pub(super) pods: &'a Objects<Pod>,
    pub(super) namespaces: &'a Objects<Namespace>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Egress,
    Ingress,
}

impl Direction {
    const fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }

    /// The nft fields with the address of the selected pod and with the address of the pod's peer.
    const fn address_fields(self) -> (&'static str, &'static str) {
        match self {
            Self::Egress => ("saddr", "daddr"),
            Self::Ingress => ("daddr", "saddr"),
        }
    }
}

/// A pod that has its own addresses and has not terminated.
struct AddressedPod<'a> {
    pod: &'a Pod,
    addresses: Vec<IpAddr>,
}

/// Renders the table for the node with this first InternalIP. The script replaces the existing table.
pub(super) fn render(node: IpAddr, objects: &ClusterObjects<'_>) -> String {
    let mut chains = String::new();
    let mut jumps = [String::new(), String::new()];
    for (number, pod) in objects.pods.values().filter_map(addressed).enumerate() {
        let host = pod.pod.status.as_ref().and_then(|status| status.host_ip.as_deref());
        if host != Some(node.to_string().as_str()) {
            continue;
        }
        for (jumps, direction) in jumps.iter_mut().zip([Direction::Egress, Direction::Ingress]) {
            let selecting: Vec<_> = objects.selecting(pod.pod, direction).collect();
            if selecting.is_empty() {
                continue;
            }
            for address in &pod.addresses {
                let chain = format!("{}_{number}_{}", direction.name(), family(*address));
                let (own, _) = direction.address_fields();
                let _ = writeln!(jumps, "  {} {own} {address} jump {chain}", family(*address));
                let _ = writeln!(chains, " chain {chain} {{");
                for policy in &selecting {
                    for rule in objects.rules(&pod, *address, *policy, direction) {
                        let _ = writeln!(chains, "  {rule}return");
                    }
                }
                let _ = writeln!(chains, "  counter drop\n }}");
            }
        }
    }
    let [egress, ingress] = jumps;
    let hook = |hook: &str, then: &str| {
        format!(
            " chain {hook} {{\n  type filter hook {hook} priority filter; policy accept;\n  \
             ct state established,related accept\n{then} }}\n"
        )
    };
    format!(
        "table inet policies\ndelete table inet policies\ntable inet policies {{\n{chains} chain egress {{\n{egress} }}\n \
         chain ingress {{\n{ingress} }}\n{}{}}}\n",
        hook("forward", "  jump egress\n  jump ingress\n"),
        hook("input", "  jump egress\n"),
    )
}

impl<'a> ClusterObjects<'a> {
    /// Policies that select the pod and apply in this direction, each with its namespace.
    fn selecting(&self, pod: &'a Pod, direction: Direction) -> impl Iterator<Item = (&'a str, &'a NetworkPolicySpec)> {
        let policies = self.policies;
        policies.iter().filter_map(move |((namespace, _), policy)| {
            let spec = policy.spec.as_ref()?;
            let types = spec.policy_types.as_deref().unwrap_or_default();
            let is_listed = types.iter().any(|one| one.eq_ignore_ascii_case(direction.name()));
            let is_default = match direction {
                Direction::Ingress => types.is_empty(),
                Direction::Egress => types.is_empty() && spec.egress.is_some(),
            };
            let selects = pod.metadata.namespace.as_ref() == Some(namespace)
                && selected(spec.pod_selector.as_ref(), pod.metadata.labels.as_ref());
            (selects && (is_listed || is_default)).then_some((namespace.as_str(), spec))
        })
    }

    /// Match expressions of a policy. A packet that matches one of them passes.
    fn rules(
        &self,
        local: &AddressedPod<'_>,
        address: IpAddr,
        (namespace, spec): (&str, &NetworkPolicySpec),
        direction: Direction,
    ) -> Vec<String> {
        let mut out = Vec::new();
        for (peers, ports) in policy_rules(spec, direction) {
            for (condition, peer_pod) in self.peers(peers, address, namespace, direction) {
                if ports.is_empty() {
                    out.push(condition);
                    continue;
                }
                let listening = match direction {
                    Direction::Egress => peer_pod,
                    Direction::Ingress => Some(local.pod),
                };
                let ports = ports.iter().filter_map(|port| port_condition(port, listening));
                out.extend(ports.map(|port| format!("{condition}{port}")));
            }
        }
        out
    }

    /// Match expressions for the addresses that these peers select, each with the pod that has the address, if any.
    fn peers(
        &self,
        peers: &[NetworkPolicyPeer],
        address: IpAddr,
        namespace: &str,
        direction: Direction,
    ) -> Vec<(String, Option<&'a Pod>)> {
        if peers.is_empty() {
            return vec![(String::new(), None)];
        }
        let (_, other) = direction.address_fields();
        let family = family(address);
        let mut out = Vec::new();
        for peer in peers {
            if let Some(block) = &peer.ip_block {
                let has_family = |net: &str| {
                    net.parse()
                        .is_ok_and(|net: IpNet| net.addr().is_ipv4() == address.is_ipv4())
                };
                if has_family(&block.cidr) {
                    let except = block.except.iter().flatten().filter(|net| has_family(net));
                    let except: String = except.map(|net| format!("{family} {other} != {net} ")).collect();
                    out.push((format!("{family} {other} {} {except}", block.cidr), None));
                }
                continue;
            }
            for pod in self.pods.values().filter_map(addressed) {
                let pod_namespace = pod.pod.metadata.namespace.as_deref().unwrap_or_default();
                let in_namespace = match &peer.namespace_selector {
                    None => pod_namespace == namespace,
                    Some(selector) => self
                        .namespaces
                        .get(&(String::new(), pod_namespace.to_owned()))
                        .is_some_and(|object| selected(Some(selector), object.metadata.labels.as_ref())),
                };
                if in_namespace && selected(peer.pod_selector.as_ref(), pod.pod.metadata.labels.as_ref()) {
                    let of_family = pod.addresses.iter().filter(|ip| ip.is_ipv4() == address.is_ipv4());
                    out.extend(of_family.map(|ip| (format!("{family} {other} {ip} "), Some(pod.pod))));
                }
            }
        }
        out
    }
}

/// The peers and the ports of one rule of a policy. An empty list allows all.
type Rule<'a> = (&'a [NetworkPolicyPeer], &'a [NetworkPolicyPort]);

fn policy_rules(spec: &NetworkPolicySpec, direction: Direction) -> Vec<Rule<'_>> {
    match direction {
        Direction::Egress => {
            let rules = spec.egress.as_deref().unwrap_or_default().iter();
            rules
                .map(|rule| {
                    (
                        rule.to.as_deref().unwrap_or_default(),
                        rule.ports.as_deref().unwrap_or_default(),
                    )
                })
                .collect()
        }
        Direction::Ingress => {
            let rules = spec.ingress.as_deref().unwrap_or_default().iter();
            rules
                .map(|rule| {
                    (
                        rule.from.as_deref().unwrap_or_default(),
                        rule.ports.as_deref().unwrap_or_default(),
                    )
                })
                .collect()
        }
    }
}

/// A match expression for a port. `None` = the port has a name, and `listening`, the destination pod, has no port with this name or
/// is unknown.
fn port_condition(port: &NetworkPolicyPort, listening: Option<&Pod>) -> Option<String> {
    let protocol = port.protocol.as_deref().unwrap_or("TCP");
    let low = protocol.to_ascii_lowercase();
    match &port.port {
        None => Some(format!("meta l4proto {low} ")),
        Some(IntOrString::Int(first)) => Some(match port.end_port {
            Some(last) => format!("{low} dport {first}-{last} "),
            None => format!("{low} dport {first} "),
        }),
        Some(IntOrString::String(name)) => {
            let containers = listening?.spec.as_ref()?.containers.iter();
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            let has_protocol = |protocol_of: Option<&str>| protocol_of.unwrap_or("TCP") == protocol;
            let found =
                ports.find(|port| port.name.as_ref() == Some(name) && has_protocol(port.protocol.as_deref()))?;
            Some(format!("{low} dport {} ", found.container_port))
        }
    }
}

/// Whether the selector matches. A missing or empty selector matches all labels, an invalid selector none.
fn selected(selector: Option<&LabelSelector>, labels: Option<&BTreeMap<String, String>>) -> bool {
    let none = BTreeMap::new();
    let selector = selector.cloned().unwrap_or_default();
    Selector::try_from(selector).is_ok_and(|selector| selector.matches(labels.unwrap_or(&none)))
}

/// `None` = the pod has no address, uses the host's network, or has terminated, so that its address may be reused.
fn addressed(pod: &Pod) -> Option<AddressedPod<'_>> {
    let status = pod.status.as_ref()?;
    let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let on_host = pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
    let addresses = status.pod_ips.iter().flatten();
    let addresses: Vec<IpAddr> = addresses.filter_map(|one| one.ip.parse().ok()).collect();
    (!has_ended && !on_host && !addresses.is_empty()).then_some(AddressedPod { pod, addresses })
}

/// The name of the address family in nft.
const fn family(address: IpAddr) -> &'static str {
    match address {
        IpAddr::V4(_) => "ip",
        IpAddr::V6(_) => "ip6",
    }
}

#[cfg(test)]
mod tests;
