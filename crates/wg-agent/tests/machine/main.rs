//! Tests the agent with the kernel's WireGuard. All tests run in a virtual machine, so the host's kernel does not matter. Needs root.

mod device;
mod drift;
mod gateway;
mod restart;
mod sizes;
mod virtual_machine;
