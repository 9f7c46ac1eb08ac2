//! `clustermeshctl plan`: reads the input, runs the planner and prints the result, as a [`table`] or as a [`report`] in JSON or
//! YAML. `explain` and `verify` also use [`PlanResult`].

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use clustermesh_api::convert;
use clustermesh_core::{
    diff::{self, Action, Item, Step},
    mesh::{ClusterIdentity, Mesh, MeshId},
    plan::{self, Fact, MeshPlan, Plan, Settings},
};

use kube::Client;

use crate::{
    args::{InputArgs, Output, PlanArgs},
    document::{Document, DocumentReader},
    explanation::Explainer,
    inputs::{self, Inputs, ReadCluster, ReadResults},
    live::LiveClusters,
    objects::{self, Ignored, Objects},
    problem::{FilePosition, Problem},
};

mod report;
mod table;

pub(crate) use table::describe_peer;

/// Runs the command. Notes and warnings go to `stderr`. Returns the exit code: 2 if `--exit-code` is given and the plan has changes,
/// else 0.
///
/// # Errors
/// All errors in the input.
pub(crate) async fn run(
    args: &PlanArgs,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    let PlanArgs {
        input,
        output,
        exit_code,
    } = args;
    let outcome = PlanResult::read(input, stdin, stderr).await?;
    let text = match output {
        Output::Table => table::render(&outcome),
        Output::Json => serde_json::to_string_pretty(&report::Report::from(&outcome))
            .map(|json| json + "\n")
            .map_err(|error| vec![Problem::other(format!("the plan cannot be written as JSON: {error}"))])?,
        Output::Yaml => serde_saphyr::to_string(&report::Report::from(&outcome))
            .map_err(|error| vec![Problem::other(format!("the plan cannot be written as YAML: {error}"))])?,
    };
    print(stdout, &text)?;
    let has_changes = outcome.steps.values().any(|steps| !steps.is_empty());
    Ok(if *exit_code && has_changes { 2 } else { 0 })
}

pub(crate) fn print(stdout: &mut dyn Write, text: &str) -> Result<(), Vec<Problem>> {
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        // A program that reads from the pipe, such as `head`, may close it early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(vec![Problem::other(format!("standard output: {error}"))]),
    }
}

/// The input as read from files and running clusters, before [`Inputs`] is made from it.
struct RawInput {
    meshes: Vec<Mesh>,
    /// `Err` = names in `--cluster` do not match the meshes. This error is returned only after the notes are printed, others at once.
    results: Result<ReadResults, Vec<Problem>>,
    clients: BTreeMap<ClusterIdentity, Client>,
    /// Lines to print to stderr.
    notes: Vec<String>,
}

