"""What Spark users do with Iceberg tables: each step checks what comes back, in Spark and in lake's own SQL.

    session.py LAKE JARS      (run.sh sets up Spark and calls this)

LAKE is the binary, which starts a cluster of its own; JARS the class path with Iceberg's runtime.
"""

import sys

from lake import JAVA_OPTIONS, Checks, take
from pyspark.sql import SparkSession

ICEBERG = "org.apache.iceberg.spark"


def session(uri, jars, scratch):
    return (
        SparkSession.builder.master("local[2]").appName("lake")
        .config("spark.driver.extraClassPath", jars).config("spark.driver.extraJavaOptions", " ".join(JAVA_OPTIONS))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.warehouse.dir", scratch)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.extensions", f"{ICEBERG}.extensions.IcebergSparkSessionExtensions")
        .config("spark.sql.catalog.lake", f"{ICEBERG}.SparkCatalog")
        .config("spark.sql.catalog.lake.type", "rest").config("spark.sql.catalog.lake.uri", uri)
        .config("spark.sql.catalog.lake.warehouse", "lake")
        # Else Spark goes on with the version that it loaded first, for 30 s.
        .config("spark.sql.catalog.lake.cache-enabled", "false")
        .config("spark.sql.defaultCatalog", "lake")
        .getOrCreate()
    )


class Spark(Checks):
    engine = "spark"

    def __init__(self, cluster, jars, directory):
        super().__init__(cluster)
        self.spark = session(f"http://{cluster.rest}", jars, str(directory / "spark"))

    def ask(self, sql):
        return [tuple(row) for row in self.spark.sql(sql).collect()]

    def kill(self):
        self.spark.sparkContext._gateway.proc.kill()  # noqa: SLF001 Spark itself has nothing for a statement that hangs

    def stop(self):
        self.spark.stop()


def tables(c):
    c.run("CREATE NAMESPACE s")
    c.run("CREATE TABLE s.events (id BIGINT, kind STRING, at TIMESTAMP) USING iceberg PARTITIONED BY (days(at), kind)")
    c.run("INSERT INTO s.events VALUES (1, 'a', TIMESTAMP '2026-01-01 10:00:00'), (2, 'b', TIMESTAMP '2026-01-01 11:00:00'),"
          " (3, 'a', TIMESTAMP '2026-01-02 10:00:00'), (4, NULL, NULL)")
    c.both("SELECT id, kind FROM s.events ORDER BY id", [(1, "a"), (2, "b"), (3, "a"), (4, None)])
    c.run("DELETE FROM s.events WHERE kind = 'b'")
    c.run("UPDATE s.events SET kind = 'c' WHERE id = 3")
    c.both("SELECT id, kind FROM s.events ORDER BY id", [(1, "a"), (3, "c"), (4, None)])


def merge_on_read(c):
    c.run("CREATE TABLE s.m (id BIGINT, v STRING) USING iceberg TBLPROPERTIES ('format-version'='2',"
          " 'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read', 'write.merge.mode'='merge-on-read')")
    c.run("INSERT INTO s.m SELECT id, concat('v', id) FROM range(100)")
    c.run("DELETE FROM s.m WHERE id % 10 = 0")
    c.run("UPDATE s.m SET v = 'u' WHERE id = 11")
    c.run("MERGE INTO s.m t USING (SELECT 12 AS id, 'm' AS v UNION ALL SELECT 500, 'new') s ON t.id = s.id"
          " WHEN MATCHED THEN UPDATE SET v = s.v WHEN NOT MATCHED THEN INSERT *")
    deletes = c.run("SELECT count(*) FROM s.m.delete_files")[0][0]
    assert deletes > 0, "nothing was merged on read"
    c.both("SELECT count(*) AS n, sum(id) AS s FROM s.m", [(91, 4950 - 450 + 500)])
    c.both("SELECT id, v FROM s.m WHERE id IN (10, 11, 12, 500) ORDER BY id", [(11, "u"), (12, "m"), (500, "new")])


