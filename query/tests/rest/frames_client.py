"""Polars and Daft, which reach lake's REST catalog through PyIceberg. Each function is one session."""

import sys

import pyarrow as pa
from pyiceberg.catalog import load_catalog


def same(have, want):
    assert have == want, f"{have!r} is not {want!r}"


# What the catalog is opened with besides its address: arguments that are `name=value`.
PROPERTIES = dict(argument.split("=", 1) for argument in sys.argv if "=" in argument)


def connect(uri):
    return load_catalog("it", type="rest", uri=uri, **{"warehouse": "lake"} | PROPERTIES)


def deleted(lake):
    """A table of whose rows lake has deleted some that are in their files still."""
    table = lake.load_table("default.deleted")
    assert any(task.delete_files for task in table.scan().plan_files()), "there is no delete file"
    return table


COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("what", pa.string())])


def with_polars(uri):
    import polars as pl

    lake = connect(uri)
    table = lake.load_table("default.from_sql")
    # Its own reader of Parquet is told by hand how S3 is reached; the catalog has said so to PyIceberg.
    told = {name: value for name, value in table.io.properties.items() if name.startswith("s3.")}
    reached = told | {"aws_allow_http": "true"} if "s3.endpoint" in told else None
    scan = lambda table: pl.scan_iceberg(table, storage_options=reached)
    same(scan(table).sort("id").collect().rows(), [(1, "a"), (2, None), (3, "c")])
    same(scan(table).filter(pl.col("id") > 2).collect().rows(), [(3, "c")])
    same(scan(deleted(lake)).sort("id").collect().rows(), [(1, "a"), (3, "z"), (4, None)])
    made = lake.create_table("default.from_polars", COLUMNS)
    pl.DataFrame({"id": [1, 2], "what": ["x", None]}).write_iceberg(made, mode="append")
    pl.DataFrame({"id": [3], "what": ["z"]}).write_iceberg(made, mode="append")
    same(scan(lake.load_table("default.from_polars")).select("id").sum().collect().item(), 6)
    pl.DataFrame({"id": [4], "what": ["new"]}).write_iceberg(made, mode="overwrite")
    same(scan(lake.load_table("default.from_polars")).collect().rows(), [(4, "new")])


def with_daft(uri):
    import daft

    lake = connect(uri)
    table = lake.load_table("default.from_sql")
    same(daft.read_iceberg(table).sort("id").to_pydict(), {"id": [1, 2, 3], "what": ["a", None, "c"]})
    same(daft.read_iceberg(deleted(lake)).sort("id").to_pydict(), {"id": [1, 3, 4], "what": ["a", "z", None]})
    made = lake.create_table("default.from_daft", COLUMNS)
    daft.from_pydict({"id": [1, 2], "what": ["x", None]}).write_iceberg(made, mode="append")
    catalog = daft.Catalog.from_iceberg(lake)
    catalog.get_table("default.from_daft").append(daft.from_pydict({"id": [3], "what": ["z"]}))
    same(sorted(catalog.read_table("default.from_daft").to_pydict()["id"]), [1, 2, 3])
    assert "default.from_daft" in [str(name) for name in catalog.list_tables()]


if __name__ == "__main__":
    globals()[sys.argv[1]](*(argument for argument in sys.argv[2:] if "=" not in argument))
