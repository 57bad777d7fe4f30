"""What an era comes to: the default's energy, time and cost, what was saved by which means, and how sure that is.

D(b, p) is the expected cost of a run to the target: mean epochs of b in this era, at what an epoch takes by profile
and overheads (or by what runs took, where there is no profile). Epochs do not depend on the GPU, so all runs count for
them; costs are by GPU, and scaled to what the batch size's runs took where they did not profile.

The lines, added up over the recurrences in which something might be changed:

    power limit   D(b0, before) - D(b0, best)
    batch size    D(b0, best) - D(b*, best)         b*: the cheapest by what is known now
    learning      D(b*, best) - what ran, as expected, with profiling, stopped and out-of-memory attempts
    luck          what is left of the total

The total is the default less what ran. Where b0 ran itself, the default's epochs are known: they are that run's own.
Only for the others the mean of b0's runs stands in, and only there the total is in doubt: with M of them and n0 runs
of b0, by the scatter of one run times sqrt(M^2 / n0 + M).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from zeus_flows.core.account import NOTHING, Account, Amount, Era, Ran, Settled, Took
from zeus_flows.core.cost import Price, price
from zeus_flows.core.early_stop import Floats
from zeus_flows.core.overheads import NOTHING as NO_OVERHEADS
from zeus_flows.core.overheads import Overheads, nearest
from zeus_flows.core.power import best_limit, run_at
from zeus_flows.core.records import Job, Mode, PowerProfile

Profiles = Mapping[tuple[int, str], PowerProfile]  # by (batch size, Gpu.key)
Known = Mapping[tuple[int, str], Overheads]

POWER_LIMIT, BATCH_SIZE, LEARNING, LUCK, TOTAL = "power limit", "batch size", "learning", "luck", "total"
LINES = (POWER_LIMIT, BATCH_SIZE, LEARNING, LUCK)

#: Run-to-run scatter of epochs before any was seen, and how many degrees of freedom that expectation is worth.
SCATTER, SCATTER_WEIGHT = 0.1, 6.0
#: Variance of rounding to whole epochs, in epochs squared.
ROUNDING = 1 / 12
#: How far off a profile is at one power limit, after a few measured seconds; and what a run took, as it was read.
PROFILED_TO, READ_TO = 0.014, 0.005


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: so many runs, their epochs, samples and evaluations, each added up."""

    runs: float = 0.0
    epochs: float = 0.0
    samples: float = 0.0
    evaluations: float = 0.0

    @classmethod
    def of(cls, ran: Ran) -> Work:
        """Return what runs did."""
        return cls(ran.runs, ran.epochs, ran.samples, ran.evaluations)


@dataclass(frozen=True, slots=True)
class Epochs:
    """What runs of one batch size took on average, in this era."""

    runs: int
    epochs: float
    evaluations: float

    def work(self, runs: float, data: float) -> Work:
        """Return what so many runs are expected to do, with data sets of that size in all."""
        return Work(runs, runs * self.epochs, data * self.epochs, runs * self.evaluations)


