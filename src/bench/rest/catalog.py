#!/usr/bin/env python3
"""What the Iceberg REST catalog takes: a cluster of three peers and two query nodes on this machine, tables on its disk.

    src/bench/rest/catalog.py target/dist/lake latency [--tables 1000] [--seconds 10]
    src/bench/rest/catalog.py target/dist/lake tail [--tables 1000] [--seconds 70]
    src/bench/rest/catalog.py target/dist/lake writers [--writers 32] [--seconds 60]

latency  so many tables; then loads and commits one after the other, and commits to different tables from more and more
         clients: milliseconds, and commits per second
tail     so many tables; then commits one after the other for at least two rounds of upkeep (30 s each): milliseconds, and in which
         seconds those fell that took longest, beside the processor time of each process then
writers  so many PyIceberg processes append a row at a time to ONE table, with PyIceberg's own retries and no others: how many
         appends succeed, and how many per second. Needs a Python that has pyiceberg 0.12 and pyarrow
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import multiprocessing
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

PATIENCE_SECONDS = 120
SCHEMA = {"type": "struct", "schema-id": 0, "fields": [
    {"id": 1, "name": "id", "type": "long", "required": False},
    {"id": 2, "name": "what", "type": "string", "required": False},
]}


class Cluster:
    def __init__(self, lake, directory):
        self.log = open(directory / "up.log", "w")
        self.up = subprocess.Popen([lake, "up", "--no-shell", "--sample", "none", "--dir", str(directory / "data")],
                                   stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)
        manifest, until = directory / "data" / "cluster.json", time.monotonic() + PATIENCE_SECONDS
        self.rest = []
        while len(self.rest) < 2:
            if self.up.poll() is not None or time.monotonic() > until:
                sys.exit((directory / "up.log").read_text())
            if manifest.exists():
                nodes = [node["addresses"] for node in json.loads(manifest.read_text()) if node["role"] == "query"]
                self.rest = [node["rest"] for node in nodes if node.get("rest")]
            time.sleep(0.1)
        # An address is chosen before it is served.
        for address in self.rest:
            while True:
                try:
                    Client(address).call("GET", "/v1/config")
                    break
                except OSError:
                    if self.up.poll() is not None or time.monotonic() > until:
                        sys.exit((directory / "up.log").read_text())
                    time.sleep(0.1)
        self.pids = {f"{node['role']} {node['id']}": node["pid"] for node in json.loads(manifest.read_text())}

    def processor_ms(self):
        """What each process of the cluster has used so far, in milliseconds."""
        used = {}
        for name, pid in self.pids.items():
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            used[name] = (int(fields[11]) + int(fields[12])) * 1000 // os.sysconf("SC_CLK_TCK")
        return used

    def stop(self):
        self.up.send_signal(signal.SIGTERM)
        self.up.wait(PATIENCE_SECONDS)


class Client:
    """One connection, kept open."""

    def __init__(self, address):
        self.connection = http.client.HTTPConnection(address, timeout=60)

    def call(self, method, path, body=None, want=200):
        text = None if body is None else json.dumps(body)
        self.connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != want:
            sys.exit(f"{method} {path}: {answer.status} {content.decode()}")
        return content


def set_property(client, table, value):
    body = {"requirements": [], "updates": [{"action": "set-properties", "updates": {"n": str(value)}}]}
    client.call("POST", f"/v1/lake/namespaces/n/tables/{table}", body)


def timed(seconds, action):
    """The milliseconds that each of the calls took that fit into so many seconds."""
    took, until = [], time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        action()
        took.append((time.monotonic() - began) * 1000)
    return sorted(took)


def told(what, took):
    print(f"{what}: {len(took)}, p50 {statistics.median(took):.2f} ms, p99 {took[len(took) * 99 // 100]:.2f} ms", flush=True)


def latency(cluster, args):
    client = Client(cluster.rest[0])
    client.call("POST", "/v1/lake/namespaces", {"namespace": ["n"]})
    tables = [f"t{i}" for i in range(args.tables)]
    began = time.monotonic()
    for table in tables:
        client.call("POST", "/v1/lake/namespaces/n/tables", {"name": table, "schema": SCHEMA})
    print(f"{args.tables} tables made in {time.monotonic() - began:.1f} s", flush=True)
    told("loads", timed(args.seconds, lambda: client.call("GET", f"/v1/lake/namespaces/n/tables/{random.choice(tables)}")))
    told("commits", timed(args.seconds, lambda: set_property(client, random.choice(tables), time.monotonic_ns())))
    for clients in (1, 2, 4, 8, 16, 32):
        with concurrent.futures.ProcessPoolExecutor(clients, mp_context=multiprocessing.get_context("fork")) as pool:
            parts = [(cluster.rest[i % 2], tables[i::clients], args.seconds / 2) for i in range(clients)]
            took = sorted(ms for part in pool.map(commits_to, parts) for ms in part)
        told(f"commits to different tables from {clients} clients ({len(took) / (args.seconds / 2):,.0f} per s)", took)


def tail(cluster, args):
    client = Client(cluster.rest[0])
    client.call("POST", "/v1/lake/namespaces", {"namespace": ["n"]})
    tables = [f"t{i}" for i in range(args.tables)]
    for table in tables:
        client.call("POST", "/v1/lake/namespaces/n/tables", {"name": table, "schema": SCHEMA})
    began, took, spent = time.monotonic(), [], [cluster.processor_ms()]
    while (at := time.monotonic() - began) < args.seconds:
        while len(spent) <= at:
            spent.append(cluster.processor_ms())
        asked = time.monotonic()
        set_property(client, random.choice(tables), time.monotonic_ns())
        took.append(((time.monotonic() - asked) * 1000, int(at)))
    told("commits", sorted(ms for ms, _ in took))
    slow = collections.Counter(second for _, second in sorted(took)[len(took) * 99 // 100:])
    print("the slowest hundredth by second, and ms of processor time of each process in it:")
    for second, count in sorted(slow.items()):
        if second + 1 < len(spent):
            used = {name: ms - spent[second].get(name, 0) for name, ms in spent[second + 1].items()}
            print(f"  {second:3} s: {count:3} of {sum(s == second for _, s in took)}; {used}")
    usual = {name: (ms - spent[0].get(name, 0)) // (len(spent) - 1) for name, ms in spent[-1].items()}
    print(f"  each second at the mean: {usual}")


def commits_to(part):
    address, tables, seconds = part
    client = Client(address)
    return timed(seconds, lambda: set_property(client, random.choice(tables), time.monotonic_ns()))


def appends(part):
    address, writer, seconds = part
    import pyarrow
    from pyiceberg.catalog import load_catalog

    lake = load_catalog("bench", type="rest", uri=f"http://{address}", warehouse="lake")
    columns = pyarrow.schema([pyarrow.field("writer", pyarrow.int64()), pyarrow.field("n", pyarrow.int64())])
    outcomes, made, until, n = collections.Counter(), [], time.monotonic() + seconds, 0
    while time.monotonic() < until:
        row = pyarrow.Table.from_pylist([{"writer": writer, "n": n}], schema=columns)
        try:
            lake.load_table("n.hot").append(row)
            outcomes["done"] += 1
            made.append(n)
        except Exception as error:  # noqa: BLE001 whatever PyIceberg gives up with is counted
            outcomes[type(error).__name__] += 1
        n += 1
    return writer, outcomes, made


def writers(cluster, args):
    import pyarrow
    from pyiceberg.catalog import load_catalog

    lake = load_catalog("bench", type="rest", uri=f"http://{cluster.rest[0]}", warehouse="lake")
    lake.create_namespace("n")
    lake.create_table("n.hot", pyarrow.schema([("writer", pyarrow.int64()), ("n", pyarrow.int64())]))
    parts = [(cluster.rest[i % 2], i, args.seconds) for i in range(args.writers)]
    before = served(cluster)
    with concurrent.futures.ProcessPoolExecutor(args.writers, mp_context=multiprocessing.get_context("spawn")) as pool:
        ended = list(pool.map(appends, parts))
    spent = served(cluster) - before
    outcomes = sum((outcome for _, outcome, _ in ended), collections.Counter())
    rows = lake.load_table("n.hot").scan().to_arrow().to_pylist()
    there = sorted((row["writer"], row["n"]) for row in rows)
    lost = {(writer, n) for writer, _, made in ended for n in made} - set(there)
    if lost or len(set(there)) != len(there):
        sys.exit(f"{len(lost)} appends were lost, {len(there) - len(set(there))} rows are doubled")
    tried, done = sum(outcomes.values()), outcomes["done"]
    print(f"{args.writers} writers: {done:,} of {tried:,} appends succeeded ({done / tried:.1%}), {done / args.seconds:,.1f} per s; "
          f"none lost, none doubled; the others: {dict(outcomes - collections.Counter(done=done))}")
    for endpoint in ("loadTable", "commitTable"):
        count, seconds = spent[f'_seconds_count{{endpoint="{endpoint}"}}'], spent[f'_seconds_sum{{endpoint="{endpoint}"}}']
        kinds = {kind: int(n) for kind in ("done", "conflict", "refused", "unavailable", "failed")
                 if (n := spent[f's_total{{endpoint="{endpoint}",outcome="{kind}"}}'])}
        print(f"{endpoint}: {count:,.0f} requests, {seconds / max(count, 1) * 1000:.1f} ms on average with waiting; {kinds}")


def served(cluster):
    """What all nodes have served so far, by the names in their metrics without what all begin with."""
    sums = collections.Counter()
    for address in cluster.rest:
        for line in Client(address).call("GET", "/metrics").decode().splitlines():
            if line.startswith("lake_query_rest_request"):
                name, value = line.removeprefix("lake_query_rest_request").rsplit(" ", 1)
                sums[name] += float(value)
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lake", type=pathlib.Path)
    parser.add_argument("what", choices=["latency", "tail", "writers"])
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--writers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=None)
    args = parser.parse_args()
    args.seconds = args.seconds or {"latency": 10, "tail": 70, "writers": 60}[args.what]
    with tempfile.TemporaryDirectory(prefix="lake-catalog-") as directory:
        cluster = Cluster(str(args.lake.resolve()), pathlib.Path(directory))
        try:
            {"latency": latency, "tail": tail, "writers": writers}[args.what](cluster, args)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
