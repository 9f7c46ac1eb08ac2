//! `clustermeshctl plan`: read what was given, ask the planner, hand the outcome to a form of output. The forms are
//! [`report`] (JSON and YAML) and [`table`].

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use clustermesh_api::convert;
use clustermesh_core::{
    diff::{self, Action, Item, Step},
    mesh::{ClusterIdentity, Mesh, MeshId},
    plan::{self, Fact, MeshPlan, Plan, Settings},
};

use kube::Client;

use crate::{
    args::{GivenArgs, Output, PlanArgs},
    document::{Document, Library},
    live::Live,
    objects::{self, Ignored, Objects},
    problem::{Place, Problem},
    world::{self, Seen, Sources, World},
};

mod report;
mod table;

/// Runs the command. Notes and warnings go to `stderr`.
///
/// # Errors
/// Everything that has to be mended before there can be a plan.
pub(crate) async fn run(
    args: &PlanArgs,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    let PlanArgs {
        given,
        output,
        exit_code,
    } = args;
    let outcome = Outcome::read(given, stdin, stderr).await?;
    let text = match output {
        Output::Table => table::render(&outcome),
        Output::Json => serde_json::to_string_pretty(&report::Report::from(&outcome))
            .map(|json| json + "\n")
            .map_err(|error| vec![Problem::usage(format!("the plan cannot be written as JSON: {error}"))])?,
        Output::Yaml => serde_saphyr::to_string(&report::Report::from(&outcome))
            .map_err(|error| vec![Problem::usage(format!("the plan cannot be written as YAML: {error}"))])?,
    };
    print(stdout, &text)?;
    let changes = outcome.steps.values().any(|steps| !steps.is_empty());
    Ok(if *exit_code && changes { 2 } else { 0 })
}

/// Writes to standard output.
pub(crate) fn print(stdout: &mut dyn Write, text: &str) -> Result<(), Vec<Problem>> {
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        // `| head` has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(vec![Problem::usage(format!("standard output: {error}"))]),
    }
}

/// What was given or read.
struct Input {
    meshes: Vec<Mesh>,
    /// An error is told behind the notes.
    sources: Result<Sources, Vec<Problem>>,
    clients: BTreeMap<ClusterIdentity, Client>,
    /// For stderr.
    notes: Vec<String>,
}

impl Input {
    /// From files where a ClusterMesh was given in one, else from the hub and its members.
    async fn read(from: &GivenArgs, stdin: &mut dyn Read) -> Result<Self, Vec<Problem>> {
        let (filename, clusters) = (&from.filename, &from.clusters);
        let mut library = Library::new(stdin);
        let mut problems = Vec::new();
        let mut ignored = Ignored::new();
        let mut notes = Vec::new();
        let documents = read_all(&mut library, filename.iter().map(PathBuf::as_path), &mut problems);
        let meshes = meshes(&documents, &mut ignored, &mut notes).unwrap_or_else(|found| {
            problems.extend(found);
            Vec::new()
        });
        if meshes.is_empty() && problems.is_empty() && !filename.is_empty() {
            problems.push(Problem::usage("no ClusterMesh in what --filename names"));
        }
        let mut paths: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
        for (name, path) in clusters {
            paths.entry(name).or_default().push(path);
        }
        let mut given = BTreeMap::new();
        for (name, paths) in paths {
            let documents = read_all(&mut library, paths.into_iter(), &mut problems);
            match objects::items(&documents).and_then(|items| Objects::read(&items, &mut ignored)) {
                Ok(objects) => {
                    given.insert(name.to_owned(), objects);
                }
                Err(found) => problems.extend(found),
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        if !ignored.is_empty() {
            let kinds: Vec<String> = ignored.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
            notes.push(format!("note: of no use to a plan and ignored: {}", kinds.join(", ")));
        }
        if filename.is_empty() {
            let live = Live::read(from, given).await?;
            let Live {
                meshes,
                sources,
                clients,
                notes: of_clusters,
            } = live;
            notes.extend(of_clusters);
            return Ok(Self {
                meshes,
                sources: Ok(sources),
                clients,
                notes,
            });
        }
        let sources = Sources::files(&meshes, given);
        Ok(Self {
            meshes,
            sources,
            clients: BTreeMap::new(),
            notes,
        })
    }
}

fn read_all<'p>(
    library: &mut Library<'_>,
    paths: impl Iterator<Item = &'p Path>,
    problems: &mut Vec<Problem>,
) -> Vec<Document> {
    let mut documents = Vec::new();
    for path in paths {
        match library.read(path) {
            Ok(read) => documents.extend(read),
            Err(found) => problems.extend(found),
        }
    }
    documents
}

fn meshes(documents: &[Document], ignored: &mut Ignored, notes: &mut Vec<String>) -> Result<Vec<Mesh>, Vec<Problem>> {
    let items = objects::items(documents)?;
    let mut meshes: Vec<Mesh> = Vec::new();
    let mut places: BTreeMap<MeshId, Place> = BTreeMap::new();
    let mut problems = Vec::new();
    for (item, object) in objects::meshes(&items, ignored)? {
        let told = |finding: convert::Finding| Problem {
            place: Some(item.place(&finding.field)),
            message: finding.to_string(),
        };
        match convert::mesh::to_core(&object) {
            Err(findings) => problems.extend(findings.into_iter().map(told)),
            Ok((mesh, warnings)) => {
                notes.extend(
                    warnings
                        .into_iter()
                        .map(|finding| format!("warning: {}", told(finding))),
                );
                if let Some(first) = places.insert(mesh.id.clone(), item.place("")) {
                    problems.push(Problem {
                        place: Some(item.place("")),
                        message: format!("ClusterMesh {} is given twice, first at {first}", mesh.id),
                    });
                }
                meshes.push(mesh);
            }
        }
    }
    if problems.is_empty() { Ok(meshes) } else { Err(problems) }
}

/// The plan of everything given, and the writes that would carry it out.
pub(crate) struct Outcome {
    pub(crate) meshes: Vec<Mesh>,
    pub(crate) plan: Plan,
    pub(crate) world: World,
    /// Of the members that were read and not given in files.
    pub(crate) clients: BTreeMap<ClusterIdentity, Client>,
    /// By the name on the command line of the member they go into, in the order of writing.
    steps: BTreeMap<String, Vec<Step>>,
    /// As the controller was given them.
    pub(crate) settings: Settings,
}

impl Outcome {
    /// Reads what was given and plans it. Notes and warnings go to `stderr`.
    ///
    /// # Errors
    /// Everything that has to be mended before there can be a plan.
    pub(crate) async fn read(
        given: &GivenArgs,
        stdin: &mut dyn Read,
        stderr: &mut dyn Write,
    ) -> Result<Self, Vec<Problem>> {
        let settings = Settings::closing(&given.infrastructure_ports);
        let settings = settings.map_err(|why| vec![Problem::usage(why.to_string())])?;
        let input = Input::read(given, stdin).await?;
        for line in &input.notes {
            let _ = writeln!(stderr, "{line}");
        }
        let outcome = Self::of(input, given.hub_id.as_deref(), settings)?;
        for line in outcome.notes() {
            let _ = writeln!(stderr, "{line}");
        }
        Ok(outcome)
    }

