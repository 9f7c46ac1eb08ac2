//! Fuzz target of the same name in bodies/objects.rs.
#![no_main]

#[path = "../bodies/objects.rs"]
#[allow(dead_code, reason = "each target uses one of the bodies")]
mod objects;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    objects::annotation(bytes);
});
