//! Kernel settings, the lock of sandboxes, and routing tables of a size.

mod lock;
mod settings;
mod size;
