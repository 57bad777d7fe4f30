"""`lookahead`, the most frugal: run what is expected to pay, counting what a run would teach.

For every candidate the expected cost J of trying it now is weighed (its own cost up to the best cut, a run of the
incumbent where it is stopped, less what a cheaper arm would save over the horizon) against simply running the
incumbent: a knowledge gradient.
"""

from __future__ import annotations

import numpy as np

from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.early_stop import Floats, plan_many
from zeus_flows.core.policy import shared_belief
from zeus_flows.core.policy.base import LARGEST_LOG, Choice, Lesson, Policy, View, from_log, joules, times
from zeus_flows.core.records import Job, Reason

_POINTS, _WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Lookahead:
    """Knowledge gradient on the belief of `zeus_flows.core.belief`."""

    belief_type = EpochsBelief

    def initial(self, job: Job) -> EpochsBelief:
        """Return the belief before any observation."""
        return EpochsBelief.empty(job.batch_sizes, job.default_batch_size)

    def learn(self, job: Job, belief: EpochsBelief, lesson: Lesson) -> EpochsBelief:
        """Return the belief after one more lesson."""
        return shared_belief.learn(job, belief, lesson)

    def choose(self, job: Job, belief: EpochsBelief, view: View) -> Choice:
        """Return the candidate that is expected to pay most, or the incumbent where none does."""
        outlook = shared_belief.Outlook(job, belief, view)
        if outlook.incumbent is None:
            return shared_belief.without_incumbent(outlook)
        retries = view.ask.attempt - 1
        if retries > shared_belief.EXPLORING_RETRIES:
            return shared_belief.exploit(
                outlook, uncut=True, kind="retry", why="; it runs without an early stop, so that this recurrence ends"
            )
        candidates = outlook.candidates
        if not view.may_explore or not len(candidates):
            return shared_belief.exploit(outlook, uncut=False)
        best_j = outlook.best_cost_j
        expected = expected_costs(outlook)
        cheapest = int(expected.argmin())
        if expected[cheapest] >= best_j:
            return shared_belief.exploit(outlook, uncut=False, why="; no other is expected to pay for being tried")
        arm = int(candidates[cheapest])
        batch_size = job.batch_sizes[arm]
        gain_j = best_j - float(expected[cheapest])
        cost_j = from_log(float(outlook.mu[arm]))
        text = (
            f"trying batch size {batch_size} is expected to pay by {joules(gain_j)} within {outlook.horizon:.0f} "
            f"recurrences: a run is believed to cost about {joules(cost_j)} (give or take "
            f"{100 * float(outlook.deviation[arm]):.0f} %) against {joules(best_j)} for "
            f"{job.batch_sizes[outlook.incumbent]}, the best known; {times(belief.runs[arm])} so far"
        )
        gains = {int(c): best_j - float(j) for c, j in zip(candidates, expected, strict=True)}
        return Choice(
            batch_size,
            Reason(
                "retry" if retries else "explore",
                text,
                arms=outlook.arms(gains=gains),
                numbers={**shared_belief.numbers(outlook), "gain_j": gain_j},
            ),
            cut=outlook.planned_cut(arm),
            explores=True,
        )


def expected_costs(outlook: shared_belief.Outlook) -> Floats:
    """Return J of every candidate, in joules: averaged over the epoch cost where it has not been measured."""
    at = outlook.candidates
    epochs = outlook.belief.posterior
    mean, covariance = outlook.costs
    deviation = np.sqrt(np.maximum(covariance.diagonal()[at], 0.0))
    per_epoch = np.exp(np.minimum(mean[at][:, None] + deviation[:, None] * _POINTS, LARGEST_LOG))
    _, planned = plan_many(
        log_epochs=epochs.mean[at][:, None],
        variance=epochs.variance[at][:, None],
        noise=epochs.noise[at][:, None],
        never=outlook.never[at][:, None],
        epoch_cost_j=per_epoch,
        best_cost_j=outlook.best_cost_j,
        horizon=outlook.horizon,
        max_epochs=outlook.job.max_epochs,
    )
    measured = outlook.view.epoch_costs
    unprofiled = np.array([outlook.job.batch_sizes[i] not in measured for i in at], dtype=float)
    profiling = (outlook.belief.profiling_ratio - 1) * unprofiled[:, None] * per_epoch
    expected: Floats = (planned + profiling) @ _WEIGHTS
    return expected


_: Policy[EpochsBelief] = Lookahead()
