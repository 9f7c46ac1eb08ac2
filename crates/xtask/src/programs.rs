//! Programs that are built: our own, so that tests and demo run what this checkout says, and those of crates.io, into a cache.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use clustermesh_lab::lab_home;

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Cargo for this workspace, with the environment of a shell. `cargo run` sets variables about the running package, which ring's
/// build script takes for a change: then ring and all its dependents (rustls, kube, every program) are rebuilt each time that the
/// two kinds of call alternate.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|kind| text.starts_with(kind))
        {
            cargo.env_remove(&name);
        }
    }
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

/// The crates that programs of a cluster are made of.
const DELIVERED: [&str; 7] = [
    "clustermesh-access",
    "clustermesh-agent-core",
    "clustermesh-api",
    "clustermesh-controller",
    "clustermesh-core",
    "clustermesh-daemon",
    "wg-agent",
];

/// Builds the programs and returns the directory that holds them.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    build_with(&[])
}

/// The same, with this workspace's own crates optimised. Third-party crates are as in every build of the profile `dev`, so that
/// they are not built once more.
pub(crate) fn build_optimised() -> anyhow::Result<PathBuf> {
    build_with(&DELIVERED.map(|name| format!("--config=profile.dev.package.{name}.opt-level=3")))
}

fn build_with(flags: &[String]) -> anyhow::Result<PathBuf> {
    // The whole workspace, as `cargo test` takes it: other features of a dependency would mean building it twice.
    show(cargo().args(["build", "--workspace", "--bins"]).args(flags))?;
    // This very program lies where cargo puts them.
    let program = std::env::current_exe().context("where this program is")?;
    Ok(program.parent().context("a program without a directory")?.to_owned())
}

/// The target directory that this very program was built in.
pub(crate) fn target() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("where this program is")?;
    let target = program.ancestors().nth(2);
    Ok(target.context("a program without a target directory")?.to_owned())
}

/// A program from crates.io with the dependencies its authors locked, kept beside the lab's tools.
pub(crate) fn from_crates_io(package: &str, version: &str, program: &str) -> anyhow::Result<PathBuf> {
    let home = lab_home()?;
    let directory = home.join(format!("{package}-{version}"));
    let path = directory.join("bin").join(program);
    if path.exists() {
        return Ok(path);
    }
    eprintln!("xtask: building {package} {version}, once");
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

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, ffi::OsStr};

    #[test]
    fn cargo_is_told_nothing_of_this_package() {
        let cargo = super::cargo();
        let removed = cargo.get_envs().filter(|(_, value)| value.is_none());
        let removed: BTreeSet<&OsStr> = removed.map(|(name, _)| name).collect();
        // Cargo, or the person who runs this program by hand, has set them.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME", "CARGO_PKG_VERSION_MAJOR"] {
            assert!(
                std::env::var_os(name).is_some() && removed.contains(OsStr::new(name)),
                "{name}"
            );
        }
    }
}
