//! Lists the objects of one cluster, page by page. An object that does not parse, or has too long a name, is left out
//! with a note.

use std::{collections::BTreeMap, fmt::Debug, time::Duration};

use clustermesh_core::mesh::ObjectName;
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde::de::DeserializeOwned;

use super::{REQUEST_TIMEOUT, error_chain, kube_system_uid};
use crate::{
    objects::{InstalledCrds, Objects},
    output::shorten,
};

/// The number of objects in one page.
const PAGE_SIZE: u32 = 500;

/// The limit of pages in one list. A hostile API server can return empty pages without end, each with a token for the next page.
const MAX_PAGES: usize = 400;

/// Timeout of all lists of one cluster together.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(300);

/// The limit of notes about one cluster.
const MAX_NOTES: usize = 20;

/// The longest name that Kubernetes allows for an object. Names of namespaces are shorter (63 characters).
const MAX_NAME: usize = 253;

/// Sends one request with a timeout. The error is a message for the user.
pub(crate) async fn with_timeout<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if [401, 403].contains(&status.code) => Err(format!(
            "{} ({}): use an account with this permission",
            shorten(&status.message),
            status.code
        )),
        Ok(Err(error)) => Err(format!("the request failed: {}", shorten(&error_chain(&error)))),
        Err(_) => Err(format!(
            "its API server does not answer within {} s",
            REQUEST_TIMEOUT.as_secs()
        )),
    }
}

/// Returns `namespace/name`, or the name of a cluster-scoped object.
pub(super) fn full_name<T: Resource>(object: &T) -> String {
    let metadata = object.meta();
    let name = metadata.name.as_deref().unwrap_or("?");
    match &metadata.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

/// Lists every object of one kind. `None` = the cluster does not serve the kind (HTTP status 404).
pub(super) async fn list_kind<T>(client: &Client, notes: &mut Vec<String>) -> Result<Option<Vec<T>>, String>
where
    T: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    list_kind_in(client, None, notes).await
}

/// Like [`list_kind`], in one namespace if one is given.
pub(crate) async fn list_kind_in<T>(
    client: &Client,
    namespace: Option<&str>,
    notes: &mut Vec<String>,
) -> Result<Option<Vec<T>>, String>
where
    T: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let resource = ApiResource::erase::<T>(&());
    let objects: Api<DynamicObject> = match namespace {
        None => Api::all_with(client.clone(), &resource),
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
    };
    let mut page = ListParams::default().limit(PAGE_SIZE);
    let mut all = Vec::new();
    for _ in 0..MAX_PAGES {
        let listed = with_timeout(async {
            match objects.list(&page).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
                listed => listed.map(Some),
            }
        });
        let listed = listed.await.map_err(|why| format!("{}: {why}", T::plural(&())))?;
        let Some(listed) = listed else { return Ok(None) };
        for object in listed.items {
            let description = format!("{} {}", T::kind(&()), shorten(&full_name(&object)));
            let names = [&object.metadata.name, &object.metadata.namespace]
                .into_iter()
                .flatten();
            if names.map(String::len).max() > Some(MAX_NAME) {
                notes.push(format!(
                    "{description} is left out: its name is longer than {MAX_NAME} characters"
                ));
                continue;
            }
            match object.try_parse::<T>() {
                Ok(object) => all.push(object),
                Err(error) => notes.push(format!(
                    "{description} cannot be read and is left out: {}",
                    shorten(&error_chain(&error))
                )),
            }
        }
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(Some(all)),
        }
    }
    Err(format!(
        "{}: the list does not end after {MAX_PAGES} pages of {PAGE_SIZE}: the API server is broken or hostile",
        T::plural(&())
    ))
}

/// Keys objects by name. Objects without a name are dropped.
fn by_name<T: Resource, K: Ord>(objects: Option<Vec<T>>, key: impl Fn(ObjectName) -> K) -> BTreeMap<K, T> {
    let named = |object: T| {
        let metadata = object.meta();
        // A cluster-scoped object gets `default`, but `key` uses only its name.
        let namespace = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let name = metadata.name.clone()?;
        Some((key(ObjectName { namespace, name }), object))
    };
    objects.into_iter().flatten().filter_map(named).collect()
}

