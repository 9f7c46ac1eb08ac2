//! Everything that is read of one member, as feeds, and the member that the planner sees in them. Which rights that takes:
//! list and watch on nodes, peers, peerpolicies, services, endpointslices; on pods where the mesh exports any.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use clustermesh_access::memory::Account;
use clustermesh_api::{convert, names, peer, policy, sandbox};
use clustermesh_core::{
    mesh::ObjectName,
    observe::{Gateway, Member, ObservedAccess, ObservedPeer, Pod, Service, Slice, Unlisted},
};
use k8s_openapi::api::{core::v1 as core_v1, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject},
};

mod agents;
mod asked;
mod following;
mod gateways;

use agents::SeenNode;
pub(crate) use agents::SeenPolicy;
use asked::{Asked, Extra};
pub(super) use following::Following;

use super::{Interest, checkins::CheckIns, first_trouble};
use crate::feed::{Changed, Feed, Source, Trust};

/// Feeds of one member. Cheap to clone; all clones are the same tables.
#[derive(Debug, Clone)]
pub(crate) struct Tables {
    make: Make,
    nodes: Feed<SeenNode>,
    check_ins: Arc<Mutex<CheckIns>>,
    pub(crate) peers: Feed<ObservedPeer>,
    pub(crate) policies: Feed<SeenPolicy>,
    pub(crate) accesses: Feed<ObservedAccess>,
    /// Gateways of sandboxes, each with the UID of the pod that speaks for it.
    gateways: Feed<(Gateway, String)>,
    /// UIDs of their pods, and whether they take connections.
    gateway_pods: Feed<(String, bool)>,
    /// Mirrored Services and their slices: those that carry our managed-by label, in all namespaces.
    pub(crate) services: Feed<Service>,
    pub(crate) slices: Feed<Slice>,
    /// EndpointSlices of `default/kubernetes`.
    api: Feed<Slice>,
    extra: Arc<Mutex<Extra>>,
    /// Whose they are, in logs.
    whose: String,
}

/// Makes the feeds of one member.
#[derive(Debug, Clone)]
struct Make {
    account: Option<Account>,
    changed: Changed,
}

impl Make {
    fn feed<V: Clone + PartialEq>(
        &self,
        convert: impl Fn(DynamicObject) -> Result<Option<V>, String> + Send + Sync + 'static,
    ) -> Feed<V> {
        let feed = Feed::new(self.changed.clone(), convert);
        match &self.account {
            Some(account) => feed.charged_to(account),
            None => feed,
        }
    }

    fn services(&self) -> Feed<Service> {
        self.feed(|o| parse::<core_v1::Service>(o).map(|s| Some(convert::service::to_core(&s))))
    }

    fn slices(&self) -> Feed<Slice> {
        self.feed(|o| parse::<EndpointSlice>(o).map(|s| convert::service::slice_to_core(&s)))
    }

    fn pods(&self) -> Feed<Pod> {
        self.feed(|o| parse::<core_v1::Pod>(o).map(|pod| Some(convert::service::pod_to_core(&pod))))
            .without(POD)
    }
}

/// What is large in a Node, and read by nobody.
const NODE: &[&str] = &[
    "status/images",
    "status/volumesAttached",
    "status/volumesInUse",
    "status/config",
];
/// The same in a Pod.
const POD: &[&str] = &[
    "spec/containers",
    "spec/initContainers",
    "spec/ephemeralContainers",
    "spec/volumes",
    "spec/tolerations",
    "spec/affinity",
    "status/containerStatuses",
    "status/initContainerStatuses",
    "status/ephemeralContainerStatuses",
];

fn parse<K>(object: DynamicObject) -> Result<K, String>
where
    K: Resource + serde::de::DeserializeOwned,
{
    object.try_parse().map_err(|error| error.to_string())
}

