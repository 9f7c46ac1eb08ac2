//! Reads running clusters once: the ClusterMeshes of the hub, and the objects of every member that they name.

use std::{collections::BTreeMap, path::Path, time::Duration};

use clustermesh_access::{hub_hosts, kubeconfig::HubHosts, memory::Account};
use clustermesh_api::{convert, mesh::ClusterMesh};
use clustermesh_core::{
    hub::HubNamespaces,
    mesh::{ClusterIdentity, Mesh},
};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{Api, Client, Config};

use crate::{
    args::InputArgs,
    inputs::{ReadResult, ReadResults},
    objects::Objects,
    problem::Problem,
};

mod list;

pub(crate) use list::{list_kind_in, with_timeout};

/// Timeout of one request, such as one page of a list.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The clusters that were read.
pub(crate) struct LiveClusters {
    /// Sorted by namespace and name.
    pub(crate) meshes: Vec<Mesh>,
    pub(crate) results: ReadResults,
    /// The clients of the members. A member has no client if it cannot be read, or if it is read from files and has no usable
    /// kubeconfig.
    pub(crate) clients: BTreeMap<ClusterIdentity, Client>,
    /// Lines to print to stderr.
    pub(crate) notes: Vec<String>,
}

impl LiveClusters {
    /// Reads the hub, then all members that are not in `files`, at the same time. A member that cannot be read becomes
    /// [`ReadResult::Unreadable`].
    ///
    /// # Errors
    /// The hub cannot be read, or has no readable ClusterMesh, or the command line names a cluster that no mesh has.
    pub(crate) async fn read(args: &InputArgs, files: BTreeMap<String, Objects>) -> Result<Self, Vec<Problem>> {
        let hub = Hub::open(args).await.map_err(|why| vec![Problem::other(why)])?;
        let mut notes = Vec::new();
        let meshes = hub.meshes(&mut notes).await.map_err(|why| vec![Problem::other(why)])?;
        if meshes.is_empty() {
            // The notes explain why each ClusterMesh was left out.
            let why = format!("the hub ({}) has no ClusterMesh that can be read", hub.url);
            return Err(notes.into_iter().chain([why]).map(Problem::other).collect());
        }
        let names = cluster_names(&meshes);
        check_names("--cluster", files.keys(), &names)?;
        check_names("--member-context", args.members.iter().map(|(name, _)| name), &names)?;
        let reads = names.iter().map(|(identity, name)| {
            // Cloned, because two identities can share one name: identities that differ only in the Secret's key are one cluster.
            let file = files.get(name).cloned();
            let hub = &hub;
            async move {
                let context = args.members.iter().find(|(member, _)| member == name);
                let client = hub.client_of(identity, context.map(|(_, context)| &**context)).await;
                let (result, client, notes) = match (file, client) {
                    // The objects come from files. `verify` may still need the client.
                    (Some(objects), client) => (ReadResult::Read(Box::new(objects)), client.ok(), Vec::new()),
                    (None, Err(why)) => (ReadResult::Unreadable(why), None, Vec::new()),
                    (None, Ok(client)) => match list::read_cluster(&client).await {
                        Ok((objects, notes)) => (ReadResult::Read(Box::new(objects)), Some(client), notes),
                        Err(why) => (ReadResult::Unreadable(why), None, Vec::new()),
                    },
                };
                (identity.clone(), name.clone(), result, client, notes)
            }
        });
        let mut results = ReadResults::default();
        let mut clients = BTreeMap::new();
        for (identity, name, result, client, member_notes) in futures::future::join_all(reads).await {
            if let ReadResult::Unreadable(why) = &result {
                notes.push(format!("warning: cluster {name:?} ({identity}) cannot be read: {why}"));
            }
            notes.extend(
                member_notes
                    .into_iter()
                    .map(|note| format!("warning: cluster {name:?}: {note}")),
            );
            clients.extend(client.map(|client| (identity.clone(), client)));
            results.names.insert(identity, name.clone());
            results.clusters.insert(name, result);
        }
        Ok(Self {
            meshes,
            results,
            clients,
            notes,
        })
    }
}

/// Chooses one name for each cluster: the name of its first entry. If an earlier cluster has the same name, the name of the mesh is
/// prepended: `NAMESPACE/MESH/ENTRY`.
pub(crate) fn cluster_names(meshes: &[Mesh]) -> BTreeMap<ClusterIdentity, String> {
    let mut named: Vec<(&ClusterIdentity, String)> = Vec::new();
    let mut names = BTreeMap::new();
    for mesh in meshes {
        for entry in &mesh.clusters {
            let known = named.iter().find(|(other, _)| other.same_cluster(&entry.identity));
            let name = match known {
                Some((_, name)) => name.clone(),
                None => {
                    let is_taken = named.iter().any(|(_, name)| *name == entry.name);
                    let name = match is_taken {
                        true => format!("{}/{}", mesh.id, entry.name),
                        false => entry.name.clone(),
                    };
                    named.push((&entry.identity, name.clone()));
                    name
                }
            };
            names.insert(entry.identity.clone(), name);
        }
    }
    names
}

