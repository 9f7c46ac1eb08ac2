//! Names the fields in which an existing object differs from the planned one.

use crate::observe::{AccessSpec, PeerSpec, PolicySpec};

/// Returns the names of the fields that are marked `true`.
pub(super) fn differing<const N: usize>(fields: [(&'static str, bool); N]) -> Vec<&'static str> {
    let differing = fields.into_iter().filter(|(_, differs)| *differs);
    differing.map(|(field, _)| field).collect()
}

pub(super) fn peer_fields(old: &PeerSpec, new: &PeerSpec) -> Vec<&'static str> {
    differing([
        ("spec.publicKey", old.public_key != new.public_key),
        ("spec.allowedIPs", old.allowed_ips != new.allowed_ips),
        ("spec.endpoint", old.endpoint != new.endpoint),
        (
            "spec.persistentKeepalive",
            old.persistent_keepalive != new.persistent_keepalive,
        ),
        (
            "metadata.annotations",
            old.candidates != new.candidates || old.role != new.role,
        ),
    ])
}

pub(super) fn policy_fields(old: &PolicySpec, new: &PolicySpec) -> Vec<&'static str> {
    differing([
        ("spec.sources", old.sources != new.sources),
        ("spec.networks", old.networks != new.networks),
        ("spec.allow", old.allow != new.allow),
        ("spec.deny", old.deny != new.deny),
        (
            "spec.infrastructurePorts",
            old.infrastructure_ports != new.infrastructure_ports,
        ),
        ("spec.anchored", old.anchored != new.anchored),
        // A PeerPolicy is closed if its isolationProfile is not cluster-meshed. The PeerPolicy of a quarantined member has
        // `standard`.
        ("spec.isolationProfile", old.closed != new.closed),
    ])
}

pub(super) fn access_fields(old: &AccessSpec, new: &AccessSpec) -> Vec<&'static str> {
    differing([
        ("spec.sandbox", old.sandbox != new.sandbox),
        ("spec.sandboxID", old.id != new.id),
        ("spec.networks", old.networks != new.networks),
        ("spec.nodes", old.nodes != new.nodes),
        ("spec.grants", old.grants != new.grants),
    ])
}
