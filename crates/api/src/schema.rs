//! Defines schemas that the types of the CRDs share: bounded texts, networks, ports.
//!
//! Every list and text has a maximum length, because the API server estimates the cost of a CEL rule for the largest object that the
//! schema accepts, and refuses a CRD whose estimate is too high. Integers have explicit bounds, because the derive would write
//! `format: uint16`, which an API server ignores.

use schemars::{Schema, SchemaGenerator, json_schema};

/// The limit of entries of a mesh.
pub(crate) const MAX_CLUSTERS: u32 = 100;
/// The limit of networks of one entry.
pub(crate) const MAX_NETWORKS: u32 = 64;
/// The limit of anchored networks of one entry.
pub(crate) const MAX_ANCHORED: u32 = 16;
/// The limit of nodes of one sandbox.
pub(crate) const MAX_SANDBOX_NODES: u32 = 5000;
/// The limit of Service ports that one sandbox may reach in one cluster.
pub(crate) const MAX_SANDBOX_GRANTS: u32 = 2048;
/// The longest text of a network: an IPv6 address that ends in an IPv4 address has up to 45 characters, and `/128` has 4.
const MAX_CIDR: u32 = 49;

fn cidr() -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": MAX_CIDR,
        "x-kubernetes-validations": [{
            "rule": "isCIDR(self)",
            "message": "is not a network: write an address and a prefix length, such as 10.244.0.0/16 or fd00:10:244::/48",
            "reason": "FieldValueInvalid",
        }],
    })
}

/// A list of networks of one member, at least one.
pub(crate) fn networks_required(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "minItems": 1, "maxItems": MAX_NETWORKS, "items": cidr()})
}

/// A list of networks of one member.
pub(crate) fn networks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": MAX_NETWORKS, "items": cidr()})
}

/// The list of anchored networks. It is short, because a CEL rule compares each entry with another list.
pub(crate) fn anchored_networks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": MAX_ANCHORED, "items": cidr()})
}

/// Networks of a policy. The controller writes the policy, and its networks may contain an address for each node of a member.
pub(crate) fn policy_networks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": 8192, "items": cidr()})
}

/// Networks of one rule of a policy.
pub(crate) fn rule_networks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "minItems": 1, "maxItems": 1024, "items": cidr()})
}

/// Networks that an earlier plan accepted, in the status. They are not validated, because the controller ignores malformed ones when it
/// reads the status.
pub(crate) fn accepted_networks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": MAX_NETWORKS, "items": {"type": "string", "maxLength": MAX_CIDR}})
}

/// A UDP or TCP port, 1 to 65535.
pub(crate) fn port(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535})
}

/// A transport protocol ([`clustermesh_core::mesh::Protocol`]).
pub(crate) fn protocol(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["TCP", "UDP", "SCTP"]})
}

/// Seconds, 0 to 65535.
pub(crate) fn seconds(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 0, "maximum": 65535})
}

/// A number of anchors, 1 to 64.
pub(crate) fn anchors(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 1, "maximum": 64})
}

/// A port of a Service: its number, or its name (a DNS label of at most 63 characters).
pub(crate) fn port_ref(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}],
        "minimum": 1, "maximum": 65535, "maxLength": 63})
}

/// WireGuard addresses of one node: at least one, at most one of each family.
pub(crate) fn wireguard_ips(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "minItems": 1, "maxItems": 2, "items": {
        "type": "string",
        "maxLength": 45,
        "x-kubernetes-validations": [{
            "rule": "isIP(self)",
            "message": "is not an address: write it without a prefix length, such as 100.80.16.1 or fd00:80::1",
            "reason": "FieldValueInvalid",
        }],
    }})
}

/// Addresses with ports.
pub(crate) fn sockets(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": 16, "items": {
        "type": "string",
        "maxLength": 53,
        "x-kubernetes-validations": [{
            "rule": "self.matches('^([0-9.]+|\\\\[[0-9a-fA-F:.]+\\\\]):[0-9]{1,5}$')",
            "message": "is not an address with a port: write it as 203.0.113.7:51820 or [2001:db8::7]:51820",
            "reason": "FieldValueInvalid",
        }],
    }})
}

/// A list of short texts that only programs of the project write.
pub(crate) fn texts(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": 64, "items": {"type": "string", "maxLength": 64}})
}

/// New connections a second, 1 to 1,000,000.
pub(crate) fn rate(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 1, "maximum": 1_000_000})
}
