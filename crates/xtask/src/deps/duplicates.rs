//! Checks that the dependencies contain each crate in one version only, unless a reason is listed.

use std::collections::{BTreeMap, BTreeSet};

use super::Package;

/// For each crate that has several versions: its name, its older release series, and why these are in `Cargo.lock`, which also lists crates
/// that are not built.
const REASONS: &[(&str, &[&str], &str)] = &[
    ("base64", &["0.22"], "boringtun, k8s-openapi and tower-http use it"),
    ("bit-vec", &["0.9"], "not built: yasna's feature for it is off"),
    ("block-buffer", &["0.10"], BORINGTUN),
    ("chacha20", &["0.9"], BORINGTUN),
    ("cpufeatures", &["0.2"], BORINGTUN),
    ("crypto-common", &["0.1"], BORINGTUN),
    (
        "derive_more",
        &["0.99"],
        "netlink-packet-netfilter uses it; kube uses the newer one",
    ),
    ("digest", &["0.10"], BORINGTUN),
    (
        "getrandom",
        &["0.2", "0.3"],
        "boringtun uses 0.2, kube 0.3; tests use the newest",
    ),
    (
        "hashbrown",
        &["0.16"],
        "kube uses it; only bit-vec's feature borsh needs the newer version, and it is off",
    ),
    ("rand_core", &["0.6"], BORINGTUN),
    ("syn", &["2"], "only macros use it, at build time"),
];

const BORINGTUN: &str = "boringtun is pinned and uses older RustCrypto crates";

/// Reports crates that have several versions without a listed reason, and listed series that no longer occur or are the only version.
pub(super) fn violations(packages: &[Package]) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().insert(&package.version);
    }
    let mut wrong = Vec::new();
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let listed = REASONS
            .iter()
            .find(|(listed, ..)| listed == name)
            .map_or(&[][..], |(_, old, _)| old);
        let is_listed = |version: &str| listed.iter().any(|series| is_in_series(version, series));
        let unlisted: Vec<&str> = versions.iter().copied().filter(|version| !is_listed(version)).collect();
        // One version of each crate needs no reason.
        if unlisted.len() > 1 {
            wrong.push(format!(
                "{name} {}: `cargo tree --invert {name}@{}` shows which crates use it; update these, or add the older series with its \
                 reason to REASONS in crates/xtask/src/deps/duplicates.rs",
                unlisted.join(" and "),
                unlisted[0]
            ));
        }
    }
    for (name, old, _) in REASONS {
        let existing = versions.get(name);
        let is_one_of_several = |series: &str| {
            existing.is_some_and(|existing| {
                existing.len() > 1 && existing.iter().any(|version| is_in_series(version, series))
            })
        };
        let stale = old.iter().filter(|series| !is_one_of_several(series));
        wrong.extend(stale.map(|series| format!("{name} {series} is not one of several versions: remove its reason")));
    }
    wrong
}

/// Whether a version belongs to a release series: `1.2.3` belongs to `1` and to `1.2`.
fn is_in_series(version: &str, series: &str) -> bool {
    version.strip_prefix(series).is_some_and(|rest| rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicates_without_reason_and_stale_reasons_are_reported() {
        let package = |name: &str, version: &str| Package {
            name: name.into(),
            version: version.into(),
            license: None,
            source: None,
            dependencies: vec![],
        };
        let mut packages = Vec::new();
        for (name, old, _) in REASONS {
            packages.extend(old.iter().map(|series| package(name, &format!("{series}.1.0"))));
            packages.push(package(name, "99.0.0"));
        }
        assert_eq!(violations(&packages), [""; 0]);
        packages.extend([
            package("twice", "1.0.0"),
            package("twice", "2.0.0"),
            package("once", "1.0.0"),
        ]);
        packages.retain(|package| (&*package.name, &*package.version) != ("syn", "2.1.0"));
        assert_eq!(
            violations(&packages),
            [
                "twice 1.0.0 and 2.0.0: `cargo tree --invert twice@1.0.0` shows which crates use it; update these, or add the older series \
                 with its reason to REASONS in crates/xtask/src/deps/duplicates.rs",
                "syn 2 is not one of several versions: remove its reason",
            ]
        );
    }
}
