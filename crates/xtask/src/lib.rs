//! What `cargo xtask` shares with the benchmarks in bench/: checks of this machine, and builds of programs.
#![forbid(unsafe_code)]

pub mod prereq;
pub mod programs;
pub mod tools;
