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
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Final, TypeVar

from zeus_flows.ending import OpenFiles
from zeus_flows.errors import StoreError, StoreUnavailable
from zeus_flows.ledger.lease import Holder, is_gone, read_holder
from zeus_flows.private_files import open_private, state_folder

log = logging.getLogger(__name__)

#: Seconds that another process may take to store an item for this one.
_ANOTHER_S = 8.0
#: Seconds for which another process may lock the database.
_LOCKED_S: Final = 30.0
T = TypeVar("T")

#: An item's owner is JSON of a `Holder`; empty where it was released. Its attempt is a run id, or the token of one that
#: has none yet. `first_seen_s` is on this machine's clock since boot.
_TABLES: Final = (
    """create table if not exists items (
        id integer not null primary key, ledger varchar not null, attempt varchar not null, kind varchar not null,
        payload varchar not null, owner varchar not null, wall_s float not null)""",
    "create index if not exists ix_items_ledger on items (ledger)",
    "create table if not exists runs (token varchar not null primary key, run_id varchar not null)",
    "create table if not exists numbers (ledger varchar not null primary key, last integer not null)",
    """create table if not exists sightings (
        attempt varchar not null primary key, lease varchar not null, boot varchar not null,
        first_seen_s float not null)""",
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
        self._disk = RLock()  # for the connection
        self._connection: sqlite3.Connection | None = None
        try:
            state_folder(folder)
            os.close(open_private(self._path, os.O_RDWR | os.O_CREAT))  # what SQLite puts beside it is as private
            with self._transaction() as connection:
                for table in _TABLES:  # of several processes that begin at once, one makes it
                    connection.execute(table)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"{self._path} cannot be written ({getattr(error, 'strerror', None) or type(error).__name__})\n"
                f"  set ZEUS_FLOWS_STATE_DIR to a folder that can"
            ) from None

    def put(self, ledger: str, attempt: str, kind: str, payload: str, *, owner: str, wall_s: float) -> int:
        """Store an item; return its id. It is on the disk when this returns, or the id is below 0."""
        row = {"ledger": ledger, "attempt": attempt, "kind": kind, "payload": payload, "owner": owner, "wall_s": wall_s}

        def store(connection: sqlite3.Connection) -> int:
            statement = f"insert into items ({', '.join(row)}) values ({', '.join('?' * len(row))})"  # noqa: S608
            return connection.execute(statement, tuple(row.values())).lastrowid or 0

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

        def take_over(connection: sqlite3.Connection) -> list[Item]:
            if self._unremoved:
                connection.executemany("delete from items where id = ?", [(item_id,) for item_id in self._unremoved])
            query = "select id, attempt, kind, payload, wall_s, owner from items where ledger = ? order by id"
            items = []
            for *row, owned_by in connection.execute(query, (ledger,)).fetchall():
                theirs = read_holder(owned_by)
                if theirs is None or (theirs.token != mine.token and is_gone(theirs)):
                    untouched = "update items set owner = ? where id = ? and owner = ?"
                    taken = connection.execute(untouched, (owner, row[0], owned_by))
                    theirs = mine if taken.rowcount else theirs
                if theirs is not None and theirs.token == mine.token:
                    items.append(Item(*row))
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

        def disown(connection: sqlite3.Connection) -> None:
            query = "select id, owner from items where ledger = ?"
            for item_id, owned_by in connection.execute(query, (ledger,)).fetchall():
                owner = read_holder(owned_by)
                if owner is not None and owner.token == token:
                    connection.execute("update items set owner = '' where id = ?", (item_id,))

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
        query = "select distinct attempt from items where ledger = ?"
        found = self._on_disk(lambda c: frozenset(attempt for (attempt,) in c.execute(query, (ledger,))))
        with self._lock:
            own = {o.item.attempt for i, o in self._own.items() if o.ledger == ledger and (i < 0 or found is None)}
        return frozenset(own) | (found or frozenset())

    def guess_recurrence(self, ledger: str) -> int:
        """Return a number for a recurrence that cannot ask for one: one more than the last that was seen here."""
        query = "select last from numbers where ledger = ?"
        stored = self._on_disk(lambda c: int(_scalar(c.execute(query, (ledger,))) or 0))
        number = max(stored or 0, self._last.get(ledger, 0)) + 1
        self.saw_recurrence(ledger, number)
        return number

    def saw_recurrence(self, ledger: str, number: int) -> None:
        """Remember the newest recurrence that ran here."""
        self._last[ledger] = max(number, self._last.get(ledger, 0))
        newer = """insert into numbers (ledger, last) values (?, ?)
            on conflict (ledger) do update set last = excluded.last where last < excluded.last"""
        self._on_disk(lambda connection: connection.execute(newer, (ledger, number)))

    def remove(self, item_id: int, *, token: str | None = None, run_id: str | None = None) -> None:
        """Forget an item that was delivered; remember the run that a token has become."""

        def forget(connection: sqlite3.Connection) -> bool:
            connection.execute("delete from items where id = ?", (item_id,))
            if token is not None and run_id is not None:
                known = "insert into runs (token, run_id) values (?, ?) on conflict do nothing"
                connection.execute(known, (token, run_id))
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
        query = "select run_id from runs where token = ?"
        found = self._on_disk(lambda c: (_scalar(c.execute(query, (token,))),))
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
        query = "select id from items where ledger = ? and id = ?"
        found = self._on_disk(lambda c: _scalar(c.execute(query, (ledger, item_id))) is not None)
        return item_id in self._own if found is None else found and item_id not in self._unremoved

    def unchanged_for_s(self, attempt: str, lease: str, *, boot: str, now_s: float) -> float:
        """Return how long this machine has seen this very lease, and remember that it saw it now."""

        def look(connection: sqlite3.Connection) -> float:
            query = "select lease, boot, first_seen_s from sightings where attempt = ?"
            row = connection.execute(query, (attempt,)).fetchone()
            if row is not None and row[:2] == (lease, boot):
                return float(now_s - row[2])
            seen = "insert or replace into sightings (attempt, lease, boot, first_seen_s) values (?, ?, ?, ?)"
            connection.execute(seen, (attempt, lease, boot, now_s))
            return 0.0

        return self._on_disk(look) or 0.0

    def close(self) -> None:
        """Release the database."""
        if not self._files.were_closed():
            self._disconnect()
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

    def _on_disk(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Return what a transaction returns; None where the disk is full, cannot be written or is not there."""
        if self._files.were_closed():  # with our connection, whose numbers may be other files' by now
            return None
        try:
            with self._transaction() as connection:
                return work(connection)
        except sqlite3.Error as error:
            if not self._complained:
                self._complained = True
                log.warning(
                    "%s: %s; what training brings is kept in memory, and lost where this ends before MLflow has it",
                    self._path,
                    error,
                )
            return None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, one thread at a time; commit, or undo what was done and connect anew the next time."""
        with self._disk:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                yield self._connection
                self._connection.commit()
            except BaseException:
                self._disconnect()
                raise

    def _connect(self) -> sqlite3.Connection:
        there = f"{self._path.absolute().as_uri()}?mode=rw"  # one that was deleted is not made anew, without its tables
        connection = sqlite3.connect(there, uri=True, timeout=_LOCKED_S, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        return connection

    def _disconnect(self) -> None:
        with self._disk:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


def _store_for_another() -> None:
    """Store the item that standard input names; print its id."""
    folder, row = json.load(sys.stdin)
    print(Outbox(Path(folder)).put(**row))  # noqa: T201


def _holder(owner: str) -> Holder:
    read = read_holder(owner)
    assert read is not None
    return read


def _scalar(cursor: sqlite3.Cursor) -> Any:
    """Return the first value of the first row; None where there is none."""
    row = cursor.fetchone()
    return None if row is None else row[0]
