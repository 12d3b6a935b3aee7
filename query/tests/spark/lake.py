"""What sessions of other makers' engines share: a cluster of lake, its own SQL beside theirs, and how their steps are taken."""

import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

# How long starting and stopping may take, of the cluster and of an engine, and what comes by itself.
PATIENCE_SECONDS = 240
# A statement of an engine, or of lake, that takes longer hangs.
STATEMENT_SECONDS = 300
# For so long a query node uses a pointer that it has cached (--pointer-ttl-ms), and some time for the look itself.
CACHED_SECONDS = 5

# Sessions are short: what a Java machine spends on compiling code for hours, and on collectors of many threads, is not won back.
JAVA_OPTIONS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]


class Lake:
    """A cluster of its own: three peers, two query nodes."""

    def __init__(self, binary, directory):
        self.binary, self.directory = binary, directory
        self.log = open(directory / "up.log", "w")
        self.up = subprocess.Popen([binary, "up", "--no-shell", "--sample", "none", "--dir", str(directory / "data")],
                                   stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def await_serving(self):
        """Waits until both query nodes serve."""
        until = time.monotonic() + PATIENCE_SECONDS
        self.wait(until, "the cluster", self.find)
        # An address is chosen before it is served.
        for address in (self.flight, self.rest):
            self.wait(until, address, lambda: connects(address))

    def wait(self, until, what, there):
        while not there():
            assert self.up.poll() is None, self.said()
            assert time.monotonic() < until, f"waited in vain for {what}: {self.said()}"
            time.sleep(0.1)

    def find(self):
        """The addresses of SQL at the first query node and of REST at the second: what one commits the other shows."""
        manifest = self.directory / "data" / "cluster.json"
        nodes = json.loads(manifest.read_text()) if manifest.exists() else []
        nodes = [node["addresses"] for node in nodes if node["role"] == "query"]
        if len(nodes) < 2 or not all(node.get("flight") and node.get("rest") for node in nodes):
            return False
        self.flight, self.rest = nodes[0]["flight"], nodes[1]["rest"]
        return True

    def said(self):
        return (self.directory / "up.log").read_text()

    def rows(self, sql):
        """The rows as lake's own SQL sees them."""
        print("lake>", sql, flush=True)
        done = subprocess.run([self.binary, "sql", "--at", self.flight, "--format", "json", "-c", sql], timeout=STATEMENT_SECONDS,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{sql}\n  {done.stderr}{done.stdout}"
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        return [tuple(row.values()) for rows in found for row in rows]

    def stop(self):
        ended(self.up, signal.SIGTERM)
        self.log.close()


def connects(address):
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS).close()
        return True
    except OSError:
        return False


def ended(process, by=None):
    """Waits for the end of a process, after this signal; one that does not come to it is killed."""
    if by is not None:
        process.send_signal(by)
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


class Checks:
    """Statements of an engine and of lake's own SQL, and what must come of them. An engine is a class that has `ask`, `kill` and
    `stop`."""

    engine = None

    def __init__(self, cluster):
        self.cluster = cluster

    @staticmethod
    def word(value):
        """A value of lake's as the engine has it."""
        return value

    def run(self, sql):
        print(f"{self.engine}>", sql, flush=True)
        hangs = threading.Timer(STATEMENT_SECONDS, self.kill)
        hangs.start()
        try:
            return self.ask(sql)
        finally:
            hangs.cancel()

    def expect(self, sql, rows):
        got = self.run(sql)
        assert got == rows, f"{sql}\n  got      {got}\n  expected {rows}"

    def refused(self, sql, word):
        try:
            self.run(sql)
        except Exception as error:  # noqa: BLE001 the errors of engines have no common class in Python
            assert word in str(error), f"{sql}\n  said {error}\n  without {word!r}"
            return
        raise AssertionError(f"{sql}\n  was not refused")

    def in_lake(self, sql):
        return [tuple(self.word(value) for value in row) for row in self.cluster.rows(sql)]

    def lake_shows(self, sql, rows, within=CACHED_SECONDS):
        """That lake shows these rows, at once or by then."""
        until = time.monotonic() + within
        while (got := self.in_lake(sql)) != rows:
            assert time.monotonic() < until, f"lake: {sql}\n  got      {got}\n  expected {rows}"
            time.sleep(0.2)

    def both(self, sql, rows):
        """The same rows from the engine and from lake."""
        self.expect(sql, rows)
        self.lake_shows(sql, rows)


def take(steps, binary, begin):
    """Takes the steps with the engine that `begin` makes for a cluster of its own and a directory, and says how long each took."""
    # Whoever ends it, also as a time-out does, leaves nothing running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    first = last = time.monotonic()

    def done(what):
        nonlocal last
        now = time.monotonic()
        print(f"ok {what}: {now - last:.1f} s", flush=True)
        last = now

    with tempfile.TemporaryDirectory(prefix="lake-engine-", ignore_cleanup_errors=True) as directory:
        directory = pathlib.Path(directory)
        cluster = Lake(binary, directory)
        try:
            cluster.await_serving()
            done("the cluster")
            checks = begin(cluster, directory)
            try:
                done("the engine")
                for step in steps:
                    step(checks)
                    done(step.__name__)
            finally:
                checks.stop()
        finally:
            cluster.stop()
    done("the end")
    print(f"ok: {len(steps)} steps in {last - first:.0f} s", flush=True)
