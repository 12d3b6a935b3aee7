#!/usr/bin/env bash
# Flink as its users use it, against a cluster that `lake up` starts:
#
#     query/tests/flink/run.sh target/release/lake iceberg-flink-runtime-1.20-1.10.2.jar \
#       hadoop-client-api-3.3.4.jar hadoop-client-runtime-3.3.4.jar
#
# The jars are what Flink's users add to it: Iceberg's runtime, and Hadoop's client, which that needs. They are not on PyPI and not in
# Debian, so they are not fetched. Flink comes from PyPI, and stays in target/flink to be used again. Needs Java (17 or 11, with javac)
# and python3 with venv.
set -euo pipefail
usage='query/tests/flink/run.sh target/release/lake iceberg-flink-runtime.jar hadoop-client.jar ...'
lake=$(realpath "${1:?where is lake? $usage}")
: "${2:?where is the runtime of Iceberg for Flink 1.20? $usage}"
jars=$(realpath "${@:2}" | paste -sd:)
here=$(cd "$(dirname "$0")" && pwd)
home=${CARGO_TARGET_DIR:-$here/../../../target}/flink
mkdir -p "$home"
home=$(cd "$home" && pwd)
flink=apache-flink-libraries==1.20.3
if [ "$(cat "$home/installed" 2>/dev/null)" != "$flink" ]; then
  rm -rf "$home/python"
  python3 -m venv "$home/python"
  "$home/python/bin/pip" install -q "$flink"
  # Last, so that an interrupted installation is not taken for a whole one.
  echo "$flink" >"$home/installed"
fi
libraries=$(ls "$home"/python/lib/python3*/site-packages/pyflink/lib/*.jar | paste -sd:)
exec python3 -B "$here/session.py" "$lake" "$libraries:$jars"
