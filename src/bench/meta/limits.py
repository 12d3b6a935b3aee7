#!/usr/bin/env python3
"""What a metadata cluster does at its limits: peers on this machine, three unless said otherwise, every write synced.

    src/bench/meta/limits.py target/dist/lake failover [--kills 20]
    src/bench/meta/limits.py target/dist/lake elections [--minutes 10] [--clients 64]
    src/bench/meta/limits.py target/dist/lake size [--keys 1000000] [--settle 1] [--peers 3]
    src/bench/meta/limits.py target/dist/lake snapshot [--keys 1000000] [--seconds 90]

failover   the leader is killed with SIGKILL under load, again and again: how long nothing succeeds
elections  full load for some minutes: how often the leader changes
size       so many keys of 256 B: memory per peer, how much of that the program's own file and huge pages are, and what a key
           takes beyond the memory at 1,000 keys; disk, latency of cas beside that at 1,000 keys, with a snapshot being written
           and without, and the time from all killed to serving. Whoever writes many keys has snapshots written: --settle gives
           them so many seconds of the load to end before it is measured
snapshot   so many keys of 256 B, then cas in windows of some two seconds: p99 of those in which a peer wrote a snapshot beside
           those in which none did

Options for the peers, such as other election times, stand behind `--`.
"""

import argparse
import datetime
import json
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PATIENCE_SECONDS = 120


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Cluster:
    def __init__(self, lake, directory, count, options):
        self.lake, self.directory, self.count, self.options = lake, directory, count, options
        self.ports = free_ports(2 * count)
        self.at = ",".join(f"127.0.0.1:{self.ports[2 * n]}" for n in range(count))
        self.peers = {}

    def start(self, peer):
        grpc, raft = self.ports[2 * (peer - 1):2 * peer]
        log = open(self.directory / f"peer-{peer}.log", "a")
        self.peers[peer] = subprocess.Popen(
            [self.lake, "metasrv", "--id", str(peer), "--dir", str(self.directory / f"peer-{peer}"),
             "--listen", f"127.0.0.1:{grpc}", "--raft-listen", f"127.0.0.1:{raft}", *self.options],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def found(self):
        for peer in range(1, self.count + 1):
            self.start(peer)
        self.wait("founding", lambda: self.meta("init").returncode == 0)
        self.wait("a leader", self.leader)

    def kill(self, peer):
        self.peers[peer].send_signal(signal.SIGKILL)
        self.peers[peer].wait()

    def stop(self):
        for process in self.peers.values():
            process.kill()
            process.wait()

    def meta(self, *args):
        return subprocess.run([self.lake, "meta", "--at", self.at, *args], capture_output=True, text=True)

    def status(self):
        return json.loads(self.meta("status", "--format", "json").stdout or "{}").get("peers", [])

    def leader(self):
        return next((p["id"] for p in self.status() if p["role"] == "leader"), None)

    def term(self):
        return max(p.get("term", 0) for p in self.status())

    def serving(self):
        peers = self.status()
        return sorted(p["role"] for p in peers) == (self.count - 1) * ["follower"] + ["leader"]

    def wait_for_keys(self, keys):
        """What is measured of a map of many keys is not of one that has lost them."""
        self.wait(f"{keys:,} keys at every peer", lambda: len(peers := self.status()) == self.count
                  and all(peer.get("keys", 0) >= keys for peer in peers))

    def wait(self, what, check):
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            found = check()
            if found:
                return found
            time.sleep(0.02)
        sys.exit(f"{what} did not come within {PATIENCE_SECONDS} s; see {self.directory}")

    def bench(self, **options):
        # What is measured afterwards is of a map that has the keys.
        command = [self.lake, "bench", "meta", "--at", self.at, "--format", "json", "--keep-keys"]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def measure(self, **options):
        return finished(self.bench(**options))

    def memory_mib(self):
        """Of each peer: resident now, at most so far, how much of what is resident are pages of the program's file, which all
        processes of one machine share, and how much is in huge pages."""
        def of(pid, file, *fields):
            text = pathlib.Path(f"/proc/{pid}/{file}").read_text()
            return [int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) / 1024 for field in fields]
        return [of(process.pid, "status", "VmRSS", "VmHWM", "RssFile") + of(process.pid, "smaps_rollup", "AnonHugePages")
                for process in self.peers.values()]

    def disk_mib(self):
        def size(directory):
            return sum(f.stat().st_blocks * 512 for f in directory.rglob("*") if f.is_file()) / 2**20
        return [size(self.directory / f"peer-{peer}") for peer in self.peers]


    def snapshots(self):
        """When each snapshot of each peer was being written, in seconds since 1970."""
        written = []
        for log in self.directory.glob("peer-*/lake.log"):
            for line in log.read_text().splitlines():
                line = re.sub(r"\x1b\[[0-9;]*m", "", line)
                if "snapshot written" in line:
                    at = datetime.datetime.fromisoformat(line.split()[0].replace("Z", "+00:00")).timestamp()
                    written.append((at - int(re.search(r"millis=(\d+)", line)[1]) / 1000, at))
        return sorted(written)


def finished(process):
    out, err = process.communicate()
    if process.returncode != 0:
        sys.exit(f"{' '.join(process.args)}: {err or out}")
    return json.loads(out)


