//! The steps of a pass that write the firewall table and the routes.

use std::time::Instant;

use clustermesh_agent_core::{compile::Compiled, routes::Change};

use super::Reconciler;
use crate::{
    firewall::Backend,
    route::{self, Routing},
    status::Trouble,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Brings the firewall table to what is wanted.
    pub(super) async fn enforce(&mut self, compiled: &Compiled, troubles: &mut Vec<Trouble>) -> Result<(), Trouble> {
        let device = self.device.as_mut().map(|(device, ..)| device);
        let enforced = self
            .guard
            .enforce(&mut self.parts.firewall, device, compiled, Instant::now())
            .await;
        self.left();
        let enforced = enforced?;
        if self.drift.filtered(&compiled.firewall, enforced.written) {
            self.parts.metrics.repaired("firewall", 1);
        }
        if enforced.written {
            self.parts.metrics.applied("firewall", 1);
            tracing::info!("firewall table written");
        }
        troubles.extend(enforced.why.map(|why| {
            Trouble::new(
                "firewall",
                format!("peers that require a policy stay out of the device: {why}"),
            )
        }));
        Ok(())
    }

    /// What routing and the kernel's settings have to hold before a sandbox's peer is in the device; without it none is. Returns
    /// what was changed.
    pub(super) async fn lock(
        &mut self,
        compiled: &Compiled,
        settings: &route::sysctl::Pass,
    ) -> (Vec<Change>, Option<Trouble>) {
        if self.device.is_none() {
            return (Vec::new(), None); // nobody is in it
        }
        let (done, failed) = match route::converge_lock(&mut self.parts.routing, &compiled.routes).await {
            Ok(pass) => (pass.done, pass.failed.into_iter().next()),
            Err(error) => (Vec::new(), Some(error)),
        };
        let setting = settings.missing.iter().find(|missing| missing.sysctl.locks);
        let failed = failed.map(|error| Trouble::new("routes", error));
        let failed = failed.or(setting.map(|missing| Trouble::new("sysctl", missing)));
        let open = failed.map(|Trouble { part, message, .. }| {
            self.guard.refuse();
            Trouble::new(
                part,
                format!("peers that require a policy stay out of the device: {message}"),
            )
        });
        (done, open)
    }

    /// Returns the changes that could not be made as troubles; the others are made. `locked` were made before.
    pub(super) async fn apply_routes(
        &mut self,
        compiled: &Compiled,
        locked: Vec<Change>,
    ) -> Result<Vec<Trouble>, Trouble> {
        let routing = &mut self.parts.routing;
        let pass = match self.device {
            Some(_) => route::converge(routing, &compiled.routes).await,
            None => route::converge_without_device(routing, &compiled.routes).await,
        };
        let mut pass = pass.map_err(|e| Trouble::new("routes", e))?;
        pass.done.splice(0..0, locked);
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
