//! Implements [`Routing`] over rtnetlink(7): dumps filtered to our objects, one message for each change.

use std::{io, net::IpAddr};

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::{PROTOCOL, TABLE, TABLE_TUNNEL},
    prefixes::Family,
    routes::{Action, Change, Kind, Route, Routes, Rule},
};
use futures::{TryStream, TryStreamExt};
use ipnet::IpNet;
use rtnetlink::{
    AddressMessageBuilder, Handle, IpVersion, LinkUnspec, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope},
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType},
    },
};
use rustix::io::Errno;

use super::{
    Error, Routing,
    rules::{rule, rule_message},
};

/// The routing of the network namespace whose thread called [`Netlink::open`].
#[derive(Debug)]
pub struct Netlink {
    handle: Handle,
    device: InterfaceName,
    connection: tokio::task::JoinHandle<()>,
}

impl Drop for Netlink {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Converts the error.
pub(super) fn io_error(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other.to_string()),
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

/// Collects a dump. A family that the kernel does not support is empty.
async fn dump<T>(
    what: &'static str,
    stream: impl TryStream<Ok = T, Error = rtnetlink::Error>,
) -> Result<Vec<T>, Error> {
    match stream.try_collect().await.map_err(io_error) {
        Ok(all) => Ok(all),
        Err(source) if errno(&source) == Some(Errno::AFNOSUPPORT) => Ok(Vec::new()),
        Err(source) => Err(Error::Read { what, source }),
    }
}

impl Netlink {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(device: InterfaceName) -> Result<Self, Error> {
        // Strict checking makes the kernel filter dumps, so that thousands of other routes are not copied each time.
        let (connection, handle, _) = match rtnetlink::new_connection_with_strict_check() {
            Ok(open) => open,
            Err(_) => rtnetlink::new_connection().map_err(Error::Open)?, // before Linux 4.20; we filter again anyway
        };
        Ok(Self {
            handle,
            device,
            connection: tokio::spawn(connection),
        })
    }

    /// The index of the device, if it exists.
    async fn index(&self) -> Result<Option<u32>, Error> {
        let links = self.handle.link().get().match_name(self.device.to_string()).execute();
        match links.try_collect::<Vec<_>>().await.map_err(io_error) {
            Ok(links) => Ok(links.first().map(|link| link.header.index)),
            Err(source) if errno(&source) == Some(Errno::NODEV) => Ok(None),
            Err(source) => Err(Error::Read {
                what: "interfaces",
                source,
            }),
        }
    }

    async fn device_index(&self) -> Result<u32, Error> {
        self.index().await?.ok_or_else(|| Error::NoDevice(self.device.clone()))
    }

    async fn addresses(&self, index: u32) -> Result<Vec<IpAddr>, Error> {
        let all = dump(
            "addresses",
            self.handle.address().get().set_link_index_filter(index).execute(),
        )
        .await?;
        Ok(all.iter().filter_map(address).collect())
    }

    async fn routes(&self, index: Option<u32>) -> Result<Vec<Route>, Error> {
        let mut out = Vec::new();
        for table in [TABLE, TABLE_TUNNEL] {
            for family in Family::BOTH {
                let mut query = RouteMessageBuilder::<IpAddr>::new().table_id(table).build();
                query.header.address_family = match family {
                    Family::V4 => AddressFamily::Inet,
                    Family::V6 => AddressFamily::Inet6,
                };
                query.header.protocol = RouteProtocol::from(PROTOCOL);
                query.header.scope = RouteScope::Universe;
                query.header.kind = RouteType::Unspec;
                let all = match dump("routes", self.handle.route().get(query).execute()).await {
                    // With strict checking, the dump of a table that never had a route fails.
                    Err(Error::Read { source, .. }) if errno(&source) == Some(Errno::NOENT) => Vec::new(),
                    all => all?,
                };
                out.extend(all.iter().filter_map(|message| route(message, table, index)));
            }
        }
        Ok(out)
    }

    async fn rules(&self) -> Result<Vec<Rule>, Error> {
        let mut out = Vec::new();
        for (family, version) in [(Family::V4, IpVersion::V4), (Family::V6, IpVersion::V6)] {
            let all = dump("rules", self.handle.rule().get(version).execute()).await?;
            out.extend(all.iter().filter_map(|message| rule(message, family)));
        }
        Ok(out)
    }

