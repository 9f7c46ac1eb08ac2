//! Compares the plan with the observed objects of one member, and lists the writes that are needed, in a safe order.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    mesh::{ClusterIdentity, MeshId, ObjectName, overlap},
    observe::{AccessSpec, Member, Mirror, ObservedPeer, Owner, PeerRole, PeerSpec, PolicySpec, Rows},
    ownership::{self, Ownership},
    plan::{MemberStepChanges, MeshPlan, Plan, PlannedSlice, TargetPlan},
};

mod fields;
mod order;
mod slices;

use fields::{access_fields, differing, peer_fields, policy_fields};
pub(crate) use order::{PeerOrder, desired_spec, existing_spec, gained_prefixes, lost_prefixes};

/// What a step does with its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// The object does not exist.
    Create,
    /// The object differs from the plan.
    Update,
    /// The object should not exist.
    Delete,
}

impl Action {
    /// The name in lower case, for logs, metrics and command-line output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Delete => "delete",
        }
    }
}

/// The object that a step writes, with its desired value; `None` = the object is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A Peer, by name.
    Peer(String, Option<Arc<PeerSpec>>),
    /// A PeerPolicy, by name.
    Policy(String, Option<Box<PolicySpec>>),
    /// A SandboxAccess, by name.
    Access(String, Option<Box<AccessSpec>>),
    /// A mirrored Service.
    Service(ObjectName, Option<Mirror>),
    /// An EndpointSlice of a mirrored Service, with the name of the Service.
    Slice(ObjectName, Option<Box<(String, PlannedSlice)>>),
}

impl Item {
    /// The Kubernetes kind of the object.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Peer(..) => "Peer",
            Self::Policy(..) => "PeerPolicy",
            Self::Access(..) => "SandboxAccess",
            Self::Service(..) => "Service",
            Self::Slice(..) => "EndpointSlice",
        }
    }

    /// The name of the object, with the namespace if the object has one.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Peer(name, _) | Self::Policy(name, _) | Self::Access(name, _) => name.clone(),
            Self::Service(name, _) | Self::Slice(name, _) => name.to_string(),
        }
    }
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The mesh that the step serves; for an orphan, the mesh in its labels.
    pub mesh: MeshId,
    /// Create, update or delete.
    pub action: Action,
    /// The object and its desired value.
    pub item: Item,
    /// The ownership labels that the object should have; for a delete, those that it has.
    pub owner: Arc<Owner>,
    /// The fields that differ (updates only).
    pub fields: Vec<&'static str>,
}

/// Lists all writes into the member `identity`, for all meshes, in order; empty if the member matches its plan.
///
/// PeerPolicies are created and updated first and deleted last, so that no Peer exists without its policy. All steps of SandboxAccesses,
/// including deletes, also come first. A prefix that moves to another Peer is added to that Peer before the old Peer loses it (`order.rs`
/// names the exceptions). A renamed Peer is deleted under its old name before it is created under the new one. All other steps for Peers
/// come in the order: deletes, updates, creates.
#[must_use]
pub fn diff(plan: &Plan, identity: &ClusterIdentity, member: &Member) -> Vec<Arc<Step>> {
    steps(
        &Differ {
            plan,
            identity,
            ignores_pause: false,
        },
        member,
    )
}

/// Like [`diff`], but as if no mesh were paused. The result shows how far the member is from its plan; it must not be written.
#[must_use]
pub fn diff_if_resumed(plan: &Plan, identity: &ClusterIdentity, member: &Member) -> Vec<Arc<Step>> {
    steps(
        &Differ {
            plan,
            identity,
            ignores_pause: true,
        },
        member,
    )
}

/// Updates the steps of [`diff`] for a member. Computes only those again that `changes` names; the others stay the same.
pub(crate) fn update_steps(
    steps: &mut Vec<Arc<Step>>,
    plan: &Plan,
    identity: &ClusterIdentity,
    member: &Member,
    changes: &MemberStepChanges,
) {
    let differ = Differ {
        plan,
        identity,
        ignores_pause: false,
    };
    let (mut peers, mut others): (Vec<Arc<Step>>, Vec<Arc<Step>>) = std::mem::take(steps)
        .into_iter()
        .partition(|step| matches!(step.item, Item::Peer(..)));
    if let Some(existing) = &member.peers {
        peers.retain(|step| matches!(&step.item, Item::Peer(name, _) if !changes.peers.contains(name)));
        peers.extend(differ.peers(existing, Some(&changes.peers)));
        peers.sort_by_cached_key(|step| (step.action != Action::Delete, step.item.name()));
    }
    if changes.has_other_kinds {
        others = differ.other_kinds(member);
    }
    peers.extend(others);
    *steps = peers;
    sort_by_phase(steps, member);
}

