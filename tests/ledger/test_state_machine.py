"""Decide, report, duplicate, kill, sweep, restart in any order: the ledger against a model of what it acknowledged."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.builders import JOB, decision, observation
from zeus_flows.core import policy
from zeus_flows.core.records import EnergySource, Gap, Observation
from zeus_flows.errors import AlreadyObserved, DeclaredDead, StoreError
from zeus_flows.ledger import janitor
from zeus_flows.ledger.janitor import sweep
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.memory import MemoryLedger, MemoryStore
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.outbox import Outbox
from zeus_flows.ledger.protocol import Ledger

picks = st.integers(min_value=0, max_value=1_000)
#: Others with every run: `make test` prints the seed that repeats them.
SETTINGS = settings(max_examples=8, stateful_step_count=18, suppress_health_check=list(HealthCheck))


class LedgerMachine(RuleBasedStateMachine):
    """Each recurrence is a process of its own; the model knows what was acknowledged to it."""

    def __init__(self, open_ledger: Callable[[int], Ledger], sweep_up: Callable[[set[int]], None] | None) -> None:
        super().__init__()
        self._open, self._sweep_up = open_ledger, sweep_up
        self.reader = open_ledger(0)
        self.processes: dict[int, Ledger] = {}  # recurrence -> its process's ledger
        self.attempts: dict[tuple[int, int], str] = {}
        self.acknowledged: dict[tuple[int, int], Observation] = {}
        self.dead: set[int] = set()
        self.buried: set[tuple[int, int]] = set()
        self.ended: set[int] = set()
        self.closed_dead: set[int] = set()

    @property
    def flying(self) -> list[tuple[int, int]]:
        return sorted(self.attempts.keys() - self.acknowledged.keys() - self.buried)

    @rule(batch_size=st.sampled_from(JOB.batch_sizes))
    def decide(self, batch_size: int) -> None:
        ledger = self._open(len(self.processes) + 1)
        number = ledger.begin()
        assert number == len(self.processes) + 1, "numbers are given out once, without a gap"
        self.processes[number] = ledger
        attempt = ledger.decided(decision(number, batch_size=batch_size, explores=True), {})
        self.attempts[number, 1] = attempt

    @precondition(lambda self: self.acknowledged)
    @rule(pick=picks)
    def decide_again(self, pick: int) -> None:
        number, attempt = sorted(self.acknowledged)[pick % len(self.acknowledged)]
        if (number, attempt + 1) in self.attempts:
            with pytest.raises(StoreError):
                self._open(99).decided(decision(number, attempt + 1, batch_size=128, seed=99), {})
        elif number in self.ended and self._sweep_up:
            with pytest.raises(DeclaredDead):
                self.processes[number].decided(decision(number, attempt + 1), {})
            self.attempts[number, attempt + 1] = "void"
            self.buried.add((number, attempt + 1))
        elif number not in self.ended:
            self.attempts[number, attempt + 1] = self.processes[number].decided(decision(number, attempt + 1), {})

    @precondition(lambda self: self.flying)
    @rule(pick=picks, energy_j=st.floats(min_value=1.0, max_value=1e6))
    def report(self, pick: int, energy_j: float) -> None:
        number, attempt = self.flying[pick % len(self.flying)]
        observed = observation(number, attempt, energy_j=energy_j)
        self.processes[number].observed(self.attempts[number, attempt], observed)
        self.acknowledged[number, attempt] = observed

    @precondition(lambda self: self.acknowledged)
    @rule(pick=picks)
    def report_twice(self, pick: int) -> None:
        order = sorted(self.acknowledged)[pick % len(self.acknowledged)]
        observed = self.acknowledged[order]
        self._open(99).observed(self.attempts[order], observed)
        with pytest.raises(AlreadyObserved):
            self._open(99).observed(self.attempts[order], replace(observed, energy_j=observed.energy_j + 1))

    @precondition(lambda self: self.processes)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        number = 1 + pick % len(self.processes)
        if not any(r == number for r, _ in self.flying):
            self.processes[number].ended(number, ())
            self.ended.add(number)

    @precondition(lambda self: self.flying and self._sweep_up)
    @rule(pick=picks)
    def kill(self, pick: int) -> None:
        self.dead.add(self.flying[pick % len(self.flying)][0])

    @precondition(lambda self: self._sweep_up)
    @rule()
    def sweep(self) -> None:
        assert self._sweep_up is not None
        self._sweep_up(self.dead)
        buried = {order for order in self.flying if order[0] in self.dead}
        for order in buried:
            with pytest.raises(AlreadyObserved):
                self.processes[order[0]].observed(self.attempts[order], observation(*order))
        self.buried |= buried
        self.closed_dead |= self.dead - self.ended
        self.ended |= self.dead
        left = {f.recurrence for f in self.reader.history().in_flight}
        assert not left & self.dead, "the next recurrence explores on"

    @rule()
    def restart(self) -> None:
        self.reader = self._open(0)

    @invariant()
    def the_state_is_the_fold_of_what_was_acknowledged(self) -> None:
        history = self.reader.history()
        gaps = [Gap(r, skipped=False) for r in self.closed_dead - {r for r, _ in self.acknowledged}]
        assert history.state == policy.fold(JOB, self.acknowledged.values(), gaps)
        assert history.under_way == tuple(sorted(self.processes.keys() - self.ended))
        if self._sweep_up:
            assert sorted(self.reader.gaps(), key=lambda gap: gap.recurrence) == sorted(
                gaps, key=lambda gap: gap.recurrence
            )
        assert sorted((f.recurrence, f.attempt) for f in history.in_flight) == self.flying

    def teardown(self) -> None:
        read = self._open(0).observations()
        assert read == tuple(self.acknowledged[order] for order in sorted(self.acknowledged))
        if isinstance(self.reader, MlflowLedger):
            assert self.reader.verify() == (True, len(self.acknowledged))


def test_the_ledger_in_memory_does_as_the_model() -> None:
    def machine() -> LedgerMachine:
        store = MemoryStore()
        return LedgerMachine(lambda _: MemoryLedger(JOB, EnergySource.SIMULATED, store), None)

    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=50, stateful_step_count=40))  # type: ignore[arg-type]


def test_the_ledger_on_sqlite_does_as_the_model(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, me = Outbox(tmp_path / "state"), this_process()

    def machine() -> LedgerMachine:
        job = replace(JOB, name=f"nightly-{uuid.uuid4().hex[:8]}")

        def opened(pid: int) -> MlflowLedger:
            holder = replace(me, token=uuid.uuid4().hex, pid=pid)
            return MlflowLedger(job, Store(sqlite_uri), EnergySource.SIMULATED, holder=holder)

        def sweep_up(dead: set[int]) -> None:
            def is_gone(holder: Holder) -> bool:
                return holder.pid in dead

            monkeypatch.setattr(janitor, "is_gone", is_gone)
            sweep(opened(0), outbox)

        return LedgerMachine(opened, sweep_up)

    run_state_machine_as_test(machine, settings=SETTINGS)  # type: ignore[arg-type]
    outbox.close()
