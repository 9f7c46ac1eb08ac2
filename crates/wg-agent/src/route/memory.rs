//! Routing that only remembers: for tests of what stands above it.

use std::io;

use clustermesh_agent_core::routes::{Change, Routes};

use super::{Error, Routing};

/// Keeps the routes it is given.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// What is there.
    pub routes: Routes,
    /// Changes made, in order.
    pub log: Vec<Change>,
    /// Changes whose text holds one of these fail, as if someone else had their place.
    pub refuse: Vec<String>,
}

impl Routing for Memory {
    async fn observe(&mut self) -> Result<Routes, Error> {
        Ok(self.routes.clone())
    }

    async fn apply(&mut self, change: &Change) -> Result<(), Error> {
        let text = change.to_string();
        if self.refuse.iter().any(|part| text.contains(part)) {
            let source = io::Error::from(rustix::io::Errno::EXIST);
            return Err(Error::Change {
                change: Box::new(change.clone()),
                source,
            });
        }
        self.routes.step(change);
        self.log.push(change.clone());
        Ok(())
    }
}
