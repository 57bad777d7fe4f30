"""What was saved against the default: b0 at the power limit that was there before, trained to the same target.

The fold keeps an `Account` (`advance`, `skip`, `killed`, `close`); `savings` tells from it what may be said, each
figure with an interval that holds the truth nine times in ten. The default need not run again and again to be compared
with: what it would have taken comes from b0's runs of the same era and b0's profile, for each recurrence's own amount
of data. Where b0 has not run since epochs changed, the baseline is not known, and is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scipy.special import stdtrit

from zeus_flows.core.account import Account, Era, Settled, booked, given_up, tunes_batch_size
from zeus_flows.core.amounts import NO_AMOUNT, Amount, Took
from zeus_flows.core.cost import price
from zeus_flows.core.expected import Known, Profiles, costs_on
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.json import jsonable
from zeus_flows.core.power_profile import Knob, knob_of
from zeus_flows.core.records import EnergySource, Observation
from zeus_flows.core.settle import (
    BATCH_SIZE,
    BY_KNOB,
    LEARNING,
    LUCK,
    POWER_LIMIT,
    POWER_ONLY,
    TOTAL,
    forecast,
    scatter,
    settle,
)

__all__ = [
    "BATCH_SIZE",
    "LEARNING",
    "LUCK",
    "POWER_LIMIT",
    "POWER_ONLY",
    "TOTAL",
    "Account",
    "Amount",
    "Apart",
    "Baseline",
    "Compared",
    "Line",
    "Savings",
    "Tally",
    "advance",
    "close",
    "document",
    "killed",
    "savings",
    "skip",
    "without_joules",
]

COVERAGE = 0.9  # of every interval
_ROUNDING = 1e-9  # a share of the baseline below which an amount is nothing but rounding


@dataclass(frozen=True, slots=True)
class Line:
    """A saving with its interval; negative where the default would have taken less."""

    name: str
    amount: Amount
    low: Amount
    high: Amount


@dataclass(frozen=True, slots=True)
class Compared:
    """Recurrences against what the default would have taken.

    Attributes:
        recurrences: How many.
        baseline: What the default would have taken.
        total: What was saved in all.
        lines: By what; they add up to the total.
        power_only: What was saved against the default batch size at its best limit, had only that been tuned.
    """

    recurrences: int
    baseline: Amount
    total: Line
    lines: tuple[Line, ...] = ()
    power_only: Line | None = None

    @property
    def spent(self) -> Amount:
        """What the recurrences took."""
        return self.baseline - self.total.amount

    def line(self, name: str) -> Line | None:
        """Return the line of that name; None where the job has none."""
        return next((line for line in self.lines if line.name == name), None)


@dataclass(frozen=True, slots=True)
class Tally:
    """A number of recurrences or attempts, and what they took."""

    count: int = 0
    took: Amount = NO_AMOUNT


@dataclass(frozen=True, slots=True)
class Apart:
    """What is in no saving.

    Attributes:
        lost: Recurrences that did not reach the target: failed, killed, cancelled, given up.
        failed: Attempts that failed in recurrences that then reached it.
        skipped: Recurrences that a drift gate skipped; what its evaluation took.
        not_compared: Recurrences on GPUs on which the default is not known, or not measured completely.
        unknown: Recurrences since epochs changed and before the default ran again.
    """

    lost: Tally = Tally()
    failed: Tally = Tally()
    skipped: Tally = Tally()
    not_compared: Tally = Tally()
    unknown: Tally = Tally()


@dataclass(frozen=True, slots=True)
class Baseline:
    """What savings are measured against, on the newest GPU, and what is best there.

    Attributes:
        batch_size: b0.
        setting: The setting that was there before, per GPU; None where it is not known.
        runs: Runs of b0 that reached the target, in the eras that are compared.
        controls: How many of them were control runs.
        unchanged: Recurrences in which nothing was to be changed; control runs are among them.
        best_batch_size: b*; None where nothing can be said.
        best_setting: Its best setting; None where it has no profile.
        knob: What they are settings of.
    """

    batch_size: int
    setting: float | None = None
    runs: int = 0
    controls: int = 0
    unchanged: int = 0
    best_batch_size: int | None = None
    best_setting: float | None = None
    knob: Knob = Knob.POWER_LIMIT


@dataclass(frozen=True, slots=True)
class Savings:
    """What was saved, and what may be said beside it.

    Attributes:
        mode: How much the job may change now.
        energy_source: Where the joules come from; simulated ones must be shown as such.
        in_seconds: There are no joules: energies are 0, and costs are seconds.
        default: What it is measured against.
        so_far: All recurrences that can be compared; None where none can.
        from_now_on: One run of the best batch size at its best limit against the default, as expected.
        apart: What is in no saving.
        unknown_since: The recurrence since which the baseline is not known; None where it is.
        why: Why it is not; empty where it is.
    """

    mode: Mode
    energy_source: EnergySource
    in_seconds: bool
    default: Baseline
    so_far: Compared | None
    from_now_on: Compared | None
    apart: Apart
    unknown_since: int | None = None
    why: str = ""


def advance(
    job: Job,
    account: Account,
    observation: Observation,
    *,
    profiles: Profiles,
    overheads: Known,
    boundary: int = 0,
) -> Account:
    """Return the account after one more observation, which must come after those before: (recurrence, attempt).

    Args:
        job: Whose.
        account: Before.
        observation: What happened.
        profiles: What is known of power limits after it, by (batch size, GPU).
        overheads: What runs take beside their steps, likewise.
        boundary: How many of the newest runs that reached the target began a new era: 0, this one, or 2 where the one
            before it was the first of two surprises.
    """
    account, reached = booked(job, account, observation)
    if reached is None:
        return account
    before = account.newest
    if boundary:
        ended, kept = (before, None) if boundary == 1 else (None, before)
        account = close(job, replace(account, newest=ended), profiles=profiles, overheads=overheads)
        before = kept
    return replace(account, era=account.era.add(before), newest=reached)


def close(job: Job, account: Account, *, profiles: Profiles, overheads: Known) -> Account:
    """Return the account with the present era ended: what is known now settles it."""
    era = account.era.add(account.newest)
    if not era.first:
        return account
    closed = account.closed + settle(job, account, era, profiles=profiles, overheads=overheads)
    return replace(account, closed=closed, era=Era(), newest=None)


def skip(account: Account, *, time_s: float = 0.0, energy_j: float = 0.0) -> Account:
    """Return the account after a recurrence that a drift gate skipped; its evaluation took that."""
    return replace(account, skipped=account.skipped + Took(1, energy_j, time_s))


def killed(account: Account) -> Account:
    """Return the account after a recurrence of which nothing was observed."""
    return replace(account, lost=account.lost + Took(1))


def savings(job: Job, account: Account, *, profiles: Profiles, overheads: Known) -> Savings:
    """Return the savings as far as they are known now."""
    account, era = given_up(account), account.era.add(account.newest)
    now = settle(job, account, era, profiles=profiles, overheads=overheads)
    known = account.closed + now
    quantile = float(stdtrit(scatter(account, era)[1], 0.5 + COVERAGE / 2))
    costs = costs_on(job, account, era, account.gpu, profiles=profiles, overheads=overheads)
    ahead = forecast(job, account, era, account.gpu, profiles=profiles, overheads=overheads)
    why, since = _unknown(job, account, era, now)
    limits = account.gpu not in account.without_limits
    tuned = (BY_KNOB[knob_of(account.gpu)],) if limits else ()
    once_tuned = [name for name in BY_KNOB.values() if known.lines.get(name, NO_AMOUNT) != NO_AMOUNT]
    lines = (*dict.fromkeys((*tuned, *once_tuned)), BATCH_SIZE, LEARNING, LUCK)
    return Savings(
        mode=job.mode,
        energy_source=account.energy_source,
        in_seconds=job.in_seconds,
        default=Baseline(
            job.default_batch_size,
            setting=costs.before if limits else None,
            runs=known.default_runs,
            controls=known.controls,
            unchanged=known.unchanged,
            best_batch_size=None if ahead is None else ahead[1],
            best_setting=None if ahead is None or not limits else ahead[2],
            knob=knob_of(account.gpu),
        ),
        so_far=_compared(job, known, quantile, lines) if known.recurrences else None,
        from_now_on=None if ahead is None else _compared(job, ahead[0], quantile, (*tuned, BATCH_SIZE)),
        apart=_apart(job, account, known),
        unknown_since=since,
        why=why,
    )


def document(saved: Savings) -> dict[str, Any]:
    """Return the savings as JSON values; without joules where there are none."""
    plain: dict[str, Any] = without_joules(jsonable(saved)) if saved.in_seconds else jsonable(saved)
    return plain


def without_joules(value: Any) -> Any:
    """Return a JSON document without energies, and with costs named as the seconds that they are.

    >>> without_joules({"energy_j": 0.0, "cost_j": 60.0, "arms": [{"expected_cost_j": 50.0}]})
    {'cost_s': 60.0, 'arms': [{'expected_cost_s': 50.0}]}
    """
    if isinstance(value, list):
        return [without_joules(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    plain = {k: without_joules(v) for k, v in value.items()}
    cost = ("cost_j", "gain_j", "threshold_j", "at_most_j", "room_j", "saved_j")
    named = {f"{k[:-2]}_s" if k.endswith(cost) else k: v for k, v in plain.items()}
    return {k: v for k, v in named.items() if not k.endswith("_j")}


def _compared(job: Job, known: Settled, quantile: float, names: tuple[str, ...]) -> Compared:
    lines = []
    for name in (*names, POWER_ONLY, TOTAL):
        variances = known.variances.get(name, NO_AMOUNT)
        errors = [quantile * math.sqrt(max(variance, 0.0)) for variance in variances.figures]
        lines.append(_line(job, name, known.lines.get(name, NO_AMOUNT), Amount(*errors), known.baseline))
    *parts, power_only, total = lines
    shown = [p for p in parts if p.name != BATCH_SIZE or tunes_batch_size(job) or p.amount != NO_AMOUNT]
    baseline = _shown(job, known.baseline, known.baseline)
    return Compared(known.recurrences, baseline, total, tuple(shown), power_only)


def _line(job: Job, name: str, amount: Amount, error: Amount, scale: Amount) -> Line:
    return Line(
        name,
        _shown(job, amount, scale),
        _shown(job, amount - error, scale),
        _shown(job, amount + error, scale),
    )


def _shown(job: Job, amount: Amount, scale: Amount) -> Amount:
    """Return an amount without what is only rounding, and without joules where there are none."""
    pairs = zip(amount.figures, scale.figures, strict=True)
    clean = Amount(*(value if abs(value) > _ROUNDING * abs(of) else 0.0 for value, of in pairs))
    return replace(clean, energy_j=0.0, host_j=0.0) if job.in_seconds else clean


def _unknown(job: Job, account: Account, era: Era, now: Settled) -> tuple[str, int | None]:
    """Return why the baseline is not known, and since which recurrence; nothing where it is."""
    b0 = job.default_batch_size
    if now.recurrences or not era.first:
        return ("" if now.recurrences or account.closed.recurrences else "no recurrence has reached the target", None)
    if now.unknown.count:
        changed = " since epochs changed" if _has_ended(account.closed) else ""
        return f"batch size {b0} has not reached the target{changed}", era.first
    if not now.not_compared.count:
        return "", None
    return f"batch size {b0} was not measured on {account.gpu}, or not completely", era.first


def _has_ended(closed: Settled) -> bool:
    return bool(closed.recurrences or closed.unknown.count or closed.not_compared.count)


def _apart(job: Job, account: Account, known: Settled) -> Apart:
    rates = price(job, account.max_power_w.get(account.gpu, 0.0))

    def tally(took: Took) -> Tally:
        energy_j = took.energy_j + took.host_j
        amount = Amount(energy_j, took.time_s, rates.of(energy_j, took.time_s), took.host_j)
        return Tally(took.count, _shown(job, amount, NO_AMOUNT))

    return Apart(
        lost=tally(account.lost),
        failed=tally(account.failed),
        skipped=tally(account.skipped),
        not_compared=tally(known.not_compared),
        unknown=tally(known.unknown),
    )
