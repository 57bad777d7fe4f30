"""`lookahead`, the most frugal: run what is expected to pay, counting what a run would teach.

For every candidate the expected cost J of trying it now is weighed (its own cost up to the best cut, a run of the
incumbent where it is stopped, less what a cheaper arm would save over the horizon) against simply running the
incumbent: a knowledge gradient. Where none pays, an arm that nothing has ruled out may get a look.
"""

from __future__ import annotations

from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.job import Job
from zeus_flows.core.policy import outlook as shared_belief
from zeus_flows.core.policy.base import Choice, Policy, View
from zeus_flows.core.policy.trials import best_look, best_trial


class Lookahead(shared_belief.OnSharedBelief):
    """Knowledge gradient on the belief of `zeus_flows.core.belief`."""

    def choose(self, job: Job, belief: EpochsBelief, view: View) -> Choice:
        """Return the candidate that is expected to pay most, or the incumbent where none does."""
        outlook = shared_belief.Outlook(job, belief, view)
        forced = shared_belief.without_exploring(outlook)
        if forced is not None:
            return forced
        trial = best_trial(outlook, outlook.candidates) or best_look(outlook)
        return trial or shared_belief.exploit(outlook, uncut=False, why="; no other is expected to pay for being tried")


_: Policy[EpochsBelief] = Lookahead()
