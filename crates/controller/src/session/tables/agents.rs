//! What a member's agents report of themselves on their Nodes: backend, version, tunnels that are down, policies in force.

use std::collections::BTreeMap;

use clustermesh_api::{
    annotations::{self, Link},
    convert,
    mesh::AgentCounts,
    policy, revision,
};
use clustermesh_core::{
    enforcement::{Bypass, Unenforced},
    links::Tunnels,
    mesh::MeshId,
    observe::{Claim, Node, ObservedPolicy, Server},
};
use k8s_openapi::api::core::v1 as core_v1;
use kube::api::DynamicObject;

use super::{Tables, parse};
use crate::{events::cut, feed::Trust};

/// A Node as far as it is read: what the planner needs, and what is reported. Kilo's `last-seen` is in neither, so its
/// write each 30 s wakes nobody; [`CheckIns`](super::CheckIns) keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SeenNode {
    pub(super) node: Node,
    /// Version of the agent there.
    agent: Option<String>,
    /// Why packets pass by the policies there; empty = they are not known to.
    bypassed: String,
    /// Members to which it has a tunnel down.
    links: BTreeMap<String, Link>,
    /// Revision of the PeerPolicies in force there; empty = its agent does not tell.
    enforces: String,
}

/// A PeerPolicy, and what it says as agents digest it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenPolicy {
    /// As the planner reads it.
    pub(crate) policy: ObservedPolicy,
    pub(super) digest: revision::PolicyDigest,
}

impl SeenPolicy {
    pub(super) fn new(object: DynamicObject) -> Result<Self, String> {
        let name = object.metadata.name.clone().unwrap_or_default();
        let digest = revision::digest(&name, object.data.get("spec"));
        let policy = convert::policy::to_core(&parse::<policy::PeerPolicy>(object)?);
        Ok(Self { policy, digest })
    }
}

impl SeenNode {
    pub(super) fn new(node: &core_v1::Node) -> Self {
        let agent = convert::node::agent(node);
        Self {
            node: convert::node::to_core(node),
            bypassed: (agent.as_ref())
                .map(|agent| cut(&agent.datapath_bypassed, 128))
                .unwrap_or_default(),
            links: agent.as_ref().map(|agent| agent.links.clone()).unwrap_or_default(),
            enforces: (agent.as_ref())
                .map(|agent| cut(&agent.policy_revision, 64))
                .unwrap_or_default(),
            agent: agent.map(|agent| agent.version),
        }
    }
}

impl Tables {
    /// What serves WireGuard on its nodes; `version` = the controller's own.
    pub(crate) fn agents(&self, version: &str) -> AgentCounts {
        let mut counts = AgentCounts::default();
        self.nodes.read(|rows| {
            for SeenNode { node, agent, .. } in rows.values().map(|row| &row.value) {
                counts.total += 1;
                match node.server {
                    Server::Agent => counts.full += 1,
                    Server::AgentPolicy => counts.policy += 1,
                    Server::Kilo if node.public_key != Claim::Absent => counts.kilo += 1,
                    Server::Kilo => {}
                }
                counts.outdated += i64::from(agent.as_ref().is_some_and(|there| there != version));
            }
        });
        counts
    }

    /// What each of its nodes says of its tunnels to the entries of a mesh, where one is down. A node that is not ready says
    /// nothing: its agent may be gone, and what it wrote last stands for ever.
    pub(crate) fn links(&self, mesh: &MeshId) -> Vec<BTreeMap<String, Tunnels>> {
        let prefix = annotations::member(&mesh.namespace, &mesh.name, "");
        self.nodes.read(|rows| {
            let nodes = rows.values().map(|row| &row.value);
            let ready = nodes.filter(|seen| seen.node.ready && !seen.node.deleting && !seen.links.is_empty());
            ready
                .map(|seen| {
                    let links = seen.links.iter();
                    links
                        .filter_map(|(member, link)| Some((member.strip_prefix(&prefix)?.to_owned(), (*link).into())))
                        .collect()
                })
                .collect()
        })
    }

    /// On which of its meshed nodes PeerPolicies are not enforced. As above, a node that is not ready says nothing.
    pub(crate) fn unenforced(&self) -> Unenforced {
        let mut unenforced = Unenforced::default();
        self.nodes.read(|rows| {
            let ready = rows.iter().filter(|(_, row)| {
                let node = &row.value.node;
                node.ready && !node.deleting && node.public_key != Claim::Absent
            });
            for (name, row) in ready {
                let name = cut(&name.name, 253);
                match row.value.node.server {
                    Server::Kilo => drop(unenforced.without_agent.insert(name)),
                    Server::Agent | Server::AgentPolicy => match row.value.node.bypassed {
                        Some(Bypass::Netfilter) => drop(unenforced.bypassed.insert(name, row.value.bypassed.clone())),
                        Some(Bypass::Ipvs) => drop(unenforced.ipvs.insert(name)),
                        None => {}
                    },
                }
            }
        });
        unenforced
    }

    /// The revision of all PeerPolicies that stand in it, as its agents make it, theirs of other hubs too; `None` = that
    /// cannot be told now, or not what its Nodes say.
    pub(crate) fn policy_revision(&self) -> Option<String> {
        let live = self.nodes.trust() == Trust::Live && self.policies.trust() == Trust::Live;
        // Of one that cannot be read, an older one is kept.
        let whole = live && self.policies.malformed().is_empty();
        whole.then(|| (self.policies).read(|rows| revision::of_all(rows.values().map(|row| &row.value.digest))))
    }

    /// Which revision of the PeerPolicies each of its meshed nodes says to enforce. As above, a node that is not ready says
    /// nothing.
    pub(crate) fn enforced(&self) -> BTreeMap<String, String> {
        self.nodes.read(|rows| {
            let meshed = rows.iter().filter(|(_, row)| {
                let node = &row.value.node;
                node.ready && !node.deleting && node.public_key != Claim::Absent && node.server != Server::Kilo
            });
            meshed
                .map(|(name, row)| (cut(&name.name, 253), row.value.enforces.clone()))
                .collect()
        })
    }
}
