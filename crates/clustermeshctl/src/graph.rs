//! `clustermeshctl graph`: draws the members of all meshes, and the links between them with their states, as [`text`] or [`svg`].
//! Everything comes from the spec and the status of the hub's ClusterMeshes.

use std::io::Write;

use crate::{
    args::{GraphArgs, GraphOutput},
    output::Printable,
    plan::print,
    problem::Problem,
    status::snapshot::HubReader,
};

mod layout;
mod model;
mod svg;
mod text;

#[cfg(test)]
mod tests;

use model::Graph;

/// Runs the command. Notes go to `stderr`.
///
/// # Errors
/// The hub cannot be read.
pub(crate) async fn run(
    args: &GraphArgs,
    stdout: &mut Printable<'_>,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    let snapshot = HubReader::open(&args.hub).await?.read().await?;
    let (graph, notes) = Graph::new(&snapshot);
    for note in snapshot.notes.iter().chain(&notes) {
        let _ = writeln!(stderr, "{note}");
    }
    let text = match args.output {
        GraphOutput::Text => text::render(&graph),
        GraphOutput::Svg => svg::render(&graph),
    };
    print(stdout, &text)?;
    Ok(0)
}
