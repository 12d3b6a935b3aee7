"""What Flink users do with Iceberg tables: each step checks what comes back, in Flink and in lake's own SQL.

    session.py LAKE JARS      (run.sh sets up Flink and calls this)

LAKE is the binary, which starts a cluster of its own; JARS the class path with Flink and Iceberg's runtime for it.
"""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "spark"))
from lake import JAVA_OPTIONS, PATIENCE_SECONDS, Checks, ended, take  # noqa: E402 beside Spark's

MARK = "<answer> "
# Flink 1.20 looks into what Java 17 hides.
OPENED = ["java.base/java.lang", "java.base/java.util", "java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang.invoke",
          "java.base/java.lang.reflect", "java.base/java.net", "java.base/java.text", "java.base/java.time", "java.base/java.io",
          "java.base/java.util.concurrent", "java.base/java.util.concurrent.atomic", "java.base/java.util.concurrent.locks"]


class Flink(Checks):
    engine = "flink"

    def __init__(self, cluster, jars, directory):
        super().__init__(cluster)
        opened = [part for package in OPENED for part in ("--add-opens", f"{package}=ALL-UNNAMED")]
        # What Flink leaves behind goes with the directory.
        scratch = directory / "flink"
        scratch.mkdir()
        self.said = open(directory / "flink.log", "w+")
        self.java = subprocess.Popen(
            ["java", "-Xmx2g", *JAVA_OPTIONS, f"-Djava.io.tmpdir={scratch}", *opened, "-cp", jars, str(HERE / "Shell.java")],
            text=True, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said)
        try:
            catalog = (f"CREATE CATALOG lake WITH ('type' = 'iceberg', 'catalog-type' = 'rest', 'uri' = 'http://{cluster.rest}',"
                       " 'warehouse' = 'lake', 'cache-enabled' = 'false')")
            for mode in ("", "stream "):
                self.run(mode + catalog)
            self.run("USE CATALOG lake")
        except BaseException:
            self.kill()
            raise

    @staticmethod
    def word(value):
        return "null" if value is None else str(value)

    def ask(self, sql):
        self.java.stdin.write(sql + "\n")
        self.java.stdin.flush()
        for line in self.java.stdout:
            if line.startswith(MARK):
                word, _, rest = line.removeprefix(MARK).removesuffix("\n").partition(" ")
                assert word == "rows", f"{sql}\n  {rest}"
                return [tuple(row.split("\t")) for row in rest.split("\t\t")] if rest else []
        self.said.seek(0)
        raise AssertionError(f"{sql}\n  Flink has ended: {self.said.read()}")

    def kill(self):
        self.java.kill()

    def stop(self):
        self.java.stdin.close()
        ended(self.java)


def tables(c):
    c.run("CREATE DATABASE f")
    c.run("CREATE TABLE f.events (id BIGINT, kind STRING, seen TIMESTAMP(6)) PARTITIONED BY (kind)")
    c.run("INSERT INTO f.events VALUES (1, 'a', TIMESTAMP '2026-01-01 10:00:00'), (2, 'b', TIMESTAMP '2026-01-01 11:00:00'),"
          " (3, 'a', CAST(NULL AS TIMESTAMP(6)))")
    c.both("SELECT id, kind FROM f.events ORDER BY id", [("1", "a"), ("2", "b"), ("3", "a")])
    c.expect("SELECT seen FROM f.events WHERE id = 2", [("2026-01-01T11:00",)])
    c.run("INSERT OVERWRITE f.events PARTITION (kind = 'a') SELECT 9, CAST(NULL AS TIMESTAMP(6))")
    c.both("SELECT id, kind FROM f.events ORDER BY id", [("2", "b"), ("9", "a")])
    c.refused("CREATE TABLE f.events (id BIGINT)", "already exists")


