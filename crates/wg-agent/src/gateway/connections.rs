//! Deletes conntrack entries of this network namespace whose grant or endpoint was removed. The firewall drops their packets,
//! but even dropped packets keep an entry alive. A UDP client that keeps sending would stay translated to the removed endpoint
//! and never reach another one.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::gateway::GrantId;
use clustermesh_netlink::{Errno, Error, Protocol, Socket};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    conntrack::{ConntrackAttribute, ConntrackMessage, IPTuple, ProtoTuple, Tuple},
};

/// The limit of the conntrack table (`net.netfilter.nf_conntrack_max`); `None` = it cannot be read, or there is no limit.
pub(super) fn capacity() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max").ok()?;
    text.trim().parse().ok().filter(|limit| *limit > 0)
}

/// Deletes every entry that has the mark of a grant and whose pair of grant and endpoint is not in `allowed`. Returns the number of
/// deleted entries.
///
/// # Errors
/// The kernel refuses, or its answer cannot be parsed.
pub(super) fn delete_stale(allowed: &BTreeSet<(GrantId, SocketAddr)>) -> Result<usize, Error> {
    let socket = Socket::open(Protocol::Netfilter)?;
    let mut deleted = 0;
    for family in [NetfilterProtoFamily::IPv4, NetfilterProtoFamily::IPv6] {
        let message = |message| NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message);
        let request = message(ConntrackMessage::Get(Vec::new()));
        let stale = socket.dump(&request, |answer: NetfilterMessage| {
            let connection = connection(answer)?;
            let is_allowed = allowed.contains(&(connection.grant, connection.endpoint));
            (!is_allowed).then_some(connection.original)
        })?;
        for original in stale {
            let original = vec![ConntrackAttribute::CtaTupleOrig(original)];
            match socket.change(&message(ConntrackMessage::Delete(original))) {
                Ok(()) => deleted += 1,
                // The entry expired meanwhile.
                Err(error) if error.errno() == Some(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(deleted)
}

/// A conntrack entry that belongs to a grant.
struct Connection {
    grant: GrantId,
    /// The source of the reply tuple.
    endpoint: SocketAddr,
    /// The original tuple.
    original: Vec<Tuple>,
}

fn connection(message: NetfilterMessage) -> Option<Connection> {
    let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) = message.inner else {
        return None;
    };
    let (mut grant, mut endpoint, mut original) = (None, None, None);
    for attribute in attributes {
        match attribute {
            ConntrackAttribute::CtaMark(mark) if mark != 0 => grant = Some(GrantId(mark)),
            ConntrackAttribute::CtaTupleReply(tuple) => endpoint = source(&tuple),
            ConntrackAttribute::CtaTupleOrig(tuple) => original = Some(tuple),
            _ => {}
        }
    }
    Some(Connection {
        grant: grant?,
        endpoint: endpoint?,
        original: original?,
    })
}

fn source(tuple: &[Tuple]) -> Option<SocketAddr> {
    let (mut ip, mut port): (Option<IpAddr>, Option<u16>) = (None, None);
    for part in tuple {
        match part {
            Tuple::Ip(addresses) => {
                ip = addresses.iter().find_map(|address| match address {
                    IPTuple::SourceAddress(address) => Some(*address),
                    _ => None,
                });
            }
            Tuple::Proto(ports) => {
                port = ports.iter().find_map(|part| match part {
                    ProtoTuple::SourcePort(port) => Some(*port),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    Some(SocketAddr::new(ip?, port?))
}
