"""`default` and `power`: what batch-size tuning is measured against. Both always run the default batch size."""

from __future__ import annotations

from dataclasses import dataclass

from zeus_flows.core.job import Job
from zeus_flows.core.policy.base import Choice, Lesson, Policy, View
from zeus_flows.core.reasons import Reason, ReasonKind


@dataclass(frozen=True, slots=True)
class NoBelief:
    """Nothing to learn."""


class Default:
    """The default batch size at the limit the GPU has: no tuning at all."""

    belief_type = NoBelief

    def initial(self, job: Job) -> NoBelief:
        """Return nothing."""
        return NoBelief()

    def learn(self, job: Job, belief: NoBelief, lesson: Lesson) -> NoBelief:
        """Learn nothing."""
        return belief

    def choose(self, job: Job, belief: NoBelief, view: View) -> Choice:
        """Return the default batch size."""
        text = f"this policy always runs the default batch size {view.default}, at the power limit the GPU has"
        return Choice(view.default, Reason(ReasonKind.BASELINE, text), tune_power=False)


class Power(Default):
    """The default batch size at its best power limit: the safe first stage."""

    def choose(self, job: Job, belief: NoBelief, view: View) -> Choice:
        """Return the default batch size, its power limit to be tuned."""
        text = f"this policy always runs the default batch size {view.default}, at its best power limit"
        return Choice(view.default, Reason(ReasonKind.BASELINE, text))


_: tuple[Policy[NoBelief], Policy[NoBelief]] = (Default(), Power())