    fn of(input: Input, hub: Option<&str>, settings: Settings) -> Result<Self, Vec<Problem>> {
        let Input {
            meshes,
            sources,
            clients,
            notes: _,
        } = input;
        let world = World::new(&meshes, sources?, hub);
        let naming = world::naming(&world.observations.hub);
        let plan = plan::plan(&meshes, &world.observations, &settings, &naming);
        let mut steps = BTreeMap::new();
        for (identity, name) in &world.sources {
            if let (false, Some(seen)) = (steps.contains_key(name), world.given.get(name)) {
                let mut of_member = diff::diff(&plan, identity, &seen.member);
                of_member.retain(|step| !unfounded(step, seen, &plan, &world));
                steps.insert(name.clone(), of_member);
            }
        }
        Ok(Self {
            meshes,
            plan,
            world,
            clients,
            steps,
            settings,
        })
    }

    /// What would be written into one entry's cluster for one mesh; `None` = the cluster was not given.
    fn changes(&self, id: &MeshId, mesh: &MeshPlan, entry: &str) -> Option<Vec<&Step>> {
        let identity = mesh.identities.get(entry)?;
        let steps = self.steps.get(self.world.sources.get(identity)?)?;
        // A mesh that names one cluster twice shows its changes once.
        let first = mesh.identities.iter().find(|(_, other)| other.same_cluster(identity));
        let shown = first.is_some_and(|(name, _)| name == entry);
        Some(steps.iter().filter(|step| shown && step.mesh == *id).collect())
    }

    fn seen(&self, mesh: &MeshPlan, entry: &str) -> Option<&Seen> {
        self.world.seen(mesh.identities.get(entry)?)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for (name, seen) in &self.world.given {
            for (mesh, count) in &seen.left_alone {
                notes.push(format!(
                    "note: {count} object(s) in cluster {name:?} belong to ClusterMesh {mesh}, which is not given: they are left alone"
                ));
            }
            if !seen.not_listed.is_empty() {
                let kinds: Vec<&str> = seen.not_listed.iter().copied().collect();
                notes.push(format!(
                    "note: no {} in what was given for cluster {name:?}: not listed, it seems, so no change is concluded from that",
                    kinds.join(" and no ")
                ));
            }
        }
        let facts = self.plan.meshes.values().flat_map(|mesh| &mesh.facts);
        if facts
            .into_iter()
            .any(|fact| matches!(fact, Fact::EndpointUnresolved { .. }))
        {
            notes.push("note: names of endpoints are not looked up here; the controller looks them up".to_owned());
        }
        notes
    }
}

/// Whether a step rests on objects that were not listed: a policy that may well be there, a mirror whose Service may.
fn unfounded(step: &Step, into: &Seen, plan: &Plan, world: &World) -> bool {
    match (&step.item, step.action) {
        (Item::Policy(..), Action::Create) => into.not_listed.contains("PeerPolicy"),
        // The addresses of the API server are an EndpointSlice.
        (Item::Policy(..), Action::Update) => step.fields == ["spec.deny"] && into.not_listed.contains("EndpointSlice"),
        (Item::Service(..) | Item::Slice(..), Action::Delete) => {
            let entry = step.owner.source_cluster.as_deref().unwrap_or_default();
            let identity = plan.meshes.get(&step.mesh).and_then(|mesh| mesh.identities.get(entry));
            let source = identity.and_then(|identity| world.seen(identity));
            source.is_some_and(|seen| {
                ["Service", "EndpointSlice"]
                    .iter()
                    .any(|kind| seen.not_listed.contains(kind))
            })
        }
        _ => false,
    }
}
