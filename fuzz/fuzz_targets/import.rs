//! See `forebay_fuzz::checks::import`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| forebay_fuzz::checks::import(bytes));
