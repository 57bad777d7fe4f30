"""A policy's state as tags of a run: a cache that keeps decisions flat in the length of the history.

A snapshot covers a prefix of the history that nothing can be added to any more. It can be rebuilt from the runs at any
time. It is packed: that of a job with fifty batch sizes and sixty power limits has half a million characters. Tags are
last-writer-wins and short, so a snapshot is cut into pieces under a digest: pieces of two writers do not fit together,
and whoever reads such a mixture folds anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.json import from_text, plain_text, to_text
from zeus_flows.core.policy import State
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.packing import pack, unpack
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
        whole: False where it can be decided on, but should be folded anew: an earlier version wrote it, and it lacks
            sums that the runs still have, or it has what was deleted since.
        deleted: Names the attempts that had been deleted by hand when it was made; empty where none had.
    """

    upto: int
    state: State
    whole: bool = True
    deleted: str = ""


@dataclass(frozen=True, slots=True)
class _Contents:
    """What the head of a snapshot's tags says: how far it goes, and how its pieces fit together.

    Attributes:
        packed: Whether the pieces are packed text; those of earlier versions are plain.
        deleted: As of the snapshot.
        overtaken: Attempts were deleted, or brought back, since.
    """

    upto: int
    pieces: int = 0
    digest: str = ""
    packed: bool = False
    deleted: str = ""
    overtaken: bool = False


def dump(snapshot: Snapshot, *, head: str = HEAD, over: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the tags that hold a snapshot.

    Args:
        snapshot: What they hold.
        head: Under which name.
        over: The tags that are there: of a longer snapshot, pieces would stay behind, and are emptied.

    Raises:
        ValueError: its state lacks sums; whoever read it later would not know.
    """
    if not snapshot.whole:
        raise ValueError("a snapshot is not written from one of an earlier version")
    body = pack(plain_text(policy.to_json(snapshot.state)))
    pieces = [body[i : i + MAX_TAG] for i in range(0, len(body), MAX_TAG)]
    contents = _Contents(snapshot.upto, len(pieces), _digest(body), packed=True, deleted=snapshot.deleted)
    behind = list[str]()
    while (over or {}).get(name := _PIECE[head](len(pieces) + len(behind))):
        behind.append(name)
    return (
        {head: to_text(contents)}
        | {_PIECE[head](i): piece for i, piece in enumerate(pieces)}
        | dict.fromkeys(behind, "")
    )


def load(job: Job, tags: Mapping[str, str], *, head: str = HEAD) -> Snapshot | None:
    """Return the snapshot that tags hold, or None where there is none of use: then the history is folded anew."""
    try:
        if (read := _read(tags, head)) is None:
            return None
        contents, data = read
        state = policy.from_json(job, data)
        if state is None:
            return None
        whole = policy.is_whole(data) and not contents.overtaken
        return Snapshot(contents.upto, state, whole=whole, deleted=contents.deleted)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def overtake(job: Job, tags: Mapping[str, str], deleted: str) -> dict[str, str]:
    """Return the tags that say of a snapshot which others grow from that it should be folded anew; none where it holds.

    Args:
        job: Whose it must be.
        tags: What hold it.
        deleted: Names the attempts that are deleted now.
    """
    try:
        read = _read(tags, HEAD)
        if read is None or read[0].deleted == deleted or policy.from_json(job, read[1]) is None:
            return {}
        return {HEAD: to_text(replace(read[0], overtaken=True))}
    except (AttributeError, LookupError, TypeError, ValueError):
        return {}


def is_overtaken(tags: Mapping[str, str]) -> bool:
    """Return whether attempts were deleted, or brought back, since a snapshot was made."""
    try:
        return from_text(_Contents, tags[HEAD]).overtaken
    except (KeyError, TypeError, ValueError):
        return False


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
        read = _read(tags, HEAD)
        return (0, 0) if read is None else (read[0].upto, int(read[1]["observations"]))
    except (AttributeError, LookupError, TypeError, ValueError):
        return 0, 0


def cleared(tags: Mapping[str, str], head: str) -> dict[str, str]:
    """Return the tags that empty what a snapshot's tags hold."""
    return {name: "" for name in tags if name == head or name.startswith(f"{head}.")}


def _read(tags: Mapping[str, str], head: str) -> tuple[_Contents, dict[str, Any]] | None:
    """Return what the head says and the state that tags hold; None where its pieces do not fit together."""
    contents = from_text(_Contents, tags[head])
    body = "".join(tags[_PIECE[head](i)] for i in range(contents.pieces))
    if _digest(body) != contents.digest:
        return None
    return contents, json.loads(unpack(body) if contents.packed else body)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
