"""The official ADBC driver for Flight SQL against lake's query nodes. Each function is one session."""

import datetime
import decimal
import sys
import threading

import adbc_driver_flightsql.dbapi as flight_sql
import pyarrow as pa
from adbc_driver_flightsql import DatabaseOptions, StatementOptions

UTC = datetime.timezone.utc


def same(have, want):
    assert have == want, f"{have!r} is not {want!r}"


def refused(words, call):
    try:
        call()
    except Exception as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"was not refused: {words}")


def connect(uri, **options):
    return flight_sql.connect(uri, **{"autocommit": True} | options)


def rows(cursor, sql, parameters=None):
    """What a statement returns. Of a change that is a count, and it has been made once that is here."""
    cursor.execute(sql, parameters)
    return cursor.fetchall()


def parameters(uri, other):
    with connect(uri) as lake, lake.cursor() as cursor:
        same(rows(cursor, "SELECT name FROM fruit WHERE id = ?", [1]), [("apple",)])
        same(rows(cursor, "SELECT id FROM fruit WHERE name IS NOT DISTINCT FROM $1", [None]), [(2,)])
        values = [
            True,
            -(2**63) + 1,
            0.1,
            "it's \\ ü",
            b"\x00\xff",
            decimal.Decimal("-12.50"),
            datetime.date(2026, 2, 28),
            datetime.datetime(2026, 2, 28, 23, 59, 59, 999999),
            datetime.time(12, 0, 0, 5),
        ]
        marks = ", ".join("?" for _ in values)
        same(rows(cursor, f"SELECT {marks}", values), [tuple(values)])
        # Of a schema, a time zone is part of the type.
        at = datetime.datetime(2026, 1, 1, tzinfo=UTC)
        same(rows(cursor, "SELECT ? = TIMESTAMP '2026-01-01 00:00:00+00:00'", [at]), [(True,)])
        same(rows(cursor, "SELECT id FROM fruit ORDER BY id LIMIT ?", [1]), [(1,)])
        same(rows(cursor, "INSERT INTO fruit VALUES (?, ?)", [3, "cherry"]), [(1,)])
        cursor.executemany("INSERT INTO fruit (name, id) VALUES (?, ?)", [("date", 4), (None, 5)])
        same(cursor.rowcount, 2)
        cursor.executemany("DELETE FROM fruit WHERE id > 900", None)
        same(cursor.rowcount, 0)
        cursor.executemany("UPDATE fruit SET name = ? WHERE id = ?", [("elder", 5), ("fig", 2)])
        refused("does not exist", lambda: cursor.execute("SELECT * FROM nowhere WHERE id = ?", [1]))
        refused("2 parameters", lambda: rows(cursor, "SELECT ?, ?", [1]))
    with connect(other) as lake, lake.cursor() as cursor:
        names = [("apple",), ("fig",), ("cherry",), ("date",), ("elder",)]
        same(rows(cursor, "SELECT name FROM fruit ORDER BY id"), names)


def transactions(uri, other):
    with flight_sql.connect(uri) as lake, lake.cursor() as cursor:
        same(rows(cursor, "INSERT INTO fruit VALUES (?, ?)", [10, "ten"]), [(1,)])
        cursor.executemany("INSERT INTO fruit VALUES (?, ?)", [(11, "eleven")])
        same(rows(cursor, "SELECT count(*) FROM fruit"), [(4,)])
        with connect(other) as elsewhere, elsewhere.cursor() as outside:
            same(rows(outside, "SELECT count(*) FROM fruit"), [(2,)])
        lake.commit()
        same(rows(cursor, "DELETE FROM fruit WHERE id > ?", [0]), [(4,)])
        same(rows(cursor, "SELECT count(*) FROM fruit"), [(0,)])
        lake.rollback()
        refused("inside of a transaction", lambda: rows(cursor, "CREATE TABLE x (id BIGINT)"))
        lake.rollback()


