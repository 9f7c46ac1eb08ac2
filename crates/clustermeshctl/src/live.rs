//! Reads running clusters once: the ClusterMeshes of the hub, and the objects of every member that they name.

use std::{collections::BTreeMap, time::Duration};

use clustermesh_access::{hub_hosts, kubeconfig::HubHosts, memory::Account};
use clustermesh_api::{convert, mesh::ClusterMesh};
use clustermesh_core::{
    hub::HubNamespaces,
    mesh::{ClusterIdentity, Mesh},
};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{Api, Client};

use crate::{
    args::GivenArgs,
    inputs::{ClusterSource, ClusterSources},
    objects::Objects,
    problem::Problem,
};

mod list;

pub(crate) use list::with_timeout;

/// For one request, for example a page of a list.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The clusters that were read.
pub(crate) struct LiveClusters {
    /// In the order of their names.
    pub(crate) meshes: Vec<Mesh>,
    pub(crate) sources: ClusterSources,
    /// The clients of the members that could be reached.
    pub(crate) clients: BTreeMap<ClusterIdentity, Client>,
    /// For stderr.
    pub(crate) notes: Vec<String>,
}

impl LiveClusters {
    /// Reads the hub, then all members at the same time. A member that cannot be read becomes [`ClusterSource::Unreadable`].
    ///
    /// # Errors
    /// The hub cannot be read, or the command line names a cluster that no mesh has.
    pub(crate) async fn read(given: &GivenArgs, files: BTreeMap<String, Objects>) -> Result<Self, Vec<Problem>> {
        let hub = Hub::open(given).await.map_err(|why| vec![Problem::usage(why)])?;
        let mut notes = Vec::new();
        let meshes = hub.meshes(&mut notes).await.map_err(|why| vec![Problem::usage(why)])?;
        if meshes.is_empty() {
            // The notes have the reason for which each ClusterMesh was left out, and the remedy.
            let why = format!("the hub ({}) has no ClusterMesh that can be read", hub.url);
            return Err(notes.into_iter().chain([why]).map(Problem::usage).collect());
        }
        let names = cluster_names(&meshes);
        check_names("--cluster", files.keys(), &names)?;
        check_names("--member-context", given.members.iter().map(|(name, _)| name), &names)?;
        let mut files = files;
        let reads = names.iter().map(|(identity, name)| {
            let file = files.remove(name);
            let hub = &hub;
            async move {
                let context = given.members.iter().find(|(member, _)| member == name);
                let client = hub.client_of(identity, context.map(|(_, context)| &**context)).await;
                let (source, client, notes) = match (file, client) {
                    // The objects come from files. `verify` may still need the client.
                    (Some(objects), client) => (ClusterSource::Read(Box::new(objects)), client.ok(), Vec::new()),
                    (None, Err(why)) => (ClusterSource::Unreadable(why), None, Vec::new()),
                    (None, Ok(client)) => match list::read_cluster(&client).await {
                        Ok((objects, notes)) => (ClusterSource::Read(Box::new(objects)), Some(client), notes),
                        Err(why) => (ClusterSource::Unreadable(why), None, Vec::new()),
                    },
                };
                (identity.clone(), name.clone(), source, client, notes)
            }
        });
        let mut sources = ClusterSources::default();
        let mut clients = BTreeMap::new();
        for (identity, name, source, client, of_member) in futures::future::join_all(reads).await {
            if let ClusterSource::Unreadable(why) = &source {
                notes.push(format!("warning: cluster {name:?} ({identity}) cannot be read: {why}"));
            }
            notes.extend(
                of_member
                    .into_iter()
                    .map(|note| format!("warning: cluster {name:?}: {note}")),
            );
            clients.extend(client.map(|client| (identity.clone(), client)));
            sources.names.insert(identity, name.clone());
            sources.clusters.insert(name, source);
        }
        Ok(Self {
            meshes,
            sources,
            clients,
            notes,
        })
    }
}

/// Chooses one name for each cluster: the name of its entry. Where two clusters have the same name, the second is prefixed with
/// its mesh.
fn cluster_names(meshes: &[Mesh]) -> BTreeMap<ClusterIdentity, String> {
    let mut first: Vec<(&ClusterIdentity, String)> = Vec::new();
    let mut all = BTreeMap::new();
    for mesh in meshes {
        for entry in &mesh.clusters {
            let known = first.iter().find(|(other, _)| other.same_cluster(&entry.identity));
            let name = match known {
                Some((_, name)) => name.clone(),
                None => {
                    let taken = first.iter().any(|(_, name)| *name == entry.name);
                    let name = match taken {
                        true => format!("{}/{}", mesh.id, entry.name),
                        false => entry.name.clone(),
                    };
                    first.push((&entry.identity, name.clone()));
                    name
                }
            };
            all.insert(entry.identity.clone(), name);
        }
    }
    all
}