impl Tables {
    /// Their rows are charged to `account`, where there is one.
    pub(crate) fn new(whose: String, account: Option<&Account>, changed: &Changed) -> Self {
        let make = Make {
            account: account.cloned(),
            changed: changed.clone(),
        };
        let check_ins = Arc::new(Mutex::new(CheckIns::default()));
        let (noted, woken) = (Arc::clone(&check_ins), changed.clone());
        let node = move |o| {
            let node = parse::<core_v1::Node>(o)?;
            let name = node.metadata.name.as_deref().unwrap_or_default();
            let mut check_ins = noted.lock().unwrap_or_else(PoisonError::into_inner);
            // Nothing else of the Node may differ when kg checks in again.
            if check_ins.note(name, convert::node::last_seen(&node), Instant::now()) {
                woken.notify_one();
            }
            drop(check_ins);
            Ok(Some(SeenNode::new(&node)))
        };
        Self {
            nodes: make.feed(node).without(NODE),
            check_ins,
            peers: make.feed(|o| parse::<peer::Peer>(o).map(|p| Some(convert::peer::to_core(&p)))),
            policies: make.feed(|o| SeenPolicy::new(o).map(Some)),
            accesses: make.feed(|o| parse::<sandbox::SandboxAccess>(o).map(|a| Some(convert::sandbox::to_core(&a)))),
            gateways: make.feed(|o| convert::sandbox::gateway_to_core(&parse(o)?)),
            gateway_pods: make
                .feed(|o| parse::<core_v1::Pod>(o).map(|pod| Some(convert::sandbox::gateway_pod(&pod))))
                .without(POD),
            services: make.services(),
            slices: make.slices(),
            api: make.slices(),
            make,
            extra: Arc::default(),
            whose,
        }
    }

    fn extras(&self) -> MutexGuard<'_, Extra> {
        self.extra.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection: what was seen is kept, but nothing is known to be current until it was read again.
    pub(super) fn begin(&self) {
        fn again<V: Clone + PartialEq>(feed: &Feed<V>) {
            feed.forget_writes();
            if feed.trust() != Trust::Pending {
                feed.set_trust(Trust::Broken(
                    "it is being read again after a new connection".to_owned(),
                ));
            }
        }
        again(&self.nodes);
        again(&self.peers);
        again(&self.policies);
        again(&self.accesses);
        again(&self.gateways);
        again(&self.gateway_pods);
        again(&self.services);
        again(&self.slices);
        again(&self.api);
        let extra = self.extras();
        for (services, slices) in extra.services.values() {
            again(&services.feed);
            again(&slices.feed);
        }
        extra.pods.values().for_each(|pods| again(&pods.feed));
    }

    /// Makes room for what is asked for, before anybody plans with it.
    pub(super) fn want(&self, interest: &Interest) {
        let namespaces = interest.service_namespaces();
        let mut extra = self.extras();
        extra.services.retain(|namespace, _| namespaces.contains(namespace));
        for namespace in namespaces {
            let make = || (Asked::new(self.make.services()), Asked::new(self.make.slices()));
            extra.services.entry(namespace).or_insert_with(make);
        }
        extra.pods.retain(|namespace, _| interest.pods.contains(namespace));
        for namespace in &interest.pods {
            let make = || Asked::new(self.make.pods());
            extra.pods.entry(namespace.clone()).or_insert_with(make);
        }
    }

    /// The feeds that every member has.
    pub(super) fn fixed(&self, client: &Client) -> Vec<Following> {
        let ours = format!("{}={}", names::LABEL_MANAGED_BY, names::MANAGED_BY);
        let gateways = format!("{}={}", names::LABEL_APP, names::GATEWAY_APP);
        let api_service = format!("{}=kubernetes", names::LABEL_SERVICE_NAME);
        vec![
            Following::new(self.all::<core_v1::Node>(client, "nodes", ""), &self.nodes),
            Following::new(self.all::<peer::Peer>(client, "peers", ""), &self.peers),
            Following::new(
                self.all::<policy::PeerPolicy>(client, "peerpolicies", ""),
                &self.policies,
            ),
            Following::new(
                self.all::<sandbox::SandboxAccess>(client, "sandboxaccesses", ""),
                &self.accesses,
            ),
            Following::new(
                self.all::<sandbox::SandboxGateway>(client, "sandboxgateways", ""),
                &self.gateways,
            ),
            Following::new(self.all::<core_v1::Pod>(client, "pods", &gateways), &self.gateway_pods),
            Following::new(self.all::<core_v1::Service>(client, "services", &ours), &self.services),
            Following::new(self.all::<EndpointSlice>(client, "endpointslices", &ours), &self.slices),
            Following::new(
                self.within::<EndpointSlice>(client, "endpointslices", "default", &api_service),
                &self.api,
            ),
        ]
    }

