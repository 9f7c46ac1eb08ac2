//! Tests the content of the images that `cargo xtask images` builds, and the error for a program that cannot run in an image.
//! Tests on whole clusters run the images.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use clustermesh_lab::ProductImages;
use serde_json::{Value, json};

/// The content of a docker archive.
struct Image {
    names: Value,
    config: Value,
    files: BTreeSet<String>,
}

fn archive_entries(archive: impl Read) -> Vec<(PathBuf, Vec<u8>)> {
    let mut archive = tar::Archive::new(archive);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut bytes = vec![];
        entry.read_to_end(&mut bytes).unwrap();
        let path = entry.path().unwrap().into_owned();
        (
            // The path of a directory ends with a slash.
            if entry.header().entry_type().is_dir() {
                path.join("")
            } else {
                path
            },
            bytes,
        )
    });
    entries.collect()
}

impl Image {
    fn read(archive: &Path) -> Self {
        let entries = archive_entries(fs::File::open(archive).unwrap());
        let entry = |name: &str| &entries.iter().find(|(path, _)| path == Path::new(name)).unwrap().1;
        let manifest: Value = serde_json::from_slice(entry("manifest.json")).unwrap();
        let config: Value = serde_json::from_slice(entry(manifest[0]["Config"].as_str().unwrap())).unwrap();
        let layers = manifest[0]["Layers"].as_array().unwrap();
        let layers = layers.iter().map(|layer| entry(layer.as_str().unwrap()));
        let files = layers.flat_map(|layer| archive_entries(layer.as_slice()));
        Self {
            names: manifest[0]["RepoTags"].clone(),
            config: config["config"].clone(),
            files: files
                .map(|(path, _)| path.display().to_string())
                .filter(|path| !path.ends_with('/'))
                .collect(),
        }
    }

    /// All files except shared libraries in the dynamic loader's directories.
    fn programs(&self) -> Vec<&str> {
        let is_library = |path: &str| {
            let (directory, name) = path.rsplit_once('/').unwrap_or_default();
            let loader_directories = ["lib", "lib64", "usr/lib"];
            loader_directories
                .iter()
                .any(|known| directory == *known || directory.starts_with(&format!("{known}/")))
                && name.contains(".so.")
        };
        let files = self.files.iter().map(String::as_str);
        files.filter(|path| !is_library(path)).collect()
    }
}

#[test]
fn images_contain_only_programs_and_libraries() {
    let built = ProductImages::ensure(&|line| println!("{line}")).unwrap();
    let agent = Image::read(&built.agent);
    assert_eq!(agent.names, json!([named_by("deploy/agent.yaml")]));
    assert_eq!(agent.programs(), ["usr/sbin/nft", "wg-agent"]);
    assert_eq!(agent.config["Entrypoint"], json!(["/wg-agent"]));
    assert_eq!(agent.config["User"], Value::Null);

    let controller = Image::read(&built.controller);
    assert_eq!(controller.names, json!([named_by("deploy/controller.yaml")]));
    assert_eq!(controller.programs(), ["clustermesh-controller"]);
    assert_eq!(controller.config["Entrypoint"], json!(["/clustermesh-controller"]));
    assert_eq!(controller.config["User"], "65532:65532");
    assert!(
        controller.files.is_subset(
            &agent
                .files
                .iter()
                .cloned()
                .chain(["clustermesh-controller".into()])
                .collect()
        ),
        "the controller's image has a library that the agent's lacks: {:?} and {:?}",
        controller.files,
        agent.files
    );
}

/// The image that a manifest names.
fn named_by(manifest: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(manifest);
    let text = fs::read_to_string(path).unwrap();
    let name = text
        .lines()
        .find_map(|line| line.trim().trim_start_matches("- ").strip_prefix("image: "));
    name.unwrap().trim_matches('"').to_owned()
}

#[test]
fn program_with_newer_libc_is_refused_with_remedy() {
    let scratch = tempfile::tempdir().unwrap();
    // The loader compares version names. No libc has the version GLIBC_9, so a program that names it seems to need a newer libc.
    let mut program = fs::read("/bin/true").unwrap();
    let version = program
        .windows(9)
        .rposition(|bytes| bytes.starts_with(b"\0GLIBC_2."))
        .unwrap();
    program[version + 7] = b'9';
    for name in ["wg-agent", "clustermesh-controller"] {
        fs::write(scratch.path().join(name), &program).unwrap();
        let path = scratch.path().join(name);
        fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let error = ProductImages::build(scratch.path(), &scratch.path().join("out"), &|_| {}).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("`GLIBC_9."), "{error}");
    assert!(error.contains("cargo xtask images --base IMAGE"), "{error}");
}
