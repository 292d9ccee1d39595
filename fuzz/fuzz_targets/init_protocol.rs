#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| codelia_init::fuzz::init_protocol(bytes));