    /// The feeds that meshes ask for, by what they follow.
    pub(super) fn extra(&self, client: &Client, interest: &Interest) -> BTreeMap<String, Following> {
        let mut followings = BTreeMap::new();
        let extra = self.extras();
        for namespace in interest.service_namespaces() {
            if let Some((services, slices)) = extra.services.get(&namespace) {
                let source = self.within::<core_v1::Service>(client, "services", &namespace, "");
                followings.insert(source.what.clone(), Following::asked(source, services));
                let source = self.within::<EndpointSlice>(client, "endpointslices", &namespace, "");
                followings.insert(source.what.clone(), Following::asked(source, slices));
            }
        }
        for namespace in &interest.pods {
            if let Some(pods) = extra.pods.get(namespace) {
                let source = self.within::<core_v1::Pod>(client, "pods", namespace, "");
                followings.insert(source.what.clone(), Following::asked(source, pods));
            }
        }
        followings
    }

    /// Why the tables that must be current are not; `None` = they are.
    pub(super) fn trouble(&self) -> Option<String> {
        first_trouble(self.trusts())
    }

    /// Policies, mirrored objects and the API server's endpoints may be closed to an account that was made for Peers
    /// alone (the predecessor's): then there are none of ours to keep true.
    fn trusts(&self) -> Vec<Trust> {
        let mut trusts = vec![self.nodes.trust(), self.peers.trust()];
        trusts.extend([
            optional(&self.policies),
            optional(&self.accesses),
            optional(&self.gateways),
            optional(&self.gateway_pods),
            optional(&self.services),
            optional(&self.slices),
            optional(&self.api),
        ]);
        let extra = self.extras();
        trusts.extend(
            extra
                .services
                .values()
                .flat_map(|(services, slices)| [services.trust(), slices.trust()]),
        );
        trusts.extend(extra.pods.values().map(Asked::trust));
        trusts
    }

    /// Whether everything that every member has was listed at least once.
    pub(super) fn listed(&self) -> bool {
        self.nodes.listed()
            && self.nodes.trust() != Trust::Absent
            && self.peers.listed()
            && (self.policies.listed() || self.policies.closed())
            && (self.accesses.listed() || self.accesses.closed())
            && (self.gateways.listed() || self.gateways.closed())
            && (self.gateway_pods.listed() || self.gateway_pods.closed())
            && (self.services.listed() || self.services.closed())
            && (self.slices.listed() || self.slices.closed())
            && (self.api.listed() || self.api.closed())
    }

    /// The member as it was last seen.
    pub(super) fn member(&self, uid: Option<String>, interest: &Interest) -> Member {
        let mut services = values(&self.services);
        let mut slices = values(&self.slices);
        let mut pods = BTreeMap::new();
        let mut unlisted = Unlisted::default();
        let extra = self.extras();
        for namespace in interest.service_namespaces() {
            let asked = extra.services.get(&namespace);
            let listed = asked.map_or(Err("it is not being read yet".to_owned()), |(services, slices)| {
                Ok((services.rows()?, slices.rows()?))
            });
            match listed {
                Ok((here_services, here_slices)) => {
                    services.extend(
                        here_services
                            .into_iter()
                            .filter(|(name, _)| interest.services.contains(name)),
                    );
                    slices.extend(here_slices.into_iter().filter(|(name, slice)| {
                        let service = ObjectName {
                            namespace: name.namespace.clone(),
                            name: slice.service.clone(),
                        };
                        interest.services.contains(&service)
                    }));
                }
                Err(why) => {
                    unlisted.services.insert(namespace, why);
                }
            }
        }
        for namespace in &interest.pods {
            let asked = extra.pods.get(namespace);
            match asked.map_or(Err("it is not being read yet".to_owned()), Asked::rows) {
                Ok(here) => pods.extend(here),
                Err(why) => {
                    unlisted.pods.insert(namespace.clone(), why);
                }
            }
        }
        drop(extra);
        let api_endpoints = self.api.read(|rows| {
            rows.values()
                .flat_map(|row| {
                    let ports = row.value.ports.iter().map(|port| port.port);
                    ports.flat_map(|port| row.value.endpoints.iter().map(move |e| (e.address, port).into()))
                })
                .collect()
        });
        Member {
            uid,
            nodes: self.nodes.read(|rows| {
                rows.iter()
                    .map(|(name, row)| (name.name.clone(), row.value.node.clone()))
                    .collect()
            }),
            peers: present(&self.peers),
            policies: present(&self.policies).map(|policies| {
                let policies = policies.into_iter();
                policies.map(|(name, seen)| (name, seen.policy)).collect()
            }),
            accesses: present(&self.accesses),
            gateways: self.gateways(),
            services,
            slices,
            pods,
            unlisted,
            api_endpoints,
        }
    }