/// Checks that every name in the values of a flag is the name of a cluster.
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
            Problem::other(format!(
                "{flag} {name}: no mesh of the hub has an entry of that name; there are {}",
                known.join(", ")
            ))
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// The memory budget, in bytes, for the responses of one member with a kubeconfig from a Secret. Another party may control such a member.
const MEMORY_BUDGET: usize = 64 * 1024 * 1024;

/// Makes the client of the hub from the user's kubeconfig.
pub(crate) async fn open_hub(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<(Client, Config), String> {
    let config = clustermesh_access::read_own_config(kubeconfig, context).await;
    let config = config.map_err(|error| {
        format!(
            "the hub's kubeconfig cannot be used: {}. Name it with --kubeconfig and --context",
            error_chain(&error)
        )
    })?;
    let client = Client::try_from(config.clone());
    let client =
        client.map_err(|error| format!("no client for the hub {}: {}", config.cluster_url, error_chain(&error)))?;
    Ok((client, config))
}

struct Hub<'a> {
    args: &'a InputArgs,
    client: Client,
    url: String,
    hosts: HubHosts,
}

impl<'a> Hub<'a> {
    async fn open(args: &'a InputArgs) -> Result<Self, String> {
        let opened = open_hub(args.kubeconfig.as_deref(), args.context.as_deref()).await;
        let (client, config) = opened.map_err(|why| format!("{why}, or give files with --filename"))?;
        Ok(Self {
            args,
            client,
            url: config.cluster_url.to_string(),
            hosts: hub_hosts(&config),
        })
    }

    /// Lists the ClusterMeshes. Adds a note for each that is left out.
    async fn meshes(&self, notes: &mut Vec<String>) -> Result<Vec<Mesh>, String> {
        let hub_error = |why: String| format!("ClusterMeshes of the hub ({}): {why}", self.url);
        let found = list::list_kind::<ClusterMesh>(&self.client, notes)
            .await
            .map_err(hub_error)?;
        let found = found.ok_or_else(|| {
            hub_error(
                "it has no CRD clustermeshes.kilo.squat.ai: is it the hub? Name the hub's context with --context"
                    .to_owned(),
            )
        })?;
        let InputArgs {
            hub_namespaces,
            member_namespaces,
            hub_networks,
            ..
        } = self.args;
        // Without `--hub-namespace`, the rights depend on the controller's own namespace, which is not known here, so no mesh is checked.
        // With the flag, that namespace (the last parameter) has no effect.
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
                if let Some((_, why)) = namespaces.find_refusal(&mesh) {
                    notes.push(format!("warning: ClusterMesh {name}: {why}; it is left out"));
                    continue;
                }
                namespaces.reduce_to_allowed(&mut mesh);
            }
            meshes.push(mesh);
        }
        meshes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(meshes)
    }

    /// Creates the client of a member: from `context` of the user's kubeconfig if given, else from the Secret. The hub's own entry
    /// has no Secret and gets the client of the hub.
    async fn client_of(&self, identity: &ClusterIdentity, context: Option<&str>) -> Result<Client, String> {
        if let Some(context) = context {
            let config = clustermesh_access::read_own_config(self.args.kubeconfig.as_deref(), Some(context)).await;
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
        let alternative = "name a context of your own with --member-context";
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let secret = with_timeout(secrets.get_opt(name)).await;
        let secret = secret.map_err(|why| {
            format!("Secret {namespace}/{name} of the hub cannot be read: {why}. Instead, you can {alternative}")
        })?;
        let secret = secret.ok_or_else(|| {
            format!("Secret {namespace}/{name} does not exist; create it with the cluster's kubeconfig under key {key:?}, or {alternative}")
        })?;
        let text = secret.data.and_then(|mut data| data.remove(key)).ok_or_else(|| {
            format!(
                "Secret {namespace}/{name} has no key {key:?}; set kubeconfigSecretRef.key to the key that holds the kubeconfig"
            )
        })?;
        let account = Account::standalone(MEMORY_BUDGET);
        let client = clustermesh_access::build_member_client(&text.0, context.as_deref(), &self.hosts, &account).await;
        let client = client.map(|member| member.client);
        client.map_err(|why| format!("Secret {namespace}/{name} key {key:?}: {why}"))
    }
}

/// Returns the UID of the Namespace kube-system, which identifies the cluster.
async fn kube_system_uid(client: &Client) -> Option<String> {
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
