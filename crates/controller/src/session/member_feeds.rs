//! The feeds of all kinds that are read from one member, and their conversion to the planner's [`Member`].
//!
//! The member's ServiceAccount must be allowed to list and watch nodes and peers. It needs the same rights for peerpolicies,
//! sandboxaccesses, sandboxgateways, services, endpointslices and pods, unless it was made for the predecessor
//! ([`MemberFeeds::trusts`]).

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
mod copies;
mod feed_task;
mod gateways;
mod on_demand;

use agents::NodeRow;
pub(crate) use agents::PolicyRow;
use copies::Copies;
pub(super) use feed_task::FeedTask;
use on_demand::{OnDemandFeed, OnDemandFeeds};

use super::{Interest, checkins::CheckIns, first_problem};
use crate::feed::{self, Changed, Feed, Trust, WatchedResource};

/// The feeds of one member. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct MemberFeeds {
    factory: FeedFactory,
    nodes: Feed<NodeRow>,
    check_ins: Arc<Mutex<CheckIns>>,
    pub(crate) peers: Feed<Arc<ObservedPeer>>,
    pub(crate) policies: Feed<PolicyRow>,
    pub(crate) accesses: Feed<ObservedAccess>,
    /// SandboxGateways, each with the UID of the pod that published it.
    gateways: Feed<(Gateway, String)>,
    /// The pods of gateways: UID, and whether the pod is Ready.
    gateway_pods: Feed<(String, bool)>,
    /// Mirrored Services and their EndpointSlices: those with our managed-by label, in all namespaces.
    pub(crate) mirrored_services: Feed<Service>,
    pub(crate) mirrored_slices: Feed<Slice>,
    /// EndpointSlices of the Service `default/kubernetes`: the addresses of the API server.
    api_slices: Feed<Slice>,
    /// Feeds of single namespaces that exist only while a mesh needs them, for Services in grants and exported pods ([`Interest`]).
    on_demand: Arc<Mutex<OnDemandFeeds>>,
    /// The Nodes and Peers of the last observation. The next observation converts only the changed ones.
    copies: Arc<Copies>,
    /// The identity of the member, for logs.
    member: String,
}

/// Creates the feeds of one member.
#[derive(Debug, Clone)]
struct FeedFactory {
    account: Option<Account>,
    changed: Changed,
}

impl FeedFactory {
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
            .without_fields(UNUSED_POD_FIELDS)
    }
}

