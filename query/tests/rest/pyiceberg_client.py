"""PyIceberg against lake's REST catalog. Each function is one session; its first argument is the catalog's address."""

import decimal
import sys

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, TimestampType


# What the catalog is opened with besides its address: arguments that are `name=value`.
PROPERTIES = dict(argument.split("=", 1) for argument in sys.argv if "=" in argument)


def connect(uri, **more):
    return load_catalog("it", type="rest", uri=uri, **{"warehouse": "lake"} | PROPERTIES, **more)


def refused(error, action):
    try:
        action()
    except error as e:
        return str(e)
    raise AssertionError(f"no {error.__name__}")


def same(have, want):
    assert have == want, f"{have!r} is not {want!r}"


def rows(table, **scan):
    return table.scan(**scan).to_arrow().sort_by("id").to_pylist()


COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("what", pa.string())])


def some(*pairs):
    return pa.Table.from_pylist([{"id": i, "what": w} for i, w in pairs], schema=COLUMNS)


def session(uri):
    lake = connect(uri)
    namespaces(lake)
    one_table(lake, uri)
    evolution(lake)
    staged(lake)
    several_tables(lake)
    lost_races(lake, uri)
    pages(lake, uri)


def namespaces(lake):
    lake.create_namespace("a", {"owner": "ann"})
    lake.create_namespace(("a", "b c"))
    refused(NamespaceAlreadyExistsError, lambda: lake.create_namespace("a"))
    same(lake.list_namespaces(), [("a",)])
    same(lake.list_namespaces("a"), [("a", "b c")])
    changed = lake.update_namespace_properties("a", {"owner", "x"}, {"team": "data"})
    same((changed.removed, changed.updated, changed.missing), (["owner"], ["team"], ["x"]))
    same(lake.load_namespace_properties("a"), {"team": "data"})
    refused(NamespaceNotEmptyError, lambda: lake.drop_namespace("a"))
    lake.drop_namespace(("a", "b c"))
    same(lake.namespace_exists(("a", "b c")), False)
    refused(NoSuchNamespaceError, lambda: lake.list_tables("nowhere"))


def one_table(lake, uri):
    table = lake.create_table("a.t", COLUMNS)
    refused(TableAlreadyExistsError, lambda: lake.create_table("a.t", COLUMNS))
    refused(NoSuchNamespaceError, lambda: lake.create_table("nowhere.t", COLUMNS))
    assert "location" in refused(BadRequestError, lambda: lake.create_table("a.u", COLUMNS, location="file:///tmp/x"))
    table.append(some((1, "one"), (2, "two")))
    table.append(some((3, "three")))
    same([r["id"] for r in rows(table)], [1, 2, 3])
    same([r["id"] for r in rows(connect(uri).load_table("a.t"), row_filter="id > 1")], [2, 3])
    table.overwrite(some((3, "drei"), (4, "vier")), overwrite_filter=EqualTo("id", 3))
    same([r["what"] for r in rows(table)], ["one", "two", "drei", "vier"])
    table.delete("id = 1")
    same([r["id"] for r in rows(table)], [2, 3, 4])
    result = table.upsert(some((4, "four"), (5, "five")), join_cols=["id"])
    same((result.rows_updated, result.rows_inserted), (1, 1))
    first = table.history()[0].snapshot_id
    same([r["id"] for r in rows(table, snapshot_id=first)], [1, 2])

    table.manage_snapshots().create_tag(first, "first").create_branch(first, "side").commit()
    same([r["id"] for r in table.scan().use_ref("first").to_arrow().to_pylist()], [1, 2])
    table.append(some((9, "nine")), branch="side")
    same(len(table.scan().use_ref("side").to_arrow()), 3)
    same(len(table.scan().to_arrow()), 4)
    table.manage_snapshots().remove_branch("side").remove_tag("first").commit()
    refs = connect(uri, **{"snapshot-loading-mode": "refs"}).load_table("a.t")
    same(len(refs.metadata.snapshots), 1)
    table.maintenance.expire_snapshots().by_id(first).commit()
    same([s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id == first], [])

    with table.transaction() as change:
        change.set_properties(note="x", other="y")
        change.remove_properties("other")
    same(connect(uri).load_table("a.t").properties["note"], "x")

    renamed = lake.rename_table("a.t", "a.renamed")
    same(len(renamed.scan().to_arrow()), 4)
    refused(NoSuchTableError, lambda: lake.load_table("a.t"))
    same(lake.list_tables("a"), [("a", "renamed")])
    location = renamed.metadata_location
    lake.drop_table("a.renamed")
    refused(NoSuchTableError, lambda: lake.drop_table("a.renamed"))
    same(lake.table_exists("a.renamed"), False)
    back = lake.register_table("a.back", location)
    same(len(back.scan().to_arrow()), 4)
    refused(TableAlreadyExistsError, lambda: lake.register_table("a.back", location))
    back.append(some((6, "six")))
    same(len(lake.load_table("a.back").scan().to_arrow()), 5)


