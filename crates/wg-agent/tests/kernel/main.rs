//! Tests the backends of the agent and its data path on the real kernel, in network namespaces. Needs root.

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
