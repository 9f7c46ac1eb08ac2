//! Fuzz target of the same name in bodies/packets.rs.
#![no_main]

#[path = "../bodies/packets.rs"]
#[allow(dead_code, reason = "each target uses one of the bodies")]
mod packets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    packets::unreachable(bytes);
});
