//! Explains the planner's decision whether two members are connected, and why no Peer contains an address. [`super::packet`]
//! follows the packets of connected members.

use clustermesh_core::{
    mesh::{Mesh, ObjectName, PortRef},
    observe::{Gateway, Observation, Observations},
    plan::{Fact, Link, MemberView, NotConnected, Plan, PlannedAccess},
};

use super::{
    Destination, Explanation, Rule, Source, allowed_networks_text, last_observed, packet::PacketTrace, port_text,
};

/// A connection to explain, in one mesh. `source` and `destination` are the entries of its client and server; `from` and `to` are the
/// client and the server themselves. The `source` of a planned Peer or SandboxAccess is another thing: the member that it describes.
pub(super) struct Query<'q> {
    pub(super) observations: &'q Observations,
    pub(super) plan: &'q Plan,
    pub(super) mesh: &'q Mesh,
    /// Name of the source's entry.
    pub(super) source: &'q str,
    /// Name of the destination's entry.
    pub(super) destination: &'q str,
    pub(super) source_member: MemberView<'q>,
    pub(super) destination_member: MemberView<'q>,
    pub(super) from: &'q Source,
    pub(super) to: &'q Destination,
}

impl<'q> Query<'q> {
    pub(super) fn answer(&self) -> Explanation {
        let early_answer = self.denied_between_members().or_else(|| self.missing_member_or_crd());
        early_answer.unwrap_or_else(|| match self.destination_member.link_from(&self.source_member) {
            Ok(Link::Sandbox) => self.answer_for_sandbox(),
            // Members other than sandboxes use the gateways of a masqueraded member.
            _ => (self.granted_at_gateway()).unwrap_or_else(|| PacketTrace { query: self }.follow()),
        })
    }

    /// Both members, each with the name of its entry.
    fn both_members(&self) -> [(&'q str, MemberView<'q>); 2] {
        [
            (self.source, self.source_member),
            (self.destination, self.destination_member),
        ]
    }

    /// The facts that the plan reports about this mesh.
    pub(super) fn facts(&self) -> impl Iterator<Item = &Fact> {
        let plan = self.plan.meshes.get(&self.mesh.id);
        plan.into_iter().flat_map(|plan| &plan.facts)
    }

    /// Why the source member cannot open any connection to the destination member. `None` = each connection depends on its nodes and
    /// addresses, or on a grant.
    fn denied_between_members(&self) -> Option<Explanation> {
        let deny = |rule, message: String| Some(Explanation::new(rule, message));
        if self.mesh.deleting {
            return deny(
                Rule::Deleting,
                format!(
                    "ClusterMesh {} is being deleted, and the controller deletes its objects",
                    self.mesh.id
                ),
            );
        }
        match self.destination_member.link_from(&self.source_member) {
            Err(not_connected) => return Some(self.explain_not_connected(&not_connected)),
            // `Grantor` is the role of the source, so the destination is a sandbox.
            Ok(Link::Grantor) => {
                return deny(
                    Rule::TowardSandbox,
                    format!(
                        "cluster {:?} is a sandbox: it can open connections to the Services that are granted to it, and no \
                         member can open a connection to it",
                        self.destination
                    ),
                );
            }
            Ok(Link::Meshed | Link::Sandbox) => {}
        }
        for (name, member) in self.both_members() {
            if member.cluster().quarantine {
                let fact_message = self.facts().find_map(|fact| match fact {
                    Fact::Quarantined { cluster, message } if cluster == name => Some(message.clone()),
                    _ => None,
                });
                let message = fact_message.unwrap_or_else(|| format!("cluster {name:?} is quarantined"));
                return deny(
                    Rule::Quarantined,
                    format!("{message}. Remove the quarantine to allow connections"),
                );
            }
        }
        None
    }

    /// The planned SandboxAccess of the source in the destination, with its name.
    fn planned_access(&self) -> Option<(&'q String, &'q PlannedAccess)> {
        let target = self.plan.meshes.get(&self.mesh.id)?.targets.get(self.destination)?;
        let mut accesses = target.accesses.iter();
        accesses.find(|(_, access)| access.source == *self.source)
    }

    /// The gateways of the destination that serve the source.
    fn serving_gateways(&self) -> Vec<(&'q ObjectName, &'q Gateway)> {
        let member = self.destination_member.last_observed();
        let gateways = member.into_iter().flat_map(|member| &member.gateways);
        gateways.filter(|(_, gateway)| gateway.serves(self.source)).collect()
    }

    /// The answer if the server's address and port are a gateway port that the planned SandboxAccess grants to the source.
    fn granted_at_gateway(&self) -> Option<Explanation> {
        let gateways = self.serving_gateways();
        let is_destination = |gateway: &Gateway| gateway.addresses.contains(&self.to.address);
        let (gateway, _) = gateways.iter().find(|(_, gateway)| is_destination(gateway))?;
        let ((name, access), port) = (self.planned_access()?, self.to.port?);
        let granted = access.spec.grants.get(&port)?;
        let message = format!(
            "SandboxAccess {name} in cluster {:?} maps port {} of gateway {gateway} to port {:?} of Service {}",
            self.destination, port.1, granted.port, granted.service
        );
        Some(
            self.missing_gateway_peer(gateway)
                .unwrap_or_else(|| Explanation::new(Rule::Granted, message)),
        )
    }

