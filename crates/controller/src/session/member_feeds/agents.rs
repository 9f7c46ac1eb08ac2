//! Reads the reports that the agents of a member write to their Nodes: version, tunnels that are down, and the PeerPolicies in force.

use std::{collections::BTreeMap, sync::Arc};

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
    versions::NodeVersions,
};
use k8s_openapi::api::core::v1 as core_v1;
use kube::api::DynamicObject;

use super::{MemberFeeds, parse};
use crate::{events::truncate, feed::Trust};

/// The parts of a Node that the planner or the status of the ClusterMesh need. Kilo's annotation `last-seen`, which changes every 30 s,
/// is not among them, because a change of the row triggers a pass. [`CheckIns`](super::CheckIns) stores the annotation's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeRow {
    pub(super) node: Arc<Node>,
    /// Version of the agent.
    agent_version: Option<String>,
    /// Release of the kernel. Empty = not reported.
    kernel: String,
    /// Why packets bypass the PeerPolicies on the node. Empty = the agent reports no bypass.
    bypass_reason: String,
    /// The numbers of the node's tunnels (up, down, total) to another member. Contains only members to which a tunnel is down. The
    /// keys are from [`annotations::member_key`].
    links: BTreeMap<String, Link>,
    /// Revision of the PeerPolicies in force on the node. Empty = the agent does not report it.
    policy_revision: String,
}

/// A PeerPolicy and its digest. Agents compute the digest in the same way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PolicyRow {
    pub(crate) policy: ObservedPolicy,
    pub(super) digest: revision::PolicyDigest,
}

impl PolicyRow {
    pub(super) fn new(object: DynamicObject) -> Result<Self, String> {
        let name = object.metadata.name.clone().unwrap_or_default();
        let digest = revision::digest(&name, object.data.get("spec"));
        let policy = convert::policy::to_core(&parse::<policy::PeerPolicy>(object)?);
        Ok(Self { policy, digest })
    }
}

impl NodeRow {
    pub(super) fn new(node: &core_v1::Node) -> Self {
        let agent = convert::node::agent(node);
        Self {
            node: Arc::new(convert::node::to_core(node)),
            bypass_reason: (agent.as_ref())
                .map(|agent| truncate(&agent.datapath_bypassed, 128))
                .unwrap_or_default(),
            links: agent.as_ref().map(|agent| agent.links.clone()).unwrap_or_default(),
            policy_revision: (agent.as_ref())
                .map(|agent| truncate(&agent.policy_revision, 64))
                .unwrap_or_default(),
            agent_version: agent.map(|agent| agent.version),
            kernel: node_info(node)
                .map(|info| truncate(&info.kernel_version, 64))
                .unwrap_or_default(),
        }
    }
}

fn node_info(node: &core_v1::Node) -> Option<&core_v1::NodeSystemInfo> {
    node.status.as_ref()?.node_info.as_ref()
}

impl MemberFeeds {
    /// Counts the nodes with wg-agent in full mode, with wg-agent in policy mode and with `kg` alone, and the nodes whose wg-agent has
    /// another version than `version`, the controller's. A node without wg-agent and without a public key counts only in the total.
    pub(crate) fn count_agents(&self, version: &str) -> AgentCounts {
        let mut counts = AgentCounts::default();
        self.nodes.read(|rows| {
            for NodeRow {
                node, agent_version, ..
            } in rows.values().map(|row| &row.value)
            {
                counts.total += 1;
                match node.server {
                    Server::Agent => counts.full += 1,
                    Server::AgentPolicy => counts.policy += 1,
                    Server::Kilo if node.public_key != Claim::Absent => counts.kilo += 1,
                    Server::Kilo => {}
                }
                counts.outdated += i64::from(agent_version.as_ref().is_some_and(|reported| reported != version));
            }
        });
        counts
    }

