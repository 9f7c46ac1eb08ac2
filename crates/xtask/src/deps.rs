//! `cargo xtask deps`: checks with cargo metadata that crates import only what ARCHITECTURE.md allows.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::{Context, bail};
use serde::Deserialize;

/// Each crate, and the crates of this workspace that it may import.
const ALLOWED: &[(&str, &[&str])] = &[
    ("clustermesh-core", &[]),
    ("clustermesh-api", &["clustermesh-core"]),
    ("clustermesh-agent-core", &["clustermesh-core"]),
    ("clustermesh-access", &[]),
    ("clustermesh-daemon", &[]),
    ("clustermesh-scenarios", &["clustermesh-core"]),
    (
        "clustermesh-controller",
        &[
            "clustermesh-access",
            "clustermesh-core",
            "clustermesh-api",
            "clustermesh-daemon",
        ],
    ),
    (
        "wg-agent",
        &[
            "clustermesh-core",
            "clustermesh-api",
            "clustermesh-agent-core",
            "clustermesh-daemon",
            "wg-userspace",
        ],
    ),
    ("wg-userspace", &[]),
    (
        "clustermeshctl",
        &["clustermesh-access", "clustermesh-core", "clustermesh-api"],
    ),
    (
        "clustermesh-lab",
        &[
            "clustermesh-core",
            "clustermesh-api",
            "clustermesh-controller",
            "wg-agent",
        ],
    ),
    (
        "clustermesh-fuzz",
        &[
            "clustermesh-core",
            "clustermesh-api",
            "clustermesh-agent-core",
            "wg-agent",
            "wg-userspace",
        ],
    ),
    (
        "clustermesh-tests",
        &[
            "clustermesh-core",
            "clustermesh-api",
            "clustermesh-agent-core",
            "clustermesh-lab",
            "wg-agent",
        ],
    ),
    ("xtask", &["clustermesh-core", "clustermesh-api", "clustermesh-lab"]),
    ("clustermesh-bench", &["clustermesh-lab", "xtask"]),
];

/// Each pure crate, and the third-party crates that it may import: no runtime, client, clock or log.
const PURE: &[(&str, &[&str])] = &[
    ("clustermesh-core", &["base64", "ipnet", "thiserror"]),
    ("clustermesh-agent-core", &["base64", "ipnet", "thiserror", "zeroize"]),
];

/// Crates that are useful without this project: their tests and examples import none of ours either.
const STANDALONE: &[&str] = &["wg-userspace"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` = an ordinary dependency.
    kind: Option<String>,
}

/// Fails, and lists every import that is not allowed.
pub(crate) fn run() -> anyhow::Result<()> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .output()
        .context("cargo metadata cannot be run")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata is no JSON")?;
    let wrong = violations(&metadata);
    if wrong.is_empty() {
        println!("imports: {} crates, every edge allowed", metadata.packages.len());
        return Ok(());
    }
    bail!("imports that ARCHITECTURE.md does not allow:\n  {}", wrong.join("\n  "))
}

fn violations(metadata: &Metadata) -> Vec<String> {
    let ours: BTreeSet<&str> = metadata.packages.iter().map(|package| &*package.name).collect();
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let pure: BTreeMap<&str, &[&str]> = PURE.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in &metadata.packages {
        let Some(allowed) = allowed.get(&*package.name) else {
            wrong.push(format!(
                "{}: this crate is in no list; say in ARCHITECTURE.md what it may import",
                package.name
            ));
            continue;
        };
        // Dev-dependencies are allowed: tests may use the lab.
        let is_standalone = STANDALONE.contains(&&*package.name);
        let counts = |dependency: &&Dependency| is_standalone || dependency.kind.as_deref() != Some("dev");
        for dependency in package.dependencies.iter().filter(counts) {
            if ours.contains(&*dependency.name) && !allowed.contains(&&*dependency.name) {
                wrong.push(format!("{} -> {}", package.name, dependency.name));
            }
            if let Some(pure) = pure.get(&*package.name)
                && !ours.contains(&*dependency.name)
                && !pure.contains(&&*dependency.name)
            {
                wrong.push(format!("{} -> {}: a pure crate", package.name, dependency.name));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(edges: &[(&str, &[&str])]) -> Metadata {
        let packages = edges.iter().map(|(name, to)| Package {
            name: (*name).into(),
            dependencies: to
                .iter()
                .map(|to| Dependency {
                    name: (*to).into(),
                    kind: None,
                })
                .collect(),
        });
        Metadata {
            packages: packages.collect(),
        }
    }

    #[test]
    fn unlisted_import_and_runtime_in_a_pure_crate_are_listed() {
        let metadata = metadata(&[
            ("clustermesh-core", &["tokio", "ipnet"]),
            (
                "clustermesh-api",
                &["clustermesh-core", "clustermesh-controller", "kube"],
            ),
            ("clustermesh-controller", &["clustermesh-core"]),
            ("newcomer", &[]),
        ]);
        assert_eq!(
            violations(&metadata),
            vec![
                "clustermesh-core -> tokio: a pure crate",
                "clustermesh-api -> clustermesh-controller",
                "newcomer: this crate is in no list; say in ARCHITECTURE.md what it may import",
            ]
        );
    }

    #[test]
    fn standalone_crate_imports_none_of_ours_for_tests_either() {
        let mut metadata = metadata(&[
            ("clustermesh-lab", &["wg-agent"]),
            ("wg-agent", &["clustermesh-lab", "wg-userspace"]),
            ("wg-userspace", &["clustermesh-lab", "proptest"]),
        ]);
        for package in &mut metadata.packages {
            for dependency in package.dependencies.iter_mut().filter(|d| d.name != "wg-userspace") {
                dependency.kind = Some("dev".into());
            }
        }
        assert_eq!(violations(&metadata), vec!["wg-userspace -> clustermesh-lab"]);
    }
}
