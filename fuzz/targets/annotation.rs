//! Runs `objects::annotation` with libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    clustermesh_fuzz::objects::annotation(bytes);
});
