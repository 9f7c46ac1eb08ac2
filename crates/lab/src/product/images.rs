//! Builds the product's images as docker archives with `cargo xtask images` and buildah. Their base image consists of
//! Debian packages, because the lab uses no registry. The product's images are rebuilt only when an input
//! has changed.

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
/// Packages of the base image: the programs that the Containerfiles run, libgcc and nft. libc6 comes as their dependency.
const PACKAGES: &str = "dash,coreutils,grep,libgcc-s1,nftables";
/// Environment variable that replaces the base image, for machines that run neither Debian nor Ubuntu.
const BASE: &str = "CLUSTERMESH_IMAGE_BASE";

/// Docker archives of both images. This value holds a lock, so that no other process rebuilds them.
#[derive(Debug)]
pub struct ProductImages {
    /// The image of wg-agent.
    pub agent: PathBuf,
    /// The image of clustermesh-controller.
    pub controller: PathBuf,
    _lock: Flock<fs::File>,
}

impl ProductImages {
    /// Builds the images from the programs of the workspace, if an input has changed.
    ///
    /// # Errors
    /// When a program is missing, or `cargo xtask images` fails.
    pub fn ensure(progress: &dyn Fn(&str)) -> Result<Self> {
        let [agent, controller] = PROGRAMS.map(run::workspace_program);
        let programs = [agent?, controller?];
        let base = base(progress)?;
        let directory = programs[0].with_file_name("images");
        create(&directory)?;
        let images = Self {
            agent: directory.join("wg-agent.tar"),
            controller: directory.join("clustermesh-controller.tar"),
            _lock: lock(&directory.join("lock"))?,
        };
        let (key, key_file) = (key(&programs, &base)?, directory.join("key"));
        if fs::read_to_string(&key_file).is_ok_and(|made| made == key) {
            return Ok(images);
        }
        progress("building the images");
        let _ = fs::remove_file(&key_file);
        let stripped = Scratch::new(directory.join("programs"))?;
        for program in &programs {
            // Without debug symbols the images are much smaller.
            let to = stripped.path(&program.file_name().unwrap_or_default().to_string_lossy());
            run_command(Command::new("strip").arg("-o").arg(to).arg(program))?;
        }
        build(&stripped.0, &base, &directory)?;
        fs::write(&key_file, key).map_err(Error::io(format!("write {}", key_file.display())))?;
        Ok(images)
    }

    /// Runs `cargo xtask images` with the programs in a directory, and writes both archives into `output`.
    ///
    /// # Errors
    /// When the command fails. The error quotes its output.
    pub fn build(programs: &Path, output: &Path, progress: &dyn Fn(&str)) -> Result<()> {
        build(programs, &base(progress)?, output)
    }
}

fn base(progress: &dyn Fn(&str)) -> Result<String> {
    match std::env::var(BASE) {
        Ok(base) => Ok(base),
        Err(_) => Ok(format!("docker-archive:{}", debian_base(progress)?.display())),
    }
}

/// A key of the images' inputs: the base's name, the size and modification time of the programs, and the text of the Containerfiles.
fn key(programs: &[PathBuf; 2], base: &str) -> Result<String> {
    let mut key = format!("{base}\n");
    for program in programs.iter().chain([&run::workspace_program("xtask")?]) {
        let metadata = fs::metadata(program).map_err(Error::io(format!("read {}", program.display())))?;
        let (size, seconds, nanoseconds) = (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
        key += &format!("{} {size} {seconds}.{nanoseconds}\n", program.display());
    }
    for file in ["deploy/Containerfile.agent", "deploy/Containerfile.controller"] {
        key += &super::repository_file(file)?;
    }
    Ok(key)
}

fn build(programs: &Path, base: &str, output: &Path) -> Result<()> {
    let scratch = Scratch::new(output.join("unfinished"))?;
    scratch.write_settings()?;
    let mut images = Command::new(run::workspace_program("xtask")?);
    // Errors quote only the last lines of the output, which a backtrace would fill.
    images.env("RUST_BACKTRACE", "0");
    images
        .args(["images", "--builder=buildah"])
        .arg(format!("--base={base}"));
    images.arg("--programs").arg(programs).arg("--output").arg(output);
    run_command(scratch.environment(&mut images))
}

/// Creates the base image as a docker archive, from packages of the machine's own release. So its libc is not older than
/// the machine's libc, with which our programs are linked.
fn debian_base(progress: &dyn Fn(&str)) -> Result<PathBuf> {
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
    progress("building the base image from Debian's packages, once");
    let scratch = Scratch::new(home.join("image-base.unfinished"))?;
    scratch.write_settings()?;
    let (system, unfinished) = (scratch.path("system.tar"), scratch.path("base.tar"));
    let mut bootstrap = Command::new("mmdebstrap");
    // `extract` unpacks the packages without configuring them. That is enough for the programs that the Containerfiles and the
    // images run.
    bootstrap.args(["--variant=extract", "--mode=root", "--quiet"]);
    bootstrap
        .arg(format!("--include={PACKAGES}"))
        .arg(&release)
        .arg(&system);
    run_command(scratch.environment(&mut bootstrap))?;
    let context = scratch.path("context");
    create(&context)?;
    fs::write(context.join("Containerfile"), "FROM scratch\nADD system.tar /\n")
        .and_then(|()| fs::rename(&system, context.join("system.tar")))
        .map_err(Error::io("write the build context of the base"))?;
    let mut buildah = Command::new("buildah");
    let name = format!("docker-archive:{}:lab.local/base:1", unfinished.display());
    buildah.args(["build", "--quiet", "--tag", &name]).arg(&context);
    run_command(scratch.environment(&mut buildah))?;
    fs::rename(&unfinished, &archive).map_err(Error::io(format!("rename to {}", archive.display())))?;
    Ok(archive)
}

/// The suite of Debian's or Ubuntu's archive (such as `bookworm`) for the machine's release.
fn release(os_release: &str) -> Result<String> {
    let value = |key: &str| {
        let line = os_release.lines().find_map(|line| line.strip_prefix(key));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    let known = matches!(value("ID=").as_deref(), Some("debian" | "ubuntu"));
    value("VERSION_CODENAME=").filter(|_| known).ok_or_else(|| Error::Missing {
        what: "a release of Debian or Ubuntu, from which the images get their libraries,".into(),
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

    /// Writes settings with which buildah keeps its images and temporary files in this directory, not in
    /// those of the user.
    fn write_settings(&self) -> Result<()> {
        let text = format!(
            "[storage]\ndriver = \"vfs\"\ngraphroot = \"{}\"\nrunroot = \"{}\"\n",
            self.path("store").display(),
            self.path("run").display()
        );
        fs::write(self.path("storage.conf"), text).map_err(Error::io("write storage.conf"))?;
        // buildah creates its directory for networks, with a lock, even if it uses no network. It must not be the user's either.
        let text = format!("[network]\nnetwork_config_dir = \"{}\"\n", self.path("net.d").display());
        fs::write(self.path("containers.conf"), text).map_err(Error::io("write containers.conf"))?;
        create(&self.path("tmp"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Sets the environment of a command that runs buildah or writes temporary files. The isolation `chroot` needs no runtime, user
    /// namespace or cgroup.
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

/// Runs a command. An error quotes the last lines of its output.
fn run_command(command: &mut Command) -> Result<()> {
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
