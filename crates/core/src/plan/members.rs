//! Shows the members of a mesh as the planner uses them: their effective entries, how they are connected, and their nodes. A
//! program that explains a plan reads these values instead of repeating the planner's rules.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{
    MeshPlan, Naming, Settings, by_age, claims,
    link::{self, Link, NotConnected},
    mesh::{MeshPlanner, PreparedMesh},
    nodes::NodeRegistry,
    target::MeshMember,
};
use crate::{
    mesh::{Cluster, Mesh},
    observe::{Member, Observation, Observations},
    ownership::Claimant,
};

/// The members of one mesh.
pub struct MeshMembers<'a> {
    mesh: &'a Mesh,
    prepared: PreparedMesh<'a>,
}

/// One member of a mesh.
#[derive(Clone, Copy)]
pub struct MemberView<'m> {
    member: &'m MeshMember<'m>,
    registry: Option<&'m NodeRegistry<'m>>,
}

/// The members of every mesh, oldest mesh first, for the same inputs as [`plan`](super::plan).
#[must_use]
pub fn members<'a>(
    meshes: &'a [Mesh],
    seen: &'a Observations,
    settings: &Settings,
    naming: &dyn Naming,
) -> Vec<MeshMembers<'a>> {
    let by_age = by_age(meshes);
    let accepted = claims::accept(&by_age);
    let claimants: Vec<Claimant> = by_age.iter().map(|mesh| Claimant::from(*mesh)).collect();
    let members = by_age.iter().map(|mesh| {
        let planner = MeshPlanner {
            mesh,
            all_meshes: &by_age,
            accepted: &accepted,
            seen,
            settings,
            naming,
            claimants: &claimants,
            used: &Default::default(),
        };
        MeshMembers {
            mesh,
            prepared: planner.prepare(&mut MeshPlan::default()),
        }
    });
    members.collect()
}

impl<'a> MeshMembers<'a> {
    /// The mesh.
    #[must_use]
    pub const fn mesh(&self) -> &'a Mesh {
        self.mesh
    }

    /// The member with this entry name.
    #[must_use]
    pub fn get(&self, entry: &str) -> Option<MemberView<'_>> {
        Some(MemberView {
            member: self.prepared.mesh_members.get(entry)?,
            registry: self.prepared.registries.get(entry),
        })
    }
}

impl<'m> MemberView<'m> {
    /// The entry, with the profile and quarantine that apply. `allowed` has only the accepted networks, without those of
    /// the member's gateways, because other members send to a gateway only by the gateway's own Peer.
    #[must_use]
    pub fn cluster(&self) -> &'m Cluster {
        &self.member.cluster
    }

    /// The observation, if there is one.
    #[must_use]
    pub const fn observation(&self) -> Option<&'m Observation<Member>> {
        self.member.observed
    }

    /// The last observed state.
    #[must_use]
    pub fn last_observed(&self) -> Option<&'m Member> {
        self.member.last_observed()
    }

    /// How `source` is connected to this member.
    ///
    /// # Errors
    /// Why the two members are not connected.
    pub fn link_from(&self, source: &MemberView<'_>) -> Result<Link, NotConnected> {
        link::decide(self.member, source.member)
    }

    /// The prefixes of a Node's Peers, without anchored networks. `None` = the Node is not registered.
    #[must_use]
    pub fn prefixes(&self, node: &str) -> Option<&'m BTreeSet<IpNet>> {
        let mut registered = self.registry?.registered.iter();
        registered
            .find(|registered| registered.node == node)
            .map(|registered| &registered.prefixes)
    }

    /// Whether the Peer of `leader` contains the prefixes of `node`, under Kilo's granularity `location`.
    #[must_use]
    pub fn is_led_by(&self, node: &str, leader: &str) -> bool {
        let followers = self
            .registry
            .and_then(|registry| registry.segments.followers_by_leader.get(leader));
        followers.is_some_and(|followers| followers.contains(&node))
    }
}
