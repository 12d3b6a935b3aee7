#!/usr/bin/env bash
# Spark as its users use it, against a cluster that `lake up` starts: query/tests/spark/run.sh target/release/lake
#
# Needs Java (17 or 11, with javac), python3 with venv, and root for apt-get where the Debian jars are missing. What it
# installs stays in target/spark and is used again.
set -euo pipefail
lake=$(realpath "${1:?where is lake? query/tests/spark/run.sh target/release/lake}")
here=$(cd "$(dirname "$0")" && pwd)
home=${CARGO_TARGET_DIR:-$here/../../../target}/spark
mkdir -p "$home"
home=$(cd "$home" && pwd)

# Iceberg's runtime jar on PyPI lacks the classes of other projects that it shades. They come from Debian, under the names
# that the runtime asks for.
setup() {
  rm -rf "$home/python" "$home/jars" "$home/made"
  mkdir -p "$home/jars" "$home/made"
  python3 -m venv "$home/python"
  "$home/python/bin/pip" install -q uv==0.13.9
  "$home/python/bin/uv" pip install -q --python "$home/python/bin/python" -r "$here/requirements.txt"
  local jar=/usr/share/java
  if ! ls "$jar"/{httpclient5,httpcore5,httpcore5-h2,jackson-core}.jar "$jar"/jarjar*.jar >/dev/null 2>&1; then
    apt-get install -y -q libhttpclient5-java libhttpcore5-java libjarjar-java libjackson2-core-java >"$home/made/apt.log" 2>&1 ||
      { cat "$home/made/apt.log"; echo "Debian's http client and jarjar are needed and cannot be installed: see above"; return 1; }
  fi
  cat >"$home/made/rules" <<'RULES'
rule org.apache.hc.** org.apache.iceberg.shaded.org.apache.hc.@1
rule com.fasterxml.jackson.** org.apache.iceberg.shaded.com.fasterxml.jackson.@1
RULES
  local tool source
  tool=$(find "$jar" -name 'jarjar*.jar' | head -n 1)
  for source in "$jar"/{httpclient5,httpcore5,httpcore5-h2,jackson-core}.jar \
    "$home"/python/lib/python3*/site-packages/pyspark/jars/jackson-{annotations,databind}-2*.jar; do
    java -jar "$tool" process "$home/made/rules" "$source" "$home/jars/$(basename "$source")"
  done
  # A newer class that the runtime names and never uses over plain HTTP.
  local package=org/apache/iceberg/shaded/org/apache/hc/client5/http/ssl
  mkdir -p "$home/made/$package"
  echo "package ${package//\//.}; public interface TlsSocketStrategy {}" >"$home/made/$package/TlsSocketStrategy.java"
  (cd "$home/made" && javac -d classes "$package/TlsSocketStrategy.java" && jar cf "$home/jars/missing.jar" -C classes .)
  # Last, so that an interrupted installation is not taken for a whole one.
  cp "$here/requirements.txt" "$home/installed"
}

cmp -s "$here/requirements.txt" "$home/installed" || setup
jars=$(ls -d "$home"/jars/*.jar "$home"/python/lib/python3*/site-packages/snowpark_connect_deps_iceberg/jars/iceberg-spark-runtime-3.5_2.12-*.jar | paste -sd:)
exec "$home/python/bin/python" -B "$here/session.py" "$lake" "$jars"
