"""What could not be delivered yet: a small SQLite database in the state directory.

A write goes here first and is durable when `put` returns; a thread delivers it. Several processes may share one outbox:
each delivers its own items, those of processes that have ended, and those that were released. Items of one owner are
delivered in the order they were put. It also remembers what this machine saw of other machines' heartbeats.

What a process put it also keeps in memory until it is delivered. So a disk that fills up, becomes read-only or goes
away while training runs costs nothing as long as MLflow answers; only what would have to outlive the process is lost.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TypeVar

from sqlalchemy import (
    Column,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from zeus_flows.ending import OpenFiles
from zeus_flows.errors import StoreError, StoreUnavailable
from zeus_flows.ledger.lease import Holder, is_gone, read_holder
from zeus_flows.private_files import open_private, state_folder

log = logging.getLogger(__name__)

#: Seconds that another process may take to store an item for this one.
_ANOTHER_S = 8.0
T = TypeVar("T")

_META = MetaData()
_ITEMS = Table(
    "items",
    _META,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("ledger", String, nullable=False, index=True),  # which store and job
    Column("attempt", String, nullable=False),  # run id, or the token of one that has none yet
    Column("kind", String, nullable=False),
    Column("payload", String, nullable=False),
    Column("owner", String, nullable=False),  # JSON of a Holder; empty where it was released
    Column("wall_s", Float, nullable=False),
)
_RUNS = Table("runs", _META, Column("token", String, primary_key=True), Column("run_id", String, nullable=False))
_NUMBERS = Table("numbers", _META, Column("ledger", String, primary_key=True), Column("last", Integer, nullable=False))
_SIGHTINGS = Table(
    "sightings",
    _META,
    Column("attempt", String, primary_key=True),
    Column("lease", String, nullable=False),
    Column("boot", String, nullable=False),
    Column("first_seen_s", Float, nullable=False),  # on this machine's clock since boot
)


@dataclass(frozen=True, slots=True)
class Item:
    """Something to be delivered."""

    id: int
    attempt: str
    kind: str
    payload: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Own:
    """An item that this process put."""

    ledger: str
    token: str
    item: Item


class Outbox:
    """A durable queue. Safe for several threads and processes.

    Args:
        folder: The state directory; made if need be.

    Raises:
        StoreError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "outbox.db"
        self._lock = Lock()
        self._own: dict[int, _Own] = {}  # in the order they were put; those with an id below 0 are not on the disk
        self._unremoved: set[int] = set()  # delivered, and still on the disk
        self._runs: dict[str, str] = {}
        self._last: dict[str, int] = {}
        self._unkept_ids = count(-1, -1)
        self._complained, self._files = False, OpenFiles()
        self._engine: Engine = create_engine(f"sqlite:///{self._path}", connect_args={"timeout": 30})
        event.listen(self._engine, "connect", _make_durable)
        try:
            state_folder(folder)
            os.close(open_private(self._path, os.O_RDWR | os.O_CREAT))  # what SQLite puts beside it is as private
            with self._engine.begin() as connection:
                for table in _META.sorted_tables:  # of several processes that begin at once, one makes it
                    connection.execute(CreateTable(table, if_not_exists=True))
                    for index in table.indexes:
                        connection.execute(CreateIndex(index, if_not_exists=True))
        except (OSError, SQLAlchemyError) as error:
            raise StoreError(
                f"{self._path} cannot be written ({getattr(error, 'strerror', None) or type(error).__name__})\n"
                f"  set ZEUS_FLOWS_STATE_DIR to a folder that can"
            ) from None

    def put(self, ledger: str, attempt: str, kind: str, payload: str, *, owner: str, wall_s: float) -> int:
        """Store an item; return its id. It is on the disk when this returns, or the id is below 0."""
        row = {"ledger": ledger, "attempt": attempt, "kind": kind, "payload": payload, "owner": owner, "wall_s": wall_s}

        def store(connection: Connection) -> int:
            result = connection.execute(insert(_ITEMS).values(**row))
            return int(result.inserted_primary_key[0]) if result.inserted_primary_key else 0

        item_id = self._by_another_process(row) if self._files.were_closed() else self._on_disk(store)
        with self._lock:
            item_id = next(self._unkept_ids) if item_id is None else item_id
            self._own[item_id] = _Own(ledger, _holder(owner).token, Item(item_id, attempt, kind, payload, wall_s))
        return item_id

    def due(self, ledger: str, *, owner: str) -> Sequence[Item]:
        """Return what this owner may deliver, in order, after taking over the items of owners that are gone.

        An item is taken over by one process only, so no two deliver it.
        """
        mine = _holder(owner)

        def take_over(connection: Connection) -> list[Item]:
            if self._unremoved:
                connection.execute(delete(_ITEMS).where(_ITEMS.c.id.in_(self._unremoved)))
            query = select(_ITEMS).where(_ITEMS.c.ledger == ledger).order_by(_ITEMS.c.id)
            items = []
            for row in connection.execute(query).all():
                theirs = read_holder(row.owner)
                if theirs is None or (theirs.token != mine.token and is_gone(theirs)):
                    untouched = (_ITEMS.c.id == row.id) & (_ITEMS.c.owner == row.owner)
                    taken = connection.execute(update(_ITEMS).where(untouched).values(owner=owner))
                    theirs = mine if taken.rowcount else theirs
                if theirs is not None and theirs.token == mine.token:
                    items.append(Item(row.id, row.attempt, row.kind, row.payload, row.wall_s))
            return items

        found = self._on_disk(take_over)
        with self._lock:
            if found is not None:
                self._unremoved.clear()
            own = {i: o.item for i, o in self._own.items() if (o.ledger, o.token) == (ledger, mine.token)}
        return [item for item in found or () if item.id not in own] + list(own.values())

    def release(self, ledger: str, *, token: str) -> int:
        """Leave an owner's items to whoever comes next: its process may go on for days without delivering them.

        Returns:
            How many are on no disk, and so are lost.
        """

        def disown(connection: Connection) -> None:
            query = select(_ITEMS.c.id, _ITEMS.c.owner).where(_ITEMS.c.ledger == ledger)
            for row in connection.execute(query).all():
                owner = read_holder(row.owner)
                if owner is not None and owner.token == token:
                    connection.execute(update(_ITEMS).where(_ITEMS.c.id == row.id).values(owner=""))

        self._on_disk(disown)
        with self._lock:
            released = [i for i, own in self._own.items() if (own.ledger, own.token) == (ledger, token)]
            for item_id in released:
                del self._own[item_id]
        return sum(item_id < 0 for item_id in released)

    def unkept(self, ledger: str, *, token: str) -> int:
        """Return how many items of an owner are on no disk and still to be delivered."""
        with self._lock:
            return sum(i < 0 and (own.ledger, own.token) == (ledger, token) for i, own in self._own.items())

    def unsettled(self, ledger: str) -> frozenset[str]:
        """Return the attempts, by run id or token, about which something is still to be delivered by whomever."""
        query = select(_ITEMS.c.attempt).where(_ITEMS.c.ledger == ledger).distinct()
        found = self._on_disk(lambda connection: frozenset(connection.execute(query).scalars()))
        with self._lock:
            own = {o.item.attempt for i, o in self._own.items() if o.ledger == ledger and (i < 0 or found is None)}
        return frozenset(own) | (found or frozenset())

    def guess_recurrence(self, ledger: str) -> int:
        """Return a number for a recurrence that cannot ask for one: one more than the last that was seen here."""
        query = select(_NUMBERS.c.last).where(_NUMBERS.c.ledger == ledger)
        stored = self._on_disk(lambda connection: int(connection.execute(query).scalar() or 0))
        number = max(stored or 0, self._last.get(ledger, 0)) + 1
        self.saw_recurrence(ledger, number)
        return number

    def saw_recurrence(self, ledger: str, number: int) -> None:
        """Remember the newest recurrence that ran here."""
        self._last[ledger] = max(number, self._last.get(ledger, 0))
        row = upsert(_NUMBERS).values(ledger=ledger, last=number)
        newer = row.on_conflict_do_update(
            index_elements=["ledger"], set_={"last": number}, where=_NUMBERS.c.last < number
        )
        self._on_disk(lambda connection: connection.execute(newer))

    def remove(self, item_id: int, *, token: str | None = None, run_id: str | None = None) -> None:
        """Forget an item that was delivered; remember the run that a token has become."""

        def forget(connection: Connection) -> bool:
            connection.execute(delete(_ITEMS).where(_ITEMS.c.id == item_id))
            if token is not None and run_id is not None:
                connection.execute(upsert(_RUNS).values(token=token, run_id=run_id).on_conflict_do_nothing())
            return True

        forgotten = self._on_disk(forget) is not None
        with self._lock:
            if token is not None and run_id is not None:
                self._runs[token] = run_id
            self._own.pop(item_id, None)
            if item_id > 0 and not forgotten:
                self._unremoved.add(item_id)

    def run_of(self, token: str) -> str | None:
        """Return the run that a token has become, once its decision was delivered.

        Raises:
            StoreUnavailable: that is not known, as the disk cannot be read.
        """
        if token in self._runs:
            return self._runs[token]
        found = self._on_disk(lambda c: (c.execute(select(_RUNS.c.run_id).where(_RUNS.c.token == token)).scalar(),))
        if found is None and all(own.item.attempt != token for own in tuple(self._own.values())):
            raise StoreUnavailable(f"{self._path} cannot be read")
        return found[0] if found else None

    def holds(self, item_id: int) -> bool:
        """Return whether an item that this process put is still to be delivered. Asks no disk."""
        return item_id in self._own

    def waiting(self, ledger: str, item_id: int) -> bool:
        """Return whether an item is still to be delivered, whoever put it."""
        if item_id < 0:
            return item_id in self._own
        query = select(_ITEMS.c.id).where(_ITEMS.c.ledger == ledger, _ITEMS.c.id == item_id)
        found = self._on_disk(lambda connection: connection.execute(query).scalar() is not None)
        return item_id in self._own if found is None else found and item_id not in self._unremoved

    def unchanged_for_s(self, attempt: str, lease: str, *, boot: str, now_s: float) -> float:
        """Return how long this machine has seen this very lease, and remember that it saw it now."""

        def look(connection: Connection) -> float:
            row = connection.execute(select(_SIGHTINGS).where(_SIGHTINGS.c.attempt == attempt)).one_or_none()
            if row is not None and row.lease == lease and row.boot == boot:
                return float(now_s - row.first_seen_s)
            connection.execute(delete(_SIGHTINGS).where(_SIGHTINGS.c.attempt == attempt))
            row_now = {"attempt": attempt, "lease": lease, "boot": boot, "first_seen_s": now_s}
            connection.execute(insert(_SIGHTINGS).values(**row_now))
            return 0.0

        return self._on_disk(look) or 0.0

    def close(self) -> None:
        """Release the database."""
        self._engine.dispose()
        self._files.close()

    def _by_another_process(self, row: Mapping[str, object]) -> int | None:
        """Store an item although training closed this process's files, SQLite's among them; None where that fails."""
        words = [sys.executable, "-c", f"from {__name__} import _store_for_another; _store_for_another()"]
        try:
            task = json.dumps([str(self._path.parent.absolute()), row])
            done = subprocess.run(words, input=task, capture_output=True, text=True, timeout=_ANOTHER_S, check=True)  # noqa: S603
            return int(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return None

    def _on_disk(self, work: Callable[[Connection], T]) -> T | None:
        """Return what a transaction returns; None where the disk is full, cannot be written or is not there."""
        if self._files.were_closed():  # with our connections, whose numbers may be other files' by now
            return None
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            if not self._complained:
                self._complained = True
                why = str(getattr(error, "orig", None) or type(error).__name__)
                log.warning(
                    "%s: %s; what training brings is kept in memory, and lost where this ends before MLflow has it",
                    self._path,
                    why,
                )
            return None


def _store_for_another() -> None:
    """Store the item that standard input names; print its id."""
    folder, row = json.load(sys.stdin)
    print(Outbox(Path(folder)).put(**row))  # noqa: T201


def _holder(owner: str) -> Holder:
    read = read_holder(owner)
    assert read is not None
    return read


def _make_durable(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("pragma journal_mode = wal")
    cursor.execute("pragma synchronous = full")
    cursor.close()
