"""What could not be delivered yet: a small SQLite database in the state directory.

A write goes here first and is durable when `put` returns; a thread delivers it. Several processes may share one outbox:
each delivers its own items, those of processes that have ended, and those that were released. Items of one owner are
delivered in the order they were put. It also remembers what this machine saw of other machines' heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from zeus_flows.errors import StoreError
from zeus_flows.ledger.lease import is_gone, read_holder

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


class Outbox:
    """A durable queue. Safe for several threads and processes.

    Args:
        folder: The state directory; made if need be.

    Raises:
        StoreError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "outbox.db"
        self._engine: Engine = create_engine(f"sqlite:///{self._path}", connect_args={"timeout": 30})
        event.listen(self._engine, "connect", _make_durable)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._engine.begin() as connection:
                for table in _META.sorted_tables:  # of several processes that begin at once, one makes it
                    connection.execute(CreateTable(table, if_not_exists=True))
                    for index in table.indexes:
                        connection.execute(CreateIndex(index, if_not_exists=True))
        except (OSError, SQLAlchemyError) as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: Exception) -> StoreError:
        return StoreError(
            f"{self._path} cannot be written ({type(error).__name__})\n  set ZEUS_FLOWS_STATE_DIR to a folder that can"
        )

    def put(self, ledger: str, attempt: str, kind: str, payload: str, *, owner: str, wall_s: float) -> int:
        """Store an item; it is on disk when this returns.

        Raises:
            StoreError: it is not; the disk may be full.
        """
        row = {"ledger": ledger, "attempt": attempt, "kind": kind, "payload": payload, "owner": owner, "wall_s": wall_s}
        try:
            with self._engine.begin() as connection:
                result = connection.execute(insert(_ITEMS).values(**row))
                return int(result.inserted_primary_key[0]) if result.inserted_primary_key else 0
        except SQLAlchemyError as error:
            raise self._unwritable(error) from None

    def due(self, ledger: str, *, owner: str) -> Sequence[Item]:
        """Return what this owner may deliver, in order, after taking over the items of owners that are gone.

        An item is taken over by one process only, so no two deliver it.
        """
        mine = read_holder(owner)
        assert mine is not None
        with self._engine.begin() as connection:
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

    def release(self, ledger: str, *, token: str) -> None:
        """Leave an owner's items to whoever comes next: its process may go on for days without delivering them."""
        with self._engine.begin() as connection:
            query = select(_ITEMS.c.id, _ITEMS.c.owner).where(_ITEMS.c.ledger == ledger)
            for row in connection.execute(query).all():
                owner = read_holder(row.owner)
                if owner is not None and owner.token == token:
                    connection.execute(update(_ITEMS).where(_ITEMS.c.id == row.id).values(owner=""))

    def unsettled(self, ledger: str) -> frozenset[str]:
        """Return the attempts, by run id or token, about which something is still to be delivered by whomever."""
        query = select(_ITEMS.c.attempt).where(_ITEMS.c.ledger == ledger).distinct()
        with self._engine.connect() as connection:
            return frozenset(connection.execute(query).scalars())

    def guess_recurrence(self, ledger: str) -> int:
        """Return a number for a recurrence that cannot ask for one: one more than the last that was seen here."""
        with self._engine.begin() as connection:
            last = connection.execute(select(_NUMBERS.c.last).where(_NUMBERS.c.ledger == ledger)).scalar() or 0
        self.saw_recurrence(ledger, last + 1)
        return int(last) + 1

    def saw_recurrence(self, ledger: str, number: int) -> None:
        """Remember the newest recurrence that ran here."""
        row = upsert(_NUMBERS).values(ledger=ledger, last=number)
        newer = row.on_conflict_do_update(
            index_elements=["ledger"], set_={"last": number}, where=_NUMBERS.c.last < number
        )
        with self._engine.begin() as connection:
            connection.execute(newer)

    def remove(self, item_id: int, *, token: str | None = None, run_id: str | None = None) -> None:
        """Forget an item that was delivered; remember the run that a token has become."""
        with self._engine.begin() as connection:
            connection.execute(delete(_ITEMS).where(_ITEMS.c.id == item_id))
            if token is not None and run_id is not None:
                connection.execute(upsert(_RUNS).values(token=token, run_id=run_id).on_conflict_do_nothing())

    def run_of(self, token: str) -> str | None:
        """Return the run that a token has become, once its decision was delivered."""
        with self._engine.connect() as connection:
            return connection.execute(select(_RUNS.c.run_id).where(_RUNS.c.token == token)).scalar()

    def waiting(self, ledger: str, item_id: int) -> bool:
        """Return whether an item is still to be delivered."""
        query = select(_ITEMS.c.id).where(_ITEMS.c.ledger == ledger, _ITEMS.c.id == item_id)
        with self._engine.connect() as connection:
            return connection.execute(query).scalar() is not None

    def unchanged_for_s(self, attempt: str, lease: str, *, boot: str, now_s: float) -> float:
        """Return how long this machine has seen this very lease, and remember that it saw it now."""
        with self._engine.begin() as connection:
            row = connection.execute(select(_SIGHTINGS).where(_SIGHTINGS.c.attempt == attempt)).one_or_none()
            if row is not None and row.lease == lease and row.boot == boot:
                return float(now_s - row.first_seen_s)
            connection.execute(delete(_SIGHTINGS).where(_SIGHTINGS.c.attempt == attempt))
            row_now = {"attempt": attempt, "lease": lease, "boot": boot, "first_seen_s": now_s}
            connection.execute(insert(_SIGHTINGS).values(**row_now))
            return 0.0

    def close(self) -> None:
        """Release the database."""
        self._engine.dispose()


def _make_durable(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("pragma journal_mode = wal")
    cursor.execute("pragma synchronous = full")
    cursor.close()
