//! Fuzz target of the same name in src/packets.rs.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    clustermesh_fuzz::packets::unreachable(bytes);
});