/// Checks that every name of a flag is the name of a cluster.
fn check_names<'n>(
    flag: &str,
    given: impl Iterator<Item = &'n String>,
    names: &BTreeMap<ClusterIdentity, String>,
) -> Result<(), Vec<Problem>> {
    let is_known = |name: &&String| names.values().any(|other| other == *name);
    let problems: Vec<Problem> = given
        .filter(|name| !is_known(name))
        .map(|name| {
            let mut known: Vec<&str> = names.values().map(String::as_str).collect();
            known.sort_unstable();
            known.dedup();
            Problem::usage(format!(
                "{flag} {name}: no mesh of the hub has an entry of that name; there are {}",
                known.join(", ")
            ))
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// The memory budget for the answers of one member, in bytes.
const MEMORY: usize = 64 * 1024 * 1024;

struct Hub<'a> {
    given: &'a GivenArgs,
    client: Client,
    url: String,
    hosts: HubHosts,
}

impl<'a> Hub<'a> {
    async fn open(given: &'a GivenArgs) -> Result<Self, String> {
        let config = clustermesh_access::own(given.kubeconfig.as_deref(), given.context.as_deref())
            .await
            .map_err(|error| {
                format!(
                    "the hub's kubeconfig cannot be used: {}. Name it with --kubeconfig and --context, or give files with \
                     --filename",
                    error_chain(&error)
                )
            })?;
        let (url, hosts) = (config.cluster_url.to_string(), hub_hosts(&config));
        let client = Client::try_from(config)
            .map_err(|error| format!("no client for the hub {url}: {}", error_chain(&error)))?;
        Ok(Self {
            given,
            client,
            url,
            hosts,
        })
    }

    async fn meshes(&self, notes: &mut Vec<String>) -> Result<Vec<Mesh>, String> {
        let hub = |why: String| format!("ClusterMeshes of the hub ({}): {why}", self.url);
        let found = list::list_kind::<ClusterMesh>(&self.client, notes).await.map_err(hub)?;
        let found = found.ok_or_else(|| {
            hub("it has no CRD clustermeshes.kilo.squat.ai: is it the hub? Name its context with --context".to_owned())
        })?;
        let GivenArgs {
            hub_namespaces,
            member_namespaces,
            hub_networks,
            ..
        } = self.given;
        let namespaces = (!hub_namespaces.is_empty())
            .then(|| HubNamespaces::new(hub_namespaces, member_namespaces, hub_networks, ""));
        let mut meshes = Vec::new();
        for object in found {
            let name = list::full_name(&object);
            let (mut mesh, warnings) = match convert::mesh::to_core(&object) {
                Ok(read) => read,
                Err(findings) => {
                    let findings = findings
                        .iter()
                        .map(|finding| format!("ClusterMesh {name}: {finding}; it is left out"));
                    notes.extend(findings.map(|line| format!("warning: {line}")));
                    continue;
                }
            };
            notes.extend(
                warnings
                    .iter()
                    .map(|finding| format!("warning: ClusterMesh {name}: {finding}")),
            );
            if let Some(namespaces) = &namespaces {
                if let Some((_, why)) = namespaces.refuses(&mesh) {
                    notes.push(format!("warning: ClusterMesh {name}: {why}; it is left out"));
                    continue;
                }
                namespaces.confine(&mut mesh);
            }
            meshes.push(mesh);
        }
        meshes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(meshes)
    }

    /// Creates the client for a member: with `context` of the user's kubeconfig if given, else with the Secret.
    async fn client_of(&self, identity: &ClusterIdentity, context: Option<&str>) -> Result<Client, String> {
        if let Some(context) = context {
            let config = clustermesh_access::own(self.given.kubeconfig.as_deref(), Some(context)).await;
            let config =
                config.map_err(|error| format!("context {context:?} of the kubeconfig: {}", error_chain(&error)))?;
            return Client::try_from(config).map_err(|error| format!("context {context:?}: {}", error_chain(&error)));
        }
        let ClusterIdentity::Secret {
            namespace,
            name,
            key,
            context,
        } = identity
        else {
            return Ok(self.client.clone());
        };
        let instead = "or name a context of your own with --member-context";
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let secret = with_timeout(secrets.get_opt(name)).await;
        let secret =
            secret.map_err(|why| format!("Secret {namespace}/{name} of the hub cannot be read: {why}; {instead}"))?;
        let secret = secret.ok_or_else(|| {
            format!("Secret {namespace}/{name} does not exist; create it with the cluster's kubeconfig under key {key:?}, {instead}")
        })?;
        let text = secret.data.and_then(|mut data| data.remove(key)).ok_or_else(|| {
            format!(
                "Secret {namespace}/{name} has no key {key:?}; set kubeconfigSecretRef.key to the key that holds the kubeconfig"
            )
        })?;
        let client =
            clustermesh_access::member(&text.0, context.as_deref(), &self.hosts, &Account::alone(MEMORY)).await;
        client.map_err(|why| format!("Secret {namespace}/{name} key {key:?}: {why}"))
    }
}

/// The UID of kube-system. If the cluster is the hub, it is the hub's default id.
async fn uid(client: &Client) -> Option<String> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    with_timeout(namespaces.get("kube-system")).await.ok()?.metadata.uid
}

/// Formats an error with its causes.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.contains(&message) {
            text.push_str(&format!(": {message}"));
        }
        cause = inner.source();
    }
    text
}