fn steps(differ: &Differ<'_>, member: &Member) -> Vec<Arc<Step>> {
    let peers = member.peers.as_ref().map(|existing| differ.peers(existing, None));
    let mut steps = peers.unwrap_or_default();
    steps.extend(differ.other_kinds(member));
    sort_by_phase(&mut steps, member);
    steps
}

/// Sorts the steps by their phase:
///
/// - 0: creates and updates of PeerPolicies, and all steps of SandboxAccesses
/// - 1 to 5: Peers ([`PeerOrder::phase`]); also deletes of EndpointSlices (3) and mirrored Services (4)
/// - 6: creates and updates of mirrored Services
/// - 7: creates and updates of EndpointSlices
/// - 8: deletes of PeerPolicies
fn sort_by_phase(steps: &mut [Arc<Step>], member: &Member) {
    let none = Rows::default();
    let existing = member.peers.as_ref().unwrap_or(&none);
    let order = PeerOrder::of(steps, existing);
    steps.sort_by_cached_key(|step| match (&step.item, step.action) {
        (Item::Policy(..), Action::Delete) => 8,
        (Item::Policy(..) | Item::Access(..), _) => 0,
        (Item::Peer(..), _) => order.phase(step, existing),
        (Item::Slice(..), Action::Delete) => 3,
        (Item::Service(..), Action::Delete) => 4,
        (Item::Service(..), _) => 6,
        (Item::Slice(..), _) => 7,
    });
}

/// An object of the plan.
struct Desired<'a, K: ?Sized + ToOwned, V: Clone> {
    name: Cow<'a, K>,
    mesh: &'a MeshId,
    /// The source, by its entry's name.
    source: &'a str,
    value: Cow<'a, V>,
}

struct Differ<'a> {
    plan: &'a Plan,
    identity: &'a ClusterIdentity,
    /// Treat paused meshes as if they were not paused.
    ignores_pause: bool,
}

