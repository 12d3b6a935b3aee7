"""DuckDB with its iceberg extension against lake's REST catalog. Each function is one session."""

import pathlib
import sys

import duckdb
import duckdb_extension_avro
import duckdb_extension_httpfs
import duckdb_extension_iceberg


# Of tables on S3: warehouse, endpoint, access key and secret key, as arguments that are `name=value`.
PROPERTIES = dict(argument.split("=", 1) for argument in sys.argv if "=" in argument)


def connect(uri):
    con = duckdb.connect()
    con.execute("SET autoinstall_known_extensions = false; SET autoload_known_extensions = false")
    for package in (duckdb_extension_httpfs, duckdb_extension_avro, duckdb_extension_iceberg):
        name = package.__name__.rsplit("_", 1)[1]
        found = list(pathlib.Path(package.__file__).parent.rglob(f"{name}.duckdb_extension"))
        con.execute(f"LOAD '{found[0]}'")
    if "endpoint" in PROPERTIES:
        address = PROPERTIES["endpoint"].removeprefix("http://")
        con.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{PROPERTIES['access']}', SECRET '{PROPERTIES['secret']}', REGION 'us-east-1',"
            f" ENDPOINT '{address}', URL_STYLE 'path', USE_SSL false)"
        )
    # The catalog lends no keys: DuckDB's own secret counts.
    own = ", ACCESS_DELEGATION_MODE 'none'" if "endpoint" in PROPERTIES else ""
    warehouse = PROPERTIES.get("warehouse", "lake")
    con.execute(f"ATTACH '{warehouse}' AS lake (TYPE iceberg, ENDPOINT '{uri}', AUTHORIZATION_TYPE 'none'{own})")
    return con


def same(have, want):
    assert have == want, f"{have!r} is not {want!r}"


def session(uri):
    con = connect(uri)
    ask = lambda sql: con.execute(sql).fetchall()
    con.execute("CREATE SCHEMA lake.d")
    con.execute("CREATE TABLE lake.d.t (id BIGINT, what VARCHAR)")
    con.execute("INSERT INTO lake.d.t VALUES (1, 'one'), (2, 'two'), (3, NULL)")
    same(ask("SELECT * FROM lake.d.t ORDER BY id"), [(1, "one"), (2, "two"), (3, None)])
    con.execute("CREATE TABLE lake.d.copy AS SELECT id * 10 AS id, what FROM lake.d.t")
    same(ask("SELECT id FROM lake.d.copy ORDER BY id"), [(10,), (20,), (30,)])
    con.execute("DELETE FROM lake.d.t WHERE id = 2")
    con.execute("UPDATE lake.d.t SET what = 'drei' WHERE id = 3")
    same(ask("SELECT * FROM lake.d.t ORDER BY id"), [(1, "one"), (3, "drei")])
    con.execute("BEGIN")
    con.execute("INSERT INTO lake.d.t VALUES (4, 'four')")
    con.execute("INSERT INTO lake.d.copy VALUES (40, 'forty')")
    con.execute("COMMIT")
    same(ask("SELECT count(*) FROM lake.d.t"), [(3,)])
    same(ask("SELECT count(*) FROM lake.d.copy"), [(4,)])
    con.execute("BEGIN")
    con.execute("INSERT INTO lake.d.t VALUES (5, 'five')")
    con.execute("ROLLBACK")
    same(ask("SELECT count(*) FROM lake.d.t"), [(3,)])
    con.execute("ALTER TABLE lake.d.copy ADD COLUMN n INTEGER")
    con.execute("ALTER TABLE lake.d.copy RENAME COLUMN what TO which")
    con.execute("INSERT INTO lake.d.copy VALUES (50, 'fifty', 5)")
    con.execute(
        """MERGE INTO lake.d.copy USING (VALUES (50, 'L'), (60, 'LX')) AS s(id, which) ON copy.id = s.id
           WHEN MATCHED THEN UPDATE SET which = s.which WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.which, 0)"""
    )
    same(ask("SELECT * FROM lake.d.copy WHERE id >= 40 ORDER BY id"), [(40, "forty", None), (50, "L", 5), (60, "LX", 0)])
    con.execute("CREATE TABLE lake.d.parts (id BIGINT, day DATE) PARTITIONED BY (year(day))")
    con.execute("INSERT INTO lake.d.parts VALUES (1, DATE '2025-01-01'), (2, DATE '2026-01-01')")
    same(ask("SELECT id FROM lake.d.parts WHERE day > DATE '2025-06-01'"), [(2,)])
    con.execute("DROP TABLE lake.d.parts")
    same(sorted(ask("SELECT table_name FROM duckdb_tables() WHERE schema_name = 'd'")), [("copy",), ("t",)])


def reads(con):
    """What lake's own SQL has written, and deleted from."""
    rows = lambda name: con.execute(f'SELECT id, what FROM lake."default".{name} ORDER BY id').fetchall()
    same(rows("from_sql"), [(1, "a"), (2, None), (3, "c")])
    same(rows("deleted"), [(1, "a"), (3, "z"), (4, None)])


def reads_and_session(uri):
    reads(connect(uri))
    session(uri)


def reads_and_appends(uri):
    con = connect(uri)
    reads(con)
    con.execute("""INSERT INTO lake."default".from_sql VALUES (4, 'd')""")
    con.execute("""CREATE TABLE lake."default".from_duckdb AS SELECT 10 AS id, 'x' AS what""")


def write_behind_a_balancer(uri, writer, acknowledged, stop):
    """As PyIceberg's writers do, to a table of its own."""
    import pyiceberg_client

    def append(n):
        con = connect(uri)
        con.execute(f'INSERT INTO lake."default".of_duckdb VALUES ({writer}, {n})')
        con.close()

    print(pyiceberg_client.until_told(acknowledged, stop, append))


def deletes(uri):
    """Rows that lake has deleted are gone here, and those deleted here are gone there."""
    con = connect(uri)
    ask = lambda sql: con.execute(sql).fetchall()
    for name in ("second", "third"):
        table = f'lake."default".{name}'
        same(ask(f"SELECT id, what FROM {table} ORDER BY id"), [(1, "a"), (3, "z"), (4, None)])
        con.execute(f"INSERT INTO {table} VALUES (5, 'e'), (6, 'f')")
        con.execute(f"DELETE FROM {table} WHERE id IN (1, 6)")
        con.execute(f"UPDATE {table} SET what = 'y' WHERE id = 4")
        same(ask(f"SELECT id, what FROM {table} ORDER BY id"), [(3, "z"), (4, "y"), (5, "e")])


def drops(uri):
    con = connect(uri)
    con.execute("DROP TABLE lake.d.copy")
    con.execute("DROP TABLE lake.d.t")
    con.execute("DROP SCHEMA lake.d")


if __name__ == "__main__":
    globals()[sys.argv[1]](*(argument for argument in sys.argv[2:] if "=" not in argument))
