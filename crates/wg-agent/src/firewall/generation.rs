//! Reads the generation of nftables: the kernel's count of transactions in all tables. It shows whether anything was
//! written since a listing. Reading it needs one netlink message, while a listing needs an `nft` process. Elements that
//! time out do not change it. Also checks whether the agent's table exists.

use std::{fs, io, os::unix::fs::MetadataExt};

use clustermesh_agent_core::numbers::NFT_TABLE;
use clustermesh_netlink::{Errno, Error, Protocol, Socket};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    nftables::{GenAttribute, GenMessage, NfTablesMessage, TableAttribute, TableMessage},
};

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

/// Reads the generation in the network namespace of the calling thread.
///
/// # Errors
/// The kernel does not answer.
pub(crate) fn current() -> io::Result<Generation> {
    let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
    let request = NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() });
    let answer = get(NetfilterProtoFamily::Unspec, request)?;
    let number = number(&answer).ok_or_else(|| io::Error::other("the answer of nftables contains no generation"))?;
    Ok(Generation { namespace, number })
}

/// Whether the agent's table exists in the network namespace of the calling thread. `nft` would read every chain of every
/// table for this.
///
/// # Errors
/// The kernel does not answer.
pub(crate) fn has_table() -> Result<bool, Error> {
    let request = NfTablesMessage::GetTable(TableMessage {
        attributes: vec![TableAttribute::Name(NFT_TABLE.to_owned())],
    });
    match get(NetfilterProtoFamily::Inet, request) {
        Ok(_) => Ok(true),
        Err(error) if error.errno() == Some(Errno::NOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

fn get(family: NetfilterProtoFamily, request: NfTablesMessage) -> Result<NetfilterMessage, Error> {
    let request = NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), request);
    Socket::open(Protocol::Netfilter)?.get(&request)
}

fn number(answer: &NetfilterMessage) -> Option<u32> {
    let NetfilterMessageInner::NfTables(NfTablesMessage::NewGen(generation)) = &answer.inner else {
        return None;
    };
    generation.attributes.iter().find_map(|attribute| match attribute {
        GenAttribute::Id(number) => Some(*number),
        _ => None,
    })
}
