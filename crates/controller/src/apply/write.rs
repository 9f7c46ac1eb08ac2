//! Makes the requests of one step: create by POST, update by PUT with resourceVersion, delete with preconditions. It never
//! changes an object that does not belong to this hub.

use std::{sync::Arc, time::Duration};

use clustermesh_api::{
    convert, names,
    peer::Peer,
    policy::{PeerPolicy, PeerPolicySpec},
    sandbox::{SandboxAccess, SandboxAccessSpec},
};
use clustermesh_core::{
    diff::{Action, Item, Step},
    mesh::ObjectName,
    observe::{ObservedAccess, ObservedPeer, Owner, Service as ObservedService, Slice},
    ownership::{self, Claimant, Ownership},
};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams, Preconditions},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{Connection, Outcome, classify_error};
use crate::{api_error, events::truncate, feed::Feed, session::member_feeds::PolicyRow};

/// The controller's name in `managedFields`.
const MANAGER: &str = "clustermesh-controller";
/// Timeout of all requests of one step together.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Decides which objects belong to this hub. Each write checks this again: an update checks the object that it has just read, a
/// deletion checks the object's row in the feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claims {
    /// This hub's id.
    pub(crate) hub: String,
    /// All meshes, oldest first.
    pub(crate) claimants: Vec<Claimant>,
}

impl Claims {
    fn is_ours(&self, owner: &Owner) -> bool {
        ownership::of(owner, &self.hub, &self.claimants) != Ownership::Foreign
    }
}

/// An object in a feed. Its labels may name an owner.
trait Owned {
    /// `None` = a Service or EndpointSlice that is not mirrored.
    fn owner(&self) -> Option<&Owner>;
}

impl Owned for ObservedPeer {
    fn owner(&self) -> Option<&Owner> {
        Some(&self.owner)
    }
}

impl<T: Owned> Owned for Arc<T> {
    fn owner(&self) -> Option<&Owner> {
        T::owner(self)
    }
}

impl Owned for PolicyRow {
    fn owner(&self) -> Option<&Owner> {
        Some(&self.policy.owner)
    }
}

impl Owned for ObservedAccess {
    fn owner(&self) -> Option<&Owner> {
        Some(&self.owner)
    }
}

impl Owned for ObservedService {
    fn owner(&self) -> Option<&Owner> {
        self.managed.as_ref()
    }
}

impl Owned for Slice {
    fn owner(&self) -> Option<&Owner> {
        self.managed.as_ref()
    }
}

/// A function that changes an object to its desired content.
type Update<'a, K> = Box<dyn Fn(&mut K) + Send + Sync + 'a>;

/// Writes the object of one step.
struct ObjectWriter<'a, K, V> {
    step: &'a Step,
    name: ObjectName,
    api: Api<DynamicObject>,
    feed: &'a Feed<V>,
    /// `None` = the step deletes the object.
    update: Option<Update<'a, K>>,
}

