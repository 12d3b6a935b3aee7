//! Compiles the .proto files with protox, so that building needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["kv", "cluster", "coordination", "watch", "raft"].map(|name| format!("proto/lake/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().bytes(".lake.v1").compile_fds(descriptors)?;
    Ok(())
}
