"""A policy's state as tags of a run: a cache that keeps decisions flat in the length of the history.

A snapshot covers a prefix of the history that nothing can be added to any more. It can be rebuilt from the runs at any
time. Tags are last-writer-wins and short, so a snapshot is cut into pieces under a digest: pieces of two writers do not
fit together, and whoever reads such a mixture folds anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.json import from_text, plain_text, to_text
from zeus_flows.core.policy import State
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.record_text import MAX_TAG

HEAD: Final = names.SNAPSHOT
#: How far the history was folded anew while a snapshot of an earlier version still serves.
ANEW: Final = names.SNAPSHOT_ANEW
_PIECE: Final[Mapping[str, Callable[[int], str]]] = {HEAD: names.snapshot_piece, ANEW: names.snapshot_anew_piece}
#: Closed recurrences that a snapshot may lag behind before the next one is written.
EVERY = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state and the last recurrence it covers.

    Attributes:
        whole: False where an earlier version wrote it: it can be decided on, but lacks sums that the runs still have.
    """

    upto: int
    state: State
    whole: bool = True


@dataclass(frozen=True, slots=True)
class _Contents:
    """What the head of a snapshot's tags says: how far it goes, and how its pieces fit together."""

    upto: int
    pieces: int = 0
    digest: str = ""


def dump(snapshot: Snapshot, *, head: str = HEAD) -> dict[str, str]:
    """Return the tags that hold a snapshot.

    Raises:
        ValueError: its state lacks sums; whoever read it later would not know.
    """
    if not snapshot.whole:
        raise ValueError("a snapshot is not written from one of an earlier version")
    body = plain_text(policy.to_json(snapshot.state))
    pieces = [body[i : i + MAX_TAG] for i in range(0, len(body), MAX_TAG)]
    contents = _Contents(snapshot.upto, len(pieces), _digest(body))
    return {head: to_text(contents)} | {_PIECE[head](i): piece for i, piece in enumerate(pieces)}


def load(job: Job, tags: Mapping[str, str], *, head: str = HEAD) -> Snapshot | None:
    """Return the snapshot that tags hold, or None where there is none of use: then the history is folded anew."""
    try:
        if (read := _read(tags, head)) is None:
            return None
        upto, data = read
        state = policy.from_json(job, data)
        return None if state is None else Snapshot(upto, state, whole=policy.is_whole(data))
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def covers(tags: Mapping[str, str]) -> int:
    """Return the last recurrence that a snapshot covers, whatever settings it is for; 0 where there is none.

    >>> covers({HEAD: '{"upto": 16}'}), covers({})
    (16, 0)
    """
    try:
        return from_text(_Contents, tags[HEAD]).upto
    except (KeyError, TypeError, ValueError):
        return 0


def counted(tags: Mapping[str, str]) -> tuple[int, int]:
    """Return the last recurrence that a snapshot covers and how many observations, whatever settings it is for."""
    try:
        upto, data = _read(tags, HEAD) or (0, {"observations": 0})
        return upto, int(data["observations"])
    except (AttributeError, LookupError, TypeError, ValueError):
        return 0, 0


def cleared(tags: Mapping[str, str], head: str) -> dict[str, str]:
    """Return the tags that empty what a snapshot's tags hold."""
    return {name: "" for name in tags if name == head or name.startswith(f"{head}.")}


def _read(tags: Mapping[str, str], head: str) -> tuple[int, dict[str, Any]] | None:
    """Return the last recurrence and the state that tags hold; None where its pieces do not fit together."""
    contents = from_text(_Contents, tags[head])
    body = "".join(tags[_PIECE[head](i)] for i in range(contents.pieces))
    return (contents.upto, json.loads(body)) if _digest(body) == contents.digest else None


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
