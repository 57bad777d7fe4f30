"""`thompson`, the default: Thompson sampling on the shared belief.

A cost is drawn for every arm that was profiled, jointly, from what is believed of all of them; the cheapest draw
runs. Draws are tempered: plain Thompson sampling explores for a horizon longer than most jobs live. An arm that was
never profiled has no cost to draw yet: it is tried where that is expected to pay, as `lookahead` reckons it. Where the
best known arm draws the least cost, another may get a look (`core.policy.trials`).
"""

from __future__ import annotations

from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.job import Job
from zeus_flows.core.policy import outlook as shared_belief
from zeus_flows.core.policy.base import Choice, Policy, View, from_log
from zeus_flows.core.policy.trials import best_look, best_trial, trial_cut
from zeus_flows.core.reasons import Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times

TEMPER = 0.5  # draws deviate by this share of the belief's standard deviation


class Thompson(shared_belief.OnSharedBelief):
    """Thompson sampling on the belief of `zeus_flows.core.belief`."""

    def choose(self, job: Job, belief: EpochsBelief, view: View) -> Choice:
        """Return the arm whose drawn cost is least."""
        outlook = shared_belief.Outlook(job, belief, view)
        forced = shared_belief.without_exploring(outlook)
        if forced is not None:
            return forced
        trial = best_trial(outlook, [a for a in outlook.candidates if outlook.unprofiled[a]])
        if trial is not None:
            return trial
        sampled = self._sample(outlook)
        return sampled if sampled.explores else best_look(outlook) or sampled

    def _sample(self, outlook: shared_belief.Outlook) -> Choice:
        job, belief, view, best = outlook.job, outlook.belief, outlook.view, outlook.incumbent
        assert best is not None
        drawn = outlook.mu + TEMPER * outlook.root @ view.rng.standard_normal(len(outlook.mu))
        contenders = [*(a for a in outlook.candidates if not outlook.unprofiled[a]), best]
        logs = drawn.tolist()
        arm = min(contenders, key=logs.__getitem__)
        batch_size, runs = job.batch_sizes[arm], belief.runs[arm]
        drawn_j, best_j = from_log(logs[arm]), from_log(logs[best])
        kind = ReasonKind.EXPLOIT if arm == best else ReasonKind.RETRY if view.ask.attempt > 1 else ReasonKind.EXPLORE

        def tell() -> Explanation:
            if arm == best:
                text = f"batch size {batch_size}, the best known, drew the least cost ({cost_text(job, drawn_j)}); "
            else:
                text = (
                    f"batch size {batch_size} drew the least cost ({cost_text(job, drawn_j)} against "
                    f"{cost_text(job, best_j)} for {job.batch_sizes[best]}, the best known); "
                )
            text += (
                f"{times(runs)} so far"
                if runs
                else f"no run has reached the target with it {'since epochs changed' if belief.resets else 'yet'}"
            )
            return text + outlook.law, outlook.arms(drawn=drawn)

        numbers = {**shared_belief.numbers(outlook), "drawn_cost_j": drawn_j, "drawn_best_cost_j": best_j}
        return Choice(
            batch_size,
            Reason.later(kind, tell, numbers),
            cut=trial_cut(outlook, arm),
            explores=arm != best,
            run_cost=lambda: outlook.run_cost(arm),
        )


_: Policy[EpochsBelief] = Thompson()
