"""A cluster of lake for clients of other makers, and its own SQL beside them."""

import json
import signal
import socket
import subprocess
import time

PATIENCE_SECONDS = 120


class Lake:
    """A cluster of its own: three peers, two query nodes."""

    def __init__(self, lake, directory):
        self.log = open(directory / "up.log", "w")
        self.up = subprocess.Popen([lake, "up", "--no-shell", "--sample", "none", "--dir", str(directory / "data")],
                                   stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)
        until = time.monotonic() + PATIENCE_SECONDS
        while not (addresses := self.addresses(directory / "data" / "cluster.json")):
            assert self.up.poll() is None, (directory / "up.log").read_text()
            assert time.monotonic() < until, "waited in vain for the cluster"
            time.sleep(0.1)
        self.flight, self.rest = addresses
        # An address is chosen before it is served.
        for address in addresses:
            host, port = address.rsplit(":", 1)
            while True:
                try:
                    socket.create_connection((host, int(port))).close()
                    break
                except OSError:
                    assert self.up.poll() is None, (directory / "up.log").read_text()
                    assert time.monotonic() < until, f"waited in vain for {address}"
                    time.sleep(0.1)

    @staticmethod
    def addresses(manifest):
        """Those of the first query node and of the second: what one commits the other shows."""
        if not manifest.exists():
            return None
        nodes = [node["addresses"] for node in json.loads(manifest.read_text()) if node["role"] == "query"]
        if len(nodes) < 2 or not all(node.get("flight") and node.get("rest") for node in nodes):
            return None
        return nodes[0]["flight"], nodes[1]["rest"]

    def stop(self):
        self.up.send_signal(signal.SIGTERM)
        self.up.wait(PATIENCE_SECONDS)
        self.log.close()


def rows_in_lake(lake, at, sql):
    """The rows as lake's own SQL sees them."""
    print("lake>", sql, flush=True)
    done = subprocess.run([lake, "sql", "--at", at, "--format", "json", "-c", sql],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{sql}\n  {done.stderr}{done.stdout}"
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [tuple(row.values()) for rows in found for row in rows]
