//! The steps of a pass that write the firewall table and the routes.

use clustermesh_agent_core::compile::Compiled;

use super::Reconciler;
use crate::{
    firewall::Backend,
    route::{self, Routing},
    status::Trouble,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Brings the firewall table to what is wanted.
    pub(super) async fn enforce(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let done = self.parts.firewall.converge(&compiled.firewall).await;
        let written = done.map_err(|error| Trouble::new("firewall", error))?.is_some();
        if self.drift.filtered(&compiled.firewall, written) {
            self.parts.metrics.repaired("firewall", 1);
        }
        if written {
            self.parts.metrics.applied("firewall", 1);
            tracing::info!("firewall table written");
        }
        Ok(())
    }

    /// Returns the changes that could not be made as troubles; the others are made.
    pub(super) async fn apply_routes(&mut self, compiled: &Compiled) -> Result<Vec<Trouble>, Trouble> {
        let routing = &mut self.parts.routing;
        let pass = match self.device {
            Some(_) => route::converge(routing, &compiled.routes).await,
            None => route::converge_without_device(routing, &compiled.routes).await,
        };
        let pass = pass.map_err(|e| Trouble::new("routes", e))?;
        for change in &pass.done {
            tracing::info!("{change}");
        }
        self.parts.metrics.applied("routes", pass.done.len());
        let put_back = self.drift.routed(&compiled.routes, &pass.done, pass.failed.is_empty());
        self.parts.metrics.repaired("routes", put_back);
        if pass
            .failed
            .iter()
            .any(|error| matches!(error, route::Error::NoDevice(_)))
        {
            // Someone deleted the interface under us: the next pass makes it again.
            self.device = None;
        }
        Ok(pass.failed.iter().map(|error| Trouble::new("routes", error)).collect())
    }
}
