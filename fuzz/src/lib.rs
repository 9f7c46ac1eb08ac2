//! What the fuzz targets run. The test `corpus` runs it on a stable compiler, without libFuzzer.

#[cfg(test)]
mod corpus;
pub mod objects;
pub mod packets;
