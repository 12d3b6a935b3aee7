#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    lake_metasrv::fuzzing::journal(bytes);
});
