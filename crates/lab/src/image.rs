//! Creates container images without a registry: a docker archive with one layer. The layer contains host files, the libraries
//! that they are linked with, and given texts, links and directories. `ctr images import` reads the archive.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::{Error, Result};

/// The arguments with which ctr imports an archive for kubelet. `--local` writes the layers into containerd's content store; the default
/// streams the archive to containerd's transfer service, which copies it more often. `--no-unpack` leaves an image packed until the first
/// container needs it.
pub(crate) const IMPORT: [&str; 6] = ["-n", "k8s.io", "images", "import", "--local", "--no-unpack"];

/// The content and name of an image.
#[derive(Debug, Clone, Default)]
pub struct ImageSpec {
    name: String,
    entrypoint: Vec<String>,
    /// Path in the image -> content.
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone)]
enum Entry {
    /// Copy of a host file.
    File(PathBuf),
    Text(String),
    Link(String),
    Directory(u32),
}

impl ImageSpec {
    /// An image with this name (`lab.local/box:1`), which contains only `/tmp`.
    pub fn new(name: &str) -> Self {
        let spec = Self {
            name: name.into(),
            ..Self::default()
        };
        spec.directory("/tmp", 0o1777)
    }

    /// Adds a copy of a host file at a path in the image, with the same executable bit.
    #[must_use]
    pub fn file(mut self, host: impl Into<PathBuf>, path: &str) -> Self {
        self.entries.insert(path.into(), Entry::File(host.into()));
        self
    }

    /// Adds a program of the host, and the dynamic loader and libraries that `ldd` lists for it. A static program needs
    /// no other file.
    ///
    /// # Errors
    /// When the program or one of its libraries does not exist.
    pub fn program(mut self, host: &Path, path: &str) -> Result<Self> {
        if !host.is_file() {
            return Err(Error::Missing {
                what: host.display().to_string(),
                remedy: "build or install it".into(),
            });
        }
        let output = Command::new("ldd").arg(host).output().map_err(Error::io("run ldd"))?;
        let libraries = parse_ldd(&String::from_utf8_lossy(&output.stdout));
        let libraries = libraries.map_err(|library| Error::Missing {
            what: format!("the library {library}, which {} is linked with,", host.display()),
            remedy: "install the program from the distribution's package again".into(),
        })?;
        for library in libraries {
            self.entries.insert(library.clone(), Entry::File(library.into()));
        }
        self.entries.insert(path.into(), Entry::File(host.into()));
        Ok(self)
    }

    /// Adds a file with this text.
    #[must_use]
    pub fn text(mut self, path: &str, text: &str) -> Self {
        self.entries.insert(path.into(), Entry::Text(text.into()));
        self
    }

    /// Adds a symbolic link.
    #[must_use]
    pub fn link(mut self, path: &str, target: &str) -> Self {
        self.entries.insert(path.into(), Entry::Link(target.into()));
        self
    }

    /// Adds an empty directory.
    #[must_use]
    pub fn directory(mut self, path: &str, mode: u32) -> Self {
        self.entries.insert(path.into(), Entry::Directory(mode));
        self
    }

    /// Sets the entrypoint: the command of containers without `command`.
    #[must_use]
    pub fn entrypoint(mut self, argv: &[&str]) -> Self {
        self.entrypoint = argv.iter().map(|word| (*word).into()).collect();
        self
    }

    /// Writes the archive. Equal contents give equal bytes.
    ///
    /// # Errors
    /// When a host file cannot be read or the archive cannot be written.
    pub fn write(&self, archive: &Path) -> Result<()> {
        self.write_to(archive).map_err(Error::io(format!(
            "write the image {} to {}",
            self.name,
            archive.display()
        )))
    }