def evolution(lake):
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "at", TimestampType(), required=False),
        NestedField(3, "what", StringType(), required=False),
    )
    spec = PartitionSpec(PartitionField(2, 1000, DayTransform(), "at_day"))
    order = SortOrder(SortField(1, IdentityTransform()))
    table = lake.create_table("a.e", schema, partition_spec=spec, sort_order=order)
    same(table.sort_order().fields[0].source_id, 1)
    with table.update_schema() as update:
        update.add_column("more", LongType()).rename_column("what", "which").make_column_optional("id")
    with table.update_spec() as update:
        update.add_field("id", BucketTransform(4), "id_bucket")
    with table.update_spec() as update:
        update.rename_field("at_day", "day").remove_field("id_bucket")
    with table.update_schema() as update:
        update.delete_column("more")
    with table.update_schema() as update:
        update.add_column("more", StringType()).move_first("more")
    with table.update_sort_order() as update:
        update.desc("which", IdentityTransform())
    again = lake.load_table("a.e")
    same([f.name for f in again.schema().fields], ["more", "id", "at", "which"])
    same(again.schema().find_field("more").field_id, 5)
    same([f.name for f in again.spec().fields], ["day"])
    same(len(again.specs()), 3)
    same(again.sort_order().fields[0].source_id, 3)
    rows = [{"more": "m", "id": 1, "at": None, "which": "w"}]
    again.append(pa.Table.from_pylist(rows, schema=again.schema().as_arrow()))
    same(again.scan().to_arrow().to_pylist(), rows)


def staged(lake):
    with lake.create_table_transaction("a.s", COLUMNS) as change:
        same(lake.table_exists("a.s"), False)
        change.append(some((1, "one")))
        with change.update_schema() as update:
            update.add_column("more", LongType())
    made = lake.load_table("a.s")
    same(rows(made), [{"id": 1, "what": "one", "more": None}])
    lake.drop_table("a.s")
    late = lake.create_table_transaction("a.s", COLUMNS)
    lake.create_table("a.s", COLUMNS)
    refused(CommitFailedException, late.commit_transaction)


def several_tables(lake):
    """Appends to two tables that are made together or not at all. PyIceberg has no call for it; what it sends is its own."""
    from pyiceberg.table import CommitTableRequest, TableIdentifier
    from pyiceberg.table.update import AssertTableUUID

    names = ["a.one", "a.other"]
    for name in names:
        lake.create_table(name, COLUMNS)

    def append(name):
        table = lake.load_table(name)
        change = table.transaction()
        change.append(some((1, name)))
        *namespace, last = table.name()
        requirements = (*change._requirements, AssertTableUUID(uuid=table.metadata.table_uuid))
        identifier = TableIdentifier(namespace=namespace, name=last)
        return CommitTableRequest(identifier=identifier, requirements=requirements, updates=change._updates).model_dump_json()

    def commit(parts):
        body = '{"table-changes": [' + ", ".join(parts) + "]}"
        return lake._session.post(lake.url("transactions/commit"), data=body.encode()).status_code

    parts = [append(name) for name in names]
    same(commit(parts), 204)
    for name in names:
        same(rows(lake.load_table(name)), [{"id": 1, "what": name}])
    # One of them was made meanwhile: neither is made.
    parts = [append(name) for name in names]
    lake.load_table("a.other").append(some((2, "first")))
    same(commit(parts), 409)
    same([len(lake.load_table(name).scan().to_arrow()) for name in names], [1, 2])


def lost_races(lake, uri):
    table, other = lake.load_table("a.s"), connect(uri).load_table("a.s")
    table.append(some((1, "one")))
    # An append that has lost builds on the winner by the client's own retries, or is told that it has lost.
    try:
        other.append(some((2, "two")))
        want = 2
    except CommitFailedException:
        want = 1
    same(len(lake.load_table("a.s").scan().to_arrow()), want)
    stale = connect(uri).load_table("a.s")
    with lake.load_table("a.s").update_schema() as update:
        update.add_column("x", LongType())
    update = stale.update_schema()
    update.add_column("y", LongType())
    refused(CommitFailedException, update.commit)
    # What needs nothing of what the other has changed goes through.
    stale.transaction().set_properties(late="yes").commit_transaction()
    now = lake.load_table("a.s")
    same((now.properties["late"], now.schema().find_field("x").name), ("yes", "x"))


