"""One client of a fault run that goes through REST, as PyIceberg does. A line of JSON on standard input says what to do, one on standard
output what came of it. It ends with its standard input."""

import json
import sys
import time

try:
    import pyarrow as pa
    import pyiceberg
    # What the first table would bring otherwise, in seconds.
    import pyarrow.dataset
    import pyiceberg.io.pyarrow
    import requests
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import (
        BadRequestError,
        CommitFailedException,
        NoSuchTableError,
        ServiceUnavailableError,
        ValidationException,
    )
    from pyiceberg.expressions import EqualTo
except Exception as missing:
    print(json.dumps({"missing": f"{missing} (of {sys.executable})"}), flush=True)
    sys.exit(1)

COLUMNS = pa.schema([(name, pa.int64()) for name in ("id", "part", "v")])
# A commit that others were first with is built anew, from what is there then.
ATTEMPTS = 5
# Until when what is asked for may take.
ends = 0.0
catalogs = {}
plain_send = requests.adapters.HTTPAdapter.send


def send(self, request, stream=False, timeout=None, **more):
    """PyIceberg waits for an answer for as long as it takes."""
    left = max(ends - time.monotonic(), 0.05)
    return plain_send(self, request, stream=stream, timeout=timeout or left, **more)


requests.adapters.HTTPAdapter.send = send


def load(asked):
    uri = asked["uri"]
    if uri not in catalogs:
        # Under a name that nobody has settings for.
        catalogs[uri] = load_catalog("of-a-fault-run", type="rest", uri=uri, warehouse="lake")
    table = catalogs[uri].load_table(asked["table"])
    # Here alone: what PyIceberg does by itself after a lost race is not what is judged.
    table.metadata.properties["commit.retry.num-retries"] = "0"
    return table


def read(asked):
    table = load(asked)
    newest = table.current_snapshot()
    found = table.scan(selected_fields=("id", "v")).to_arrow()
    rows = list(zip(found["id"].to_pylist(), found["v"].to_pylist()))
    snapshot = newest and newest.snapshot_id
    return {"rows": {"rows": rows, "snapshot": snapshot, "sequence": newest and newest.sequence_number}}


def change(asked):
    """A transaction that is not committed yet, and how many rows it changes."""
    table, op, values = load(asked), asked["op"], asked["values"]
    of_id = EqualTo("id", asked["id"])
    count = len(values)
    if op in ("update", "delete"):
        count = len(table.scan(of_id, selected_fields=("id",)).to_arrow())
    transaction = table.transaction()
    columns = {"id": [asked["id"]] * len(values), "part": list(range(len(values))), "v": values}
    if op == "insert":
        transaction.append(pa.table(columns, schema=COLUMNS))
    elif op == "delete" and count > 0:
        transaction.delete(of_id)
    elif op == "merge" or count > 0:
        transaction.overwrite(pa.table(columns, schema=COLUMNS), overwrite_filter=of_id)
    return transaction, count


def failed(what, error):
    return {"failed": {"what": what, "kind": type(error).__name__, "message": str(error)}}


def was_not_sent(error):
    # There was no connection that it could have gone through.
    return isinstance(error, requests.exceptions.ConnectTimeout) or "NewConnectionError" in repr(error)


def came(asked):
    global ends
    ends = time.monotonic() + asked["within"]
    lost = None
    for _ in range(ATTEMPTS):
        is_sent = False
        try:
            if asked["op"] == "read":
                return read(asked)
            transaction, count = change(asked)
            if count > 0:
                is_sent = True
                transaction.commit_transaction()
            return {"done": {"count": count}}
        except (CommitFailedException, ValidationException) as error:
            lost = error
            if time.monotonic() > ends:
                break
        except (BadRequestError, NoSuchTableError) as error:
            return failed("refused", error)
        except ServiceUnavailableError as error:
            return failed("not served", error)
        except Exception as error:
            return failed("unknown" if is_sent and not was_not_sent(error) else "not served", error)
    return failed("conflict", lost)


print(json.dumps({"hello": pyiceberg.__version__}), flush=True)
for line in sys.stdin:
    print(json.dumps(came(json.loads(line))), flush=True)