def version_3(c):
    """Rows have ids, what is deleted is in deletion vectors, and both sides go on with what the other wrote."""
    modes = ("'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read', 'write.merge.mode'='merge-on-read'")
    c.run(f"CREATE TABLE s.three (id BIGINT, v STRING) USING iceberg TBLPROPERTIES ('format-version'='3', {modes})")
    c.run("INSERT INTO s.three SELECT id, concat('v', id) FROM range(0, 100, 1, 1)")
    c.run("DELETE FROM s.three WHERE id % 10 = 0")
    formats = c.run("SELECT DISTINCT file_format FROM s.three.delete_files")
    assert formats == [("PUFFIN",)], formats
    c.both("SELECT count(*) AS n, sum(id) AS s FROM s.three", [(90, 4500)])
    ids = c.run("SELECT count(DISTINCT _row_id), min(_row_id), max(_row_id) FROM s.three")
    assert ids == [(90, 1, 99)], ids
    before = c.run("SELECT _row_id FROM s.three WHERE id = 11")
    c.run("UPDATE s.three SET v = 'u' WHERE id = 11")
    assert c.run("SELECT _row_id FROM s.three WHERE id = 11") == before, "Spark keeps the id of a row that it updates"
    c.in_lake("DELETE FROM s.three WHERE id = 12")
    c.in_lake("INSERT INTO s.three VALUES (500, 'lake')")
    c.both("SELECT id, v FROM s.three WHERE id IN (10, 11, 12, 500) ORDER BY id", [(11, "u"), (500, "lake")])
    assert c.run("SELECT _row_id FROM s.three WHERE id = 500")[0][0] >= 100
    c.run("MERGE INTO s.three t USING (SELECT 13 AS id, 'm' AS v UNION ALL SELECT 600, 'new') s ON t.id = s.id"
          " WHEN MATCHED THEN UPDATE SET v = s.v WHEN NOT MATCHED THEN INSERT *")
    c.both("SELECT count(*) AS n FROM s.three", [(91,)])
    c.run("CALL lake.system.rewrite_data_files(table => 's.three', options => map('rewrite-all', 'true'))")
    c.both("SELECT id, v FROM s.three WHERE id IN (11, 12, 13, 600) ORDER BY id", [(11, "u"), (13, "m"), (600, "new")])
    assert c.run("SELECT _row_id FROM s.three WHERE id = 11") == before, "nor does rewriting change it"

    # One of version 2, with position deletes, is upgraded.
    c.run(f"CREATE TABLE s.two (id BIGINT, v STRING) USING iceberg TBLPROPERTIES ('format-version'='2', {modes})")
    c.run("INSERT INTO s.two SELECT id, concat('v', id) FROM range(0, 10, 1, 1)")
    c.run("DELETE FROM s.two WHERE id = 1")
    c.run("ALTER TABLE s.two SET TBLPROPERTIES ('format-version'='3')")
    c.run("DELETE FROM s.two WHERE id = 2")
    c.in_lake("DELETE FROM s.two WHERE id = 3")
    c.both("SELECT count(*) AS n, sum(id) AS s FROM s.two", [(7, 45 - 6)])


def overwrite(c):
    c.run("CREATE TABLE s.o (p INT, v INT) USING iceberg PARTITIONED BY (p)")
    c.run("INSERT INTO s.o VALUES (1, 1), (1, 2), (2, 3)")
    c.spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    c.run("INSERT OVERWRITE s.o VALUES (1, 9)")
    c.both("SELECT p, v FROM s.o ORDER BY p, v", [(1, 9), (2, 3)])
    c.spark.conf.set("spark.sql.sources.partitionOverwriteMode", "static")
    c.run("INSERT OVERWRITE s.o PARTITION (p = 2) SELECT 7")
    c.both("SELECT p, v FROM s.o ORDER BY p, v", [(1, 9), (2, 7)])


