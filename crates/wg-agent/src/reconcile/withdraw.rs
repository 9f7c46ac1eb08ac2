//! Gives the node back to kg: removes what this agent wrote there.

use clustermesh_agent_core::routes::Routes;
use clustermesh_api::names::NODE_AGENT;

use super::Reconciler;
use crate::{
    device::userspace::Userspace,
    firewall::Backend,
    publish::Wanted,
    route::{self, Routing},
    source::objects::NodeSeen,
    status::Trouble,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Removes rules, routes, the firewall table, the device where it is of no use to kg, and this agent's annotation; also what
    /// an earlier process left. Tried again with every pass until all of it is gone.
    pub(super) async fn withdraw(&mut self, own: &NodeSeen) -> Result<(), Trouble> {
        if self.withdrawn {
            return Ok(());
        }
        let trouble = |error: String| {
            let message = format!("kg (Kilo) serves this node, and what wg-agent wrote there is not gone: {error}");
            Trouble::new("kg", message)
        };
        let routing = &mut self.parts.routing;
        let standing = routing.observe().await.map_err(|error| trouble(error.to_string()))?;
        // The table of policy mode, which has no routes, is to stay while an agent of that mode is exchanged.
        let whole = !standing.routes.is_empty() || !standing.rules.is_empty() || self.parts.firewall.has_written();
        // Addresses on the interface are kg's by now.
        let bare = Routes {
            addresses: standing.addresses,
            ..Routes::default()
        };
        let pass = route::converge(routing, &bare).await;
        let pass = pass.map_err(|error| trouble(error.to_string()))?;
        if let Some(error) = pass.failed.first() {
            return Err(trouble(error.to_string()));
        }
        // A device of the kernel kg configures as it finds it.
        if let Some((device, ..)) = self.device.take()
            && device.backend() == Userspace::BACKEND
        {
            device.close().map_err(|error| trouble(error.to_string()))?;
        }
        if whole {
            let gone = self.parts.firewall.destroy().await;
            gone.map_err(|error| trouble(error.to_string()))?;
            tracing::warn!("kg (Kilo) serves this node: rules, routes and firewall of wg-agent are removed");
        }
        self.current = None;
        let published = own.own.clone().unwrap_or_default().published;
        self.parts.publish.send_replace(Wanted {
            status: [(NODE_AGENT, None)].into(),
            seen: published,
            ..Wanted::default()
        });
        self.withdrawn = true;
        Ok(())
    }
}
