//! A table that is only remembered: for tests of what stands above it.

use super::{Backend, Error, Listing};

/// Keeps the scripts that made the table what it is.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// The scripts since the table was last written whole; empty = there is no table.
    pub scripts: Vec<String>,
    /// Scripts that hold one of these are refused.
    pub refuse: Vec<String>,
}

impl Backend for Memory {
    async fn observe(&mut self) -> Result<Option<Listing>, Error> {
        Ok((!self.scripts.is_empty()).then(|| Listing(self.scripts.clone().into())))
    }

    async fn run(&mut self, script: &str) -> Result<(), Error> {
        if self.refuse.iter().any(|part| script.contains(part)) {
            return Err(Error::Refused {
                what: "the transaction",
                stderr: "refused by the test".to_owned(),
            });
        }
        if script.contains("delete table") {
            self.scripts.clear();
        }
        self.scripts.push(script.to_owned());
        Ok(())
    }

    async fn destroy(&mut self) -> Result<(), Error> {
        self.scripts.clear();
        Ok(())
    }
}