    /// Answers for a sandbox as the source: it reaches only the gateway ports in its SandboxAccess.
    fn answer_for_sandbox(&self) -> Explanation {
        let no_gateway = self.facts().find_map(|fact| match fact {
            Fact::NoGateway { cluster, message } if cluster == self.destination => Some(message.clone()),
            _ => None,
        });
        if let Some(message) = no_gateway {
            return Explanation::new(Rule::NoGateway, message);
        }
        if let Some(granted) = self.granted_at_gateway() {
            return granted;
        }
        let access = self.planned_access();
        let gateways = self.serving_gateways();
        let ports = access.into_iter().flat_map(|(_, access)| &access.spec.grants);
        let ports: Vec<String> = ports
            .map(|((protocol, port), granted)| format!("{}/{port} for {}", protocol.as_str(), granted.service))
            .collect();
        let addresses = gateways.iter().flat_map(|(_, gateway)| &gateway.addresses);
        let addresses: Vec<String> = addresses.map(ToString::to_string).collect();
        let message = format!(
            "a sandbox enters cluster {:?} only through its gateways ({}), at the granted ports ({}). {}",
            self.destination,
            join_or_none(&addresses),
            join_or_none(&ports),
            self.grants_text()
        );
        Explanation::new(Rule::DestinationNotGranted, message)
    }

    /// Why no Peer for this gateway of the destination is planned in the source, although the SandboxAccess exists.
    /// `None` = the Peer is planned, or the SandboxAccess does not exist yet (without it the planner plans no Peer), or the
    /// destination was not observed.
    fn missing_gateway_peer(&self, gateway: &ObjectName) -> Option<Explanation> {
        let member = self.destination_member.last_observed()?;
        let plan = self.plan.meshes.get(&self.mesh.id)?;
        // The existing SandboxAccess is looked up by its planned name. Its source would not suffice: an entry of another mesh may
        // have the same name.
        let mut planned = plan.targets.get(self.destination)?.accesses.iter();
        let existing = member.accesses.as_ref();
        let access_exists = planned.any(|(name, access)| {
            access.source == self.source && existing.is_some_and(|existing| existing.contains_key(name))
        });
        // The gateway's Peer describes the destination, and is written into the source.
        let mut peers = plan.targets.get(self.source)?.peers.values();
        let has_peer = peers
            .any(|peer| peer.source == self.destination && peer.spec.allowed_ips.contains(&self.to.address.into()));
        if !access_exists || has_peer {
            return None;
        }
        let skipped = self.skipped(self.destination, &format!("gateway {gateway}"), self.source);
        Some(skipped.unwrap_or_else(|| {
            let message = format!("no Peer in cluster {:?} contains {}", self.source, self.to.address);
            Explanation::new(Rule::NoPeer, message)
        }))
    }

    fn explain_not_connected(&self, not_connected: &NotConnected) -> Explanation {
        match not_connected {
            NotConnected::SameCluster => Explanation::new(Rule::SameCluster, "both entries are the same cluster"),
            NotConnected::Standard(name) => {
                let conflict = self.facts().find_map(|fact| match fact {
                    Fact::ProfileConflict { cluster, message } if cluster == name => Some(format!(" ({message})")),
                    _ => None,
                });
                Explanation::new(
                    Rule::Standard,
                    format!(
                        "cluster {name:?} has isolationProfile standard{}: it is not connected to any cluster",
                        conflict.unwrap_or_default()
                    ),
                )
            }
            NotConnected::NoNetworks(name) => {
                let overlap = self.facts().find_map(|fact| match fact {
                    Fact::NetworksOverlap { cluster, message, .. } if cluster == name => Some(message.clone()),
                    _ => None,
                });
                let message = overlap.unwrap_or_else(|| format!("cluster {name:?} has no network in allowedNetworks"));
                // The rule covers both: networks that overlap, and no networks.
                Explanation::new(Rule::NetworksOverlap, message)
            }
            NotConnected::Sandboxes => Explanation::new(
                Rule::TwoSandboxes,
                format!(
                    "clusters {:?} and {:?} are both sandboxes: two sandboxes are never connected",
                    self.source, self.destination
                ),
            ),
            NotConnected::NoGrant(sandbox) if sandbox == self.destination => Explanation::new(
                Rule::TowardSandbox,
                format!("cluster {sandbox:?} is a sandbox: no member can open a connection to it"),
            ),
            NotConnected::NoGrant(sandbox) => Explanation::new(
                Rule::NoGrantForMember,
                format!(
                    "cluster {sandbox:?} is a sandbox and has no grant for {:?}: add the Service to its egress. {}",
                    self.destination,
                    self.grants_text()
                ),
            ),
        }
    }