@dataclass(frozen=True, slots=True)
class Costs:
    """What runs take on one GPU; figures are energy, time, cost and the host's energy.

    Attributes:
        rates: Prices of joules and seconds.
        before_w: The power limit that was there before; None where it is not known.
        ran: The era's runs on this GPU.
        profiles: Complete profiles, by batch size.
        best_w: Their best limits.
        overheads: By batch size.
        host_w: What the machine draws beside its GPUs.
        scales: What runs took over what was expected of them, energy and time, by batch size.
        scaled_by: The shares of power limits in the runs that a batch size is scaled by.
    """

    rates: Price
    before_w: float | None
    ran: tuple[Ran, ...]
    profiles: Mapping[int, PowerProfile]
    best_w: Mapping[int, float]
    overheads: Mapping[int, Overheads]
    host_w: float
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    scaled_by: Mapping[int, Mapping[float, float]] = field(default_factory=dict)

    def figures(self, energy_j: float, time_s: float, host_j: float) -> Floats:
        """Return energy, time, cost and the host's energy."""
        all_j = energy_j + host_j
        return np.array([all_j, time_s, self.rates.of(all_j, time_s), host_j])

    def took(self, took: Took | Ran) -> Floats:
        """Return what something took."""
        return self.figures(took.energy_j, took.time_s, took.host_j)

    def takes(self, batch_size: int, limit_w: float | None, work: Work) -> Floats | None:
        """Return what work is expected to take at a power limit (None: the one before); None where that is unknown."""
        known = self._by_profile(batch_size, limit_w, work)
        if known is None:
            known = self._by_rate(batch_size, work)
            return None if known is None else self.figures(*known, self.host_w * known[1])
        energy, time = self.scales.get(batch_size, (1.0, 1.0))
        return self.figures(energy * known[0], time * known[1], self.host_w * time * known[1])

    def grows(self, batch_size: int, limit_w: float | None, work: Work) -> Floats:
        """Return what of it grows with the epochs: all but what a run takes once."""
        whole, once = self.takes(batch_size, limit_w, work), self.takes(batch_size, limit_w, Work(work.runs))
        return np.zeros(4) if whole is None or once is None else whole - once

    def knows(self, batch_size: int) -> bool:
        """Whether it can be said what runs of a batch size take here."""
        return self.takes(batch_size, None, Work(1, 1, 1, 0)) is not None

    def _by_profile(self, batch_size: int, limit_w: float | None, work: Work) -> tuple[float, float] | None:
        profile, at_w = self.profiles.get(batch_size), self.limit(batch_size, limit_w)
        if profile is None or at_w is None:
            return None
        at = nearest(profile, at_w)
        overheads = self.overheads.get(batch_size, NO_OVERHEADS)
        one = run_at(
            profile,
            at,
            epochs=work.epochs,
            evaluations=work.evaluations,
            samples_per_epoch=work.samples / work.epochs if work.epochs else 0.0,
            overheads=overheads,
        )
        more, once = work.runs - 1, overheads.once_each
        return one.energy_j + more * once.energy_j, one.time_s + more * once.time_s

    def _by_rate(self, batch_size: int, work: Work) -> tuple[float, float] | None:
        """Return what work takes by what runs took, where there is no profile."""
        alike = [r for r in self.ran if r.batch_size == batch_size]
        samples = sum(r.samples for r in alike)
        if not samples:
            return None
        share = work.samples / samples
        return share * sum(r.energy_j for r in alike), share * sum(r.time_s for r in alike)

    def limit(self, batch_size: int, limit_w: float | None) -> float | None:
        """Return the limit in the profile that stands for one (None: the one before); None without a profile."""
        if (profile := self.profiles.get(batch_size)) is None:
            return None
        limit_w = limit_w if limit_w is not None else self.before_w
        return nearest(profile, math.inf if limit_w is None else limit_w).power_limit_w

    def scaled(self) -> Costs:
        """Return them scaled to what runs took that did not profile; those of other batch sizes, where it has none."""
        pairs: dict[int, list[tuple[float, float, float, float]]] = {}
        limits: dict[int, dict[float, float]] = {}
        for r in self.ran:
            limit_w = self.limit(r.batch_size, r.limit_w)
            expected = None if r.profiled else self._by_profile(r.batch_size, r.limit_w, Work.of(r))
            if expected is not None and limit_w is not None:
                pairs.setdefault(r.batch_size, []).append((r.energy_j, expected[0], r.time_s, expected[1]))
                shares = limits.setdefault(r.batch_size, {})
                shares[limit_w] = shares.get(limit_w, 0.0) + expected[1]
        everything = [pair for alike in pairs.values() for pair in alike]
        return replace(
            self,
            scales={b: _ratios(pairs.get(b, everything)) for b in self.profiles},
            scaled_by={b: {w: t / sum(of.values()) for w, t in of.items()} for b, of in limits.items()},
        )


