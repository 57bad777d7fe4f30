"""What an era comes to: the default's energy, time and cost, what was saved by which means, and how sure that is.

With D(b, p) the expected cost of a run to the target (`core.expected`), the lines are, added up over the
recurrences in which something might be changed:

    power limit   D(b0, before) - D(b0, best)       or clocks, where these are tuned
    batch size    D(b0, best) - D(b*, best)         b*: the cheapest by what is known now
    learning      D(b*, best) - what ran, as expected, with profiling, stopped and out-of-memory attempts
    luck          what is left of the total

The total is the default less what ran. Where b0 ran itself, the default's epochs are known: they are that run's own.
Only for the others the mean of b0's runs stands in, and only there the total is in doubt: with M of them and n0 runs
of b0, by the scatter of one run times sqrt(M^2 / n0 + M). The same goes for the comparison with b0 at its best setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zeus_flows.core.account import Account, Era, Settled, tunes_batch_size
from zeus_flows.core.amounts import NOTHING, Amount, Ran, Took
from zeus_flows.core.expected import Epochs, Known, Profiles, RunCosts, RunTotals, best_batch_size, costs_on, epochs_of
from zeus_flows.core.gaussian import Floats
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.power_profile import Knob, knob_of

BATCH_SIZE, LEARNING, LUCK, TOTAL = "batch size", "learning", "luck", "total"
#: The line of each knob.
BY_KNOB = {knob: knob.words for knob in Knob}
POWER_LIMIT = BY_KNOB[Knob.POWER_LIMIT]
#: The total against b0 at its best setting: what tuning the knob alone would have left to be saved.
POWER_ONLY = "power only"

#: Run-to-run scatter of epochs before any was seen, and how many degrees of freedom that expectation is worth.
SCATTER, SCATTER_WEIGHT = 0.1, 6.0
#: Variance of rounding to whole epochs, in epochs squared.
ROUNDING = 1 / 12
#: How far off a profile's speed and power are at one setting, after a few measured seconds (and the best one was chosen
#: by them); and what a run took, as it was read.
PROFILED_TO, READ_TO = 0.011, 0.005


def scatter(account: Account, era: Era) -> tuple[float, float]:
    """Return the variance of one run's log epochs, pooled over batch sizes and eras, and its degrees of freedom."""
    squares, free = _squares(era)
    squares, free = squares + account.closed.squares, free + account.closed.free
    return (SCATTER_WEIGHT * SCATTER**2 + squares) / (SCATTER_WEIGHT + free), SCATTER_WEIGHT + free


def _squares(era: Era) -> tuple[float, float]:
    """Return the sum of squared deviations of log epochs from their batch size's mean, and its degrees of freedom."""
    runs = era.scatter.values()
    return math.fsum(r.squares for r in runs), math.fsum(max(r.count - 1, 0) for r in runs)


def settle(job: Job, account: Account, era: Era, *, profiles: Profiles, overheads: Known) -> Settled:
    """Return the comparison of one era with the default, as far as it is known now."""
    squares, free = _squares(era)
    epochs = epochs_of(era)
    if job.default_batch_size not in epochs:
        unknown = _all(era, {r.gpu for r in era.ran.values()})
        return Settled(not_compared=era.not_whole, unknown=unknown, squares=squares, free=free)
    gpus = tuple(dict.fromkeys(r.gpu for r in era.ran.values()))
    books = _Books(job, epochs, scatter(account, era)[0], gpus)
    elsewhere = set()
    for gpu in gpus:
        costs = costs_on(job, account, era, gpu, profiles=profiles, overheads=overheads)
        if costs.knows(job.default_batch_size):
            books.add(costs, era.stopped.get(gpu, NOTHING) + era.out_of_memory.get(gpu, NOTHING))
        else:
            elsewhere.add(gpu)
    not_compared = era.not_whole + _all(era, elsewhere)
    return replace(books.settled(era), not_compared=not_compared, squares=squares, free=free)


