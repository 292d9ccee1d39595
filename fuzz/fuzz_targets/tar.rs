#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| codelia_worker::fuzz_tar(bytes));
