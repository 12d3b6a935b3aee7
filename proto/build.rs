//! Compiles the .proto files, which are one package, with protox, so that building needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=proto");
    let files = ["kv", "cluster", "coordination", "nodes", "shards", "watch", "raft", "snapshots"];
    let files = files.map(|name| format!("proto/lake/v1/{name}.proto"));
    let etcd = std::env::var_os("CARGO_FEATURE_ETCD").map(|_| "proto/etcdserverpb/kv.proto".to_owned());
    let descriptors = protox::compile(files.into_iter().chain(etcd), ["proto"])?;
    // Its own codec takes memory of a message's size (src/codec.rs).
    tonic_prost_build::configure().bytes(".").codec_path("crate::codec::Exact").compile_fds(descriptors)?;
    Ok(())
}
