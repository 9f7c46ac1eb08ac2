//! Hands the node over to kg: removes what this agent wrote there, except what kg uses itself: a kernel device, the addresses
//! on the interface, and the annotations of the node's identity.

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
    /// Removes this agent's rules, routes and annotation, the userspace device that this process has open, and the firewall table, unless
    /// that may be the table of an agent in policy mode. Rules and routes of earlier processes are removed, too. Each pass tries again
    /// until everything is removed.
    pub(super) async fn withdraw(&mut self, own_node: &ParsedNode) -> Result<(), Trouble> {
        if self.kg.is_withdrawn {
            return Ok(());
        }
        let trouble = |error: String| {
            let message =
                format!("kg (Kilo) serves this node, and wg-agent's own state could not be removed from it: {error}");
            Trouble::new("kg", message)
        };
        let Kernel { routing, firewall, .. } = &mut self.deps.kernel;
        let observed = routing.observe().await.map_err(|error| trouble(error.to_string()))?;
        // An agent in policy mode writes a table, but no routes and rules. So if there are no routes and rules, and this process
        // neither wrote nor recognized the table, it may be the table of such an agent. Then the table stays, because that agent
        // may start again.
        let knows_table = firewall.knows_table();
        self.kg.must_remove_table |= !observed.routes.is_empty() || !observed.rules.is_empty() || knows_table;
        // kg already uses the interface's addresses, so only they stay.
        let addresses_only = Routes {
            addresses: observed.addresses,
            ..Routes::default()
        };
        let outcome = route::converge(routing, &addresses_only).await;
        let outcome = outcome.map_err(|error| trouble(error.to_string()))?;
        if let Some(error) = outcome.failed.first() {
            return Err(trouble(error.to_string()));
        }
        // A kernel device is not closed: kg takes it over and reconfigures it.
        if let Some(open) = self.device.open.take()
            && open.device.backend() == Userspace::BACKEND
        {
            open.device.close().map_err(|error| trouble(error.to_string()))?;
        }
        if self.kg.must_remove_table {
            let destroyed = firewall.destroy().await;
            destroyed.map_err(|error| trouble(error.to_string()))?;
            self.kg.must_remove_table = false;
            tracing::warn!("kg (Kilo) serves this node: rules, routes and firewall of wg-agent are removed");
        }
        self.applied = None;
        let published = own_node.own.clone().unwrap_or_default().published;
        self.deps.publish.send_replace(DesiredAnnotations {
            status: [(NODE_AGENT, None)].into(),
            seen: published,
            ..DesiredAnnotations::default()
        });
        self.kg.is_withdrawn = true;
        Ok(())
    }
}