def evolution(c):
    c.run("CREATE TABLE s.e (id INT, name STRING, inner STRUCT<a: INT, b: FLOAT>) USING iceberg")
    c.run("INSERT INTO s.e VALUES (1, 'one', named_struct('a', 1, 'b', 0.5))")
    c.run("ALTER TABLE s.e ADD COLUMNS (note STRING AFTER id, inner.c STRING)")
    c.run("ALTER TABLE s.e RENAME COLUMN name TO title")
    c.run("ALTER TABLE s.e ALTER COLUMN id TYPE BIGINT")
    c.run("ALTER TABLE s.e ALTER COLUMN inner.b TYPE DOUBLE")
    c.run("INSERT INTO s.e VALUES (5000000000, 'n', 'two', named_struct('a', 2, 'b', 1.5D, 'c', 'cc'))")
    c.both("SELECT id, note, title FROM s.e ORDER BY id", [(1, None, "one"), (5000000000, "n", "two")])
    c.expect("SELECT inner.a, inner.b, inner.c FROM s.e ORDER BY id", [(1, 0.5, None), (2, 1.5, "cc")])
    c.run("ALTER TABLE s.e DROP COLUMN note")
    c.run("ALTER TABLE s.e ADD PARTITION FIELD bucket(4, id)")
    c.run("INSERT INTO s.e VALUES (7, 'seven', NULL)")
    c.run("ALTER TABLE s.e REPLACE PARTITION FIELD bucket(4, id) WITH truncate(2, title)")
    c.run("INSERT INTO s.e VALUES (8, 'eight', NULL)")
    c.run("ALTER TABLE s.e WRITE ORDERED BY title DESC")
    c.run("ALTER TABLE s.e SET TBLPROPERTIES ('owner.team' = 'x')")
    c.run("ALTER TABLE s.e UNSET TBLPROPERTIES ('owner.team')")
    c.both("SELECT id, title FROM s.e WHERE id < 100 ORDER BY id", [(1, "one"), (7, "seven"), (8, "eight")])


def branches(c):
    c.run("CREATE TABLE s.b (id INT) USING iceberg")
    c.run("INSERT INTO s.b VALUES (1)")
    c.run("ALTER TABLE s.b CREATE BRANCH audit")
    c.run("ALTER TABLE s.b CREATE TAG first")
    c.run("INSERT INTO s.b.branch_audit VALUES (2)")
    c.expect("SELECT id FROM s.b ORDER BY id", [(1,)])
    c.expect("SELECT id FROM s.b VERSION AS OF 'audit' ORDER BY id", [(1,), (2,)])
    c.lake_shows("SELECT id FROM s.b FOR VERSION AS OF 'audit' ORDER BY id", [(1,), (2,)])
    c.run("CALL lake.system.fast_forward('s.b', 'main', 'audit')")
    c.both("SELECT id FROM s.b ORDER BY id", [(1,), (2,)])
    c.run("INSERT INTO s.b VALUES (3)")
    first = c.run("SELECT snapshot_id FROM s.b.refs WHERE name = 'first'")[0][0]
    c.run(f"CALL lake.system.rollback_to_snapshot('s.b', {first})")
    c.both("SELECT id FROM s.b ORDER BY id", [(1,)])
    c.run("ALTER TABLE s.b DROP BRANCH audit")
    c.run("ALTER TABLE s.b DROP TAG first")


def as_select(c):
    c.run("CREATE TABLE s.c USING iceberg PARTITIONED BY (bucket(2, id)) AS SELECT id, id * 2 AS twice FROM range(10)")
    c.both("SELECT count(*) AS n, sum(twice) AS s FROM s.c", [(10, 90)])
    c.run("REPLACE TABLE s.c USING iceberg AS SELECT id FROM range(3)")
    c.both("SELECT count(*) AS n FROM s.c", [(3,)])
    c.run("CREATE OR REPLACE TABLE s.c USING iceberg AS SELECT id, 'x' AS x FROM range(2)")
    c.both("SELECT count(*) AS n FROM s.c", [(2,)])
    c.refused("CREATE TABLE s.c (id INT) USING iceberg", "already exists")


