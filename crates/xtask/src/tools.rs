//! `cargo xtask tools`: builds the programs of the lab into its cache. The lab crate implements the build steps.

use clustermesh_lab::{ArtefactSet, Tools, lab_home};

/// Builds the programs that are missing in the cache, and reports progress on standard error. With an empty cache, this takes about 11
/// minutes on 2 cores.
pub fn run() -> anyhow::Result<()> {
    eprintln!("tools: the cache is {}", lab_home()?.display());
    build(&ArtefactSet::ALL).map(drop)
}

/// Builds those of `sets` that are missing in the cache, and returns the programs of all `sets`.
pub fn build(sets: &[ArtefactSet]) -> anyhow::Result<Tools> {
    Ok(Tools::ensure(sets, &|line| eprintln!("tools: {line}"))?)
}
