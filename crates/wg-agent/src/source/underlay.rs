//! Reads the node's network without the mesh: the interface by which outer packets leave, its addresses and MTU, next
//! hops and resolvers. The agent's own tables and device are ignored.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::Path,
};

use clustermesh_agent_core::interface::InterfaceName;
use clustermesh_netlink::{Error, Protocol, Socket};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteVia},
};

/// The node's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Underlay {
    /// The interface by which outer packets leave.
    pub interface: InterfaceName,
    /// Its MTU, bytes.
    pub mtu: u16,
    /// Its addresses with their prefix lengths, link-local ones left out.
    pub addresses: BTreeMap<IpAddr, u8>,
    /// Next hops in the main table, except link-local ones and those through the agent's device.
    pub next_hops: BTreeSet<IpAddr>,
}

/// Why the node's network cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum UnderlayError {
    /// A netlink request failed.
    #[error("cannot read the node's links, addresses and routes: {0}")]
    Netlink(#[from] Error),
    /// There is no interface for outer packets.
    #[error(
        "this node has no interface with one of its InternalIPs ({0:?}) and no default route: outer packets \
         cannot leave; correct the Node's addresses (kubelet --node-ip) or the node's routes"
    )]
    NoInterface(BTreeSet<IpAddr>),
}

#[derive(Debug, Default)]
struct Link {
    name: String,
    mtu: u32,
    addresses: BTreeMap<IpAddr, u8>,
}

/// A next hop of a route in the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hop {
    is_default: bool,
    metric: u32,
    is_ipv6: bool,
    interface: Option<u32>,
    gateway: Option<IpAddr>,
}

/// Reads the node's network. As the interface of outer packets it chooses the one that has one of the Node's InternalIPs
/// (`internal`), else that of the best default route (IPv4 before IPv6, then the lowest metric). `device` is the agent's
/// tunnel device; it and `lo` are never chosen.
pub async fn read(internal: &BTreeSet<IpAddr>, device: &InterfaceName) -> Result<Underlay, UnderlayError> {
    // Opened here, so that it belongs to the network namespace of the caller's thread.
    let socket = Socket::open(Protocol::Route)?;
    // On a blocking thread, because the dump takes long if other programs have added many routes.
    let dumped = tokio::task::spawn_blocking(move || dump(&socket)).await;
    let (links, hops) = dumped.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
    choose_underlay(internal, device, &links, &hops).ok_or_else(|| UnderlayError::NoInterface(internal.clone()))
}

fn dump(socket: &Socket) -> Result<(BTreeMap<u32, Link>, Vec<Hop>), Error> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let links = socket.dump_readable(&request, |answer| match answer {
        RouteNetlinkMessage::NewLink(message) => Some(parse_link(message)),
        _ => None,
    })?;
    let mut links: BTreeMap<u32, Link> = links.into_iter().collect();
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let addresses = socket.dump_readable(&request, |answer| match answer {
        RouteNetlinkMessage::NewAddress(message) => Some((message.header.index, parse_address(&message)?)),
        _ => None,
    })?;
    for (index, (address, length)) in addresses {
        links.entry(index).or_default().addresses.insert(address, length);
    }
    let mut hops = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // Since Linux 4.20 the kernel returns only the main table. Older kernels return all tables, so `main_table_hops` filters, too.
        let mut filter = RouteMessage::default();
        filter.header.address_family = family;
        filter.header.table = RouteHeader::RT_TABLE_MAIN;
        let found = socket.dump_readable(&RouteNetlinkMessage::GetRoute(filter), |answer| match answer {
            RouteNetlinkMessage::NewRoute(message) => Some(main_table_hops(&message)),
            _ => None,
        });
        match found {
            Ok(found) => hops.extend(found.into_iter().flatten()),
            // A kernel without IPv6 (ipv6.disable=1) refuses the dump.
            Err(Error::Kernel { .. }) if family == AddressFamily::Inet6 => {}
            Err(error) => return Err(error),
        }
    }
    Ok((links, hops))
}

fn parse_link(message: LinkMessage) -> (u32, Link) {
    let mut link = Link::default();
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            _ => {}
        }
    }
    (message.header.index, link)
}

/// Parses an address and its prefix length. On a point-to-point link, `Address` is the remote address and `Local` the
/// local one. An IPv6 address without a remote address has only `Address`.
fn parse_address(message: &AddressMessage) -> Option<(IpAddr, u8)> {
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) if local => Some(*address),
            AddressAttribute::Address(address) if !local => Some(*address),
            _ => None,
        })
    };
    Some((find(true).or_else(|| find(false))?, message.header.prefix_len))
}

fn main_table_hops(message: &RouteMessage) -> Vec<Hop> {
    let table = message.attributes.iter().find_map(|a| {
        if let RouteAttribute::Table(t) = a {
            Some(*t)
        } else {
            None
        }
    });
    if table.unwrap_or(u32::from(message.header.table)) != u32::from(RouteHeader::RT_TABLE_MAIN) {
        return Vec::new();
    }
    let metric = message.attributes.iter().find_map(|a| {
        if let RouteAttribute::Priority(m) = a {
            Some(*m)
        } else {
            None
        }
    });
    let hop = |attributes: &[RouteAttribute], interface: Option<u32>| Hop {
        is_default: message.header.destination_prefix_length == 0,
        metric: metric.unwrap_or(0),
        is_ipv6: message.header.address_family == AddressFamily::Inet6,
        interface: attributes
            .iter()
            .find_map(|a| if let RouteAttribute::Oif(i) = a { Some(*i) } else { None })
            .or(interface),
        gateway: attributes.iter().find_map(|a| match a {
            RouteAttribute::Gateway(RouteAddress::Inet(a)) => Some(IpAddr::V4(*a)),
            RouteAttribute::Gateway(RouteAddress::Inet6(a)) => Some(IpAddr::V6(*a)),
            RouteAttribute::Via(RouteVia::Inet(a)) => Some(IpAddr::V4(*a)),
            RouteAttribute::Via(RouteVia::Inet6(a)) => Some(IpAddr::V6(*a)),
            _ => None,
        }),
    };
    let multipath = message.attributes.iter().find_map(|a| {
        if let RouteAttribute::MultiPath(h) = a {
            Some(h)
        } else {
            None
        }
    });
    match multipath {
        Some(hops) => hops
            .iter()
            .map(|h| hop(&h.attributes, Some(h.interface_index)))
            .collect(),
        None => vec![hop(&message.attributes, None)],
    }
}