def forecast(
    job: Job, account: Account, era: Era, gpu: str, *, profiles: Profiles, overheads: Known
) -> tuple[Settled, int, float | None] | None:
    """Return one expected run of the best batch size at its best setting against one of the default; these two too.

    None where the default is not known on this GPU.
    """
    epochs, data = epochs_of(era), account.samples_per_epoch
    costs = costs_on(job, account, era, gpu, profiles=profiles, overheads=overheads)
    b0 = job.default_batch_size
    if b0 not in epochs or not costs.knows(b0) or not data:
        return None
    tuned = job.mode is Mode.OBSERVE or not any(r.changed and r.setting is None for r in costs.ran)
    best = best_batch_size(job, costs, epochs, data=data, tuned=tuned) if tunes_batch_size(job) else b0
    books = _Books(job, epochs, scatter(account, era)[0], (gpu,))
    default_setting, best_setting = (costs.best.get(b0), costs.best.get(best)) if tuned else (None, None)
    run = Ran(best, gpu, best_setting, profiled=False, changed=True, runs=1, data=data)
    books.forecast(costs, run, default_setting=default_setting)
    return books.settled(era), best, best_setting if best_setting is not None else costs.before


def _all(era: Era, gpus: set[str]) -> Took:
    """Return what all recurrences on some GPUs took."""
    runs = [Took(r.runs, r.energy_j, r.time_s, r.host_j) for r in era.ran.values() if r.gpu in gpus]
    attempts = [took for sums in (era.stopped, era.out_of_memory) for gpu, took in sums.items() if gpu in gpus]
    beside = sum(attempts, NOTHING)
    return sum(runs, NOTHING) + Took(0, beside.energy_j, beside.time_s, beside.host_j)


