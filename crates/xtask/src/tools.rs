//! `cargo xtask tools`: fills the lab's cache with everything it runs. The building itself is the lab's.

use clustermesh_lab::{ArtefactSet, Tools, lab_home};

/// Builds what is not in the cache, with progress on standard error. About 9 minutes on 2 cores with empty caches.
pub(crate) fn run() -> anyhow::Result<()> {
    eprintln!("tools: the cache is {}", lab_home()?.display());
    build(&ArtefactSet::ALL).map(drop)
}

/// As [`run`], for some of the sets.
pub(crate) fn build(sets: &[ArtefactSet]) -> anyhow::Result<Tools> {
    Ok(Tools::ensure(sets, &|line| eprintln!("tools: {line}"))?)
}
