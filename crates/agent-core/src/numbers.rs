//! The numbers and names by which this agent knows its own things in a kernel; nothing here is configurable and no
//! code lives here.
//!
//! They are fixed so that an agent finds what its predecessor left behind, whatever flags either was started with.
//! Everything observed is filtered by them, so what carries other numbers is never touched.

/// Routing table of the mesh prefixes.
pub const TABLE: u32 = 5182;
/// Routing table that holds a default route into the device, for packets marked [`MARK_TUNNEL`].
pub const TABLE_TUNNEL: u32 = 5183;
/// `rtm_protocol` of every route and `FRA_PROTOCOL` of every rule we write. Free in iproute2's `rt_protos`.
pub const PROTOCOL: u8 = 117;
/// Priority of the rule that sends [`MARK_TUNNEL`] to [`TABLE_TUNNEL`].
pub const RULE_TUNNEL: u32 = 1000;
/// Priority of the rule that sends everything without [`MARK_UNDERLAY`] to [`TABLE`].
pub const RULE_MESH: u32 = 1001;

/// The bits of a packet's mark that are looked at: our two, and four that have to be zero beside them. Cilium writes a
/// security identity over the upper half of the marks of pods' packets, which hits our two bits every other time, and then
/// never leaves these four zero (`MARK_MAGIC_*` of bpf/lib/common.h, 0x0200 to 0x0F00). kube-proxy uses 0x4000 and 0x8000;
/// Calico, of its default IptablesMarkMask 0xffff0000, 0x000f0000, and with kube-proxy in IPVS mode all of it: the mask then
/// has to be narrowed (0x000f0000 is enough without IPVS).
pub const MARK_MASK: u32 = 0x0030_0F00;
/// The two bits of a connection's mark that are ours.
pub const CONNECTION_MASK: u32 = 0x0030_0000;
/// Use the underlay: the rule at [`RULE_MESH`] does not apply. Set on the tunnel's outer packets by the device's
/// socket, and on answers to what came by the underlay.
pub const MARK_UNDERLAY: u32 = 0x0010_0000;
/// Use the tunnel, whatever is thrown: answers to what came by the tunnel.
pub const MARK_TUNNEL: u32 = 0x0020_0000;

/// Metric of `throw` routes: what the underlay needs wins over every route of the same prefix.
pub const METRIC_THROW: u32 = 10;
/// Metric of the routes into the device that a Peer gives.
pub const METRIC_PEER: u32 = 20;
/// Metric of the first fallback where an underlay address of this node lies in a mesh network: the device itself.
pub const METRIC_FALLBACK: u32 = 4095;
/// Metric of the `unreachable` routes behind everything else.
pub const METRIC_UNREACHABLE: u32 = 4096;

/// Name of the one nftables table, of family inet.
pub const NFT_TABLE: &str = "clustermesh";
/// allowedIPs one Peer may carry before it is refused: [`crate::compile`] and the kernel stay bounded.
pub const MAX_ALLOWED_IPS: usize = 1000;
