//! Checks the licences of third-party crates, from the SPDX expressions in their manifests.

use std::collections::BTreeSet;

use super::Package;

/// Licences that every crate may have: permissive, compatible with Apache-2.0, and with no condition except the notice.
const ALLOWED: &[&str] = &[
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// A crate, an additional licence that it may have, and the reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    (
        "ar_archive_writer",
        "Apache-2.0 WITH LLVM-exception",
        "part of a build script of serde-saphyr's stack guard; LLVM-exception only adds permissions",
    ),
    (
        "libfuzzer-sys",
        "NCSA",
        "only fuzz targets contain it; permissive, like BSD-3-Clause",
    ),
];

/// Every crate whose licence is not allowed, and every exception that no crate needs.
pub(super) fn violations(packages: &[Package]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut used: BTreeSet<&str> = BTreeSet::new();
    for package in packages.iter().filter(|package| package.source.is_some()) {
        let of_crate = |exception: &&(&str, &str, &str)| exception.0 == package.name;
        let exceptions: Vec<&str> = EXCEPTIONS
            .iter()
            .filter(of_crate)
            .map(|(_, licence, _)| *licence)
            .collect();
        let expression = package.license.as_deref().unwrap_or_default();
        let is_allowed_with = |more: &[&str]| {
            allows(expression, &|licence| {
                ALLOWED.contains(&licence) || more.contains(&licence)
            })
        };
        let Package { name, version, .. } = package;
        match (is_allowed_with(&[]), is_allowed_with(&exceptions)) {
            (Ok(true), _) => {}
            (_, Ok(true)) => {
                used.insert(name);
            }
            (_, Ok(false)) => wrong.push(format!(
                "{name} {version}: the licence {expression} is not allowed: use another crate, or add it with a reason to \
                 EXCEPTIONS in crates/xtask/src/deps/licences.rs"
            )),
            (_, Err(why)) => wrong.push(format!(
                "{name} {version}: {why}: ask its author for an SPDX expression, or use another crate"
            )),
        }
    }
    let stale = EXCEPTIONS.iter().filter(|(name, ..)| !used.contains(name));
    wrong.extend(stale.map(|(name, licence, _)| format!("{name}: no crate needs the exception {licence}: remove it")));
    wrong
}

/// Whether an SPDX expression can be fulfilled with licences for which `is_allowed` holds. `/` is the old form of `OR`.
///
/// # Errors
/// When the text is not an SPDX expression.
fn allows(expression: &str, is_allowed: &dyn Fn(&str) -> bool) -> Result<bool, String> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let allowed = parse_or(&mut words, is_allowed).filter(|_| words.peek().is_none());
    allowed.ok_or_else(|| format!("{expression:?} is not an SPDX expression"))
}

type Words<'w> = std::iter::Peekable<std::str::SplitWhitespace<'w>>;

/// Alternatives, joined by `OR`. `None` = not an expression.
fn parse_or(words: &mut Words<'_>, is_allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let mut allowed = parse_and(words, is_allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        allowed |= parse_and(words, is_allowed)?;
    }
    Some(allowed)
}

/// Licences that apply together, joined by `AND`, which binds more tightly than `OR`.
fn parse_and(words: &mut Words<'_>, is_allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let mut allowed = parse_licence(words, is_allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        allowed &= parse_licence(words, is_allowed)?;
    }
    Some(allowed)
}

/// A licence, with the exception that SPDX joins to it by `WITH`, or an expression in parentheses.
fn parse_licence(words: &mut Words<'_>, is_allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let word = words.next()?;
    if word == "(" {
        let allowed = parse_or(words, is_allowed)?;
        return (words.next()? == ")").then_some(allowed);
    }
    if ["OR", "AND", "WITH", ")"].contains(&word) {
        return None;
    }
    if words.next_if_eq(&"WITH").is_some() {
        return Some(is_allowed(&format!("{word} WITH {}", words.next()?)));
    }
    Some(is_allowed(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, license: Option<&str>) -> Package {
        Package {
            name: name.into(),
            version: "1.2.3".into(),
            license: license.map(str::to_owned),
            source: Some("registry".into()),
            dependencies: vec![],
        }
    }

    #[test]
    fn licence_expressions_are_evaluated() {
        for (expression, want) in [
            ("MIT", Ok(true)),
            ("GPL-3.0-only", Ok(false)),
            ("GPL-3.0-only OR MIT", Ok(true)),
            ("GPL-3.0-only/MIT", Ok(true)),
            ("MIT AND GPL-3.0-only", Ok(false)),
            ("GPL-3.0-only AND ISC OR MIT", Ok(true)),
            ("GPL-3.0-only AND (ISC OR MIT)", Ok(false)),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", Ok(true)),
            ("Apache-2.0 WITH LLVM-exception", Ok(false)),
        ] {
            assert_eq!(
                allows(expression, &|licence| ALLOWED.contains(&licence)),
                want,
                "{expression}"
            );
        }
        for broken in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "AND"] {
            let why = format!("{broken:?} is not an SPDX expression");
            assert_eq!(allows(broken, &|_| true), Err(why));
        }
    }

    #[test]
    fn violations_name_the_crate_and_the_remedy() {
        let packages = [
            package("permissive", Some("MIT")),
            package("copyleft", Some("GPL-3.0-only")),
            package("silent", None),
            package("ar_archive_writer", Some("Apache-2.0 WITH LLVM-exception")),
        ];
        assert_eq!(
            violations(&packages),
            [
                "copyleft 1.2.3: the licence GPL-3.0-only is not allowed: use another crate, or add it with a reason to EXCEPTIONS \
                 in crates/xtask/src/deps/licences.rs",
                "silent 1.2.3: \"\" is not an SPDX expression: ask its author for an SPDX expression, or use another crate",
                "libfuzzer-sys: no crate needs the exception NCSA: remove it",
            ]
        );
    }
}
