#!/usr/bin/env python3
"""Runs the queries of `lake bench sql tpch --keep` in DuckDB, on the same Parquet files.

    pip install duckdb
    lake bench sql tpch --scale 1 --rounds 3 --dir DIR --keep
    src/bench/sql/compare-with-duckdb.py DIR [--rounds 3] [--threads N]

Prints, of each query and in total, the medians in milliseconds of lake (as DIR says they were) and of DuckDB, and their ratio. Both on
as many threads, one after the other: run it when the machine has nothing else to do, as when lake was measured.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import duckdb


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    kept = json.loads((args.dir / "tpch.json").read_text())
    connection = duckdb.connect()
    connection.execute(f"SET threads = {args.threads}")
    for table, files in kept["files"].items():
        names = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet([{names}])")
    times = [[] for _ in kept["queries"]]
    for turn in range(args.rounds + 1):
        for number, query in enumerate(kept["queries"]):
            began = time.perf_counter()
            connection.execute(query).fetchall()
            # The first round only warms up.
            if turn > 0:
                times[number].append((time.perf_counter() - began) * 1000)
    print(f"DuckDB {duckdb.__version__}, medians of {args.rounds} rounds, in ms")
    print(f"{'':6}{'lake':>10}{'duckdb':>12}{'ratio':>8}")
    rows = [
        (f"Q{number + 1}", of["lake_ms"], statistics.median(times[number]))
        for number, of in enumerate(kept["report"]["queries"])
    ]
    rows.append(("total", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for name, lake, duck in rows:
        print(f"{name:6}{lake:10.1f}{duck:12.1f}{lake / duck:8.2f}")


if __name__ == "__main__":
    main()
