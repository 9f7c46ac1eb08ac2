//! The programs that are compared: ours built from this checkout, the others at pinned versions, each into a cache.

use std::path::PathBuf;

use clustermesh_lab::ArtefactSet;

use crate::{
    programs::{cargo, root, show, target},
    tools,
};

/// Our device alone (crates/wg-agent/examples/device.rs), as it is released.
pub(crate) fn ours() -> anyhow::Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--release", "--package", "wg-agent", "--example", "device"]);
    show(&mut build)?;
    Ok(target()?.join("release/examples/device"))
}

/// Current wireguard-go (tools/wireguard/go.mod).
pub(crate) fn wireguard_go() -> anyhow::Result<PathBuf> {
    Ok(tools::build(&[ArtefactSet::WireguardGo])?.path("wireguard-go")?)
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
