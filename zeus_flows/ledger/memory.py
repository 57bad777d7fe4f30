"""The ledger's in-memory twin: for tests, trace replay and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.records import Decision, EnergySource, Gap, InFlight, Observation
from zeus_flows.errors import AlreadyObserved, StoreError, UnknownAttempt
from zeus_flows.ledger.protocol import History, Ledger


@dataclass(slots=True)
class MemoryStore:
    """What several ledgers of one job may share, as they would share MLflow."""

    last: int = 0
    under_way: set[int] = field(default_factory=set)
    open: dict[str, Decision] = field(default_factory=dict)
    closed: dict[str, Observation] = field(default_factory=dict)
    epochs: dict[str, list[EpochReport]] = field(default_factory=dict)
    checks: dict[int, GateCheck] = field(default_factory=dict)
    gaps: dict[int, tuple[Gap, str, EnergySource]] = field(default_factory=dict)  # with whose recurrence it was


class MemoryLedger:
    """A ledger in dicts, folded one event at a time as long as they arrive in order.

    Args:
        job: Whose ledger this is.
        energy_source: Observations of other sources are kept and not folded.
        store: What it shares with other ledgers; one of its own by default.
        account: Keep what savings are told from; a replay has no use for it.
    """

    def __init__(
        self, job: Job, energy_source: EnergySource, store: MemoryStore | None = None, *, account: bool = True
    ) -> None:
        self._job, self._energy_source, self._account = job, energy_source, account
        self.store = store if store is not None else MemoryStore()
        self._state = policy.initial(job, account=account)
        self._folded = 0
        self._order = (0, 0)

    def begin(self) -> int:
        """Take the next recurrence number."""
        self.store.last += 1
        self.store.under_way.add(self.store.last)
        return self.store.last

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""
        if self._folded != self._events:
            observations, gaps = self.observations(), self.gaps()
            self._state = policy.fold(self._job, observations, gaps, account=self._account)
            self._folded = self._events
            self._order = max((*(o.order for o in observations), *((g.recurrence, 0) for g in gaps)), default=(0, 0))
        in_flight = [InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in self.store.open.values()]
        return History(self._state, tuple(in_flight), under_way=tuple(sorted(self.store.under_way)))

    def asked(self, recurrence: int, context: Mapping[str, str]) -> str:
        """Return an id for what the gate will find."""
        return f"gate {recurrence}"

    def gated(self, check_id: str, check: GateCheck) -> None:
        """Write what the gate found."""
        number = check.question.recurrence
        self.store.checks[number] = check
        if not check.skips or number in self.store.gaps:
            return
        gap = Gap(number, skipped=True, time_s=check.time_s, energy_j=check.energy_j)
        in_step = self._folded == self._events and (number, 0) > self._order
        self.store.gaps[number] = (gap, self._job.fingerprint, self._energy_source)
        self.store.under_way.discard(number)
        if in_step:  # else the next reader folds anew, in order
            self._state = policy.pass_over(self._job, self._state, gap)
            self._order = (number, 0)
            self._folded += 1

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision; return the attempt's id."""
        attempt_id = f"{decision.recurrence}.{decision.attempt}"
        if attempt_id in self.store.open or attempt_id in self.store.closed:
            raise StoreError(f"attempt {attempt_id} of {self._job.name} has a decision already")
        self.store.open[attempt_id] = decision
        return attempt_id

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought."""
        self.store.epochs.setdefault(attempt_id, []).append(report)

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Write an attempt's outcome."""
        closed = self.store.closed.get(attempt_id)
        if closed is not None:
            if closed == observation:
                return
            raise AlreadyObserved(f"attempt {attempt_id} of {self._job.name} has its observation")
        if self.store.open.pop(attempt_id, None) is None:
            raise UnknownAttempt(f"attempt {attempt_id} of {self._job.name} has no decision")
        order = observation.order
        in_step = self._folded == self._events and order > self._order
        self.store.closed[attempt_id] = observation
        if in_step:  # else the next reader folds anew, in order
            if self._counts(observation):
                self._state = policy.advance(self._job, self._state, observation)
                self._order = order
            self._folded += 1

    def ended(self, recurrence: int, observations: Sequence[Observation]) -> None:
        """Say that nothing will be added to a recurrence: the series is the observations."""
        self.store.under_way.discard(recurrence)

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order."""
        return tuple(sorted((o for o in self.store.closed.values() if self._counts(o)), key=lambda o: o.order))

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over, in its order."""
        mine = (self._job.fingerprint, self._energy_source)
        return tuple(gap for _, (gap, *whose) in sorted(self.store.gaps.items()) if tuple(whose) == mine)

    @property
    def _events(self) -> int:
        return len(self.store.closed) + len(self.store.gaps)

    def _counts(self, observation: Observation) -> bool:
        same = observation.fingerprint == self._job.fingerprint
        return same and observation.energy_source is self._energy_source


def _conforms(ledger: MemoryLedger) -> Ledger:
    return ledger