    /// Marks the nodes that kg has stopped checking in for. `current` = the member is followed now.
    pub(super) fn mark_silent(&self, member: &mut Member, current: bool) {
        let mut check_ins = self.check_ins.lock().unwrap_or_else(PoisonError::into_inner);
        let unix = k8s_openapi::jiff::Timestamp::now().as_second();
        let silent = check_ins.silent(|node| member.nodes.contains_key(node), current, Instant::now(), unix);
        for name in silent {
            if let Some(node) = member.nodes.get_mut(name) {
                node.silent = true;
            }
        }
    }

    /// When the next node falls silent, if nothing arrives.
    pub(super) fn silence_due(&self) -> Option<Instant> {
        self.check_ins.lock().unwrap_or_else(PoisonError::into_inner).due()
    }

    /// How many rows each table has and how far it is trusted.
    pub(super) fn dump(&self) -> serde_json::Value {
        fn one<V: Clone + PartialEq>(feed: &Feed<V>) -> serde_json::Value {
            serde_json::json!({
                "rows": feed.read(BTreeMap::len),
                "trust": format!("{:?}", feed.trust()),
                "malformed": feed.malformed().into_iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>(),
            })
        }
        let extra = self.extras();
        serde_json::json!({
            "nodes": one(&self.nodes),
            "peers": one(&self.peers),
            "peerpolicies": one(&self.policies),
            "mirroredServices": one(&self.services),
            "mirroredSlices": one(&self.slices),
            "sandboxAccesses": one(&self.accesses),
            "sandboxGateways": one(&self.gateways),
            "gatewayPods": one(&self.gateway_pods),
            "apiServer": one(&self.api),
            "services": extra.services.iter().map(|(ns, (feed, _))| (ns.clone(), one(&feed.feed))).collect::<BTreeMap<_, _>>(),
            "endpointSlices": extra.services.iter().map(|(ns, (_, feed))| (ns.clone(), one(&feed.feed))).collect::<BTreeMap<_, _>>(),
            "pods": extra.pods.iter().map(|(ns, feed)| (ns.clone(), one(&feed.feed))).collect::<BTreeMap<_, _>>(),
        })
    }

    fn all<K: Resource<DynamicType = ()>>(&self, client: &Client, what: &str, labels: &str) -> Source {
        Source {
            api: Api::all_with(client.clone(), &ApiResource::erase::<K>(&())),
            what: what.to_owned(),
            whose: self.whose.clone(),
            labels: labels.to_owned(),
            fields: String::new(),
        }
    }

    fn within<K: Resource<DynamicType = ()>>(
        &self,
        client: &Client,
        what: &str,
        namespace: &str,
        labels: &str,
    ) -> Source {
        Source {
            api: Api::namespaced_with(client.clone(), namespace, &ApiResource::erase::<K>(&())),
            what: format!("{what} in namespace {namespace}"),
            whose: self.whose.clone(),
            labels: labels.to_owned(),
            fields: String::new(),
        }
    }
}

fn values<V: Clone + PartialEq>(feed: &Feed<V>) -> BTreeMap<ObjectName, V> {
    feed.read(|rows| {
        rows.iter()
            .map(|(name, row)| (name.clone(), row.value.clone()))
            .collect()
    })
}

fn by_name<V: Clone + PartialEq>(feed: &Feed<V>) -> BTreeMap<String, V> {
    feed.read(|rows| {
        rows.iter()
            .map(|(name, row)| (name.name.clone(), row.value.clone()))
            .collect()
    })
}

/// How far a table can be trusted that an account need not be able to read.
fn optional<V: Clone + PartialEq>(feed: &Feed<V>) -> Trust {
    if feed.closed() { Trust::Absent } else { feed.trust() }
}

/// `None` = the kind is not there, or closed to the account.
fn present<V: Clone + PartialEq>(feed: &Feed<V>) -> Option<BTreeMap<String, V>> {
    (feed.trust() != Trust::Absent && !feed.closed()).then(|| by_name(feed))
}
