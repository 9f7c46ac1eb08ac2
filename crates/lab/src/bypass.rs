//! Installs a datapath that bypasses netfilter, as Cilium's host routing with eBPF does. A `tc` program at the ingress
//! of a node's links redirects packets between pods of different nodes: from a pod's link to `eth0`, and from `eth0` to
//! the bridge of the pods. Netfilter in the node's network namespace never sees them.
//!
//! ```text
//!  pod -- veth -- [program] -----> eth0        toward pods of another node
//!  pod -- veth -- cni0 <--- [program] -- eth0  toward pods of this node
//! ```
//! This module assembles the program itself, so that no BPF compiler is needed. It handles IPv4 on little-endian machines.
//!
//! With this datapath, a ClusterIP whose endpoint is on another node does not work: kube-proxy translates the requests in
//! netfilter, and the replies bypass netfilter, so they keep the address of the endpoint. Cilium replaces kube-proxy for that reason.

use ipnet::Ipv4Net;
use serde_json::Value;

use crate::{Cluster, Error, Node, Result};

/// The bridge of a node's pods.
const BRIDGE: &str = "cni0";
/// The link of a node to other nodes.
const UPLINK: &str = "eth0";
/// Section of the object file that contains the program. libbpf derives the program's type, a `tc` classifier, from
/// this name.
const SECTION: &str = "tc";

impl Cluster<'_> {
    /// Installs the datapath on every node of this cluster. Call it again after a pod was created, because the new
    /// pod's link has no program yet.
    ///
    /// # Errors
    /// When the kernel rejects the program.
    pub async fn bypass_netfilter(&self) -> Result<()> {
        let words = ["get", "nodes", "-o", "json"];
        let nodes = parse(&self.kubectl(words).await?.stdout)?;
        let ranges: Vec<(&str, Ipv4Net)> = list(&nodes["items"])
            .filter_map(|node| {
                let range = node["spec"]["podCIDR"].as_str()?.parse().ok()?;
                Some((node["metadata"]["name"].as_str()?, range))
            })
            .collect();
        for node in self.nodes() {
            node.bypass_netfilter(&ranges).await?;
        }
        Ok(())
    }
}

impl Node<'_> {
    async fn bypass_netfilter(&self, ranges: &[(&str, Ipv4Net)]) -> Result<()> {
        let links = parse(&self.exec(["ip", "-j", "link", "show"]).await?.stdout)?;
        let index = |name: &str| {
            let link = list(&links).find(|link| link["ifname"] == name);
            link.and_then(|link| u32::try_from(link["ifindex"].as_u64()?).ok())
                .ok_or_else(|| Error::Other(format!("{} has no link {name}", self.name())))
        };
        let (bridge, uplink) = (index(BRIDGE)?, index(UPLINK)?);
        let pod_links: Vec<&str> = list(&links)
            .filter(|link| link["master"] == BRIDGE)
            .filter_map(|link| link["ifname"].as_str())
            .collect();
        let mut batch = String::new();
        for link in pod_links.iter().chain([&UPLINK]) {
            batch += &format!("qdisc replace dev {link} clsact\n");
        }
        for (position, (name, range)) in ranges.iter().enumerate() {
            let (ingress_links, to) = if *name == self.name() {
                (&[UPLINK][..], bridge)
            } else {
                (&pod_links[..], uplink)
            };
            let file = format!("{}-to-{name}.o", self.name());
            let file = self.lab().directory().join(file);
            std::fs::write(&file, object(&program(*range, to)))
                .map_err(Error::io(format!("write {}", file.display())))?;
            for link in ingress_links {
                batch += &format!(
                    "filter replace dev {link} ingress pref {pref} handle 1 bpf direct-action object-file {file} section {SECTION}\n",
                    pref = position + 1,
                    file = file.display()
                );
            }
        }
        self.exec_with_stdin(["tc", "-batch", "-"], &batch).await.map(drop)
    }
}

