//! Watches the credentials of one member: the hub's own client, or the kubeconfig in the referenced Secret. Only this Secret is read,
//! by its name, in the namespace of the mesh.

use std::{sync::Arc, time::Duration};

use clustermesh_access::{MemberClient, expiry::Expiry, memory::Account};
use clustermesh_core::mesh::ClusterIdentity;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use sha2::{Digest, Sha256};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    feed::{self, Changed, Feed, Trust, WatchedResource},
    hub::Hub,
};

/// The state of the credentials.
#[derive(Clone)]
pub(crate) enum Credentials {
    /// The Secret was not read yet.
    Pending,
    /// The credentials are missing or unusable. The text names the object, its field and the remedy.
    Missing(String),
    /// The client, and when its credentials expire, if this is known.
    Ready(Client, Option<Expiry>),
}

/// An API server that has just started responds with 403 until it has loaded its RBAC roles. Until a 403 has lasted this long, the
/// last credentials stay in use.
const DENIED_AFTER: Duration = Duration::from_secs(60);

/// The text of the kubeconfig; `None` = the Secret lacks the key that the ClusterMesh names. The type has no `Debug`, so that the text
/// cannot be logged.
#[derive(Clone, PartialEq)]
struct KubeconfigText(Option<Vec<u8>>);

/// Watches the credentials of `identity`. The memory that the client's responses use counts toward the limit of `account`. Spawns
/// tasks in `tasks`; dropping the set stops them.
pub(super) fn follow(
    identity: &ClusterIdentity,
    hub: &Arc<Hub>,
    account: &Account,
    tasks: &mut JoinSet<()>,
) -> watch::Receiver<Credentials> {
    let ClusterIdentity::Secret {
        namespace,
        name,
        key,
        context,
    } = identity.clone()
    else {
        let (sender, receiver) = watch::channel(Credentials::Ready(hub.client.clone(), None));
        // Keeps the sender, because without it `changed` of the receiver fails.
        tasks.spawn(async move { sender.closed().await });
        return receiver;
    };
    let (sender, receiver) = watch::channel(Credentials::Pending);
    let secret_name = format!("Secret {namespace}/{name}");
    let changed = Changed::default();
    let wanted_key = key.clone();
    let feed = Feed::new(changed.clone(), move |object: DynamicObject| {
        let secret: Secret = object.try_parse().map_err(|_| "it is not a Secret".to_owned())?;
        Ok(Some(KubeconfigText(
            secret
                .data
                .and_then(|mut data| data.remove(&wanted_key))
                .map(|bytes| bytes.0),
        )))
    });
    let kind = ApiResource::erase::<Secret>(&());
    let resource = WatchedResource {
        api: Api::namespaced_with(hub.client.clone(), &namespace, &kind),
        kind,
        description: secret_name.clone(),
        cluster: "the hub".to_owned(),
        labels: String::new(),
        fields: format!("metadata.name={name}"),
    };
    let followed = feed.clone();
    tasks.spawn(async move {
        // Nothing probes this connection. A watch on a dead connection times out by itself.
        feed::follow(&resource, &followed).await;
    });

    let (hub, account) = (Arc::clone(hub), account.clone());
    tasks.spawn(async move {
        let mut last_digest: Option<[u8; 32]> = None;
        loop {
            let text = feed.read(|rows| rows.values().next().map(|row| row.value.clone()));
            // `None` = the last credentials stay in use.
            let read = match (text, feed.trust()) {
                (_, Trust::Pending) => None,
                // The hub's API server does not answer, or fails.
                (_, Trust::Broken(_)) => None,
                (_, Trust::Denied(_)) if feed.denied_for().is_none_or(|lasts| lasts < DENIED_AFTER) => None,
                (_, Trust::Denied(why)) => Some(Err(format!(
                    "the controller may not read {} ({why}); allow it with the Role of its manifests",
                    secret_name
                ))),
                (None, _) => Some(Err(format!(
                    "{} does not exist; create it in the mesh's namespace with the cluster's kubeconfig under key {key:?}",
                    secret_name
                ))),
                (Some(KubeconfigText(None)), _) => Some(Err(format!(
                    "{} has no key {key:?}; set kubeconfigSecretRef.key to the key that holds the kubeconfig",
                    secret_name
                ))),
                (Some(KubeconfigText(Some(bytes))), _) => Some(Ok(bytes)),
            };
            match read {
                None => {}
                Some(Err(why)) => {
                    last_digest = None;
                    sender.send_if_modified(|current| {
                        let has_changed = !matches!(current, Credentials::Missing(last) if *last == why);
                        *current = Credentials::Missing(why);
                        has_changed
                    });
                }
                Some(Ok(bytes)) => {
                    let digest: [u8; 32] = Sha256::digest(&bytes).into();
                    if last_digest != Some(digest) {
                        last_digest = Some(digest);
                        let built = build_credentials(&bytes, context.as_deref(), &hub, &account).await;
                        let credentials = built.unwrap_or_else(|why| {
                            Credentials::Missing(format!(
                                "{} key {key:?}: {why}",
                                secret_name
                            ))
                        });
                        tracing::info!(secret = %secret_name, usable = matches!(credentials, Credentials::Ready(..)), "kubeconfig read");
                        sender.send_replace(credentials);
                    }
                }
            }
            changed.notified().await;
        }
    });
    receiver
}

async fn build_credentials(
    bytes: &[u8],
    context: Option<&str>,
    hub: &Hub,
    account: &Account,
) -> Result<Credentials, String> {
    let client = clustermesh_access::build_member_client(bytes, context, &hub.hosts, account).await;
    match client {
        Ok(MemberClient { client, expiry }) => Ok(Credentials::Ready(client, expiry)),
        Err(unusable) => {
            tracing::debug!(
                error = &unusable as &dyn std::error::Error,
                "no client from the kubeconfig"
            );
            Err(unusable.to_string())
        }
    }
}

#[cfg(test)]
mod tests;
