//! One write: create by POST, change by PUT with resourceVersion, delete with preconditions, and never over an object that
//! is not ours.

use std::time::Duration;

use clustermesh_api::{
    convert, names,
    peer::Peer,
    policy::{PeerPolicy, PeerPolicySpec},
    sandbox::{SandboxAccess, SandboxAccessSpec},
};
use clustermesh_core::{
    diff::{Action, Item, Step},
    mesh::ObjectName,
    observe::{ObservedAccess, ObservedPeer, Owner, Service as SeenService, Slice},
    ownership::{self, Claimant, Ownership},
};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams, Preconditions},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{Outcome, Target, refusal};
use crate::{events::cut, feed::Feed, session::tables::SeenPolicy, trouble};

/// The controller's name in `managedFields`.
const MANAGER: &str = "clustermesh-controller";
/// For one request of a write.
const REQUEST: Duration = Duration::from_secs(15);

/// Who may claim an object: checked again at the moment of writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claims {
    /// This hub's id.
    pub(crate) hub: String,
    /// All meshes, oldest first.
    pub(crate) claimants: Vec<Claimant>,
}

impl Claims {
    fn ours(&self, owner: &Owner) -> bool {
        ownership::of(owner, &self.hub, &self.claimants) != Ownership::Foreign
    }
}

/// A row that says whose it is.
trait Owned {
    fn owner(&self) -> Option<&Owner>;
}

impl Owned for ObservedPeer {
    fn owner(&self) -> Option<&Owner> {
        Some(&self.owner)
    }
}

impl Owned for SeenPolicy {
    fn owner(&self) -> Option<&Owner> {
        Some(&self.policy.owner)
    }
}

impl Owned for ObservedAccess {
    fn owner(&self) -> Option<&Owner> {
        Some(&self.owner)
    }
}

impl Owned for SeenService {
    fn owner(&self) -> Option<&Owner> {
        self.managed.as_ref()
    }
}

impl Owned for Slice {
    fn owner(&self) -> Option<&Owner> {
        self.managed.as_ref()
    }
}

/// Makes an object say what it should.
type Say<'a, K> = Box<dyn Fn(&mut K) + Send + Sync + 'a>;

/// Where a step writes, and how its object is made to say what it should.
struct Place<'a, K, V> {
    step: &'a Step,
    name: ObjectName,
    api: Api<DynamicObject>,
    feed: &'a Feed<V>,
    /// `None` = it goes.
    say: Option<Say<'a, K>>,
}

