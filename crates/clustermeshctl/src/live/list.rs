//! Lists of one cluster's objects, in pages, each object read for itself.

use std::{collections::BTreeMap, fmt::Debug};

use clustermesh_core::mesh::ObjectName;
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde::de::DeserializeOwned;

use super::{PATIENCE, chain, uid};
use crate::objects::{Objects, Served};

/// Objects in one answer.
const PAGE: u32 = 500;

/// One request, with its failure in words.
pub(crate) async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if [401, 403].contains(&status.code) => Err(format!(
            "{} ({}): give an account that may",
            status.message, status.code
        )),
        Ok(Err(error)) => Err(format!("its API server cannot be asked: {}", chain(&error))),
        Err(_) => Err(format!(
            "its API server does not answer within {} s",
            PATIENCE.as_secs()
        )),
    }
}

/// Namespace, where it has one, and name.
pub(super) fn name<T: Resource>(object: &T) -> String {
    let metadata = object.meta();
    let name = metadata.name.as_deref().unwrap_or("?");
    match &metadata.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

/// Every object of one kind; `None` = the cluster does not know the kind. One that does not parse costs that one, and a note.
pub(super) async fn kind<T>(client: &Client, notes: &mut Vec<String>) -> Result<Option<Vec<T>>, String>
where
    T: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let objects: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<T>(&()));
    let mut page = ListParams::default().limit(PAGE);
    let mut all = Vec::new();
    loop {
        let listed = within(async {
            match objects.list(&page).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
                listed => listed.map(Some),
            }
        });
        let listed = listed.await.map_err(|why| format!("{}: {why}", T::plural(&())))?;
        let Some(listed) = listed else { return Ok(None) };
        for object in listed.items {
            let what = format!("{} {}", T::kind(&()), name(&object));
            match object.try_parse::<T>() {
                Ok(object) => all.push(object),
                Err(error) => notes.push(format!("{what} cannot be read and is left out: {}", chain(&error))),
            }
        }
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(Some(all)),
        }
    }
}

fn keep<T: Resource, K: Ord>(objects: Option<Vec<T>>, key: impl Fn(ObjectName) -> K) -> BTreeMap<K, T> {
    let named = |object: T| {
        let metadata = object.meta();
        let namespace = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let name = metadata.name.clone()?;
        Some((key(ObjectName { namespace, name }), object))
    };
    objects.into_iter().flatten().filter_map(named).collect()
}

/// What stands in one cluster, and what of it could not be read.
pub(super) async fn all(client: &Client) -> Result<(Objects, Vec<String>), String> {
    let mut notes = Vec::new();
    let nodes = kind(client, &mut notes).await?;
    let (peers, policies) = (kind(client, &mut notes).await?, kind(client, &mut notes).await?);
    let objects = Objects {
        served: Some(Served {
            peers: peers.is_some(),
            policies: policies.is_some(),
        }),
        nodes: keep(nodes, |name| name.name),
        peers: keep(peers, |name| name.name),
        policies: keep(policies, |name| name.name),
        services: keep(kind(client, &mut notes).await?, |name| name),
        slices: keep(kind(client, &mut notes).await?, |name| name),
        pods: keep(kind(client, &mut notes).await?, |name| name),
        uid: uid(client).await,
    };
    Ok((objects, notes))
}
