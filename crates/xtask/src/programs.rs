//! Builds the programs of this workspace for tests and demo, and programs from crates.io, which it keeps in a cache.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use clustermesh_lab::lab_home;

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A cargo command for this workspace, without the variables that `cargo run` sets for this program (`CARGO_PKG_*`,
/// `CARGO_MANIFEST_*`). The build script of ring runs again when they change: without this, a build by this program after a build from
/// a shell, or vice versa, would rebuild ring and the crates that depend on it (rustls, kube, every program).
pub fn cargo() -> Command {
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

/// Runs a command, whose output goes to the terminal. Fails if the command fails.
pub fn run_command(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{command:?} cannot be started"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// The workspace crates in the programs that run in a cluster.
const CLUSTER_CRATES: [&str; 9] = [
    "clustermesh-access",
    "clustermesh-agent-core",
    "clustermesh-api",
    "clustermesh-controller",
    "clustermesh-core",
    "clustermesh-daemon",
    "clustermesh-netlink",
    "wg-agent",
    "wg-userspace",
];

/// Builds the programs of the workspace and returns their directory.
pub fn build() -> anyhow::Result<PathBuf> {
    build_with(&[])
}

/// Like [`build`], but `CLUSTER_CRATES` are optimised and have no debug assertions, with which the planner would plan all meshes
/// anew in every pass, to check itself. The other crates keep the options of the profile `dev`, so third-party crates are not
/// rebuilt.
pub fn build_optimised() -> anyhow::Result<PathBuf> {
    let options = |name| {
        ["opt-level=3", "debug-assertions=false"].map(|option| format!("--config=profile.dev.package.{name}.{option}"))
    };
    build_with(CLUSTER_CRATES.map(options).as_flattened())
}

fn build_with(flags: &[String]) -> anyhow::Result<PathBuf> {
    // Builds the whole workspace, like `cargo test`. For a part of it, cargo could select other features of the dependencies and would
    // build these twice.
    run_command(cargo().args(["build", "--workspace", "--bins"]).args(flags))?;
    // Cargo writes the programs into the directory of this program.
    let program = std::env::current_exe().context("find the path of this program")?;
    Ok(program.parent().context("a program without a directory")?.to_owned())
}

/// Builds programs as they are released, and returns their directory.
pub fn build_release(packages: &[&str]) -> anyhow::Result<PathBuf> {
    let packages = packages.iter().flat_map(|package| ["--package", package]);
    run_command(cargo().args(["build", "--release", "--locked"]).args(packages))?;
    Ok(target()?.join("release"))
}

/// The directory of the programs that `cargo xtask bench events` measures. It contains no other programs.
pub fn measured() -> anyhow::Result<PathBuf> {
    Ok(target()?.join("measured"))
}

/// The target directory that contains this program.
pub fn target() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("find the path of this program")?;
    let target = program.ancestors().nth(2);
    Ok(target.context("a program without a target directory")?.to_owned())
}

/// Installs a package from crates.io, with the Cargo.lock of the package, into the lab's cache. Returns the path of `program` in it.
pub fn from_crates_io(package: &str, version: &str, program: &str) -> anyhow::Result<PathBuf> {
    let home = lab_home()?;
    let directory = home.join(format!("{package}-{version}"));
    let path = directory.join("bin").join(program);
    if path.exists() {
        return Ok(path);
    }
    eprintln!("xtask: building {package} {version} into the cache");
    // Installed here and renamed at the end, so that an interrupted build is not used.
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
    run_command(&mut install)?;
    std::fs::remove_dir_all(unfinished.join("target")).context("remove the build directory")?;
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
    fn cargo_gets_no_variables_about_this_package() {
        let cargo = super::cargo();
        let removed = cargo.get_envs().filter(|(_, value)| value.is_none());
        let removed: BTreeSet<&OsStr> = removed.map(|(name, _)| name).collect();
        // Cargo sets them for this test.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME", "CARGO_PKG_VERSION_MAJOR"] {
            assert!(
                std::env::var_os(name).is_some() && removed.contains(OsStr::new(name)),
                "{name}"
            );
        }
    }
}
