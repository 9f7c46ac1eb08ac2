//! Tells that the kernel's routing may have changed under us; what changed is for `observe` and `diff` to say.

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::{PROTOCOL, TABLE, TABLE_TUNNEL},
};
use futures::{StreamExt, channel::mpsc::UnboundedReceiver};
use rtnetlink::{
    MulticastGroup,
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressMessage, AddressScope},
        link::{LinkAttribute, LinkMessage},
        route::{RouteAttribute, RouteMessage, RouteProtocol},
        rule::{RuleAttribute, RuleMessage},
    },
    sys::SocketAddr,
};

use super::Error;

/// Events of the network namespace whose thread called [`Watch::open`], those that concern us.
#[derive(Debug)]
pub struct Watch {
    device: InterfaceName,
    messages: UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>,
    connection: tokio::task::JoinHandle<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Watch {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(device: InterfaceName) -> Result<Self, Error> {
        use MulticastGroup::{Ipv4Ifaddr, Ipv4Route, Ipv4Rule, Ipv6Ifaddr, Ipv6Route, Ipv6Rule, Link};
        let groups = [Link, Ipv4Ifaddr, Ipv4Route, Ipv4Rule, Ipv6Ifaddr, Ipv6Route, Ipv6Rule];
        let (connection, _, messages) = rtnetlink::new_multicast_connection(&groups).map_err(Error::Open)?;
        Ok(Self {
            device,
            messages,
            connection: tokio::spawn(connection),
        })
    }

    /// Waits for the next event that may concern us. Our own changes make events too: a pass over them finds nothing to
    /// do. `false` = the kernel dropped the socket; open another and look at everything. Safe to cancel.
    pub async fn changed(&mut self) -> bool {
        loop {
            let Some((message, _)) = self.messages.next().await else {
                return false;
            };
            if self.concerns_us(&message.payload) {
                while self.messages.try_recv().is_ok() {} // what came with it is seen by the same look
                return true;
            }
        }
    }

    fn concerns_us(&self, payload: &NetlinkPayload<RouteNetlinkMessage>) -> bool {
        use RouteNetlinkMessage as M;
        match payload {
            NetlinkPayload::InnerMessage(M::NewLink(link) | M::DelLink(link)) => self.is_device(link),
            NetlinkPayload::InnerMessage(M::NewRoute(route) | M::DelRoute(route)) => is_our_table(route),
            NetlinkPayload::InnerMessage(M::NewRule(rule) | M::DelRule(rule)) => is_our_rule(rule),
            NetlinkPayload::InnerMessage(M::NewAddress(address) | M::DelAddress(address)) => is_like_ours(address),
            // Overrun (ENOBUFS): events were lost, so look.
            NetlinkPayload::Error(_) | NetlinkPayload::Overrun(_) => true,
            _ => false,
        }
    }

    fn is_device(&self, link: &LinkMessage) -> bool {
        link.attributes
            .iter()
            .any(|a| matches!(a, LinkAttribute::IfName(name) if name == self.device.as_str()))
    }
}

fn is_our_table(route: &RouteMessage) -> bool {
    let table = |a: &RouteAttribute| matches!(a, RouteAttribute::Table(TABLE | TABLE_TUNNEL));
    route.attributes.iter().any(table)
}

/// On whatever interface: ours may have had another index. The link-local addresses of each new pod's interface are not.
fn is_like_ours(address: &AddressMessage) -> bool {
    address.header.scope == AddressScope::Universe && matches!(address.header.prefix_len, 32 | 128)
}

fn is_our_rule(rule: &RuleMessage) -> bool {
    let ours = RouteProtocol::from(PROTOCOL);
    rule.attributes
        .iter()
        .any(|a| matches!(a, RuleAttribute::Protocol(p) if *p == ours))
}
