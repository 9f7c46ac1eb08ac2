//! The parts of a pass that write the firewall table and the routes.

use clustermesh_agent_core::compile::Compiled;

use super::Reconciler;
use crate::{
    firewall::Backend,
    route::{self, Routing},
    status::Trouble,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Writes the compiled firewall table if the kernel's table differs.
    pub(super) async fn apply_firewall(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let done = self.deps.kernel.firewall.converge(&compiled.firewall).await;
        let written = done.map_err(|error| Trouble::new("firewall", error))?.is_some();
        let repaired = self.repair_counter.count_firewall_repairs(&compiled.firewall, written);
        if written {
            let metrics = &self.deps.report.metrics;
            metrics.count_repairs("firewall", repaired);
            metrics.count_changes("firewall", 1);
            tracing::info!("firewall table written");
        }
        Ok(())
    }

    /// Changes the kernel's routes to the compiled ones. If the device is not open, changes that would add a route or address to the
    /// device are left out. Returns one trouble for each failed change. An error means that nothing was changed.
    pub(super) async fn apply_routes(&mut self, compiled: &Compiled) -> Result<Vec<Trouble>, Trouble> {
        let routing = &mut self.deps.kernel.routing;
        let foreign = routing.foreign_rules().await.map_err(|e| Trouble::new("routes", e))?;
        let desired = compiled.routes.clone().before_foreign_rules(&foreign);
        let outcome = match self.device.open {
            Some(_) => route::converge(routing, &desired).await,
            None => route::converge_without_device(routing, &desired).await,
        };
        let outcome = outcome.map_err(|e| Trouble::new("routes", e))?;
        for change in &outcome.done {
            tracing::info!("{change}");
        }
        let is_complete = outcome.failed.is_empty() && self.device.open.is_some();
        let repaired = self
            .repair_counter
            .count_route_repairs(&desired, &outcome.done, is_complete);
        let metrics = &self.deps.report.metrics;
        metrics.count_changes("routes", outcome.done.len());
        metrics.count_repairs("routes", repaired);
        if outcome
            .failed
            .iter()
            .any(|error| matches!(error, route::Error::NoDevice(_)))
        {
            self.close_failed_device();
        }
        Ok(outcome
            .failed
            .iter()
            .map(|error| Trouble::new("routes", error))
            .collect())
    }
}
