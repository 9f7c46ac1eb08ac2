//! `cargo xtask deps`: checks dependencies with `cargo metadata`: which of our crates each of our crates imports, the licences of
//! third-party crates, and crates that are built in several versions.

use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

mod duplicates;
mod imports;
mod licences;

/// The platforms for which the programs are built. Crates for other platforms are not checked.
const PLATFORMS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    /// An SPDX expression.
    license: Option<String>,
    /// `None` = a crate of this workspace.
    source: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` = an ordinary dependency.
    kind: Option<String>,
}

impl Metadata {
    fn ours(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| package.source.is_none())
    }
}

/// Checks all dependencies. Fails with a list of everything that is not allowed.
pub(crate) fn run() -> anyhow::Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    for platform in PLATFORMS {
        cargo.args(["--filter-platform", platform]);
    }
    let output = cargo.output().context("cargo metadata cannot be run")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("parse the output of cargo metadata")?;
    let checks = [
        (
            "imports that ARCHITECTURE.md does not allow",
            imports::violations(&metadata),
        ),
        ("licences", licences::violations(&metadata.packages)),
        ("crates in several versions", duplicates::violations(&metadata.packages)),
    ];
    let failed: Vec<String> = checks
        .into_iter()
        .filter(|(_, wrong)| !wrong.is_empty())
        .map(|(what, wrong)| format!("{what}:\n  {}", wrong.join("\n  ")))
        .collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    let ours = metadata.ours().count();
    println!(
        "{ours} crates: every import is allowed; {} third-party crates: every licence is allowed, and every older version has a \
         reason",
        metadata.packages.len() - ours
    );
    Ok(())
}
