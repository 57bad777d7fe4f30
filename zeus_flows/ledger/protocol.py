"""What a ledger promises.

A ledger belongs to one job and one energy source. It stores decisions and observations and nothing else, and
gives back the policy's state as their fold.

* A recurrence number is given out once.
* An attempt has one decision, written before `decided` returns, and at most one observation.
* The fold's order is (recurrence, attempt), whatever order observations arrive in.
* Attempts with a decision and no observation are in flight; they are named, never guessed at.
* A recurrence that a drift gate skips has ended, and has no attempt. The fold passes over it, in its place; so it does
  over one that was declared dead with nothing observed.
* Only observations with the job's fingerprint and the ledger's energy source are folded.

A ledger is used by one thread at a time; several processes may each hold one on the same store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.policy import State
from zeus_flows.core.records import Decision, Gap, InFlight, Observation


@dataclass(frozen=True, slots=True)
class SetAside:
    """What was observed before and is not comparable any more.

    Attributes:
        observations: How many.
        why: What changed.

    >>> SetAside(12, "the target changed from accuracy >= 0.9 to accuracy >= 0.92").text
    '12 observations of earlier recurrences do not count: the target changed from accuracy >= 0.9 to accuracy >= 0.92'
    """

    observations: int
    why: str

    @property
    def text(self) -> str:
        """It as a sentence."""
        what = "1 observation of an earlier recurrence does"
        if self.observations != 1:
            what = f"{self.observations} observations of earlier recurrences do"
        return f"{what} not count: {self.why}"


@dataclass(frozen=True, slots=True)
class History:
    """What a decision is taken on.

    Attributes:
        state: The fold of what was observed; empty where it is degraded.
        in_flight: Attempts with a decision and no observation.
        degraded: The store could not be read.
        under_way: Recurrences that have begun and not ended, ascending; whoever asks is among them.
        set_aside: What stopped counting when the current drift window began, where that is why it began.
    """

    state: State
    in_flight: tuple[InFlight, ...] = ()
    degraded: bool = False
    under_way: tuple[int, ...] = ()
    set_aside: SetAside | None = None


class Ledger(Protocol):
    """The store of one job's decisions and observations."""

    def begin(self) -> int:
        """Take the next recurrence number."""

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""

    def asked(self, recurrence: int, context: Mapping[str, str]) -> str:
        """Write that a recurrence's drift gate is being asked; return an id for what it finds."""

    def gated(self, check_id: str, check: GateCheck) -> None:
        """Write what the gate found. Where it skips the recurrence, nothing will be added to that."""

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision; return the attempt's id. `context` is for people (links, names); what is empty is left out.

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

    def ended(self, recurrence: int, observations: Sequence[Observation]) -> None:
        """Say that nothing will be added to a recurrence, and write its point of the series.

        Args:
            recurrence: Its number.
            observations: Of all its attempts; empty where it broke off, and then has no point.
        """

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order. Grows with the history: for reports."""

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over, in its order. Grows with the history, too."""
