"""A policy's state as tags of a run: a cache that keeps decisions flat in the length of the history.

A snapshot covers a prefix of the history that nothing can be added to any more. It can be rebuilt from the runs at any
time. Tags are last-writer-wins and short, so a snapshot is cut into pieces under a digest: pieces of two writers do not
fit together, and whoever reads such a mixture folds anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from zeus_flows.core import policy
from zeus_flows.core.policy import State
from zeus_flows.core.records import Job
from zeus_flows.ledger.codec import MAX_TAG

HEAD = "zf.snapshot"
#: Closed recurrences that a snapshot may lag behind before the next one is written.
EVERY = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state and the last recurrence it covers."""

    upto: int
    state: State


def dump(snapshot: Snapshot) -> dict[str, str]:
    """Return the tags that hold a snapshot."""
    body = json.dumps(policy.to_json(snapshot.state), separators=(",", ":"))
    pieces = [body[i : i + MAX_TAG] for i in range(0, len(body), MAX_TAG)]
    head = json.dumps({"upto": snapshot.upto, "pieces": len(pieces), "digest": _digest(body)})
    return {HEAD: head} | {f"{HEAD}.{i}": piece for i, piece in enumerate(pieces)}


def load(job: Job, tags: Mapping[str, str]) -> Snapshot | None:
    """Return the snapshot that tags hold, or None where there is none of use: then the history is folded anew."""
    try:
        head = json.loads(tags[HEAD])
        body = "".join(tags[f"{HEAD}.{i}"] for i in range(head["pieces"]))
        if _digest(body) != head["digest"]:
            return None
        state = policy.from_json(job, json.loads(body))
        return None if state is None else Snapshot(int(head["upto"]), state)
    except (KeyError, TypeError, ValueError):
        return None


def covers(tags: Mapping[str, str]) -> int:
    """Return the last recurrence that a snapshot covers, whatever settings it is for; 0 where there is none.

    >>> covers({HEAD: '{"upto": 16}'}), covers({})
    (16, 0)
    """
    try:
        return int(json.loads(tags[HEAD])["upto"])
    except (KeyError, TypeError, ValueError):
        return 0


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