def failover(cluster, args):
    gaps = []
    for _ in range(args.kills):
        load = cluster.bench(load="cas", clients=4, keys=1000, seconds=5, warmup=1)
        time.sleep(3)
        leader = cluster.wait("a leader", cluster.leader)
        cluster.kill(leader)
        # An answer that is lost with the leader is found again by the client: every kill counts.
        done = finished(load)
        cluster.start(leader)
        cluster.wait("all peers", cluster.serving)
        gaps.append(done["longest_gap_ms"])
        print(f"kill {len(gaps)}: nothing succeeded for {gaps[-1]:.0f} ms", flush=True)
    print(f"{len(gaps)} kills: median {statistics.median(gaps):.0f} ms, worst {max(gaps):.0f} ms")


def elections(cluster, args):
    before = cluster.term()
    done = cluster.measure(load="cas", clients=args.clients, seconds=60 * args.minutes)
    changes = cluster.term() - before
    print(f"{args.minutes} minutes, {args.clients} clients, {done['per_second']:,.0f} cas per s, p99 {done['p99_ms']:.1f} ms: "
          f"{changes} elections, at longest {done['longest_gap_ms']:.0f} ms without a success")


def size(cluster, args):
    def cas(keys, warmup):
        done = cluster.measure(load="cas", clients=16, keys=keys, seconds=10, warmup=warmup)
        return done["p50_ms"], done["p99_ms"]

    def figures(when, keys):
        cluster.wait_for_keys(keys)
        memory, disk = cluster.memory_mib(), cluster.disk_mib()
        resident = (f"{now:.0f} MiB of memory (at most {peak:.0f}; {file:.0f} of the program's file, {huge:.0f} in huge pages)"
                    for now, peak, file, huge in memory)
        print(f"{when}: per peer {', '.join(resident)}; {', '.join(f'{d:.0f} MiB on disk' for d in disk)}", flush=True)
        return [now for now, *_ in memory]

    small = [cas(1000, 1) for _ in range(2)][1]
    print(f"1,000 keys: cas p50 {small[0]:.2f} ms, p99 {small[1]:.2f} ms", flush=True)
    few = figures("with them", 1000)
    began = time.monotonic()
    p50, p99 = cas(args.keys, args.settle)
    measured = (time.time() - 10, time.time())
    print(f"{args.keys:,} keys (written in {time.monotonic() - began - 10 - args.settle:.0f} s): cas p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
          f"{p50 / small[0]:.2f} and {p99 / small[1]:.2f} times that at 1,000", flush=True)
    grown = [(now - then) * 2**20 / (args.keys - 1000) for now, then in zip(figures("after writing", args.keys), few)]
    print(f"a key takes {', '.join(f'{each:.0f}' for each in grown)} bytes of each peer's memory", flush=True)
    for _ in range(2):
        for peer in cluster.peers:
            cluster.kill(peer)
        began = time.monotonic()
        for peer in list(cluster.peers):
            cluster.start(peer)
        cluster.wait("a leader", cluster.leader)
        leads = time.monotonic() - began
        cluster.wait("all peers", cluster.serving)
        print(f"all killed: a leader after {leads:.2f} s, all serving after {time.monotonic() - began:.2f} s", flush=True)
        time.sleep(2)
        figures("after a restart", args.keys)
    beside = sum(max(0, min(last, measured[1]) - max(first, measured[0])) for first, last in cluster.snapshots())
    print(f"while cas was measured with {args.keys:,} keys, snapshots that were not cut off were being written for {beside:.1f} of 10 s")


def snapshot(cluster, args):
    cluster.measure(load="cas", clients=16, keys=args.keys, seconds=1)
    cluster.wait_for_keys(args.keys)
    windows = []
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        began = time.time()
        done = cluster.measure(load="cas", clients=16, keys=1000, seconds=2, warmup=0.2)
        windows.append((began, time.time(), done))
    beside, alone = [], []
    for began, ended, done in windows:
        busy = any(first < ended and last > began for first, last in cluster.snapshots())
        (beside if busy else alone).append(done)
    if not beside or not alone:
        sys.exit(f"{len(beside)} windows beside a snapshot, {len(alone)} without: nothing to compare; take more --seconds")

    def median(runs, figure):
        return statistics.median(run[figure] for run in runs)

    for what, runs in (("without a snapshot", alone), ("beside one", beside)):
        print(f"{len(runs)} windows {what}: {median(runs, 'per_second'):,.0f} cas per s, p50 {median(runs, 'p50_ms'):.2f} ms, "
              f"p99 {median(runs, 'p99_ms'):.2f} ms")
    longest = max(last - first for first, last in cluster.snapshots())
    print(f"p99 is {median(beside, 'p99_ms') / median(alone, 'p99_ms'):.2f} times that without; the longest snapshot took "
          f"{longest:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lake", type=pathlib.Path)
    parser.add_argument("what", choices=["failover", "elections", "size", "snapshot"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--settle", type=float, default=1)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--keep", action="store_true", help="keep the directory of logs and data")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    directory = pathlib.Path(tempfile.mkdtemp(prefix="lake-limits-"))
    cluster = Cluster(str(args.lake.resolve()), directory, args.peers, options)
    try:
        cluster.found()
        {"failover": failover, "elections": elections, "size": size, "snapshot": snapshot}[args.what](cluster, args)
    finally:
        cluster.stop()
        if not args.keep:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
