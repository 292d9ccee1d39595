#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| codelia_api::fuzz_web_request(bytes));