    async fn try_apply(&self, change: &Change) -> Result<Result<(), rtnetlink::Error>, Error> {
        Ok(match change {
            Change::AddAddress(address) => {
                let index = self.device_index().await?;
                let (_, length) = host_length(*address);
                let mut request = self.handle.address().add(index, *address, length);
                // No other host can have this address on this device; duplicate address detection would delay IPv6 by a
                // second.
                request.message_mut().header.flags = AddressHeaderFlags::Nodad;
                request
                    .message_mut()
                    .attributes
                    .push(AddressAttribute::Flags(AddressFlags::Nodad));
                request.execute().await
            }
            Change::DeleteAddress(address) => match self.index().await? {
                Some(index) => {
                    self.handle
                        .address()
                        .del(address_message(index, *address))
                        .execute()
                        .await
                }
                None => Ok(()), // deleted with the device
            },
            Change::AddRoute(route) => {
                let message = self.route_message(route).await?;
                self.handle.route().add(message).execute().await
            }
            Change::ReplaceRoute(route) => {
                let message = self.route_message(route).await?;
                self.handle.route().add(message).replace().execute().await
            }
            Change::DeleteRoute(route) => self.handle.route().del(key_message(route)).execute().await,
            Change::AddRule(rule) => {
                let mut request = self.handle.rule().add();
                *request.message_mut() = rule_message(rule);
                request.execute().await
            }
            Change::DeleteRule(rule) => {
                let delete = || self.handle.rule().del(rule_message(rule)).execute();
                let mut deleted = delete().await;
                // Rules of one priority are observed as one.
                while rule.action == Action::Other && deleted.is_ok() {
                    deleted = delete().await;
                }
                deleted
            }
        })
    }

    async fn route_message(&self, route: &Route) -> Result<RouteMessage, Error> {
        let mut message = key_message(route);
        message.header.scope = RouteScope::Universe;
        match &route.kind {
            Kind::Device { source, mtu } => {
                message.header.kind = RouteType::Unicast;
                if matches!(route.prefix, IpNet::V4(_)) {
                    message.header.scope = RouteScope::Link;
                }
                message.attributes.push(RouteAttribute::Oif(self.device_index().await?));
                message
                    .attributes
                    .extend(source.map(|a| RouteAttribute::PrefSource(RouteAddress::from(a))));
                message
                    .attributes
                    .extend(mtu.map(|mtu| RouteAttribute::Metrics(metrics(Family::of(&route.prefix), mtu))));
            }
            Kind::Unreachable => message.header.kind = RouteType::Unreachable,
            Kind::Throw => message.header.kind = RouteType::Throw,
            Kind::Other => {} // never desired; the kernel would refuse it
        }
        Ok(message)
    }

    /// Brings the device up; the kernel accepts no route to a device that is down.
    async fn set_up(&self) -> Result<(), Error> {
        let index = self.device_index().await?;
        let message = LinkUnspec::new_with_index(index).up().build();
        self.handle
            .link()
            .set(message)
            .execute()
            .await
            .map_err(|e| Error::Read {
                what: "device",
                source: io_error(e),
            })
    }
}

impl Routing for Netlink {
    async fn observe(&mut self) -> Result<Routes, Error> {
        let index = self.index().await?;
        let addresses = match index {
            Some(index) => self.addresses(index).await?,
            None => Vec::new(),
        };
        Ok(Routes {
            addresses: addresses.into_iter().collect(),
            routes: self.routes(index).await?.into_iter().collect(),
            rules: self.rules().await?.into_iter().collect(),
        })
    }

    async fn apply(&mut self, change: &Change) -> Result<(), Error> {
        let fail = |source| Error::Change {
            change: Box::new(change.clone()),
            source,
        };
        let Err(error) = self.try_apply(change).await? else {
            return Ok(());
        };
        let error = io_error(error);
        match (errno(&error), change) {
            // Deleted by another program, or with the device, since it was observed.
            (
                Some(Errno::SRCH | Errno::NOENT | Errno::ADDRNOTAVAIL | Errno::NODEV),
                Change::DeleteRoute(_) | Change::DeleteRule(_) | Change::DeleteAddress(_),
            ) => Ok(()),
            (Some(Errno::NETDOWN), _) => {
                self.set_up().await?;
                self.try_apply(change).await?.map_err(io_error).map_err(fail)
            }
            _ => Err(fail(error)),
        }
    }
}

fn host_length(address: IpAddr) -> (AddressFamily, u8) {
    match address {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    }
}

fn address_message(index: u32, address: IpAddr) -> AddressMessage {
    let (_, length) = host_length(address);
    match address {
        IpAddr::V4(a) => AddressMessageBuilder::<std::net::Ipv4Addr>::new()
            .index(index)
            .address(a, length)
            .build(),
        IpAddr::V6(a) => AddressMessageBuilder::<std::net::Ipv6Addr>::new()
            .index(index)
            .address(a, length)
            .build(),
    }
}

/// An address of the device, if the agent could have written it: the kernel adds link-local ones itself.
fn address(message: &AddressMessage) -> Option<IpAddr> {
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(a) if local => Some(*a),
            AddressAttribute::Address(a) if !local => Some(*a),
            _ => None,
        })
    };
    let address = find(true).or_else(|| find(false))?;
    let ours = message.header.scope == AddressScope::Universe && message.header.prefix_len == host_length(address).1;
    ours.then_some(address)
}

