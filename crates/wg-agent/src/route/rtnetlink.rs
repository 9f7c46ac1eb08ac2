//! Implements [`Routing`] over rtnetlink(7). `observe` returns those addresses of the device that have the scope and prefix
//! length of the agent's addresses, and the routes and rules that have the agent's protocol number. `foreign_rules` reads the
//! rules of other programs.

use std::{collections::BTreeMap, net::IpAddr};

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::{PROTOCOL, TABLE, TABLE_TUNNEL},
    prefixes::Family,
    routes::{Action, Change, Kind, Route, Routes, Rule},
};
use clustermesh_netlink::{Errno, Error as NetlinkError, Protocol, Socket, link};
use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType},
    rule::RuleMessage,
};

use super::{
    Error, Routing, address_family,
    rules::{foreign_priority, parse_rule, rule_message},
};

/// The routing of the network namespace of the thread that called [`Netlink::open`].
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    device: InterfaceName,
}

/// A change that failed.
enum Failure {
    /// The kernel refused the change itself.
    Refused(NetlinkError),
    /// The change could not be tried.
    NotTried(Error),
}

impl From<NetlinkError> for Failure {
    fn from(error: NetlinkError) -> Self {
        Self::Refused(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::NotTried(error)
    }
}

impl Netlink {
    /// Opens a socket in the caller's network namespace.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(device: InterfaceName) -> Result<Self, Error> {
        let socket = Socket::open(Protocol::Route).map_err(Error::Open)?;
        Ok(Self { socket, device })
    }

    /// The index of the device, if it exists.
    fn find_device_index(&self) -> Result<Option<u32>, Error> {
        match link::by_name(&self.socket, self.device.as_str()) {
            Ok(link) => Ok(link.map(|link| link.header.index)),
            Err(source) => Err(Error::Read {
                what: "interfaces",
                source,
            }),
        }
    }

    fn require_device_index(&self) -> Result<u32, Error> {
        self.find_device_index()?
            .ok_or_else(|| Error::NoDevice(self.device.clone()))
    }

    /// Reads all objects of a kind: none if the kernel does not have the family or the table.
    fn dump<T>(
        &self,
        what: &'static str,
        request: &RouteNetlinkMessage,
        pick: impl FnMut(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        match self.socket.dump_readable(request, pick) {
            Ok(all) => Ok(all),
            // NOENT: the dump of a table that never had a route fails.
            Err(source) if matches!(source.errno(), Some(Errno::AFNOSUPPORT | Errno::NOENT)) => Ok(Vec::new()),
            Err(source) => Err(Error::Read { what, source }),
        }
    }

    fn addresses(&self, index: u32) -> Result<Vec<IpAddr>, Error> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.dump("addresses", &request, |answer| match answer {
            RouteNetlinkMessage::NewAddress(message) if message.header.index == index => parse_address(&message),
            _ => None,
        })
    }

    fn routes(&self, index: Option<u32>) -> Result<Vec<Route>, Error> {
        let mut out = Vec::new();
        for table in [TABLE, TABLE_TUNNEL] {
            for family in Family::BOTH {
                // The kernel filters the dump, so that it does not copy thousands of other routes each time.
                let mut filter = RouteMessage::default();
                filter.header.address_family = address_family(family);
                filter.header.protocol = RouteProtocol::from(PROTOCOL);
                filter.attributes.push(RouteAttribute::Table(table));
                let request = RouteNetlinkMessage::GetRoute(filter);
                out.extend(self.dump("routes", &request, |answer| match answer {
                    RouteNetlinkMessage::NewRoute(message) => parse_route(&message, table, index),
                    _ => None,
                })?);
            }
        }
        Ok(out)
    }

    /// Reads the rules of all programs in one family.
    fn rules<T>(&self, family: Family, mut pick: impl FnMut(&RuleMessage) -> Option<T>) -> Result<Vec<T>, Error> {
        let mut filter = RuleMessage::default();
        filter.header.family = address_family(family);
        self.dump("rules", &RouteNetlinkMessage::GetRule(filter), |answer| match answer {
            RouteNetlinkMessage::NewRule(message) => pick(&message),
            _ => None,
        })
    }

    fn own_rules(&self) -> Result<Vec<Rule>, Error> {
        let mut out = Vec::new();
        for family in Family::BOTH {
            out.extend(self.rules(family, |message| parse_rule(message, family))?);
        }
        Ok(out)
    }

    fn try_apply(&self, change: &Change) -> Result<(), Failure> {
        use RouteNetlinkMessage as M;
        let socket = &self.socket;
        match change {
            Change::AddAddress(address) => {
                let mut message = address_message(self.require_device_index()?, *address);
                // Without duplicate address detection, an IPv6 address can be used a second earlier. No other host can have this
                // address on this device.
                message.header.flags = AddressHeaderFlags::Nodad;
                message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
                socket.create(&M::NewAddress(message))?;
            }
            Change::DeleteAddress(address) => {
                // If the device does not exist, its addresses do not exist either.
                if let Some(index) = self.find_device_index()? {
                    socket.change(&M::DelAddress(address_message(index, *address)))?;
                }
            }
            Change::AddRoute(route) => socket.create(&M::NewRoute(self.route_message(route)?))?,
            Change::ReplaceRoute(route) => socket.replace(&M::NewRoute(self.route_message(route)?))?,
            Change::DeleteRoute(route) => socket.change(&M::DelRoute(key_message(route)))?,
            Change::AddRule(rule) => socket.create(&M::NewRule(rule_message(rule)))?,
            Change::DeleteRule(rule) => {
                let message = M::DelRule(rule_message(rule));
                let mut deleted = socket.change(&message);
                // All rules with `Action::Other` at one priority are observed as one rule, but each request deletes only
                // one. The last request fails, and `apply` ignores its error.
                while rule.action == Action::Other && deleted.is_ok() {
                    deleted = socket.change(&message);
                }
                deleted?;
            }
        }
        Ok(())
    }