def views(c):
    c.run("CREATE VIEW s.v AS SELECT id FROM s.c WHERE id > 0")
    c.expect("SELECT * FROM s.v", [(1,)])
    c.run("CREATE OR REPLACE VIEW s.v (renamed COMMENT 'the id') AS SELECT id FROM s.c")
    c.expect("SELECT renamed FROM s.v ORDER BY renamed", [(0,), (1,)])
    assert ("s", "v", False) in c.run("SHOW VIEWS IN s")
    c.run("ALTER VIEW s.v SET TBLPROPERTIES ('a' = 'b')")
    c.run("DROP VIEW s.v")


def procedures(c):
    c.run("CREATE TABLE s.p (id INT) USING iceberg")
    for n in range(6):
        c.run(f"INSERT INTO s.p VALUES ({n})")
    rewritten = c.run("CALL lake.system.rewrite_data_files(table => 's.p', options => map('min-input-files', '2'))")
    assert rewritten[0][0] >= 6, rewritten
    c.run("CALL lake.system.rewrite_manifests('s.p')")
    c.run("CALL lake.system.expire_snapshots(table => 's.p', older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)")
    assert len(c.run("SELECT * FROM s.p.snapshots")) == 1
    c.both("SELECT count(*) AS n, sum(id) AS s FROM s.p", [(6, 15)])
    c.run("DELETE FROM s.p WHERE id = 3")
    c.run("CALL lake.system.rewrite_position_delete_files('s.p')")
    c.both("SELECT sum(id) AS s FROM s.p", [(12,)])


def from_lake(c):
    """What lake's own SQL wrote, deletes included, and then both in turn."""
    c.in_lake("CREATE TABLE s.l AS SELECT * FROM (VALUES (1, 'a', DATE '2026-01-01'), (2, NULL, NULL), (3, 'c', DATE '2026-01-03')) AS v(id, what, day)")
    c.in_lake("DELETE FROM s.l WHERE id = 1")
    c.expect("SELECT id, what, CAST(day AS STRING) FROM s.l ORDER BY id", [(2, None, None), (3, "c", "2026-01-03")])
    c.run("INSERT INTO s.l VALUES (4, 'd', DATE '2026-01-04')")
    c.in_lake("UPDATE s.l SET what = 'z' WHERE id = 4")
    c.both("SELECT id, what FROM s.l ORDER BY id", [(2, None), (3, "c"), (4, "z")])


def names(c):
    c.run("CREATE NAMESPACE s.deep")
    c.run("ALTER NAMESPACE s.deep SET PROPERTIES ('team' = 'spark')")
    assert any("(team,spark)" in str(row) for row in c.run("DESCRIBE NAMESPACE EXTENDED s.deep"))
    c.run("CREATE TABLE s.deep.t (id INT) USING iceberg")
    c.run("ALTER TABLE s.deep.t RENAME TO s.t2")
    assert ("s", "t2", False) in c.run("SHOW TABLES IN s")
    c.run("DROP NAMESPACE s.deep")
    c.refused("SELECT * FROM s.deep.t", "TABLE_OR_VIEW_NOT_FOUND")
    for name in [row[1] for row in c.run("SHOW TABLES IN s")]:
        c.run(f"DROP TABLE s.{name}")
    c.run("DROP NAMESPACE s")


STEPS = [tables, merge_on_read, version_3, overwrite, evolution, branches, as_select, views, procedures, from_lake, names]


if __name__ == "__main__":
    binary, jars = sys.argv[1:]
    take(STEPS, binary, lambda cluster, directory: Spark(cluster, jars, directory))
