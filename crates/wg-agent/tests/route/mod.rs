//! Kernel settings, and routing tables of a size.

mod settings;
mod size;