class _Books:
    """Adds an era up, GPU by GPU.

    A line is a sum of expected costs, so its error is linear in the relative errors that those share: of a batch
    size's mean epochs, and of a profile at one setting. `_leans` holds how much of a line each of them moves;
    `_alone` adds up the variance of what single runs do.
    """

    def __init__(self, job: Job, epochs: Mapping[int, Epochs], scatter: float, gpus: Sequence[str]) -> None:
        self._job, self._epochs, self._scatter = job, epochs, scatter
        self._sums = {name: np.zeros(4) for name in (*(BY_KNOB[knob_of(gpu)] for gpu in gpus), BATCH_SIZE, LEARNING)}
        names = (*self._sums, LUCK, TOTAL, POWER_ONLY)
        self._leans: dict[str, dict[_Error, Floats]] = {name: {} for name in names}
        self._alone = {name: np.zeros(4) for name in names}
        self.baselines, self.spent = {TOTAL: np.zeros(4), POWER_ONLY: np.zeros(4)}, np.zeros(4)
        self.recurrences = self.unchanged = 0

    def add(self, costs: RunCosts, attempts: Took) -> None:
        """Add the recurrences on one GPU, with their attempts that were stopped or did not fit."""
        best = self._best(costs)
        self._sums[LEARNING] -= costs.took(attempts)
        self.spent += costs.took(attempts)
        for ran in costs.ran:
            self._add(costs, ran, best)

    def forecast(self, costs: RunCosts, run: Ran, *, default_setting: float | None) -> None:
        """Add one run that is only expected; b0's best setting goes with it."""
        b0, by_knob = self._job.default_batch_size, BY_KNOB[knob_of(run.gpu)]
        before = self._expect(costs, run, b0, None, {by_knob: 1, TOTAL: 1})
        at_best = self._expect(costs, run, b0, default_setting, {by_knob: -1, BATCH_SIZE: 1, POWER_ONLY: 1})
        ours = {BATCH_SIZE: -1, TOTAL: -1, POWER_ONLY: -1}
        cheapest = self._expect(costs, run, run.batch_size, run.setting, ours)
        self._sums[by_knob] += before - at_best
        self._sums[BATCH_SIZE] += at_best - cheapest
        self.baselines, self.spent, self.recurrences = {TOTAL: before, POWER_ONLY: at_best}, cheapest, 1

    def settled(self, era: Era) -> Settled:
        """Return the era's lines, their total and their doubt."""
        against = {name: baseline - self.spent for name, baseline in self.baselines.items()}
        lines = {**self._sums, LUCK: against[TOTAL] - sum(self._sums.values()), **against}
        variances = {
            name: sum((self._variance(error) * lean**2 for error, lean in leans.items()), self._alone[name])
            for name, leans in self._leans.items()
        }
        return Settled(
            recurrences=self.recurrences,
            unchanged=self.unchanged,
            controls=era.controls,
            default_runs=self._epochs[self._job.default_batch_size].runs,
            baseline=Amount(*self.baselines[TOTAL].tolist()),
            spent=Amount(*self.spent.tolist()),
            lines={name: Amount(*values.tolist()) for name, values in lines.items()},
            variances={name: Amount(*values.tolist()) for name, values in variances.items()},
        )

    def _variance(self, error: _Error) -> float:
        return PROFILED_TO**2 if error.of != "epochs" else self._scatter / self._epochs[error.batch_size].runs

    def _best(self, costs: RunCosts) -> int:
        runs = sum(r.runs for r in costs.ran)
        data = sum(r.data for r in costs.ran) / runs
        tuned = any(r.changed and r.setting is not None for r in costs.ran)
        return best_batch_size(self._job, costs, self._epochs, data=data, tuned=tuned)

    def _add(self, costs: RunCosts, ran: Ran, best: int) -> None:
        b0, b, actual = self._job.default_batch_size, ran.batch_size, costs.took(ran)
        self.recurrences += ran.runs
        self.spent += actual
        own = costs.takes(b, ran.setting, RunTotals.of(ran))
        assert own is not None
        profiling = self._profiling(costs, ran, actual, own)
        self._sums[LEARNING] -= profiling
        if not ran.changed:
            self.unchanged += ran.runs
            for baseline in self.baselines.values():
                baseline += actual - profiling
            return
        tuned, by_knob = ran.setting is not None, BY_KNOB[knob_of(ran.gpu)]
        best_settings = (costs.best.get(b0), costs.best.get(best)) if tuned else (None, None)
        before = self._expect(costs, ran, b0, None, {by_knob: 1})
        at_best = self._expect(costs, ran, b0, best_settings[0], {by_knob: -1, BATCH_SIZE: 1})
        cheapest = self._expect(costs, ran, best, best_settings[1], {BATCH_SIZE: -1, LEARNING: 1})
        expected = self._expect(costs, ran, b, ran.setting, {LEARNING: -1})
        self._sums[by_knob] += before - at_best
        self._sums[BATCH_SIZE] += at_best - cheapest
        self._sums[LEARNING] += cheapest - expected
        for name, setting, instead in ((TOTAL, None, before), (POWER_ONLY, best_settings[0], at_best)):
            if b == b0:
                default = costs.takes(b0, setting, RunTotals.of(ran))
                assert default is not None
                self.baselines[name] += actual - profiling + default - own
                self._lean_on_profile(name, costs, ran.gpu, b0, setting, default)
                self._lean_on_profile(name, costs, ran.gpu, b0, ran.setting, -own)
            else:
                self.baselines[name] += instead
                self._lean_on_profile(name, costs, ran.gpu, b0, setting, instead)
        self._doubt_single_runs(costs, ran, tuned_setting=best_settings[0])

    def _profiling(self, costs: RunCosts, ran: Ran, actual: Floats, own: Floats) -> Floats:
        """Return what profiling took more than training would have, and note how far off that may be.

        It is what runs took above what is expected of them: not less than nothing, nor more than all that was spent
        while profiling.
        """
        if not ran.profiled or ran.batch_size not in costs.profiles:
            return np.zeros(4)
        host_j = ran.host_j * ran.profiling_s / ran.time_s if ran.time_s else 0.0
        most = costs.figures(ran.profiling_j, ran.profiling_s, host_j) if ran.profiling_j else np.full(4, math.inf)
        expected_to = math.hypot(READ_TO, math.sqrt(2) * PROFILED_TO if ran.batch_size not in costs.scaled_by else 0.0)
        at_home = not ran.changed or ran.batch_size == self._job.default_batch_size
        error = np.minimum(expected_to * own / math.sqrt(ran.runs), most / 2)
        for name in (LEARNING, *((TOTAL, POWER_ONLY) if at_home else (LUCK,))):
            self._alone[name] += error**2
        return np.minimum(np.maximum(actual - own, 0.0), most)

    def _expect(
        self, costs: RunCosts, ran: Ran, batch_size: int, setting: float | None, lines: Mapping[str, int]
    ) -> Floats:
        """Return what as many runs of a batch size are expected to take, and note which lines lean on that."""
        work = self._epochs[batch_size].work(ran.runs, ran.data)
        grows, expected = costs.grows(batch_size, setting, work), costs.takes(batch_size, setting, work)
        assert expected is not None
        for name, sign in lines.items():
            self._lean(name, _Error(batch_size), sign * grows)
            self._lean_on_profile(name, costs, ran.gpu, batch_size, setting, sign * expected)
        return expected

    def _doubt_single_runs(self, costs: RunCosts, ran: Ran, *, tuned_setting: float | None) -> None:
        """Add what cannot be known of single runs: the default's epochs, had it run in their place.

        Luck is shared as far as it can be: the default would have trained on the same data. What is left is that the
        same luck costs the default more or less, and that epochs are whole.
        """
        b0, b, n = self._job.default_batch_size, ran.batch_size, ran.runs
        default = costs.grows(b0, None, self._epochs[b0].work(1, ran.data / n))
        own = costs.grows(b, ran.setting, self._epochs[b].work(1, ran.data / n))
        if b == b0:
            self._lean(LUCK, _Error(b0), n * (default - own))
            return
        rounded = (default / self._epochs[b0].epochs) ** 2 + (own / self._epochs[b].epochs) ** 2
        self._alone[LUCK] += n * (self._scatter * (default - own) ** 2 + ROUNDING * rounded + (READ_TO * own) ** 2)
        tuned = costs.grows(b0, tuned_setting, self._epochs[b0].work(1, ran.data / n))
        for name, one in ((TOTAL, default), (POWER_ONLY, tuned)):
            self._alone[name] += n * self._scatter * one**2
            self._lean(name, _Error(b0), n * one)

    def _lean_on_profile(
        self, name: str, costs: RunCosts, gpu: str, batch_size: int, setting: float | None, amount: Floats
    ) -> None:
        """Note that a line holds an amount by profile; where it is scaled to runs, errors there go the other way."""
        at_setting = costs.setting_at(batch_size, setting)
        if at_setting is None:
            return
        gpu_j = amount[0] - amount[3]
        by_power = np.array([gpu_j, 0.0, costs.rates.eta * gpu_j, 0.0])
        shares = [(at_setting, 1.0), *((w, -share) for w, share in costs.scaled_by.get(batch_size, {}).items())]
        for w, share in shares:
            self._lean(name, _Error(batch_size, gpu, w, "speed"), share * amount)
            self._lean(name, _Error(batch_size, gpu, w, "power"), share * by_power)

    def _lean(self, name: str, error: _Error, amount: Floats) -> None:
        self._leans[name][error] = self._leans[name].get(error, np.zeros(4)) + amount


class _Error(NamedTuple):
    """A relative error that amounts share: of mean epochs, or of a profile's speed or power at one limit on one GPU."""

    batch_size: int
    gpu: str = ""
    setting: float | None = None
    of: str = "epochs"
