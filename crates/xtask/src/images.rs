//! `cargo xtask images`: builds the images of wg-agent and of the controller. Each image is made from its program and a Containerfile
//! in `deploy/`, with podman, docker or buildah.
//! The demo and the tests on whole clusters also run this command.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;
use clap::ValueEnum;

use xtask::programs::{self, run_command};

/// The registry in the manifests.
const REGISTRY: &str = "ghcr.io/clustermesh-for-kilo";

/// Arguments of `cargo xtask images`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The registry, which is the first part of the images' names.
    #[arg(long, default_value = REGISTRY)]
    registry: String,
    /// The program that builds the images. Default: the first in this list that is installed.
    #[arg(long, value_enum)]
    builder: Option<Builder>,
    /// The image that provides libraries and nft, instead of the Debian image that the Containerfiles pin. It needs a libc at least
    /// as new as that of the machine on which the programs were built; sh, coreutils and grep; and nft or apt-get.
    #[arg(long)]
    base: Option<String>,
    /// A directory with both programs. Default: cargo builds them with the release profile.
    #[arg(long, value_name = "DIRECTORY")]
    programs: Option<PathBuf>,
    /// Also write each image into this directory as a docker archive: `wg-agent.tar`, `clustermesh-controller.tar`.
    #[arg(long, value_name = "DIRECTORY")]
    output: Option<PathBuf>,
}

/// A program that builds images. All three have the same command line for a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Builder {
    Podman,
    Docker,
    Buildah,
}

/// One of the images.
struct Image {
    program: &'static str,
    containerfile: &'static str,
}

const IMAGES: [Image; 2] = [
    Image {
        program: "wg-agent",
        containerfile: "deploy/Containerfile.agent",
    },
    Image {
        program: "clustermesh-controller",
        containerfile: "deploy/Containerfile.controller",
    },
];

/// Builds both images into the builder's own store and prints their names.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args {
        registry,
        builder,
        base,
        programs,
        output,
    } = args;
    let path = env::var_os("PATH").unwrap_or_default();
    let builder = builder.or_else(|| Builder::installed(&env::split_paths(&path).collect::<Vec<_>>()));
    let builder = builder.context(
        "no program that builds images is installed: install podman, docker or buildah (Debian, Ubuntu: buildah)",
    )?;
    let programs = match programs {
        Some(directory) => directory.clone(),
        None => programs::build_release(&IMAGES.each_ref().map(|image| image.program))?,
    };
    for image in &IMAGES {
        let name = image.name(registry);
        // The directory contains only the program, because the builder may send all files in it to a daemon.
        let context = tempfile::tempdir().context("create a directory for the build context")?;
        let from = programs.join(image.program);
        fs::copy(&from, context.path().join(image.program)).with_context(|| format!("copy {}", from.display()))?;
        run_command(&mut builder.build_command(image, &name, base.as_deref(), context.path()))?;
        if let Some(directory) = output {
            fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
            let archive = directory.join(format!("{}.tar", image.program));
            // Some builders append to an existing archive, others fail.
            if archive.exists() {
                fs::remove_file(&archive).with_context(|| format!("remove {}", archive.display()))?;
            }
            run_command(&mut builder.save_command(&name, &archive))?;
        }
        println!("images: built {name}");
    }
    Ok(())
}

impl Image {
    fn name(&self, registry: &str) -> String {
        let registry = registry.trim_end_matches('/');
        format!("{registry}/{}:v{}", self.program, env!("CARGO_PKG_VERSION"))
    }
}

impl Builder {
    fn name(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
            Self::Buildah => "buildah",
        }
    }

    fn installed(directories: &[PathBuf]) -> Option<Self> {
        let is_installed = |builder: &Self| directories.iter().any(|dir| dir.join(builder.name()).is_file());
        Self::value_variants().iter().copied().find(is_installed)
    }

    fn build_command(self, image: &Image, name: &str, base: Option<&str>, context: &Path) -> Command {
        let mut command = Command::new(self.name());
        command.args(["build", "--tag", name, "--file"]);
        command.arg(programs::root().join(image.containerfile));
        if let Some(base) = base {
            command.arg(format!("--build-arg=BASE={base}"));
        }
        command.arg(context);
        command
    }

    fn save_command(self, name: &str, archive: &Path) -> Command {
        let mut command = Command::new(self.name());
        match self {
            Self::Podman | Self::Docker => command.args(["save", "--output"]).arg(archive).arg(name),
            Self::Buildah => {
                command.args(["push", "--quiet", name]);
                command.arg(format!("docker-archive:{}:{name}", archive.display()))
            }
        };
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifests::{AGENT_IMAGE, CONTROLLER_IMAGE};

    #[test]
    fn default_names_are_those_of_the_manifests() {
        let names = IMAGES.map(|image| image.name(REGISTRY));
        assert_eq!(names, [AGENT_IMAGE, CONTROLLER_IMAGE]);
    }

    #[test]
    fn both_containerfiles_pin_the_same_base() {
        let bases = IMAGES.map(|image| {
            let path = programs::root().join(image.containerfile);
            let text = fs::read_to_string(path).expect("a Containerfile");
            let base = text.lines().find_map(|line| line.strip_prefix("ARG BASE="));
            base.expect("a default for BASE").to_owned()
        });
        assert_eq!(bases[0], bases[1]);
        let (_, digest) = bases[0].split_once("@sha256:").expect("a digest");
        assert_eq!(digest.len(), 64);
    }

    #[test]
    fn first_installed_builder_is_used() {
        let directory = tempfile::tempdir().expect("a directory");
        let directories = [PathBuf::from("/nowhere"), directory.path().to_owned()];
        assert_eq!(Builder::installed(&directories), None);
        for (name, builder) in [
            ("buildah", Builder::Buildah),
            ("docker", Builder::Docker),
            ("podman", Builder::Podman),
        ] {
            fs::write(directory.path().join(name), "").expect("a file");
            assert_eq!(Builder::installed(&directories), Some(builder));
        }
    }
}
