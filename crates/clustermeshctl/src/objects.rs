//! Reads the Kubernetes objects in documents: unpacks lists, groups objects by kind, and deserializes each into its type.
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
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    document::{self, Document, Tree},
    problem::{FilePosition, Problem},
};

/// One object of a document, before it is deserialized.
#[derive(Debug, Clone)]
pub(crate) struct Item<'a> {
    document: &'a Document,
    tree: &'a Tree,
    api_version: String,
    kind: String,
    metadata: HeaderMetadata,
}

/// The common fields of all objects. The items of a typed list, such as `NodeList`, may have no apiVersion and kind.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: Option<HeaderMetadata>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct HeaderMetadata {
    namespace: Option<String>,
    name: Option<String>,
}

impl Item<'_> {
    /// The position of one of its fields; `""` = of the object.
    pub(crate) fn position(&self, field: &str) -> FilePosition {
        self.document.position(self.tree.line_of(field))
    }

    fn is_kind<T: Resource<DynamicType = ()>>(&self) -> bool {
        self.kind == T::kind(&()) && self.api_version == T::api_version(&())
    }

    /// Deserializes the object. Also returns the fields that `T` does not have, each with its line.
    fn read<T: DeserializeOwned>(&self) -> Result<(T, Vec<(String, u64)>), Problem> {
        document::read(self.tree).map_err(|error| Problem {
            position: Some(self.document.position(error.line)),
            message: format!("{self}: {error}: {}", self.remedy(&error.field)),
        })
    }

    /// Returns the remedy for an error in a field.
    fn remedy(&self, field: &str) -> String {
        let mut path = self.kind.to_lowercase();
        // `kubectl explain` accepts no list indices and no keys of labels or annotations.
        for part in field
            .split('.')
            .take_while(|part| !["labels", "annotations"].contains(part))
        {
            path.push('.');
            path.push_str(part.split('[').next().unwrap_or(part));
        }
        let path = path.trim_end_matches('.');
        format!("correct it, or save the object again; `kubectl explain {path}` describes the field")
    }
}

/// Kind, namespace (if any) and name.
impl fmt::Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind)?;
        match (&self.metadata.namespace, &self.metadata.name) {
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
        unpack(document, &document.tree, None, &mut items, &mut problems);
    }
    if problems.is_empty() { Ok(items) } else { Err(problems) }
}

/// Adds the object in `tree`, or all objects if it is a list. `list_type` = apiVersion and kind of the items of a typed list.
fn unpack<'a>(
    document: &'a Document,
    tree: &'a Tree,
    list_type: Option<(&str, &str)>,
    items: &mut Vec<Item<'a>>,
    problems: &mut Vec<Problem>,
) {
    let mut report = |line: u64, message: String| {
        problems.push(Problem {
            position: Some(document.position(line)),
            message,
        });
    };
    let header: Header = match document::read_keys(tree, &["apiVersion", "kind", "metadata"]) {
        Ok(header) => header,
        Err(error) => {
            report(error.line, format!("is not a Kubernetes object: {error}: {SAVE_AGAIN}"));
            return;
        }
    };
    let kind = header.kind.as_deref().or(list_type.map(|(_, kind)| kind));
    let api_version = header.api_version.as_deref().or(list_type.map(|(version, _)| version));
    let (Some(kind), Some(api_version)) = (kind, api_version) else {
        report(
            tree.line_of("kind"),
            format!("is not a Kubernetes object: apiVersion or kind is missing: {SAVE_AGAIN}"),
        );
        return;
    };
    let Some(item_kind) = kind.strip_suffix("List").filter(|_| tree.has_key("items")) else {
        items.push(Item {
            document,
            tree,
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
            metadata: header.metadata.unwrap_or_default(),
        });
        return;
    };
    let Some(entries) = tree.list("items") else {
        report(
            tree.line_of("items"),
            format!("{kind}: items: is not a list: {SAVE_AGAIN}"),
        );
        return;
    };
    let list_type = (!item_kind.is_empty()).then_some((api_version, item_kind));
    for entry in entries {
        unpack(document, entry, list_type, items, problems);
    }
}

/// The remedy for a document that does not have the form of kubectl's output.
const SAVE_AGAIN: &str = "save the objects with `kubectl get KIND -A -o yaml`";

/// The number of ignored objects, by kind.
pub(crate) type Ignored = BTreeMap<String, usize>;

/// Reads the ClusterMeshes among `items`. Returns each with its item, in the same order. Other objects are ignored.
pub(crate) fn read_meshes<'a>(
    items: &[Item<'a>],
    ignored: &mut Ignored,
) -> Result<Vec<(Item<'a>, ClusterMesh)>, Vec<Problem>> {
    let mut meshes = Vec::new();
    let mut problems = Vec::new();
    for item in items {
        if !item.is_kind::<ClusterMesh>() {
            *ignored.entry(item.kind.clone()).or_default() += 1;
            continue;
        }
        match item.read::<ClusterMesh>() {
            Ok((mesh, unknown)) => {
                // An unknown field is an error, as in kubectl. Otherwise a misspelt isolationProfile would mean the default profile.
                // Exceptions: fields of `status`, and apiVersion and kind, which the Rust type does not have.
                let is_relevant =
                    |field: &str| !(["apiVersion", "kind"].contains(&field) || field.starts_with("status"));
                problems.extend(
                    unknown
                        .into_iter()
                        .filter(|(field, _)| is_relevant(field))
                        .map(|(field, line)| Problem {
                            position: Some(item.document.position(line)),
                            message: format!(
                                "{item}: {field}: a ClusterMesh has no such field: remove it or correct its name; `kubectl explain \
                                 clustermesh.spec --recursive` lists the fields"
                            ),
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
#[derive(Clone, Debug, Default)]
pub(crate) struct Objects {
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) peers: BTreeMap<String, Peer>,
    pub(crate) policies: BTreeMap<String, PeerPolicy>,
    pub(crate) accesses: BTreeMap<String, SandboxAccess>,
    pub(crate) gateways: BTreeMap<ObjectName, SandboxGateway>,
    pub(crate) services: BTreeMap<ObjectName, Service>,
    pub(crate) slices: BTreeMap<ObjectName, EndpointSlice>,
    pub(crate) pods: BTreeMap<ObjectName, Pod>,
    /// UID of the Namespace kube-system, if that Namespace was read.
    pub(crate) uid: Option<String>,
    /// The CRDs that are installed. `None` = not known, because the objects come from files.
    pub(crate) crds: Option<InstalledCrds>,
}

/// Which CRDs are installed.
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
            if item.is_kind::<Node>() {
                collector.add(item, &mut objects.nodes, |name| name.name);
            } else if item.is_kind::<Peer>() {
                collector.add(item, &mut objects.peers, |name| name.name);
            } else if item.is_kind::<PeerPolicy>() {
                collector.add(item, &mut objects.policies, |name| name.name);
            } else if item.is_kind::<SandboxAccess>() {
                collector.add(item, &mut objects.accesses, |name| name.name);
            } else if item.is_kind::<SandboxGateway>() {
                collector.add(item, &mut objects.gateways, |name| name);
            } else if item.is_kind::<Service>() {
                collector.add(item, &mut objects.services, |name| name);
            } else if item.is_kind::<EndpointSlice>() {
                collector.add(item, &mut objects.slices, |name| name);
            } else if item.is_kind::<Pod>() {
                collector.add(item, &mut objects.pods, |name| name);
            } else if item.is_kind::<Namespace>() {
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
                message: format!("{item}: metadata.name: is missing: {SAVE_AGAIN}"),
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