/// Reads the objects of one cluster. Also returns notes about objects and kinds that could not be read.
pub(super) async fn read_cluster(client: &Client) -> Result<(Objects, Vec<String>), String> {
    let mut notes = Vec::new();
    let objects = tokio::time::timeout(TOTAL_TIMEOUT, list_objects(client, &mut notes)).await;
    let objects = objects.map_err(|_| format!("its lists take longer than {} s", TOTAL_TIMEOUT.as_secs()))??;
    let more = notes.len().saturating_sub(MAX_NOTES);
    notes.truncate(MAX_NOTES);
    if more > 0 {
        notes.push(format!("and {more} more notes"));
    }
    Ok((objects, notes))
}

/// Lists a kind that the RBAC rules of older ClusterMesh versions do not include. If the list fails, the kind counts as not installed.
async fn list_optional_kind<T>(client: &Client, notes: &mut Vec<String>) -> Option<Vec<T>>
where
    T: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    list_kind(client, notes).await.unwrap_or_else(|why| {
        notes.push(format!("{why}; the kind counts as not installed"));
        None
    })
}

async fn list_objects(client: &Client, notes: &mut Vec<String>) -> Result<Objects, String> {
    let nodes = list_kind(client, notes).await?;
    let (peers, policies) = (list_kind(client, notes).await?, list_kind(client, notes).await?);
    let (accesses, gateways) = (
        list_optional_kind(client, notes).await,
        list_optional_kind(client, notes).await,
    );
    Ok(Objects {
        crds: Some(InstalledCrds {
            peers: peers.is_some(),
            policies: policies.is_some(),
            accesses: accesses.is_some(),
        }),
        accesses: by_name(accesses, |name| name.name),
        gateways: by_name(gateways, |name| name),
        nodes: by_name(nodes, |name| name.name),
        peers: by_name(peers, |name| name.name),
        policies: by_name(policies, |name| name.name),
        services: by_name(list_kind(client, notes).await?, |name| name),
        slices: by_name(list_kind(client, notes).await?, |name| name),
        pods: by_name(list_kind(client, notes).await?, |name| name),
        uid: kube_system_uid(client).await,
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    /// An API server that answers every request with the same code and body.
    async fn server(code: &'static str, answer: serde_json::Value) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let body = answer.to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                // The request fits into one TCP segment, so one read is enough.
                let _ = stream.read(&mut [0; 4096]).await;
                let length = body.len();
                let head = format!("HTTP/1.1 {code}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all((head + &body).as_bytes()).await;
            }
        });
        Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap()
    }

    fn page(items: &[serde_json::Value], more: &str) -> serde_json::Value {
        let metadata = serde_json::json!({"continue": more});
        serde_json::json!({"apiVersion": "v1", "kind": "NodeList", "metadata": metadata, "items": items})
    }

    // threat: endless-answer
    #[tokio::test]
    async fn list_with_endless_pages_is_given_up() {
        let client = server("200 OK", page(&[], "next")).await;
        let ended = list_kind::<Node>(&client, &mut Vec::new()).await;
        let why = "nodes: the list does not end after 400 pages of 500: the API server is broken or hostile";
        assert_eq!(ended, Err(why.to_owned()));
    }

    // threat: endless-answer
    #[tokio::test]
    async fn names_and_messages_of_a_hostile_server_are_bounded() {
        let long = "n".repeat(1 << 20);
        let node = |name: &str| serde_json::json!({"metadata": {"name": name}, "spec": {}, "status": {}});
        let client = server("200 OK", page(&[node(&long), node("n1")], "")).await;
        let mut notes = Vec::new();
        let nodes = list_kind::<Node>(&client, &mut notes).await.unwrap().unwrap();
        let names: Vec<String> = nodes.iter().map(full_name).collect();
        assert_eq!(names, ["n1"]);
        let cut = format!("{}... (1048576 bytes)", "n".repeat(300));
        assert_eq!(
            notes,
            [format!(
                "Node {cut} is left out: its name is longer than 253 characters"
            )]
        );

        let status = serde_json::json!({"kind": "Status", "code": 403, "message": long, "status": "Failure"});
        let refused = list_kind::<Node>(&server("403 Forbidden", status).await, &mut notes).await;
        let why = format!("nodes: {cut} (403): use an account with this permission");
        assert_eq!(refused, Err(why));
    }
}
