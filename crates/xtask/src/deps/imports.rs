//! Checks that the crates of the workspace import only the crates that [`ALLOWED`] and [`PURE`] list, as ARCHITECTURE.md describes.

use std::collections::{BTreeMap, BTreeSet};

use super::{Dependency, Metadata};

/// Each crate, and the crates of this workspace that it may import. Its tests may import others, unless it is in [`STANDALONE`].
const ALLOWED: &[(&str, &[&str])] = &[
    ("clustermesh-core", &[]),
    ("clustermesh-api", &["clustermesh-core"]),
    ("clustermesh-agent-core", &["clustermesh-core"]),
    ("clustermesh-access", &[]),
    ("clustermesh-daemon", &[]),
    ("clustermesh-netlink", &[]),
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
            "clustermesh-netlink",
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
    ("clustermesh-bench", &["clustermesh-lab", "clustermesh-tests", "xtask"]),
];

/// Each crate without I/O, and the third-party crates that it may import: no async runtime, API client, clock or log.
const PURE: &[(&str, &[&str])] = &[
    (
        "clustermesh-core",
        &["base64", "immutable-chunkmap", "ipnet", "rayon", "serde", "thiserror"],
    ),
    ("clustermesh-agent-core", &["ipnet", "thiserror"]),
];

/// Crates that can be used without this project: even their tests and examples must not import crates of this workspace.
const STANDALONE: &[&str] = &["wg-userspace"];

/// Every import that is not allowed, and every crate of the workspace that is not in [`ALLOWED`].
pub(super) fn violations(metadata: &Metadata) -> Vec<String> {
    let ours: BTreeSet<&str> = metadata.ours().map(|package| &*package.name).collect();
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let pure: BTreeMap<&str, &[&str]> = PURE.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in metadata.ours() {
        let Some(allowed) = allowed.get(&*package.name) else {
            wrong.push(format!(
                "{}: this crate is not listed; add it to ARCHITECTURE.md and to ALLOWED in crates/xtask/src/deps/imports.rs",
                package.name
            ));
            continue;
        };
        // Dev-dependencies are not checked, except those of a standalone crate: tests may use the lab.
        let is_standalone = STANDALONE.contains(&&*package.name);
        let is_checked = |dependency: &&Dependency| is_standalone || dependency.kind.as_deref() != Some("dev");
        for dependency in package.dependencies.iter().filter(is_checked) {
            if ours.contains(&*dependency.name) && !allowed.contains(&&*dependency.name) {
                wrong.push(format!("{} -> {}", package.name, dependency.name));
            }
            if let Some(pure) = pure.get(&*package.name)
                && !ours.contains(&*dependency.name)
                && !pure.contains(&&*dependency.name)
            {
                wrong.push(format!("{} -> {}: not in PURE", package.name, dependency.name));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deps::Package;

    fn metadata(edges: &[(&str, &[&str])]) -> Metadata {
        let packages = edges.iter().map(|(name, to)| Package {
            name: (*name).into(),
            version: "0.1.0".into(),
            license: None,
            source: None,
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
    fn forbidden_imports_and_unlisted_crates_are_reported() {
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
                "clustermesh-core -> tokio: not in PURE",
                "clustermesh-api -> clustermesh-controller",
                "newcomer: this crate is not listed; add it to ARCHITECTURE.md and to ALLOWED in crates/xtask/src/deps/imports.rs",
            ]
        );
    }

    #[test]
    fn workspace_dev_dependency_of_standalone_crate_is_reported() {
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
