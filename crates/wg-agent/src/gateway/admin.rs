//! Binds the admin port of a gateway to all interfaces that exist at the start except the WireGuard device, so that sandboxes cannot
//! reach the port even while the pod has no firewall table. On Linux before 5.7 the port is bound to all interfaces.

use std::io;

use clustermesh_agent_core::interface::InterfaceName;
use clustermesh_daemon::Admin;

use super::forwarding;
use crate::args::GatewayConfig;

/// Binds the port to the interfaces that exist now, except the WireGuard device; or to all if the kernel refuses that.
///
/// # Errors
/// The address cannot be bound.
pub(super) fn bind(config: &GatewayConfig) -> anyhow::Result<Admin> {
    let interfaces = forwarding::interfaces_except(&config.interface);
    // `kubectl port-forward` connects to the loopback interface.
    let interfaces = ["lo"].into_iter().chain(interfaces.iter().map(InterfaceName::as_str));
    match Admin::bind_to_interfaces(config.listen, interfaces) {
        Err(error) if is_refused(&error) => {
            tracing::warn!(
                error = format!("{error:#}"),
                "the admin endpoint listens on the WireGuard device, too (Linux before 5.7): if another program deletes the firewall \
                 table, sandboxes can reach the endpoint"
            );
            Admin::bind(config.listen)
        }
        bound => bound,
    }
}

/// Linux before 5.7 refuses `SO_BINDTODEVICE` without NET_RAW.
fn is_refused(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}