/// The key of a route, with our protocol: a delete with it removes only our route, whatever its attributes have become.
fn key_message(route: &Route) -> RouteMessage {
    let mut message = match route.prefix {
        IpNet::V4(net) => RouteMessageBuilder::<std::net::Ipv4Addr>::new()
            .destination_prefix(net.addr(), net.prefix_len())
            .build(),
        IpNet::V6(net) => RouteMessageBuilder::<std::net::Ipv6Addr>::new()
            .destination_prefix(net.addr(), net.prefix_len())
            .build(),
    };
    message.header.table = 0; // RT_TABLE_UNSPEC: the attribute holds it, since it does not fit 8 bits
    message.header.protocol = RouteProtocol::from(PROTOCOL);
    message.header.kind = RouteType::Unspec;
    message.header.scope = RouteScope::NoWhere;
    message.attributes.push(RouteAttribute::Table(route.table));
    message.attributes.push(RouteAttribute::Priority(route.metric));
    message
}

fn route(message: &RouteMessage, table: u32, index: Option<u32>) -> Option<Route> {
    let (mut prefix, mut metric, mut in_table, mut oif, mut source, mut is_plain) = (None, 0, 0, None, None, true);
    let mut observed_metrics: &[RouteMetric] = &[];
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(a) => prefix = route_address(a),
            RouteAttribute::Priority(p) => metric = *p,
            RouteAttribute::Table(t) => in_table = *t,
            RouteAttribute::Oif(i) => oif = Some(*i),
            RouteAttribute::PrefSource(a) => source = route_address(a),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) | RouteAttribute::MultiPath(_) => is_plain = false,
            RouteAttribute::Encap(_) | RouteAttribute::NhId(_) => is_plain = false,
            RouteAttribute::Metrics(metrics) => observed_metrics = metrics,
            _ => {}
        }
    }
    if in_table != table || message.header.protocol != RouteProtocol::from(PROTOCOL) {
        return None;
    }
    let family = match message.header.address_family {
        AddressFamily::Inet => Family::V4,
        AddressFamily::Inet6 => Family::V6,
        _ => return None,
    };
    let address = prefix.unwrap_or_else(|| family.everything().addr());
    let mtu = observed_metrics.iter().find_map(|m| {
        if let RouteMetric::Mtu(mtu) = m {
            u16::try_from(*mtu).ok()
        } else {
            None
        }
    });
    // A plain route has only attributes that the agent writes.
    is_plain &= mtu.map_or_else(Vec::new, |mtu| metrics(family, mtu)) == observed_metrics;
    let kind = match message.header.kind {
        RouteType::Unicast if is_plain && oif.is_some() && oif == index => Kind::Device { source, mtu },
        RouteType::Unreachable => Kind::Unreachable,
        RouteType::Throw => Kind::Throw,
        _ => Kind::Other,
    };
    let prefix = IpNet::new(address, message.header.destination_prefix_length).ok()?;
    Some(Route {
        table,
        prefix,
        metric,
        kind,
    })
}

/// A route's MTU metric. For forwarded IPv6 some kernels ignore it unless it is locked (6.18 does not); for IPv4 a lock
/// would disable path MTU discovery.
fn metrics(family: Family, mtu: u16) -> Vec<RouteMetric> {
    const RTAX_MTU: u32 = 2;
    let lock = (family == Family::V6).then_some(RouteMetric::Lock(1 << RTAX_MTU));
    lock.into_iter().chain([RouteMetric::Mtu(mtu.into())]).collect()
}

fn route_address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some(IpAddr::V4(*a)),
        RouteAddress::Inet6(a) => Some(IpAddr::V6(*a)),
        _ => None,
    }
}
