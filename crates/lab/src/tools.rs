//! Builds the programs that the lab runs, from the pinned Go modules in `tools/`, and caches them. The cache key is a hash of
//! the build's inputs.

mod build;
mod sets;

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

use crate::{Error, Result};

pub use sets::ArtefactSet;

/// The directory for downloads and builds: `$LAB_HOME`, else `$HOME/.cache/clustermesh-lab`.
///
/// # Errors
/// When neither variable is set.
pub fn lab_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("LAB_HOME") {
        return Ok(home.into());
    }
    let home = std::env::var_os("HOME").ok_or_else(|| Error::Missing {
        what: "the environment variable HOME".into(),
        remedy: "set it, or set LAB_HOME to a directory with 2 GiB of free space".into(),
    })?;
    Ok(Path::new(&home).join(".cache/clustermesh-lab"))
}

/// Built programs: the directory of each set.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tools {
    directories: Vec<(ArtefactSet, PathBuf)>,
}

impl Tools {
    /// Builds the sets that are not in the cache; `progress` gets one line for each step. Only one process builds at a
    /// time. A killed build leaves no incomplete set.
    ///
    /// `KUBEBUILDER_ASSETS` (a directory with etcd, kube-apiserver and kubectl) replaces [`ArtefactSet::ControlPlane`].
    ///
    /// # Errors
    /// When Go, a C compiler or libseccomp is missing, when `KUBEBUILDER_ASSETS` lacks a program, or when a build fails. The message of a
    /// failed build quotes its last lines.
    pub fn ensure(sets: &[ArtefactSet], progress: &dyn Fn(&str)) -> Result<Self> {
        let directories = sets
            .iter()
            .map(|set| Ok((*set, ensure_one(*set, progress)?)))
            .collect::<Result<_>>()?;
        Ok(Self { directories })
    }

    /// The path of a program (or other file) of these sets.
    ///
    /// # Errors
    /// When no set that was passed to [`Tools::ensure`] contains the file.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        let mut paths = self.directories.iter().map(|(_, directory)| directory.join(name));
        paths.find(|path| path.exists()).ok_or_else(|| Error::Missing {
            what: format!("{name} among the lab's tools"),
            remedy: format!("it is in none of {:?}", self.directories),
        })
    }

    /// The directory of one set.
    pub(crate) fn directory(&self, wanted: ArtefactSet) -> Option<&Path> {
        self.directories
            .iter()
            .find(|(set, _)| *set == wanted)
            .map(|(_, directory)| directory.as_path())
    }
}

fn ensure_one(set: ArtefactSet, progress: &dyn Fn(&str)) -> Result<PathBuf> {
    if set == ArtefactSet::ControlPlane
        && let Some(assets) = std::env::var_os("KUBEBUILDER_ASSETS")
    {
        let assets = PathBuf::from(assets);
        return match set.outputs().find(|name| !assets.join(name).exists()) {
            None => Ok(assets),
            Some(name) => Err(Error::Missing {
                what: format!("{name} in KUBEBUILDER_ASSETS ({})", assets.display()),
                remedy: "unset the variable to let the lab build its own, or complete the directory".into(),
            }),
        };
    }
    let home = lab_home()?;
    let directory = home.join(format!("{}-{}", set.name(), key(set)?));
    if directory.exists() {
        return Ok(directory);
    }
    std::fs::create_dir_all(&home).map_err(Error::io(format!("create {}", home.display())))?;
    let _lock = lock(&home.join("build.lock"), progress)?;
    // Another process may have built the set while this one waited for the lock.
    if !directory.exists() {
        build::build(set, &home, &directory, progress)?;
    }
    Ok(directory)
}

/// Twelve hex digits of a hash over the set's recipe, the Go version and architecture, and the files in the folder of the set's go.mod
/// and in its subfolders.
fn key(set: ArtefactSet) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(set.recipe());
    hash.update(go_version()?);
    let source = set.source();
    for file in files_in(&source)? {
        let bytes = std::fs::read(&file).map_err(Error::io(format!("read {}", file.display())))?;
        let name = file.strip_prefix(&source).unwrap_or(&file);
        hash.update(name.as_os_str().as_encoded_bytes());
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    }
    Ok(hash
        .finalize()
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// The files in a folder and its subfolders, sorted.
fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(folder).map_err(Error::io(format!("read {}", folder.display())))? {
        let path = entry.map_err(Error::io(format!("read {}", folder.display())))?.path();
        if path.is_dir() {
            files.extend(files_in(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn go_version() -> Result<Vec<u8>> {
    let missing = |_| Error::Missing {
        what: "Go (the program `go`)".into(),
        remedy: "install Go 1.26 or newer from https://go.dev/dl/ and put it into PATH".into(),
    };
    // The directory is outside any module, so that no `toolchain` line of a go.mod applies.
    Ok(Command::new("go")
        .args(["env", "GOVERSION", "GOARCH"])
        .current_dir("/")
        .output()
        .map_err(missing)?
        .stdout)
}

fn lock(path: &Path, progress: &dyn Fn(&str)) -> Result<Flock<std::fs::File>> {
    let open = || std::fs::File::create(path).map_err(Error::io(format!("open {}", path.display())));
    match Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err(_) => {
            progress("another process is building the lab's tools; waiting for it");
            Flock::lock(open()?, FlockArg::LockExclusive)
                .map_err(|(_, errno)| Error::errno(format!("lock {}", path.display()))(errno))
        }
    }
}
