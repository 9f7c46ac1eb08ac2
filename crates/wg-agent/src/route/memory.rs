//! Routing in memory, for tests.

use std::io;

use clustermesh_agent_core::routes::{Change, Routes};

use super::{Error, Routing};

/// Stores the routes.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// The stored routes.
    pub routes: Routes,
    /// Changes made, in order.
    pub log: Vec<Change>,
    /// Changes whose text contains one of these fail, as if another program had a route with the same key.
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