def unread(uri, other):
    """Of a change whose answer nobody fetches: it is committed with the others, or all are refused."""
    for n in range(10):
        try:
            with flight_sql.connect(uri) as lake:
                with lake.cursor() as left:
                    left.execute(f"INSERT INTO fruit SELECT {100 + n}, 'left'")
                with lake.cursor() as cursor:
                    rows(cursor, f"INSERT INTO fruit VALUES ({200 + n}, 'read')")
                lake.commit()
        except Exception as error:
            # The connection was closed with its transaction, which is never committed then.
            print(error)
    with connect(other) as lake, lake.cursor() as cursor:
        left = rows(cursor, "SELECT id - 100 FROM fruit WHERE name = 'left' ORDER BY id")
        same(rows(cursor, "SELECT id - 200 FROM fruit WHERE name = 'read' ORDER BY id"), left)


def ingest(uri, other):
    some = pa.table({"id": pa.array([1, 2], pa.int64()), "name": pa.array(["one", None], pa.large_string())})
    with connect(uri) as lake, lake.cursor() as cursor:
        same(cursor.adbc_ingest("made", some, mode="create"), 2)
        refused("exists already", lambda: cursor.adbc_ingest("made", some, mode="create"))
        # By name, and what does not come has no value.
        same(cursor.adbc_ingest("made", some.select(["name", "id"]), mode="append"), 2)
        same(cursor.adbc_ingest("made", some.select(["id"]), mode="append"), 2)
        same(rows(cursor, "SELECT count(*), count(name), sum(id) FROM made"), [(6, 2, 9)])
        refused("nowhere", lambda: cursor.adbc_ingest("nowhere", some, mode="append"))
        odd = pa.table({"id": [1], "odd": [1]})
        refused("odd", lambda: cursor.adbc_ingest("made", odd, mode="append"))
        same(rows(cursor, "SELECT count(*) FROM made"), [(6,)])
        seven = pa.table({"id": [7], "name": ["seven"]})
        same(cursor.adbc_ingest("made", seven, mode="replace"), 1)
        for _ in range(2):
            same(cursor.adbc_ingest("again", some, mode="create_append"), 2)
        same(rows(cursor, "SELECT count(*) FROM again"), [(4,)])
        rows(cursor, "CREATE SCHEMA elsewhere")
        # A cursor goes on with the schema that it was given once.
        with lake.cursor() as there:
            there.adbc_ingest("t", seven, mode="create", db_schema_name="elsewhere")
        same(rows(cursor, "SELECT name FROM elsewhere.t"), [("seven",)])
        # Many batches are one change.
        batches = [pa.record_batch({"id": range(n, n + 1000)}) for n in range(0, 200_000, 1000)]
        reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
        same(cursor.adbc_ingest("many", reader, mode="create"), 200_000)
        same(rows(cursor, "SELECT count(*) FROM many"), [(200_000,)])


def ingest_in_transactions(uri, other):
    def batch(*ids):
        return pa.table({"id": pa.array(ids, pa.int64())})

    # A cursor keeps its statement prepared, which ends with its transaction.
    def count(connection):
        with connection.cursor() as fresh:
            return rows(fresh, "SELECT count(*) FROM fruit")

    # The driver names no transaction for an ingest: one that keeps cookies is known by them.
    cookies = {DatabaseOptions.WITH_COOKIE_MIDDLEWARE.value: "true"}
    with flight_sql.connect(uri, db_kwargs=cookies) as lake, lake.cursor() as cursor:
        same(cursor.adbc_ingest("fruit", batch(30, 31), mode="append"), 2)
        same(count(lake), [(4,)])
        with connect(other) as elsewhere:
            same(count(elsewhere), [(2,)])
        same(rows(cursor, "SELECT max(id) FROM fruit"), [(31,)])
        lake.rollback()
        refused("prepare again", lambda: rows(cursor, "SELECT max(id) FROM fruit"))
        same(count(lake), [(2,)])
        same(cursor.adbc_ingest("fruit", batch(30, 31), mode="append"), 2)
        lake.commit()
        same(cursor.adbc_ingest("fruit", batch(32), mode="append"), 1)
        refused("inside of a transaction", lambda: cursor.adbc_ingest("x", batch(1), mode="create"))
        lake.rollback()
        # None is open any more.
        lake.adbc_connection.set_autocommit(True)
        same(cursor.adbc_ingest("made", batch(1), mode="create"), 1)
    # Without them it is committed at once, as the documentation warns.
    with flight_sql.connect(uri) as lake, lake.cursor() as cursor:
        same(cursor.adbc_ingest("fruit", batch(40), mode="append"), 1)
        lake.rollback()
        same(rows(cursor, "SELECT count(*) FROM fruit WHERE id = 40"), [(1,)])


