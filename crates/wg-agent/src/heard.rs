//! What others did to this node, from every place that tells: the kernel's routing, its nftables, the resolvers' file. What
//! is done about it is `run`'s and the reconciler's business.

use std::{path::PathBuf, time::Duration};

use clustermesh_agent_core::interface::InterfaceName;

use crate::{firewall, route, source::resolv};

/// What may be different.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Routing, ours or the node's.
    Routing(route::News),
    /// Some table of nftables.
    Tables,
    /// The list of name servers.
    Resolvers,
    /// Nobody knows: a place that told has ended.
    Anything,
}

impl Event {
    /// How long to wait for more of the same before looking. One change makes several events, and our own writes are heard as
    /// well. Programs that write nftables do it often, and the kernel cannot say whose table it was.
    pub(crate) const fn settle(self) -> Duration {
        match self {
            Self::Tables => Duration::from_millis(300),
            Self::Routing(_) | Self::Resolvers | Self::Anything => Duration::from_millis(100),
        }
    }
}

/// Listens in the network namespace in which it was opened.
pub(crate) struct Heard {
    interface: InterfaceName,
    routes: Option<route::Watch>,
    tables: Option<firewall::Watch>,
    resolvers: resolv::Watch,
}

impl Heard {
    /// Opens what can be opened; what cannot is said in the log. Must be called inside a tokio runtime.
    pub(crate) fn open(interface: &InterfaceName, resolvers: PathBuf) -> Self {
        let log = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "cannot hear of changes to this node; looking at it now and then instead");
        };
        Self {
            interface: interface.clone(),
            routes: route::Watch::open(interface.clone()).inspect_err(|e| log(e)).ok(),
            tables: firewall::Watch::open().inspect_err(|e| log(e)).ok(),
            resolvers: resolv::Watch::new(resolvers),
        }
    }

    /// Whether the node's routing tells of its changes.
    pub(crate) const fn of_routing(&self) -> bool {
        self.routes.is_some()
    }

    /// Waits for the next. Safe to cancel.
    pub(crate) async fn changed(&mut self) -> Event {
        let routes = async {
            match &mut self.routes {
                Some(watch) => watch.changed().await.map(Event::Routing),
                None => std::future::pending().await,
            }
        };
        let tables = async {
            match &mut self.tables {
                Some(watch) => watch.changed().await.map(|()| Event::Tables),
                None => std::future::pending().await,
            }
        };
        let resolvers = async {
            self.resolvers.changed().await;
            Ok(Event::Resolvers)
        };
        let event = tokio::select! {
            event = routes => event,
            event = tables => event,
            event = resolvers => event,
        };
        event.unwrap_or_else(|error: std::io::Error| {
            tracing::warn!(%error, "hearing of changes to this node ended; it begins anew");
            self.routes = route::Watch::open(self.interface.clone()).ok();
            self.tables = firewall::Watch::open().ok();
            Event::Anything
        })
    }
}