/// Writes one step.
pub(super) async fn one(step: &Step, target: &Target) -> Outcome {
    let Target { client, tables, claims } = target;
    let owner = &step.owner;
    let source = owner.source_cluster.as_deref().unwrap_or_default();
    let whole = |name: &String| ObjectName {
        namespace: String::new(),
        name: name.clone(),
    };
    match &step.item {
        Item::Peer(name, spec) => {
            let say = spec
                .as_ref()
                .map(|spec| -> Say<'_, Peer> { Box::new(move |o| convert::peer::update(o, spec, owner)) });
            let place = Place {
                step,
                name: whole(name),
                api: api::<Peer>(client, ""),
                feed: &tables.peers,
                say,
            };
            place.write(|| Peer::new(name, Default::default()), claims).await
        }
        Item::Policy(name, spec) => {
            let say = spec.as_ref().map(|spec| -> Say<'_, PeerPolicy> {
                Box::new(move |o| convert::policy::update(o, source, spec, owner))
            });
            let place = Place {
                step,
                name: whole(name),
                api: api::<PeerPolicy>(client, ""),
                feed: &tables.policies,
                say,
            };
            place
                .write(|| PeerPolicy::new(name, PeerPolicySpec::default()), claims)
                .await
        }
        Item::Access(name, spec) => {
            let say = spec
                .as_ref()
                .map(|spec| -> Say<'_, SandboxAccess> { Box::new(move |o| convert::sandbox::update(o, spec, owner)) });
            let place = Place {
                step,
                name: whole(name),
                api: api::<SandboxAccess>(client, ""),
                feed: &tables.accesses,
                say,
            };
            place
                .write(|| SandboxAccess::new(name, SandboxAccessSpec::default()), claims)
                .await
        }
        Item::Service(name, mirror) => {
            let say = mirror
                .as_ref()
                .map(|mirror| -> Say<'_, Service> { Box::new(move |o| convert::service::update(o, mirror, owner)) });
            let api = api::<Service>(client, &name.namespace);
            Place {
                step,
                name: name.clone(),
                api,
                feed: &tables.services,
                say,
            }
            .write(Service::default, claims)
            .await
        }
        Item::Slice(name, slice) => {
            let say = slice.as_ref().map(|(service, planned)| -> Say<'_, EndpointSlice> {
                Box::new(move |o| convert::service::update_slice(o, service, planned, owner))
            });
            let api = api::<EndpointSlice>(client, &name.namespace);
            Place {
                step,
                name: name.clone(),
                api,
                feed: &tables.slices,
                say,
            }
            .write(EndpointSlice::default, claims)
            .await
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

/// Whether an object with these labels is ours. A Service must also carry the managed-by label: a person may have copied
/// the others.
fn owner_of(object: &DynamicObject) -> Option<Owner> {
    let labels = object.metadata.labels.as_ref()?;
    let mirrored = object
        .types
        .as_ref()
        .is_some_and(|types| types.kind == "Service" || types.kind == "EndpointSlice");
    if mirrored && labels.get(names::LABEL_MANAGED_BY).map(String::as_str) != Some(names::MANAGED_BY) {
        return None;
    }
    Some(convert::owner(Some(labels)))
}

impl<K, V> Place<'_, K, V>
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned,
    V: Owned + Clone + PartialEq,
{
    async fn write(self, new: impl FnOnce() -> K, claims: &Claims) -> Outcome {
        match tokio::time::timeout(REQUEST * 2, self.write_unbounded(new, claims)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                tracing::debug!(error = %trouble::quoted(&error.to_string()), name = %self.name, "write failed");
                refusal(&error, self.step)
            }
            Err(_) => Outcome::Unavailable(trouble::SILENT.to_owned()),
        }
    }

    async fn write_unbounded(&self, new: impl FnOnce() -> K, claims: &Claims) -> Result<Outcome, kube::Error> {
        let Some(say) = &self.say else {
            return self.delete(claims).await;
        };
        let mut new = Some(new);
        if self.step.action == Action::Create
            && let Some(new) = new.take()
        {
            match self.create(new(), say).await? {
                // A name that the watch has not shown yet, or somebody else's.
                Outcome::Conflict { .. } => {}
                outcome => return Ok(outcome),
            }
        }
        match (self.api.get_opt(&self.name.name).await?, new) {
            (Some(standing), _) => self.change(standing, say, claims).await,
            (None, Some(new)) => self.create(new(), say).await,
            (None, None) => Ok(Outcome::Conflict { by: None }),
        }
    }

    async fn create(&self, mut object: K, say: &Say<'_, K>) -> Result<Outcome, kube::Error> {
        object.meta_mut().name = Some(self.name.name.clone());
        if !self.name.namespace.is_empty() {
            object.meta_mut().namespace = Some(self.name.namespace.clone());
        }
        say(&mut object);
        match self.api.create(&params(), &dynamic(&object)?).await {
            Ok(object) => Ok(self.written(object, None)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Conflict { by: None }),
            Err(error) => Err(error),
        }
    }

    async fn change(&self, standing: DynamicObject, say: &Say<'_, K>, claims: &Claims) -> Result<Outcome, kube::Error> {
        if !owner_of(&standing).is_some_and(|owner| claims.ours(&owner)) {
            return Ok(Outcome::Refused(
                "an object of this name stands there that is not ours; it is left alone".to_owned(),
            ));
        }
        let mut object: K = standing
            .clone()
            .try_parse()
            .map_err(|error| kube::Error::SerdeError(serde::de::Error::custom(error.to_string())))?;
        let before = dynamic(&object)?;
        say(&mut object);
        let after = dynamic(&object)?;
        let over = other_manager(&standing);
        if before == after {
            self.feed.wrote(standing);
            return Ok(Outcome::Unchanged);
        }
        match self.api.replace(&self.name.name, &params(), &after).await {
            Ok(object) => Ok(self.written(object, over)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(self.conflict().await),
            Err(error) => Err(error),
        }
    }

    fn written(&self, mut object: DynamicObject, over: Option<String>) -> Outcome {
        object.metadata.managed_fields = None;
        self.feed.wrote(object);
        Outcome::Written { over }
    }

    /// Another writer was faster; the object says which.
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
        if !row.value.owner().is_some_and(|owner| claims.ours(owner)) {
            return Ok(Outcome::Conflict { by: None });
        }
        let (uid, version) = (row.uid, row.version);
        // As it was seen when it was found to be ours: were its labels changed meanwhile, this is a conflict.
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
                Ok(Outcome::Written { over: None })
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

fn params() -> PostParams {
    PostParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PostParams::default()
    }
}

/// The field manager that changed an object last, other than the controller.
fn other_manager(object: &DynamicObject) -> Option<String> {
    let fields = object.metadata.managed_fields.iter().flatten();
    let others = fields.filter(|fields| fields.manager.as_deref().is_some_and(|manager| manager != MANAGER));
    let last = others.max_by(|a, b| a.time.cmp(&b.time))?;
    last.manager.as_deref().map(|manager| cut(manager, 128))
}

fn dynamic<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Result<DynamicObject, kube::Error> {
    let mut value = serde_json::to_value(object).map_err(kube::Error::SerdeError)?;
    if let Some(fields) = value.as_object_mut() {
        fields.insert("apiVersion".to_owned(), K::api_version(&()).into());
        fields.insert("kind".to_owned(), K::kind(&()).into());
    }
    serde_json::from_value(value).map_err(kube::Error::SerdeError)
}