/// Writes one step.
pub(super) async fn write_step(step: &Step, connection: &Connection) -> Outcome {
    let Connection { client, feeds, claims } = connection;
    let owner = &step.owner;
    let source = owner.source_cluster.as_deref().unwrap_or_default();
    let cluster_scoped = |name: &String| ObjectName {
        namespace: String::new(),
        name: name.clone(),
    };
    match &step.item {
        Item::Peer(name, spec) => {
            let update = spec
                .as_ref()
                .map(|spec| -> Update<'_, Peer> { Box::new(move |o| convert::peer::update(o, spec, owner)) });
            let writer = ObjectWriter {
                step,
                name: cluster_scoped(name),
                api: api::<Peer>(client, ""),
                feed: &feeds.peers,
                update,
            };
            writer.write(|| Peer::new(name, Default::default()), claims).await
        }
        Item::Policy(name, spec) => {
            let update = spec.as_ref().map(|spec| -> Update<'_, PeerPolicy> {
                Box::new(move |o| convert::policy::update(o, source, spec, owner))
            });
            let writer = ObjectWriter {
                step,
                name: cluster_scoped(name),
                api: api::<PeerPolicy>(client, ""),
                feed: &feeds.policies,
                update,
            };
            writer
                .write(|| PeerPolicy::new(name, PeerPolicySpec::default()), claims)
                .await
        }
        Item::Access(name, spec) => {
            let update = spec.as_ref().map(|spec| -> Update<'_, SandboxAccess> {
                Box::new(move |o| convert::sandbox::update(o, spec, owner))
            });
            let writer = ObjectWriter {
                step,
                name: cluster_scoped(name),
                api: api::<SandboxAccess>(client, ""),
                feed: &feeds.accesses,
                update,
            };
            writer
                .write(|| SandboxAccess::new(name, SandboxAccessSpec::default()), claims)
                .await
        }
        Item::Service(name, mirror) => {
            let update = mirror
                .as_ref()
                .map(|mirror| -> Update<'_, Service> { Box::new(move |o| convert::service::update(o, mirror, owner)) });
            let writer = ObjectWriter {
                step,
                name: name.clone(),
                api: api::<Service>(client, &name.namespace),
                feed: &feeds.mirrored_services,
                update,
            };
            writer.write(Service::default, claims).await
        }
        Item::Slice(name, slice) => {
            let update = slice.as_deref().map(|(service, planned)| -> Update<'_, EndpointSlice> {
                Box::new(move |o| convert::service::update_slice(o, service, planned, owner))
            });
            let writer = ObjectWriter {
                step,
                name: name.clone(),
                api: api::<EndpointSlice>(client, &name.namespace),
                feed: &feeds.mirrored_slices,
                update,
            };
            writer.write(EndpointSlice::default, claims).await
        }
    }
}

fn api<K: Resource<DynamicType = ()>>(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let resource = ApiResource::erase::<K>(&());
    if namespace.is_empty() {
        Api::all_with(client.clone(), &resource)
    } else {
        Api::namespaced_with(client.clone(), namespace, &resource)
    }
}

/// Returns the owner in the labels of an object. `None` = it has no labels, or it is a Service or EndpointSlice without our managed-by
/// label: a user may have copied the other labels.
fn owner_of(object: &DynamicObject) -> Option<Owner> {
    let labels = object.metadata.labels.as_ref()?;
    let is_mirrored_kind = object
        .types
        .as_ref()
        .is_some_and(|types| types.kind == "Service" || types.kind == "EndpointSlice");
    if is_mirrored_kind && labels.get(names::LABEL_MANAGED_BY).map(String::as_str) != Some(names::MANAGED_BY) {
        return None;
    }
    Some(convert::owner(Some(labels)))
}

