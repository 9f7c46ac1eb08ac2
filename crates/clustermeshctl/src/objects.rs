//! Which Kubernetes objects stand in documents: lists are opened, kinds told apart, each object read into its type. What
//! they mean together is in [`crate::world`].

use std::{collections::BTreeMap, fmt};

use clustermesh_api::{
    mesh::ClusterMesh,
    peer::Peer,
    policy::PeerPolicy,
    sandbox::{SandboxAccess, SandboxGateway},
};
use clustermesh_core::mesh::ObjectName;
use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod, Service},
    discovery::v1::EndpointSlice,
};
use kube::Resource;
use serde::de::DeserializeOwned;

use crate::{
    document::{self, Document, Tree},
    problem::{Place, Problem},
};

/// One object of a document, not read yet.
#[derive(Debug, Clone)]
pub(crate) struct Item<'a> {
    pub(crate) file: &'a str,
    pub(crate) tree: &'a Tree,
    api_version: String,
    kind: String,
}

impl Item<'_> {
    /// Where a field of it stands.
    pub(crate) fn place(&self, field: &str) -> Place {
        Place {
            file: self.file.to_owned(),
            line: self.tree.line_of(field),
        }
    }

    fn is<T: Resource<DynamicType = ()>>(&self) -> bool {
        self.kind == T::kind(&()) && self.api_version == T::api_version(&())
    }

    /// Reads it; the fields its type does not have come along, each with its line.
    fn read<T: DeserializeOwned>(&self) -> Result<(T, Vec<(String, u64)>), Problem> {
        document::read(self.tree).map_err(|misfit| Problem {
            place: Some(Place {
                file: self.file.to_owned(),
                line: misfit.line,
            }),
            message: format!("{self}: {misfit}"),
        })
    }
}

/// Kind and name, with the namespace where it has one.
impl fmt::Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |key| self.tree.get("metadata").and_then(|metadata| metadata.text(key));
        f.write_str(&self.kind)?;
        match (text("namespace"), text("name")) {
            (Some(namespace), Some(name)) => write!(f, " {namespace}/{name}"),
            (None, Some(name)) => write!(f, " {name}"),
            (_, None) => Ok(()),
        }
    }
}

/// Every object in `documents`, those inside of lists too.
pub(crate) fn items(documents: &[Document]) -> Result<Vec<Item<'_>>, Vec<Problem>> {
    let mut items = Vec::new();
    let mut problems = Vec::new();
    for document in documents {
        open(&document.file, &document.tree, None, &mut items, &mut problems);
    }
    if problems.is_empty() { Ok(items) } else { Err(problems) }
}

/// `inside` = kind and version that a typed list (`NodeList`) gives to items that say none.
fn open<'a>(
    file: &'a str,
    tree: &'a Tree,
    inside: Option<(&str, &str)>,
    items: &mut Vec<Item<'a>>,
    problems: &mut Vec<Problem>,
) {
    let kind = tree.text("kind").or(inside.map(|(_, kind)| kind));
    let api_version = tree.text("apiVersion").or(inside.map(|(version, _)| version));
    let mut refuse = |field: &str, message: &str| {
        problems.push(Problem {
            place: Some(Place {
                file: file.to_owned(),
                line: tree.line_of(field),
            }),
            message: message.to_owned(),
        });
    };
    let (Some(kind), Some(api_version)) = (kind, api_version) else {
        refuse(
            "kind",
            "is no Kubernetes object: it has no text under apiVersion and kind",
        );
        return;
    };
    let listed = kind.strip_suffix("List").zip(tree.get("items"));
    let Some((of, list)) = listed else {
        items.push(Item {
            file,
            tree,
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
        });
        return;
    };
    match &list.value {
        document::Value::List(entries) => {
            let inside = (!of.is_empty()).then_some((api_version, of));
            for entry in entries {
                open(file, entry, inside, items, problems);
            }
        }
        // An empty list, as the API itself writes it.
        document::Value::Null => {}
        _ => refuse("items", &format!("{kind}: items: is not a list")),
    }
}

/// Kinds that are of no use here, and how many of each.
pub(crate) type Ignored = BTreeMap<String, usize>;