impl RawInput {
    /// With `--filename`, reads only files. Without it, reads the hub, and each member that has no file given by `--cluster`.
    async fn read(args: &InputArgs, stdin: &mut dyn Read) -> Result<Self, Vec<Problem>> {
        let (filename, clusters) = (&args.filename, &args.clusters);
        let mut reader = DocumentReader::new(stdin);
        let mut problems = Vec::new();
        let mut ignored = Ignored::new();
        let mut notes = Vec::new();
        let documents = read_all(&mut reader, filename.iter().map(PathBuf::as_path), &mut problems);
        let meshes = read_meshes(&documents, &mut ignored, &mut notes).unwrap_or_else(|found| {
            problems.extend(found);
            Vec::new()
        });
        if meshes.is_empty() && problems.is_empty() && !filename.is_empty() {
            problems.push(Problem::other("the files of --filename contain no ClusterMesh"));
        }
        let mut paths: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
        for (name, path) in clusters {
            paths.entry(name).or_default().push(path);
        }
        let mut objects_by_cluster = BTreeMap::new();
        for (name, paths) in paths {
            let documents = read_all(&mut reader, paths.into_iter(), &mut problems);
            match objects::items(&documents).and_then(|items| Objects::read(&items, &mut ignored)) {
                Ok(objects) => {
                    objects_by_cluster.insert(name.to_owned(), objects);
                }
                Err(found) => problems.extend(found),
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        if !ignored.is_empty() {
            let kinds: Vec<String> = ignored.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
            notes.push(format!(
                "note: ignored, because a plan does not need them: {}",
                kinds.join(", ")
            ));
        }
        if filename.is_empty() {
            let live = LiveClusters::read(args, objects_by_cluster).await?;
            let LiveClusters {
                meshes,
                results,
                clients,
                notes: live_notes,
            } = live;
            notes.extend(live_notes);
            return Ok(Self {
                meshes,
                results: Ok(results),
                clients,
                notes,
            });
        }
        let results = ReadResults::from_files(&meshes, objects_by_cluster);
        Ok(Self {
            meshes,
            results,
            clients: BTreeMap::new(),
            notes,
        })
    }
}

fn read_all<'p>(
    reader: &mut DocumentReader<'_>,
    paths: impl Iterator<Item = &'p Path>,
    problems: &mut Vec<Problem>,
) -> Vec<Document> {
    let mut documents = Vec::new();
    for path in paths {
        match reader.read(path) {
            Ok(read) => documents.extend(read),
            Err(found) => problems.extend(found),
        }
    }
    documents
}

/// Reads the ClusterMeshes in the documents.
fn read_meshes(
    documents: &[Document],
    ignored: &mut Ignored,
    notes: &mut Vec<String>,
) -> Result<Vec<Mesh>, Vec<Problem>> {
    let items = objects::items(documents)?;
    let mut meshes: Vec<Mesh> = Vec::new();
    let mut positions: BTreeMap<MeshId, FilePosition> = BTreeMap::new();
    let mut problems = Vec::new();
    for (item, object) in objects::read_meshes(&items, ignored)? {
        let problem = |finding: convert::Finding| Problem {
            position: Some(item.position(&finding.field)),
            message: finding.to_string(),
        };
        match convert::mesh::to_core(&object) {
            Err(findings) => problems.extend(findings.into_iter().map(problem)),
            Ok((mesh, warnings)) => {
                notes.extend(
                    warnings
                        .into_iter()
                        .map(|finding| format!("warning: {}", problem(finding))),
                );
                if let Some(first) = positions.insert(mesh.id.clone(), item.position("")) {
                    problems.push(Problem {
                        position: Some(item.position("")),
                        message: format!("ClusterMesh {} is given twice, first at {first}", mesh.id),
                    });
                }
                meshes.push(mesh);
            }
        }
    }
    if problems.is_empty() { Ok(meshes) } else { Err(problems) }
}

/// The input, its plan, and the steps (writes) that would apply the plan.
pub(crate) struct PlanResult {
    pub(crate) meshes: Vec<Mesh>,
    pub(crate) plan: Plan,
    pub(crate) inputs: Inputs,
    /// The clients of the members, as in [`LiveClusters::clients`].
    pub(crate) clients: BTreeMap<ClusterIdentity, Client>,
    /// The steps for each member, keyed as [`Inputs::clusters`], in the order of [`diff::diff`].
    steps: BTreeMap<String, Vec<Arc<Step>>>,
    pub(crate) settings: Settings,
}

impl PlanResult {
    /// Reads the input and runs the planner. Notes and warnings go to `stderr`.
    ///
    /// # Errors
    /// All errors in the input.
    pub(crate) async fn read(
        args: &InputArgs,
        stdin: &mut dyn Read,
        stderr: &mut dyn Write,
    ) -> Result<Self, Vec<Problem>> {
        let settings = Settings::with_infrastructure_ports(&args.infrastructure_ports);
        let settings = settings.map_err(|why| vec![Problem::other(why.to_string())])?;
        let input = RawInput::read(args, stdin).await?;
        for line in &input.notes {
            let _ = writeln!(stderr, "{line}");
        }
        let outcome = Self::new(input, args.hub_id.as_deref(), settings)?;
        for line in outcome.notes() {
            let _ = writeln!(stderr, "{line}");
        }
        Ok(outcome)
    }