def upsert(c):
    """Rows are replaced by their key, which leaves equality deletes."""
    c.run("CREATE TABLE f.u (id BIGINT, v STRING, PRIMARY KEY (id) NOT ENFORCED)"
          " WITH ('format-version' = '2', 'write.upsert.enabled' = 'true')")
    c.run("INSERT INTO f.u VALUES (1, 'a'), (2, 'b')")
    c.run("INSERT INTO f.u VALUES (2, 'c'), (3, 'd')")
    c.both("SELECT id, v FROM f.u ORDER BY id", [("1", "a"), ("2", "c"), ("3", "d")])


def evolution(c):
    c.run("CREATE TABLE f.e (id INT, name STRING)")
    c.run("INSERT INTO f.e VALUES (1, 'one')")
    c.run("ALTER TABLE f.e ADD note STRING")
    c.run("ALTER TABLE f.e MODIFY id BIGINT")
    c.run("ALTER TABLE f.e RENAME name TO title")
    c.run("ALTER TABLE f.e SET ('owner.team' = 'x')")
    c.run("INSERT INTO f.e VALUES (5000000000, 'two', 'n')")
    c.both("SELECT id, title, note FROM f.e ORDER BY id", [("1", "one", "null"), ("5000000000", "two", "n")])
    c.run("ALTER TABLE f.e RENAME TO f.e2")
    assert ("e2",) in c.run("SHOW TABLES IN f")


def versions(c):
    c.run("CREATE TABLE f.b (id INT)")
    c.run("INSERT INTO f.b VALUES (1)")
    first = c.run("SELECT snapshot_id FROM f.`b$snapshots`")[0][0]
    c.in_lake("CALL system.create_branch(table => 'f.b', name => 'audit')")
    c.run("INSERT INTO f.b /*+ OPTIONS('branch'='audit') */ VALUES (2)")
    c.both("SELECT id FROM f.b ORDER BY id", [("1",)])
    c.expect("SELECT id FROM f.b /*+ OPTIONS('branch'='audit') */ ORDER BY id", [("1",), ("2",)])
    c.run("INSERT INTO f.b VALUES (3)")
    c.expect(f"SELECT id FROM f.b /*+ OPTIONS('snapshot-id'='{first}') */", [("1",)])


def from_lake(c):
    """What lake's own SQL wrote, deletes included, and then both in turn."""
    c.in_lake("CREATE TABLE f.l AS SELECT * FROM (VALUES (1, 'a'), (2, NULL), (3, 'c')) AS v(id, what)")
    c.in_lake("ALTER TABLE f.l SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')")
    c.in_lake("DELETE FROM f.l WHERE id = 1")
    c.both("SELECT id, what FROM f.l ORDER BY id", [("2", "null"), ("3", "c")])
    c.run("INSERT INTO f.l VALUES (4, 'd')")
    c.in_lake("UPDATE f.l SET what = 'z' WHERE id = 4")
    c.both("SELECT id, what FROM f.l ORDER BY id", [("2", "null"), ("3", "c"), ("4", "z")])


def stream(c):
    """A stream follows what lake commits, and commits it to another table with each checkpoint."""
    c.in_lake("CREATE TABLE f.source (id BIGINT)")
    c.in_lake("CREATE TABLE f.sink (id BIGINT)")
    c.in_lake("INSERT INTO f.source VALUES (1)")
    c.run("stream INSERT INTO lake.f.sink SELECT id FROM lake.f.source"
          " /*+ OPTIONS('streaming'='true', 'monitor-interval'='1s') */")
    for n in (1, 2, 3):
        c.lake_shows("SELECT id FROM f.sink ORDER BY id", [(str(m),) for m in range(1, n + 1)], PATIENCE_SECONDS)
        c.in_lake(f"INSERT INTO f.source VALUES ({n + 1})")
    c.run("cancel")


def names(c):
    for (name,) in c.run("SHOW TABLES IN f"):
        c.run(f"DROP TABLE f.{name}")
    c.run("DROP DATABASE f")
    c.refused("SELECT * FROM f.events", "not found")


STEPS = [tables, upsert, evolution, versions, from_lake, stream, names]


if __name__ == "__main__":
    binary, jars = sys.argv[1:]
    take(STEPS, binary, lambda cluster, directory: Flink(cluster, jars, directory))
