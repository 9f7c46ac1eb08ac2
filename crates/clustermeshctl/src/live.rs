//! What stands in running clusters, read once: the ClusterMeshes of the hub, and of every member that they name what `plan`
//! reads from files. Nothing is written and nothing decided here.

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
    objects::Objects,
    problem::Problem,
    world::{Source, Sources},
};

mod list;

pub(crate) use list::within;

/// For one request of a page of a list; a member that takes longer is not waited for.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was read.
pub(crate) struct Live {
    /// In the order of their names.
    pub(crate) meshes: Vec<Mesh>,
    /// What each cluster is called here, and what stands in it.
    pub(crate) sources: Sources,
    /// By which credentials each member that could be reached was.
    pub(crate) clients: BTreeMap<ClusterIdentity, Client>,
    /// For stderr.
    pub(crate) notes: Vec<String>,
}

impl Live {
    /// Reads the hub, then all members at once. A member that cannot be read is one that was not seen, with its reason.
    ///
    /// # Errors
    /// The hub cannot be read, or the command line names what is not there.
    pub(crate) async fn read(given: &GivenArgs, files: BTreeMap<String, Objects>) -> Result<Self, Vec<Problem>> {
        let hub = Hub::open(given).await.map_err(|why| vec![Problem::usage(why)])?;
        let mut notes = Vec::new();
        let meshes = hub.meshes(&mut notes).await.map_err(|why| vec![Problem::usage(why)])?;
        if meshes.is_empty() {
            // Why each of them was left out is the remedy.
            let why = format!("the hub ({}) has no ClusterMesh that can be read", hub.url);
            return Err(notes.into_iter().chain([why]).map(Problem::usage).collect());
        }
        let called = called(&meshes);
        unknown("--cluster", files.keys(), &called)?;
        unknown("--member-context", given.members.iter().map(|(name, _)| name), &called)?;
        let mut files = files;
        let reads = called.iter().map(|(identity, name)| {
            let file = files.remove(name);
            let hub = &hub;
            async move {
                let context = given.members.iter().find(|(member, _)| member == name);
                let client = hub.client_of(identity, context.map(|(_, context)| &**context)).await;
                let (source, client, notes) = match (file, client) {
                    // Files say what stands there; a client, if there is one, may still serve to probe.
                    (Some(objects), client) => (Source::Seen(Box::new(objects)), client.ok(), Vec::new()),
                    (None, Err(why)) => (Source::Unseen(why), None, Vec::new()),
                    (None, Ok(client)) => match list::all(&client).await {
                        Ok((objects, notes)) => (Source::Seen(Box::new(objects)), Some(client), notes),
                        Err(why) => (Source::Unseen(why), None, Vec::new()),
                    },
                };
                (identity.clone(), name.clone(), source, client, notes)
            }
        });
        let mut sources = Sources::default();
        let mut clients = BTreeMap::new();
        for (identity, name, source, client, of_member) in futures::future::join_all(reads).await {
            if let Source::Unseen(why) = &source {
                notes.push(format!("warning: cluster {name:?} ({identity}) is not seen: {why}"));
            }
            notes.extend(
                of_member
                    .into_iter()
                    .map(|note| format!("warning: cluster {name:?}: {note}")),
            );
            clients.extend(client.map(|client| (identity.clone(), client)));
            sources.names.insert(identity, name.clone());
            sources.given.insert(name, source);
        }
        Ok(Self {
            meshes,
            sources,
            clients,
            notes,
        })
    }
}

/// One name for each cluster: that of its entries, with the mesh where two clusters have one name.
fn called(meshes: &[Mesh]) -> BTreeMap<ClusterIdentity, String> {
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

fn unknown<'n>(
    flag: &str,
    names: impl Iterator<Item = &'n String>,
    called: &BTreeMap<ClusterIdentity, String>,
) -> Result<(), Vec<Problem>> {
    let known = |name: &&String| called.values().any(|other| other == *name);
    let problems: Vec<Problem> = names
        .filter(|name| !known(name))
        .map(|name| {
            let mut there: Vec<&str> = called.values().map(String::as_str).collect();
            there.sort_unstable();
            there.dedup();
            Problem::usage(format!(
                "{flag} {name}: no mesh of the hub has an entry of that name; there are {}",
                there.join(", ")
            ))
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Memory that a member's answers may use while they are read.
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
                    chain(&error)
                )
            })?;
        let (url, hosts) = (config.cluster_url.to_string(), hub_hosts(&config));
        let client =
            Client::try_from(config).map_err(|error| format!("no client for the hub {url}: {}", chain(&error)))?;
        Ok(Self {
            given,
            client,
            url,
            hosts,
        })
    }

    async fn meshes(&self, notes: &mut Vec<String>) -> Result<Vec<Mesh>, String> {
        let hub = |why: String| format!("ClusterMeshes of the hub ({}): {why}", self.url);
        let found = list::kind::<ClusterMesh>(&self.client, notes).await.map_err(hub)?;
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
            let name = list::name(&object);
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

    /// `context` = the person's own for this member, in place of the Secret.
    async fn client_of(&self, identity: &ClusterIdentity, context: Option<&str>) -> Result<Client, String> {
        if let Some(context) = context {
            let config = clustermesh_access::own(self.given.kubeconfig.as_deref(), Some(context)).await;
            let config = config.map_err(|error| format!("context {context:?} of the kubeconfig: {}", chain(&error)))?;
            return Client::try_from(config).map_err(|error| format!("context {context:?}: {}", chain(&error)));
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
        let secret = within(secrets.get_opt(name)).await;
        let secret =
            secret.map_err(|why| format!("Secret {namespace}/{name} of the hub cannot be read: {why}; {instead}"))?;
        let secret = secret.ok_or_else(|| {
            format!("Secret {namespace}/{name} is not there; create it with the cluster's kubeconfig under key {key:?}, {instead}")
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

/// The UID of kube-system, by which objects of a hub are known.
async fn uid(client: &Client) -> Option<String> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    within(namespaces.get("kube-system")).await.ok()?.metadata.uid
}

/// An error with what caused it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.contains(&words) {
            text.push_str(&format!(": {words}"));
        }
        cause = inner.source();
    }
    text
}
