//! Tests `cargo xtask vm` itself. Needs root and QEMU.

mod lifetime;
