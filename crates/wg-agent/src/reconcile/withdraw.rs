//! Hands the node over to kg: removes what this agent wrote there.

use clustermesh_agent_core::routes::Routes;
use clustermesh_api::names::NODE_AGENT;

use super::{Kernel, Reconciler};
use crate::{
    device::userspace::Userspace,
    firewall::Backend,
    publish::DesiredAnnotations,
    route::{self, Routing},
    source::objects::ParsedNode,
    status::Trouble,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Removes rules, routes, the firewall table, a userspace device, and this agent's annotation, including those of
    /// an earlier process. Each pass tries again until all of it is gone.
    pub(super) async fn withdraw(&mut self, own: &ParsedNode) -> Result<(), Trouble> {
        if self.kg.is_withdrawn {
            return Ok(());
        }
        let trouble = |error: String| {
            let message =
                format!("kg (Kilo) serves this node, and wg-agent's own state could not be removed from it: {error}");
            Trouble::new("kg", message)
        };
        let Kernel { routing, firewall, .. } = &mut self.deps.kernel;
        let standing = routing.observe().await.map_err(|error| trouble(error.to_string()))?;
        // The table alone, without routes, is that of policy mode. It must stay while an agent of that mode is
        // replaced.
        let is_full_mode = !standing.routes.is_empty() || !standing.rules.is_empty() || firewall.has_written();
        // By now the interface's addresses belong to kg.
        let addresses_only = Routes {
            addresses: standing.addresses,
            ..Routes::default()
        };
        let pass = route::converge(routing, &addresses_only).await;
        let pass = pass.map_err(|error| trouble(error.to_string()))?;
        if let Some(error) = pass.failed.first() {
            return Err(trouble(error.to_string()));
        }
        // kg reconfigures a kernel device as it finds it.
        if let Some(open) = self.device.open.take()
            && open.device.backend() == Userspace::BACKEND
        {
            open.device.close().map_err(|error| trouble(error.to_string()))?;
        }
        if is_full_mode {
            let gone = firewall.destroy().await;
            gone.map_err(|error| trouble(error.to_string()))?;
            tracing::warn!("kg (Kilo) serves this node: rules, routes and firewall of wg-agent are removed");
        }
        self.applied = None;
        let published = own.own.clone().unwrap_or_default().published;
        self.deps.publish.send_replace(DesiredAnnotations {
            status: [(NODE_AGENT, None)].into(),
            seen: published,
            ..DesiredAnnotations::default()
        });
        self.kg.is_withdrawn = true;
        Ok(())
    }
}
