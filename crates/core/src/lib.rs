//! The mesh planner: values in, values out. No I/O, no clock, no Kubernetes types live here.
#![forbid(unsafe_code)]

pub mod key;
