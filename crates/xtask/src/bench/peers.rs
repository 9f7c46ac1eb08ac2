//! The programs that are compared: ours built from this checkout, the others at pinned versions, each into a cache.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clustermesh_lab::{ArtefactSet, lab_home};

use crate::{
    programs::{cargo, root, show},
    tools,
};

/// Our device alone (crates/wg-agent/examples/device.rs), as it is released.
pub(crate) fn ours() -> anyhow::Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--release", "--package", "wg-agent", "--example", "device"]);
    show(&mut build)?;
    let target = std::env::current_exe().context("where this program is")?;
    let target = target
        .ancestors()
        .nth(2)
        .context("a program without a target directory")?;
    Ok(target.join("release/examples/device"))
}

/// Current wireguard-go (tools/wireguard/go.mod).
pub(crate) fn wireguard_go() -> anyhow::Result<PathBuf> {
    Ok(tools::build(&[ArtefactSet::WireguardGo])?.path("wireguard-go")?)
}

/// A program from crates.io with the dependencies its authors locked, kept beside the lab's tools.
pub(crate) fn from_crates_io(package: &str, version: &str, program: &str) -> anyhow::Result<PathBuf> {
    let home = lab_home()?;
    let directory = home.join(format!("{package}-{version}"));
    let path = directory.join("bin").join(program);
    if path.exists() {
        return Ok(path);
    }
    eprintln!("bench: building {package} {version}, once");
    // Built aside and renamed, so that what was interrupted is not taken for done.
    let unfinished = home.join(format!("{package}.unfinished"));
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished).with_context(|| format!("remove {}", unfinished.display()))?;
    }
    let text = |path: &Path| {
        path.to_str()
            .map(str::to_owned)
            .context("a cache whose path is not UTF-8")
    };
    let mut install = cargo();
    install
        .args(["install", package, "--version", &format!("={version}"), "--locked"])
        .args(["--root", &text(&unfinished)?])
        .env("CARGO_TARGET_DIR", unfinished.join("target"));
    show(&mut install)?;
    std::fs::remove_dir_all(unfinished.join("target")).context("remove what it was built from")?;
    std::fs::rename(&unfinished, &directory).with_context(|| format!("rename to {}", directory.display()))?;
    if !path.exists() {
        bail!("{package} {version} has no program {program}");
    }
    Ok(path)
}

/// What is measured, in a word: the commit, and whether files differ from it.
pub(crate) fn revision() -> String {
    let describe = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=10"])
        .current_dir(root())
        .output();
    describe.map_or_else(
        |_| "unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}
