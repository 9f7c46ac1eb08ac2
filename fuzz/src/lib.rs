//! The code of the fuzz targets. The tests in `corpus` run it without libFuzzer.

#[cfg(test)]
mod corpus;
pub mod objects;
pub mod packets;