impl<'a> Differ<'a> {
    /// The meshes in which this member is an entry, with that entry's plan.
    fn targets(&self) -> impl Iterator<Item = (&'a MeshId, &'a MeshPlan, &'a TargetPlan)> + '_ {
        self.plan.meshes.iter().flat_map(move |(id, mesh)| {
            mesh.targets
                .iter()
                .filter(move |(name, _)| {
                    mesh.identities
                        .get(*name)
                        .is_some_and(|i| i.same_cluster(self.identity))
                })
                .map(move |(_, target)| (id, mesh, target))
        })
    }

    fn is_paused(&self, mesh: &MeshPlan) -> bool {
        mesh.paused && !self.ignores_pause
    }

    /// Whether existing objects of this mirrored Service are kept, because the state needed to plan it was not observed.
    fn is_kept(&self, mesh: &MeshId, service: &ObjectName) -> bool {
        self.targets()
            .any(|(id, plan, target)| id == mesh && !plan.deleting && target.kept_services.contains(service))
    }

    /// The desired objects of one kind in all active meshes, sorted. If two meshes plan objects with the same name, the first counts.
    fn desired<K: ?Sized + Ord + ToOwned + 'a, V: Clone + 'a, L>(
        &self,
        list: impl Fn(&'a TargetPlan) -> L,
    ) -> Vec<Desired<'a, K, V>>
    where
        L: Iterator<Item = (Cow<'a, K>, &'a str, Cow<'a, V>)>,
    {
        let mut desired = Vec::new();
        for (mesh, plan, target) in self.targets() {
            if self.is_paused(plan) || plan.deleting {
                continue;
            }
            desired.extend(list(target).map(|(name, source, value)| Desired {
                name,
                mesh,
                source,
                value,
            }));
        }
        desired.sort_by(|one, other| one.name.cmp(&other.name));
        desired.dedup_by(|later, first| later.name == first.name);
        desired
    }

    fn owner(&self, mesh: &MeshId, source: &str) -> Owner {
        Owner {
            mesh: Some(mesh.name.clone()),
            mesh_namespace: Some(mesh.namespace.clone()),
            hub: Some(self.plan.hub.clone()),
            source_cluster: Some(source.to_owned()),
        }
    }

    /// Whether `owner` equals the result of [`Self::owner`].
    fn is_owner(&self, owner: &Owner, mesh: &MeshId, source: &str) -> bool {
        let Owner {
            mesh: name,
            mesh_namespace,
            hub,
            source_cluster,
        } = owner;
        source_cluster.as_deref() == Some(source)
            && name.as_ref() == Some(&mesh.name)
            && mesh_namespace.as_ref() == Some(&mesh.namespace)
            && hub.as_ref() == Some(&self.plan.hub)
    }

    /// The mesh for which an object that is not in the plan may be deleted; `None` = the object is kept.
    ///
    /// The mesh of an orphan may have been moved to another hub (`clusterctl move`) rather than deleted, so an orphan is deleted only if an
    /// active mesh (not paused, not in deletion) replaces it (`superseded`). Objects of a paused mesh are kept. Objects of a
    /// source in `sources_not_fresh` are kept unless their mesh is being deleted.
    fn mesh_allowing_delete(&self, owner: &Owner, superseded: impl FnOnce() -> bool) -> Option<MeshId> {
        match ownership::of(owner, &self.plan.hub, &self.plan.claimants) {
            Ownership::Foreign | Ownership::Unlabelled => None,
            Ownership::Orphan => superseded().then(|| MeshId {
                namespace: owner.mesh_namespace.clone().unwrap_or_default(),
                name: owner.mesh.clone().unwrap_or_default(),
            }),
            Ownership::Mesh(id) => {
                let mesh = self.plan.meshes.get(id)?;
                let source = owner.source_cluster.as_deref().unwrap_or_default();
                let retained = self
                    .targets()
                    .any(|(other, _, target)| other == id && target.sources_not_fresh.contains(source));
                (!self.is_paused(mesh) && (mesh.deleting || !retained)).then(|| id.clone())
            }
        }
    }

    /// Compares the objects of one kind. `superseded` = an active mesh replaces the object, so it is deleted even if it is an
    /// orphan ([`Self::mesh_allowing_delete`]). `fields` lists the fields that differ.
    /// Both `existing` and `desired` are sorted by name. The steps are: all deletes, then the others, each by name.
    fn compare<'v, K: ?Sized + Ord + ToOwned + 'v, E: 'v, V: Clone>(
        &self,
        existing: impl Iterator<Item = (&'v K, &'v Owner, Option<&'v E>)>,
        desired: Vec<Desired<'_, K, V>>,
        item: impl Fn(K::Owned, Option<V>) -> Item,
        superseded: impl Fn(&K, &E) -> bool,
        fields: impl Fn(&E, &V) -> Vec<&'static str>,
    ) -> Vec<Arc<Step>> {
        let (mut steps, mut writes) = (Vec::new(), Vec::new());
        let mut last_owner: Option<Arc<Owner>> = None;
        let mut existing = existing.peekable();
        let mut delete = |(name, owner, value): (&K, &Owner, Option<&E>)| {
            let mesh = self.mesh_allowing_delete(owner, || value.is_some_and(|value| superseded(name, value)));
            let step = |mesh| Step {
                mesh,
                action: Action::Delete,
                item: item(name.to_owned(), None),
                owner: Arc::new(owner.clone()),
                fields: vec![],
            };
            steps.extend(mesh.map(|mesh| Arc::new(step(mesh))));
        };
        for Desired {
            name,
            mesh,
            source,
            value,
        } in desired
        {
            let mut same = None;
            while let Some(object) = existing.next_if(|(existing, ..)| **existing <= *name) {
                if *object.0 == *name {
                    same = Some(object);
                } else {
                    delete(object);
                }
            }
            let (action, fields) = match same {
                None => (Action::Create, vec![]),
                Some((_, owner, existing_value)) => {
                    let mut differing = existing_value.map_or_else(|| vec!["spec"], |old| fields(old, &value));
                    if !self.is_owner(owner, mesh, source) {
                        differing.push("metadata.labels");
                    }
                    // Foreign objects are never overwritten. The planner has chosen another name, or reported the conflict.
                    if differing.is_empty() || self.is_foreign(owner) {
                        continue;
                    }
                    (Action::Update, differing)
                }
            };
            // Objects of one source usually follow each other.
            let owner = match &mut last_owner {
                Some(owner) if self.is_owner(owner, mesh, source) => owner,
                last => last.insert(Arc::new(self.owner(mesh, source))),
            };
            writes.push(Arc::new(Step {
                mesh: mesh.clone(),
                action,
                item: item(name.into_owned(), Some(value.into_owned())),
                owner: Arc::clone(owner),
                fields,
            }));
        }
        existing.for_each(delete);
        steps.extend(writes);
        steps
    }

    fn is_foreign(&self, owner: &Owner) -> bool {
        ownership::of(owner, &self.plan.hub, &self.plan.claimants) == Ownership::Foreign
    }

    /// `only` = compare no Peers but these; `None` = all.
    fn peers(&self, existing: &Rows<ObservedPeer>, only: Option<&BTreeSet<String>>) -> Vec<Arc<Step>> {
        let is_own_node = |spec: &PeerSpec| matches!(spec.role, PeerRole::OwnNode(_));
        let has_own_nodes = || {
            let mut active = self
                .targets()
                .filter(|(_, mesh, _)| !self.is_paused(mesh) && !mesh.deleting);
            active.any(|(.., target)| target.peers.values().any(|peer| is_own_node(&peer.spec)))
        };
        let superseded =
            |_: &str, peer: &PeerSpec| is_own_node(peer) && has_own_nodes() || self.is_any_connected(&peer.allowed_ips);
        let all = only.is_none().then(|| existing.iter()).into_iter().flatten();
        let chosen = only
            .into_iter()
            .flatten()
            .filter_map(|name| existing.get_key_value(name));
        let existing = all.chain(chosen);
        let existing = existing.map(|(name, peer)| (name, &peer.owner, peer.spec.as_ref().ok()));
        let desired = self.desired(|target| {
            let all = only.is_none().then(|| target.peers.iter()).into_iter().flatten();
            let chosen = only
                .into_iter()
                .flatten()
                .filter_map(|name| target.peers.get_key_value(name));
            let peers = all.chain(chosen);
            peers.map(|(name, peer)| (Cow::Borrowed(&**name), &*peer.source, Cow::Borrowed(&peer.spec)))
        });
        self.compare(existing, desired, Item::Peer, superseded, |old, new: &Arc<PeerSpec>| {
            peer_fields(old, new)
        })
    }

    /// The steps of all kinds but Peers.
    fn other_kinds(&self, member: &Member) -> Vec<Arc<Step>> {
        let mut steps = Vec::new();
        if let Some(existing) = &member.policies {
            let existing = existing
                .iter()
                .map(|(name, policy)| (&**name, &policy.owner, policy.spec.as_ref().ok()));
            let desired = self.desired(|target| {
                let policies = target.policies.iter();
                policies.map(|(name, policy)| (Cow::Borrowed(&**name), &*policy.source, Cow::Borrowed(&policy.spec)))
            });
            let superseded = |_: &str, policy: &PolicySpec| self.is_any_connected(&policy.networks);
            let item = |name, spec: Option<PolicySpec>| Item::Policy(name, spec.map(Box::new));
            steps.extend(self.compare(existing, desired, item, superseded, policy_fields));
        }
        if let Some(existing) = &member.accesses {
            let existing = existing
                .iter()
                .map(|(name, access)| (&**name, &access.owner, access.spec.as_ref().ok()));
            let desired = self.desired(|target| {
                let accesses = target.accesses.iter();
                accesses.map(|(name, access)| (Cow::Borrowed(&**name), &*access.source, Cow::Borrowed(&access.spec)))
            });
            let superseded = |_: &str, access: &AccessSpec| self.is_any_connected(&access.networks);
            let item = |name, spec: Option<AccessSpec>| Item::Access(name, spec.map(Box::new));
            steps.extend(self.compare(existing, desired, item, superseded, access_fields));
        }
        let mirrors: BTreeMap<&ObjectName, Mirror> = member
            .services
            .iter()
            .map(|(name, service)| {
                let mirror = Mirror {
                    ports: service.ports.clone(),
                    families: service.families,
                };
                (name, mirror)
            })
            .collect();
        let existing = member.services.iter().filter_map(|(name, service)| {
            let owner = service.managed.as_ref()?;
            Some((name, owner, mirrors.get(name)))
        });
        let desired = self.desired(|target| {
            let services = target.services.iter();
            services.map(|(name, service)| (Cow::Borrowed(name), &*service.source, Cow::Owned(service.mirror())))
        });
        // An orphaned Service is never deleted as superseded: if a mesh plans one with the same name, it is updated.
        let superseded = |_: &ObjectName, _: &Mirror| false;
        let services = self.compare(existing, desired, Item::Service, superseded, |old, new| {
            differing([
                ("spec.ports", old.ports != new.ports),
                ("spec.ipFamilyPolicy", !old.families.cover(new.families)),
            ])
        });
        let kept = |step: &Arc<Step>| {
            let service = match &step.item {
                Item::Service(name, None) => Some(name.clone()),
                Item::Slice(name, None) => member.slices.get(name).map(|slice| ObjectName {
                    namespace: name.namespace.clone(),
                    name: slice.service.clone(),
                }),
                _ => None,
            };
            service.is_some_and(|service| self.is_kept(&step.mesh, &service))
        };
        let slices = self.slices(member);
        steps.extend(services.into_iter().chain(slices).filter(|step| !kept(step)));
        steps
    }

    /// Whether an active mesh connects one of these networks to this member.
    fn is_any_connected<'n>(&self, networks: impl IntoIterator<Item = &'n IpNet>) -> bool {
        let connected: BTreeSet<IpNet> = self
            .targets()
            .filter(|(_, mesh, _)| !self.is_paused(mesh) && !mesh.deleting)
            .flat_map(|(.., target)| target.source_networks.iter().copied())
            .collect();
        let is_connected = |net: &IpNet| connected.iter().any(|other| overlap(*other, *net));
        networks.into_iter().any(is_connected)
    }
}
