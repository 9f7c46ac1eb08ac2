//! Reads and writes a Lease.

use std::time::Duration;

use clustermesh_api::names::RELEASED_BY;
use k8s_openapi::{api::coordination::v1::Lease, apimachinery::pkg::apis::meta::v1::MicroTime, jiff::Timestamp};
use kube::{Api, Error, ResourceExt, api::PostParams};

/// Another replica takes a Lease that has not changed for this long.
pub(super) const DURATION: Duration = Duration::from_secs(4);
/// A longer `leaseDurationSeconds` is respected up to this value.
const MAX_DURATION: Duration = Duration::from_secs(60);

/// The replica that has released the Lease and recorded ([`RELEASED_BY`]) that all its writes, in the hub and in members, have
/// ended. `None` = the Lease has a holder, or there is no such record.
pub(super) fn released_by(lease: &Lease) -> Option<&String> {
    match holder(lease) {
        None => lease.annotations().get(RELEASED_BY),
        Some(_) => None,
    }
}

/// The holder of a Lease. `None` = it was released.
pub(super) fn holder(lease: &Lease) -> Option<&String> {
    lease
        .spec
        .as_ref()?
        .holder_identity
        .as_ref()
        .filter(|holder| !holder.is_empty())
}

/// How long the Lease must be unchanged before another replica takes it.
pub(super) fn duration(lease: Option<&Lease>) -> Duration {
    let seconds = lease.and_then(|lease| lease.spec.as_ref()?.lease_duration_seconds);
    let seconds = seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .unwrap_or_default();
    Duration::from_secs(seconds).clamp(DURATION, MAX_DURATION)
}

/// Returns the Lease with this holder, this duration, and the current time. `current` = `None` makes a new Lease.
pub(super) fn with_holder(current: Option<&Lease>, name: &str, identity: &str, duration: Duration) -> Lease {
    let now = MicroTime(Timestamp::now());
    let mut lease = current.cloned().unwrap_or_default();
    lease.metadata.name = Some(name.to_owned());
    lease.metadata.managed_fields = None;
    let is_renewal = holder(&lease).is_some_and(|holder| holder == identity);
    let spec = lease.spec.get_or_insert_default();
    if !is_renewal {
        spec.holder_identity = Some(identity.to_owned());
        spec.acquire_time = Some(now.clone());
        spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count.saturating_add(1)));
    }
    spec.lease_duration_seconds = i32::try_from(duration.as_secs()).ok();
    spec.renew_time = Some(now);
    lease
}

/// Creates a Lease, or replaces it if it has still the resourceVersion of `lease`.
pub(super) async fn write(leases: &Api<Lease>, lease: &Lease, timeout: Duration) -> Result<Lease, Error> {
    let (name, params) = (lease.name_any(), PostParams::default());
    match &lease.metadata.resource_version {
        Some(_) => within(timeout, leases.replace(&name, &params, lease)).await,
        None => within(timeout, leases.create(&params, lease)).await,
    }
}

pub(super) async fn within<T>(timeout: Duration, request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout(timeout, request).await {
        Ok(answer) => answer,
        Err(elapsed) => Err(Error::Service(Box::new(elapsed))),
    }
}