/// The ClusterMeshes among `items`, each with its item, in the order given.
pub(crate) fn meshes<'a>(
    items: &[Item<'a>],
    ignored: &mut Ignored,
) -> Result<Vec<(Item<'a>, ClusterMesh)>, Vec<Problem>> {
    let mut meshes = Vec::new();
    let mut problems = Vec::new();
    for item in items {
        if !item.is::<ClusterMesh>() {
            *ignored.entry(item.kind.clone()).or_default() += 1;
            continue;
        }
        match item.read::<ClusterMesh>() {
            Ok((mesh, unknown)) => {
                // The API server would drop it, and kubectl refuses it: a misspelt isolationProfile must not pass for none.
                let spelled = |field: &str| !(["apiVersion", "kind"].contains(&field) || field.starts_with("status"));
                problems.extend(
                    unknown
                        .into_iter()
                        .filter(|(field, _)| spelled(field))
                        .map(|(field, line)| Problem {
                            place: Some(Place {
                                file: item.file.to_owned(),
                                line,
                            }),
                            message: format!("{item}: {field}: a ClusterMesh has no such field"),
                        }),
                );
                meshes.push((item.clone(), mesh));
            }
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok(meshes) } else { Err(problems) }
}

/// What stands in one member, as its API server says it.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) peers: BTreeMap<String, Peer>,
    pub(crate) policies: BTreeMap<String, PeerPolicy>,
    pub(crate) accesses: BTreeMap<String, SandboxAccess>,
    pub(crate) gateways: BTreeMap<ObjectName, SandboxGateway>,
    pub(crate) services: BTreeMap<ObjectName, Service>,
    pub(crate) slices: BTreeMap<ObjectName, EndpointSlice>,
    pub(crate) pods: BTreeMap<ObjectName, Pod>,
    /// UID of the Namespace kube-system, where the Namespaces were given too.
    pub(crate) uid: Option<String>,
    /// Which of our kinds its API server knows; `None` = a dump, which does not say, nor whether a kind was listed at all.
    pub(crate) served: Option<Served>,
}

/// Kinds that a cluster may not have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Served {
    pub(crate) peers: bool,
    pub(crate) policies: bool,
    pub(crate) accesses: bool,
}

impl Objects {
    /// Reads all of one member.
    pub(crate) fn read(items: &[Item<'_>], ignored: &mut Ignored) -> Result<Self, Vec<Problem>> {
        let mut objects = Self::default();
        let mut collector = Collector::default();
        for item in items {
            if item.is::<Node>() {
                collector.keep(item, &mut objects.nodes, |name| name.name);
            } else if item.is::<Peer>() {
                collector.keep(item, &mut objects.peers, |name| name.name);
            } else if item.is::<PeerPolicy>() {
                collector.keep(item, &mut objects.policies, |name| name.name);
            } else if item.is::<SandboxAccess>() {
                collector.keep(item, &mut objects.accesses, |name| name.name);
            } else if item.is::<SandboxGateway>() {
                collector.keep(item, &mut objects.gateways, |name| name);
            } else if item.is::<Service>() {
                collector.keep(item, &mut objects.services, |name| name);
            } else if item.is::<EndpointSlice>() {
                collector.keep(item, &mut objects.slices, |name| name);
            } else if item.is::<Pod>() {
                collector.keep(item, &mut objects.pods, |name| name);
            } else if item.is::<Namespace>() {
                let mut namespaces = BTreeMap::new();
                collector.keep(item, &mut namespaces, |name| name.name);
                let system: Option<Namespace> = namespaces.remove("kube-system");
                objects.uid = system.and_then(|namespace| namespace.metadata.uid).or(objects.uid);
            } else {
                *ignored.entry(item.kind.clone()).or_default() += 1;
            }
        }
        if collector.problems.is_empty() {
            Ok(objects)
        } else {
            Err(collector.problems)
        }
    }
}

#[derive(Default)]
struct Collector {
    places: BTreeMap<(String, ObjectName), Place>,
    problems: Vec<Problem>,
}

impl Collector {
    fn keep<T, K: Ord>(&mut self, item: &Item<'_>, map: &mut BTreeMap<K, T>, key: impl Fn(ObjectName) -> K)
    where
        T: DeserializeOwned + Resource,
    {
        let object = match item.read::<T>() {
            Ok((object, _)) => object,
            Err(problem) => {
                self.problems.push(problem);
                return;
            }
        };
        let metadata = object.meta();
        let Some(name) = metadata.name.clone().filter(|name| !name.is_empty()) else {
            self.problems.push(Problem {
                place: Some(item.place("metadata")),
                message: format!("{item}: metadata.name: is missing"),
            });
            return;
        };
        let namespace = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let name = ObjectName { namespace, name };
        let place = item.place("");
        if let Some(first) = self.places.insert((item.kind.clone(), name.clone()), place.clone()) {
            self.problems.push(Problem {
                place: Some(place),
                message: format!("{item}: stands twice in what was given for this cluster, first at {first}"),
            });
        }
        map.insert(key(name), object);
    }
}
