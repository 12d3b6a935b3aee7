#!/usr/bin/env python3
"""Whether workers that live are taken for lost on a loaded machine, and how soon one that was killed is: three peers and four
workers on this machine, at the default times of heartbeats and leases.

    src/bench/meta/detection.py target/dist/lake [--minutes 30] [--kills 9] [--busy 2] [--sql 2] [--clients 8]

First so many minutes under load: processes that only count, SQL statements one after the other, and compare-and-set in the
metadata. Nobody is killed meanwhile, so every suspicion, lease that ends and shard that fails over is a false one. Then, under
the same load, one worker after the other is killed with SIGKILL: the time until it is suspected, and until its shards are all
elsewhere. The leader is asked over HTTP twice a second, and twenty times a second after a kill.

Exit codes: 0 nothing was false and the median of the detections is at most 10 s, 1 otherwise.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

sys.dont_write_bytecode = True
from limits import Cluster, free_ports  # noqa: E402: nothing is left beside the sources

WORKERS = 4
SUSPECTED = 8.0
INTERVAL_SECONDS = 3
MOST_SECONDS = 10
FALSE_REASONS = {"the node before was lost", "the node before has left", "the node came back with another lease"}
STATEMENT = "SELECT count(DISTINCT value % 100000) FROM generate_series(1, 3000000)"


class Watched(Cluster):
    """Peers with HTTP, and workers."""

    def __init__(self, lake, directory, options):
        super().__init__(lake, directory, 3, options)
        self.http = free_ports(self.count)
        self.asked = list(self.http)
        self.workers, self.flight = {}, free_ports(WORKERS)

    def start(self, peer):
        common, self.options = self.options, [*self.options, "--http-listen", f"127.0.0.1:{self.http[peer - 1]}"]
        super().start(peer)
        self.options = common

    def start_worker(self, n):
        log = open(self.directory / f"worker-{n}.log", "a")
        self.workers[n] = subprocess.Popen(
            [self.lake, "query", "--id", f"worker-{n}", "--dir", str(self.directory / f"worker-{n}"),
             "--listen", f"127.0.0.1:{self.flight[n]}", "--meta", self.at, "--warehouse", f"file://{self.directory}/tables",
             "--memory-limit-bytes", str(256 << 20)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def stop(self):
        for process in self.workers.values():
            process.kill()
            process.wait()
        super().stop()

    def ask(self, path, method="GET"):
        """What the leader answers; None: nobody leads, or it is too busy."""
        for port in list(self.asked):
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"" if method == "POST" else None, method=method)
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    told = json.load(answer)
                # The next time first.
                self.asked.sort(key=lambda other: other != port)
                return told
            except (OSError, urllib.error.URLError, json.JSONDecodeError):
                continue
        return None

    def figure(self, name):
        """The sum of a figure of the peers, none of which is ever started again."""
        total = 0.0
        for port in self.http:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read().decode()
            total += sum(float(line.split()[-1]) for line in text.splitlines() if line.split(" ")[0] == f"lake_metasrv_{name}")
        return int(total)

    def settled(self):
        """Every shard is held, each worker is up and leads some, and nobody is suspected of anything."""
        time.sleep(0.5)
        self.ask("/v1/shards/balance", "POST")
        nodes, shards = self.ask("/v1/nodes"), self.ask("/v1/shards")
        if not nodes or not shards or not shards["shards"] or len(shards["shards"]) != shards["count"]:
            return False
        led = collections.Counter(shard["node"] for shard in shards["shards"])
        return (all(shard["state"] == "held" and (shard["suspicion"] or 0) < 1 for shard in shards["shards"])
                and [node["state"] for node in nodes["nodes"]] == WORKERS * ["up"]
                and len(led) == WORKERS and max(led.values()) - min(led.values()) < 2)


class Load:
    """What keeps the machine busy, until it is stopped."""

    def __init__(self, cluster, args):
        self.cluster, self.over, self.done, self.failed = cluster, threading.Event(), collections.Counter(), collections.Counter()
        self.lock, self.running = threading.Lock(), set()
        self.busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
        cas = ["bench", "meta", "--at", cluster.at, "--load", "cas", "--clients", str(args.clients), "--keys", "1000", "--seconds", "20"]
        sql = [["sql", "--at", f"127.0.0.1:{cluster.flight[n % WORKERS]}", "-c", STATEMENT] for n in range(args.sql)]
        work = [("statements", command) for command in sql] + ([("runs of cas", cas)] if args.clients else [])
        self.threads = [threading.Thread(target=self.again_and_again, args=each) for each in work]
        for thread in self.threads:
            thread.start()

    def again_and_again(self, what, command):
        while not self.over.is_set():
            with self.lock:
                if self.over.is_set():
                    return
                process = subprocess.Popen([self.cluster.lake, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL)
                self.running.add(process)
            failed = process.wait() != 0
            with self.lock:
                self.running.discard(process)
            (self.failed if failed else self.done)[what] += 1
            if failed:
                # Its worker may be gone for the moment.
                self.over.wait(1)

    def stop(self):
        self.over.set()
        with self.lock:
            for process in [*self.running, *self.busy]:
                process.kill()
        for process in self.busy:
            process.wait()
        for thread in self.threads:
            thread.join()

    def told(self):
        done = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        return f"{done}; failed: {sum(self.failed.values())}"


def processor_ticks():
    """Of all cores since the machine was started: not idle, and all."""
    ticks = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


class Seen:
    """What the leader says, look by look, and what of it says that somebody was lost."""

    def __init__(self):
        self.looks = self.unanswered = 0
        self.longest, self.at = 0.0, None
        self.highest, self.suspected, self.lost, self.down = 0.0, {}, {}, {}
        self.counts, self.fences, self.reasons = collections.Counter(), {}, collections.Counter()

    def note(self, what, before, now):
        """Counts those that have become so since the last look."""
        for name, is_so in now.items():
            if is_so and not before.get(name):
                self.counts[what] += 1
                print(f"  {time.strftime('%H:%M:%S')} {what}: {name}", flush=True)
        before.clear()
        before.update(now)

    def look(self, cluster):
        shards, nodes = cluster.ask("/v1/shards"), cluster.ask("/v1/nodes")
        self.looks += 1
        if not shards or not nodes:
            self.unanswered += 1
            return
        if self.at is not None:
            self.longest = max(self.longest, time.monotonic() - self.at)
        self.at = time.monotonic()
        suspicions = collections.defaultdict(float)
        for shard in shards["shards"]:
            suspicions[shard["node"]] = max(suspicions[shard["node"]], shard["suspicion"] or 0)
            if self.fences.get(shard["shard"], shard["fence"]) != shard["fence"]:
                self.reasons[shard["reason"]] += 1
            self.fences[shard["shard"]] = shard["fence"]
        self.highest = max([self.highest, *suspicions.values()])
        self.note("suspected", self.suspected, {node: phi > SUSPECTED for node, phi in suspicions.items()})
        self.note("shard lost", self.lost, {shard["shard"]: shard["state"] != "held" for shard in shards["shards"]})
        self.note("node down", self.down, {node["node"]: node["state"] == "down" for node in nodes["nodes"]})


def quiet(cluster, load, args):
    """So long under load, with nobody killed. Gives how much was false."""
    figures = ["shards_failed_over_total", "nodes_registered_total", "leases_expired_total", "shards_moved_total"]
    before, seen, term = {name: cluster.figure(name) for name in figures}, Seen(), cluster.term()
    began, (busy, all_of_it) = time.monotonic(), processor_ticks()
    told = began
    while time.monotonic() < began + 60 * args.minutes:
        seen.look(cluster)
        if time.monotonic() > told + 60:
            told = time.monotonic()
            print(f"{(told - began) / 60:.0f} min: highest suspicion {seen.highest:.2f}, {dict(seen.counts)}, {load.told()}", flush=True)
        time.sleep(0.5)
    figures = {name: cluster.figure(name) - count for name, count in before.items()}
    busy, all_of_it = (now - then for now, then in zip(processor_ticks(), (busy, all_of_it)))
    # One that ended between two looks is in the peers' figures, and in the fences.
    false = (figures["shards_failed_over_total"] + figures["nodes_registered_total"] + figures["leases_expired_total"]
             + sum(seen.counts.values()) + sum(count for why, count in seen.reasons.items() if why in FALSE_REASONS))
    print(f"{args.minutes:g} minutes, {WORKERS} workers, processors {100 * busy / all_of_it:.0f} % busy ({load.told()}), "
          f"{cluster.term() - term} elections")
    print(f"  shards failed over {figures['shards_failed_over_total']}, leases ended {figures['leases_expired_total']}, "
          f"registered again {figures['nodes_registered_total']}, moved for balance {figures['shards_moved_total']}; "
          f"suspected {seen.counts['suspected']}, shards lost {seen.counts['shard lost']}, nodes down {seen.counts['node down']}; "
          f"routes changed {dict(seen.reasons)}")
    print(f"  highest suspicion {seen.highest:.2f} of {SUSPECTED:g}; {seen.looks} looks, {seen.unanswered} without an answer, "
          f"at most {seen.longest:.1f} s between two")
    print(f"  false: {false}", flush=True)
    return false


def kills(cluster, args):
    """Kills one worker after the other. Gives the times until each was suspected, and until its shards were elsewhere."""
    detected, moved = [], []
    for n in range(args.kills):
        victim = n % WORKERS
        name = f"worker-{victim}"
        cluster.wait("every worker to have its part", cluster.settled)
        # Anywhere between two heartbeats.
        time.sleep(random.uniform(1, 1 + INTERVAL_SECONDS))
        cluster.workers[victim].kill()
        killed, suspected, elsewhere = time.monotonic(), None, None
        while elsewhere is None:
            if time.monotonic() > killed + 120:
                sys.exit(f"{name} was killed 120 s ago and its shards are not elsewhere; see {cluster.directory}")
            listing, now = cluster.ask("/v1/shards"), time.monotonic() - killed
            if listing:
                of_it = [shard for shard in listing["shards"] if shard["node"] == name]
                if suspected is None and (not of_it or any((shard["suspicion"] or 0) > SUSPECTED for shard in of_it)):
                    suspected = now
                if not of_it:
                    elsewhere = now
            time.sleep(0.05)
        cluster.workers[victim].wait()
        detected.append(suspected)
        moved.append(elsewhere)
        print(f"kill {n + 1}: {name} suspected after {suspected:.1f} s, its shards elsewhere after {elsewhere:.1f} s", flush=True)
        cluster.start_worker(victim)
    for what, times in (("suspected", detected), ("all of its shards elsewhere", moved)):
        print(f"{len(times)} kills, {what}: median {statistics.median(times):.1f} s, worst {max(times):.1f} s", flush=True)
    return detected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lake", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="processes that only count [default: one a core]")
    parser.add_argument("--sql", type=int, default=2, help="SQL statements at a time")
    parser.add_argument("--clients", type=int, default=8, help="calls of compare-and-set in flight")
    parser.add_argument("--keep", action="store_true", help="keep the directory of logs and data")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="lake-detection-"))
    cluster, load = Watched(str(args.lake.resolve()), directory, options), None
    try:
        (directory / "tables").mkdir()
        cluster.found()
        for n in range(WORKERS):
            cluster.start_worker(n)
        cluster.wait("every worker to have its part", cluster.settled)
        load = Load(cluster, args)
        # What comes of the load's begin is a part of it: no time to get used to it.
        false = quiet(cluster, load, args) if args.minutes else 0
        detected = kills(cluster, args) if args.kills else [0.0]
    finally:
        if load:
            load.stop()
        cluster.stop()
        if args.keep:
            print(f"logs and data: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(1 if false or statistics.median(detected) > MOST_SECONDS else 0)


if __name__ == "__main__":
    main()
