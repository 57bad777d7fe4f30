"""The ledger's in-memory twin: for tests, trace replay and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeus_flows.core import policy
from zeus_flows.core.records import Decision, EnergySource, InFlight, Job, Observation
from zeus_flows.errors import AlreadyObserved, StoreError, UnknownAttempt
from zeus_flows.ledger.protocol import EpochReport, History, Ledger


class MemoryLedger:
    """A ledger in a dict, folded one observation at a time while no earlier attempt is open.

    Args:
        job: Whose ledger this is.
        energy_source: Observations of other sources are kept and not folded.
        observations: What has been observed before.
    """

    def __init__(self, job: Job, energy_source: EnergySource, observations: tuple[Observation, ...] = ()) -> None:
        self._job = job
        self._energy_source = energy_source
        self._last = max((o.recurrence for o in observations), default=0)
        self._open: dict[str, Decision] = {}
        self._closed: dict[str, Observation] = {_attempt_id(*o.order): o for o in observations}
        self.epochs: dict[str, list[EpochReport]] = {}
        self._folded = policy.fold(job, self.observations())
        self._folded_to = max((o.order for o in observations), default=(0, 0))
        self._late = False

    def begin(self) -> int:
        """Take the next recurrence number."""
        self._last += 1
        return self._last

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""
        if self._late:
            self._folded = policy.fold(self._job, self.observations())
            self._late = False
        in_flight = tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in self._open.values())
        return History(self._folded, in_flight)

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision; return the attempt's id."""
        attempt_id = _attempt_id(decision.recurrence, decision.attempt)
        if attempt_id in self._open or attempt_id in self._closed:
            raise StoreError(f"attempt {attempt_id} of {self._job.name} has a decision already")
        self._open[attempt_id] = decision
        return attempt_id

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought."""
        self.epochs.setdefault(attempt_id, []).append(report)

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Write an attempt's outcome."""
        closed = self._closed.get(attempt_id)
        if closed == observation:
            return
        if closed is not None:
            raise AlreadyObserved(f"attempt {attempt_id} of {self._job.name} has its observation")
        if attempt_id not in self._open:
            raise UnknownAttempt(f"attempt {attempt_id} of {self._job.name} has no decision")
        del self._open[attempt_id]
        self._closed[attempt_id] = observation
        if not self._counts(observation):
            return
        if observation.order < self._folded_to:
            self._late = True  # it came after a later one: the next reader folds anew, in order
        else:
            self._folded = policy.advance(self._job, self._folded, observation)
            self._folded_to = observation.order

    def ended(self, observations: Sequence[Observation]) -> None:
        """Nothing to write: the series is the observations."""

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order."""
        return tuple(sorted((o for o in self._closed.values() if self._counts(o)), key=lambda o: o.order))

    def _counts(self, observation: Observation) -> bool:
        return (observation.fingerprint, observation.energy_source) == (self._job.fingerprint, self._energy_source)


def _attempt_id(recurrence: int, attempt: int) -> str:
    return f"{recurrence}.{attempt}"


def _conforms(ledger: MemoryLedger) -> Ledger:
    return ledger
