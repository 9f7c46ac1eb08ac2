//! The credentials of one member, as they are now: the hub's own client, or what the referenced Secret holds. Only that one
//! Secret is read, by name, in the mesh's own namespace.

use std::{sync::Arc, time::Duration};

use clustermesh_access::memory::Account;
use clustermesh_core::mesh::ClusterIdentity;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use sha2::{Digest, Sha256};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    feed::{self, Changed, Feed, Source, Trust},
    hub::Hub,
};

/// What a session can connect with.
#[derive(Clone)]
pub(crate) enum Credentials {
    /// The Secret was not read yet.
    Pending,
    /// There are none that may be used; which field of what object, and the remedy.
    Missing(String),
    /// These.
    Ready(Client),
}

/// The hub's API server answers 403 while it starts and has not read its own roles: for so long what was read last still holds.
const DENIED: Duration = Duration::from_secs(60);

/// The kubeconfig's text, which no `Debug` may print.
#[derive(Clone, PartialEq)]
struct Text(Option<Vec<u8>>);

/// Follows the credentials of `identity`; the tasks it takes are in `tasks`, and dropping that ends them.
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
        let (sender, receiver) = watch::channel(Credentials::Ready(hub.client.clone()));
        tasks.spawn(async move { sender.closed().await });
        return receiver;
    };
    let (sender, receiver) = watch::channel(Credentials::Pending);
    let object = format!("Secret {namespace}/{name}");
    let changed = Changed::default();
    let wanted_key = key.clone();
    let feed = Feed::new(changed.clone(), move |object: DynamicObject| {
        let secret: Secret = object.try_parse().map_err(|_| "it is no Secret".to_owned())?;
        Ok(Some(Text(
            secret
                .data
                .and_then(|mut data| data.remove(&wanted_key))
                .map(|bytes| bytes.0),
        )))
    });
    let source = Source {
        api: Api::namespaced_with(hub.client.clone(), &namespace, &ApiResource::erase::<Secret>(&())),
        what: object.clone(),
        whose: "the hub".to_owned(),
        labels: String::new(),
        fields: format!("metadata.name={name}"),
    };
    let followed = feed.clone();
    tasks.spawn(async move {
        // A connection to the hub that died is noticed by the watch itself.
        let (_resume, resumed) = watch::channel(0);
        feed::follow(&source, &followed, resumed).await;
    });

    let (hub, account) = (Arc::clone(hub), account.clone());
    tasks.spawn(async move {
        let mut seen: Option<[u8; 32]> = None;
        loop {
            let text = feed.read(|rows| rows.values().next().map(|row| row.value.clone()));
            let verdict = match (text, feed.trust()) {
                (_, Trust::Pending) => None,
                // The hub's own API is away: what was read last still holds.
                (_, Trust::Broken(_)) => None,
                (_, Trust::Denied(_)) if feed.denied().is_none_or(|lasts| lasts < DENIED) => None,
                (_, Trust::Denied(why)) => Some(Err(format!(
                    "the controller may not read {} ({why}); allow it with the Role of its manifests",
                    object
                ))),
                (None, _) => Some(Err(format!(
                    "{} is not there; create it in the mesh's namespace with the cluster's kubeconfig under key {key:?}",
                    object
                ))),
                (Some(Text(None)), _) => Some(Err(format!(
                    "{} has no key {key:?}; set kubeconfigSecretRef.key to the key that holds the kubeconfig",
                    object
                ))),
                (Some(Text(Some(bytes))), _) => Some(Ok(bytes)),
            };
            match verdict {
                None => {}
                Some(Err(why)) => {
                    seen = None;
                    sender.send_if_modified(|current| {
                        let news = !matches!(current, Credentials::Missing(standing) if *standing == why);
                        *current = Credentials::Missing(why);
                        news
                    });
                }
                Some(Ok(bytes)) => {
                    let digest: [u8; 32] = Sha256::digest(&bytes).into();
                    if seen != Some(digest) {
                        seen = Some(digest);
                        let ready = connect(&bytes, context.as_deref(), &hub, &account).await;
                        let ready = ready.unwrap_or_else(|why| {
                            Credentials::Missing(format!(
                                "{} key {key:?}: {why}",
                                object
                            ))
                        });
                        tracing::info!(secret = %object, usable = matches!(ready, Credentials::Ready(_)), "kubeconfig read");
                        sender.send_replace(ready);
                    }
                }
            }
            changed.notified().await;
        }
    });
    receiver
}

async fn connect(bytes: &[u8], context: Option<&str>, hub: &Hub, account: &Account) -> Result<Credentials, String> {
    let client = clustermesh_access::member(bytes, context, &hub.hosts, account).await;
    client.map(Credentials::Ready).map_err(|unusable| {
        tracing::debug!(
            error = &unusable as &dyn std::error::Error,
            "no client from the kubeconfig"
        );
        unusable.to_string()
    })
}

#[cfg(test)]
mod tests;
