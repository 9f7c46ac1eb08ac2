//! `cargo xtask fuzz`: runs the fuzz targets (fuzz/) with a pinned cargo-fuzz. What they try is in fuzz/bodies.
//!
//! On the stable compiler: libFuzzer is told of coverage by a pass that stable has, and only the sanitizers want nightly. What is fuzzed has no
//! `unsafe` for those to watch; panics, overflows and failed assertions are what is looked for, and stable finds them all.

use std::{fs, path::PathBuf};

use anyhow::{Context, bail};

use crate::programs::{from_crates_io, root, show};

const VERSION: &str = "0.13.2";

/// What `cargo xtask fuzz` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The targets (fuzz/targets); all of them one after the other when none is named.
    targets: Vec<String>,
    /// How long each is tried.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Add the smallest inputs that reach what no kept one reaches to the kept ones (fuzz/corpus), which `cargo xtask test` tries.
    #[arg(long)]
    keep: bool,
}

/// Ends with an error at the first input that fails; its file is named above it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args { targets, seconds, keep } = args;
    let all = all()?;
    if let Some(unknown) = targets.iter().find(|target| !all.contains(target)) {
        bail!("there is no fuzz target {unknown:?}; there are {}", all.join(", "));
    }
    let fuzz = from_crates_io("cargo-fuzz", VERSION, "cargo-fuzz")?;
    let directory = root().join("fuzz");
    let libfuzzer = |target: &str, corpora: [&str; 2], words: &[String]| {
        let mut command = std::process::Command::new(&fuzz);
        command
            .current_dir(&directory)
            .env("CARGO", env!("CARGO"))
            // The profile that we release with takes its time to build.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_STRIP", "none")
            .args(["fuzz", "run", "--fuzz-dir", ".", "--sanitizer", "none", target]);
        command.args(corpora.map(|corpus| format!("{corpus}/{target}")));
        command.arg("--").args(words);
        show(&mut command)
    };
    for target in if targets.is_empty() { &all } else { targets } {
        let found = directory.join("found").join(target);
        fs::create_dir_all(&found).with_context(|| format!("create {}", found.display()))?;
        // What is new goes into the first.
        let words = [format!("-max_total_time={seconds}"), "-print_final_stats=1".to_owned()];
        libfuzzer(target, ["found", "corpus"], &words)?;
        if *keep {
            libfuzzer(target, ["corpus", "found"], &["-merge=1".to_owned()])?;
        }
    }
    Ok(())
}

/// The names of all targets, in order.
fn all() -> anyhow::Result<Vec<String>> {
    let directory: PathBuf = root().join("fuzz/targets");
    let files = fs::read_dir(&directory).with_context(|| format!("read {}", directory.display()))?;
    let mut names = Vec::new();
    for file in files {
        let path = file.with_context(|| format!("read {}", directory.display()))?.path();
        names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}
