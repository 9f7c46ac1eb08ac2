//! Builds our own programs, so that tests and demo run what this checkout says.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Cargo, for this workspace.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root());
    cargo
}

/// Runs a command with its output shown; a failure is an error that names it.
pub(crate) fn show(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{command:?} cannot be started"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// Builds the programs and returns the directory that holds them.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    // The whole workspace, as `cargo test` takes it: other features of a dependency would mean building it twice.
    show(cargo().args(["build", "--workspace", "--bins"]))?;
    // This very program lies where cargo puts them.
    let program = std::env::current_exe().context("where this program is")?;
    Ok(program.parent().context("a program without a directory")?.to_owned())
}
