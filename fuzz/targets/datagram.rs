//! Runs `packets::datagram` with libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    clustermesh_fuzz::packets::datagram(bytes);
});