impl<K, V> ObjectWriter<'_, K, V>
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned,
    V: Owned + Clone + PartialEq,
{
    async fn write(self, new: impl FnOnce() -> K, claims: &Claims) -> Outcome {
        match tokio::time::timeout(STEP_TIMEOUT, self.write_without_timeout(new, claims)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                tracing::debug!(error = %api_error::sanitize(&error.to_string()), name = %self.name, "write failed");
                classify_error(&error, self.step)
            }
            Err(_) => Outcome::Unavailable(api_error::NO_ANSWER.to_owned()),
        }
    }

    async fn write_without_timeout(&self, new: impl FnOnce() -> K, claims: &Claims) -> Result<Outcome, kube::Error> {
        let Some(update) = &self.update else {
            return self.delete(claims).await;
        };
        let mut new = Some(new);
        if self.step.action == Action::Create
            && let Some(new) = new.take()
        {
            match self.create(new(), update).await? {
                // The object exists: the watch has not delivered it yet, or it is not ours.
                Outcome::Conflict { .. } => {}
                outcome => return Ok(outcome),
            }
        }
        match (self.api.get_opt(&self.name.name).await?, new) {
            (Some(existing), _) => self.replace(existing, update, claims).await,
            (None, Some(new)) => self.create(new(), update).await,
            // `create` failed because the object existed, and the object was deleted since.
            (None, None) => Ok(Outcome::Conflict { by: None }),
        }
    }

    async fn create(&self, mut object: K, update: &Update<'_, K>) -> Result<Outcome, kube::Error> {
        object.meta_mut().name = Some(self.name.name.clone());
        if !self.name.namespace.is_empty() {
            object.meta_mut().namespace = Some(self.name.namespace.clone());
        }
        update(&mut object);
        match self.api.create(&post_params(), &to_dynamic(&object)?).await {
            Ok(object) => Ok(self.store_written(object, None)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Conflict { by: None }),
            Err(error) => Err(error),
        }
    }

    async fn replace(
        &self,
        existing: DynamicObject,
        update: &Update<'_, K>,
        claims: &Claims,
    ) -> Result<Outcome, kube::Error> {
        if !owner_of(&existing).is_some_and(|owner| claims.is_ours(&owner)) {
            return Ok(Outcome::Refused(
                "an object of this name already exists that is not ours; it is left unchanged".to_owned(),
            ));
        }
        let mut object: K = existing
            .clone()
            .try_parse()
            .map_err(|error| kube::Error::SerdeError(serde::de::Error::custom(error.to_string())))?;
        let before = to_dynamic(&object)?;
        update(&mut object);
        let after = to_dynamic(&object)?;
        let overwritten_manager = other_manager(&existing);
        if before == after {
            self.feed.put_written(existing);
            return Ok(Outcome::Unchanged);
        }
        match self.api.replace(&self.name.name, &post_params(), &after).await {
            Ok(object) => Ok(self.store_written(object, overwritten_manager)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(self.conflict().await),
            Err(error) => Err(error),
        }
    }

    /// Puts the object that the API server returned into the feed.
    fn store_written(&self, mut object: DynamicObject, overwritten_manager: Option<String>) -> Outcome {
        object.metadata.managed_fields = None;
        self.feed.put_written(object);
        Outcome::Written { overwritten_manager }
    }

    /// Reads the object to find out which field manager caused the conflict.
    async fn conflict(&self) -> Outcome {
        let object = self.api.get_opt(&self.name.name).await.ok().flatten();
        Outcome::Conflict {
            by: object.as_ref().and_then(other_manager),
        }
    }

    async fn delete(&self, claims: &Claims) -> Result<Outcome, kube::Error> {
        let Some(row) = self.feed.read(|rows| rows.get(&self.name).cloned()) else {
            return Ok(Outcome::Unchanged);
        };
        if !row.value.owner().is_some_and(|owner| claims.is_ours(owner)) {
            return Ok(Outcome::Conflict { by: None });
        }
        let (uid, version) = (row.uid, row.version);
        // This is the version whose labels were checked. If the object changed in the meantime, the request fails with a conflict.
        let preconditions = Preconditions {
            uid: Some(uid),
            resource_version: Some(version),
        };
        match self
            .api
            .delete(&self.name.name, &DeleteParams::default().preconditions(preconditions))
            .await
        {
            Ok(_) => {
                self.feed.remove(&self.name);
                Ok(Outcome::Written {
                    overwritten_manager: None,
                })
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                self.feed.remove(&self.name);
                Ok(Outcome::Unchanged)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(self.conflict().await),
            Err(error) => Err(error),
        }
    }
}

fn post_params() -> PostParams {
    PostParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PostParams::default()
    }
}

/// Returns the field manager, other than the controller, that changed an object last.
fn other_manager(object: &DynamicObject) -> Option<String> {
    let fields = object.metadata.managed_fields.iter().flatten();
    let others = fields.filter(|fields| fields.manager.as_deref().is_some_and(|manager| manager != MANAGER));
    let last = others.max_by(|a, b| a.time.cmp(&b.time))?;
    last.manager.as_deref().map(|manager| truncate(manager, 128))
}

fn to_dynamic<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Result<DynamicObject, kube::Error> {
    let mut value = serde_json::to_value(object).map_err(kube::Error::SerdeError)?;
    if let Some(fields) = value.as_object_mut() {
        fields.insert("apiVersion".to_owned(), K::api_version(&()).into());
        fields.insert("kind".to_owned(), K::kind(&()).into());
    }
    serde_json::from_value(value).map_err(kube::Error::SerdeError)
}
