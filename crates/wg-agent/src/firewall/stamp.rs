//! By what an agent knows the table that an earlier process of it left, so that a start writes nothing where nothing has
//! changed: a digest, in a file beside the cache, of what was asked for and of how that read afterwards.
//!
//! A table that is written whole drops what is on its way through it at that moment: a packet that began under the old rules
//! looks into sets whose elements end with them.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use clustermesh_agent_core::firewall::{Firewall, render};
use sha2::{Digest, Sha256};

use super::Listing;

/// The file. One that is lost, damaged or of another version costs a write of the whole table, as if there were none.
#[derive(Debug)]
pub struct Stamp(PathBuf);

impl Stamp {
    /// Beside the cache: `FILE.table`.
    #[must_use]
    pub fn beside(cache: &Path) -> Self {
        let mut name = OsString::from(cache);
        name.push(".table");
        Self(name.into())
    }

    /// Whether `listing` is how `firewall` read when it was written last, and nothing was written since.
    pub(super) fn knows(&self, firewall: &Firewall, listing: &Listing) -> bool {
        fs::read_to_string(&self.0).is_ok_and(|text| text == digest(firewall, listing))
    }

    /// Remembers what was written and how it reads; `None` = nobody knows.
    pub(super) fn set(&self, written: Option<&(Firewall, Listing)>) {
        let done = match written {
            Some((firewall, listing)) => fs::write(&self.0, digest(firewall, listing)),
            None => self.remove(),
        };
        if let Err(error) = done {
            tracing::info!(file = %self.0.display(), %error, "cannot remember the firewall table; the next start writes it whole");
        }
    }

    /// Takes the file away; none there is no error.
    ///
    /// # Errors
    /// The file system's.
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