    /// Answers if a member was not observed, or has no Peer CRD.
    fn missing_member_or_crd(&self) -> Option<Explanation> {
        for (name, member) in self.both_members() {
            if member.last_observed().is_none() {
                let observation = member.observation();
                let why = observation
                    .and_then(Observation::not_fresh_reason)
                    .unwrap_or("not observed");
                return Some(Explanation::new(
                    Rule::MemberUnseen,
                    format!("cluster {name:?} was not observed ({why}), so its Nodes and objects are unknown"),
                ));
            }
        }
        let has_no_crd = |member: &MemberView<'_>| member.last_observed().is_some_and(|member| member.peers.is_none());
        let missing = self.both_members().into_iter().find(|(_, member)| has_no_crd(member));
        missing.map(|(name, _)| {
            Explanation::new(
                Rule::PeerCRDMissing,
                format!("cluster {name:?} has no CRD peers.kilo.squat.ai; install the agent's manifests there"),
            )
        })
    }

    /// Lists the grants of the source (a sandbox), as a sentence for a message.
    pub(super) fn grants_text(&self) -> String {
        let source = self.source_member.cluster();
        if source.egress.is_empty() {
            return format!("Cluster {:?} has no grants", self.source);
        }
        let plan = self.plan.meshes.get(&self.mesh.id);
        let reports = || plan.into_iter().flat_map(|plan| &plan.egress);
        let grants = source.egress.iter().map(|grant| {
            let ports: Vec<String> = grant
                .ports
                .iter()
                .map(|port| match &port.port {
                    PortRef::Number(number) => port_text((port.protocol, *number)),
                    PortRef::Name(name) => format!("{name}/{}", port.protocol.as_str()),
                })
                .collect();
            let ports = if ports.is_empty() {
                "every port".to_owned()
            } else {
                format!("port {}", ports.join(", "))
            };
            let mirrored_service = &grant.local;
            let report = reports().find(|report| report.cluster == self.source && report.service == *mirrored_service);
            let problem = report
                .map(|report| &*report.message)
                .filter(|message| !message.is_empty());
            format!(
                "{} of {:?} on {ports}{}",
                grant.service,
                grant.cluster,
                problem.map(|why| format!(" ({why})")).unwrap_or_default()
            )
        });
        let grants: Vec<String> = grants.collect();
        format!("The sandbox's grants are: {}", grants.join("; "))
    }

    /// Explains why no Peer in the source's cluster contains the server's address.
    pub(super) fn explain_missing_peer(&self) -> Explanation {
        let destination = self.destination_member.cluster();
        let address = self.to.address;
        if let Some(node) = &self.to.node
            && let Some(skipped) = self.skipped(self.destination, node, self.source)
        {
            return skipped;
        }
        if !destination.allows(address.into()) {
            return Explanation::new(
                Rule::OutsideAllowedNetworks,
                format!(
                    "{address} lies outside allowedNetworks of cluster {:?} ({})",
                    self.destination,
                    allowed_networks_text(destination)
                ),
            );
        }
        let no_anchor = self.facts().find_map(|fact| match fact {
            Fact::NoAnchor { cluster, message } if cluster == self.destination => Some(message.clone()),
            _ => None,
        });
        let has_nodes =
            last_observed(self.observations, &self.to.cluster).is_some_and(|member| !member.nodes.is_empty());
        match no_anchor {
            Some(message) => Explanation::new(
                Rule::NoAnchor,
                format!(
                    "{address} of cluster {:?} is in an anchored network: {message}",
                    self.destination
                ),
            ),
            None => Explanation::new(
                Rule::NoPeer,
                format!(
                    "no Peer in cluster {:?} contains {address}: no Node of cluster {:?} owns it{}, and it is in no anchored network",
                    self.source,
                    self.destination,
                    if has_nodes { "" } else { " (none is known)" },
                ),
            ),
        }
    }

    /// Explains why the planner skipped a Node of the entry `cluster` for the entry `into`, so that `into` has no Peer of the Node. For a
    /// gateway, `node` is `gateway NAMESPACE/NAME`. `None` = the Node was not skipped.
    pub(super) fn skipped(&self, cluster: &str, node: &str, into: &str) -> Option<Explanation> {
        let report = self.plan.meshes.get(&self.mesh.id)?.clusters.get(cluster)?;
        let skipped = report
            .skipped
            .iter()
            .find(|skipped| skipped.node == node && skipped.target.as_deref().is_none_or(|only| only == into))?;
        let subject = match node.strip_prefix("gateway ") {
            Some(gateway) => format!("Gateway {gateway}"),
            None => format!("Node {node}"),
        };
        Some(Explanation::new(
            Rule::NodeSkipped,
            format!(
                "{subject} of cluster {cluster:?} has no Peer: {} ({})",
                skipped.reason, skipped.message
            ),
        ))
    }
}

fn join_or_none(all: &[String]) -> String {
    if all.is_empty() {
        "none".to_owned()
    } else {
        all.join(", ")
    }
}