def with_lent_keys(uri):
    lake = connect(uri)
    lake.create_namespace("lent")
    lake.create_table("lent.t", COLUMNS).append(some((1, "one"), (2, "two")))
    same([r["id"] for r in rows(connect(uri).load_table("lent.t"), row_filter="id > 1")], [2])


def pages(lake, uri):
    lake.create_namespace("many")
    for i in range(7):
        lake.create_table(f"many.t{i}", COLUMNS)
    small = connect(uri, **{"rest-page-size": "3"})
    same(small.list_tables("many"), [("many", f"t{i}") for i in range(7)])
    same(sorted(small.list_namespaces()), [("a",), ("many",)])


def reads_and_appends(uri):
    lake = connect(uri)
    table = lake.load_table("default.from_sql")
    same([(r["id"], r["what"]) for r in rows(table)], [(1, "a"), (2, None), (3, "c")])
    same(len(table.snapshots()), 2)
    # The bounds that lake has written leave files out.
    same([len(list(table.scan(row_filter=f).plan_files())) for f in ("id > 0", "id = 3", "what = 'zz'")], [2, 1, 0])
    deleted = lake.load_table("default.deleted")
    assert any(task.delete_files for task in deleted.scan().plan_files()), "there is no delete file"
    same([(r["id"], r["what"]) for r in rows(deleted)], [(1, "a"), (3, "z"), (4, None)])
    table.append(pa.Table.from_pylist([{"id": 4, "what": "d"}], schema=table.schema().as_arrow()))
    columns = pa.schema([pa.field("id", pa.int64()), pa.field("what", pa.string()), pa.field("price", pa.decimal128(9, 2))])
    made = lake.create_table("default.from_python", columns)
    price = decimal.Decimal
    data = [
        {"id": 10, "what": "x", "price": price("1.25")},
        {"id": 11, "what": None, "price": None},
        {"id": 12, "what": "z", "price": price("3.50")},
    ]
    made.append(pa.Table.from_pylist(data, schema=columns))


def deletes(uri):
    """Rows that are deleted here are gone for lake."""
    lake = connect(uri)
    made = lake.create_table("default.deleted_there", COLUMNS)
    made.append(some((1, "a"), (2, "b"), (3, "c")))
    made.append(some((4, "d")))
    made.delete("id = 2")
    made.upsert(some((3, "z"), (5, "e")), join_cols=["id"])
    made.overwrite(some((6, "f")), overwrite_filter=EqualTo("id", 4))


def sees_what_sql_deleted(uri):
    same([(r["id"], r["what"]) for r in rows(connect(uri).load_table("default.deleted_there"))], [(3, "y"), (6, "f")])


def sees_what_sql_added(uri):
    table = connect(uri).load_table("default.from_python")
    same([(r["id"], r["price"]) for r in rows(table)][-1], (13, decimal.Decimal("4.75")))


def write_through_faults(count, writers, *uris):
    """Appends rows one by one, from several threads to several nodes, with no other retry than for a lost race."""
    import concurrent.futures

    columns = pa.schema([pa.field("writer", pa.int64()), pa.field("n", pa.int64())])
    lake = connect(uris[0])
    lake.create_namespace_if_not_exists("default")
    lake.create_table("default.through_faults", columns)

    def write(writer):
        table = connect(uris[writer % len(uris)]).load_table("default.through_faults")
        for n in range(int(count)):
            row = pa.Table.from_pylist([{"writer": writer, "n": n}], schema=columns)
            while True:
                try:
                    table.append(row)
                    break
                except CommitFailedException:
                    table.refresh()

    with concurrent.futures.ThreadPoolExecutor(int(writers)) as pool:
        for ended in [pool.submit(write, writer) for writer in range(int(writers))]:
            ended.result()


WRITTEN = pa.schema([pa.field("writer", pa.int64()), pa.field("n", pa.int64())])
# Longer than any test lets a writer write.
MOST_SECONDS = 300


def tables_of_writers(uri):
    lake = connect(uri)
    lake.create_namespace_if_not_exists("default")
    for name in ("of_pyiceberg", "of_duckdb"):
        lake.create_table(f"default.{name}", WRITTEN)


def write_behind_a_balancer(uri, writer, acknowledged, stop):
    """Appends one row after the other until there is a file `stop`, and tells in the file `acknowledged` of each.

    PyIceberg gives up a commit that others were first with again and again: that was not made, and is tried anew. No other error is
    expected."""
    name = "default.of_pyiceberg"

    def append(n):
        row = pa.Table.from_pylist([{"writer": int(writer), "n": n}], schema=WRITTEN)
        while True:
            try:
                return connect(uri).load_table(name).append(row)
            except CommitFailedException:
                pass

    print(until_told(acknowledged, stop, append))


