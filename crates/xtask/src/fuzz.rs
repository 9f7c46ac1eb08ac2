//! `cargo xtask fuzz`: runs the fuzz targets (fuzz/) with a pinned cargo-fuzz. The code of the targets is in fuzz/src.
//!
//! The stable compiler is enough: it can instrument coverage for libFuzzer, and only the sanitizers need nightly. The fuzzed code has no
//! `unsafe` for a sanitizer to check; the targets look for panics, overflows and failed assertions.

use std::{fs, path::PathBuf};

use anyhow::{Context, bail};

use xtask::programs::{from_crates_io, root, show};

const VERSION: &str = "0.13.2";

/// What `cargo xtask fuzz` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The targets (fuzz/targets); without any, all of them, one after the other.
    targets: Vec<String>,
    /// Duration for each target.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Add the smallest inputs that increase coverage to the corpus (fuzz/corpus), which `cargo xtask test` replays.
    #[arg(long)]
    keep: bool,
}

/// Fails at the first input that fails; libFuzzer prints the name of its file.
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
            // The release profile takes long to build.
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
        // libFuzzer writes new inputs into the first directory.
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
