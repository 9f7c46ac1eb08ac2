//! The numbers and names in the agent's kernel state: routing tables, rule priorities, mark bits, metrics. Also the limit
//! [`MAX_ALLOWED_IPS`].
//!
//! They are fixed, so an agent finds the kernel state of an earlier process even if the flags differ. The agent recognizes its routes and
//! rules by [`PROTOCOL`] and its nftables table by [`NFT_TABLE`], so it never changes the state of other programs.

/// Routing table of the mesh prefixes.
pub const TABLE: u32 = 5182;
/// Routing table with a default route into the device, for packets marked [`MARK_TUNNEL`].
pub const TABLE_TUNNEL: u32 = 5183;
/// `rtm_protocol` of every route and `FRA_PROTOCOL` of every rule that the agent writes. Unassigned in iproute2's `rt_protos`.
pub const PROTOCOL: u8 = 117;
/// Priority of the rule that looks up packets with [`MARK_TUNNEL`] in [`TABLE_TUNNEL`], unless another program's rule comes before it
/// ([`crate::routes::Routes::before_foreign_rules`]).
pub const RULE_TUNNEL: u32 = 1000;
/// Priority of the rule that looks up packets without [`MARK_UNDERLAY`] in [`TABLE`], with the same exception.
pub const RULE_MESH: u32 = 1001;

/// The bits of a packet's mark that are compared: our two bits, and four bits that must be zero.
///
/// Cilium writes a security identity into the upper 16 bits of the marks of pods' packets, and so often sets our bits. It then always sets
/// at least one of the four bits, too (`MARK_MAGIC_*` in bpf/lib/common.h, 0x0200 to 0x0F00), so such a mark never equals one of ours.
/// kube-proxy uses 0x4000 and 0x8000. Calico's default IptablesMarkMask is 0xffff0000, of which Calico uses 0x000f0000. With kube-proxy in
/// IPVS mode, Calico uses the whole mask: then the user must exclude our two bits from IptablesMarkMask. A mask of only 0x000f0000 is too
/// small for IPVS mode.
pub const MARK_MASK: u32 = 0x0030_0F00;
/// Our two bits in the mark of a conntrack entry.
pub const CONNECTION_MASK: u32 = 0x0030_0000;
/// Mark of packets that are routed over the underlay: the rule at [`RULE_MESH`] does not match. The device's socket sets it on the
/// tunnel's outer packets. The firewall sets it on received outer packets, and on packets of connections that a mesh source opened over
/// the underlay.
pub const MARK_UNDERLAY: u32 = 0x0010_0000;
/// Mark of packets that are routed into the tunnel, even to a destination with a `throw` route. The firewall sets it on replies to
/// packets from the tunnel, if the destination of the reply has such a route.
pub const MARK_TUNNEL: u32 = 0x0020_0000;

/// Metric of `throw` routes. It is the lowest, so they win over all our other routes of the same prefix.
pub const METRIC_THROW: u32 = 10;
/// Metric of the routes into the device for the allowed IPs of Peers, and of the default route in [`TABLE_TUNNEL`].
pub const METRIC_PEER: u32 = 20;
/// Metric of the fallback route into the device for a mesh prefix. The route exists only if this node has an underlay address of the
/// same family in a mesh network.
pub const METRIC_FALLBACK: u32 = 4095;
/// Metric of the `unreachable` routes, the last fallback.
pub const METRIC_UNREACHABLE: u32 = 4096;

/// Name of the agent's nftables table, of family inet. (`wg-agent rotate-key` has another one for its own rules.)
pub const NFT_TABLE: &str = "clustermesh";
/// A Peer with more allowedIPs is refused. Bounds the work of [`crate::compile()`] and the kernel.
pub const MAX_ALLOWED_IPS: usize = 1000;