    fn route_message(&self, route: &Route) -> Result<RouteMessage, Error> {
        let mut message = key_message(route);
        message.header.scope = RouteScope::Universe;
        match &route.kind {
            Kind::Device { source, mtu } => {
                message.header.kind = RouteType::Unicast;
                if matches!(route.prefix, IpNet::V4(_)) {
                    message.header.scope = RouteScope::Link;
                }
                message
                    .attributes
                    .push(RouteAttribute::Oif(self.require_device_index()?));
                message
                    .attributes
                    .extend(source.map(|a| RouteAttribute::PrefSource(RouteAddress::from(a))));
                message
                    .attributes
                    .extend(mtu.map(|mtu| RouteAttribute::Metrics(mtu_metrics(Family::of(&route.prefix), mtu))));
            }
            Kind::Unreachable => message.header.kind = RouteType::Unreachable,
            Kind::Throw => message.header.kind = RouteType::Throw,
            Kind::Other => {} // never desired; the kernel would refuse it
        }
        Ok(message)
    }

    /// Brings the device up; the kernel accepts no route to a device that is down.
    fn set_up(&self) -> Result<(), Error> {
        link::set_up(&self.socket, self.require_device_index()?).map_err(|source| Error::SetUp {
            device: self.device.clone(),
            source,
        })
    }
}

impl Routing for Netlink {
    async fn observe(&mut self) -> Result<Routes, Error> {
        let index = self.find_device_index()?;
        let addresses = match index {
            Some(index) => self.addresses(index)?,
            None => Vec::new(),
        };
        Ok(Routes {
            addresses: addresses.into_iter().collect(),
            routes: self.routes(index)?.into_iter().collect(),
            rules: self.own_rules()?.into_iter().collect(),
        })
    }

    async fn foreign_rules(&mut self) -> Result<BTreeMap<Family, u32>, Error> {
        let mut first = BTreeMap::new();
        for family in Family::BOTH {
            let priorities = self.rules(family, foreign_priority)?;
            first.extend(priorities.into_iter().min().map(|priority| (family, priority)));
        }
        Ok(first)
    }

    async fn apply(&mut self, change: &Change) -> Result<(), Error> {
        let fail = |failure| match failure {
            Failure::NotTried(error) => error,
            Failure::Refused(source) => Error::Change {
                change: Box::new(change.clone()),
                source,
            },
        };
        let Err(failure) = self.try_apply(change) else {
            return Ok(());
        };
        let errno = match &failure {
            Failure::Refused(error) => error.errno(),
            Failure::NotTried(_) => None,
        };
        match (errno, change) {
            // The object was deleted by another program, or with the device, after it was observed.
            (
                Some(Errno::SRCH | Errno::NOENT | Errno::ADDRNOTAVAIL | Errno::NODEV),
                Change::DeleteRoute(_) | Change::DeleteRule(_) | Change::DeleteAddress(_),
            ) => Ok(()),
            (Some(Errno::NETDOWN), _) => {
                self.set_up()?;
                self.try_apply(change).map_err(fail)
            }
            _ => Err(fail(failure)),
        }
    }
}

const fn host_length(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

fn address_message(index: u32, address: IpAddr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = address_family(Family::of(&address.into()));
    message.header.prefix_len = host_length(address);
    message.header.index = index;
    message.attributes = vec![AddressAttribute::Address(address), AddressAttribute::Local(address)];
    message
}

/// Parses an address of the device; `None` = its scope or prefix length is not that of the agent's addresses, for example link-local.
fn parse_address(message: &AddressMessage) -> Option<IpAddr> {
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(a) if local => Some(*a),
            AddressAttribute::Address(a) if !local => Some(*a),
            _ => None,
        })
    };
    let address = find(true).or_else(|| find(false))?;
    let has_our_form =
        message.header.scope == AddressScope::Universe && message.header.prefix_len == host_length(address);
    has_our_form.then_some(address)
}

/// A message with the key of a route and the agent's protocol number. As a delete request it removes no route of another program,
/// and it removes the agent's route whatever its other attributes are.
fn key_message(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = address_family(Family::of(&route.prefix));
    message.header.destination_prefix_length = route.prefix.prefix_len();
    message.header.protocol = RouteProtocol::from(PROTOCOL);
    message.header.kind = RouteType::Unspec;
    message.header.scope = RouteScope::NoWhere;
    message.attributes = vec![
        RouteAttribute::Destination(RouteAddress::from(route.prefix.addr())),
        // The 8 bits for the table in the header are too few.
        RouteAttribute::Table(route.table),
        RouteAttribute::Priority(route.metric),
    ];
    message
}

fn parse_route(message: &RouteMessage, table: u32, index: Option<u32>) -> Option<Route> {
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
    // Other metrics than the agent writes are an external change.
    is_plain &= mtu.map_or_else(Vec::new, |mtu| mtu_metrics(family, mtu)) == observed_metrics;
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

/// A route's MTU metric. For IPv6 it is locked, because some kernels (not 6.18) ignore an MTU without a lock for forwarded packets.
/// For IPv4 a lock would disable path MTU discovery.
fn mtu_metrics(family: Family, mtu: u16) -> Vec<RouteMetric> {
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