def until_told(acknowledged, stop, append):
    """Appends rows until told to stop. How many there are."""
    import pathlib
    import time

    n, ends = 0, time.monotonic() + MOST_SECONDS
    with open(acknowledged, "w") as told:
        while not pathlib.Path(stop).exists():
            assert time.monotonic() < ends, "nobody said stop"
            append(n)
            n += 1
            print(n, file=told, flush=True)
    return n


def version_3(uri):
    """PyIceberg reads tables of format version 3 and changes all but their rows."""
    lake = connect(uri)
    table = lake.load_table("default.third")
    same(table.format_version, 3)
    same([(r["id"], r["what"]) for r in rows(table)], [(1, "a"), (3, "z"), (4, None)])
    vectors = [task for task in table.scan().plan_files() if any("puffin" in d.file_path for d in task.delete_files)]
    assert vectors, "no deletion vector was read"
    with table.update_schema() as update:
        update.add_column("more", LongType())
    with table.transaction() as change:
        change.set_properties(note="x")
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "then").commit()
    again = connect(uri).load_table("default.third")
    same((again.format_version, again.metadata.next_row_id), (3, table.metadata.next_row_id))
    made = lake.create_table("default.third_too", COLUMNS, properties={"format-version": "3"})
    same((made.format_version, made.metadata.next_row_id), (3, 0))


def sees_version_3(uri):
    table = connect(uri).load_table("default.third_too")
    same([(r["id"], r["what"]) for r in rows(table)], [(1, "by sql"), (3, None)])
    # Three rows, and two that were written anew when the third went.
    same(table.metadata.next_row_id, 5)


def version_1(uri):
    """PyIceberg makes a table of format version 1, which SQL upgrades."""
    made = connect(uri).create_table("default.version_one", COLUMNS, properties={"format-version": "1"})
    same(made.format_version, 1)
    made.append(some((1, "a"), (2, "b")))
    made.append(some((3, "c")))


def sees_version_1_upgraded(uri, version):
    table = connect(uri).load_table("default.version_one")
    same(table.format_version, int(version))
    same([(r["id"], r["what"]) for r in rows(table)], [(1, "a"), (3, "z"), (4, "d")])


