//! Reads the Kubernetes objects in documents: unpacks lists, sorts objects by kind, and deserializes each into its type.
//! [`crate::inputs`] makes the planner's input from them.

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
    problem::{FilePosition, Problem},
};

/// One object of a document, not deserialized yet.
#[derive(Debug, Clone)]
pub(crate) struct Item<'a> {
    pub(crate) file: &'a str,
    pub(crate) tree: &'a Tree,
    api_version: String,
    kind: String,
}

impl Item<'_> {
    /// The position of one of its fields.
    pub(crate) fn position(&self, field: &str) -> FilePosition {
        FilePosition {
            file: self.file.to_owned(),
            line: self.tree.line_of(field),
        }
    }

    fn is<T: Resource<DynamicType = ()>>(&self) -> bool {
        self.kind == T::kind(&()) && self.api_version == T::api_version(&())
    }

    /// Deserializes it. Also returns the fields that its type does not have, each with its line.
    fn read<T: DeserializeOwned>(&self) -> Result<(T, Vec<(String, u64)>), Problem> {
        document::read(self.tree).map_err(|error| Problem {
            position: Some(FilePosition {
                file: self.file.to_owned(),
                line: error.line,
            }),
            message: format!("{self}: {error}"),
        })
    }
}

/// Kind, namespace (if any) and name.
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

/// Returns every object in `documents`, including those inside lists.
pub(crate) fn items(documents: &[Document]) -> Result<Vec<Item<'_>>, Vec<Problem>> {
    let mut items = Vec::new();
    let mut problems = Vec::new();
    for document in documents {
        unpack(&document.file, &document.tree, None, &mut items, &mut problems);
    }
    if problems.is_empty() { Ok(items) } else { Err(problems) }
}

/// Adds the object of a tree, or the objects of a list. `list_type` is the apiVersion and kind of the items of a typed list, such
/// as `NodeList`. Its items may lack them.
fn unpack<'a>(
    file: &'a str,
    tree: &'a Tree,
    list_type: Option<(&str, &str)>,
    items: &mut Vec<Item<'a>>,
    problems: &mut Vec<Problem>,
) {
    let kind = tree.text("kind").or(list_type.map(|(_, kind)| kind));
    let api_version = tree.text("apiVersion").or(list_type.map(|(version, _)| version));
    let mut refuse = |field: &str, message: &str| {
        problems.push(Problem {
            position: Some(FilePosition {
                file: file.to_owned(),
                line: tree.line_of(field),
            }),
            message: message.to_owned(),
        });
    };
    let (Some(kind), Some(api_version)) = (kind, api_version) else {
        refuse("kind", "is not a Kubernetes object: apiVersion or kind is missing");
        return;
    };
    let listed = kind.strip_suffix("List").zip(tree.get("items"));
    let Some((item_kind, list)) = listed else {
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
            let list_type = (!item_kind.is_empty()).then_some((api_version, item_kind));
            for entry in entries {
                unpack(file, entry, list_type, items, problems);
            }
        }
        // The API server writes an empty list in this form.
        document::Value::Null => {}
        _ => refuse("items", &format!("{kind}: items: is not a list")),
    }
}

/// Kinds that no command needs, with the number of their objects.
pub(crate) type Ignored = BTreeMap<String, usize>;

/// Reads the ClusterMeshes among `items`. Returns each with its item, in the same order.
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
                // An unknown field is an error, as it is with kubectl. Otherwise a misspelt isolationProfile would mean the default.
                let is_relevant =
                    |field: &str| !(["apiVersion", "kind"].contains(&field) || field.starts_with("status"));
                problems.extend(
                    unknown
                        .into_iter()
                        .filter(|(field, _)| is_relevant(field))
                        .map(|(field, line)| Problem {
                            position: Some(FilePosition {
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

/// The objects of one member, as its API server returned them.
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
    /// UID of the Namespace kube-system, if that was read.
    pub(crate) uid: Option<String>,
    /// The CRDs that are installed. `None` = the objects come from files, which do not show this, nor which kinds were listed.
    pub(crate) crds: Option<InstalledCrds>,
}

/// Which of the CRDs that a cluster may lack are installed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InstalledCrds {
    pub(crate) peers: bool,
    pub(crate) policies: bool,
    pub(crate) accesses: bool,
}

impl Objects {
    /// Reads the objects of one member.
    pub(crate) fn read(items: &[Item<'_>], ignored: &mut Ignored) -> Result<Self, Vec<Problem>> {
        let mut objects = Self::default();
        let mut collector = Collector::default();
        for item in items {
            if item.is::<Node>() {
                collector.add(item, &mut objects.nodes, |name| name.name);
            } else if item.is::<Peer>() {
                collector.add(item, &mut objects.peers, |name| name.name);
            } else if item.is::<PeerPolicy>() {
                collector.add(item, &mut objects.policies, |name| name.name);
            } else if item.is::<SandboxAccess>() {
                collector.add(item, &mut objects.accesses, |name| name.name);
            } else if item.is::<SandboxGateway>() {
                collector.add(item, &mut objects.gateways, |name| name);
            } else if item.is::<Service>() {
                collector.add(item, &mut objects.services, |name| name);
            } else if item.is::<EndpointSlice>() {
                collector.add(item, &mut objects.slices, |name| name);
            } else if item.is::<Pod>() {
                collector.add(item, &mut objects.pods, |name| name);
            } else if item.is::<Namespace>() {
                let mut namespaces = BTreeMap::new();
                collector.add(item, &mut namespaces, |name| name.name);
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

/// Deserializes objects and detects duplicates.
#[derive(Default)]
struct Collector {
    positions: BTreeMap<(String, ObjectName), FilePosition>,
    problems: Vec<Problem>,
}

impl Collector {
    fn add<T, K: Ord>(&mut self, item: &Item<'_>, map: &mut BTreeMap<K, T>, key: impl Fn(ObjectName) -> K)
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
                position: Some(item.position("metadata")),
                message: format!("{item}: metadata.name: is missing"),
            });
            return;
        };
        let namespace = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let name = ObjectName { namespace, name };
        let position = item.position("");
        let key_of_object = (item.kind.clone(), name.clone());
        if let Some(first) = self.positions.insert(key_of_object, position.clone()) {
            self.problems.push(Problem {
                position: Some(position),
                message: format!("{item}: is given twice for this cluster, first at {first}"),
            });
        }
        map.insert(key(name), object);
    }
}