def _ratios(pairs: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return energy and time over what was expected of them; 1 where that is not known."""
    energy_j, expected_j, time_s, expected_s = (math.fsum(pair[i] for pair in pairs) for i in range(4))
    return (
        energy_j / expected_j if energy_j and expected_j else 1.0,
        time_s / expected_s if time_s and expected_s else 1.0,
    )


def costs_on(job: Job, account: Account, era: Era, gpu: str, *, profiles: Profiles, overheads: Known) -> Costs:
    """Return what runs take on one GPU, by what is known now."""
    complete = {b: p for (b, key), p in profiles.items() if key == gpu and p.complete and p.measurements}
    here = {b: o for (b, key), o in overheads.items() if key == gpu}
    ran = tuple(r for r in era.ran.values() if r.gpu == gpu)
    runs = sum(r.runs for r in ran)
    data = sum(r.data for r in ran) / runs if runs else account.samples_per_epoch or 1.0
    time_s = sum(r.time_s for r in ran)
    host_w = sum(r.host_j for r in ran) / time_s if time_s else max((o.host_w for o in here.values()), default=0.0)
    best_w = {
        b: best_limit(job, p, samples_per_epoch=data, overheads=here.get(b, NO_OVERHEADS)).power_limit_w
        for b, p in complete.items()
    }
    b0 = complete.get(job.default_batch_size)
    greatest_w = max((m.power_limit_w for m in b0.measurements), default=None) if b0 is not None else None
    return Costs(
        rates=price(job, account.max_power_w.get(gpu, 0.0)),
        before_w=account.before_w.get(gpu, greatest_w),
        ran=ran,
        profiles=complete,
        best_w=best_w,
        overheads=here,
        host_w=host_w,
    ).scaled()


def epochs_of(era: Era) -> dict[int, Epochs]:
    """Return what runs of each batch size took on average."""
    sums: dict[int, list[float]] = {}
    for r in era.ran.values():
        of_one = sums.setdefault(r.batch_size, [0, 0.0, 0.0])
        for i, value in enumerate((r.runs, r.epochs, r.evaluations)):
            of_one[i] += value
    return {b: Epochs(int(n), epochs / n, evaluations / n) for b, (n, epochs, evaluations) in sums.items()}


def best_batch_size(job: Job, costs: Costs, epochs: Mapping[int, Epochs], *, data: float, tuned: bool = True) -> int:
    """Return the batch size whose runs are expected to cost least, of those that reached the target in this era."""

    def cost(batch_size: int) -> float:
        limit_w = costs.best_w.get(batch_size) if tuned else None
        expected = costs.takes(batch_size, limit_w, epochs[batch_size].work(1, data))
        return math.inf if expected is None else float(expected[2])

    return min((b for b in epochs if b in job.batch_sizes or b == job.default_batch_size), key=lambda b: (cost(b), b))


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
    """Return what an era comes to, by what is known now."""
    squares, free = _squares(era)
    epochs = epochs_of(era)
    if job.default_batch_size not in epochs:
        unknown = _all(era, {r.gpu for r in era.ran.values()})
        return Settled(not_compared=era.not_whole, unknown=unknown, squares=squares, free=free)
    books = _Books(job, epochs, scatter(account, era)[0])
    elsewhere = set()
    for gpu in dict.fromkeys(r.gpu for r in era.ran.values()):
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
    """Return one expected run of the best batch size at its best limit against one of the default; these two too.

    None where the default is not known on this GPU.
    """
    epochs, data = epochs_of(era), account.samples_per_epoch
    costs = costs_on(job, account, era, gpu, profiles=profiles, overheads=overheads)
    b0 = job.default_batch_size
    if b0 not in epochs or not costs.knows(b0) or not data:
        return None
    tuned = job.mode is Mode.OBSERVE or not any(r.changed and r.limit_w is None for r in costs.ran)
    best = best_batch_size(job, costs, epochs, data=data, tuned=tuned) if tunes_batch_size(job) else b0
    books = _Books(job, epochs, scatter(account, era)[0])
    default_w, best_w = (costs.best_w.get(b0), costs.best_w.get(best)) if tuned else (None, None)
    run = Ran(best, gpu, best_w, profiled=False, changed=True, runs=1, data=data)
    books.forecast(costs, run, default_w=default_w)
    return books.settled(era), best, best_w if best_w is not None else costs.before_w


def tunes_batch_size(job: Job) -> bool:
    """Return whether the job tries batch sizes; in observe mode it tells of those that were tried before."""
    return job.mode is not Mode.POWER and len(job.batch_sizes) > 1 and job.policy not in ("power", "default")


def _all(era: Era, gpus: set[str]) -> Took:
    """Return what all recurrences on some GPUs took."""
    runs = [Took(r.runs, r.energy_j, r.time_s, r.host_j) for r in era.ran.values() if r.gpu in gpus]
    attempts = [took for sums in (era.stopped, era.out_of_memory) for gpu, took in sums.items() if gpu in gpus]
    beside = sum(attempts, NOTHING)
    return sum(runs, NOTHING) + Took(0, beside.energy_j, beside.time_s, beside.host_j)


class _Books:
    """Adds an era up, GPU by GPU.

    A line is a sum of expected costs, so its error is linear in the relative errors that those share: of a batch
    size's mean epochs, and of a profile at one power limit. `_leans` holds how much of a line each of them moves;
    `_alone` adds up the variance of what single runs do.
    """

    def __init__(self, job: Job, epochs: Mapping[int, Epochs], scatter: float) -> None:
        self._job, self._epochs, self._scatter = job, epochs, scatter
        self._sums = {name: np.zeros(4) for name in (POWER_LIMIT, BATCH_SIZE, LEARNING)}
        self._leans: dict[str, dict[_Error, Floats]] = {name: {} for name in (*LINES, TOTAL)}
        self._alone = {name: np.zeros(4) for name in (*LINES, TOTAL)}
        self.baseline, self.spent = np.zeros(4), np.zeros(4)
        self.recurrences = self.unchanged = 0

    def add(self, costs: Costs, attempts: Took) -> None:
        """Add the recurrences on one GPU, with their attempts that were stopped or did not fit."""
        best = self._best(costs)
        self._sums[LEARNING] -= costs.took(attempts)
        self.spent += costs.took(attempts)
        for ran in costs.ran:
            self._add(costs, ran, best)

    def forecast(self, costs: Costs, run: Ran, *, default_w: float | None) -> None:
        """Add one run that is only expected; b0's best limit goes with it."""
        b0 = self._job.default_batch_size
        before = self._expect(costs, run, b0, None, {POWER_LIMIT: 1, TOTAL: 1})
        at_best = self._expect(costs, run, b0, default_w, {POWER_LIMIT: -1, BATCH_SIZE: 1})
        cheapest = self._expect(costs, run, run.batch_size, run.limit_w, {BATCH_SIZE: -1, TOTAL: -1})
        self._sums[POWER_LIMIT] += before - at_best
        self._sums[BATCH_SIZE] += at_best - cheapest
        self.baseline, self.spent, self.recurrences = before, cheapest, 1

    def settled(self, era: Era) -> Settled:
        """Return what it all comes to."""
        total = self.baseline - self.spent
        lines = {**self._sums, LUCK: total - sum(self._sums.values()), TOTAL: total}
        variances = {
            name: sum((self._variance(error) * lean**2 for error, lean in leans.items()), self._alone[name])
            for name, leans in self._leans.items()
        }
        return Settled(
            recurrences=self.recurrences,
            unchanged=self.unchanged,
            controls=era.controls,
            default_runs=self._epochs[self._job.default_batch_size].runs,
            baseline=Amount(*self.baseline.tolist()),
            spent=Amount(*self.spent.tolist()),
            lines={name: Amount(*values.tolist()) for name, values in lines.items()},
            variances={name: Amount(*values.tolist()) for name, values in variances.items()},
        )

    def _variance(self, error: _Error) -> float:
        return PROFILED_TO**2 if error.limit_w is not None else self._scatter / self._epochs[error.batch_size].runs

    def _best(self, costs: Costs) -> int:
        runs = sum(r.runs for r in costs.ran)
        data = sum(r.data for r in costs.ran) / runs
        tuned = any(r.changed and r.limit_w is not None for r in costs.ran)
        return best_batch_size(self._job, costs, self._epochs, data=data, tuned=tuned)

    def _add(self, costs: Costs, ran: Ran, best: int) -> None:
        b0, b, actual = self._job.default_batch_size, ran.batch_size, costs.took(ran)
        self.recurrences += ran.runs
        self.spent += actual
        own = costs.takes(b, ran.limit_w, Work.of(ran))
        assert own is not None
        profiling = np.zeros(4)
        if ran.profiled and b in costs.profiles:
            profiling = np.maximum(actual - own, 0.0)
            self._sums[LEARNING] -= profiling
            self._lean_on_profile(LEARNING, costs, ran.gpu, b, ran.limit_w, own)
        if not ran.changed:
            self.unchanged += ran.runs
            self.baseline += actual - profiling
            if ran.profiled:
                self._lean_on_profile(TOTAL, costs, ran.gpu, b, ran.limit_w, own)
            return
        tuned = ran.limit_w is not None
        best_w = (costs.best_w.get(b0), costs.best_w.get(best)) if tuned else (None, None)
        before = self._expect(costs, ran, b0, None, {POWER_LIMIT: 1})
        at_best = self._expect(costs, ran, b0, best_w[0], {POWER_LIMIT: -1, BATCH_SIZE: 1})
        cheapest = self._expect(costs, ran, best, best_w[1], {BATCH_SIZE: -1, LEARNING: 1})
        expected = self._expect(costs, ran, b, ran.limit_w, {LEARNING: -1})
        self._sums[POWER_LIMIT] += before - at_best
        self._sums[BATCH_SIZE] += at_best - cheapest
        self._sums[LEARNING] += cheapest - expected
        if b == b0:
            default = costs.takes(b0, None, Work.of(ran))
            assert default is not None
            self.baseline += actual - profiling + default - own
            self._lean_on_profile(TOTAL, costs, ran.gpu, b0, None, default)
            self._lean_on_profile(
                TOTAL, costs, ran.gpu, b0, ran.limit_w, (ran.profiled - 1.0) * own - ran.profiled * own
            )
        else:
            self.baseline += before
            self._lean_on_profile(TOTAL, costs, ran.gpu, b0, None, before)
        self._doubt_single_runs(costs, ran)

    def _expect(
        self, costs: Costs, ran: Ran, batch_size: int, limit_w: float | None, lines: Mapping[str, int]
    ) -> Floats:
        """Return what as many runs of a batch size are expected to take, and note which lines lean on that."""
        work = self._epochs[batch_size].work(ran.runs, ran.data)
        grows, expected = costs.grows(batch_size, limit_w, work), costs.takes(batch_size, limit_w, work)
        assert expected is not None
        for name, sign in lines.items():
            self._lean(name, _Error(batch_size), sign * grows)
            self._lean_on_profile(name, costs, ran.gpu, batch_size, limit_w, sign * expected)
        return expected

    def _doubt_single_runs(self, costs: Costs, ran: Ran) -> None:
        """Add what cannot be known of single runs: the default's epochs, had it run in their place.

        Luck is shared as far as it can be: the default would have trained on the same data. What is left is that the
        same luck costs the default more or less, and that epochs are whole.
        """
        b0, b, n = self._job.default_batch_size, ran.batch_size, ran.runs
        default = costs.grows(b0, None, self._epochs[b0].work(1, ran.data / n))
        own = costs.grows(b, ran.limit_w, self._epochs[b].work(1, ran.data / n))
        if ran.profiled:
            read = n * (READ_TO * own) ** 2
            for name in (LEARNING, TOTAL if b == b0 else LUCK):
                self._alone[name] += read
        if b == b0:
            self._lean(LUCK, _Error(b0), n * (default - own))
            return
        rounded = (default / self._epochs[b0].epochs) ** 2 + (own / self._epochs[b].epochs) ** 2
        self._alone[LUCK] += n * (self._scatter * (default - own) ** 2 + ROUNDING * rounded)
        self._alone[TOTAL] += n * self._scatter * default**2
        self._lean(TOTAL, _Error(b0), n * default)

    def _lean_on_profile(
        self, name: str, costs: Costs, gpu: str, batch_size: int, limit_w: float | None, amount: Floats
    ) -> None:
        """Note that a line holds an amount by profile; scaled to runs at some limits, errors there go the other way."""
        at_w = costs.limit(batch_size, limit_w)
        if at_w is None:
            return
        self._lean(name, _Error(batch_size, gpu, at_w), amount)
        for scaled_w, share in costs.scaled_by.get(batch_size, {}).items():
            self._lean(name, _Error(batch_size, gpu, scaled_w), -share * amount)

    def _lean(self, name: str, error: _Error, amount: Floats) -> None:
        self._leans[name][error] = self._leans[name].get(error, np.zeros(4)) + amount


class _Error(NamedTuple):
    """A relative error that amounts share: of mean epochs, or of a profile at one limit on one GPU."""

    batch_size: int
    gpu: str = ""
    limit_w: float | None = None
