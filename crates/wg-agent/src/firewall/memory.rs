//! A firewall backend in memory, for tests.

use super::{Backend, Error, Listing};

/// A table that is stored as the scripts that wrote it.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// The scripts since the table was last replaced; empty = there is no table.
    pub scripts: Vec<String>,
    /// A script that contains one of these texts fails. If one of them is `destroy`, [`Backend::destroy`] fails, too.
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
        if self.refuse.iter().any(|part| part == "destroy") {
            return Err(Error::Refused {
                what: "the deletion",
                stderr: "refused by the test".to_owned(),
            });
        }
        self.scripts.clear();
        Ok(())
    }
}
