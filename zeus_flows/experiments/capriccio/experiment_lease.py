"""One process at a time works on an experiment, on whichever machine: a lease in MLflow.

Two that work on it at once would take recurrence numbers from each other, and neither could go on. Write-once params of
the experiment's run therefore name its holders, `zf.holder.<k>` from 1: whoever writes the next one has it. A holder
writes a beat every 30 s (the tag `zf.lease`), and `zf.released.<k>` at its end.

A holder that was killed is known to be gone at once on its own machine; elsewhere when its beat has not changed for
five minutes of the observer's clock. One that was thought dead and lives finds out before its next slice, and stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from mlflow.entities import Run

from zeus_flows.errors import ConfigError, DeclaredDead, StoreError
from zeus_flows.ledger.lease import DEAD_AFTER_S, HEARTBEAT_S, Holder, is_gone, monotonic_s, read_holder, this_process
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store

_LOOK_S: Final = 5.0  # between two looks at another machine's beat


class Lease:
    """The right to go on with an experiment.

    Args:
        store: MLflow.
        run_id: The experiment's run.
        name: The experiment.
        holder: Who wants it; this process by default.
        clock: Seconds that only go forward.
        sleep: Waits so many seconds.

    Attributes:
        number: Which of the experiment's holders this one is, from 1; 0 while it has not got it.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        name: str,
        *,
        holder: Holder | None = None,
        clock: Callable[[], float] = monotonic_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._run_id, self._name = store, run_id, name
        self._holder = holder or this_process()
        self._clock, self._sleep = clock, sleep
        self.number = 0

    def take(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, after its previous holder is known to be gone. `say` is called if that takes a while.

        Raises:
            ConfigError: another process has it.
        """
        while not self.number:
            params = self._store.params(self._run_id)
            last, holder = _last(params)
            if holder is not None and names.experiment_released(last) not in params:
                self._wait_for_the_end_of(holder, last, say)
            mine = self._holder.dump()
            if self._store.set_once(self._run_id, names.experiment_holder(last + 1), mine) == mine:
                self.number = last + 1
        self._store.log(self._run_id, tags={names.LEASE: self._holder.dump()})

    def check(self) -> None:
        """Make sure that the lease is still ours.

        Raises:
            DeclaredDead: another process has taken it.
        """
        last, holder = _last(self._store.params(self._run_id))
        if last != self.number and holder is not None:
            raise DeclaredDead(
                f"the experiment {self._name} was taken over by process {holder.pid} on {holder.host} while this one "
                "was thought dead"
            )

    def beat(self, store: Store) -> None:
        """Write a heartbeat. The store must not be used by another thread at the same time."""
        self._holder = self._holder.next()
        store.log(self._run_id, tags={names.LEASE: self._holder.dump()})

    def release(self) -> None:
        """Let go."""
        self._store.set_once(self._run_id, names.experiment_released(self.number), "released")

    def _wait_for_the_end_of(self, holder: Holder, number: int, say: Callable[[str], None]) -> None:
        """Return when a holder has let go or is known to be gone; raise where it is there."""
        where = f"process {holder.pid} on {holder.host}"
        there = ConfigError(
            f"the experiment {self._name} is being run by {where}; wait for it, or give this one another name"
        )
        gone = self._is_me(holder) or is_gone(holder)  # may not be known
        if gone is not None:
            if not gone:
                raise there
            return
        run = self._store.run(self._run_id)
        beat, since_s = _beat(run, holder), self._clock()
        say(f"looking for five minutes whether {where} is still at it")
        while self._clock() - since_s < DEAD_AFTER_S:
            self._sleep(_LOOK_S)
            run = self._store.run(self._run_id)
            if names.experiment_released(number) in run.data.params:
                return
            if _beat(run, holder) != beat:
                raise there

    def _is_me(self, holder: Holder) -> bool:
        """Return whether a lease is this process's own, left because MLflow was away at its release.

        A process runs an experiment once at a time (`lock`), so that it is not in use.
        """
        this, that = (replace(each, token="", beat=0, flow_run_id="") for each in (self._holder, holder))
        return this == that


@contextmanager
def leased(
    tracking_uri: str, run_id: str, name: str, *, flow_run_id: str = "", say: Callable[[str], None] = lambda _: None
) -> Iterator[Lease]:
    """Hold the lease of an experiment for the block, and say so every 30 s.

    Args:
        tracking_uri: Where its runs are.
        run_id: Its run.
        name: The experiment.
        flow_run_id: The Prefect flow run that wants it.
        say: Told when it takes a while.

    Raises:
        ConfigError: another process has it.
    """
    lease = Lease(Store(tracking_uri, patience_s=10.0), run_id, name, holder=this_process(flow_run_id=flow_run_id))
    lease.take(say)
    over = threading.Event()
    beats = threading.Thread(
        target=_keep_saying_so, args=(lease, Store(tracking_uri), over), name="zeus-flows-experiment", daemon=True
    )
    beats.start()
    try:
        yield lease
    finally:
        over.set()
        beats.join(timeout=5.0)
        with suppress(StoreError):  # whoever comes next waits for this process to be gone
            lease.release()


def _keep_saying_so(lease: Lease, store: Store, over: threading.Event, every_s: float = HEARTBEAT_S) -> None:
    while not over.wait(every_s):
        with suppress(StoreError):  # MLflow may be away; the next beat will do
            lease.beat(store)


def _last(params: Mapping[str, str]) -> tuple[int, Holder | None]:
    """Return the number of the newest holder, and who it is."""
    numbers = (names.experiment_holder_number(name) for name in params)
    last = max((number for number in numbers if number is not None), default=0)
    return last, read_holder(params[names.experiment_holder(last)]) if last else None


def _beat(run: Run, holder: Holder) -> int:
    said = read_holder(run.data.tags.get(names.LEASE, ""))
    return said.beat if said is not None and said.token == holder.token else 0
