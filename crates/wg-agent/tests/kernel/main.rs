//! Tests the backends of the agent and its data path on the host's kernel, in network namespaces. This kernel may have no WireGuard, so
//! the tunnels are userspace devices or veth pairs; the tests in `tests/machine` use the kernel's WireGuard. Needs root.

mod agent;
mod device;
mod firewall;
mod flows;
mod hostile_packets;
mod hostile_sender;
mod masquerade;
mod mtu;
mod route;
mod userspace;
mod wireguard_go;
