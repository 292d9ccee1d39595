#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| codelia_egress::fuzz::socks(bytes));
