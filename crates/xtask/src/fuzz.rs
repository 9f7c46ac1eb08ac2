//! `cargo xtask fuzz`: runs the fuzz targets (fuzz/) with a pinned cargo-fuzz. The code of the targets is in fuzz/src.
//!
//! It uses the stable compiler, which can instrument coverage for libFuzzer; only sanitizers need nightly. Sanitizers are for `unsafe`
//! code, and our fuzzed code has none. The targets find panics, overflows and failed assertions.

use std::{fs, path::PathBuf};

use anyhow::{Context, bail};

use xtask::programs::{from_crates_io, root, run_command};

const VERSION: &str = "0.13.2";

/// Arguments of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The targets (fuzz/targets), which run one after the other. Default: all targets.
    targets: Vec<String>,
    /// Duration for each target, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Add the smallest inputs that increase coverage to the corpus (fuzz/corpus), which `cargo xtask test` replays.
    #[arg(long)]
    keep: bool,
}

/// Runs the targets. Fails at the first failing input; libFuzzer prints the name of the file that contains this input.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args { targets, seconds, keep } = args;
    let all = all_targets()?;
    if let Some(unknown) = targets.iter().find(|target| !all.contains(target)) {
        bail!("there is no fuzz target {unknown:?}; there are {}", all.join(", "));
    }
    let fuzz = from_crates_io("cargo-fuzz", VERSION, "cargo-fuzz")?;
    let directory = root().join("fuzz");
    let libfuzzer = |target: &str, directories: [&str; 2], options: &[String]| {
        let mut command = std::process::Command::new(&fuzz);
        command
            .current_dir(&directory)
            .env("CARGO", env!("CARGO"))
            // The options of our release profile make builds slow.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_STRIP", "none")
            .args(["fuzz", "run", "--fuzz-dir", ".", "--sanitizer", "none", target]);
        // libFuzzer reads inputs from both directories and writes new ones into the first.
        command.args(directories.map(|directory| format!("{directory}/{target}")));
        command.arg("--").args(options);
        run_command(&mut command)
    };
    for target in if targets.is_empty() { &all } else { targets } {
        let found = directory.join("found").join(target);
        fs::create_dir_all(&found).with_context(|| format!("create {}", found.display()))?;
        let options = [format!("-max_total_time={seconds}"), "-print_final_stats=1".to_owned()];
        libfuzzer(target, ["found", "corpus"], &options)?;
        if *keep {
            libfuzzer(target, ["corpus", "found"], &["-merge=1".to_owned()])?;
        }
    }
    Ok(())
}

/// The names of all targets, sorted.
fn all_targets() -> anyhow::Result<Vec<String>> {
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
