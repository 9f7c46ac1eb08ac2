//! Fuzz target of the same name in src/objects.rs.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    clustermesh_fuzz::objects::compiled(bytes);
});