fn choose_underlay(
    internal: &BTreeSet<IpAddr>,
    device: &InterfaceName,
    links: &BTreeMap<u32, Link>,
    hops: &[Hop],
) -> Option<Underlay> {
    let usable = || {
        links
            .iter()
            .filter(|(_, link)| link.name != device.as_str() && link.name != "lo")
    };
    let by_address = usable().find(|(_, link)| link.addresses.keys().any(|a| internal.contains(a)));
    let by_route = || {
        let mut defaults: Vec<&Hop> = hops.iter().filter(|hop| hop.is_default).collect();
        defaults.sort_by_key(|hop| (hop.is_ipv6, hop.metric));
        defaults
            .iter()
            .find_map(|hop| usable().find(|(index, _)| Some(**index) == hop.interface))
    };
    let (_, link) = by_address.or_else(by_route)?;
    let is_outside_tunnel = |hop: &&Hop| {
        hop.interface
            .and_then(|index| links.get(&index))
            .is_none_or(|link| link.name != device.as_str())
    };
    Some(Underlay {
        interface: link.name.parse().ok()?,
        mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX),
        addresses: link
            .addresses
            .iter()
            .filter(|(a, _)| !is_link_local(a))
            .map(|(a, l)| (*a, *l))
            .collect(),
        next_hops: hops
            .iter()
            .filter(is_outside_tunnel)
            .filter_map(|hop| hop.gateway)
            .filter(|a| !is_link_local(a))
            .collect(),
    })
}

const fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Reads the name servers in a resolv.conf(5), except loopback and link-local ones, which need no route. A missing file
/// counts as empty.
pub fn resolvers(path: &Path) -> io::Result<BTreeSet<IpAddr>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(parse_resolvers(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

fn parse_resolvers(text: &str) -> BTreeSet<IpAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("nameserver")).then(|| words.next())?
        })
        .filter_map(|word| word.split('%').next()?.parse::<IpAddr>().ok())
        .filter(|address| !address.is_loopback() && !is_link_local(address))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, mtu: u32, addresses: &[(&str, u8)]) -> Link {
        let addresses = addresses.iter().map(|(a, l)| (a.parse().unwrap(), *l)).collect();
        Link {
            name: name.into(),
            mtu,
            addresses,
        }
    }

    fn links() -> BTreeMap<u32, Link> {
        BTreeMap::from([
            (1, link("lo", 65536, &[("127.0.0.1", 8), ("192.168.1.34", 32)])),
            (2, link("eth0", 1500, &[("203.0.113.9", 24), ("fe80::1", 64)])),
            (3, link("eth1", 9000, &[("192.168.1.34", 24), ("fd00::34", 64)])),
            (4, link("kilo0", 1420, &[("100.66.0.1", 32)])),
        ])
    }

    fn hops() -> Vec<Hop> {
        let hop = |is_default, metric, interface, gateway: Option<&str>| Hop {
            is_default,
            metric,
            is_ipv6: false,
            interface: Some(interface),
            gateway: gateway.map(|g| g.parse().unwrap()),
        };
        vec![
            hop(true, 0, 4, Some("100.66.9.9")),
            hop(true, 200, 3, Some("192.168.1.1")),
            hop(true, 100, 2, Some("203.0.113.1")),
            hop(false, 0, 3, Some("192.168.1.2")),
        ]
    }

    #[test]
    fn interface_of_the_internal_ip_is_preferred() {
        let internal = BTreeSet::from(["192.168.1.34".parse().unwrap()]);
        let want = Underlay {
            interface: "eth1".parse().unwrap(),
            mtu: 9000,
            addresses: [("192.168.1.34".parse().unwrap(), 24), ("fd00::34".parse().unwrap(), 64)].into(),
            next_hops: ["192.168.1.1", "203.0.113.1", "192.168.1.2"]
                .map(|a| a.parse().unwrap())
                .into(),
        };
        assert_eq!(
            choose_underlay(&internal, &"kilo0".parse().unwrap(), &links(), &hops()),
            Some(want)
        );
    }

    #[test]
    fn best_default_route_outside_the_tunnel_is_the_fallback() {
        let got = choose_underlay(&BTreeSet::new(), &"kilo0".parse().unwrap(), &links(), &hops()).unwrap();
        assert_eq!((got.interface.as_str(), got.mtu), ("eth0", 1500));
        assert_eq!(
            choose_underlay(&BTreeSet::new(), &"kilo0".parse().unwrap(), &links(), &[]),
            None
        );
    }

    #[test]
    fn only_resolvers_that_need_a_route_are_parsed() {
        let text = "# c\nsearch a.b\nnameserver 10.95.0.10\nnameserver 127.0.0.53\n nameserver\tfd00::53 \n\
                    nameserver fe80::1%eth0\nnameserver x\noptions ndots:5\nnameservers 1.1.1.1";
        assert_eq!(
            parse_resolvers(text),
            ["10.95.0.10", "fd00::53"].map(|a| a.parse().unwrap()).into()
        );
    }
}