fn parse(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::Other(format!("{error}: {text}")))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Redirects IPv4 packets for a pod in `range` to the link with index `to`; the kernel looks up the route and the
/// neighbour. All other packets pass, also packets for the node's own address, which is the first one after the network address.
///
/// Each instruction has: opcode, source and destination register, offset (of a jump: instructions to skip), value (RFC 9669).
fn program(range: Ipv4Net, to: u32) -> Vec<u8> {
    let node_address = u32::from(range.network()) + 1;
    let ethernet_header = 14;
    // In bytes, in the IPv4 header.
    let destination_offset = 16;
    // In bytes, in `struct __sk_buff`.
    let protocol_offset = 16;
    let bpf_redirect_neigh = 152;
    let instructions: [(u8, u8, i16, u32); 15] = [
        // r6 = the packet: instruction 0x20 reads from it
        (0xbf, 0x16, 0, 0),
        // if packet.protocol (network byte order) != IPv4: jump to the end
        (0x61, 0x62, protocol_offset, 0),
        (0x55, 0x02, 10, u16::to_be(0x0800).into()),
        // r0 = the destination address, in host byte order
        (0x20, 0x00, 0, ethernet_header + destination_offset),
        // if r0 == node_address: jump to the end
        (0x16, 0x00, 8, node_address),
        // if r0 & netmask != the range: jump to the end
        (0x54, 0x00, 0, range.netmask().into()),
        (0x56, 0x00, 6, range.network().into()),
        // return bpf_redirect_neigh(to, NULL, 0, 0)
        (0xb7, 0x01, 0, to),
        (0xb7, 0x02, 0, 0),
        (0xb7, 0x03, 0, 0),
        (0xb7, 0x04, 0, 0),
        (0x85, 0x00, 0, bpf_redirect_neigh),
        (0x95, 0x00, 0, 0),
        // the end: return TC_ACT_UNSPEC, which runs the next program
        (0xb7, 0x00, 0, u32::MAX),
        (0x95, 0x00, 0, 0),
    ];
    let encode = |(opcode, registers, offset, value): (u8, u8, i16, u32)| {
        let (offset, value) = (offset.to_le_bytes(), value.to_le_bytes());
        [[opcode, registers].as_slice(), &offset, &value].concat()
    };
    instructions.into_iter().flat_map(encode).collect()
}

/// Writes a relocatable object file (ELF) with the program as its only function, as a compiler would.
fn object(program: &[u8]) -> Vec<u8> {
    const HEADER: usize = 64;
    const SYMBOL: usize = 24;
    let names = format!("\0.strtab\0.symtab\0license\0{SECTION}\0redirect\0");
    let name = |of: &str| number(names.find(&format!("\0{of}\0")).map_or(0, |at| at + 1));
    let license = b"Apache-2.0\0";
    // The first symbol is always empty. The second one is the program: a global function in section 1.
    let mut symbols = vec![0; SYMBOL];
    symbols.extend(name("redirect"));
    symbols.extend([0x12, 0, 1, 0]);
    symbols.extend([0; 8]);
    symbols.extend(wide(program.len()));

    // Type, flags, linked section, first global symbol, size of an entry.
    let sections: [(&str, &[u8], [usize; 5]); 4] = [
        (SECTION, program, [1, 6, 0, 0, 0]),
        ("license", license, [1, 3, 0, 0, 0]),
        (".symtab", &symbols, [2, 0, 4, 1, SYMBOL]),
        (".strtab", names.as_bytes(), [3, 0, 0, 0, 0]),
    ];
    let (mut contents, mut headers) = (Vec::new(), vec![0; HEADER]);
    for (of, content, [kind, flags, linked, first, entry]) in sections {
        headers.extend([name(of), number(kind)].concat());
        headers.extend([wide(flags), wide(0), wide(HEADER + contents.len()), wide(content.len())].concat());
        headers.extend([number(linked), number(first)].concat());
        headers.extend([wide(8), wide(entry)].concat());
        contents.extend_from_slice(content);
        contents.resize(contents.len().next_multiple_of(8), 0);
    }
    // 64 bits, little-endian, relocatable, for BPF. The section headers come last; section 4 contains their names.
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([1, 0, 247, 0, 1, 0, 0, 0]);
    file.extend([wide(0), wide(0), wide(HEADER + contents.len())].concat());
    for half in [0, 0, 64, 0, 0, 64, 5, 4] {
        file.extend(u16::to_le_bytes(half));
    }
    [file, contents, headers].concat()
}

/// Encodes a 32-bit number for an object file.
fn number(value: usize) -> [u8; 4] {
    u32::try_from(value).unwrap_or_default().to_le_bytes()
}

/// Encodes a 64-bit number for an object file.
fn wide(value: usize) -> [u8; 8] {
    u64::try_from(value).unwrap_or_default().to_le_bytes()
}
