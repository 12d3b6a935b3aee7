//! What is in a package, and what is not: places at which a process dies because a test says so are in what is built for tests alone.

use std::process::Command;

use crate::common::LAKE;

fn holds(text: &str) -> bool {
    Command::new("grep").args(["-qaF", text, LAKE]).status().unwrap().success()
}

/// The features that each of lake's crates has in a program that is built so.
fn features(build: &[&str]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--offline", "--locked", "--package", "lake", "--depth", "1", "--format", "{p} [{f}]"]);
    let output = cargo.args(build).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_what_is_built_for_tests_can_die_where_a_test_says() {
    assert!(!features(&["--edges", "no-dev", "--all-features"]).contains("failpoints"));
    // The program that the tests run is another one; and of peers not even that can.
    assert!(features(&[]).contains("failpoints"));
    assert!(holds("LAKE_QUERY_DIE_AT") && !holds("LAKE_METASRV_DIE_AT"));
}
