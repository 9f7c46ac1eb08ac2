//! Reads the generation of nftables: the kernel's count of transactions in all tables. Reading it takes one message,
//! while a listing takes a process, so it tells cheaply whether anything was written since a listing. Elements that
//! time out do not change it.

use std::{fs, io, os::unix::fs::MetadataExt};

use clustermesh_agent_core::numbers::NFT_TABLE;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

/// The generation of one network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation {
    namespace: u64,
    number: u32,
}

impl Generation {
    /// The generation after one more transaction. The kernel skips 0 (`nf_tables_commit`).
    pub(crate) const fn next(self) -> Self {
        let number = match self.number.wrapping_add(1) {
            0 => 1,
            number => number,
        };
        Self { number, ..self }
    }
}

/// Lengths of `struct nlmsghdr` (linux/netlink.h) and `struct nfgenmsg` (linux/netfilter/nfnetlink.h).
const HEADER: usize = 16;
const FAMILY: usize = 4;
/// NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN, and the answer's NFT_MSG_NEWGEN (linux/netfilter/nf_tables.h).
const GET_GENERATION: u16 = 10 << 8 | 16;
const NEW_GENERATION: u16 = 10 << 8 | 15;
/// NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE, and NFTA_TABLE_NAME.
const GET_TABLE: u16 = 10 << 8 | 1;
const TABLE_NAME: u16 = 1;
/// NFTA_GEN_ID, 32 bits in network order.
const GENERATION_ID: u16 = 1;

/// The current generation in the namespace of the calling thread.
///
/// # Errors
/// The kernel does not answer.
pub(crate) fn current() -> io::Result<Generation> {
    let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
    let number = parse_generation(&request(GET_GENERATION, 0, &[])?);
    let number = number.ok_or_else(|| io::Error::other("the answer of nftables contains no generation"))?;
    Ok(Generation { namespace, number })
}

/// Whether our table exists in the namespace of the calling thread. `nft` would read every chain of every table for
/// this.
///
/// # Errors
/// The kernel does not answer.
pub(crate) fn has_table() -> io::Result<bool> {
    let name = [NFT_TABLE.as_bytes(), &[0]].concat();
    let family = u8::try_from(libc::NFPROTO_INET).unwrap_or_default();
    match netlink_error(&request(GET_TABLE, family, &name)?) {
        None => Ok(true),
        Some(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Some(error) => Err(error),
    }
}

/// The answer to one request; `name` = the value of attribute 1, unless it is empty.
fn request(kind: u16, family: u8, name: &[u8]) -> io::Result<Vec<u8>> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&encode_request(kind, family, name), 0)?;
    // The kernel answers before `send` returns.
    Ok(socket.recv_from_full()?.0)
}

fn encode_request(kind: u16, family: u8, name: &[u8]) -> Vec<u8> {
    let attribute = if name.is_empty() { 0 } else { 4 + name.len() };
    let length = HEADER + FAMILY + attribute.next_multiple_of(4);
    let mut out = Vec::with_capacity(length);
    out.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(netlink_packet_core::NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port stay 0: the socket is used for one request. Then the family (0 = any) and version 0.
    out.resize(HEADER, 0);
    out.extend([family, 0, 0, 0]);
    if attribute > 0 {
        out.extend(u16::try_from(attribute).unwrap_or_default().to_ne_bytes());
        out.extend(TABLE_NAME.to_ne_bytes());
        out.extend(name);
    }
    out.resize(length, 0);
    out
}

/// The error in an answer (NLMSG_ERROR, linux/netlink.h).
fn netlink_error(answer: &[u8]) -> Option<io::Error> {
    if answer.get(4..6)? != 2_u16.to_ne_bytes() {
        return None;
    }
    let code = i32::from_ne_bytes(answer.get(HEADER..HEADER + 4)?.try_into().ok()?);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

fn parse_generation(answer: &[u8]) -> Option<u32> {
    let u16_at = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    if u16_at(4)? != NEW_GENERATION {
        return None;
    }
    let mut at = HEADER + FAMILY;
    loop {
        let length = usize::from(u16_at(at)?);
        if u16_at(at + 2)? == GENERATION_ID {
            return Some(u32::from_be_bytes(answer.get(at + 4..at + 8)?.try_into().ok()?));
        }
        // Attributes are aligned to four bytes.
        at += length.max(4).next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_is_found_after_other_attributes() {
        let mut answer = [0; HEADER + FAMILY].to_vec();
        answer[4..6].copy_from_slice(&NEW_GENERATION.to_ne_bytes());
        assert_eq!(parse_generation(&answer), None);
        for (kind, value) in [(3_u16, &b"nft\0\0"[..]), (GENERATION_ID, &[0, 0, 1, 2])] {
            let length = u16::try_from(4 + value.len()).unwrap();
            answer.extend(length.to_ne_bytes());
            answer.extend(kind.to_ne_bytes());
            answer.extend(value);
            answer.resize(answer.len().next_multiple_of(4), 0);
        }
        assert_eq!(parse_generation(&answer), Some(0x102));
        assert_eq!(parse_generation(&answer[..answer.len() - 1]), None);
        // An error (NLMSG_ERROR) contains no generation.
        answer[4..6].copy_from_slice(&2_u16.to_ne_bytes());
        assert_eq!(parse_generation(&answer), None);
    }
}
