//! Lists of one cluster's objects, in pages, each object read for itself.

use std::{collections::BTreeMap, fmt::Debug, time::Duration};

use clustermesh_core::mesh::ObjectName;
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde::de::DeserializeOwned;

use super::{PATIENCE, chain, uid};
use crate::{
    objects::{Objects, Served},
    output::shorten,
};

/// Objects in one answer.
const PAGE: u32 = 500;

/// The most pages of one list. A hostile API server can return empty pages, each with a token for the next one, without end.
const PAGES: usize = 400;

/// Time limit for all lists of one cluster.
const IN_ALL: Duration = Duration::from_secs(300);

/// The most notes on one cluster.
const NOTES: usize = 20;

/// The longest name that an API server of Kubernetes gives to an object or a namespace.
const NAME: usize = 253;

/// One request, with its failure in words.
pub(crate) async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if [401, 403].contains(&status.code) => Err(format!(
            "{} ({}): give an account that may",
            shorten(&status.message),
            status.code
        )),
        Ok(Err(error)) => Err(format!("its API server cannot be asked: {}", shorten(&chain(&error)))),
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
    for _ in 0..PAGES {
        let listed = within(async {
            match objects.list(&page).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
                listed => listed.map(Some),
            }
        });
        let listed = listed.await.map_err(|why| format!("{}: {why}", T::plural(&())))?;
        let Some(listed) = listed else { return Ok(None) };
        for object in listed.items {
            let what = format!("{} {}", T::kind(&()), shorten(&name(&object)));
            let longest = [&object.metadata.name, &object.metadata.namespace]
                .into_iter()
                .flatten();
            if longest.map(String::len).max() > Some(NAME) {
                notes.push(format!("{what} is left out: no name is longer than {NAME} characters"));
                continue;
            }
            match object.try_parse::<T>() {
                Ok(object) => all.push(object),
                Err(error) => notes.push(format!(
                    "{what} cannot be read and is left out: {}",
                    shorten(&chain(&error))
                )),
            }
        }
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(Some(all)),
        }
    }
    Err(format!(
        "{}: the list does not end after {PAGES} pages of {PAGE}: its API server is broken or hostile",
        T::plural(&())
    ))
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
    let objects = tokio::time::timeout(IN_ALL, objects(client, &mut notes)).await;
    let objects = objects.map_err(|_| format!("its lists take longer than {} s", IN_ALL.as_secs()))??;
    let more = notes.len().saturating_sub(NOTES);
    notes.truncate(NOTES);
    if more > 0 {
        notes.push(format!("and {more} more objects that are left out"));
    }
    Ok((objects, notes))
}

/// Of a kind that an older account may not read, which then counts as not there.
async fn readable<T>(client: &Client, notes: &mut Vec<String>) -> Option<Vec<T>>
where
    T: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    kind(client, notes).await.unwrap_or_else(|why| {
        notes.push(format!("{why}; it counts as none"));
        None
    })
}

async fn objects(client: &Client, notes: &mut Vec<String>) -> Result<Objects, String> {
    let nodes = kind(client, notes).await?;
    let (peers, policies) = (kind(client, notes).await?, kind(client, notes).await?);
    let (accesses, gateways) = (readable(client, notes).await, readable(client, notes).await);
    Ok(Objects {
        served: Some(Served {
            peers: peers.is_some(),
            policies: policies.is_some(),
            accesses: accesses.is_some(),
        }),
        accesses: keep(accesses, |name| name.name),
        gateways: keep(gateways, |name| name),
        nodes: keep(nodes, |name| name.name),
        peers: keep(peers, |name| name.name),
        policies: keep(policies, |name| name.name),
        services: keep(kind(client, notes).await?, |name| name),
        slices: keep(kind(client, notes).await?, |name| name),
        pods: keep(kind(client, notes).await?, |name| name),
        uid: uid(client).await,
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

    /// An API server that gives this answer to every request.
    async fn server(code: &'static str, answer: serde_json::Value) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let body = answer.to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                // A GET without a body fits one segment.
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

    #[tokio::test]
    async fn a_list_without_end_is_given_up() {
        let client = server("200 OK", page(&[], "next")).await;
        let ended = kind::<Node>(&client, &mut Vec::new()).await;
        let why = "nodes: the list does not end after 400 pages of 500: its API server is broken or hostile";
        assert_eq!(ended, Err(why.to_owned()));
    }

    #[tokio::test]
    async fn names_and_messages_of_a_hostile_server_are_bounded() {
        let long = "n".repeat(1 << 20);
        let node = |name: &str| serde_json::json!({"metadata": {"name": name}, "spec": {}, "status": {}});
        let client = server("200 OK", page(&[node(&long), node("n1")], "")).await;
        let mut notes = Vec::new();
        let nodes = kind::<Node>(&client, &mut notes).await.unwrap().unwrap();
        let names: Vec<String> = nodes.iter().map(name).collect();
        assert_eq!(names, ["n1"]);
        let cut = format!("{}... (1048576 bytes)", "n".repeat(300));
        assert_eq!(
            notes,
            [format!("Node {cut} is left out: no name is longer than 253 characters")]
        );

        let status = serde_json::json!({"kind": "Status", "code": 403, "message": long, "status": "Failure"});
        let refused = kind::<Node>(&server("403 Forbidden", status).await, &mut notes).await;
        assert_eq!(refused, Err(format!("nodes: {cut} (403): give an account that may")));
    }
}
