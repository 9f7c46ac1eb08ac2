//! Records, in a file next to the agent's cache, a digest of the desired table and of the kernel's listing after the write.
//! If the digest still matches, the next process does not write the table again.
//!
//! This avoids lost packets: replacing a whole table drops packets that traverse it at that moment, because the old rules
//! look up sets that are already empty.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use clustermesh_agent_core::firewall::{Firewall, render};
use sha2::{Digest, Sha256};

use super::Listing;

/// The record file. If it is missing, damaged or outdated, the whole table is written once.
#[derive(Debug)]
pub struct TableRecord(PathBuf);

impl TableRecord {
    /// The record for this cache file: its path with the suffix `.table`.
    #[must_use]
    pub fn next_to_cache(cache: &Path) -> Self {
        let mut name = OsString::from(cache);
        name.push(".table");
        Self(name.into())
    }

    /// Whether the record is for `firewall` and `listing`: the table was written as `firewall` and not changed since.
    pub(super) fn matches(&self, firewall: &Firewall, listing: &Listing) -> bool {
        fs::read_to_string(&self.0).is_ok_and(|text| text == digest(firewall, listing))
    }

    /// Records the written table and its listing; `None` = unknown, which removes the record.
    pub(super) fn set(&self, written: Option<&(Firewall, Listing)>) {
        let done = match written {
            Some((firewall, listing)) => fs::write(&self.0, digest(firewall, listing)),
            None => self.remove(),
        };
        if let Err(error) = done {
            tracing::info!(file = %self.0.display(), %error, "cannot record the firewall table; the next start replaces the table");
        }
    }

    /// Removes the file; a missing file is no error.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

fn digest(firewall: &Firewall, listing: &Listing) -> String {
    let sum = Sha256::new()
        .chain_update(render(firewall))
        .chain_update([0])
        .chain_update(listing.json().to_string())
        .finalize();
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("clustermesh wg-agent table 1 {hex}\n")
}
