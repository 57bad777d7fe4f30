"""What a ledger promises.

A ledger belongs to one job and one energy source. It stores decisions and observations and nothing else, and
gives back the policy's state as their fold.

* A recurrence number is given out once.
* An attempt has one decision, written before `decided` returns, and at most one observation.
* The fold's order is (recurrence, attempt), whatever order observations arrive in.
* Attempts with a decision and no observation are in flight; they are named, never guessed at.
* Only observations with the job's fingerprint and the ledger's energy source are folded.

A ledger is used by one thread at a time; several processes may each hold one on the same store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeus_flows.core.policy import State
from zeus_flows.core.records import Decision, InFlight, Observation


@dataclass(frozen=True, slots=True)
class History:
    """What a decision is taken on."""

    state: State
    in_flight: tuple[InFlight, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One epoch of an attempt: cumulative energy and time, the metric reported, the limit in force."""

    epoch: int
    energy_j: float
    time_s: float
    power_limit_w: float | None = None
    metric: float | None = None


class Ledger(Protocol):
    """The store of one job's decisions and observations."""

    def begin(self) -> int:
        """Take the next recurrence number."""

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision; return the attempt's id. `context` is tags for people (links, names).

        Raises:
            StoreError: the attempt has a decision already.
        """

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought."""

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Write an attempt's outcome.

        Raises:
            AlreadyObserved: it has a different one already; nothing was changed.
            UnknownAttempt: it has no decision.
        """

    def ended(self, observations: Sequence[Observation]) -> None:
        """Write a recurrence's point of the series, from the observations of all its attempts."""

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order. Grows with the history: for reports."""
