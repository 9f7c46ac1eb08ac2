//! `cargo xtask tools`: builds the lab's programs and puts them into its cache. The lab crate has the build steps.

use clustermesh_lab::{ArtefactSet, Tools, lab_home};

/// Builds what is missing in the cache, and reports progress on standard error. About 9 minutes on 2 cores with empty caches.
pub fn run() -> anyhow::Result<()> {
    eprintln!("tools: the cache is {}", lab_home()?.display());
    build(&ArtefactSet::ALL).map(drop)
}

/// Like [`run`], for some of the sets.
pub fn build(sets: &[ArtefactSet]) -> anyhow::Result<Tools> {
    Ok(Tools::ensure(sets, &|line| eprintln!("tools: {line}"))?)
}
