#!/usr/bin/env bash
# Fuzzes every decoder of metasrv, one after the other: metasrv/fuzz/run.sh [seconds for each, 60 unless told otherwise]
#
# On a stable compiler: the coverage that libFuzzer goes by comes from plain options for code generation. What needs a nightly
# one, the address sanitizer, would look for what safe Rust cannot do. `--target` is named so that build scripts and procedural
# macros are built without coverage.
#
# The build, the corpus, which grows from run to run, and inputs that made something fail (artifacts/) are under `fuzz` in
# the target folder. One such input is run again with LAKE_FUZZ_TARGET=<target> <binary> <file>.
set -euo pipefail
seconds="${1:-60}"
here="$(cd "$(dirname "$0")" && pwd)"
target_dir="${CARGO_TARGET_DIR:-$here/../../target}/fuzz"
triple="$(uname -m)-unknown-linux-gnu"

compiler="${CXX:-c++}"
if ! command -v "$compiler" > /dev/null; then
    echo "metasrv/fuzz/run.sh: there is no $compiler, and libFuzzer is written in C++: install g++, or name a compiler in CXX" >&2
    exit 1
fi

coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
RUSTFLAGS="$coverage" cargo build --release --locked --manifest-path "$here/Cargo.toml" --target "$triple" \
    --target-dir "$target_dir"
fuzz="$target_dir/$triple/release/fuzz"

seeds="$target_dir/seeds"
rm -rf "$seeds"
LAKE_FUZZ_SEEDS="$seeds" "$fuzz"
failed=()
for dir in "$seeds"/*; do
    name="$(basename "$dir")"
    mkdir -p "$target_dir/corpus/$name" "$target_dir/artifacts/$name"
    log="$target_dir/$name.log"
    if LAKE_FUZZ_TARGET="$name" "$fuzz" "$target_dir/corpus/$name" "$dir" -max_total_time="$seconds" -timeout=10 \
        -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$target_dir/artifacts/$name/" > "$log" 2>&1; then
        printf '%-18s %s runs, %s inputs kept\n' "$name" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" \
            "$(find "$target_dir/corpus/$name" -type f | wc -l)"
    else
        printf '%-18s FAILED:\n' "$name"
        tail -n 40 "$log"
        failed+=("$name")
    fi
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "metasrv/fuzz/run.sh: these failed: ${failed[*]}; the inputs are in $target_dir/artifacts" >&2
    exit 1
fi
