//! That THREATS.md names tests that are there; what it says of them is for people to keep true.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// How the names of files of tests begin (ARCHITECTURE.md, Tests).
const FILES: [&str; 10] = [
    "agent_",
    "device_",
    "firewall_",
    "hostile_",
    "lab_",
    "mesh_",
    "path_",
    "reconcile_",
    "route_",
    "schema_",
];

/// The words of a text that stand between backquotes and are made of what names are made of.
fn quoted(text: &str) -> BTreeSet<&str> {
    let name = |word: &&str| {
        word.contains('_')
            && word
                .bytes()
                .all(|c| c == b'_' || c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    // A line at a time: an odd backquote costs that line.
    text.lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2).filter(name))
        .collect()
}

/// A name of three words or fewer is a file's, or something else's; a test's is a sentence. Metrics are no tests.
fn missing<'t>(threats: &'t str, files: &BTreeSet<String>, functions: &BTreeSet<String>) -> Vec<&'t str> {
    let names = quoted(threats).into_iter();
    names
        .filter(|name| {
            let sentence = name.matches('_').count() > 2 && !name.starts_with("wg_agent_");
            let file = !sentence && FILES.iter().any(|kind| name.starts_with(kind));
            (sentence && !functions.contains(*name)) || (file && !files.contains(*name))
        })
        .collect()
}

/// Every Rust file below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_test_that_threats_md_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = Vec::new();
    for folder in ["crates", "tests"] {
        sources(&root.join(folder), &mut paths);
    }
    let (mut files, mut functions) = (BTreeSet::new(), BTreeSet::new());
    for path in &paths {
        files.insert(path.file_stem().unwrap().to_string_lossy().into_owned());
        let text = fs::read_to_string(path).unwrap();
        let after = text.split("fn ").skip(1);
        functions.extend(after.map(|rest| rest.split(['(', '<', ' ']).next().unwrap_or_default().to_owned()));
    }
    let threats = fs::read_to_string(root.join("THREATS.md")).unwrap();
    let named = quoted(&threats).len();
    assert!(named > 100, "only {named} names were found in THREATS.md");
    assert_eq!(missing(&threats, &files, &functions), Vec::<&str>::new());
}

#[test]
fn a_name_that_is_nowhere_is_found_out_and_what_names_no_test_is_let_be() {
    let threats = "| core: `a_test_that_is_there`, `a_test_that_went`; `mesh_flows`: `mesh_gone` | `no_session` `fwmark` | \
                   `wg_agent_conntrack_failures_total` ` `a_b_c_d\n`another_that_went_too` `A_b_c_d_e`";
    let (files, functions) = (["mesh_flows"], ["a_test_that_is_there"]);
    let [files, functions] = [files, functions].map(|names| names.map(str::to_owned).into());
    assert_eq!(
        missing(threats, &files, &functions),
        ["a_test_that_went", "another_that_went_too", "mesh_gone"]
    );
}