    /// Returns the versions of wg-agent and of the kernel, by node with wg-agent. As in [`Self::links`], nodes that are not Ready or are
    /// being deleted are ignored.
    pub(crate) fn versions(&self) -> BTreeMap<String, NodeVersions> {
        self.nodes.read(|rows| {
            let ready = rows
                .iter()
                .filter(|(_, row)| row.value.node.ready && !row.value.node.deleting);
            let with_agent = ready.filter_map(|(name, row)| {
                let versions = NodeVersions {
                    agent: row.value.agent_version.clone()?,
                    kernel: row.value.kernel.clone(),
                };
                Some((truncate(&name.name, 253), versions))
            });
            with_agent.collect()
        })
    }

    /// For each node that reports links, returns the numbers of the node's tunnels (up, down, total) to each member of `mesh` to
    /// which at least one of them is down. Ignores nodes that are not Ready or are being deleted: their agents may have stopped,
    /// and then their last reports never change.
    pub(crate) fn links(&self, mesh: &MeshId) -> Vec<BTreeMap<String, Tunnels>> {
        let prefix = annotations::member_key(&mesh.namespace, &mesh.name, "");
        self.nodes.read(|rows| {
            let nodes = rows.values().map(|row| &row.value);
            let ready = nodes.filter(|row| row.node.ready && !row.node.deleting && !row.links.is_empty());
            ready
                .map(|row| {
                    let links = row.links.iter();
                    links
                        .filter_map(|(member, link)| Some((member.strip_prefix(&prefix)?.to_owned(), (*link).into())))
                        .collect()
                })
                .collect()
        })
    }

    /// Returns the nodes with a public key on which PeerPolicies are not enforced. As in [`Self::links`], nodes that are not Ready or
    /// are being deleted are ignored.
    pub(crate) fn unenforced(&self) -> Unenforced {
        let mut unenforced = Unenforced::default();
        self.nodes.read(|rows| {
            let with_key = rows.iter().filter(|(_, row)| {
                let node = &row.value.node;
                node.ready && !node.deleting && node.public_key != Claim::Absent
            });
            for (name, row) in with_key {
                let name = truncate(&name.name, 253);
                match row.value.node.server {
                    Server::Kilo => drop(unenforced.without_agent.insert(name)),
                    Server::Agent | Server::AgentPolicy => match row.value.node.bypassed {
                        Some(Bypass::Cni) => {
                            drop(
                                unenforced
                                    .without_netfilter
                                    .insert(name, row.value.bypass_reason.clone()),
                            );
                        }
                        Some(Bypass::Ipvs) => drop(unenforced.ipvs.insert(name)),
                        None => {}
                    },
                }
            }
        });
        unenforced
    }

    /// Returns the revision of all PeerPolicies in the member, including those of other hubs. Agents compute it in the same way. `None` =
    /// the feed of Nodes or PeerPolicies is not current, or a PeerPolicy is malformed.
    pub(crate) fn policy_revision(&self) -> Option<String> {
        let is_live = self.nodes.trust() == Trust::Live && self.policies.trust() == Trust::Live;
        // The row of a malformed PeerPolicy has the last valid content, so the revision would be wrong.
        let is_complete = is_live && self.policies.malformed().is_empty();
        is_complete.then(|| (self.policies).read(|rows| revision::of_all(rows.values().map(|row| &row.value.digest))))
    }

    /// Returns the revision of the PeerPolicies that each node with an agent and a public key reports as in force. As in
    /// [`Self::links`], nodes that are not Ready or are being deleted are ignored.
    pub(crate) fn enforced_revisions(&self) -> BTreeMap<String, String> {
        self.nodes.read(|rows| {
            let with_agent = rows.iter().filter(|(_, row)| {
                let node = &row.value.node;
                node.ready && !node.deleting && node.public_key != Claim::Absent && node.server != Server::Kilo
            });
            with_agent
                .map(|(name, row)| (truncate(&name.name, 253), row.value.policy_revision.clone()))
                .collect()
        })
    }
}
