//! Parses every YAML or JSON block in the documents: objects and parts of a ClusterMesh with the API types, container arguments with
//! the controller's argument parser.

use clap::CommandFactory;
use clustermesh_api::{
    convert,
    mesh::{ClusterEntry, ClusterMesh},
    policy::PeerPolicy,
    sandbox::SandboxGateway,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::pages;

/// Keys by which machine configurations of Talos and Flatcar are recognized. Such blocks only have to be valid YAML.
const MACHINE_CONFIGURATION_KEYS: &[&str] = &["machine", "variant"];

/// Deserializes a value. An unknown field is an error, except `apiVersion` and `kind`, which the types do not have.
fn read<T: DeserializeOwned>(value: &Value) -> Result<T, String> {
    let mut unknown = Vec::new();
    let read =
        serde_ignored::deserialize(value, |path| unknown.push(path.to_string())).map_err(|error| error.to_string())?;
    unknown.retain(|field| !["apiVersion", "kind"].contains(&&**field));
    match unknown.as_slice() {
        [] => Ok(read),
        _ => Err(format!("no such fields: {}", unknown.join(", "))),
    }
}

/// The arguments of a container.
#[derive(Deserialize)]
struct Container {
    args: Vec<String>,
}

/// Checks a YAML document. A part of a ClusterMesh is checked within `mesh`, the ClusterMesh of README.md.
fn check_document(value: &Value, mesh: &ClusterMesh) -> Result<(), String> {
    let text = |key| value.get(key).and_then(Value::as_str);
    match (text("apiVersion"), text("kind")) {
        (Some("kilo.squat.ai/v1alpha1"), Some("ClusterMesh")) => check_mesh(&read(value)?),
        (Some("kilo.squat.ai/v1alpha1"), Some("SandboxGateway")) => read::<SandboxGateway>(value).map(drop),
        (Some("kilo.squat.ai/v1alpha1"), Some("PeerPolicy")) => read::<PeerPolicy>(value).map(drop),
        (Some("v1"), Some("Service")) => read::<k8s_openapi::api::core::v1::Service>(value).map(drop),
        (Some(version), Some(kind)) => Err(format!(
            "{kind} of {version} is not known to this test: add its type here"
        )),
        _ if value.is_array() => check_entries(read(value)?, mesh.clone()),
        _ if value.get("args").is_some() => check_arguments(&read(value)?),
        _ if MACHINE_CONFIGURATION_KEYS.iter().any(|key| value.get(key).is_some()) => Ok(()),
        _ => Err("the type is not known to this test: add it here".to_owned()),
    }
}

fn check_mesh(mesh: &ClusterMesh) -> Result<(), String> {
    let mut mesh = mesh.clone();
    mesh.metadata.namespace.get_or_insert_with(|| "clustermesh".to_owned());
    let findings = match convert::mesh::to_core(&mesh) {
        Ok((_, findings)) | Err(findings) => findings,
    };
    let findings: Vec<String> = findings.iter().map(ToString::to_string).collect();
    if findings.is_empty() {
        Ok(())
    } else {
        Err(findings.join("; "))
    }
}

/// Checks a mesh in which `entries` replace the entries of the same names.
fn check_entries(entries: Vec<ClusterEntry>, mut mesh: ClusterMesh) -> Result<(), String> {
    mesh.spec
        .clusters
        .retain(|old| entries.iter().all(|entry| entry.name != old.name));
    mesh.spec.clusters.extend(entries);
    check_mesh(&mesh)
}

fn check_arguments(container: &Container) -> Result<(), String> {
    let line = std::iter::once("clustermesh-controller").chain(container.args.iter().map(String::as_str));
    let program = clustermesh_controller::args::Args::command();
    program
        .try_get_matches_from(line)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// The YAML documents in all `yaml` and `json` blocks, each with the position of its block.
fn documents() -> Vec<(String, Value)> {
    let blocks = pages().into_iter().flat_map(|page| page.blocks);
    let yaml = blocks.filter(|block| ["yaml", "json"].contains(&&*block.language));
    let documents = yaml.flat_map(|block| {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&block.text).unwrap_or_else(|error| panic!("{}: {error}", block.position));
        documents
            .into_iter()
            .map(move |document| (block.position.clone(), document))
    });
    documents.collect()
}

fn readme_mesh(documents: &[(String, Value)]) -> ClusterMesh {
    let mut meshes = documents
        .iter()
        .filter(|(position, value)| position.starts_with("README.md") && value["kind"] == "ClusterMesh");
    read(&meshes.next().unwrap().1).unwrap()
}

#[test]
fn manifests_in_the_documents_fit_the_types() {
    let documents = documents();
    let mesh = readme_mesh(&documents);
    let mut faults = String::new();
    for (position, value) in &documents {
        if let Err(fault) = check_document(value, &mesh) {
            faults += &format!("\n{position}: {fault}");
        }
    }
    assert!(documents.len() >= 10, "only {} documents were found", documents.len());
    assert!(faults.is_empty(), "invalid YAML in the documents:{faults}");
}

#[test]
fn wrong_manifests_are_reported() {
    let mesh = readme_mesh(&documents());
    let fault = |yaml: &str| check_document(&serde_saphyr::from_str(yaml).unwrap(), &mesh).unwrap_err();
    // The closing brace is added below.
    let open_entry = "- {name: x, kubeconfigSecretRef: {name: x}, allowedNetworks: [10.9.0.0/16]";
    assert_eq!(
        fault(&format!("{open_entry}, allowedNetwork: []}}")),
        "no such fields: 0.allowedNetwork"
    );
    assert!(fault(&format!("{}}}", open_entry.replace("/16", "/33"))).contains("spec.clusters[2].allowedNetworks[0]"));
    assert_eq!(
        fault(
            "{apiVersion: kilo.squat.ai/v1alpha1, kind: SandboxGateway, metadata: {name: g}, spec: {nodeport: 31820}}"
        ),
        "no such fields: spec.nodeport"
    );
    assert!(fault("args: [--hub-name=x]").contains("unexpected argument '--hub-name'"));
    assert!(fault("{apiVersion: v1, kind: Pod}").contains("add its type here"));
}