    fn write_to(&self, archive: &Path) -> io::Result<()> {
        // The layer is written to a file first, because the archive's headers contain the layer's size, and the
        // image's config contains the layer's hash.
        let layer = archive.with_extension("layer");
        let digest = self.write_layer(&layer)?;
        let config = serde_json::json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "Entrypoint": self.entrypoint,
                "WorkingDir": "/",
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        })
        .to_string();
        let config_name = format!("{}.json", hex(&Sha256::digest(&config)));
        let manifest = serde_json::json!([{"Config": config_name, "RepoTags": [self.name], "Layers": ["layer.tar"]}]);
        let mut builder = Builder::new(fs::File::create(archive)?);
        let put = |builder: &mut Builder<fs::File>, name: &str, text: &str| {
            builder.append_data(
                &mut header(EntryType::Regular, 0o644, text.len() as u64),
                name,
                text.as_bytes(),
            )
        };
        put(&mut builder, &config_name, &config)?;
        let size = fs::metadata(&layer)?.len();
        builder.append_data(
            &mut header(EntryType::Regular, 0o644, size),
            "layer.tar",
            fs::File::open(&layer)?,
        )?;
        put(&mut builder, "manifest.json", &manifest.to_string())?;
        builder.into_inner()?.flush()?;
        fs::remove_file(layer)
    }

    /// Writes the layer and returns its hash.
    fn write_layer(&self, path: &Path) -> io::Result<String> {
        let mut builder = Builder::new(HashingWriter {
            file: fs::File::create(path)?,
            hash: Sha256::new(),
        });
        for parent in self.parents() {
            builder.append_data(
                &mut header(EntryType::Directory, 0o755, 0),
                relative(&parent),
                io::empty(),
            )?;
        }
        for (path, entry) in &self.entries {
            let path = relative(path);
            match entry {
                Entry::Directory(mode) => {
                    builder.append_data(&mut header(EntryType::Directory, *mode, 0), path, io::empty())?;
                }
                Entry::Link(target) => {
                    builder.append_link(&mut header(EntryType::Symlink, 0o777, 0), path, target)?;
                }
                Entry::Text(text) => {
                    let mut header = header(EntryType::Regular, 0o644, text.len() as u64);
                    builder.append_data(&mut header, path, text.as_bytes())?;
                }
                Entry::File(host) => {
                    let file =
                        fs::File::open(host).map_err(|e| io::Error::other(format!("{}: {e}", host.display())))?;
                    let metadata = file.metadata()?;
                    let executable = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o111 != 0;
                    let mode = if executable { 0o755 } else { 0o644 };
                    builder.append_data(&mut header(EntryType::Regular, mode, metadata.len()), path, file)?;
                }
            }
        }
        let done = builder.into_inner()?;
        Ok(hex(&done.hash.finalize()))
    }

    /// The directories above all entries, except those that are entries themselves. The set is sorted, so `/a` precedes `/a/b`.
    fn parents(&self) -> BTreeSet<String> {
        let ancestors = |path: &String| {
            let above = Path::new(path).ancestors().skip(1).filter(|p| p.parent().is_some());
            above.map(|p| p.display().to_string()).collect::<Vec<_>>()
        };
        let all = self.entries.keys().flat_map(ancestors);
        all.filter(|path| !self.entries.contains_key(path)).collect()
    }
}

fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Extracts the absolute paths from the output of `ldd`. The error is the name of a library that is not found.
fn parse_ldd(ldd: &str) -> std::result::Result<BTreeSet<String>, String> {
    let mut libraries = BTreeSet::new();
    for line in ldd.lines().map(str::trim) {
        let (name, target) = line.split_once(" => ").unwrap_or((line, line));
        if target.starts_with("not found") {
            return Err(name.into());
        }
        let path = target.split_whitespace().next().unwrap_or_default();
        if path.starts_with('/') {
            libraries.insert(path.into());
        }
    }
    Ok(libraries)
}

/// A writer that hashes all bytes that it writes.
struct HashingWriter {
    file: fs::File,
    hash: Sha256,
}

impl Write for HashingWriter {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.file.write(buffer)?;
        self.hash.update(&buffer[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_program_are_parsed_from_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let want = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"]
            .map(String::from)
            .into();
        assert_eq!(parse_ldd(text), Ok(want));
        assert_eq!(parse_ldd("\tstatically linked\n"), Ok(BTreeSet::new()));
        assert_eq!(parse_ldd("\tlibnft.so.1 => not found\n"), Err("libnft.so.1".into()));
    }

    #[test]
    fn image_is_reproducible_and_parents_precede_files() {
        let directory = tempfile::tempdir().unwrap();
        let spec = ImageSpec::new("lab.local/x:1")
            .text("/etc/a/b", "hi")
            .link("/bin/sh", "/bin/busybox");
        let archives = ["one.tar", "two.tar"].map(|name| directory.path().join(name));
        for archive in &archives {
            spec.write(archive).unwrap();
        }
        assert_eq!(fs::read(&archives[0]).unwrap(), fs::read(&archives[1]).unwrap());
        let mut outer = tar::Archive::new(fs::File::open(&archives[0]).unwrap());
        let mut names = vec![];
        for entry in outer.entries().unwrap() {
            let entry = entry.unwrap();
            if entry.path().unwrap().to_str() == Some("layer.tar") {
                let mut layer = tar::Archive::new(entry);
                names = layer
                    .entries()
                    .unwrap()
                    .map(|e| e.unwrap().path().unwrap().display().to_string())
                    .collect();
            }
        }
        assert_eq!(names, ["bin", "etc", "etc/a", "bin/sh", "etc/a/b", "tmp"]);
    }
}
