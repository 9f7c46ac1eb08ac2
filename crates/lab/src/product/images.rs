//! Builds the product's images as docker archives with `cargo xtask images` and buildah. Their base consists of Debian
//! packages, because the lab reaches no registry. They are rebuilt only when an input has changed.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

use crate::{Error, Result, lab_home, run};

const PROGRAMS: [&str; 2] = ["wg-agent", "clustermesh-controller"];
/// Packages of the base: programs that the Containerfiles run, libraries of our programs (all depend on libc6), nft.
const PACKAGES: &str = "dash,coreutils,grep,libgcc-s1,nftables";
/// Environment variable with another base, for machines that run neither Debian nor Ubuntu.
const BASE: &str = "CLUSTERMESH_IMAGE_BASE";

/// Docker archives of both images. While this value exists, no other process rebuilds them.
#[derive(Debug)]
pub struct ProductImages {
    /// The image of wg-agent.
    pub agent: PathBuf,
    /// The image of clustermesh-controller.
    pub controller: PathBuf,
    _lock: Flock<fs::File>,
}

impl ProductImages {
    /// Builds the images from the programs in the lab's own directory, if an input has changed.
    ///
    /// # Errors
    /// When a program is missing, or `cargo xtask images` fails.
    pub fn ensure(progress: &dyn Fn(&str)) -> Result<Self> {
        let [agent, controller] = PROGRAMS.map(run::our_program);
        let programs = [agent?, controller?];
        let base = base(progress)?;
        let directory = programs[0].with_file_name("images");
        create(&directory)?;
        let images = Self {
            agent: directory.join("wg-agent.tar"),
            controller: directory.join("clustermesh-controller.tar"),
            _lock: lock(&directory.join("lock"))?,
        };
        let (key, made_from) = (key(&programs, &base)?, directory.join("key"));
        if fs::read_to_string(&made_from).is_ok_and(|made| made == key) {
            return Ok(images);
        }
        progress("building the images");
        let _ = fs::remove_file(&made_from);
        let stripped = Scratch::new(directory.join("programs"))?;
        for program in &programs {
            // Debug symbols make these programs large.
            let to = stripped.path(&program.file_name().unwrap_or_default().to_string_lossy());
            run_through(Command::new("strip").arg("-o").arg(to).arg(program))?;
        }
        build(&stripped.0, &base, &directory)?;
        fs::write(&made_from, key).map_err(Error::io(format!("write {}", made_from.display())))?;
        Ok(images)
    }

    /// Runs `cargo xtask images` with the programs of this directory; it writes both archives into `output`.
    ///
    /// # Errors
    /// When the command fails; its output is quoted.
    pub fn build(programs: &Path, output: &Path, progress: &dyn Fn(&str)) -> Result<()> {
        build(programs, &base(progress)?, output)
    }
}

fn base(progress: &dyn Fn(&str)) -> Result<String> {
    match std::env::var(BASE) {
        Ok(base) => Ok(base),
        Err(_) => Ok(format!("docker-archive:{}", debian(progress)?.display())),
    }
}

