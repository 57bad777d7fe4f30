"""The fold of a history whose observations arrive out of order, in memory that finished recurrences do not fill."""

from __future__ import annotations

from bisect import bisect_left

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.records import Observation


class OrderedFold:
    """Folds observations in the order (recurrence, attempt), whatever order they arrive in, as every ledger does.

    Only what may still be overtaken is kept: observations after the oldest recurrence that has not ended.

    Args:
        job: Whose history it is.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._base = policy.initial(job, account=False)
        self._tail: list[Observation] = []
        self._states: list[policy.State] = []  # after each observation of the tail, as far as they are up to date

    def add(self, observation: Observation) -> None:
        """Take an observation, into its place."""
        if not self._tail or observation.order > self._tail[-1].order:
            self._tail.append(observation)
            return
        at = bisect_left(self._tail, observation.order, key=lambda o: o.order)
        self._tail.insert(at, observation)
        del self._states[at:]

    def state(self) -> policy.State:
        """Return the fold of all that was taken."""
        for observation in self._tail[len(self._states) :]:
            before = self._states[-1] if self._states else self._base
            self._states.append(policy.advance(self._job, before, observation))
        return self._states[-1] if self._states else self._base

    def settle(self, oldest: int) -> None:
        """Forget observations of recurrences before `oldest`, the first that may still bring some; the fold stays."""
        settled = 0
        while settled < len(self._tail) and self._tail[settled].recurrence < oldest:
            settled += 1
        if settled:
            self.state()
            self._base = self._states[settled - 1]
            del self._tail[:settled], self._states[:settled]

    def __len__(self) -> int:
        """How many observations are kept."""
        return len(self._tail)
