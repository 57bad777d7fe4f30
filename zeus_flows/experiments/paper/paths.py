"""Figures that follow single searches: which batch sizes and power limits a policy tries, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from zeus_flows.core.cost import price
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.experiments.paper.replays import Say, recurrences_of, settled_at
from zeus_flows.experiments.paper.result import Chart, ChartKind, Claim, Result
from zeus_flows.experiments.paper.sweeps import configurations
from zeus_flows.experiments.replay.replaying import LAST, Replay, replay, replay_job
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.recurrence.loop import Recurrence

ROUNDS = 2  # of pruning: Zeus tries each batch size twice, to see how costs vary
PATH_COLUMNS = ("workload", "policy", "recurrence", "batch size", "limit (W)", "regret")


def _followed(trace: Trace, policy: str, seed: int) -> tuple[Replay, list[Recurrence]]:
    """Replay a policy; return the recurrences themselves too."""
    seen: list[Recurrence] = []
    count = recurrences_of(trace)
    return replay(trace, replay_job(trace, policy), recurrences=count, seed=seed, watch=seen.append), seen


def chosen(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figure 4: the batch size of each attempt of one recurring job: pruning first, then draws."""
    rows: list[tuple[str, int, int, str, str]] = []
    twice = []
    for trace in traces:
        say(f"{trace.workload}, zeus-paper")
        pruned: Counter[int] = Counter()
        for done in _followed(trace, "zeus-paper", 0)[1]:
            for attempt, observation in done.attempts:
                pruning = attempt.decision.reason.kind in (ReasonKind.PRUNING, ReasonKind.FIRST_RUN)
                pruned[observation.batch_size] += pruning and observation.converged
                stage = "pruning" if pruning else "Thompson sampling"
                outcome = str(observation.outcome)
                rows.append((trace.workload, done.number, observation.batch_size, stage, outcome))
        left = {b for workload, _, b, stage, _ in rows if workload == trace.workload and stage != "pruning"}
        twice += [pruned[b] for b in left]
    claim = Claim(
        "each batch size that is left was explored twice while pruning",
        f"{ROUNDS} times",
        f"{min(twice)} to {max(twice)} times" if min(twice) != max(twice) else f"{twice[0]} times",
        "0",
        set(twice) == {ROUNDS},
    )
    columns = ("workload", "recurrence", "batch size", "stage", "outcome")
    chart = Chart(ChartKind.POINTS, "recurrence", "batch size", "stage", "workload")
    return Result(columns, tuple(rows), chart, (claim,))


def search(traces: Sequence[Trace], seeds: int, say: Say, *, policies: Sequence[str]) -> Result:
    """Figures 8, 20 and 21: the walk of one search over a map of every configuration's regret.

    The map (recurrence 0) has each configuration's expected cost over the best one's, less 1. The walk is the first
    seed's, by the last attempt of each recurrence; the claims are about all seeds.
    """
    rows: list[tuple[str, str, int, int, float, float]] = []
    ends: dict[str, list[int]] = {policy: [] for policy in policies}
    missed: dict[str, list[bool]] = {policy: [] for policy in policies}
    for trace in traces:
        costs = price(replay_job(trace, policies[0]), trace.gpu.max_power_w)
        cost_of = {(c.batch_size, c.power_limit_w): costs.of(c.energy_j, c.time_s) for c in configurations(trace)}
        best = min(cost_of, key=cost_of.__getitem__)
        regret = {at: round(cost / cost_of[best] - 1, 4) for at, cost in cost_of.items()}
        for policy in policies:
            say(f"{trace.workload}, {policy}")
            rows += [(trace.workload, policy, 0, b, w, value) for (b, w), value in regret.items()]
            for seed in range(seeds):
                run, walk = _followed(trace, policy, seed)
                steps = [(o.batch_size, o.setting or 0.0) for r in walk for o in [r.attempts[-1][1]]]
                ends[policy].append(settled_at(run))
                missed[policy].append(Counter(steps[-LAST:]).most_common(1)[0][0] != best)
                if not seed:
                    shown = [(n, b, w, regret.get((b, w), np.inf)) for n, (b, w) in enumerate(steps, start=1)]
                    rows += [(trace.workload, policy, n, b, w, value) for n, b, w, value in shown]
    claims = []
    if "grid" in policies:
        claims.append(_astray(missed["grid"]))
    if "zeus-paper" in policies:
        claims.append(_arrives(ends["zeus-paper"], missed["zeus-paper"]))
    if {"grid", "zeus-paper"} <= set(policies):
        claims.append(_sooner(ends))
    chart = Chart(ChartKind.PATH, "batch size", "limit (W)", "", "policy" if len(policies) > 1 else "workload")
    return Result(PATH_COLUMNS, tuple(rows), chart, tuple(claims))


def _sooner(ends: dict[str, list[int]]) -> Claim:
    zeus, grid = (float(np.mean(ends[policy])) for policy in ("zeus-paper", "grid"))
    ours = f"after {zeus:.0f} recurrences against {grid:.0f} in the mean"
    return Claim("Zeus converges sooner than Grid", "much faster", ours, "sooner", zeus < grid)


def _astray(missed: Sequence[bool]) -> Claim:
    ours = f"{sum(missed)} of {len(missed)} searches"
    return Claim("Grid may end elsewhere than at the best configuration", "it may", ours, "any search", any(missed))


def _arrives(ends: Sequence[int], missed: Sequence[bool]) -> Claim:
    there, after = len(missed) - sum(missed), float(np.mean(ends))
    ours = f"{there} of {len(missed)} searches, after {after:.0f} recurrences in the mean"
    return Claim("Zeus ends at the best configuration", "it does", ours, "9 of 10", there >= 0.9 * len(missed))
