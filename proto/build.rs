//! Compiles the .proto files with protox, so that building needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["proto/lake/v1/kv.proto", "proto/lake/v1/cluster.proto", "proto/lake/v1/raft.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().bytes(".lake.v1").compile_fds(descriptors)?;
    Ok(())
}
