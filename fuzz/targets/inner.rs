//! Runs `packets::inner` with libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    clustermesh_fuzz::packets::inner(bytes);
});
