//! When a sandbox hears of what it was granted: not before the nodes that have it let it in.
//!
//! The nodes open what they are told to at the same time as this plan is made, and none of them says when it has: an endpoint
//! costs the cluster that runs it no write. So they are given time. Who is told too early loses a connection's first packet
//! and a second with it; who dials a node that does not know him yet, WireGuard's REKEY_TIMEOUT of five.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use crate::{
    diff::{Action, Item, Step},
    mesh::{ClusterIdentity, ObjectName},
    observe::{Member, Owner, Slice, SliceEndpoint},
    plan::{Plan, PlannedSlice},
};

/// Something granted of which the sandbox has not heard.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum News {
    /// Nodes of a member of which it has none as a Peer: whose Peers these are.
    Nodes(Owner),
    /// An endpoint that takes connections, of a mirrored Service.
    Endpoint(ObjectName, IpAddr),
}

impl News {
    /// For so long the nodes are given time. A name comes after the Peers that carry its packets: the sandbox's own nodes need
    /// time too.
    #[must_use]
    pub const fn patience(&self) -> Duration {
        match self {
            Self::Nodes(_) => Duration::from_millis(500),
            Self::Endpoint(..) => Duration::from_secs(1),
        }
    }
}

/// Whether the member is a sandbox in a mesh of this plan.
#[must_use]
pub fn is_sandbox(plan: &Plan, identity: &ClusterIdentity) -> bool {
    plan.meshes.values().any(|mesh| {
        let mut entries = mesh.identities.iter().filter(|(_, other)| other.same_cluster(identity));
        entries.any(|(entry, _)| mesh.clusters.get(entry).is_some_and(|report| report.sandbox))
    })
}

/// Of the steps of a sandbox what can be written now, and all that is news to it: `waited` = for how long each has been.
///
/// A Service is never left without an endpoint for it: where the last that takes connections goes with this plan, the new ones
/// are named at once. What goes is never held back.
#[must_use]
pub fn due(steps: Vec<Step>, member: &Member, waited: impl Fn(&News) -> Duration) -> (Vec<Step>, BTreeSet<News>) {
    let mut news = BTreeSet::new();
    let mut early = |one: News| {
        let early = waited(&one) < one.patience();
        news.insert(one);
        early
    };
    let mirrors = Mirrors::of(member);
    let mut cuts: Vec<(Step, Option<Step>)> = Vec::new();
    for step in steps {
        let cut = match &step.item {
            Item::Peer(_, Some(_)) if step.action == Action::Create && !has_peers(member, &step.owner) => {
                (!early(News::Nodes(step.owner.clone()))).then(|| step.clone())
            }
            Item::Slice(name, Some((service, planned))) => {
                let service = beside(name, service);
                let early = |address| early(News::Endpoint(service.clone(), address));
                mirrors.cut(&step, name, &service, planned, early)
            }
            _ => Some(step.clone()),
        };
        cuts.push((step, cut));
    }
    let emptied = mirrors.emptied(&cuts);
    let due = cuts.into_iter().filter_map(|(step, cut)| {
        if family(&step.item).is_some_and(|family| emptied.contains(&family)) {
            Some(step)
        } else {
            cut
        }
    });
    (due.collect(), news)
}

fn has_peers(member: &Member, owner: &Owner) -> bool {
    let peers = member.peers.iter().flat_map(BTreeMap::values);
    peers.into_iter().any(|peer| peer.owner == *owner)
}

/// One family of a mirrored Service.
type Family = (ObjectName, bool);

fn family(item: &Item) -> Option<Family> {
    let Item::Slice(name, Some((service, planned))) = item else {
        return None;
    };
    Some((beside(name, service), planned.v6))
}

/// The Service of a slice, which lies in its namespace.
fn beside(slice: &ObjectName, service: &str) -> ObjectName {
    ObjectName {
        namespace: slice.namespace.clone(),
        name: service.to_owned(),
    }
}

/// The mirrored EndpointSlices that stand.
struct Mirrors<'a>(BTreeMap<&'a ObjectName, &'a Slice>);

impl<'a> Mirrors<'a> {
    fn of(member: &'a Member) -> Self {
        Self(
            member
                .slices
                .iter()
                .filter(|(_, slice)| slice.managed.is_some())
                .collect(),
        )
    }

    /// Names and slices of one Service.
    fn of_service<'s>(&'s self, service: &'s ObjectName) -> impl Iterator<Item = (&'a ObjectName, &'a Slice)> + 's {
        let of =
            |name: &ObjectName, slice: &Slice| name.namespace == service.namespace && slice.service == service.name;
        let all = self.0.iter().map(|(name, slice)| (*name, *slice));
        all.filter(move |(name, slice)| of(name, slice))
    }

    /// The step without the endpoints that are told of too early; `None` = it changes nothing then.
    fn cut(
        &self,
        step: &Step,
        name: &ObjectName,
        service: &ObjectName,
        planned: &PlannedSlice,
        mut early: impl FnMut(IpAddr) -> bool,
    ) -> Option<Step> {
        let standing = self.0.get(name);
        let named = |address| {
            let mut all = self.of_service(service).flat_map(|(_, slice)| &slice.endpoints);
            all.any(|endpoint| endpoint.ready && endpoint.address == address)
        };
        let as_it_stands = |address| {
            let mut all = standing.into_iter().flat_map(|slice| &slice.endpoints);
            all.find(|endpoint: &&SliceEndpoint| endpoint.address == address)
        };
        let endpoints: Vec<SliceEndpoint> = planned
            .endpoints
            .iter()
            .filter_map(|endpoint| {
                let held = endpoint.ready && !named(endpoint.address) && early(endpoint.address);
                if held {
                    as_it_stands(endpoint.address)
                } else {
                    Some(endpoint)
                }
            })
            .cloned()
            .collect();
        if endpoints == planned.endpoints {
            return Some(step.clone());
        }
        let nothing = match standing {
            None => endpoints.is_empty(),
            Some(slice) => slice.endpoints == endpoints && step.fields == ["endpoints"],
        };
        let cut = PlannedSlice {
            endpoints,
            ..planned.clone()
        };
        (!nothing).then(|| Step {
            item: Item::Slice(name.clone(), Some((service.name.clone(), cut))),
            ..step.clone()
        })
    }

    /// What has an endpoint that takes connections, and would have none.
    fn emptied(&self, cuts: &[(Step, Option<Step>)]) -> BTreeSet<Family> {
        let takes = |endpoints: &[SliceEndpoint]| endpoints.iter().any(|endpoint| endpoint.ready);
        let due = || cuts.iter().filter_map(|(_, cut)| cut.as_ref());
        let untouched = |name: &ObjectName| !due().any(|step| matches!(&step.item, Item::Slice(due, _) if due == name));
        let held = cuts.iter().filter(|(step, cut)| cut.as_ref() != Some(step));
        let held: BTreeSet<Family> = held.filter_map(|(step, _)| family(&step.item)).collect();
        held.into_iter()
            .filter(|of @ (service, v6)| {
                let standing = || {
                    let all = self.of_service(service);
                    all.filter(|(_, slice)| slice.v6 == *v6 && takes(&slice.endpoints))
                };
                let comes = |step: &Step| match &step.item {
                    Item::Slice(_, Some((_, planned))) => {
                        family(&step.item).as_ref() == Some(of) && takes(&planned.endpoints)
                    }
                    _ => false,
                };
                standing().next().is_some() && !standing().any(|(name, _)| untouched(name)) && !due().any(comes)
            })
            .collect()
    }
}