/// Large fields of a Node that no code reads.
const UNUSED_NODE_FIELDS: &[&str] = &[
    "status/images",
    "status/volumesAttached",
    "status/volumesInUse",
    "status/config",
];
/// Large fields of a Pod that no code reads.
const UNUSED_POD_FIELDS: &[&str] = &[
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

impl MemberFeeds {
    /// Creates the feeds. The memory of their rows counts toward the limit of `account`, if it is given.
    pub(crate) fn new(member: String, account: Option<&Account>, changed: &Changed) -> Self {
        let factory = FeedFactory {
            account: account.cloned(),
            changed: changed.clone(),
        };
        let check_ins = Arc::new(Mutex::new(CheckIns::default()));
        let (check_ins_of_feed, changed) = (Arc::clone(&check_ins), changed.clone());
        let convert_node = move |o| {
            let node = parse::<core_v1::Node>(o)?;
            let name = node.metadata.name.as_deref().unwrap_or_default();
            let mut check_ins = check_ins_of_feed.lock().unwrap_or_else(PoisonError::into_inner);
            // The row does not contain the check-in, so the feed does not wake the loop for it. If the node was silent, it no
            // longer is, so the loop is woken here.
            if check_ins.record(name, convert::node::last_seen(&node), Instant::now()) {
                changed.notify_one();
            }
            drop(check_ins);
            Ok(Some(NodeRow::new(&node)))
        };
        Self {
            nodes: factory.feed(convert_node).without_fields(UNUSED_NODE_FIELDS),
            check_ins,
            peers: factory.feed(|o| parse::<peer::Peer>(o).map(|p| Some(Arc::new(convert::peer::to_core(&p))))),
            policies: factory.feed(|o| PolicyRow::new(o).map(Some)),
            accesses: factory.feed(|o| parse::<sandbox::SandboxAccess>(o).map(|a| Some(convert::sandbox::to_core(&a)))),
            gateways: factory.feed(|o| convert::sandbox::gateway_to_core(&parse(o)?)),
            gateway_pods: factory
                .feed(|o| parse::<core_v1::Pod>(o).map(|pod| Some(convert::sandbox::gateway_pod(&pod))))
                .without_fields(UNUSED_POD_FIELDS),
            mirrored_services: factory.services(),
            mirrored_slices: factory.slices(),
            api_slices: factory.slices(),
            factory,
            on_demand: Arc::default(),
            copies: Arc::default(),
            member,
        }
    }

    fn on_demand(&self) -> MutexGuard<'_, OnDemandFeeds> {
        self.on_demand.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all objects again ([`Feed::read_again`]).
    pub(super) fn read_again(&self, cluster: feed::Cluster) {
        self.nodes.read_again(cluster);
        self.peers.read_again(cluster);
        self.policies.read_again(cluster);
        self.accesses.read_again(cluster);
        self.gateways.read_again(cluster);
        self.gateway_pods.read_again(cluster);
        self.mirrored_services.read_again(cluster);
        self.mirrored_slices.read_again(cluster);
        self.api_slices.read_again(cluster);
        let on_demand = self.on_demand();
        for (services, slices) in on_demand.services.values() {
            services.feed.read_again(cluster);
            slices.feed.read_again(cluster);
        }
        on_demand.pods.values().for_each(|pods| pods.feed.read_again(cluster));
    }

    /// Whether Nodes or Peers are being read again.
    pub(super) fn need_lists(&self) -> bool {
        self.nodes.needs_list() || self.peers.needs_list()
    }

    /// Creates and drops on-demand feeds. Until a new feed is listed, [`Self::member`] returns its namespace as unlisted.
    pub(super) fn set_interest(&self, interest: &Interest) {
        let namespaces = interest.service_namespaces();
        let mut on_demand = self.on_demand();
        on_demand.services.retain(|namespace, _| namespaces.contains(namespace));
        for namespace in namespaces {
            let new = || {
                (
                    OnDemandFeed::new(self.factory.services()),
                    OnDemandFeed::new(self.factory.slices()),
                )
            };
            on_demand.services.entry(namespace).or_insert_with(new);
        }
        on_demand
            .pods
            .retain(|namespace, _| interest.pod_namespaces.contains(namespace));
        for namespace in &interest.pod_namespaces {
            let new = || OnDemandFeed::new(self.factory.pods());
            on_demand.pods.entry(namespace.clone()).or_insert_with(new);
        }
    }

    /// Creates the tasks of the permanent feeds: those that every member has.
    pub(super) fn permanent_tasks(&self, client: &Client) -> Vec<FeedTask> {
        let ours = format!("{}={}", names::LABEL_MANAGED_BY, names::MANAGED_BY);
        let gateways = format!("{}={}", names::LABEL_APP, names::GATEWAY_APP);
        let api_service = format!("{}=kubernetes", names::LABEL_SERVICE_NAME);
        vec![
            FeedTask::new(self.in_all_namespaces::<core_v1::Node>(client, ""), &self.nodes),
            FeedTask::new(self.in_all_namespaces::<peer::Peer>(client, ""), &self.peers),
            FeedTask::new(self.in_all_namespaces::<policy::PeerPolicy>(client, ""), &self.policies),
            FeedTask::new(
                self.in_all_namespaces::<sandbox::SandboxAccess>(client, ""),
                &self.accesses,
            ),
            FeedTask::new(
                self.in_all_namespaces::<sandbox::SandboxGateway>(client, ""),
                &self.gateways,
            ),
            FeedTask::new(
                self.in_all_namespaces::<core_v1::Pod>(client, &gateways),
                &self.gateway_pods,
            ),
            FeedTask::new(
                self.in_all_namespaces::<core_v1::Service>(client, &ours),
                &self.mirrored_services,
            ),
            FeedTask::new(
                self.in_all_namespaces::<EndpointSlice>(client, &ours),
                &self.mirrored_slices,
            ),
            FeedTask::new(
                self.in_namespace::<EndpointSlice>(client, "default", &api_service),
                &self.api_slices,
            ),
        ]
    }

    /// Creates the tasks of the on-demand feeds. The keys are the descriptions of the resources.
    pub(super) fn on_demand_tasks(&self, client: &Client, interest: &Interest) -> BTreeMap<String, FeedTask> {
        let mut tasks = BTreeMap::new();
        let on_demand = self.on_demand();
        for namespace in interest.service_namespaces() {
            if let Some((services, slices)) = on_demand.services.get(&namespace) {
                let resource = self.in_namespace::<core_v1::Service>(client, &namespace, "");
                tasks.insert(resource.description.clone(), FeedTask::on_demand(resource, services));
                let resource = self.in_namespace::<EndpointSlice>(client, &namespace, "");
                tasks.insert(resource.description.clone(), FeedTask::on_demand(resource, slices));
            }
        }
        for namespace in &interest.pod_namespaces {
            if let Some(pods) = on_demand.pods.get(namespace) {
                let resource = self.in_namespace::<core_v1::Pod>(client, namespace, "");
                tasks.insert(resource.description.clone(), FeedTask::on_demand(resource, pods));
            }
        }
        tasks
    }

    /// Why a feed is not current. `None` = all feeds are current.
    pub(super) fn problem(&self) -> Option<String> {
        first_problem(self.trusts())
    }

    /// Returns for each feed whether it is current. Only Nodes and Peers must be readable: a ServiceAccount made for the predecessor
    /// may read nothing else, and then the other kinds contain no object of ours.
    fn trusts(&self) -> Vec<Trust> {
        let mut trusts = vec![self.nodes.trust(), self.peers.trust()];
        trusts.extend([
            optional_trust(&self.policies),
            optional_trust(&self.accesses),
            optional_trust(&self.gateways),
            optional_trust(&self.gateway_pods),
            optional_trust(&self.mirrored_services),
            optional_trust(&self.mirrored_slices),
            optional_trust(&self.api_slices),
        ]);
        let on_demand = self.on_demand();
        trusts.extend(
            on_demand
                .services
                .values()
                .flat_map(|(services, slices)| [services.trust(), slices.trust()]),
        );
        trusts.extend(on_demand.pods.values().map(OnDemandFeed::trust));
        trusts
    }

    /// Whether all permanent feeds have an answer ([`Feed::has_answer`]). Kinds other than Nodes and Peers do not count if the
    /// ServiceAccount may not read them.
    pub(super) fn have_answers(&self) -> bool {
        self.nodes.has_answer()
            && self.peers.has_answer()
            && (self.policies.has_answer() || self.policies.is_forbidden())
            && (self.accesses.has_answer() || self.accesses.is_forbidden())
            && (self.gateways.has_answer() || self.gateways.is_forbidden())
            && (self.gateway_pods.has_answer() || self.gateway_pods.is_forbidden())
            && (self.mirrored_services.has_answer() || self.mirrored_services.is_forbidden())
            && (self.mirrored_slices.has_answer() || self.mirrored_slices.is_forbidden())
            && (self.api_slices.has_answer() || self.api_slices.is_forbidden())
    }

    /// Converts the feeds to the planner's input.
    pub(super) fn member(&self, uid: Option<String>, interest: &Interest) -> Member {
        let mut services = rows_by_object_name(&self.mirrored_services);
        let mut slices = rows_by_object_name(&self.mirrored_slices);
        let mut pods = BTreeMap::new();
        let mut unlisted = Unlisted::default();
        let on_demand = self.on_demand();
        for namespace in interest.service_namespaces() {
            let feeds = on_demand.services.get(&namespace);
            let rows = feeds.map_or(Err("it is not being read yet".to_owned()), |(services, slices)| {
                Ok((services.rows()?, slices.rows()?))
            });
            match rows {
                Ok((services_here, slices_here)) => {
                    services.extend(
                        services_here
                            .into_iter()
                            .filter(|(name, _)| interest.services.contains(name)),
                    );
                    slices.extend(slices_here.into_iter().filter(|(name, slice)| {
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
        for namespace in &interest.pod_namespaces {
            let feed = on_demand.pods.get(namespace);
            match feed.map_or(Err("it is not being read yet".to_owned()), OnDemandFeed::rows) {
                Ok(pods_here) => pods.extend(pods_here),
                Err(why) => {
                    unlisted.pods.insert(namespace.clone(), why);
                }
            }
        }
        drop(on_demand);
        let api_endpoints = self.api_slices.read(|rows| {
            let slices = rows.values().map(|row| &row.value);
            let endpoints = slices.flat_map(|slice| {
                let ports = slice.ports.iter().map(|port| port.port);
                ports.flat_map(|port| slice.endpoints.iter().map(move |e| (e.address, port).into()))
            });
            endpoints.collect()
        });
        let (nodes, peers) = self.copies.update(self);
        Member {
            uid,
            nodes,
            peers: is_readable(&self.peers).then_some(peers),
            policies: rows_if_readable(&self.policies)
                .map(|rows| rows.into_iter().map(|(name, row)| (name, row.policy)).collect()),
            accesses: rows_if_readable(&self.accesses),
            gateways: self.gateways(),
            services,
            slices,
            pods,
            unlisted,
            api_endpoints,
        }
    }

    /// Marks the nodes on which kg has stopped checking in. `is_current` = the feeds of the member are current.
    pub(super) fn mark_silent(&self, member: &mut Member, is_current: bool) {
        let mut check_ins = self.check_ins.lock().unwrap_or_else(PoisonError::into_inner);
        let unix = k8s_openapi::jiff::Timestamp::now().as_second();
        let silent = check_ins.silent(|node| member.nodes.contains_key(node), is_current, Instant::now(), unix);
        for name in silent {
            if let Some(node) = member.nodes.get_mut(name) {
                node.silent = true;
            }
        }
    }

    /// The time at which the next node becomes silent if no check-in of its kg arrives.
    pub(super) fn silence_due(&self) -> Option<Instant> {
        self.check_ins.lock().unwrap_or_else(PoisonError::into_inner).due()
    }

    /// Returns for each feed the number of rows, whether it is current, and the malformed objects, for `/debug/state`.
    pub(super) fn dump(&self) -> serde_json::Value {
        fn stats<V: Clone + PartialEq>(feed: &Feed<V>) -> serde_json::Value {
            serde_json::json!({
                "rows": feed.read(BTreeMap::len),
                "trust": format!("{:?}", feed.trust()),
                "malformed": feed.malformed().into_iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>(),
            })
        }
        let on_demand = self.on_demand();
        serde_json::json!({
            "nodes": stats(&self.nodes),
            "peers": stats(&self.peers),
            "peerpolicies": stats(&self.policies),
            "mirroredServices": stats(&self.mirrored_services),
            "mirroredSlices": stats(&self.mirrored_slices),
            "sandboxAccesses": stats(&self.accesses),
            "sandboxGateways": stats(&self.gateways),
            "gatewayPods": stats(&self.gateway_pods),
            "apiServer": stats(&self.api_slices),
            "services": on_demand.services.iter().map(|(ns, (feed, _))| (ns.clone(), stats(&feed.feed))).collect::<BTreeMap<_, _>>(),
            "endpointSlices": on_demand.services.iter().map(|(ns, (_, feed))| (ns.clone(), stats(&feed.feed))).collect::<BTreeMap<_, _>>(),
            "pods": on_demand.pods.iter().map(|(ns, feed)| (ns.clone(), stats(&feed.feed))).collect::<BTreeMap<_, _>>(),
        })
    }

    fn in_all_namespaces<K: Resource<DynamicType = ()>>(&self, client: &Client, labels: &str) -> WatchedResource {
        let kind = ApiResource::erase::<K>(&());
        WatchedResource {
            api: Api::all_with(client.clone(), &kind),
            description: kind.plural.clone(),
            kind,
            cluster: self.member.clone(),
            labels: labels.to_owned(),
            fields: String::new(),
        }
    }

    fn in_namespace<K: Resource<DynamicType = ()>>(
        &self,
        client: &Client,
        namespace: &str,
        labels: &str,
    ) -> WatchedResource {
        let kind = ApiResource::erase::<K>(&());
        WatchedResource {
            api: Api::namespaced_with(client.clone(), namespace, &kind),
            description: format!("{} in namespace {namespace}", kind.plural),
            kind,
            cluster: self.member.clone(),
            labels: labels.to_owned(),
            fields: String::new(),
        }
    }
}

fn rows_by_object_name<V: Clone + PartialEq>(feed: &Feed<V>) -> BTreeMap<ObjectName, V> {
    feed.read(|rows| {
        rows.iter()
            .map(|(name, row)| (name.clone(), row.value.clone()))
            .collect()
    })
}

/// Returns whether a feed of a kind other than Nodes and Peers is current. A forbidden kind counts as absent.
fn optional_trust<V: Clone + PartialEq>(feed: &Feed<V>) -> Trust {
    if feed.is_forbidden() {
        Trust::Absent
    } else {
        feed.trust()
    }
}

/// Whether a kind exists and is not forbidden, according to the last answer of the API server. A kind that was listed once never
/// becomes forbidden ([`Feed::is_forbidden`]).
fn is_readable<V: Clone + PartialEq>(feed: &Feed<V>) -> bool {
    !feed.is_absent() && !feed.is_forbidden()
}

/// Returns the rows of a feed. `None` = not [`is_readable`].
fn rows_if_readable<V: Clone + PartialEq>(feed: &Feed<V>) -> Option<BTreeMap<String, V>> {
    let rows = feed.read(|rows| {
        rows.iter()
            .map(|(name, row)| (name.name.clone(), row.value.clone()))
            .collect()
    });
    is_readable(feed).then_some(rows)
}