def cancelled(cursor, call, ready, gone):
    """Cancels a call once it is ready for that, and sets `gone`. The call fails, and the cursor goes on."""
    failed = []

    def calling():
        try:
            call()
        except Exception as error:
            failed.append(str(error))

    thread = threading.Thread(target=calling)
    thread.start()
    assert ready.wait(60)
    # What has not begun yet is not cancelled by it.
    while thread.is_alive():
        cursor.adbc_cancel()
        gone.set()
        thread.join(0.1)
    assert len(failed) == 1 and "cancel" in failed[0].lower(), failed
    same(rows(cursor, "SELECT 1"), [(1,)])


def cancelling(uri, other):
    at_once, read, sent, gone = (threading.Event() for _ in range(4))
    at_once.set()
    endless = "generate_series(1, 1000000000000000)"

    def reading():
        cursor.execute(f"SELECT value FROM {endless}")
        while cursor.fetchmany(1000):
            read.set()

    def some():
        """Rows that stop coming, and are not all."""
        row = pa.record_batch({"id": pa.array([100], pa.int64())})
        for _ in range(20):
            yield row
        sent.set()
        assert gone.wait(60)
        while True:
            yield row

    def ingesting():
        reader = pa.RecordBatchReader.from_batches(pa.schema({"id": pa.int64()}), some())
        cursor.adbc_ingest("fruit", reader, mode="append")

    with connect(uri) as lake, lake.cursor() as cursor:
        cancelled(cursor, lambda: rows(cursor, f"SELECT sum(value) FROM {endless}"), at_once, threading.Event())
        cancelled(cursor, reading, read, threading.Event())
        cancelled(cursor, ingesting, sent, gone)


def frames(uri, other):
    import pandas
    import polars

    with connect(uri) as lake:
        frame = pandas.read_sql("SELECT * FROM fruit WHERE id < 2 ORDER BY id", lake)
        same(frame["name"].tolist(), ["apple"])
        pandas.DataFrame({"id": [1, 2, 3], "x": [0.5, None, 1.5]}).to_sql("from_pandas", lake, index=False)
        query = "SELECT * FROM fruit ORDER BY id"
        same(polars.read_database(query, lake).rows(), [(1, "apple"), (2, None)])
        made = polars.DataFrame({"id": [1, 2], "name": ["a", None]})
        same(made.write_database("from_polars", lake, engine="adbc"), 2)
    with connect(other) as lake, lake.cursor() as cursor:
        cursor.execute("SELECT x FROM from_pandas ORDER BY id")
        same(cursor.fetch_df()["x"].isna().tolist(), [False, True, False])
        cursor.execute("SELECT * FROM from_polars ORDER BY id")
        same(cursor.fetch_polars().rows(), [(1, "a"), (2, None)])


def catalog(uri, other):
    with connect(uri) as lake, lake.cursor() as cursor:
        same(lake.adbc_get_info()["vendor_name"], "lake")
        same(sorted(lake.adbc_get_table_types()), ["TABLE", "VIEW"])
        same(lake.adbc_get_table_schema("fruit").names, ["id", "name"])
        found = lake.adbc_get_objects(depth="columns", table_name_filter="fru%").read_all().to_pylist()
        tables = found[0]["catalog_db_schemas"][0]["db_schema_tables"]
        same([column["column_name"] for column in tables[0]["table_columns"]], ["id", "name"])
        insert = "INSERT INTO fruit VALUES (20, 'twenty')"
        option = StatementOptions.RPC_CALL_HEADER_PREFIX.value + "lake-operation-id"
        for node in (uri, other):
            with connect(node) as again, again.cursor(adbc_stmt_kwargs={option: "order 20"}) as once:
                same(rows(once, insert), [(1,)])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
