//! Routing in memory, for tests.

use std::collections::BTreeMap;

use clustermesh_agent_core::{
    prefixes::Family,
    routes::{Change, Routes},
};
use clustermesh_netlink::{Errno, Error as NetlinkError};

use super::{Error, Routing};

/// Stores addresses, routes and rules.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// The stored objects.
    pub routes: Routes,
    /// Changes made, in order.
    pub log: Vec<Change>,
    /// A change whose text contains one of these strings fails, as if another program had a route with the same key.
    pub refuse: Vec<String>,
}

impl Routing for Memory {
    async fn observe(&mut self) -> Result<Routes, Error> {
        Ok(self.routes.clone())
    }

    async fn foreign_rules(&mut self) -> Result<BTreeMap<Family, u32>, Error> {
        Ok(BTreeMap::new())
    }

    async fn apply(&mut self, change: &Change) -> Result<(), Error> {
        let text = change.to_string();
        if self.refuse.iter().any(|part| text.contains(part)) {
            let source = NetlinkError::Kernel {
                errno: Errno::EXIST,
                message: None,
            };
            return Err(Error::Change {
                change: Box::new(change.clone()),
                source,
            });
        }
        self.routes.apply(change);
        self.log.push(change.clone());
        Ok(())
    }
}
