//! See `forebay_fuzz::checks::lineage`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| forebay_fuzz::checks::lineage(bytes));
