//! Tests of sysctls and of large routing tables.

mod settings;
mod size;