    fn new(input: RawInput, hub: Option<&str>, settings: Settings) -> Result<Self, Vec<Problem>> {
        let RawInput {
            meshes,
            results,
            clients,
            notes: _,
        } = input;
        let inputs = Inputs::new(&meshes, results?, hub);
        let naming = inputs::naming(&inputs.observations.hub);
        let plan = plan::plan(&meshes, &inputs.observations, &settings, &naming);
        let mut steps = BTreeMap::new();
        for (identity, name) in &inputs.names {
            if let (false, Some(cluster)) = (steps.contains_key(name), inputs.clusters.get(name)) {
                let mut member_steps = diff::diff(&plan, identity, &cluster.member);
                member_steps.retain(|step| !depends_on_unlisted(step, cluster, &plan, &inputs));
                steps.insert(name.clone(), member_steps);
            }
        }
        Ok(Self {
            meshes,
            plan,
            inputs,
            clients,
            steps,
            settings,
        })
    }

    pub(crate) fn explainer(&self) -> Explainer<'_> {
        let observations = &self.inputs.observations;
        Explainer::new(
            &self.meshes,
            observations,
            &self.settings,
            &inputs::naming(&observations.hub),
            &self.plan,
        )
    }

    /// Returns the steps of one mesh in the cluster of an entry. `None` = the cluster was not read.
    pub(crate) fn changes(&self, id: &MeshId, mesh: &MeshPlan, entry: &str) -> Option<Vec<&Step>> {
        let identity = mesh.identities.get(entry)?;
        let steps = self.steps.get(self.inputs.names.get(identity)?)?;
        // If a mesh names one cluster twice, only the entry whose name sorts first shows the cluster's changes.
        let first = mesh.identities.iter().find(|(_, other)| other.same_cluster(identity));
        let is_shown = first.is_some_and(|(name, _)| name == entry);
        Some(
            steps
                .iter()
                .map(|step| &**step)
                .filter(|step| is_shown && step.mesh == *id)
                .collect(),
        )
    }

    pub(crate) fn cluster(&self, mesh: &MeshPlan, entry: &str) -> Option<&ReadCluster> {
        self.inputs.cluster(mesh.identities.get(entry)?)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for (name, cluster) in &self.inputs.clusters {
            for (mesh, count) in &cluster.left_unchanged {
                notes.push(format!(
                    "note: {count} object(s) in cluster {name:?} belong to ClusterMesh {mesh}, which is not given: they are left unchanged"
                ));
            }
            if !cluster.not_listed.is_empty() {
                let kinds: Vec<&str> = cluster.not_listed.iter().copied().collect();
                notes.push(format!(
                    "note: the input for cluster {name:?} has no {}: they were probably not listed, so their absence causes no change",
                    kinds.join(" and no ")
                ));
            }
        }
        let facts = self.plan.meshes.values().flat_map(|mesh| &mesh.facts);
        if facts
            .into_iter()
            .any(|fact| matches!(fact, Fact::EndpointUnresolved { .. }))
        {
            notes.push("note: host names of endpoints are not resolved here; the controller resolves them".to_owned());
        }
        notes
    }
}

/// Whether missing objects in the input may be the only cause of a step: the policy that the step creates may exist already,
/// `spec.deny` of a policy may change because addresses of the API server are missing, or the Service whose mirror the step deletes
/// may still exist.
fn depends_on_unlisted(step: &Step, target: &ReadCluster, plan: &Plan, inputs: &Inputs) -> bool {
    match (&step.item, step.action) {
        (Item::Policy(..), Action::Create) => target.not_listed.contains("PeerPolicy"),
        // `spec.deny` contains the addresses of the API server, which come from an EndpointSlice.
        (Item::Policy(..), Action::Update) => {
            step.fields == ["spec.deny"] && target.not_listed.contains("EndpointSlice")
        }
        (Item::Service(..) | Item::Slice(..), Action::Delete) => {
            let entry = step.owner.source_cluster.as_deref().unwrap_or_default();
            let identity = plan.meshes.get(&step.mesh).and_then(|mesh| mesh.identities.get(entry));
            let source = identity.and_then(|identity| inputs.cluster(identity));
            source.is_some_and(|cluster| {
                ["Service", "EndpointSlice"]
                    .iter()
                    .any(|kind| cluster.not_listed.contains(kind))
            })
        }
        _ => false,
    }
}