/// A key that changes with every input of the images.
fn key(programs: &[PathBuf; 2], base: &str) -> Result<String> {
    let mut key = format!("{base}\n");
    for program in programs.iter().chain([&run::our_program("xtask")?]) {
        let metadata = fs::metadata(program).map_err(Error::io(format!("read {}", program.display())))?;
        let (size, seconds, rest) = (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
        key += &format!("{} {size} {seconds}.{rest}\n", program.display());
    }
    for file in ["deploy/Containerfile.agent", "deploy/Containerfile.controller"] {
        key += &super::manifest(file)?;
    }
    Ok(key)
}

fn build(programs: &Path, base: &str, output: &Path) -> Result<()> {
    let scratch = Scratch::new(output.join("unfinished"))?;
    scratch.store()?;
    let mut images = Command::new(run::our_program("xtask")?);
    // A backtrace would push the builder's own message out of the last lines.
    images.env("RUST_BACKTRACE", "0");
    images
        .args(["images", "--builder=buildah"])
        .arg(format!("--base={base}"));
    images.arg("--programs").arg(programs).arg("--output").arg(output);
    run_through(scratch.environment(&mut images))
}

/// A docker archive with a minimal system of the machine's own release. Its libc is then never older than the
/// machine's, with which our programs are linked.
fn debian(progress: &dyn Fn(&str)) -> Result<PathBuf> {
    let release = release(&fs::read_to_string("/etc/os-release").unwrap_or_default())?;
    let home = lab_home()?;
    create(&home)?;
    let made_from = Sha256::digest(format!("{release} {PACKAGES} {}", std::env::consts::ARCH));
    let key: String = made_from.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    let archive = home.join(format!("image-base-{key}.tar"));
    let _lock = lock(&home.join("image-base.lock"))?;
    if archive.exists() {
        return Ok(archive);
    }
    progress("making the base of the images from Debian's packages, once");
    let scratch = Scratch::new(home.join("image-base.unfinished"))?;
    scratch.store()?;
    let (system, unfinished) = (scratch.path("system.tar"), scratch.path("base.tar"));
    let mut bootstrap = Command::new("mmdebstrap");
    // The packages are unpacked, not configured, because only the product's programs run in the image.
    bootstrap.args(["--variant=extract", "--mode=root", "--quiet"]);
    bootstrap
        .arg(format!("--include={PACKAGES}"))
        .arg(&release)
        .arg(&system);
    run_through(scratch.environment(&mut bootstrap))?;
    let context = scratch.path("context");
    create(&context)?;
    fs::write(context.join("Containerfile"), "FROM scratch\nADD system.tar /\n")
        .and_then(|()| fs::rename(&system, context.join("system.tar")))
        .map_err(Error::io("write the build context of the base"))?;
    let mut buildah = Command::new("buildah");
    let name = format!("docker-archive:{}:lab.local/base:1", unfinished.display());
    buildah.args(["build", "--quiet", "--tag", &name]).arg(&context);
    run_through(scratch.environment(&mut buildah))?;
    fs::rename(&unfinished, &archive).map_err(Error::io(format!("rename to {}", archive.display())))?;
    Ok(archive)
}

/// The suite (such as `bookworm`) in which Debian's or Ubuntu's archive contains the machine's release.
fn release(os_release: &str) -> Result<String> {
    let value = |key: &str| {
        let line = os_release.lines().find_map(|line| line.strip_prefix(key));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    let known = matches!(value("ID=").as_deref(), Some("debian" | "ubuntu"));
    value("VERSION_CODENAME=").filter(|_| known).ok_or_else(|| Error::Missing {
        what: "a release of Debian or Ubuntu to take the libraries of the images from".into(),
        remedy: format!(
            "on another system set {BASE} to an image with sh, coreutils, grep and nft, whose libc is not older than this machine's"
        ),
    })
}

/// A directory for one build. Its name is fixed, so that the next build removes the files of a killed one.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Scratch {
    fn new(path: PathBuf) -> Result<Self> {
        if path.exists() {
            fs::remove_dir_all(&path).map_err(Error::io(format!("remove {}", path.display())))?;
        }
        create(&path)?;
        Ok(Self(path))
    }

    /// Makes buildah store its images, settings and temporary files here, and leave the user's own unchanged.
    fn store(&self) -> Result<()> {
        let text = format!(
            "[storage]\ndriver = \"vfs\"\ngraphroot = \"{}\"\nrunroot = \"{}\"\n",
            self.path("store").display(),
            self.path("run").display()
        );
        fs::write(self.path("storage.conf"), text).map_err(Error::io("write storage.conf"))?;
        // buildah creates this directory and a lock in it even if it uses no network.
        let text = format!("[network]\nnetwork_config_dir = \"{}\"\n", self.path("net.d").display());
        fs::write(self.path("containers.conf"), text).map_err(Error::io("write containers.conf"))?;
        create(&self.path("tmp"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Isolation `chroot` needs no runtime, no user namespaces and no cgroups.
    fn environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("CONTAINERS_CONF", self.path("containers.conf"))
            .env("CONTAINERS_STORAGE_CONF", self.path("storage.conf"))
            .env("BUILDAH_ISOLATION", "chroot")
            .env("TMPDIR", self.path("tmp"))
    }
}

fn create(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(Error::io(format!("create {}", directory.display())))
}

fn lock(path: &Path) -> Result<Flock<fs::File>> {
    let file = fs::File::create(path).map_err(Error::io(format!("open {}", path.display())))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| Error::errno(format!("lock {}", path.display()))(errno))
}

/// Runs the command to its end; an error quotes the last lines of its output.
fn run_through(command: &mut Command) -> Result<()> {
    let what = format!("{command:?}");
    let output = command.output().map_err(Error::io(format!("start {what}")))?;
    if output.status.success() {
        return Ok(());
    }
    let all = [output.stdout, output.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    let lines: Vec<_> = all.lines().collect();
    Err(Error::Command {
        command: what,
        status: output.status.to_string(),
        output: lines[lines.len().saturating_sub(20)..].join("\n"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_of_machine_maps_to_archive_suite() {
        assert_eq!(release("ID=debian\nVERSION_CODENAME=bookworm\n").unwrap(), "bookworm");
        assert_eq!(release("VERSION_CODENAME=\"noble\"\nID=ubuntu\n").unwrap(), "noble");
        for other in ["", "ID=fedora\nVERSION_CODENAME=\"\"\n", "ID=debian\n"] {
            let error = release(other).unwrap_err().to_string();
            assert!(error.contains(BASE), "{error}");
        }
    }
}
