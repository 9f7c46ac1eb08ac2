//! Finds and deletes conntrack entries whose grant or endpoint is gone, in this network namespace. The firewall drops
//! their packets anyway. But while a UDP client keeps sending, its entry would keep the dead endpoint.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::gateway::GrantId;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    conntrack::{ConntrackAttribute, ConntrackMessage, IPTuple, ProtoTuple, Tuple},
};
use netlink_sys::{Socket, SocketAddr as Address, protocols::NETLINK_NETFILTER};

/// The size of the conntrack table (`net.netfilter.nf_conntrack_max`); `None` = it cannot be read.
pub(super) fn capacity() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max").ok()?;
    text.trim().parse().ok()
}

/// Deletes every entry with a grant's mark that is not in `standing`; returns how many.
///
/// # Errors
/// The kernel refuses, or its answer cannot be parsed.
pub(super) fn delete_stale(standing: &BTreeSet<(GrantId, SocketAddr)>) -> io::Result<usize> {
    let mut ended = 0;
    for family in [NetfilterProtoFamily::IPv4, NetfilterProtoFamily::IPv6] {
        let mut socket = open()?;
        let mut stale = Vec::new();
        send(&socket, family, NLM_F_DUMP, ConntrackMessage::Get(Vec::new()))?;
        dump(&mut socket, |attributes| {
            let gone = |connection: &Connection| !standing.contains(&(connection.grant, connection.endpoint));
            stale.extend(
                connection(attributes)
                    .filter(gone)
                    .map(|connection| connection.original),
            );
        })?;
        for original in stale {
            // No acknowledgement: the entry may be gone meanwhile.
            let message = ConntrackMessage::Delete(vec![ConntrackAttribute::CtaTupleOrig(original)]);
            send(&socket, family, 0, message)?;
            ended += 1;
        }
    }
    Ok(ended)
}

/// A conntrack entry that belongs to a grant.
struct Connection {
    grant: GrantId,
    endpoint: SocketAddr,
    original: Vec<Tuple>,
}

fn connection(attributes: Vec<ConntrackAttribute>) -> Option<Connection> {
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

/// The source of the reply tuple.
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

fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&Address::new(0, 0))?;
    Ok(socket)
}

fn send(socket: &Socket, family: NetfilterProtoFamily, flags: u16, message: ConntrackMessage) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let message = NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message);
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0).map(drop)
}

/// Reads a multipart answer to its end.
fn dump(socket: &mut Socket, mut each: impl FnMut(Vec<ConntrackAttribute>)) -> io::Result<()> {
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let message = NetlinkMessage::<NetfilterMessage>::deserialize(rest).map_err(io::Error::other)?;
            let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
            match message.payload {
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::InnerMessage(NetfilterMessage {
                    inner: NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)),
                    ..
                }) => each(attributes),
                _ => {}
            }
            // Messages are aligned to four bytes.
            rest = rest.get(length.max(16).next_multiple_of(4)..).unwrap_or_default();
        }
    }
}