def random_updates(uri, seed, count, version):
    """Commits random valid changes, and compares what the server made of each with what PyIceberg's own code makes."""
    import itertools
    import random

    from pyiceberg.table.snapshots import Operation, Snapshot, Summary
    from pyiceberg.table.update import (
        AddSnapshotUpdate,
        AssertRefSnapshotId,
        RemoveSnapshotsUpdate,
        SetSnapshotRefUpdate,
        update_table_metadata,
    )
    from pyiceberg.table.update.snapshot import ManageSnapshots
    from pyiceberg.transforms import TruncateTransform
    from pyiceberg.types import DoubleType, IntegerType

    dice = random.Random(int(seed))
    lake = connect(uri)
    lake.create_namespace_if_not_exists("random")
    schema = Schema(
        NestedField(1, "id", LongType(), required=False),
        NestedField(2, "at", TimestampType(), required=False),
        NestedField(3, "what", StringType(), required=False),
    )
    table = lake.create_table(f"random.t{seed}_{version}", schema, properties={"format-version": version})
    same(table.format_version, int(version))
    made, changed = 0, 0

    def columns():
        return [f.name for f in table.schema().fields]

    def sources():
        return {f.source_id for f in table.spec().fields} | {f.source_id for f in table.sort_order().fields}

    def change_schema(tx):
        free = [f.name for f in table.schema().fields if f.field_id not in sources() and f.name != "id"]
        with tx.update_schema() as update:
            for _ in range(dice.randint(1, 3)):
                update.add_column(f"c{dice.getrandbits(40)}", dice.choice([LongType(), StringType(), DoubleType(), IntegerType()]))
            if free and dice.random() < 0.5:
                update.rename_column(free[0], f"r{dice.getrandbits(40)}")
            if len(free) > 1 and dice.random() < 0.5:
                update.delete_column(free[1])
            if dice.random() < 0.3:
                update.move_first("id")

    def change_spec(tx):
        with tx.update_spec() as update:
            names = [f.name for f in table.spec().fields]
            if names:
                update.remove_field(names[0])
            else:
                width = dice.randint(2, 99)
                transform = dice.choice([BucketTransform(width), TruncateTransform(width), IdentityTransform()])
                update.add_field("id", transform, f"part_{dice.getrandbits(40)}")

    def change_order(tx):
        with tx.update_sort_order() as update:
            dice.choice([update.asc, update.desc])(dice.choice(columns()), IdentityTransform())

    def change_properties(tx):
        names = [f"p{i}" for i in range(5)]
        tx.set_properties({dice.choice(names): str(dice.random())})
        there = [name for name in names if name in table.properties]
        if there:
            tx.remove_properties(dice.choice(there))

    def add_rows(tx):
        """A snapshot as it would be of an append. PyIceberg writes no manifests of format version 3, and nobody reads these."""
        metadata = tx.table_metadata
        added = Snapshot(
            snapshot_id=metadata.new_snapshot_id(),
            parent_snapshot_id=metadata.current_snapshot_id,
            sequence_number=metadata.next_sequence_number(),
            manifest_list=f"{metadata.location}/metadata/snap-{dice.getrandbits(60)}.avro",
            summary=Summary(Operation.APPEND),
            schema_id=metadata.current_schema_id,
            first_row_id=metadata.next_row_id,
            added_rows=dice.randint(0, 99),
        )
        main = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=added.snapshot_id)
        asserted = AssertRefSnapshotId(ref="main", snapshot_id=metadata.current_snapshot_id)
        tx._apply((AddSnapshotUpdate(snapshot=added), main), (asserted,))

    def append(tx):
        if version == "3":
            return add_rows(tx)
        tx.append(pa.Table.from_pylist([{"id": dice.randint(0, 9)}], schema=table.schema().as_arrow()))

    def change_refs(tx):
        snapshot = table.current_snapshot()
        if snapshot is None:
            return append(tx)
        name = f"ref{dice.randint(0, 3)}"
        manage = ManageSnapshots(tx)
        if name in table.metadata.refs:
            is_tag = table.metadata.refs[name].snapshot_ref_type == "tag"
            (manage.remove_tag if is_tag else manage.remove_branch)(name).commit()
        else:
            dice.choice([manage.create_tag, manage.create_branch])(snapshot.snapshot_id, name).commit()

    def expire(tx):
        # The oldest: where some in between go, PyIceberg leaves a history with gaps, and others, as Java, one that begins later.
        named = {ref.snapshot_id for ref in table.metadata.refs.values()}
        ids = [s.snapshot_id for s in sorted(table.metadata.snapshots, key=lambda s: s.sequence_number)]
        old = list(itertools.takewhile(lambda id: id not in named, ids))
        if not old:
            return append(tx)
        tx._apply((RemoveSnapshotsUpdate(snapshot_ids=old[: dice.randint(1, len(old))]),))

    changes = [change_schema, change_spec, change_order, change_properties, append, append, change_refs, expire]
    while made < int(count):
        before = table.metadata
        tx = table.transaction()
        dice.choice(changes)(tx)
        updates = tx._updates
        if not updates:
            continue
        tx.commit_transaction()
        expected = comparable(update_table_metadata(before, updates))
        actual = comparable(table.metadata)
        changed += actual != comparable(before)
        for key in sorted(expected.keys() | actual.keys()):
            assert expected.get(key) == actual.get(key), f"{key} after {updates}: {actual.get(key)}, not {expected.get(key)}"
        assert comparable(connect(uri).load_table(table.name()).metadata) == actual
        made += 1
    assert changed > made / 2, f"{changed} of {made} commits changed anything"
    print(f"{made} commits")


def comparable(metadata):
    """Metadata without what depends on the time, or on how its files are kept."""
    import json

    from pyiceberg.typedef import IcebergBaseModel

    # Of format version 3 PyIceberg's own writes nothing.
    have = json.loads(IcebergBaseModel.model_dump_json(metadata))
    for name in ("last-updated-ms", "metadata-log", "partition-statistics", "statistics"):
        have.pop(name, None)
    have["snapshot-log"] = [entry["snapshot-id"] for entry in have.get("snapshot-log", [])]
    # That a parent is gone PyIceberg does not tell from that there is none.
    there = {snapshot["snapshot-id"] for snapshot in have.get("snapshots", [])}
    for snapshot in have.get("snapshots", []):
        if snapshot.get("parent-snapshot-id") not in there:
            snapshot.pop("parent-snapshot-id", None)
    for name, key in (("schemas", "schema-id"), ("partition-specs", "spec-id"), ("sort-orders", "order-id")):
        have[name] = sorted(have[name], key=lambda one: one[key])
    return have


if __name__ == "__main__":
    globals()[sys.argv[1]](*(argument for argument in sys.argv[2:] if "=" not in argument))
