//! Reports that this node may have changed: its routing, its nftables (netlink notifications) or its resolver file
//! (polled).

use std::{path::PathBuf, time::Duration};

use clustermesh_agent_core::interface::InterfaceName;

use crate::{firewall, route, source::resolv};

/// What may have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The agent's routes and rules, or the node's own network.
    Routing(route::RoutingEvent),
    /// Any nftables table, not only the agent's table.
    Nftables,
    /// The name servers in the resolver file.
    Resolvers,
    /// A subscription ended, so anything may have changed.
    Unknown,
}

impl Event {
    /// How long to wait for further events before a pass. One change causes several events, and the agent's own writes
    /// cause events, too. Programs that write nftables often do so in bursts.
    pub(crate) const fn settle_time(self) -> Duration {
        match self {
            Self::Nftables => Duration::from_millis(300),
            Self::Routing(_) | Self::Resolvers | Self::Unknown => Duration::from_millis(100),
        }
    }
}

/// Subscriptions to events of the network namespace in which they were opened, and the poll of the resolver file.
pub(crate) struct KernelEvents {
    interface: InterfaceName,
    routes: Option<route::Watch>,
    nftables: Option<firewall::Watch>,
    resolvers: resolv::Watch,
}

impl KernelEvents {
    /// Opens all subscriptions; one that fails is logged and left out. Must be called inside a tokio runtime.
    pub(crate) fn open(interface: &InterfaceName, resolvers: PathBuf) -> Self {
        let log = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "cannot subscribe to changes of this node; polling it instead");
        };
        Self {
            interface: interface.clone(),
            routes: route::Watch::open(interface.clone()).inspect_err(|e| log(e)).ok(),
            nftables: firewall::Watch::open().inspect_err(|e| log(e)).ok(),
            resolvers: resolv::Watch::new(resolvers),
        }
    }

    /// Whether the subscription to routing changes works.
    pub(crate) const fn reports_routing(&self) -> bool {
        self.routes.is_some()
    }

    /// Waits for the next event. If a subscription ends, opens all of them again and returns [`Event::Unknown`]. Safe to cancel.
    pub(crate) async fn changed(&mut self) -> Event {
        let routes = async {
            match &mut self.routes {
                Some(watch) => watch.changed().await.map(Event::Routing),
                None => std::future::pending().await,
            }
        };
        let nftables = async {
            match &mut self.nftables {
                Some(watch) => watch.changed().await.map(|()| Event::Nftables),
                None => std::future::pending().await,
            }
        };
        let resolvers = async {
            self.resolvers.changed().await;
            Ok(Event::Resolvers)
        };
        let event = tokio::select! {
            event = routes => event,
            event = nftables => event,
            event = resolvers => event,
        };
        event.unwrap_or_else(|error: clustermesh_netlink::Error| {
            tracing::warn!(%error, "a subscription to changes of this node ended; opening all of them again");
            self.routes = route::Watch::open(self.interface.clone()).ok();
            self.nftables = firewall::Watch::open().ok();
            Event::Unknown
        })
    }
}
