//! Builds two of the programs to compare: our device from this checkout, and wireguard-go at a pinned version into a cache. Also names
//! the revision of this checkout.

use std::path::PathBuf;

use clustermesh_lab::ArtefactSet;
use xtask::{
    programs::{cargo, root, run_command, target},
    tools,
};

/// Builds our device alone (crates/wg-userspace/examples/device.rs), with the release profile.
pub(crate) fn build_our_device() -> anyhow::Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--release", "--package", "wg-userspace", "--example", "device"]);
    run_command(&mut build)?;
    Ok(target()?.join("release/examples/device"))
}

/// Builds wireguard-go at the version in tools/wireguard/go.mod.
pub(crate) fn build_wireguard_go() -> anyhow::Result<PathBuf> {
    Ok(tools::build(&[ArtefactSet::WireguardGo])?.path("wireguard-go")?)
}

/// The revision of this checkout as `git describe` prints it, with `-dirty` if tracked files differ from it. Without git: `unknown`.
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
