//! Whether anybody wrote to nftables since: the kernel counts every transaction, of whatever table, and tells the count for
//! one message, where a listing costs a process. What was written is for a listing to say. Elements that fade are no
//! transaction.

use std::{fs, io, os::unix::fs::MetadataExt};

use clustermesh_agent_core::numbers::NFT_TABLE;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

/// A count of transactions, of one network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation {
    namespace: u64,
    number: u32,
}

impl Generation {
    /// After one more transaction. The kernel leaves 0 out (`nf_tables_commit`).
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
const ASK: u16 = 10 << 8 | 16;
const ANSWER: u16 = 10 << 8 | 15;
/// NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE, and NFTA_TABLE_NAME.
const TABLE: u16 = 10 << 8 | 1;
const NAME: u16 = 1;
/// NFTA_GEN_ID, 32 bits in network order.
const NUMBER: u16 = 1;

/// Of the namespace of the calling thread.
///
/// # Errors
/// When the kernel does not tell.
pub(crate) fn now() -> io::Result<Generation> {
    let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
    let number = number(&ask(ASK, 0, &[])?);
    let number = number.ok_or_else(|| io::Error::other("nftables does not tell its generation"))?;
    Ok(Generation { namespace, number })
}

/// Whether our table is there, in the namespace of the calling thread. `nft` reads every chain of every table for this.
///
/// # Errors
/// When the kernel does not tell.
pub(crate) fn has_table() -> io::Result<bool> {
    let name = [NFT_TABLE.as_bytes(), &[0]].concat();
    let family = u8::try_from(libc::NFPROTO_INET).unwrap_or_default();
    match refusal(&ask(TABLE, family, &name)?) {
        None => Ok(true),
        Some(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Some(error) => Err(error),
    }
}

/// The answer to one question; `name` = the attribute with number 1, where it is not empty.
fn ask(kind: u16, family: u8, name: &[u8]) -> io::Result<Vec<u8>> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&question(kind, family, name), 0)?;
    // The kernel answers before it returns from sending.
    Ok(socket.recv_from_full()?.0)
}

fn question(kind: u16, family: u8, name: &[u8]) -> Vec<u8> {
    let attribute = if name.is_empty() { 0 } else { 4 + name.len() };
    let length = HEADER + FAMILY + attribute.next_multiple_of(4);
    let mut out = Vec::with_capacity(length);
    out.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(netlink_packet_core::NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port: nobody else is asked on this socket. Then the family (0 = any), version 0.
    out.resize(HEADER, 0);
    out.extend([family, 0, 0, 0]);
    if attribute > 0 {
        out.extend(u16::try_from(attribute).unwrap_or_default().to_ne_bytes());
        out.extend(NAME.to_ne_bytes());
        out.extend(name);
    }
    out.resize(length, 0);
    out
}

/// The error that an answer is (NLMSG_ERROR, linux/netlink.h).
fn refusal(answer: &[u8]) -> Option<io::Error> {
    if answer.get(4..6)? != 2_u16.to_ne_bytes() {
        return None;
    }
    let code = i32::from_ne_bytes(answer.get(HEADER..HEADER + 4)?.try_into().ok()?);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

fn number(answer: &[u8]) -> Option<u32> {
    let half = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    if half(4)? != ANSWER {
        return None;
    }
    let mut at = HEADER + FAMILY;
    loop {
        let length = usize::from(half(at)?);
        if half(at + 2)? == NUMBER {
            return Some(u32::from_be_bytes(answer.get(at + 4..at + 8)?.try_into().ok()?));
        }
        // Each begins at a multiple of four.
        at += length.max(4).next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_found_behind_whatever_else_is_told() {
        let mut answer = [0; HEADER + FAMILY].to_vec();
        answer[4..6].copy_from_slice(&ANSWER.to_ne_bytes());
        assert_eq!(number(&answer), None);
        for (kind, value) in [(3_u16, &b"nft\0\0"[..]), (NUMBER, &[0, 0, 1, 2])] {
            let length = u16::try_from(4 + value.len()).unwrap();
            answer.extend(length.to_ne_bytes());
            answer.extend(kind.to_ne_bytes());
            answer.extend(value);
            answer.resize(answer.len().next_multiple_of(4), 0);
        }
        assert_eq!(number(&answer), Some(0x102));
        assert_eq!(number(&answer[..answer.len() - 1]), None);
        // An error (NLMSG_ERROR) tells none.
        answer[4..6].copy_from_slice(&2_u16.to_ne_bytes());
        assert_eq!(number(&answer), None);
    }
}
