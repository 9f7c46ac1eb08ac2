//! Checks of this machine and builds of programs, for `cargo xtask` and for the benchmarks in bench/.
#![forbid(unsafe_code)]

pub mod prereq;
pub mod programs;
pub mod tools;
